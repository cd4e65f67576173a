"""JSON lines as a data set: samples, splits, what is checked and when, and the real gsm8k."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import DataError
from data import jsonl as jsonl_module
from data.jsonl import Jsonl, RowSelection, split_files
from data.loader import EvalBatches, TrainBatches
from data.vocabulary import END_OF_TEXT, gpt2


def write(path: Path, texts) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def rows_of(prepared):
    return lambda root, **options: prepared(Jsonl, root, **options)


def texts(source) -> list[str]:
    """What the samples say, without the padding."""
    if source is None:
        return []
    inputs, targets = source.read(np.arange(len(source)), 0)
    return [gpt2().decode(x[t != -100].tolist()) for x, t in zip(inputs, targets, strict=True)]


def caches(cache: Path) -> set[str]:
    return {path.name.split("-")[0] for path in cache.iterdir() if path.is_dir()}


def test_a_sample_is_a_text_and_its_end_padded_or_cut_and_shifted(tmp_path, rows_of):
    data = rows_of(write(tmp_path / "a.jsonl", ["Hello, I'm a language model,", "", "Hello"]), seq_len=10)
    inputs, targets = data.train.read(np.array([0, 2, 1]), epoch=0)
    assert inputs.dtype == targets.dtype == torch.int64
    hello = [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert inputs.tolist() == [hello + [END_OF_TEXT] * 2, hello[:1] + [END_OF_TEXT] * 9, [END_OF_TEXT] * 10]
    assert targets.tolist() == [hello[1:] + [END_OF_TEXT, -100, -100], [END_OF_TEXT] + [-100] * 9, [-100] * 10]
    assert (data.vocab_size, data.seq_len, data.changing_shapes) == (50257, 10, False)
    inputs, targets = rows_of(tmp_path / "a.jsonl", seq_len=4).train.read(np.array([0]), 0)
    assert inputs.tolist() == [hello[:4]] and targets.tolist() == [hello[1:5]], "cut to seq_len + 1"


@pytest.mark.parametrize("rows", [1, 9, 10, 19, 20, 21, 47, 60])
def test_every_row_is_in_one_split_the_10th_and_20th_of_20_held_out(tmp_path, rows_of, rows):
    data = rows_of(write(tmp_path / "a.jsonl", map(str, range(rows))), seq_len=4)
    expected = [str(i) for i in range(rows)]
    assert texts(data.valid) == expected[9::20]
    assert texts(data.test) == expected[19::20]
    assert texts(data.train) == [text for i, text in enumerate(expected) if i % 20 not in (9, 19)]
    assert (data.valid is None) == (rows < 10) and (data.test is None) == (rows < 20)


@pytest.mark.parametrize("kept", [(0,), (19,), tuple(range(20)), (3, 5, 18)])
def test_a_selection_is_the_rows_that_a_list_would_have(kept):
    for rows in range(65):
        selection = RowSelection(rows, kept)
        assert selection.row(np.arange(len(selection))).tolist() == [i for i in range(rows) if i % 20 in kept]


@pytest.mark.parametrize(
    "names, valid, test",
    [
        (["train.jsonl", "test.jsonl"], "10th", "test.jsonl"),
        (["train.jsonl", "valid.jsonl"], "valid.jsonl", None),
        (["train.jsonl", "my-validation-1.jsonl", "test_2.jsonl"], "my-validation-1.jsonl", "test_2.jsonl"),
        (["x/train/1.jsonl", "x/dev/1.jsonl", "x/test/1.jsonl"], "x/dev/1.jsonl", "x/test/1.jsonl"),
        (["1.jsonl", "latest.jsonl", "val.jsonl"], "val.jsonl", None),
        (["1.jsonl", "2.jsonl"], "10th", "20th"),
    ],
)
def test_files_of_a_folder_are_the_splits_that_their_names_say(tmp_path, rows_of, names, valid, test):
    for name in names:
        write(tmp_path / "data" / name, [f"{name} {i}" for i in range(20)])
    data = rows_of(tmp_path / "data", seq_len=16)
    training = [name for name in names if name not in (valid, test)]
    rows = [f"{name} {i}" for name in training for i in range(20)]
    made_up = {"10th": rows[9::20], "20th": rows[19::20], None: []}
    held_out = {split: made_up[split] if split in made_up else [f"{split} {i}" for i in range(20)]
                for split in (valid, test)}  # fmt: skip
    assert texts(data.valid) == held_out[valid]
    assert texts(data.test) == held_out[test]
    assert texts(data.train) == [row for row in rows if row not in held_out[valid] + held_out[test]]


def test_gsm8k_has_its_own_test_split_and_is_read_without_a_list(rows_of, published):
    root = published("gsm8k")
    data = rows_of(root, field=["question", "answer"], seq_len=256, bucket_by_length=True)
    assert (len(data.train), len(data.valid), len(data.test)) == (7473 - 374, 374, 1319)
    row = json.loads((root / "test.jsonl").read_text().splitlines()[7])
    tokens = gpt2().encode_ordinary(f"{row['question']}\n{row['answer']}")
    inputs, targets = data.test.read(np.array([7]), 0)
    assert targets[0][targets[0] != -100].tolist() == (tokens + [END_OF_TEXT])[1:257]
    assert inputs.shape == (1, 256)
    assert "train 7,099 rows, valid 374 rows, test 1,319 rows" in data.description

    plain = rows_of(root, field=["question", "answer"], seq_len=256).train
    counted = data.train.lengths(np.arange(200))
    assert counted.tolist() == (plain.read(np.arange(200), 0)[1] != -100).sum(dim=1).tolist()


def test_buckets_leave_less_padding_and_few_shapes_that_all_replicas_share(tmp_path, rows_of):
    random = np.random.default_rng(1)
    rows = [" ".join(["word"] * n) for n in random.integers(1, 120, 400)]
    root = write(tmp_path / "a.jsonl", rows)
    data = rows_of(root, bucket_by_length=True, seq_len=128)
    assert data.changing_shapes
    assert "padded to 16 or 32 or 48 or 64 or 96 or 128 tokens" in data.description
    replicas = [TrainBatches(data.train, 8, 1, rank, 2) for rank in range(2)]
    shapes, real, padded = set(), 0, 0
    for step in range(1, replicas[0].steps_per_epoch + 1):
        pair = [replica[step] for replica in replicas]
        assert pair[0].inputs.shape == pair[1].inputs.shape == pair[0].targets.shape
        shapes.add(tuple(pair[0].inputs.shape))
        real += sum(int((one.targets != -100).sum()) for one in pair)
        padded += sum(one.targets.numel() for one in pair)
    assert 2 < len(shapes) <= 6
    plain = TrainBatches(rows_of(root, seq_len=128).train, 8, 1)[1]
    assert plain.inputs.shape == (8, 128)
    assert real / padded > 0.75 > 0.6 > float((plain.targets != -100).float().mean())
    assert next(iter(EvalBatches(data.valid, 8))).inputs.shape == (8, 128)


def test_a_corrupt_row_is_found_before_training_and_nothing_is_kept_of_the_check(tmp_path, rows_of, cache):
    root = write(tmp_path / "a.jsonl", map(str, range(300)))
    lines = root.read_text().splitlines()
    lines[122] = '{"text": "123'
    root.write_text("\n".join(lines))
    for bucketed in (False, True):
        with pytest.raises(DataError, match=r"a\.jsonl line 123: not JSON"):
            rows_of(root, bucket_by_length=bucketed)
        assert caches(cache) == {"rows"}


def test_of_very_many_rows_some_are_checked_before_and_the_others_when_they_are_read(tmp_path, rows_of, monkeypatch):
    monkeypatch.setattr(jsonl_module, "_CHECK_ALL", 200)
    monkeypatch.setattr(jsonl_module, "_CHECK_SOME", 150)
    root = write(tmp_path / "a.jsonl", map(str, range(300)))
    lines = root.read_text().splitlines()
    root.write_text("\n".join([*lines[:299], "no"]))
    with pytest.raises(DataError, match=r"a\.jsonl line 300: not JSON"):
        rows_of(root)
    root.write_text("\n".join([lines[0], "no", *lines[2:]]))
    source = rows_of(root).train
    with pytest.raises(DataError, match=r"a\.jsonl line 2: not JSON"):
        source.read(np.array([0, 1]), 0)


def test_rows_are_checked_and_counted_once(tmp_path, rows_of, monkeypatch):
    root = write(tmp_path / "a.jsonl", map(str, range(30)))
    rows_of(root, bucket_by_length=True)
    monkeypatch.setattr(jsonl_module.Rows, "texts_in_order", lambda *_: pytest.fail("read again"))
    rows_of(root, bucket_by_length=True)
    with pytest.raises(pytest.fail.Exception):
        rows_of(root, field=["text", "text"])


def test_a_root_without_rows_is_an_error_that_says_why(tmp_path, rows_of):
    with pytest.raises(DataError, match=r"empty\.jsonl is empty"):
        rows_of(write(tmp_path / "empty.jsonl", []))
    write(tmp_path / "only" / "test.jsonl", ["a"])
    with pytest.raises(DataError, match=r"nothing to train on.*test\.jsonl"):
        split_files(tmp_path / "only")
