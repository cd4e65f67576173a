"""Rows that documents share: each document once, whole or in pieces, and as full as best fit makes them."""

import json

import numpy as np
import pytest

from common.errors import DataError
from data.dataset import Batch
from data.jsonl import Jsonl
from data.packing import best_fit
from data.text import Text
from data.tokens import Tokens

END, IGNORED = 50256, -100
WORDS = [3, 50, 7, 12, 1, 30, 9, 14, 2, 100, 33, 5, 6, 8, 40, 17, 21, 11, 10, 13, 4, 19, 3, 3]


def one_by_one(lengths, room):
    """Best fit decreasing as the books have it."""
    rows = []
    for length in sorted(lengths, reverse=True):
        fits = [row for row in rows if sum(row) + length <= room]
        max(fits, key=sum).append(length) if fits else rows.append([length])
    return rows


def test_rows_are_those_of_best_fit_decreasing_one_by_one():
    random = np.random.default_rng(0)
    for room in range(1, 60):
        lengths = random.integers(1, room + 1, random.integers(0, 100))
        rows, sizes = best_fit(np.bincount(lengths, minlength=room + 1), room), np.sort(lengths)[::-1]
        packed = [sizes[rows == row].tolist() for row in range(max(rows, default=-1) + 1)]
        assert sorted(packed) == sorted(one_by_one(lengths.tolist(), room))


@pytest.fixture
def made(tmp_path):
    """``made(kind, packing)``: a prepared data set of each kind, with texts of so many WORDS."""
    (tmp_path / "texts").mkdir()
    lines = []
    for i, n in enumerate(WORDS):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(f"{'word ' * n}\n")
        lines.append(json.dumps({"text": "word " * n, "question": "why", "answer": "word " * n}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    tokens = np.concatenate([[*range(1, n), END] for n in WORDS])
    np.save(tmp_path / "train.npy", tokens.astype(np.uint16))
    np.save(tmp_path / "val.npy", tokens[:40].astype(np.uint16))

    def make(kind, packing, **more):
        options = {"seq_len": 32, "cache_dir": str(tmp_path / "cache"), "packing": packing, **more}
        roots = {Jsonl: tmp_path / "rows.jsonl", Text: tmp_path / "texts", Tokens: tmp_path}
        data = kind(root=str(roots[kind]), **options)
        data.prepare()
        return data

    return make


def documents_of(source, packed):
    """(inputs, targets) of each document, in any order; the tokens of a document that is not packed end at padding."""
    batch = Batch(*source.read(np.arange(len(source)), 0))
    found = []
    for i in range(len(batch)):
        begins = batch.documents[i].unique().tolist() if packed else [0]
        for begin, end in zip(begins, [*begins[1:], 32], strict=True):
            inputs, targets = (x[i, begin:end].tolist() for x in (batch.inputs, batch.targets))
            if packed:
                assert batch.documents[i, begin:end].unique().tolist() == [begin]
            while targets and targets[-1] == IGNORED:
                del inputs[-1], targets[-1]
            found += [(tuple(inputs), tuple(targets))] * bool(targets)
    return sorted(found)


@pytest.mark.parametrize("options", [{}, {"field": "question", "answer": "answer"}])
@pytest.mark.parametrize("packing", [True, "whole"])
def test_rows_are_the_documents_that_they_are_without_packing(made, packing, options):
    packed, padded = made(Jsonl, packing, **options), made(Jsonl, False, **options)
    for split in ("train", "valid", "test"):
        assert documents_of(getattr(packed, split), True) == documents_of(getattr(padded, split), False)
    assert len(packed.train) < len(padded.train) / 1.5


def split_at(tokens, room=32):
    tokens = np.asarray(tokens)
    return [(tuple(tokens[i : i + room][: len(tokens) - 1 - i].tolist()), tuple(tokens[i + 1 : i + room + 1].tolist()))
            for i in range(0, len(tokens) - 1, room)]  # fmt: skip


def test_longer_documents_are_cut_into_pieces_and_no_token_is_lost(made):
    data, pieces = made(Tokens, True), sorted(piece for n in WORDS for piece in split_at([*range(1, n), END]))
    assert documents_of(data.train, True) == pieces
    assert "rows 9" in data.description and "pieces of documents" in data.description
    whole = sorted(split_at([*range(1, n), END])[0] for n in WORDS if n > 1)
    assert documents_of(made(Tokens, "whole").train, True) == whole
    assert len(documents_of(made(Jsonl, "split").train, True)) > len(documents_of(made(Jsonl, "whole").train, True))


def test_files_of_text_are_documents(made):
    texts, unpacked = made(Text, True), made(Text, False)
    tokens = unpacked.train.tokens
    starts = np.flatnonzero(np.append(END, tokens[:-1]) == END)
    documents = np.split(tokens, starts[1:])
    assert len(documents) == 22  # of the 24 files
    assert documents_of(texts.train, True) == sorted(piece for one in documents for piece in split_at(one))
    assert texts.unigram_entropy == unpacked.unigram_entropy


def test_tokens_without_the_end_token_are_an_error(tmp_path):
    np.save(tmp_path / "train.npy", np.arange(500, dtype=np.uint16))
    data = Tokens(root=str(tmp_path), seq_len=16, packing=True, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match="no document ends with the token 50256; name the tokenizer"):
        data.prepare()


@pytest.mark.parametrize(
    "kind, options, says",
    [
        (Jsonl, {"bucket_by_length": True}, "data.bucket_by_length=true shortens them"),
        (Text, {"vocabulary": "words"}, "the token that ends a document, which words do not have"),
        (Text, {"batchify": True, "columns": 2}, "data.batchify=true reads as columns"),
        (Tokens, {"vocab_size": 60000}, "name the vocabulary that has it, data.tokenizer=FOLDER"),
    ],
)
def test_what_cannot_be_packed_is_an_error(made, kind, options, says):
    with pytest.raises(DataError, match=says):
        made(kind, True, **options)
