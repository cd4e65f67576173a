"""Tokens on disk, and the samples cut from them."""

import pickle

import numpy as np
import pytest

from common.errors import DataError
from data.token_windows import TokenWindows, cached_tokens, token_dtype


def test_a_sample_is_seq_len_tokens_and_its_targets_are_the_tokens_that_follow():
    source = TokenWindows(np.arange(11, dtype=np.uint16), seq_len=5)
    assert len(source) == 2
    inputs, targets = source.read(np.array([1, 0]), epoch=0)
    assert inputs.tolist() == [[5, 6, 7, 8, 9], [0, 1, 2, 3, 4]]
    assert targets.tolist() == [[6, 7, 8, 9, 10], [1, 2, 3, 4, 5]]
    assert str(inputs.dtype) == str(targets.dtype) == "torch.int64"


@pytest.mark.parametrize("tokens, samples", [(6, 1), (10, 1), (11, 2)])
def test_a_sample_needs_one_token_more_than_seq_len(tokens, samples):
    assert len(TokenWindows(np.zeros(tokens, np.uint16), seq_len=5)) == samples


def test_less_than_one_sample_is_an_error_with_the_numbers():
    with pytest.raises(DataError, match="has 5 tokens.*seq_len=5 needs 6"):
        TokenWindows(np.zeros(5, np.uint16), seq_len=5)


@pytest.mark.parametrize("vocab_size, dtype", [(50257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_the_file_is_as_wide_as_the_vocabulary_needs(tmp_path, vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype
    top = np.array([0, vocab_size - 1])
    files = cached_tokens(tmp_path, "key", lambda _: (vocab_size, {"train": [top, top]}))
    assert files["train"].name == f"train.{dtype}"
    inputs, _ = TokenWindows(files["train"], 3).read(np.array([0]), epoch=0)
    assert inputs.tolist() == [[0, vocab_size - 1, 0]]


def test_a_truncated_token_file_is_built_again(tmp_path):
    def build():
        return cached_tokens(tmp_path, "key", lambda _: (100, {"train": [np.arange(50)]}))["train"]

    with open(build(), "r+b") as file:
        file.truncate(20)
    assert build().stat().st_size == 100


def test_a_started_process_gets_the_path_and_not_the_tokens(tmp_path):
    files = cached_tokens(tmp_path, "key", lambda _: (50257, {"train": [np.arange(50_000)]}))
    sent = pickle.dumps(TokenWindows(files["train"], 100))
    assert len(sent) < 1000
    assert pickle.loads(sent).read(np.array([3]), 0)[0][0, 0] == 300
