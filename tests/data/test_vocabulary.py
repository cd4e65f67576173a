"""GPT-2's vocabulary, and the tokens that a run adds to it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from common.errors import DataError
from data.jsonl import Jsonl
from data.text import Text
from data.tokens import Tokens
from data.vocabulary import GPT2Vocabulary, gpt2, parse_extra_tokens

EXTRA = {"<a>": "start of an entity", "<b>": None}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("One <a>Berlin<b> two.\n" * 200)
    return path


def first(data, count):
    return data.train.read(np.array([0]), 0)[0][0, :count].tolist()


def test_a_vocabulary_file_that_is_not_the_published_one_is_refused(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "encoder.json").write_text("{}")
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: package)
    gpt2.cache_clear()
    with pytest.raises(DataError, match="sha256.*pip install"):
        gpt2()


def test_extra_tokens_stand_behind_gpt2s_own_in_their_order():
    vocabulary = GPT2Vocabulary(EXTRA)
    assert vocabulary.size == 50259
    (tokens,) = vocabulary.encode_texts(["say <a>Berlin<b>"])
    assert tokens == [*gpt2().encode_ordinary("say "), 50257, *gpt2().encode_ordinary("Berlin"), 50258]
    assert vocabulary.decode(tokens) == "say <a>Berlin<b>"
    (tokens,) = vocabulary.encode_texts(["<|endoftext|><a>"])
    assert 50256 not in tokens and tokens[-1] == 50257, "text that looks like the end of a document is text"


def test_a_text_is_encoded_with_each_as_one_token_and_without_them_keeps_its_tokens_and_cache(text, prepared, cache):
    plain = first(prepared(Text, text, seq_len=16), 16)
    before = {path.name for path in cache.iterdir()}
    data = prepared(Text, text, seq_len=16, extra_tokens=EXTRA)
    tokens = first(data, 16)
    assert data.vocabulary.decode(tokens).startswith("One <a>Berlin<b> two.\nOne <a>")
    assert tokens.count(50257) == tokens.count(50258) == 2 and max(plain) < 50257
    assert data.vocab_size == 50259 and "GPT-2 tokens and 2 of this run's own" in data.description
    assert first(prepared(Text, text, seq_len=16, extra_tokens={}), 16) == plain
    assert len({path.name for path in cache.iterdir()} - before) == 2, "a folder of its own, and its lock"


def test_rows_of_json_have_them_too(tmp_path, prepared):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} <b>"}) + "\n" for i in range(40)))
    data = prepared(Jsonl, path, seq_len=8, extra_tokens=EXTRA, bucket_by_length=True)
    assert 50258 in first(data, 4)
    assert data.vocab_size == 50259


def test_shards_of_tokens_may_hold_them(tmp_path, prepared):
    path = tmp_path / "train.bin"
    np.full(100, 50258, dtype="<u2").tofile(path)
    options = {"seq_len": 4, "format": "nanogpt"}
    assert first(prepared(Tokens, path, extra_tokens=EXTRA, **options), 4) == [50258] * 4
    with pytest.raises(DataError, match="the token 50,258"):
        first(prepared(Tokens, path, **options), 4)


def test_the_command_lines_json_and_a_mapping_are_the_same():
    assert parse_extra_tokens(json.dumps(EXTRA)) == parse_extra_tokens(EXTRA) == EXTRA
    assert parse_extra_tokens(None) == {}


@pytest.mark.parametrize(
    "value, message",
    [
        ("{<a>: x}", "is not JSON.*model.extra_tokens="),
        (["<a>"], "must map tokens to descriptions"),
        ({"a\nb": None}, "text within a line"),
        ({"<\udce9>": None}, "text within a line"),
        ({"<a>": 3}, "'<a>': 3 must be a token.*and its description"),
        ({"<a>": None, "<a>b": None}, "<a>b begins with <a>"),
        ({"<|endoftext|>": None}, "is one of GPT-2's own tokens"),
        ({" the": None}, " the is one of GPT-2's own tokens"),
    ],
)
def test_what_cannot_be_a_token_is_an_error_that_names_it(value, message):
    with pytest.raises(DataError, match=message):
        GPT2Vocabulary(value)


def test_a_vocabulary_of_words_cannot_be_grown(text):
    with pytest.raises(DataError, match="grows GPT-2's vocabulary.*data.vocabulary=gpt2"):
        Text(str(text), vocabulary="words", extra_tokens=EXTRA)
