"""Words by the basic-English rules, their vocabulary, and the data sets in it."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data import documents
from data.documents import whole_file
from data.stdlib import Stdlib
from data.text import Text
from data.wikitext2 import WikiText2
from data.words import basic_english, choose_words, count_words, encode_words


def tokens_of(source) -> list[int]:
    return source.read(np.arange(len(source)), 0)[0].flatten().tolist()


@pytest.mark.parametrize(
    "text, words",
    [
        ("It's (HERE), isn't it?", "it ' s ( here ) , isn ' t it ?"),
        ('a "quoted"word; one: two.Three!', "a quotedword one two . three !"),
        ("a<br />b <BR /> @-@ 3,000\n\n = Title = \n", "a b @-@ 3 , 000 = title ="),
        ("", ""),
    ],
)
def test_text_becomes_words_by_torchtexts_rules(text, words):
    assert basic_english(text) == words.split()


def test_the_vocabulary_goes_by_frequency_then_by_the_alphabet_and_starts_with_unk():
    counts = Counter("b b c a a <unk> <unk> <unk> d".split())
    assert choose_words(counts) == ["<unk>", "a", "b", "c", "d"]
    assert choose_words(counts, min_frequency=2) == ["<unk>", "a", "b"]
    assert choose_words(counts, max_size=4) == ["<unk>", "a", "b", "c"]


def test_only_the_training_split_makes_the_vocabulary_and_other_words_are_unk(tmp_path):
    (tmp_path / "text").write_text("one two\n" * 93 + "one six\n" * 7)
    data = Text(str(tmp_path / "text"), cache_dir=str(tmp_path), seq_len=2, vocabulary="words", min_frequency=1)
    assert data.vocab_size is None and not data.vocabulary.words, "the text decides"
    data.prepare()
    assert data.vocabulary.words == ["<unk>", "one", "two"] and data.vocab_size == 3
    assert set(tokens_of(data.train)) == {1, 2} and set(tokens_of(data.test)) == {0, 1}
    assert data.vocabulary.decode(tokens_of(data.test)[:2]) == "one <unk>"
    assert "3 words: train 182 tokens" in data.description


def encoded(paths: list[Path], words: list[str]) -> list[int]:
    return np.concatenate(list(encode_words([whole_file(path) for path in paths], words))).tolist()


def test_nothing_marks_the_end_of_a_line_or_of_a_document(tmp_path):
    (tmp_path / "a").write_text("x y.\n\n x\n")
    (tmp_path / "b").write_text("y z\n")
    assert encoded([tmp_path / "a", tmp_path / "b"], ["<unk>", "x", "y", "."]) == [1, 2, 3, 1, 2, 0]


def test_reading_in_pieces_does_not_change_the_words(tmp_path, monkeypatch):
    text = "It's one.\n\n (two) lines, naïve\n" * 50
    (tmp_path / "text").write_text(text)
    counts = count_words([whole_file(tmp_path / "text")])
    words = choose_words(counts)
    monkeypatch.setattr(documents, "_PIECE_CHARS", 5)
    monkeypatch.setattr(documents, "_BLOCK_BYTES", 7)
    assert count_words([whole_file(tmp_path / "text")]) == counts == Counter(basic_english(text))
    tokens = encoded([tmp_path / "text"], words)
    assert [words[token] for token in tokens] == basic_english(text)


@pytest.mark.slow
def test_the_standard_library_as_words_leaves_out_rare_ones(prepared):
    data = prepared(Stdlib, seq_len=64, vocabulary="words")
    assert data.vocabulary.words[0] == "<unk>" and "self" in data.vocabulary.words[:20]
    tokens = np.bincount(tokens_of(data.train), minlength=data.vocab_size)
    assert 5_000 < data.vocab_size < 40_000
    assert tokens[0] / tokens.sum() < 0.1


def test_the_real_wikitext2_has_its_published_words(prepared, published):
    options = {"seq_len": 35, "vocabulary": "words", "batchify": True, "columns": 20}
    data = prepared(WikiText2, published("wikitext-2"), **options)
    assert data.vocab_size == len(set(data.vocabulary.words)) == 28_782
    assert data.vocabulary.words[:6] == ["<unk>", "the", ",", ".", "of", "and"]
    for part in ("train 2,049,990 tokens", "valid 214,417 tokens", "test 241,859 tokens"):
        assert part in data.description
    assert len(data.train) == 20 * ((2_049_990 // 20 - 1) // 35)
    first = data.train.read(np.array([0]), 0)[0][0].tolist()
    assert data.vocabulary.decode(first).startswith("= valkyria chronicles iii = senjō no valkyria 3 <unk> chr")
