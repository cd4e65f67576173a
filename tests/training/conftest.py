"""What the tests of training share: a small text, small disks, and runs of the command line."""

import argparse
import subprocess
from pathlib import Path

import hugging_face
import pytest
from commandline import Started, train, wait_until


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> list[str]:
    """Overrides for a text of 100 kB, read in milliseconds: samples of 32 tokens."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(Path(argparse.__file__).read_text())
    return ["data=text", f"data.root={folder}/text.txt", f"data.cache_dir={folder}/cache", "data.seq_len=32"]


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """The folder of train.jsonl and test.jsonl: questions and answers."""
    return hugging_face.write_rows(tmp_path_factory.mktemp("rows") / "gsm8k")


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """A folder as Hugging Face's, of a small random GPT-2."""
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    return hugging_face.make_gpt2(tmp_path_factory.mktemp("published"))


@pytest.fixture
def small_disk(tmp_path):
    """``small_disk("8m")``: a file system of that size of its own; skips the test where none can be mounted."""
    mounted = []

    def mount(size):
        where = tmp_path / f"disk-{len(mounted)}"
        where.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except FileNotFoundError:
            pytest.skip("needs the command mount, for a small disk to fill (Linux)")
        if done.returncode:
            pytest.skip(f"a small disk to fill needs root: mount says {done.stderr.strip().rpartition(': ')[2]}")
        mounted.append(where)
        return where

    yield mount
    for where in mounted:
        subprocess.run(["umount", "--lazy", str(where)], check=True, timeout=20)


@pytest.fixture
def start(tmp_path):
    """``start("parallel=ddp")``: a run of ten million steps, from its third record, or from ``until(it)``, on."""
    endless = ["train.epochs=null", "train.steps=10000000", "logger=none", "device=cpu", "parallel.threads=1"]
    started = []

    def three_records(run):
        metrics = run.folder / "metrics.jsonl"
        return metrics.exists() and metrics.read_text().count("\n") >= 3

    def begin(*overrides, until=three_records, **options):
        run = Started([*endless, *overrides], tmp_path / "run", **options)
        started.append(run)

        def begun():
            assert run.process.poll() is None, run.wait().console
            return until(run)

        wait_until(begun, 120, "a run that trains")
        return run

    yield begin
    for run in started:
        for process in run.family():
            process.resume()
        run.kill()


@pytest.fixture(scope="session")
def cli(tmp_path_factory, text):
    """``cli("parallel=pipe_ddp", …)``: one run per layout, in which many tests look.

    Five steps of SGD on the tiny GPT-2, eight micro-batches of two sequences in every layout.
    """
    recipe = [
        "model=gpt2", "model.size=tiny", "model.dropout=0.1", *text, "train.steps=5", "train.global_batch_size=16",
        "train.precision=fp32", "train.grad_clip=0.5", "train.eval_every=2", "train.eval_batches=1", "optim=sgd",
        "scheduler=constant",
    ]  # fmt: skip
    runs = {}

    def get(*layout: str, **options):
        if layout not in runs:
            folder = tmp_path_factory.mktemp("cli") / "run"
            run = train([*recipe, *layout], folder, **options)
            assert run.code == 0, run.console
            runs[layout] = run
        return runs[layout]

    get.recipe = recipe
    return get


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """`python train.py` with nothing said but where to: one process, two epochs. In a folder with a space."""
    run = train(["logger=none"], tmp_path_factory.mktemp("toy") / "my first run")
    assert run.code == 0, run.console
    return run


@pytest.fixture
def deterministic_again():
    """Undoes what train.deterministic sets for the whole process."""
    import torch

    yield
    torch.use_deterministic_algorithms(False)
