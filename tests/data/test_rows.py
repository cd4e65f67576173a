"""Rows of JSON-lines files: what is a row, where the index is kept, and what is said of a row that is wrong."""

import json
import os
import pickle
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from common.errors import DataError
from data import jsonl as jsonl_module
from data.jsonl import Rows


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def jsonl(path: Path, texts: list[str]) -> Path:
    return written(path, "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


def everything(rows: Rows) -> list[str]:
    return rows.texts(np.arange(len(rows)), ["text"])


def indexes(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_dir()}


def test_rows_of_several_files_come_by_number_in_any_order(tmp_path, cache):
    files = [jsonl(tmp_path / f"{n}", [f"{n}.{i}" for i in range(n)]) for n in (3, 1, 40)]
    rows = Rows(files, cache)
    assert everything(rows) == [f"{n}.{i}" for n in (3, 1, 40) for i in range(n)]
    assert rows.texts(np.array([43, 3, 0, 0]), ["text"]) == ["40.39", "1.0", "3.0", "3.0"]
    assert rows.texts(np.array([], dtype=np.int64), ["text"]) == []


def test_several_fields_are_joined_by_newlines(tmp_path, cache):
    file = written(tmp_path / "a", b'{"answer": "4", "question": "2 + 2?", "id": 7}\n')
    assert Rows([file], cache).texts(np.array([0]), ["question", "answer"]) == ["2 + 2?\n4"]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 1 << 20])
def test_a_row_is_a_line_that_is_not_blank_wherever_blocks_end(tmp_path, cache, monkeypatch, block):
    monkeypatch.setattr(jsonl_module, "_BLOCK_BYTES", block)
    content = b'\n \t\n{"text": "a"}\r\n\r\n\n  {"text": "b \\n c"}  \n' + b" " * 600 + b'\n{"text": "d"}'
    rows = Rows([written(tmp_path / "a", content), written(tmp_path / "b", b'\n{"text": "e"}\n \n')], cache)
    assert everything(rows) == ["a", "b \n c", "d", "e"]
    assert [rows.place(i)[0] for i in range(4)] == [3, 6, 8, 2]


def test_random_files_are_read_as_line_by_line(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(jsonl_module, "_BLOCK_BYTES", 61)
    draw = random.Random(7)
    files, expected = [], []
    for number in range(20):
        lines = [draw.choice(["", " ", "\r", json.dumps({"text": "é" * draw.randrange(60)})]) for _ in range(50)]
        files.append(written(tmp_path / str(number), "\n".join(lines).encode()))
        expected += [json.loads(line)["text"] for line in lines if line.strip()]
    assert everything(Rows(files, cache)) == expected


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path, cache):
    assert everything(Rows([written(tmp_path / "a", b'\xef\xbb\xbf{"text": "a"}\n')], cache)) == ["a"]


def test_the_index_is_8_bytes_a_row_and_shared_by_all_who_read(tmp_path, cache, monkeypatch):
    file = jsonl(tmp_path / "a", [str(i) for i in range(10_000)])
    first = Rows([file], cache)
    assert first.index.path.stat().st_size == 8 * 10_001
    monkeypatch.setattr(Rows, "_build", lambda self, folder: pytest.fail("built again"))
    second = Rows([file], cache)
    assert second.index.path == first.index.path
    assert not isinstance(second.offsets, np.memmap) and isinstance(second.offsets.base, np.memmap)
    sent = pickle.dumps(second)
    assert len(sent) < 2000, "a spawned process gets the path and not the index"
    assert pickle.loads(sent).texts(np.array([9_999]), ["text"]) == ["9999"]


def test_threads_and_forked_processes_can_read_the_same_rows(tmp_path, cache):
    rows = Rows([jsonl(tmp_path / "a", [str(i) for i in range(1000)])], cache)
    wrong = []

    def read(seed: int) -> None:
        indices = np.random.default_rng(seed).integers(0, 1000, 2000)
        if rows.texts(indices, ["text"]) != [str(i) for i in indices]:
            wrong.append(seed)

    child = os.fork()
    if child == 0:
        read(9)
        os._exit(len(wrong))
    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and os.waitpid(child, 0)[1] == 0


def test_no_file_stays_open(tmp_path, cache):
    rows = Rows([jsonl(tmp_path / f"{n}", ["a"]) for n in range(5)], cache)
    before = len(os.listdir("/proc/self/fd"))
    everything(rows)
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_version_of_a_file_gets_another_index_and_the_old_rows_are_an_error(tmp_path, cache):
    file = jsonl(tmp_path / "a", ["old", "rows"])
    old = Rows([file], cache)
    jsonl(file, ["new", "rows", "here"])
    assert everything(Rows([file], cache)) == ["new", "rows", "here"]
    assert len(indexes(cache)) == 2
    with pytest.raises(DataError, match=r"/a has changed since it was indexed"):
        everything(old)


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"text": "a"', r"not JSON \(Expecting ',' delimiter at character 14\)"),
        (b'{"text": "a"} x', r"not JSON \(Extra data at character 15\)"),
        (b"\0\0\0\0", r"not JSON \(Expecting value at character 1\)"),
        (b'{"text": "\xff\xfe"}', r"not UTF-8 at byte 11 of the line \(invalid start byte\)"),
        (b"[" * 100_000, r"not JSON that can be read \(maximum recursion"),
        (b'["text"]', "not a JSON object with the field 'text' but a list"),
        (b'"text"', "not a JSON object with the field 'text' but a string"),
        (b"17", "not a JSON object with the field 'text' but a number"),
        (b'{"id": 1, "txt": "a"}', r"the field 'text' \(data.field=\) is missing; there are: 'id', 'txt'"),
        (b"{}", "the field 'text' .* is missing; there are: none"),
        (b'{"text": null}', "the field 'text' is not a string but null"),
        (b'{"text": 3.5}', "the field 'text' is not a string but a number"),
        (b'{"text": ["a"]}', "the field 'text' is not a string but a list"),
    ],
)
def test_a_corrupt_row_is_named_by_file_line_and_reason(tmp_path, cache, line, reason):
    good = b'{"text": "good"}\n'
    corrupt = written(tmp_path / "second.jsonl", good + b"\n" + good + line + b"\n" + good)
    rows = Rows([jsonl(tmp_path / "first.jsonl", ["a", "b"]), corrupt], cache)
    assert len(rows) == 6
    with pytest.raises(DataError, match=rf"/second\.jsonl line 4: {reason}"):
        everything(rows)
    assert rows.texts(np.array([0, 1, 2, 3, 5]), ["text"]) == ["a", "b", "good", "good", "good"]


@pytest.mark.parametrize(
    "content, message",
    [(b"", "/a: 0 bytes and no row"), (b"\n\n \n", "/a: 4 bytes and no row"), (None, "cannot read .*/a: No such file")],
)
def test_files_without_a_row_are_an_error_and_leave_no_index(tmp_path, cache, content, message):
    if content is not None:
        written(tmp_path / "a", content)
    with pytest.raises(DataError, match=message):
        Rows([tmp_path / "a"], cache)
    assert not cache.exists() or not indexes(cache)


def test_an_error_while_the_index_is_built_leaves_nothing_behind(tmp_path, cache, monkeypatch):
    files = [jsonl(tmp_path / name, ["a"]) for name in "ab"]
    usual = os.pread

    def pread(descriptor: int, length: int, position: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/b"):
            raise OSError(5, "Input/output error")
        return usual(descriptor, length, position)

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(DataError, match="cannot read .*/b: Input/output error"):
        Rows(files, cache)
    assert not indexes(cache)


def test_own_memory_does_not_grow_with_the_rows(tmp_path, cache):
    def anonymous_kib() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))

    def index_and_read(path: Path) -> Rows:
        rows = Rows([path], cache)
        for start in range(0, len(rows), len(rows) // 10):
            rows.texts(np.arange(start, start + 100), ["text"])
        return rows

    line = b'{"text": "' + b"x" * 20 + b'"}\n'
    few, many = written(tmp_path / "few", line * 100_000), written(tmp_path / "many", line * 600_000)
    kept = [index_and_read(few)]
    before = anonymous_kib()
    kept.append(index_and_read(many))
    # The places of the rows would be 4.8 MB as an array of numpy, 20 MB as a list.
    assert anonymous_kib() - before < 2000
