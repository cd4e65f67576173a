"""The layouts that are compared with one process, and what a run of each has left."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import UserError
from conf.instantiate import to_config, to_dict
from launchers import World, run_workers
from launchers.worker import redirect_output
from models.chain import Chain
from parallel.schedules import SCHEDULES
from parallel.strategies import STRATEGIES
from training.app import work
from training.checkpoint.files import Checkpoint, step_name
from training.checkpoint.load import Tensors
from training.reporting.metrics import METRICS, read_records
from training.setup import pack_given, prepare
from training.verification.probes import difference
from training.verification.recording import recorded

MOMENTUM = 0.9
# After its first step, the momentum of SGD is the gradient. At a hundred times this rate, ResNet-50 amplifies rounding
# tenfold at every step.
PLAIN = {"_target_": "torch.optim.SGD", "lr": 1e-4, "momentum": MOMENTUM}
_LOGGER = {"_target_": "training.reporting.NoLogger"}
PLACE = {"dp": 1, "pp": 1, "chunks": 1, "stages_per_rank": None, "balance": "uniform", "shard": None, "devices": None}
# What is below this part of the largest number of all tensors of a kind may be rounding alone.
_FLOOR = 1e-3
COMPARED = (
    "loss", "metrics", "gradient norm", "gradients", "weights", "buffers", "optimizer", "evaluation", "next step",
)  # fmt: skip
_KINDS = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass
class Outcome:
    """How a layout compares with one process.

    Attributes:
        name: As it is typed.
        place: The keys of the section ``parallel``.
        differences: What was compared: its largest relative difference and where that is.
        own: The largest difference of a loss with the user's optimizer.
        cannot: Why the model cannot be cut like that; None where it was run.
        problem: Why its run failed; None where it ended.
        first: The first difference, in a sentence.
        seconds: How long it took.
    """

    name: str
    place: dict[str, Any]
    differences: dict[str, tuple[float, str]] = field(default_factory=dict)
    own: float | None = None
    cannot: str | None = None
    problem: str | None = None
    first: str = ""
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)

    def beyond(self, limits: Mapping[str, float]) -> list[str]:
        """Name what differs by more than the limits say."""
        return [key for key, (d, _) in self.differences.items() if not d <= limits[key]]

    def failed(self, limits: Mapping[str, float]) -> bool:
        """Whether it ended otherwise, or differs by more than the limits say."""
        return self.problem is not None or bool(self.beyond(limits))

    @property
    def largest(self) -> tuple[float, str]:
        """The largest difference, and of what."""
        return max(((d, f"{key} {where}".strip()) for key, (d, where) in self.differences.items()), default=(0.0, ""))


def places(processes: int, microbatches: int) -> Iterator[dict[str, Any]]:
    """Yield the keys of the section ``parallel`` for each layout of at most ``processes`` processes."""
    half = max(2, processes // 2)
    for name, info in STRATEGIES.items():
        if name == "single":
            continue
        replicas = [1] if not info.replicas else [2] if info.stages else sorted({2, processes})
        if info.shards == "node":
            replicas = [processes]
        stages = [1] if not info.stages else [half] if info.replicas else sorted({2, processes})
        for dp in replicas:
            for pp in stages:
                place = {**PLACE, "name": name, "dp": dp, "pp": pp, "chunks": microbatches / dp}
                place |= {"shard": max(1, dp // 2)} if info.shards == "node" else {}
                schedules = SCHEDULES if info.stage_per_rank and pp == stages[0] else ["1f1b"]
                yield from ({**place, "schedule": one} for one in (schedules if info.stage_per_rank else ["gpipe"]))


def name_of(place: Mapping[str, Any]) -> str:
    """Return a layout as it is typed."""
    pipelined = STRATEGIES[place["name"]].stage_per_rank
    words = [f"parallel={place['name']}"]
    words += [f"{key}={place[key]}" for key in ("dp", "pp") if place[key] != 1]
    words += [f"shard={place['shard']}"] if place["shard"] else []
    words += [f"chunks={place['chunks']:g}"] if place["name"] == "single" else []
    return " ".join([*words, *[f"schedule={place['schedule']}"] * pipelined])


def as_run(cfg: Any, place: Mapping[str, Any]) -> dict:
    """Return the tree of a configuration to train in a layout, and to report nowhere."""
    tree = to_dict(cfg)
    tree |= {"mode": "train", "logger": _LOGGER, "loggers": None, "callbacks": None, "print_config": False}
    tree["launcher"] = {"name": "local", "max_restarts": 0, "allow_mixed": False}
    tree["parallel"] |= {**place, "timeout_s": cfg.verify.timeout_s}
    tree["train"]["resume"] = None
    return tree


class Runs:
    """Runs layouts and compares each with the reference.

    Attributes:
        cfg: The configuration to verify.
        folder: Where runs write.
        reference: The place of one process that the others are compared with.
        home: Where its runs are.
    """

    def __init__(
        self, cfg: Any, folder: Path, reference: dict[str, Any], chain: Chain, limits: Mapping[str, float]
    ) -> None:
        """Take the place of the reference, and the largest differences that are none."""
        self.cfg, self.folder, self.steps, self.limits = cfg, folder, cfg.verify.steps, limits
        self.reference, self.tied, self.losses = reference, chain.tied, []
        self.samples = cfg.train.global_batch_size
        self.parameters = {name for name, _ in chain.skeleton().named_parameters()}
        self.home = folder / "reference"
        self._newest = self.home

    def start(self) -> Outcome:
        """Run the reference. Raises UserError where it cannot run, with its reason."""
        began = time.monotonic()
        self._run(self.reference, self.home)
        self.losses = _losses(self.home / "plain")
        outcome = Outcome(name_of(self.reference), self.reference, losses=self.losses)
        outcome.seconds = time.monotonic() - began
        return outcome

    def compare(self, place: dict[str, Any]) -> Outcome:
        """Run a layout, with one step more from the checkpoint of the layout before it, and compare."""
        began, outcome = time.monotonic(), Outcome(name_of(place), place)
        folder = self.folder_of(outcome)
        try:
            if place["chunks"] < 1 or place["chunks"] % 1:
                count = place["dp"] * place["chunks"]
                raise UserError(f"{count:g} micro-batches cannot be dealt to {place['dp']} replicas")
            place["chunks"] = int(place["chunks"])
            setup = prepare(self._job(place, "plain"))
        except UserError as error:
            outcome.cannot = str(error)
            return outcome
        if (needed := setup.plan.processes) > self.cfg.verify.processes:
            outcome.cannot = f"needs {needed} processes, and verify.processes={self.cfg.verify.processes}"
            return outcome
        try:
            self._run(place, folder, self._newest)
        except UserError as error:
            outcome.problem = str(error)
        if (folder / "plain" / "checkpoints").exists():
            outcome.losses = _losses(folder / "plain")
            try:
                outcome.differences = self._differences(folder)
            except (UserError, LookupError, ValueError) as error:
                outcome.problem = outcome.problem or f"its results cannot be compared: {error!r}"
            outcome.own = _of_losses(folder / "own", self.home / "own")
        if outcome.problem is None:
            if self._newest != self.home:
                shutil.rmtree(self._newest, ignore_errors=True)
            self._newest = folder
        outcome.seconds = time.monotonic() - began
        return outcome

    def folder_of(self, outcome: Outcome) -> Path:
        """Return where a layout's runs write."""
        return self.folder / outcome.name.removeprefix("parallel=").replace(" ", "-").replace("=", "")

    # -- one run -----------------------------------------------------------------------------------------------------

    def _job(self, place: Mapping[str, Any], part: str, resume: Path | None = None, steps: int | None = None) -> Any:
        """Return the configuration of a run."""
        tree = as_run(self.cfg, place)
        batches = tree["train"]["eval_batches"]
        tree["train"] |= {
            "steps": steps or self.steps, "epochs": None, "eval_every": None if part == "own" else 0,
            "eval_batches": min(batches or 2, 2), "checkpoint_every": None if part == "own" else 1,
            "keep_checkpoints": self.steps + 1, "profile": 0, "trace": False, "max_skipped": 0,
            "resume": None if resume is None else str(resume / "plain"),
        }  # fmt: skip
        if part != "own":
            tree |= {"optim": PLAIN, "scheduler": {"_target_": "training.optimizer.Constant"}, "recipe": None}
        return to_config(tree)

    def _run(self, place: Mapping[str, Any], folder: Path, newest: Path | None = None) -> None:
        """Run the steps with SGD and with the user's optimizer, and one more step from the checkpoint ``newest``."""
        jobs = [("plain", None, self.steps), ("own", None, self.steps)]
        jobs.append(("next", newest or folder, self.steps + 1))
        self.launch(place, folder, jobs)

    def launch(self, place: Mapping[str, Any], folder: Path, jobs: list, record: int | None = None) -> None:
        """Run jobs (part, checkpoint to go on from, steps) one after the other in the same processes.

        Raises:
            UserError: One has failed, with its reason.
        """
        shutil.rmtree(folder, ignore_errors=True)
        trees = []
        for part, resume, steps in jobs:
            (folder / part).mkdir(parents=True)
            trees.append((to_dict(self._job(place, part, resume, steps)), str(folder / part)))
        processes = place["dp"] * (place["pp"] if STRATEGIES[place["name"]].stage_per_rank else 1)
        timeout_s = self.cfg.verify.timeout_s
        run_workers(_work, (trees, pack_given(), record), processes, folder / "logs", timeout_s=timeout_s)

    # -- what it has left --------------------------------------------------------------------------------------------

    def _differences(self, folder: Path) -> dict[str, tuple[float, str]]:
        ours, theirs = folder / "plain", self.home / "plain"
        found = _of_records(ours, theirs)
        found["gradients"] = self.of_gradients(folder, 1)
        found |= self._of_state(ours, theirs, self.steps)
        if (folder / "next" / "checkpoints").exists():
            loss, step = _of_losses(folder / "next", self.home / "next"), self.steps + 1
            found["next step"] = max(loss, self.of_gradients(folder, step, "next")[0]), ""
        return found

    def of_gradients(self, folder: Path, step: int, part: str = "plain") -> tuple[float, str]:
        """Return the largest difference of a parameter's gradient in a step, and the parameter."""
        return _of_tensors(self.gradients(folder, step, part), self.gradients(self.home, step, part))

    def gradients(self, folder: Path, step: int, part: str = "plain") -> dict[str, Tensor]:
        """Return the gradients of a step, from the momentum after it and before it."""
        now = self._momentum(folder / part, step)
        earlier = folder / part / "checkpoints" / step_name(step - 1)
        before = self._momentum(folder / part, step - 1) if step > 1 and earlier.exists() else {}
        return {name: m - MOMENTUM * before[name] if name in before else m for name, m in now.items()}

    def _momentum(self, run: Path, step: int) -> dict[str, Tensor]:
        buffers = _read(run, step, lambda name: name.endswith("/momentum_buffer"))
        return {name.partition("/")[0]: tensor for name, tensor in buffers.items()}

    def _of_state(self, ours: Path, theirs: Path, step: int) -> dict[str, tuple[float, str]]:
        def kind(name: str) -> str:
            return "optimizer" if "/" in name else "weights" if name in self.parameters else "buffers"

        found = {}
        for wanted in ("weights", "buffers", "optimizer"):
            pair = [_read(run, step, lambda name, wanted=wanted: kind(name) == wanted) for run in (ours, theirs)]
            if any(pair):
                found[wanted] = _of_tensors(*pair)
        return found


def _read(run: Path, step: int, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the tensors of a run's checkpoint whose names are wanted."""
    tensors = Tensors(Checkpoint(run / "checkpoints" / step_name(step)))
    return {name: tensors[name][...] for name in tensors if wanted(name)}


def _of_tensors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    floats = [t for t in theirs.values() if t.is_floating_point() and t.numel() > 0]
    floor = _FLOOR * max((t[t.isfinite()].abs().max().item() for t in floats if t.isfinite().any()), default=0.0)
    found = []
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name), theirs.get(name)
        found.append((math.inf if a is None or b is None else difference(a, b, floor), name))
    return max(found, default=(0.0, ""))


def _losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_records(run / METRICS) if "loss" in record]


def _of_losses(ours: Path, theirs: Path) -> float:
    pairs = list(zip(_losses(ours), _losses(theirs), strict=False))
    return max((_relative(a, b) for a, b in pairs), default=math.inf)


def _of_records(ours: Path, theirs: Path) -> dict[str, tuple[float, str]]:
    """Compare losses, metrics, gradient norms and evaluations of all steps."""
    found: dict[str, tuple[float, str]] = {}
    skipped = {"step", "lr", "skipped"}
    for a, b in zip(read_records(ours / METRICS), read_records(theirs / METRICS), strict=True):
        for key, value in b.items():
            if key in skipped or not isinstance(value, (int, float)) or key.endswith(("_s", "_bytes")):
                continue
            kind = "evaluation" if key.startswith("val_") else _KINDS.get(key, "metrics")
            where = f"step {b['step']}" + f" {key}" * (kind in ("metrics", "evaluation"))
            found[kind] = max(found.get(kind, (0.0, "")), (_relative(a.get(key, math.nan), value), where))
    return found


def _relative(a: float, b: float) -> float:
    return 0.0 if a == b else math.inf if math.isnan(a - b) else abs(a - b) / max(abs(b), 1e-300)


def _work(world: World, jobs: list[tuple[dict, str]], given: bytes | None, record: int | None) -> None:
    """What each worker runs: the jobs one after the other."""
    folder = Path(jobs[0][1]).parent
    redirect_output(folder / "logs", world.rank)
    with recorded(record, folder / f"record_{world.rank}.pt"):
        for tree, run_dir in jobs:
            work(world, tree, run_dir, given)
