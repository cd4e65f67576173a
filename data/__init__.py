"""What a model is computed on: batches as a function of (seed, step), and the data sets that they are made of.

    dataset.py      DataSet: what every `data=` option offers. Source: samples by index. Batch: what a step gets
    loader.py       train and evaluation batches: which samples, in buckets of similar length, read ahead

    Data sets, each in the file of its name: torch_docs, stdlib, text, wikitext2, jsonl, parquet and tokens (language),
    random_images, digits, mnist, cifar10 and image_folder (images), random_regression (numbers)

    language.py     what data sets of text share: documents -> cached tokens -> windows
    documents.py vocabulary.py words.py token_windows.py     the steps of that
    prompts.py      rows of text, or of prompts and answers, as tokens
    templates.py    chat templates, rendered by a process with limits of time and memory
    images.py       what data sets of images share
    tensors.py      data that are in memory already
    cache.py        folders that are built once; mapped files; downloads with a time limit

What the options of a data set mean is said where they have their defaults: conf/data/NAME.yaml.

The package knows nothing of replicas but (dp_rank, dp_size), and imports nothing of this project but common.
"""
