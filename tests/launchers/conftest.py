"""Makes the project and the worker functions of these tests importable in processes they start; a SLURM, and what the
same run gives without one."""

import argparse
import functools
import os
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
_PATHS = str(_HERE.parents[1]), str(_HERE), str(_HERE.parent / "training")
os.environ["PYTHONPATH"] = os.pathsep.join([*_PATHS, os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A real SLURM of two nodes on this machine, for the whole session; its commands find it by SLURM_CONF."""
    from clusters import started

    with started(tmp_path_factory.mktemp("slurm") / "cluster") as running, pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture(scope="session")
def recipe(tmp_path_factory):
    """Four steps of the tiny GPT-2 on a small text, two stages x two replicas."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(Path(argparse.__file__).read_text())
    return [
        "parallel=pipe_ddp", "model=gpt2", "model.size=tiny", "data=text", f"data.root={folder}/text.txt",
        f"data.cache_dir={folder}/cache", "data.seq_len=32", "train.steps=4", "train.global_batch_size=16",
        "train.precision=fp32", "optim=sgd", "scheduler=constant", "train.eval_batches=1", "logger=none",
        "parallel.timeout_s=60",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def local_losses(recipe, tmp_path_factory):
    """Starts ``recipe`` on this machine's own workers; call it for the losses."""
    from commandline import Started

    started = Started(recipe, tmp_path_factory.mktemp("local") / "run")

    @functools.cache
    def losses():
        run = started.wait()
        assert run.code == 0, run.console
        return run.losses

    yield losses
    started.kill()
