"""What a model is computed on: batches as a function of (seed, step), and the data sets they are cut from.

    source.py       Source: samples by index                 data set -> samples
    shuffle.py      a keyed permutation without a list       step -> sample indices
    loader.py       train and evaluation batches, prefetched
    batch.py        what a step gets
    dataset.py      DataSet: what every `data=` option offers
    text.py wikitext2.py regression.py                       the `data=` options
    language.py     what the text options share: documents -> cached tokens -> windows
    documents.py vocabulary.py tokens.py cache.py            the four steps of that

The package knows of replicas no more than (dp_rank, dp_size), and imports nothing else of the project.
"""
