"""JSON lines as a data set: samples, splits, and what is checked and when."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizer_folders import tokenizer_folder

from common.errors import DataError
from data import jsonl as jsonl_module
from data.jsonl import Jsonl, Rows, split_files
from data.loader import EvalBatches, TrainBatches
from data.vocabulary import END_OF_TEXT, gpt2


def write(path: Path, texts) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
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
    assert (data.vocab_size, data.seq_len) == (50257, 10)
    inputs, targets = rows_of(tmp_path / "a.jsonl", seq_len=4).train.read(np.array([0]), 0)
    assert inputs.tolist() == [hello[:4]] and targets.tolist() == [hello[1:5]], "cut to seq_len + 1"


@pytest.mark.parametrize("rows", [1, 9, 10, 19, 20, 47])
def test_every_row_is_in_one_split_the_10th_and_20th_of_20_held_out(tmp_path, rows_of, rows):
    data = rows_of(write(tmp_path / "a.jsonl", map(str, range(rows))), seq_len=4)
    expected = [str(i) for i in range(rows)]
    assert texts(data.valid) == expected[9::20]
    assert texts(data.test) == expected[19::20]
    assert texts(data.train) == [text for i, text in enumerate(expected) if i % 20 not in (9, 19)]
    assert (data.valid is None) == (rows < 10) and (data.test is None) == (rows < 20)


@pytest.mark.parametrize(
    "names, valid, test",
    [
        (["train.jsonl", "test.jsonl"], "10th", "test.jsonl"),
        (["Training_1.jsonl", "Evaluation.jsonl"], "10th", "Evaluation.jsonl"),
        (["dev.jsonl", "testing.jsonl", "training.jsonl"], "dev.jsonl", "testing.jsonl"),
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


def test_buckets_leave_less_padding_and_few_shapes_that_all_replicas_share(tmp_path, rows_of):
    rows = [" ".join(["word"] * n) for n in np.random.default_rng(1).integers(1, 120, 400)]
    root = write(tmp_path / "a.jsonl", rows)
    data = rows_of(root, bucket_by_length=True, seq_len=128)
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


OTHER_FILES = {
    "a list": (b'[{"text": "a"}, {"text": "b"}]', "of type list.*jq -c '.\\[\\]' OLD > NEW"),
    "a list in lines": (b'[\n  {"text": "a"},\n  {"text": "b"}\n]\n', "not JSON.*jq -c '.\\[\\]' OLD > NEW"),
    "columns": (b'{"text": {"0": "a", "1": "b"}}', "of type dict.*orient='records', lines=True"),
    "a table": (b"text,id\na,1\nb,2\n", "not JSON.*data=parquet"),
    "a bad first row": (b'{"text": "a}\n{"text": "b"}\n', "not JSON.*Correct the line, or delete it"),
}


@pytest.mark.parametrize("content, says", OTHER_FILES.values(), ids=OTHER_FILES)
def test_a_file_that_is_no_lines_of_json_is_refused_with_what_to_type(tmp_path, rows_of, content, says):
    with pytest.raises(DataError, match=says):
        rows_of(written(tmp_path / "x.json", content))


def test_a_folder_without_such_files_says_what_it_has(tmp_path, rows_of):
    written(tmp_path / "data-00000-of-00001.arrow", b"ARROW1")
    written(tmp_path / "state.json", b"{}")
    with pytest.raises(
        DataError, match=r"holds no such file, but \.arrow, \.json \(written by save_to_disk of datasets"
    ):
        rows_of(tmp_path)


@pytest.mark.parametrize("given", [".", "table", "table/data", "table/data/day=1"])
@pytest.mark.parametrize("mark", ["_delta_log/00000000000000000000.json", "metadata/v2.metadata.json", ".hoodie/x"])
def test_a_table_whose_folder_has_rows_of_older_versions_is_refused(tmp_path, rows_of, mark, given):
    part = tmp_path / "table/data/day=1/part-0.jsonl"
    part.parent.mkdir(parents=True)
    write(part, ["old"] * 30)
    assert len(rows_of(tmp_path / given).train)
    (tmp_path / "table" / mark).parent.mkdir()
    written(tmp_path / "table" / mark, b"{}")
    with pytest.raises(DataError, match="table is a table of Delta Lake, Iceberg or Hudi.*scan_delta"):
        rows_of(tmp_path / given)
    assert len(rows_of(part).train), "one file has the rows of one version"


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
    monkeypatch.setattr(jsonl_module.Rows, "read", lambda *_: pytest.fail("read again"))
    rows_of(root, bucket_by_length=True)
    with pytest.raises(pytest.fail.Exception):
        rows_of(root, field=["text", "text"])


def test_a_folder_of_files_to_test_on_is_an_error_that_says_why(tmp_path):
    write(tmp_path / "test.jsonl", ["a"])
    with pytest.raises(DataError, match=r"no files to train on.*test\.jsonl"):
        split_files(tmp_path)


# -- rows by number ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_a_row_is_a_line_that_is_not_blank_wherever_blocks_end(tmp_path, cache, monkeypatch, block, texts_of):
    monkeypatch.setattr(jsonl_module, "_BLOCK_BYTES", block)
    content = b'\n \t\n{"text": "a"}\r\n\r\n\n  {"text": "b \\n c"}  \n' + b" " * 600 + b'\n{"text": "d"}'
    rows = Rows([written(tmp_path / "a", content), written(tmp_path / "b", b'\n{"text": "e"}\n \n')], cache)
    assert texts_of(rows) == ["a", "b \n c", "d", "e"]
    assert [rows.name(i).rpartition(" ")[2] for i in range(4)] == ["3", "6", "8", "2"]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path, cache, texts_of):
    assert texts_of(Rows([written(tmp_path / "a", b'\xef\xbb\xbf{"text": "a"}\n')], cache)) == ["a"]


@pytest.mark.parametrize("end", [".gz", ".zst"])
def test_compressed_files_are_the_same_rows_and_unpacked_once(tmp_path, rows_of, cache, monkeypatch, end):
    root, said = tmp_path / "data", [f"row {i}" for i in range(300)]
    plain = write(root / "train.jsonl", said).read_bytes()
    write(root / "test.jsonl", ["a", "b"])
    if end == ".gz":
        halves = [gzip.compress(half) for half in (plain[:500], plain[500:])]
    else:
        pyarrow = pytest.importorskip("pyarrow", reason=".zst needs it")
        halves = [pyarrow.compress(half, "zstd", asbytes=True) for half in (plain[:500], plain[500:])]
    packed = written(root / f"train.jsonl{end}", b"".join(halves))  # files may be several, one after the other
    (root / "train.jsonl").unlink()
    data = rows_of(root, seq_len=8)
    assert sorted(texts(data.train) + texts(data.valid)) == sorted(said) and texts(data.test) == ["a", "b"]
    monkeypatch.setattr("data.packed.shutil.copyfileobj", lambda *_: pytest.fail("unpacked again"))
    assert len(rows_of(root, seq_len=8).train) == len(data.train)
    monkeypatch.undo()
    written(packed, packed.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"train\.jsonl{end} cannot be unpacked \(.*; copy it again"):
        rows_of(root, seq_len=8)
    assert not list(cache.glob("*unpacked-*.tmp"))


def test_a_long_window_of_zstd_is_named(tmp_path, rows_of):
    """A frame of one raw block whose window is 2^28 bytes, as zstd --long=28 writes."""
    pytest.importorskip("pyarrow", reason=".zst needs it")
    row = b'{"text": "a"}\n'
    frame = b"\x28\xb5\x2f\xfd\0" + bytes([18 << 3]) + (1 | len(row) << 3).to_bytes(3, "little") + row
    root = written(tmp_path / "a.jsonl.zst", frame)
    with pytest.raises(DataError, match=rf"cannot be unpacked .*zstd --long has written: zstd -d --long=31 {root}"):
        rows_of(root)


def test_a_row_of_a_compressed_file_is_named_by_that_file(tmp_path, rows_of):
    root = written(tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "a"}\n{"text": 1}\n'))
    with pytest.raises(DataError, match=rf"^{root} line 2: the field 'text' is not a string"):
        rows_of(root)


def test_rows_beside_their_compressed_copy_are_not_read_twice(tmp_path, rows_of):
    written(tmp_path / "a.jsonl", row := b'{"text": "a"}\n')
    written(tmp_path / "a.jsonl.gz", gzip.compress(row))
    with pytest.raises(DataError, match=r"a\.jsonl and a\.jsonl\.gz, whose content would be read twice; keep one"):
        rows_of(tmp_path)


def test_linked_folders_are_read_and_a_file_with_two_names_is_refused(tmp_path, rows_of):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir(), elsewhere.mkdir()
    written(root / "a.jsonl", b'{"text": "a"}\n')
    written(elsewhere / "b.jsonl", b'{"text": "b"}\n')
    for name, target in {"more": elsewhere, "again": elsewhere, "circle": root}.items():
        (root / name).symlink_to(target)
    assert sorted(texts(rows_of(root, seq_len=8).train)) == ["a", "b"]
    (root / "latest.jsonl").symlink_to("a.jsonl")
    with pytest.raises(DataError, match=r"has a\.jsonl and latest\.jsonl, whose content would be read twice"):
        rows_of(root)


def test_a_cache_in_the_folder_of_the_rows_is_not_read_as_rows(tmp_path, cache, rows_of):
    assert cache.is_relative_to(tmp_path)
    written(tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 10))
    sizes = [len(rows_of(tmp_path, seq_len=8).train) for _ in range(2)]
    assert sizes == [9, 9]  # the tenth is held out


def test_what_nothing_here_unpacks_says_what_to_type(tmp_path, rows_of, monkeypatch):
    root = written(tmp_path / "a.jsonl.zst", b"x")

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("data.packed.import_module", missing)
    with pytest.raises(DataError, match=r"pyarrow. Type pip install pyarrow, or unpack it: zstd -d .*a.jsonl.zst"):
        rows_of(root)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16_says_how_to_convert_it(tmp_path, rows_of, encoding):
    root = written(tmp_path / "a.jsonl", '{"text": "a"}\r\n{"text": "b"}\r\n'.encode(encoding))
    with pytest.raises(
        DataError, match=r"line 1: UTF-16, not UTF-8. Convert the file: iconv -f UTF-16 -t UTF-8 OLD > NEW"
    ):
        rows_of(root)


def test_the_index_is_8_bytes_a_row_and_shared_by_all_who_read(tmp_path, cache, monkeypatch):
    file = write(tmp_path / "a", [str(i) for i in range(10_000)])
    first = Rows([file], cache)
    assert first.index.path.stat().st_size == 8 * 10_001
    monkeypatch.setattr(Rows, "_build", lambda self, folder: pytest.fail("built again"))
    second = Rows([file], cache)
    assert second.index.path == first.index.path
    assert not isinstance(second.index.array, np.memmap) and isinstance(second.index.array.base, np.memmap)


def test_threads_and_forked_processes_can_read_the_same_rows(tmp_path, cache, everywhere, texts_of):
    rows = Rows([write(tmp_path / "a", [str(i) for i in range(1000)])], cache)

    def right(seed: int) -> bool:
        indices = np.random.default_rng(seed).integers(0, 1000, 2000)
        return texts_of(rows, indices) == [str(i) for i in indices]

    everywhere(right)


def test_another_version_of_a_file_gets_another_index_and_the_old_rows_are_an_error(tmp_path, cache, texts_of):
    file = write(tmp_path / "a", ["old", "rows"])
    old = Rows([file], cache)
    write(file, ["new", "rows", "here"])
    assert texts_of(Rows([file], cache)) == ["new", "rows", "here"]
    assert len(list(cache.glob("rows-*"))) == 2
    with pytest.raises(DataError, match=r"/a has changed since it was indexed"):
        texts_of(old)


def test_a_file_that_was_written_anew_with_its_old_size_and_time_has_another_index(tmp_path, cache, rows_of, texts_of):
    file = written(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "long"}\n')
    before = file.stat()
    assert texts_of(Rows([file], cache)) == texts(rows_of(file).train) == ["a", "long"]
    written(file, b'{"text": "long"}\n{"text": "a"}\n')
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync and cp -p do
    assert texts_of(Rows([file], cache)) == texts(rows_of(file).train) == ["long", "a"]


def test_a_corrupt_row_is_named_by_file_line_and_reason_and_the_others_are_read(tmp_path, cache, texts_of):
    good = b'{"text": "good"}\n'
    corrupt = written(tmp_path / "second.jsonl", good + b"\n" + good + b'{"text": "a"\n' + good)
    rows = Rows([write(tmp_path / "first.jsonl", ["a", "b"]), corrupt], cache)
    assert len(rows) == 6
    with pytest.raises(DataError, match=r"/second\.jsonl line 4: not JSON \(Expecting ',' delimiter at character 14\)"):
        texts_of(rows)
    assert texts_of(rows, [0, 1, 2, 3, 5]) == ["a", "b", "good", "good", "good"]


@pytest.mark.parametrize("style", [None, "qwen"])
@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00\\ud83d"])
def test_half_of_a_character_is_found_before_training_whatever_the_tokens(tmp_path, rows_of, style, half):
    rows = ['{"text": "a \\ud83d\\ude00"}', f'{{"text": "b {half}"}}']
    root = written(tmp_path / "a.jsonl", "\n".join(rows).encode())
    options = {"tokenizer": str(tokenizer_folder(tmp_path / "tokenizer", style))} if style else {}
    message = rf"a\.jsonl line 2: the field 'text' holds '{half[:6]}' at character 3, half of a char.*Correct the line"
    with pytest.raises(DataError, match=message.replace("\\u", "\\\\u")):
        rows_of(root, **options)


@pytest.mark.parametrize("style", [None, "qwen", "llama3"])
def test_a_long_row_costs_what_its_first_tokens_cost(tmp_path, rows_of, monkeypatch, style):
    sentence = "Natalia sold 48/2 = 24 clips, and\n\n  that's  all (é).\nIt is 72. "
    root = write(tmp_path / "a.jsonl", [sentence * n for n in (1, 2, 300, 3000)])
    options = {"tokenizer": str(tokenizer_folder(tmp_path / "tokenizer", style))} if style else {}
    vocabulary, given = rows_of(root, seq_len=40, **options).vocabulary, []
    whole = [tokens[:41] for tokens in vocabulary.encode_texts([sentence * n for n in (2, 300)])]
    encode = type(vocabulary).tokens

    def counted(self, texts, **how):
        given.extend(map(len, texts))
        return encode(self, texts, **how)

    monkeypatch.setattr(type(vocabulary), "tokens", counted)
    for bucketed in (False, True):
        source = rows_of(root, seq_len=40, bucket_by_length=bucketed, **options).train
        inputs, targets = source.read(np.array([1, 2, 3]), 0)
        for row, tokens in zip((0, 1, 2), (*whole, whole[1]), strict=True):
            assert inputs[row].tolist() == tokens[:-1] and targets[row].tolist() == tokens[1:]
    assert max(given) < 3000 < len(sentence) * 300
