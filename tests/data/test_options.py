"""What is refused when a data set is made, before anything is read; and what every one says of itself."""

import re

import pytest

from common.errors import DataError
from data.cifar10 import CIFAR10
from data.digits import Digits
from data.jsonl import Jsonl
from data.mnist import MNIST
from data.random_images import RandomImages
from data.random_regression import RandomRegression
from data.stdlib import Stdlib
from data.tokens import Tokens


@pytest.mark.parametrize(
    "kind, key, values",
    [
        (Stdlib, "seq_len", [0]),
        (Stdlib, "num_workers", [-1]),
        (Jsonl, "seq_len", [0]),
        (Jsonl, "field", ["", [], [""], ["a", 3], 7, None]),
        (Tokens, "seq_len", [0]),
        (Tokens, "vocab_size", [0]),
        (Tokens, "format", ["raw"]),
        (Tokens, "num_workers", [-1]),
        *((RandomImages, key, [0]) for key in ("samples", "image_size", "channels", "num_classes")),
        *((kind, "image_size", [0]) for kind in (MNIST, CIFAR10, Digits)),
        (RandomImages, "seed", [-1]),
        (RandomImages, "num_workers", [-1]),
        (RandomRegression, "samples", [0]),
        (RandomRegression, "in_features", [0]),
        (RandomRegression, "noise", [-1.0]),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_key(kind, key, values):
    root = {"root": "somewhere"} if kind in (Jsonl, Tokens) else {}
    for value in values:
        with pytest.raises(DataError, match=re.escape(f"data.{key}={value}")):
            kind(**root, **{key: value})


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"vocabulary": "letters"}, "data.vocabulary=letters is not one of gpt2, words"),
        ({"vocabulary": "words", "min_frequency": 0}, "data.min_frequency=0"),
        ({"vocabulary": "words", "max_vocabulary": 1}, "data.max_vocabulary=1"),
        ({"min_frequency": 3}, "data.min_frequency=3.*data.vocabulary=words"),
        ({"max_vocabulary": 99}, "data.max_vocabulary=99.*data.vocabulary=words"),
        ({"batchify": True}, "data.batchify=true needs data.columns"),
    ],
)
def test_options_of_text_that_do_not_fit_together_are_errors_that_name_the_key(bad, message):
    with pytest.raises(DataError, match=message):
        Stdlib(**bad)


@pytest.mark.parametrize("kind", [RandomImages, RandomRegression])
def test_data_that_is_not_language_has_no_vocabulary_and_no_sequence_length(kind):
    assert (kind().vocabulary, kind().vocab_size, kind().seq_len) == (None, None, None)
