"""Token shards of llm.c and nanoGPT: what is read, how it is split, and what is refused."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from common.errors import DataError
from data.loader import EvalBatches
from data.tokens import Tokens


def write_llmc(path: Path, tokens, magic=20240520, version=1, says=None, dtype="<u2") -> Path:
    """As dev/data/data_common.py of llm.c writes it."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if says is None else says
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype=dtype).tobytes())
    return path


def prepared(root: Path, tmp_path: Path, seq_len: int = 4, **options) -> Tokens:
    data = Tokens(str(root), seq_len, cache_dir=str(tmp_path / "cache"), **options)
    data.prepare()
    return data


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shards").mkdir()
    return tmp_path / "shards"


def test_a_folder_of_llmcs_shards_is_split_by_their_names(folder, tmp_path):
    write_llmc(folder / "fineweb_val_000000.bin", range(1000, 1010))
    write_llmc(folder / "fineweb_train_000001.bin", range(11))
    write_llmc(folder / "fineweb_train_000002.bin", range(100, 114))
    (folder / "README.md").write_text("not a shard")
    data = prepared(folder, tmp_path)
    assert (len(data.train), len(data.valid), data.test) == (2 + 3, 2, None)
    inputs, targets = data.train.read(np.array([4, 0, 2, 1]), 0)
    assert inputs[:, 0].tolist() == [108, 0, 100, 4]
    assert targets.tolist()[0] == [109, 110, 111, 112]
    assert (data.vocab_size, data.seq_len) == (50257, 4)
    assert "train 25 tokens (5 samples), valid 10 tokens (2 samples)" in data.description


def test_a_window_never_crosses_from_one_shard_to_the_next(folder, tmp_path):
    for i in range(5):
        write_llmc(folder / f"train_{i}.bin", [i] * (7 + i))
    data = prepared(folder, tmp_path, seq_len=3)
    inputs, targets = data.train.read(np.arange(len(data.train)), 0)
    assert (inputs == inputs[:, :1]).all() and (targets == inputs).all()
    assert len(data.train) == sum((7 + i - 1) // 3 for i in range(5))
    assert sum(int(batch.weights.sum()) for batch in EvalBatches(data.train, 4)) == len(data.train)


@pytest.mark.parametrize("name", ["train.bin", "anything"])
def test_one_file_is_cut_90_5_5(tmp_path, name):
    write_llmc(tmp_path / name, np.arange(1000))
    data = prepared(tmp_path / name, tmp_path, seq_len=9)
    starts = [int(part.read(np.array([0]), 0)[0][0, 0]) for part in (data.train, data.valid, data.test)]
    assert starts == [0, 900, 950] and len(data.train) == 899 // 9


def test_nanogpts_files_are_read_where_the_format_is_named(folder, tmp_path):
    for name in ("train.bin", "val.bin"):
        np.arange(100, dtype="<u2").tofile(folder / name)
    with pytest.raises(DataError, match=r"train.bin does not start with llm.c's header.*data.format=nanogpt"):
        prepared(folder, tmp_path)
    data = prepared(folder, tmp_path, format="nanogpt")
    assert (len(data.train), len(data.valid)) == (24, 24)
    assert data.train.read(np.array([1]), 0)[0].tolist() == [[4, 5, 6, 7]]


def refuse(folder: Path, tmp_path: Path, message: str, **options) -> None:
    """With the file's name, and with nothing left in the cache."""
    with pytest.raises(DataError, match=message) as caught:
        prepared(folder, tmp_path, **options)
    assert "train_000.bin" in str(caught.value)
    cache = tmp_path / "cache"
    assert not cache.exists() or not [path for path in cache.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"says": 101}, "truncated: its header says 101 tokens, .* 1,226 bytes, and it has 1,224"),
        ({"says": 99}, "has bytes after its tokens.* 99 tokens"),
        ({"says": 0}, "is empty"),
        ({"version": 2}, "version 2 .* only version 1"),
        ({"magic": 20240801, "version": 7, "dtype": "<u4"}, "32-bit tokens of Llama 3"),
        ({"magic": 20240522}, "multiple-choice"),
        ({"magic": 1234}, "20240520, not 1234.*data.format=nanogpt"),
    ],
)
def test_a_shard_whose_header_is_not_right_is_refused(folder, tmp_path, options, message):
    write_llmc(folder / "train_000.bin", range(100), **options)
    refuse(folder, tmp_path, message)


@pytest.mark.parametrize("format", ["auto", "llmc", "nanogpt"])
def test_an_empty_file_is_refused(folder, tmp_path, format):
    (folder / "train_000.bin").touch()
    refuse(folder, tmp_path, "is empty", format=format)


def test_a_file_cut_within_its_header_is_refused(folder, tmp_path):
    path = write_llmc(folder / "train_000.bin", range(100))
    path.write_bytes(path.read_bytes()[:500])
    refuse(folder, tmp_path, "is truncated")


def test_an_odd_number_of_bytes_is_refused(folder, tmp_path):
    (folder / "train_000.bin").write_bytes(bytes(101))
    refuse(folder, tmp_path, "101 bytes, an odd number", format="nanogpt")


def test_llmcs_header_is_not_read_as_nanogpts_tokens(folder, tmp_path):
    write_llmc(folder / "train_000.bin", range(100))
    refuse(folder, tmp_path, "leave data.format out", format="nanogpt")


def test_a_token_outside_the_vocabulary_is_named_with_its_place(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("data.tokens._BLOCK_TOKENS", 7)
    write_llmc(folder / "train_000.bin", [*range(40), 50257, *range(40)])
    refuse(folder, tmp_path, "token 40 is 50,257, outside a vocabulary of data.vocab_size=50,257")
    assert len(prepared(folder, tmp_path, vocab_size=50258).train) == 20


def test_tokens_are_looked_at_once_and_again_when_a_file_changes(folder, tmp_path, monkeypatch):
    write_llmc(folder / "train_000.bin", range(100))
    prepared(folder, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("data.tokens.check_tokens", lambda *_: pytest.fail("looked at a second time"))
        prepared(folder, tmp_path)
    write_llmc(folder / "train_000.bin", [60_000] * 101)
    with pytest.raises(DataError, match="60,000"):
        prepared(folder, tmp_path)


@pytest.mark.parametrize("name, tokens", [("train.bin", 4), ("val.bin", 100)])
def test_nothing_to_train_on_is_an_error_with_the_numbers(folder, tmp_path, name, tokens):
    write_llmc(folder / name, range(tokens))
    with pytest.raises(DataError, match="no sample to train on.*5 tokens for one sample of data.seq_len=4"):
        prepared(folder, tmp_path)


def test_a_missing_root_and_a_folder_without_shards_are_errors_that_name_them(tmp_path):
    with pytest.raises(DataError, match="data.root=FILE_OR_FOLDER"):
        Tokens()
    with pytest.raises(DataError, match=f"data.root={tmp_path}/nowhere does not exist"):
        prepared(tmp_path / "nowhere", tmp_path)
    with pytest.raises(DataError, match=rf"data.root={tmp_path} holds no file named \*.bin"):
        prepared(tmp_path, tmp_path)


@pytest.mark.parametrize("bad", [{"seq_len": 0}, {"vocab_size": 0}, {"format": "raw"}, {"num_workers": -1}])
def test_senseless_values_are_errors_that_name_the_key(bad):
    [(key, value)] = bad.items()
    with pytest.raises(DataError, match=f"data.{key}={value}"):
        Tokens("somewhere", **bad)


def test_a_started_process_gets_the_paths_and_not_the_tokens(folder, tmp_path):
    write_llmc(folder / "train_000.bin", np.arange(50_000))
    sent = pickle.dumps(prepared(folder, tmp_path).train)
    assert len(sent) < 2000
    assert pickle.loads(sent).read(np.array([3]), 0)[0].tolist() == [[12, 13, 14, 15]]
