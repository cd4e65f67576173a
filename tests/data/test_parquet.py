"""Parquet files as a data set: the samples are those of JSON lines with the same rows; what is read and refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import DataError, TrainingError
from conf.instantiate import resolve
from data import parquet as parquet_module
from data.jsonl import Jsonl
from data.loader import TrainBatches
from data.parquet import Parquet, ParquetRows
from data.prompts import RowTokens

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch):
    monkeypatch.setattr(parquet_module, "_decoded", {})


def write(path: Path, groups: int = 7, **columns) -> Path:
    """A file of these columns, with so many rows in a row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=groups)
    return path


def words(count: int) -> list[str]:
    lengths = np.random.default_rng(1).integers(0, 40, count)
    return [" ".join([f"é{i}"] * n) for i, n in enumerate(lengths.tolist())]


@pytest.mark.parametrize("files", [["a"], ["train", "valid"], ["train-0", "train-1", "validation", "test"]])
@pytest.mark.parametrize("bucketed", [False, True])
def test_the_samples_of_every_step_are_those_of_json_lines_with_the_same_rows(prepared, tmp_path, files, bucketed):
    for name in files:
        texts = words(50 + len(name))
        write(tmp_path / "parquet" / f"{name}.parquet", n=list(range(len(texts))), question=texts, answer=texts[::-1])
        lines = [json.dumps({"question": q, "answer": a}) for q, a in zip(texts, texts[::-1], strict=True)]
        (tmp_path / "jsonl").mkdir(exist_ok=True)
        (tmp_path / "jsonl" / f"{name}.jsonl").write_text("\n".join(lines))
    options = {"seq_len": 48, "bucket_by_length": bucketed}
    one = prepared(Parquet, tmp_path / "parquet", column=["question", "answer"], **options)
    other = prepared(Jsonl, tmp_path / "jsonl", field=["question", "answer"], **options)
    for split in ("valid", "test"):
        mine, theirs = getattr(one, split), getattr(other, split)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert all(map(torch.equal, *(s.read(np.arange(len(s)), 0) for s in (mine, theirs))))
    batches, expected = (TrainBatches(data.train, 4, seed=3) for data in (one, other))
    assert batches.steps_per_epoch == expected.steps_per_epoch > 5
    for step in range(1, 2 * batches.steps_per_epoch):
        assert torch.equal(batches[step].inputs, expected[step].inputs)
        assert torch.equal(batches[step].targets, expected[step].targets)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b", "a", "é"]),
        pa.array(["a", "b", "a", "é"], pa.large_string()),
        pa.array(["a", "b", "a", "é"]).dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
def test_a_column_of_text_is_read_in_every_type_that_text_has(tmp_path, column, texts_of):
    rows = ParquetRows([write(tmp_path / "a.parquet", 3, text=column)])
    assert texts_of(rows, [3, 0, 1, 3]) == ["é", "a", "b", "é"]
    assert texts_of(rows, []) == []


def test_arguments_of_a_tool_that_other_rows_do_not_have_are_left_out(tmp_path):
    calls = [[{"name": "weather", "arguments": {"city": "Rome"}}], [{"name": "add", "arguments": {"sum": 3}}]]
    messages = [[{"role": "assistant", "content": None, "tool_calls": call}] for call in calls]
    chats = ParquetRows([write(tmp_path / "a.parquet", messages=messages)]).read(np.arange(2), Chats())
    assert [chat.messages[0]["tool_calls"] for chat in chats] == calls


def test_files_and_row_groups_that_are_empty_are_passed_over(tmp_path, texts_of):
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(tmp_path / "b.parquet", schema) as writer:
        for texts in (["a"], [], ["b", "c"]):
            writer.write_table(pa.table({"text": texts}, schema))
    files = [write(tmp_path / name, text=pa.array([], pa.string())) for name in ("a.parquet", "c.parquet")]
    rows = ParquetRows([files[0], tmp_path / "b.parquet", files[1]])
    assert texts_of(rows) == ["a", "b", "c"]


class Chats:
    """What a row of a chat has of RowTokens, without a template."""

    messages, fields, pairs = "messages", ["messages"], False
    take = RowTokens.take


class Reads:
    """Counts the row groups that are decoded."""

    def __init__(self, monkeypatch):
        self.groups = []
        read = pq.ParquetFile.read_row_group

        def counted(file, group, columns, **options):
            self.groups.append((group, *columns))
            return read(file, group, columns=columns, **options)

        monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)


def test_of_a_file_the_row_groups_and_the_column_that_are_needed_are_read_and_the_newest_kept(
    tmp_path, monkeypatch, texts_of
):
    texts = [f"{i:01000d}" for i in range(100)]
    rows = ParquetRows([write(tmp_path / "a.parquet", 10, text=texts, other=texts)])
    reads = Reads(monkeypatch)
    assert texts_of(rows, [55, 5, 58]) == [texts[55], texts[5], texts[58]]
    assert reads.groups == [(0, "text"), (5, "text")]
    texts_of(rows, [50, 0])
    assert len(reads.groups) == 2
    monkeypatch.setattr(parquet_module, "_CACHE_BYTES", 35_000)
    for group in (1, 0, 2, 0, 5):
        texts_of(rows, [10 * group])
    assert [group for group, _ in reads.groups[2:]] == [1, 2, 5], "three fit, and the one used last stays"
    assert len(parquet_module._decoded) == 3


def test_threads_and_forked_processes_read_the_same_rows(tmp_path, monkeypatch, everywhere, texts_of):
    monkeypatch.setattr(parquet_module, "_CACHE_BYTES", 2000)
    rows = ParquetRows([write(tmp_path / "a.parquet", 10, text=[str(i) for i in range(1000)])])

    def right(seed: int) -> bool:
        indices = np.random.default_rng(seed).integers(0, 1000, 300)
        return texts_of(rows, indices) == [str(i) for i in indices]

    assert right(8)
    everywhere(right)


BAD = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"\xff"]).buffers())
WRONG = {
    "null": ({"text": ["a"] * 15 + [None]}, r"a\.parquet row 15 \(from 0\): text is null, not text in UTF-8"),
    "numbers": ({"text": [1, 2]}, r"a\.parquet row 0 \(from 0\): text is int64, not text.*data\.column="),
    "lists": ({"text": [["a"], ["b"]]}, r"row 0 \(from 0\): text is list"),
    "not UTF-8": ({"text": BAD}, r"row 1 \(from 0\): text is string, not text in UTF-8"),
    "another name": (
        {"body": ["a"], "n": [1]},
        r"a\.parquet: the column 'text' .* is missing; there are \['body', 'n'\]",
    ),
    "no row": ({"text": pa.array([], pa.string())}, r"a\.parquet: there is no row"),
}


@pytest.mark.parametrize("columns, says", WRONG.values(), ids=WRONG)
def test_a_value_that_is_no_text_is_named_by_file_row_and_reason_before_training(tmp_path, prepared, columns, says):
    with pytest.raises(DataError, match=says):
        prepared(Parquet, write(tmp_path / "a.parquet", **columns))


def test_the_second_of_two_files_is_named_with_its_own_row(tmp_path, texts_of):
    files = [
        write(tmp_path / f"{n}.parquet", 3, text=["a"] * 8, more=["b"] * (6 + n) + [None] * (2 - n)) for n in (2, 1)
    ]
    with pytest.raises(DataError, match=r"1\.parquet row 7 \(from 0\): text, more is string, null"):
        texts_of(ParquetRows(files), [15], ["text", "more"])


def test_two_columns_of_one_name_are_an_error(tmp_path, prepared):
    table = pa.table([["a"], ["b"]], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet \(.*2 times"):
        prepared(Parquet, tmp_path / "a.parquet")


@pytest.mark.parametrize("damage", ["empty footer", "cut", "text", "overwritten"])
def test_a_file_that_is_no_parquet_is_named(tmp_path, prepared, damage):
    file = write(tmp_path / "a.parquet", text=words(500))
    content = file.read_bytes()
    file.write_bytes(
        {
            "empty footer": b"PAR1PAR1",
            "cut": content[:-9],
            "text": b'{"text": "a"}\n' * 9,
            "overwritten": content[:8] + bytes(200) + content[208:],
        }[damage]
    )
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet \(.*\); write it again"):
        prepared(Parquet, file)


def test_a_file_that_has_changed_since_is_an_error(tmp_path, texts_of):
    rows = ParquetRows([write(tmp_path / "a.parquet", text=["a"])])
    write(tmp_path / "a.parquet", text=["a", "b"])
    with pytest.raises(DataError, match=r"a\.parquet has changed"):
        texts_of(rows, [0])


def test_without_pyarrow_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("conf.instantiate.find_spec", lambda name: None)
    with pytest.raises(TrainingError, match="needs a package that is not installed: pip install pyarrow"):
        resolve("data.parquet.Parquet")


def test_json_maps_and_bytes_in_columns_are_the_same_chats_as_json_lines(prepared, tmp_path):
    """As datasets writes rows of different keys, and DuckDB its JSON and MAP columns."""
    if not hasattr(pa, "json_"):
        pytest.skip("this pyarrow has no type of JSON")
    call = {"name": "f", "arguments": {"x": 1, "y": ["a", None]}}
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": [call]}]
    stored = [{**m, "tool_calls": [json.dumps(c) for c in m.get("tool_calls", [])] or None} for m in chat]
    struct = pa.struct([("role", pa.string()), ("content", pa.binary()), ("tool_calls", pa.list_(pa.json_()))])
    stored = [{**m, "content": m["content"].encode()} for m in stored]
    storage = pa.struct([("role", pa.string()), ("content", pa.binary()), ("tool_calls", pa.list_(pa.string()))])
    pairs = pa.list_(pa.map_(pa.string(), pa.string()))
    columns = {
        "structs": pa.array([stored], pa.list_(storage)).cast(pa.list_(struct)),
        "text": pa.array([json.dumps(chat)], pa.json_()),
        "maps": pa.array([[[*{k: m[k] for k in ("role", "content")}.items()] for m in chat]], pairs),
    }
    rows = {}
    for name, column in columns.items():
        pq.write_table(pa.table({"messages": column}), tmp_path / f"{name}.parquet")
        rows[name] = ParquetRows([tmp_path / f"{name}.parquet"]).read(np.array([0]), Chats())[0].messages
    assert rows["structs"] == rows["text"] == chat
    assert rows["maps"] == [{key: m[key] for key in ("role", "content")} for m in chat]
