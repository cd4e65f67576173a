"""The default text: prose out of the documentation of torch, and what counting its tokens reaches."""

import math

import numpy as np
import pytest

from common.errors import DataError
from data import torch_docs
from data.token_windows import unigram_entropy
from data.torch_docs import TorchDocs
from data.vocabulary import gpt2


def text_of(source) -> str:
    return gpt2().decode(source.tokens.tolist())


def test_the_default_text_is_of_sentences_without_examples_and_formulas(prepared):
    data = prepared(TorchDocs, seq_len=96)
    text = text_of(data.train) + text_of(data.valid) + text_of(data.test)
    lines = [line for line in text.replace("<|endoftext|>", "").splitlines() if line]
    assert len(lines) > 1000
    assert "Computes the absolute value of each element in :attr:`input`." in lines
    assert not any(mark in text for mark in (">>>", "\\text", "Example::\n"))
    assert sum(c.isalpha() or c == " " for c in text) > 0.8 * len(text)


def test_its_splits_are_of_the_same_kind_and_large_enough(prepared):
    data = prepared(TorchDocs, seq_len=96)
    tokens = {split: np.asarray(getattr(data, split).tokens) for split in ("train", "valid", "test")}
    assert len(tokens["train"]) > 80_000
    counts = np.bincount(tokens["train"], minlength=50257) + 0.1
    losses = {split: -np.log(counts / counts.sum())[part].mean() for split, part in tokens.items()}
    assert losses["valid"] == pytest.approx(losses["test"], rel=0.05), losses
    assert data.unigram_entropy == pytest.approx(losses["train"], rel=0.02)
    assert 5 < data.unigram_entropy < 7, "of code it is 4.5: a single space is 41 % of its tokens"


def test_the_entropy_of_single_tokens():
    assert unigram_entropy(np.array([3, 3, 3])) == 0
    assert unigram_entropy(np.array([0, 7, 7, 0])) == pytest.approx(math.log(2))


def test_what_it_collects_is_the_same_in_every_process_and_is_kept(prepared, monkeypatch):
    first = prepared(TorchDocs, seq_len=8)
    monkeypatch.setattr(torch_docs, "_paragraphs", lambda: pytest.fail("collected twice"))
    assert np.array_equal(prepared(TorchDocs, seq_len=8).train.tokens, first.train.tokens)


def test_a_torch_without_documentation_says_which_text_there_is(cache, monkeypatch):
    monkeypatch.setattr(torch_docs, "_documentation", lambda: iter(()))
    with pytest.raises(DataError, match="python -OO.*data=stdlib, or data=text data.root="):
        TorchDocs(cache_dir=str(cache)).prepare()
