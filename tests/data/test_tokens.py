"""Token shards of llm.c and nanoGPT: what is read, how it is split, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from file_formats import shard

from common.errors import DataError
from data import tokens
from data.loader import EvalBatches
from data.tokens import Tokens


def write_llmc(path: Path, tokens, **format) -> Path:
    path.write_bytes(shard(tokens, **format))
    return path


@pytest.fixture
def tokens_of(prepared):
    return lambda root, **options: prepared(Tokens, root, **{"seq_len": 4} | options)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shards").mkdir()
    return tmp_path / "shards"


def test_a_folder_of_llmcs_shards_is_split_by_their_names(folder, tokens_of):
    write_llmc(folder / "fineweb_val_000000.bin", range(1000, 1010))
    write_llmc(folder / "fineweb_train_000001.bin", range(11))
    write_llmc(folder / "fineweb_train_000002.bin", range(100, 114))
    (folder / "README.md").write_text("not a shard")
    data = tokens_of(folder)
    assert (len(data.train), len(data.valid), data.test) == (2 + 3, 2, None)
    inputs, targets = data.train.read(np.array([4, 0, 2, 1]), 0)
    assert inputs[:, 0].tolist() == [108, 0, 100, 4]
    assert targets.tolist()[0] == [109, 110, 111, 112]
    assert (data.vocab_size, data.seq_len) == (50257, 4)
    assert "train 25 tokens (5 samples), valid 10 tokens (2 samples)" in data.description


def test_a_folder_within_it_names_a_split_too(folder, tokens_of):
    for name in ("train", "val"):
        (folder / name).mkdir()
        write_llmc(folder / name / "000000.bin", range(11))
    data = tokens_of(folder)
    assert (len(data.train), len(data.valid)) == (2, 2)


def test_a_window_never_crosses_from_one_shard_to_the_next(folder, tokens_of):
    for i in range(5):
        write_llmc(folder / f"train_{i}.bin", [i] * (7 + i))
    data = tokens_of(folder, seq_len=3)
    inputs, targets = data.train.read(np.arange(len(data.train)), 0)
    assert (inputs == inputs[:, :1]).all() and (targets == inputs).all()
    assert len(data.train) == sum((7 + i - 1) // 3 for i in range(5))
    assert sum(int(batch.weights.sum()) for batch in EvalBatches(data.train, 4)) == len(data.train)


@pytest.mark.parametrize("name", ["train.bin", "anything"])
def test_one_file_is_cut_90_5_5(tmp_path, tokens_of, name):
    write_llmc(tmp_path / name, np.arange(1000))
    data = tokens_of(tmp_path / name, seq_len=9)
    starts = [int(part.read(np.array([0]), 0)[0][0, 0]) for part in (data.train, data.valid, data.test)]
    assert starts == [0, 900, 950] and len(data.train) == 899 // 9


def test_nanogpts_files_are_read_where_the_format_is_named(folder, tokens_of):
    for name in ("train.bin", "val.bin"):
        np.arange(100, dtype="<u2").tofile(folder / name)
    data = tokens_of(folder, format="nanogpt")
    assert (len(data.train), len(data.valid)) == (24, 24)
    assert data.train.read(np.array([1]), 0)[0].tolist() == [[4, 5, 6, 7]]


def test_a_token_outside_the_vocabulary_is_named_where_it_is_read(folder, tokens_of, monkeypatch):
    monkeypatch.setattr(tokens, "_LOOKED_AT", 30)  # the others are checked when they are read
    write_llmc(folder / "train_000.bin", [*range(40), 50257, *range(40)])
    data = tokens_of(folder)
    data.train.read(np.arange(9), 0)
    with pytest.raises(DataError, match="train_000.bin holds the token 50,257, outside a vocabulary of .*=50,257"):
        data.train.read(np.array([9, 3]), 0)
    tokens_of(folder, vocab_size=50258).train.read(np.arange(20), 0)


LONG = [7, 100_000, 3, 65_536, 128_000, 9, 1, 2, 3, 70_000]
BEYOND = {"vocab_size": 128_256}


def test_tokens_of_32_bits_are_read_by_a_header_or_by_their_type(folder, tokens_of):
    write_llmc(folder / "train_0.bin", LONG, magic=20240801, version=7, dtype="<u4")
    wanted = tokens_of(folder, **BEYOND).train.read(np.arange(2), 0)[0]
    assert wanted.flatten().tolist() == LONG[:8]
    for name, options in {
        "little.bin": {"format": "nanogpt", "dtype": "uint32"}, "big.bin": {"format": "nanogpt", "dtype": ">u4"},
        "array.npy": {},
    }.items():  # fmt: skip
        path, stored = folder.parent / name, np.asarray(LONG * 10, dtype=options.get("dtype", "int64"))
        np.save(path, stored) if name.endswith("npy") else path.write_bytes(stored.tobytes())
        assert torch.equal(tokens_of(path, **options, **BEYOND).train.read(np.arange(2), 0)[0], wanted)


REFUSED_TYPES = {
    "32 bits as 16": (LONG * 20, "<u4", {}, "as uint16, every second number is below 8. Set data.dtype=uint32"),
    "32 bits of the largest vocabularies": ([7, 262_143, 140_000] * 9, "<u4", {"vocab_size": 262_144}, "dtype=uint32"),
    "a text": (list(b'{"text": "a"}\n' * 20), "u1", {}, "is a text or an archive, not tokens"),
    "an odd number of bytes": ([1] * 50 + [2], "u1", {}, "has 51 bytes, but a token of uint16 has 2"),
    "no type of whole numbers": ([1] * 50, "<u2", {"dtype": "float32"}, "dtype=float32 is not a type of whole numbers"),
}


@pytest.mark.parametrize("numbers, stored, options, says", REFUSED_TYPES.values(), ids=REFUSED_TYPES)
def test_tokens_of_another_type_are_refused_with_the_one_to_type(tmp_path, tokens_of, numbers, stored, options, says):
    (tmp_path / "a.bin").write_bytes(np.asarray(numbers, dtype=stored).tobytes())
    with pytest.raises(DataError, match=says):
        tokens_of(tmp_path / "a.bin", format="nanogpt", **{**BEYOND, **options})


def test_a_header_and_a_type_must_agree(folder, tokens_of):
    write_llmc(folder / "train_0.bin", range(50))
    with pytest.raises(DataError, match="has tokens of uint16, not of data.dtype=uint32"):
        tokens_of(folder, dtype="uint32")


@pytest.mark.parametrize("name, tokens", [("train.bin", 4), ("val.bin", 100)])
def test_nothing_to_train_on_is_an_error_with_the_numbers(folder, tokens_of, name, tokens):
    write_llmc(folder / name, range(tokens))
    with pytest.raises(DataError, match="no sample to train on.*5 tokens for one sample of data.seq_len=4"):
        tokens_of(folder)
