"""Batches as a function of (seed, step), and the data sets from which they are made.

    dataset.py      DataSet: the interface of every `data=` option. Source: samples by index. Batch: the data of a step
    loader.py       the samples of training and evaluation batches, in buckets of similar length
    read_ahead.py   reads batches before a step needs them, by a thread or by processes

    Data sets, each in the file of its name: torch_docs, stdlib, text, wikitext2, jsonl, parquet and tokens (language),
    random_images, digits, mnist, cifar10 and image_folder (images), random_regression and arrays (numbers), mixture

    language.py     the base of data sets of text: documents -> cached tokens -> windows
    documents.py vocabulary.py words.py token_windows.py     its steps
    prompts.py      rows of text, or of prompts and answers, as tokens
    templates.py    chat templates, rendered by a process with limits of time and memory
    images.py       the base of data sets of images
    tensors.py      data that are in memory already
    cache.py        folders that are built once; mapped files; downloads with a time limit

conf/data/NAME.yaml describes the options of a data set, with their defaults.

Of replicas this package only knows (dp_rank, dp_size), and of this project it only imports common.
"""

import common  # noqa: F401  it joins the user's modules with this package
