"""Hostile files: how each is made, how a command is pointed to it, and what the error must say."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.checkpoint.files import with_checksum

DEEP = b"[" * 100_000
_SAMPLE = (1024 - 12) * b"\0"


@dataclass(frozen=True)
class Hostile:
    """A file, or a folder of files.

    Attributes:
        make: Writes it, given the folder.
        overrides: What points the command to it.
        says: What the error must say.
        model: Which model reads it.
    """

    make: Callable[[Path], object]
    overrides: tuple[str, ...]
    says: tuple[str, ...]
    model: str = "toy"


def shard(count: int, tokens: np.ndarray, magic: int = 20240520, version: int = 1) -> bytes:
    """A token shard of llm.c's format."""
    return struct.pack("<iii", magic, version, count) + _SAMPLE + tokens.astype("<u2").tobytes()


def good(folder: Path) -> None:
    """What some cases need besides: tokens that can be trained on."""
    (folder / "good.bin").write_bytes(shard(40_960, np.arange(40_960) % 50000))


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _shard(says: tuple[str, ...], content: bytes, *more: str) -> Hostile:
    overrides = ("data=tokens", "data.root={folder}/x.bin", "data.cache_dir={folder}/cache", *more)
    return Hostile(_write("x.bin", content), overrides, ("x.bin", *says), "gpt2")


def _rows(says: tuple[str, ...], content: bytes, *more: str) -> Hostile:
    overrides = ("data=jsonl", "data.root={folder}/x.jsonl", "data.cache_dir={folder}/cache", *more)
    return Hostile(_write("x.jsonl", content), overrides, says, "gpt2")


def _text(says: tuple[str, ...], content: bytes) -> Hostile:
    overrides = ("data=text", "data.root={folder}/x.txt", "data.cache_dir={folder}/cache")
    return Hostile(_write("x.txt", content), overrides, says, "gpt2")


def idx(shape: tuple[int, ...], content: bytes, kind: int = 8) -> bytes:
    """An idx file, as MNIST's are."""
    return bytes((0, 0, kind, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + content


def write_mnist(folder: Path, images: bytes, labels: bytes) -> None:
    """The four files of MNIST, with the same content for training and test."""
    for name in ("train", "t10k"):
        (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)


def _mnist(says: tuple[str, ...], images: bytes, labels: bytes) -> Hostile:
    def make(folder: Path) -> None:
        write_mnist(folder, images, labels)

    return Hostile(make, ("data=mnist", "data.root={folder}"), says, "convnet")


MANIFEST = {
    "format": 2,
    "step": 1,
    "seed": 1337,
    "optimizer": "torch.optim.SGD",
    "layout": {
        "parallel": "single", "dp": 1, "pp": 1, "chunks": 1, "precision": "fp32", "stages": [["net1", "relu", "net2"]],
    },
    "tied": {},
    "loss_scale": {"scale": 65536.0, "good_steps": 0},
    "progress": {},
    "files": {},
}  # fmt: skip


def write_checkpoint(folder: Path, **changes: object) -> None:
    """A run directory with one checkpoint, whose manifest is right but for some entries."""
    checkpoint = folder / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps(with_checksum({**MANIFEST, **changes})))


def _manifest(*says: str, **changes: object) -> Hostile:
    says = says or ("manifest.json", *changes)
    return Hostile(
        lambda folder: write_checkpoint(folder, **changes),
        ("train.resume={folder}/run", "train.steps=5"),
        says,
    )


def _manifest_text(says: tuple[str, ...], content: bytes) -> Hostile:
    def make(folder: Path) -> None:
        write_checkpoint(folder)
        (folder / "run" / "checkpoints" / "step-00000001" / "manifest.json").write_bytes(content)

    return Hostile(make, ("mode=eval", "checkpoint={folder}/run"), ("manifest.json", *says))


def _weights(says: tuple[str, ...], content: bytes, name: str = "model.safetensors") -> Hostile:
    return Hostile(_write(name, content), ("model.init_from={folder}",), says)


def _yaml(name: str, text: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / "experiment").mkdir()
        (folder / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")

    return make


def _experiment(text: str, *says: str) -> Hostile:
    return Hostile(_yaml("hostile", text), ("--config-dir={folder}", "experiment=hostile"), says)


CONFIG = {
    "seed": 1,
    "model": {"_target_": "models.toy.toy", "name": "toy", "in_features": 10, "hidden": 10, "out_features": 5},
    "data": {"_target_": "data.random_regression.RandomRegression"},
    "optim": {"_target_": "torch.optim.SGD", "lr": 0.1},
    "scheduler": {"_target_": "training.optimizer.Constant"},
    "train": {},
}
_PIXELS, _LABELS = idx((20, 4, 4), bytes(320)), idx((20,), bytes(range(10)) * 2)
FILES: dict[str, Hostile] = {
    "a shard that is empty": _shard(("empty",), b""),
    "a shard with half a header": _shard(("header",), b"\1\2\3"),
    "a shard of another format": _shard(("header",), shard(10, np.zeros(10), magic=1)),
    "a shard of another version": _shard(("version 7",), shard(10, np.zeros(10), version=7)),
    "a shard that says it has -1 tokens": _shard(("-1",), shard(-1, np.zeros(100))),
    "a shard that says it has too many tokens": _shard(("truncated",), shard(2**31 - 1, np.zeros(100))),
    "a shard that says it has too few tokens": _shard(("after its tokens",), shard(5, np.zeros(100))),
    "a shard with tokens outside the vocabulary": _shard(("65,535", "vocabulary"), shard(100, np.full(100, 65535))),
    "a shard of an odd number of bytes": _shard(("odd",), b"\0" * 101, "data.format=nanogpt"),
    "a shard too short for a sample": _shard((), shard(3, np.zeros(3))),
    "a shard of Llama's tokens": _shard(("32-bit",), shard(10, np.zeros(20), magic=20240801)),
    "rows that are not JSON": _rows(("x.jsonl line 1", "not JSON"), b"hello\n" * 40),
    "rows that are numbers": _rows(("line 1", "a number"), b"1\n" * 40),
    "rows that are lists": _rows(("line 1", "a list"), b"[]\n" * 40),
    "rows without the field": _rows(("line 1", "missing"), b'{"a": 1}\n' * 40),
    "rows with a number for text": _rows(("line 1", "a number"), b'{"text": 1}\n' * 40),
    "rows with null for text": _rows(("line 1", "null"), b'{"text": null}\n' * 40),
    "rows that are nested 100,000 deep": _rows(("line 1", "not JSON"), DEEP + b"\n"),
    "rows that are not UTF-8": _rows(("line 1", "not UTF-8"), b'{"text": "\xff\xfe"}\n' * 40),
    "rows in UTF-16": _rows(("line 1",), ('{"text": "a"}\n' * 40).encode("utf-16")),
    "rows with a NUL byte": _rows(("line 1", "not JSON"), b'{"text": "a\0b"}\n' * 40),
    "rows that are blank": _rows(("no row",), b"\n" * 40),
    "rows with a number of a million digits": _rows(("line 1",), b'{"text": ' + b"1" * 1_000_000 + b"}\n"),
    "a field that is a list of numbers": _rows(("data.field",), b'{"text": "a"}\n' * 40, "data.field=[1,2]"),
    "a field without a name": _rows(("data.field",), b'{"text": "a"}\n' * 40, "data.field=''"),
    "a text that is empty": _text(("empty",), b""),
    "a text that is binary": _text(("no text", "byte 3 is 0"), b"abc\0def"),
    "a text that is not UTF-8": _text(("no text", "not UTF-8"), b"\xff" * 100),
    "a text of one letter": _text(("tokens", "data.seq_len"), b"a"),
    "images of 0 x 0": _mnist(("0 x 0",), idx((20, 0, 0), b""), _LABELS),
    "no images": _mnist(("0 images",), idx((0, 4, 4), b""), idx((0,), b"")),
    "more labels than images": _mnist(("20 images", "10 labels"), _PIXELS, idx((10,), bytes(10))),
    "a label out of range": _mnist(("label", "200"), _PIXELS, idx((20,), b"\xc8" * 20)),
    "images that are cut short": _mnist(("images-idx3",), idx((20, 4, 4), bytes(319)), _LABELS),
    "images with 2**96 pixels": _mnist(("images-idx3",), idx((2**32 - 1,) * 3, b""), _LABELS),
    "images of floating-point numbers": _mnist(("images-idx3",), idx((20, 4, 4), bytes(1280), kind=13), _LABELS),
    "images in four dimensions": _mnist(("images-idx3",), idx((20, 1, 4, 4), bytes(320)), _LABELS),
    "images that are empty": _mnist(("images-idx3",), b"", _LABELS),
    "labels that are empty": _mnist(("labels-idx1",), _PIXELS, b""),
    "a manifest that is empty": _manifest_text(("cannot be read",), b""),
    "a manifest that is a list": _manifest_text(("not the manifest",), b"[]"),
    "a manifest nested 100,000 deep": _manifest_text(("nested",), DEEP),
    "a manifest that was changed": _manifest_text(("damaged", "checksum"), json.dumps(MANIFEST).encode()),
    "a manifest that is not UTF-8": _manifest_text(("cannot be read",), b"\xff{}"),
    "a manifest of a later format": _manifest_text(("not the manifest",), b'{"format": 99}'),
    "a step that is a list": _manifest("manifest.json", "damaged", step=[1]),
    "a manifest without files": _manifest("manifest.json", "damaged", files=None),
    "a configuration that is a list": _manifest(config=[]),
    "a configuration without a model": _manifest(config={"seed": 1}),
    "a configuration with shell lines": _manifest(config={**CONFIG, "launcher": {"setup": ["touch executed"]}}),
    "a configuration with variables": _manifest(config={**CONFIG, "parallel": {"env": {"LD_PRELOAD": "x"}}}),
    "a configuration with callbacks": _manifest(config={**CONFIG, "hydra": {"callbacks": {"x": {}}}}),
    "a configuration with a list for a model": _manifest(config={**CONFIG, "model": []}),
    "a configuration with a defaults list": _manifest(config={**CONFIG, "data": {"defaults": [{"x": "y"}]}}),
    "a configuration that calls a command": _manifest(
        "os.system", "not allowed", config={**CONFIG, "data": {"_target_": "os.system", "command": "touch executed"}}
    ),
    "weights elsewhere": _manifest(
        "../../x.safetensors is missing or no regular file", files={"../../x.safetensors": {"bytes": 1, "sha256": "0"}}
    ),
    "weights at a path": _manifest(
        "/x.safetensors is missing or no regular file", files={"/x.safetensors": {"bytes": 1, "sha256": "0"}}
    ),
    "weights of -1 bytes": _manifest(
        "x.safetensors is missing or no regular file", files={"x.safetensors": {"bytes": -1, "sha256": "0"}}
    ),
    "weights that are missing": _manifest(
        "x.safetensors", "missing", files={"x.safetensors": {"bytes": 1, "sha256": "0"}}
    ),
    "weights that are not safetensors": _weights(("model.init_from", "safetensors"), b"hello"),
    "weights that are empty": _weights(("model.init_from", "safetensors"), b""),
    "weights with a header of exabytes": _weights(("model.init_from", "safetensors"), b"\xff" * 16),
    "weights with a header nested deep": _weights(
        ("model.init_from", "safetensors"), struct.pack("<Q", len(DEEP)) + DEEP
    ),
    "weights that are a pickle": _weights(("pickle", "convert"), b"\x80\x05N.", "model.bin"),
    "weights that are not there": Hostile(lambda folder: None, ("model.init_from={folder}/no",), ("does not exist",)),
    "an experiment that is not YAML": _experiment("train: [1,\n", "experiment/hostile"),
    "an experiment that is a list": _experiment("- 1\n", "experiment/hostile"),
    "an experiment that is a word": _experiment("hello\n", "experiment/hostile"),
    "an experiment with a key twice": _experiment("train:\n  steps: 1\n  steps: 2\n", "steps"),
    "an experiment with an unknown key": _experiment("train:\n  stepz: 1\n", "train.stepz", "experiment/hostile"),
    "an experiment with a Python object": _experiment(
        "train: !!python/object/apply:os.system [id]\n", "experiment/hostile"
    ),
    "an experiment with a NUL byte": _experiment('data:\n  cache_dir: "a\\0b"\n', "data.cache_dir", "NUL"),
    "an experiment with a callback": _experiment(
        "hydra:\n  callbacks:\n    evil:\n      _target_: os.system\n", "hydra.callbacks"
    ),
    "an experiment of a few lines that stand for gigabytes": _experiment(
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        "experiment/hostile.yaml", "aliases",
    ),
    "an experiment nested 10,000 deep": _experiment("train: " + "[" * 10_000, "experiment/hostile"),
}


def prepare(folder: Path, name: str) -> None:
    """Write what the case ``name`` needs into ``folder``."""
    good(folder)
    if name in FILES:
        FILES[name].make(folder)
    elif name == "an experiment that includes itself":
        _yaml("itself", "defaults:\n  - /experiment: itself\n")(folder)
    elif name == "a package that a file allows":
        _yaml("allowed", "allow: [os]\nscheduler:\n  _target_: os.system\n")(folder)
    elif name == "a folder of modules that a file names":
        _yaml("imported", "import_from: [/tmp]\n")(folder)
    elif name == "a callback in a file":
        (folder / "hydra" / "callbacks").mkdir(parents=True)
        (folder / "hydra" / "callbacks" / "evil.yaml").write_text("evil:\n  _target_: os.system\n")
    elif name == "shell lines from elsewhere":
        text = "defaults:\n  - override /launcher: slurm\nlauncher:\n  setup: [touch executed]\n"
        _yaml("shell", text)(folder)
