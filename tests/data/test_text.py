"""The text data sets: what is read, how it is split, when it is encoded again, and what goes wrong."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from common.errors import DataError
from data import documents as documents_module
from data.documents import whole_file
from data.stdlib import Stdlib
from data.text import Text
from data.vocabulary import END_OF_TEXT, GPT2Vocabulary, gpt2
from data.wikitext2 import WikiText2


def tokens_of(path: Path) -> list[int]:
    _, tokens = GPT2Vocabulary().encode(path.parent, {"train": [whole_file(path)]})
    return np.concatenate(list(tokens["train"])).tolist()


def caches(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def text_of(documents) -> str:
    return "".join(text for document in documents for text in document.text())


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    (tmp_path / "plain").write_bytes("é the\nthe".encode())
    (tmp_path / "marked").write_bytes("é the\nthe".encode("utf-8-sig"))
    assert tokens_of(tmp_path / "marked") == tokens_of(tmp_path / "plain")


def test_cutting_a_text_into_pieces_does_not_change_its_tokens(tmp_path, monkeypatch):
    text = "a b\n\n\n c\n  d\r\n\té ß\n \n Senjō no\n= 1 =\n x\n'll\n 's  \n\n" * 40
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    monkeypatch.setattr(documents_module, "_PIECE_CHARS", 5)
    monkeypatch.setattr(documents_module, "_BLOCK_BYTES", 37)
    monkeypatch.setattr(documents_module, "_BATCH_CHARS", 100)
    assert len(list(whole_file(path).pieces())) > 100
    assert tokens_of(path) == gpt2().encode_ordinary(text) + [END_OF_TEXT]


def test_source_text_is_cut_into_samples(prepared, monkeypatch):
    part = str(Path(sysconfig.get_path("stdlib")) / "asyncio")  # the whole library takes seconds
    monkeypatch.setattr(sysconfig, "get_path", lambda name: part)
    data = prepared(Stdlib, seq_len=256)
    assert (data.vocab_size, data.seq_len) == (50257, 256)
    assert f"{len(data.train):,} samples" in data.description
    inputs, targets = data.train.read(np.array([7]), epoch=0)
    assert inputs.shape == (1, 256) and int(inputs.max()) < 50257
    text = gpt2().decode(data.train.read(np.arange(40), 0)[0].flatten().tolist())
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
        Stdlib().prepare()


def test_the_text_is_encoded_once_and_again_when_it_changes(tmp_path, prepared, cache, monkeypatch):
    root = tmp_path / "text"
    root.write_text("one line after the other\n" * 200)
    prepared(Text, root, seq_len=8)
    first = caches(cache)
    with monkeypatch.context() as patched:
        patched.setattr("data.vocabulary.batches", lambda *_: pytest.fail("encoded a second time"))
        prepared(Text, root, seq_len=16)
    root.write_text("another line after the other\n" * 200)
    prepared(Text, root, seq_len=8)
    assert len(first) == 1 and len(caches(cache)) == 2 and first < caches(cache)


def test_one_file_is_split_by_position_at_line_ends(tmp_path):
    lines = [f"line {i:04}, naïve\n" for i in range(1000)]
    (tmp_path / "text").write_text("".join(lines))
    texts = {split: text_of(part) for split, part in Text(str(tmp_path / "text")).documents().items()}
    assert texts["train"] + texts["valid"] + texts["test"] == "".join(lines)
    assert all(text.endswith("\n") for text in texts.values())
    rounded = {split: round(text.count("\n"), -1) for split, text in texts.items()}
    assert rounded == {"train": 900, "valid": 50, "test": 50}


def test_a_text_without_lines_is_not_cut_inside_a_character(tmp_path):
    (tmp_path / "text").write_text("語" * 1001)
    parts = Text(str(tmp_path / "text")).documents()
    assert "".join(text_of(parts[split]) for split in ("train", "valid", "test")) == "語" * 1001


def test_a_folder_is_split_by_document_the_same_way_every_time(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.md").write_text(f"document {i}")
    parts = Text(str(tmp_path)).documents()
    names = {split: [document.path.name for document in part] for split, part in parts.items()}
    assert names["valid"] == ["09.md", "29.md"] and names["test"] == ["19.md", "39.md"]
    assert len(names["train"]) == 36


@pytest.mark.parametrize("files", [1, 3, 20, 40])
def test_documents_are_counted_as_they_lie_there_also_if_they_are_cut(tmp_path, prepared, files):
    (tmp_path / "texts").mkdir()
    for i in range(files):
        (tmp_path / "texts" / f"{i:02}.md").write_text(f"document {i}, line\n" * 40)
    assert f", {files} documents, " in prepared(Text, tmp_path / "texts", seq_len=4).description


def test_files_that_are_not_text_are_left_out_and_named(tmp_path, caplog):
    (tmp_path / "good.txt").write_text("some text\n" * 100)
    (tmp_path / "latin1.txt").write_bytes("na\xefve".encode("latin-1"))
    (tmp_path / "zeros.bin").write_bytes(bytes(10))
    (tmp_path / ".hidden").write_text("hidden")
    parts = Text(str(tmp_path)).documents()
    assert {document.path.name for part in parts.values() for document in part} == {"good.txt"}
    for part in ("left out 2 of 3 files", "latin1.txt", "zeros.bin"):
        assert part in caplog.text


def test_a_split_smaller_than_a_sample_is_none_and_the_description_says_so(tmp_path, prepared):
    (tmp_path / "text").write_text("word\n" * 100)
    data = prepared(Text, tmp_path / "text", seq_len=64)
    assert len(data.train) > 0 and data.valid is None
    assert "one sample needs 65" in data.description


@pytest.mark.parametrize("pattern", ["{}.txt", "wiki.{}.tokens"])
def test_wikitext2_takes_both_names_of_its_files(tmp_path, prepared, pattern):
    for split in ("train", "valid", "test"):
        (tmp_path / pattern.format(split)).write_text(f" = {split} = \n" * 20)
    data = prepared(WikiText2, tmp_path, seq_len=8)
    for split, source in (("train", data.train), ("valid", data.valid), ("test", data.test)):
        assert gpt2().decode(source.read(np.array([0]), 0)[0][0].tolist()).startswith(f" = {split} =")


def test_files_that_are_named_like_splits_and_divided_all_the_same_are_named(tmp_path, caplog):
    for name in ("train.txt", "valid.txt"):
        (tmp_path / name).write_text("some text\n" * 100)
    Text(str(tmp_path)).documents()
    assert "data=text divides every file, also train.txt and valid.txt; data=jsonl keeps" in caplog.text
