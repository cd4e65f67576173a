"""The text data sets: what is read, how it is split, when it is encoded again, and what goes wrong."""

import importlib.machinery
import sys
import sysconfig
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from common.errors import DataError
from data import documents as documents_module
from data import vocabulary, wikitext2
from data.documents import encode, whole_file
from data.stdlib import Stdlib
from data.text import Text
from data.vocabulary import END_OF_TEXT, gpt2
from data.wikitext2 import WikiText2

WIKITEXT2 = Path(__file__).parents[2] / ".." / "shared" / "data" / "wikitext-2"


def tokens_of(path: Path) -> list[int]:
    return np.concatenate(list(encode([whole_file(path)], gpt2(), END_OF_TEXT))).tolist()


def caches(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_the_vocabulary_is_gpt2s():
    assert gpt2().n_vocab == 50257
    expected = [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert gpt2().encode_ordinary("Hello, I'm a language model,") == expected
    assert gpt2().decode([END_OF_TEXT]) == "<|endoftext|>"


def test_a_vocabulary_file_that_is_not_the_published_one_is_refused(tmp_path, monkeypatch):
    (tmp_path / "encoder.json").write_text("{}")
    monkeypatch.setattr(vocabulary, "_find", lambda name: tmp_path / "encoder.json")
    vocabulary._encoding.cache_clear()
    with pytest.raises(DataError, match="sha256.*pip install"):
        gpt2()


def test_cutting_a_text_into_pieces_does_not_change_its_tokens(tmp_path, monkeypatch):
    text = "a b\n\n\n c\n  d\r\n\té ß\n \n Senjō no\n= 1 =\n x\n'll\n 's  \n\n" * 40
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    monkeypatch.setattr(documents_module, "_PIECE_CHARS", 5)
    monkeypatch.setattr(documents_module, "_BLOCK_BYTES", 37)
    monkeypatch.setattr(documents_module, "_BATCH_CHARS", 100)
    assert len(list(whole_file(path).pieces())) > 100
    assert tokens_of(path) == gpt2().encode_ordinary(text) + [END_OF_TEXT]


def test_the_standard_library_is_always_there(tmp_path):
    data = Stdlib(seq_len=256, cache_dir=str(tmp_path))
    data.prepare()
    assert len(data.train) > 5000 and len(data.valid) > 200 and len(data.test) > 200
    assert (data.vocab_size, data.seq_len) == (50257, 256)
    assert f"{len(data.train):,} samples" in data.description
    inputs, targets = data.train.read(np.array([7]), epoch=0)
    assert inputs.shape == (1, 256) and int(inputs.max()) < 50257
    text = gpt2().decode(data.train.read(np.arange(20), 0)[0].flatten().tolist())
    assert "import" in text and "<|endoftext|>" in text


def test_the_standard_library_leaves_out_its_tests_and_installed_packages():
    names = [document.path.parts for part in Stdlib().documents().values() for document in part]
    root = len(Path(sysconfig.get_path("stdlib")).parts)
    inside = {part for name in names for part in name[root:]}
    assert "argparse.py" in inside
    assert not inside & {"test", "tests", "idle_test", "site-packages"}


def test_an_interpreter_without_its_library_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(DataError, match=r"python311\.zip.*data=text data\.root="):
        Stdlib(cache_dir=str(tmp_path)).prepare()


def test_the_text_is_encoded_once_and_again_when_it_changes(tmp_path, monkeypatch):
    root, cache_dir = tmp_path / "text", tmp_path / "cache"
    root.write_text("one line after the other\n" * 200)
    Text(str(root), 8, str(cache_dir)).prepare()
    first = caches(cache_dir)
    with monkeypatch.context() as patched:
        patched.setattr("data.vocabulary.encode", lambda *_: pytest.fail("encoded a second time"))
        Text(str(root), 16, str(cache_dir)).prepare()
    root.write_text("another line after the other\n" * 200)
    Text(str(root), 8, str(cache_dir)).prepare()
    assert len(first) == 1 and len(caches(cache_dir)) == 2 and first < caches(cache_dir)


def test_one_file_is_split_by_position_at_line_ends(tmp_path):
    lines = [f"line {i:04}, naïve\n" for i in range(1000)]
    (tmp_path / "text").write_text("".join(lines))
    parts = Text(str(tmp_path / "text")).documents()
    texts = {split: "".join(text for part in parts[split] for text in part.text()) for split in parts}
    assert texts["train"] + texts["valid"] + texts["test"] == "".join(lines)
    assert all(text.endswith("\n") for text in texts.values())
    assert {split: round(text.count("\n"), -1) for split, text in texts.items()} == {
        "train": 900,
        "valid": 50,
        "test": 50,
    }


def test_a_text_without_lines_is_not_cut_inside_a_character(tmp_path):
    (tmp_path / "text").write_text("語" * 1001)
    parts = Text(str(tmp_path / "text")).documents()
    assert "".join(text for s in ("train", "valid", "test") for text in parts[s][0].text()) == "語" * 1001


def test_a_folder_is_split_by_document_the_same_way_every_time(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.md").write_text(f"document {i}")
    parts = Text(str(tmp_path)).documents()
    names = {split: [document.path.name for document in part] for split, part in parts.items()}
    assert names["valid"] == ["09.md", "29.md"] and names["test"] == ["19.md", "39.md"]
    assert len(names["train"]) == 36


def test_files_that_are_not_text_are_left_out_and_named(tmp_path, caplog):
    (tmp_path / "good.txt").write_text("some text\n" * 100)
    (tmp_path / "latin1.txt").write_bytes("na\xefve".encode("latin-1"))
    (tmp_path / "zeros.bin").write_bytes(bytes(10))
    (tmp_path / ".hidden").write_text("hidden")
    parts = Text(str(tmp_path)).documents()
    assert {document.path.name for part in parts.values() for document in part} == {"good.txt"}
    for part in ("left out 2 of 3 files", "latin1.txt", "zeros.bin"):
        assert part in caplog.text


def test_a_file_that_is_not_text_is_an_error_that_says_why(tmp_path):
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="holds no text.*not UTF-8 near byte 0"):
        Text(str(tmp_path / "text"), cache_dir=str(tmp_path)).prepare()


@pytest.mark.parametrize("kind", [Text, WikiText2])
def test_a_missing_folder_is_an_error_that_names_it(kind, tmp_path):
    with pytest.raises(DataError, match=f"data.root={tmp_path}/nowhere"):
        kind(str(tmp_path / "nowhere"), cache_dir=str(tmp_path)).prepare()


def test_no_root_at_all_is_an_error_that_names_the_key():
    with pytest.raises(DataError, match="data.root=FILE_OR_FOLDER"):
        Text()


def test_too_little_text_is_an_error_with_the_numbers(tmp_path):
    (tmp_path / "text").write_text("Hello, I'm a language model,\n")
    with pytest.raises(DataError, match=r"has \d+ tokens.*seq_len=256 needs 257"):
        Text(str(tmp_path / "text"), cache_dir=str(tmp_path / "cache")).prepare()


def test_a_split_smaller_than_a_sample_is_none_and_the_description_says_so(tmp_path):
    (tmp_path / "text").write_text("word\n" * 100)
    data = Text(str(tmp_path / "text"), 64, str(tmp_path / "cache"))
    data.prepare()
    assert len(data.train) > 0 and data.valid is None
    assert "one sample needs 65" in data.description


@pytest.mark.parametrize("bad", [{"seq_len": 0}, {"num_workers": -1}])
def test_senseless_numbers_are_errors_that_name_the_key(bad):
    (key, value) = next(iter(bad.items()))
    with pytest.raises(DataError, match=f"data.{key}={value}"):
        Stdlib(**bad)


@pytest.mark.parametrize("pattern", ["{}.txt", "wiki.{}.tokens"])
def test_wikitext2_takes_both_names_of_its_files(tmp_path, pattern):
    for split in ("train", "valid", "test"):
        (tmp_path / pattern.format(split)).write_text(f" = {split} = \n" * 20)
    data = WikiText2(str(tmp_path), 8, str(tmp_path / "cache"))
    data.prepare()
    for split, source in (("train", data.train), ("valid", data.valid), ("test", data.test)):
        assert gpt2().decode(source.read(np.array([0]), 0)[0][0].tolist()).startswith(f" = {split} =")


def test_wikitext2_without_a_folder_and_without_datasets_names_both_ways_out(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="data.root=FOLDER.*pip install datasets"):
        WikiText2(cache_dir=str(tmp_path)).prepare()


def fake_datasets(monkeypatch, load_dataset) -> None:
    module = types.ModuleType("datasets")
    module.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(wikitext2, "reachable", lambda urls: True)


def test_wikitext2_that_cannot_be_downloaded_names_both_ways_out(tmp_path, monkeypatch):
    def load_dataset(*_):
        raise ConnectionError("no route to host")

    fake_datasets(monkeypatch, load_dataset)
    with pytest.raises(DataError, match="no route to host.*data.root=FOLDER.*pip install datasets"):
        WikiText2(cache_dir=str(tmp_path)).prepare()
    assert caches(tmp_path) == set()


def test_a_download_of_wikitext2_that_hangs_ends_with_an_error(tmp_path, monkeypatch):
    fake_datasets(monkeypatch, lambda *_: threading.Event().wait(30))
    monkeypatch.setattr(wikitext2, "_DOWNLOAD_S", 0.2)
    with pytest.raises(DataError, match="took more than.*data.root=FOLDER"):
        WikiText2(cache_dir=str(tmp_path)).prepare()


def test_a_downloaded_wikitext2_becomes_the_published_files(tmp_path, monkeypatch):
    lines = ["", " = Title = \n", "", " A line of text . \n"]
    fake_datasets(monkeypatch, lambda *_: dict.fromkeys(("train", "validation", "test"), {"text": lines}))
    data = WikiText2(seq_len=4, cache_dir=str(tmp_path))
    data.prepare()
    published = " \n = Title = \n \n A line of text . \n"
    assert (tmp_path / "wikitext-2-v1" / "valid.txt").read_text() == published
    assert len(data.valid) == (len(gpt2().encode_ordinary(published)) + 1 - 1) // 4


@pytest.mark.skipif(
    not WIKITEXT2.is_dir(), reason="the WikiText-2 files are not in ../shared/data/wikitext-2"
)
def test_the_real_wikitext2_has_its_published_size_and_survives_encoding(tmp_path):
    data = WikiText2(str(WIKITEXT2), 256, str(tmp_path))
    data.prepare()
    lines_and_words = {"train": (36_718, 2_088_628), "valid": (3_760, 217_646), "test": (4_358, 245_569)}
    for split, (line_count, word_count) in lines_and_words.items():
        [document] = data.documents()[split]
        text = "".join(document.text())
        assert text.count("\n") == line_count
        assert len(text.split()) + line_count == word_count
        tokens = tokens_of(document.path)
        assert gpt2().decode(tokens) == text + "<|endoftext|>"
        source = getattr(data, split)
        assert len(source) == (len(tokens) - 1) // 256
        inputs, targets = source.read(np.array([3]), 0)
        assert inputs[0].tolist() == tokens[768:1024] and targets[0].tolist() == tokens[769:1025]
