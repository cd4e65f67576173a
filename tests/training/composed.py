"""Configurations and runs without a command line: in this process, or on each rank of a pool."""

import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path

from commandline import ROOT, records

from conf.composition import Composed, pop_hydra
from conf.composition import compose as composed_of
from conf.instantiate import to_config, to_dict
from data.loader import TrainBatches
from launchers.world import STORE_FILE
from models.cut import Experts
from training.checkpoint.configuration import saved_config
from training.checkpoint.files import with_checksum

# Ranks and command line of each strategy, all with four micro-batches a step.
LAYOUTS = {
    "single": (1, ["parallel=single", "parallel.chunks=4"]),
    "model_parallel": (1, ["parallel=model_parallel", "parallel.chunks=4"]),
    "ddp": (2, ["parallel=ddp", "parallel.dp=2", "parallel.chunks=2"]),
    "pipelined": (2, ["parallel=pipelined", "parallel.chunks=4"]),
    "pipe_ddp": (4, ["parallel=pipe_ddp", "parallel.dp=2", "parallel.chunks=2", "parallel.order=pp_dp"]),
    "fsdp": (2, ["parallel=fsdp", "parallel.dp=2", "parallel.chunks=2"]),
    "hsdp": (4, ["parallel=hsdp", "parallel.dp=4", "parallel.shard=2", "parallel.chunks=1"]),
    "pipe_fsdp": (4, ["parallel=pipe_fsdp", "parallel.dp=2", "parallel.chunks=2"]),
    "tensor": (2, ["parallel=tensor", "parallel.chunks=4"]),
    "tensor sequence": (2, ["parallel=tensor", "parallel.sequence=true", "parallel.chunks=2"]),
    "pipelined tp": (4, ["parallel=pipelined", "parallel.tp=2", "parallel.chunks=4"]),
    "fsdp tp": (4, ["parallel=fsdp", "parallel.dp=2", "parallel.tp=2", "parallel.sequence=true"]),
}
QUIET = ("logger=none", "device=cpu", "parallel.threads=1")


def compose(*overrides: str):
    """What ``python train.py *overrides`` composes."""
    import hydra

    from conf.schema import register

    register()
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return hydra.compose("train", list(overrides))


def config(*overrides: str):
    """The same as the training gets it: plain values. One thread, no logger."""
    return to_config(to_dict(compose(*QUIET, *overrides)))


def again(run_dir: Path, *words: str):
    """What a command composes that names a run: its checkpoint's configuration, under ``words``."""
    words = [*QUIET, *words, *(() if any("resume" in word for word in words) else [f"checkpoint='{run_dir}'"])]
    return to_config(to_dict(composed_of(words, saved=saved_config(words))))


def typed(*words: str, folder: Path | str = ".") -> Composed:
    """What a command line composes, with how it was composed."""
    cfg = composed_of(words, with_hydra=True)
    hydra = pop_hydra(cfg)
    hydra.runtime.output_dir = str(folder)
    return Composed.of(cfg, hydra)


def plain(cfg):
    """A configuration that a program has made, as its run gets it."""
    from training.command.app import plain

    return plain(Composed(cfg, Path())).cfg


def plain_typed(*words: str):
    """The configuration of a command line, as its run gets it."""
    from training.command.app import plain

    return plain(typed(*words)).cfg


def execute(cfg, folder: Path, world=None) -> None:
    """Run a configuration that a program has made, in its mode."""
    from training.command.app import execute

    execute(Composed(cfg, Path(folder), world=world))


def run(folder: Path, *overrides: str) -> dict:
    """One training in this process; returns its summary."""
    from training.run.prepare import prepare
    from training.run.rank import run as training

    folder.mkdir(parents=True, exist_ok=True)
    return training(prepare(config(*overrides)), folder)


def planned(cfg, world=None):
    """The plan of a run that no other process has made: each rank makes the same."""
    from training.run.prepare import model_and_data, plan_of

    cfg, chain, _ = model_and_data(cfg)
    return plan_of(cfg, chain, world.size, world.nodes) if world is not None else plan_of(cfg, chain)


def training(cfg, folder: Path, world=None) -> dict:
    """A run of a configuration as it is, unchecked; returns its summary."""
    from launchers import World
    from training.run.prepare import adopt, build_setup
    from training.run.rank import run

    world = world or World.alone()
    adopt(cfg, world)
    setup = build_setup(cfg, planned(cfg, world), world)
    if any(isinstance(cut, Experts) for cut in setup.chain.cut.values()):  # its losses are facts of the plan
        setup.plan = replace(setup.plan, **setup.examination.for_plan())
    return run(setup, folder, world)


def for_rank(folder: Path, *overrides: str, **sections) -> tuple[dict, str, str]:
    """What ``run_on_rank`` is given; ``folder`` is made. ``sections`` take the place of those composed."""
    folder.mkdir(parents=True, exist_ok=True)
    return to_dict(compose(*QUIET, *overrides)) | sections, str(folder), str(folder / f"meeting-{time.monotonic_ns()}")


def run_layout(ranks, layout: str | tuple[int, list[str]], folder: Path, *overrides: str, **sections) -> Path:
    """A training under one of LAYOUTS, or one like them, on a pool of ranks; returns ``folder``."""
    size, where = LAYOUTS[layout] if isinstance(layout, str) else layout
    ranks.run(size, run_on_rank, *for_rank(folder, *overrides, *where, **sections))
    return folder


def run_on_rank(tree: dict, folder: str, meeting: str) -> dict:
    """For a pool of ranks: the same training on each. Returns the summary.

    tree     the configuration in plain values
    meeting  the path of a file that no other run has had
    """
    import torch.distributed as dist

    from launchers import World
    from launchers import meeting as meetings

    if not dist.is_initialized():
        return training(to_config(tree), Path(folder))
    # the pool's own group: a run makes one for itself
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    os.environ[STORE_FILE], meetings._connections = meeting, itertools.count()
    return training(to_config(tree), Path(folder), World(rank, size, rank, size, "local"))


def steps(folder: Path) -> list[dict]:
    return [line for line in records(folder) if "loss" in line]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in steps(folder)]


def saved(folder: Path, step: int, kind: str = "model") -> dict:
    """All tensors of a checkpoint by name, read with nothing of this project."""
    from safetensors.torch import load_file

    found = {}
    for path in sorted((folder / "checkpoints" / f"step-{step:08d}").glob(f"{kind}-*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys(), "a tensor stands in two files"
        found |= tensors
    return found


def same_bits(one: Path, other: Path, *steps: int) -> bool:
    """Whether two runs have saved the same weights and states; AssertionError with the names of those that differ."""
    import torch

    for step, kind in itertools.product(steps, ("model", "optimizer")):
        ours, wanted = saved(one, step, kind), saved(other, step, kind)
        assert ours.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []
    return True


def rewrite_manifest(checkpoint: Path, change) -> None:
    """The manifest of a checkpoint as its ``change(manifest)`` leaves it, with a checksum that fits."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    change(manifest)
    (checkpoint / "manifest.json").write_text(json.dumps(with_checksum(manifest)))


def change_batches(monkeypatch, steps, change) -> None:
    """The batches of ``steps`` are read as ``change(batch)``."""
    read = TrainBatches.__getitem__

    def changed(self, step):
        batch = read(self, step)
        return change(batch) if step in steps else batch

    monkeypatch.setattr(TrainBatches, "__getitem__", changed)
