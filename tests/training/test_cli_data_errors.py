"""Bad data: one line that names the file and the way out, before anything starts, and no half-built cache."""

import functools
import json
import os
import re
import struct
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import numpy as np
import pytest
from commandline import Run, train
from composed import config

from train import main
from training.setup import prepare

WORKERS = ["parallel=ddp", "parallel.dp=2"]
GPT2 = ["model=gpt2", "model.size=tiny", "data.seq_len=8"]
JSONL = [*GPT2, "data=jsonl", "data.root={}"]
SHARDS = [*GPT2, "data=tokens", "data.root={}"]
# So that nothing is downloaded where there is a network, either.
OFFLINE = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
OFFLINE |= {name: "" for name in ("no_proxy", "NO_PROXY")}


def rows(count):
    return [json.dumps({"text": f"row number {i}"}) for i in range(count)]


def shard(tokens, says=None):
    """llm.c's format: 256 int32 of header, then the tokens in 16 bits."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens) if says is None else says
    return header.tobytes() + np.asarray(tokens, "<u2").tobytes()


def idx(array):
    """MNIST's format."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def mnist(folder, label):
    """Small files of MNIST's names, one training label being ``label``."""
    folder.mkdir()
    for name, count in (("train", 120), ("t10k", 20)):
        labels = np.arange(count, dtype=np.uint8) % 10
        if name == "train":
            labels[7] = label
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(np.zeros((count, 28, 28), np.uint8)))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))


def corrupt_rows(path):
    path.write_text("\n".join([*rows(40), "", '{"text": "cut sho', *rows(3)]))


# What lies at {}, overrides, and all that the message must say, {} being the path.
CASES = {
    "a corrupt row": (corrupt_rows, [*JSONL, *WORKERS], ["{} line 42", "not JSON", "Correct the line"]),
    "a row without the field": (
        lambda path: path.write_text("\n".join(rows(20))),
        [*JSONL, "data.field=question"],
        ["{} line 1", "'question'", "data.field", "'text'"],
    ),
    "an empty file of rows": (lambda path: path.write_text(""), JSONL, ["{} is empty", "JSON lines"]),
    "fewer rows than a batch": (
        lambda path: path.write_text("\n".join(rows(10))),
        [*JSONL, *WORKERS, "train.global_batch_size=16"],
        ["9 samples", "train.global_batch_size=16", "largest batch that fits is 8"],
    ),
    "a truncated shard": (
        lambda path: path.write_bytes(shard(np.arange(1000) % 500, says=5000)),
        [*SHARDS, *WORKERS],
        ["{}", "truncated", "5,000 tokens", "3,024"],
    ),
    "a foreign shard": (
        lambda path: path.write_bytes(b"PK\x03\x04" + bytes(5000)),
        SHARDS,
        ["{}", "llm.c's header", "20240520", "data.format=nanogpt"],
    ),
    "a token outside the vocabulary": (
        lambda path: path.write_bytes(shard([1, 2, 60000] * 400)),
        SHARDS,
        ["{}", "token 2 is 60,000", "data.vocab_size=50,257"],
    ),
    "an empty shard": (lambda path: path.write_bytes(b""), SHARDS, ["{}", "is empty"]),
    "an empty text": (
        lambda path: path.write_text(""),
        ["model=transformer", "data=text", "data.root={}"],
        ["{} is empty", "file of text"],
    ),
    "fewer images than a batch": (
        None,
        ["model=convnet", *WORKERS, "train.global_batch_size=2000"],
        ["1439 samples", "train.global_batch_size=2000", "largest batch that fits is 1438"],
    ),
    "a label that no class has": (
        lambda path: mnist(path, 12),
        ["model=convnet", "data=mnist", "data.root={}", *WORKERS],
        ["{}/train-labels-idx1-ubyte", "sample 7 is 12", "0 to 9", "data.num_classes"],
    ),
    "more classes than the model has": (
        None,
        ["model=convnet", "model.num_classes=5"],
        ["label of sample 5 is 5", "0 to 4", "model.num_classes"],
    ),
    "no network to download with": (
        None,
        ["model=convnet", "data=mnist"],
        ["MNIST", "downloaded", "data.root=FOLDER"],
    ),
    "changing shapes in a pipeline": (
        lambda path: path.write_text("\n".join(rows(100))),
        [*JSONL, "data.bucket_by_length=true", "parallel=pipelined"],
        ["data.bucket_by_length=true", "parallel=pipelined", "parallel=ddp", "data.bucket_by_length=false"],
    ),
    "images for a language model": (
        None,
        ["model=transformer", "data=digits"],
        ["model=transformer", "numbers", "leave data= out"],
    ),
    "words for a model of images": (None, ["model=resnet50", "data=stdlib"], ["model=resnet50", "tokens"]),
    "images of another size than the model's": (
        None,
        ["model=classifier", "data=digits", "data.image_size=16"],
        ["model=classifier", "(3, 16, 16)"],
    ),
    "grey images for a model of colours": (
        None,
        ["model=resnet50", "data=digits", "data.image_size=32", "data.channels=1"],
        ["model=resnet50", "(1, 32, 32)"],
    ),
    "images too small to be halved so often": (
        None,
        ["model=classifier", "model.image_size=4"],
        ["model.image_size=4", "at least 8"],
    ),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """``ends("a corrupt row")``: how that case ends, and the path of its data."""

    @functools.cache
    def end(case):
        folder = tmp_path_factory.mktemp("bad")
        path, (make, overrides, _) = folder / "bad", CASES[case]
        if make is not None:
            make(path)
        more = ["logger=none", "device=cpu", f"data.cache_dir={folder}/cache", f"hydra.run.dir={folder}/run"]
        out, err, begin = StringIO(), StringIO(), time.monotonic()
        with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
            for name, value in OFFLINE.items():
                patch.setenv(name, value)
            code = main([*(word.format(path) for word in overrides), *more])
        return Run(code, out.getvalue(), err.getvalue(), time.monotonic() - begin, folder / "run"), path

    return end


@pytest.mark.parametrize("case", CASES)
def test_bad_data_ends_with_one_line_that_names_it_and_the_way_out_and_leaves_nothing_half_built(ends, case):
    run, path = ends(case)
    assert run.code == 1, run.console
    assert "parameters" not in run.stdout and "step" not in run.stdout, "nothing was begun"
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ")
    missing = [words for words in (words.format(path) for words in CASES[case][2]) if words not in line]
    assert missing == [], line
    left = set(os.listdir(run.folder)) if run.folder.exists() else set()
    assert left & {"logs", "metrics.jsonl", "summary.json", "checkpoints"} == set()

    cache = run.folder.parent / "cache"
    found = [path for path in cache.rglob("*") if not path.name.endswith(".lock")] if cache.exists() else []
    # The index of rows is whole: it says where lines start, whatever stands in them.
    whole = [path for path in found if path.name.startswith("rows-") or path.parent.name.startswith("rows-")]
    checked = [path for path in found if path.name.startswith(("checked-", "tokens-"))]
    assert [path for path in found if path not in whole and path not in checked] == []
    if case in ("a corrupt row", "a row without the field", "a token outside the vocabulary"):
        assert checked == [], "what was refused does not count as checked"


def test_a_download_that_cannot_be_is_given_up_in_seconds(ends):
    assert ends("no network to download with")[0].seconds < 2 * ends("an empty shard")[0].seconds + 15


def test_a_corrupt_row_that_is_mended_is_read(ends):
    run, path = ends("a corrupt row")
    path.write_text(path.read_text().replace('{"text": "cut sho', '{"text": "whole"}'))
    overrides = [word.format(path) for word in JSONL]
    setup = prepare(config(*overrides, f"data.cache_dir={run.folder.parent}/cache"))
    assert len(setup.data.train) + len(setup.data.valid) + len(setup.data.test) == 44


def test_a_corrupt_row_that_only_training_comes_upon_ends_it_with_its_file_and_line(tmp_path):
    """Of more than a million rows 10,000 are looked at beforehand: here every other one is corrupt but those."""
    good, bad = b'{"text": "a"}\n', b'{"text: "a"}!\n'
    lines = np.tile(np.frombuffer(good, np.uint8), (1_000_001, 1))
    corrupt = np.arange(1, len(lines), 2)
    corrupt = np.setdiff1d(corrupt, np.linspace(0, len(lines) - 1, 10_000, dtype=np.int64))
    lines[corrupt] = np.frombuffer(bad, np.uint8)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines.tobytes())
    overrides = [word.format(path) for word in JSONL]
    more = ["logger=none", "device=cpu", f"data.cache_dir={tmp_path}/cache", "train.global_batch_size=32"]
    run = train([*overrides, *WORKERS, *more], tmp_path / "run", timeout_s=120)
    assert run.code == 1, run.console
    cause = run.stderr.strip().splitlines()[-1]
    assert re.search(rf"{path} line \d+: not JSON .* Correct the line", cause), run.stderr
    assert not (run.folder / "summary.json").exists()
