"""What a model is computed on: batches as a function of (seed, step), and the data sets they are cut from.

    source.py       Source: samples by index                 data set -> samples
    shuffle.py      a keyed permutation without a list       step -> sample indices
    loader.py       train and evaluation batches, prefetched
    batch.py        what a step gets
    dataset.py      DataSet: what every `data=` option offers
    text.py wikitext2.py jsonl.py shards.py                  the `data=` options: language
    random_images.py digits.py mnist.py cifar10.py           images
    regression.py                                            numbers
    language.py     what the text options share: documents -> cached tokens -> windows
    documents.py vocabulary.py words.py tokens.py cache.py   the steps of that
    spare.py disk.py  where cached data go when their disk is full; how that is said
    columns.py      the same tokens in order, side by side
    rows.py row_tokens.py buckets.py                         rows of JSON, their tokens, batches of like length
    images.py download.py                                    what the image options share

The package knows of replicas no more than (dp_rank, dp_size), and imports nothing else of the project (but, where it
downloads, the shim that makes torchvision import).
"""
