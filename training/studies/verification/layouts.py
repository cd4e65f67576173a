"""Running layouts, and comparing what a run of each has left with what one process has."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from conf.instantiate import to_config, to_dict
from launchers import World, run_workers
from launchers.worker import redirect_output
from models.chain import Chain
from models.given import pack_given, unpack_given
from parallel.layout import Layout
from parallel.schedules import SCHEDULES
from parallel.strategies import STRATEGIES
from training.checkpoint.files import Checkpoint, step_name
from training.checkpoint.load import Tensors
from training.reporting.metrics import METRICS, read_records
from training.run.prepare import prepare
from training.run.rank import run
from training.studies.verification.probes import largest_difference
from training.studies.verification.recording import recorded

MOMENTUM = 0.9
# After its first step, the momentum of SGD is the gradient. At a hundred times this rate, ResNet-50 amplifies rounding
# tenfold at every step.
_PLAIN = {"_target_": "torch.optim.SGD", "lr": 1e-4, "momentum": MOMENTUM}
# The keys of one process; a typed order of the ranks stays.
ONE = {key: value for key, value in Layout.single().into({}).items() if key != "order"}
_SPREADS = 3.0  # under bf16 and fp16: differences up to this many times what rounding changes are rounding
OWN = "with your optimizer"
_KINDS = {"loss": "loss", "grad_norm": "gradient norm", "step": "", "lr": "", "skipped": ""}
COMPARED = (
    "loss", "metrics", "gradient norm", "gradients", "weights", "buffers", "optimizer", "evaluation", "next step", OWN,
)  # fmt: skip


@dataclass
class Compared:
    """A layout that has run, and how it compares with one process.

    Attributes:
        name: As it is typed.
        place: The keys of the section ``parallel``.
        optimizer: The name of the user's.
        holds: Whether it trains as one process does; None where the model cannot be cut like that.
        reason: Why it was not run, why it failed, or where it first differs.
        differences: What was compared: its largest relative difference and where that is.
        losses: Of each step with the user's optimizer.
        seconds: How long it took.
    """

    name: str
    place: dict[str, Any]
    optimizer: str = ""
    holds: bool | None = None
    reason: str = ""
    differences: dict[str, tuple[float, str]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def largest(self) -> tuple[str, float, str]:
        """What differs most, by how much and where, your optimizer aside."""
        return max(((k, d, at) for k, (d, at) in self.differences.items() if k != OWN), key=lambda one: one[1])

    def __str__(self) -> str:
        if not self.differences:
            return f"{self.name}: {self.reason}"
        kind, size, at = self.largest
        own = f"with your {self.optimizer} {self.differences[OWN][0]:.0e}"
        text = f"{self.name}: largest difference {size:.0e} ({kind} {at}), {own}, {self.seconds:.1f} s"
        return text + f"\n      {self.reason}" * bool(self.reason)


def places(processes: int, microbatches: int) -> Iterator[dict[str, Any]]:
    """Yield the keys of the section ``parallel`` for each layout of about ``processes`` processes."""
    processes = max(2, processes)  # with one, nothing is cut
    half = max(2, processes // 2)
    for name, info in STRATEGIES.items():
        replicas = [1] if not info.replicas else [2] if info.stages else sorted({2, processes})
        if info.shards == "node":
            replicas = [processes]
        stages = [1] if not info.stages else [half] if info.replicas else sorted({2, processes})
        for dp, pp in ((dp, pp) for dp in replicas for pp in stages if name != "single"):
            place = {**ONE, "name": name, "dp": dp, "pp": pp, "chunks": max(1, microbatches // dp)}
            place |= {"shard": max(1, dp // 2)} if info.shards == "node" else {}
            schedules = ["gpipe"] if not info.stage_per_rank else SCHEDULES if pp == stages[0] else ["1f1b"]
            yield from ({**place, "schedule": schedule} for schedule in schedules)


def name_of(place: Mapping[str, Any]) -> str:
    """Return a layout as it is typed."""
    words = [f"parallel={place['name']}"]
    words += [f"{key}={place[key]}" for key in ("dp", "pp", "shard") if place[key] not in (1, None)]
    words += [f"chunks={place['chunks']}"] if place["name"] == "single" else []
    words += [f"precision={place['precision']}"] if "precision" in place else []
    return " ".join([*words, *[f"schedule={place['schedule']}"] * STRATEGIES[place["name"]].stage_per_rank])


def as_run(cfg: Any, place: Mapping[str, Any]) -> dict:
    """Return the tree of a configuration to train in a layout, which may name a precision, and to report nowhere."""
    tree, place = to_dict(cfg), dict(place)
    tree["train"]["precision"] = place.pop("precision", cfg.train.precision)
    tree |= {"mode": "train", "logger": {"_target_": "training.reporting.NoLogger"}, "loggers": None, "callbacks": None}
    tree |= {"print_config": False, "launcher": {"name": "local", "max_restarts": 0, "allow_mixed": False}}
    tree["parallel"] |= {**place, "timeout_s": cfg.verify.timeout_s}
    tree["train"] |= {"resume": None, "steps": cfg.verify.steps, "epochs": None}
    return tree


class Runs:
    """Runs layouts, and compares each with the first one.

    Attributes:
        cfg: The configuration to verify.
        folder: Where runs write.
        chain: The model.
        microbatches: Of a step, in all replicas.
        limits: The largest difference of each thing compared that is none.
        first: The layout that the others are compared with, once it has run.
    """

    def __init__(self, cfg: Any, folder: Path, chain: Chain, microbatches: int) -> None:
        """Take what is compared with what."""
        self.cfg, self.folder, self.chain, self.microbatches = cfg, folder, chain, microbatches
        self.limits = {**dict.fromkeys(COMPARED, cfg.verify.tolerance), OWN: math.inf}
        self.steps, self.samples = cfg.verify.steps, cfg.train.global_batch_size // microbatches
        self.first = self._before = Compared("", {})
        self._parameters = {name for name, _ in chain.skeleton().named_parameters()}

    def compare(self, place: dict[str, Any]) -> Compared:
        """Run a layout, with one step more from the checkpoint of the layout before it, and compare."""
        began, layout = time.monotonic(), Compared(name_of(place), place, self.cfg.optim._target_.rpartition(".")[2])
        try:
            if place["dp"] > 1 and place["dp"] * place["chunks"] != self.microbatches:
                raise UserError(f"{self.microbatches} micro-batches cannot be dealt to {place['dp']} replicas")
            if (needed := _processes(place)) > self.cfg.verify.processes:
                raise UserError(f"needs {needed} processes, and verify.processes={self.cfg.verify.processes}")
            prepare(self._job(place, "plain"))
        except UserError as error:
            layout.reason = str(error)
            return layout
        self.first = self.first if self.first.place else layout
        before = self._before if self._before.place else layout
        jobs = [("plain", None, self.steps), ("own", None, self.steps), ("next", before, self.steps + 1)]
        try:
            self.launch(layout, self.path(layout), jobs)
            layout.losses = [float(loss) for loss in self.results(layout, OWN).values()]
            pairs = ((kind, self.results(layout, kind), self.results(self.first, kind)) for kind in COMPARED)
            layout.differences = {kind: largest_difference(*pair) for kind, *pair in pairs if any(pair)}
            layout.holds = all(d <= self.limits[kind] for kind, (d, _) in layout.differences.items())
            if "precision" not in place:
                if before not in (self.first, layout):
                    shutil.rmtree(self.path(before), ignore_errors=True)
                self._before = layout
        except UserError as error:
            layout.holds, layout.reason = False, str(error)
        layout.seconds = time.monotonic() - began
        return layout

    def tolerate(self, layout: Compared) -> None:
        """Take for rounding what is not far beyond the differences of this layout, which shows how much that is."""
        self.limits |= {kind: max(_SPREADS * d, self.limits[kind]) for kind, (d, _) in layout.differences.items()}
        self.limits["next step"] = max(d for kind, d in self.limits.items() if kind != OWN)
        layout.holds = True

    def path(self, layout: Compared) -> Path:
        """Return where a layout's runs write."""
        return self.folder / layout.name.removeprefix("parallel=").replace(" ", "-").replace("=", "")

    def launch(self, layout: Compared, folder: Path, jobs: list, record: int | None = None) -> None:
        """Run jobs (part, layout whose checkpoint to go on from, steps) one after the other in the same processes.

        With ``record``, every layer of that step is recorded.

        Raises:
            UserError: One has failed, with its reason.
        """
        shutil.rmtree(folder, ignore_errors=True)
        trees = []
        for part, before, steps in jobs:
            (folder / part).mkdir(parents=True)
            trees.append((to_dict(self._job(layout.place, part, before, steps)), str(folder / part)))
        arguments = trees, pack_given(), record
        timeout_s = self.cfg.verify.timeout_s
        run_workers(_work, arguments, _processes(layout.place), folder / "logs", timeout_s=timeout_s)

    def _job(
        self, place: Mapping[str, Any], part: str, before: Compared | None = None, steps: int | None = None
    ) -> Any:
        """Return the configuration of a run. The one with the user's optimizer saves and evaluates nothing."""
        tree, own = as_run(self.cfg, place), part == "own"
        tree["train"] |= {
            "steps": steps or self.steps, "eval_every": None if own else 0,
            "eval_batches": min(tree["train"]["eval_batches"] or 2, 2), "checkpoint_every": None if own else 1,
            "keep_checkpoints": self.steps + 1, "profile": 0, "trace": False, "max_skipped": 0,
            "resume": before and str(self.path(before) / "plain"),
        }  # fmt: skip
        tree["launcher"]["allow_mixed"] = True  # weights that come apart are compared tensor by tensor, with causes
        if not own:
            tree |= {"optim": _PLAIN, "scheduler": {"_target_": "training.optimizer.Constant"}, "recipe": None}
        return to_config(tree)

    # -- what it has left --------------------------------------------------------------------------------------------

    def results(self, layout: Compared, kind: str) -> dict[str, Tensor]:
        """Return what a layout has left of a kind in ``COMPARED``, by name."""
        plain = self.path(layout) / "plain"
        if kind == "gradients":
            return self.gradients(layout, 1)
        if kind == "next step":
            losses = _numbers(plain.with_name("next"), "loss")
            return losses | self.gradients(layout, self.steps + 1, "next")
        if kind == OWN:
            return _numbers(plain.with_name("own"), "loss")
        if kind in ("weights", "buffers", "optimizer"):
            tensors = _tensors(plain, self.steps)
            return {name: tensors[name][...] for name in tensors if self._kind(name) == kind}
        return _numbers(plain, kind)

    def _kind(self, name: str) -> str:
        return "optimizer" if "/" in name else "weights" if name in self._parameters else "buffers"

    def gradients(self, layout: Compared, step: int, part: str = "plain") -> dict[str, Tensor]:
        """Return the gradients of a step, from the momentum after it and before it."""
        before, now = (_tensors(self.path(layout) / part, n) for n in (step - 1, step))
        found = {}
        for name in now:
            parameter, _, state = name.partition("/")
            if state == "momentum_buffer":
                found[parameter] = now[name][...] - (MOMENTUM * before[name][...] if name in before else 0.0)
        return found


def _processes(place: Mapping[str, Any]) -> int:
    return place["dp"] * (place["pp"] if STRATEGIES[place["name"]].stage_per_rank else 1)


def _tensors(run: Path, step: int) -> Mapping[str, Any]:
    """Return the tensors of a run's checkpoint, to be read by ``[...]``; none where it has not saved that step."""
    folder = run / "checkpoints" / step_name(step)
    return Tensors(Checkpoint(folder)) if folder.exists() else {}


def _numbers(run: Path, wanted: str) -> dict[str, Tensor]:
    """Return the numbers of one kind that a run has reported."""
    found = {}
    for record in read_records(run / METRICS):
        for key, value in record.items():
            kind = "evaluation" if key.startswith("val_") else _KINDS.get(key, "metrics")
            if kind == wanted and isinstance(value, (int, float)) and not key.endswith(("_s", "_bytes")):
                about = f"{key} " if kind in ("metrics", "evaluation") else ""
                found[f"{about}at step {record['step']}"] = torch.tensor(value, dtype=torch.float64)
    return found


def _work(world: World, jobs: list[tuple[dict, str]], given: bytes | None, record: int | None) -> None:
    """What each worker runs: the jobs one after the other."""
    folder = Path(jobs[0][1]).parent
    redirect_output(folder / "logs", world.rank)
    unpack_given(given)
    with recorded(record, folder / f"record_{world.rank}.pt") if record else nullcontext():
        for tree, run_dir in jobs:
            run(to_config(tree), Path(run_dir), world)
