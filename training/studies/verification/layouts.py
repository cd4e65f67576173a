"""Runs of layouts, and comparisons of their results with the results of one process."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from common.errors import ModelError, PlanError, UserError
from conf.schema import Root
from launchers import WorkerPool, World
from models.chain import Chain
from parallel.axes import AXES
from parallel.layout import Layout
from parallel.plan import Plan
from parallel.schedules import SCHEDULES
from parallel.strategies import STRATEGIES
from training.checkpoint.files import Checkpoint, step_name
from training.checkpoint.load import stored_tensors
from training.reporting.metrics import METRICS, read_records
from training.run.loop import Loop
from training.run.prepare import PlannedRun, prepare
from training.run.rank import run
from training.run.setup import Setup
from training.studies.short_run import short_run
from training.studies.verification.probes import differences
from training.studies.verification.recording import perturbed, recorded

MOMENTUM = 0.9
# After SGD's first step, its momentum is the gradient. At a hundred times this rate, ResNet-50 amplifies rounding
# tenfold at every step.
_PLAIN = {"_target_": "torch.optim.SGD", "lr": 1e-4, "momentum": MOMENTUM}
# In bf16 and fp16: the runs of one process that measure rounding, and how many times what they show counts as rounding.
PERTURBED, _SPREADS = 3, 3.0
_TINY = 1e-300  # in place of a limit of 0
# In fp16: at the usual 65,536 the first gradients of many models overflow, and their steps would be skipped.
LOSS_SCALE = 128.0
OWN = "with your optimizer"
_KINDS = {"loss": "loss", "grad_norm": "gradient norm", "step": "", "lr": "", "skipped": ""}
COMPARED = (
    "loss", "metrics", "gradient norm", "gradients", "weights", "buffers", "optimizer", "evaluation", "next step", OWN,
)  # fmt: skip


@dataclass
class Compared:
    """The comparison of a layout with one process.

    Attributes:
        name: The layout as the user types it.
        layout: The layout.
        changed: The keys of ``train`` that differ from the run.
        perturbed: The number of a run whose results are moved by rounding, from 1; 0 for all others.
        optimizer: The name of the user's optimizer.
        holds: Whether the layout trains as one process does; None if it was not run.
        reason: The reason why the layout was not run or has failed, or the place where it first differs.
        needs: The number of processes of the layout if it exceeds ``verify.processes``.
        differences: The largest relative difference of each kind of result, by its limit, and its place.
        ratios: These differences, divided by their limits.
        losses: The loss of each step with the user's optimizer.
        apart: Which weights the ranks hold differently at the end, as a sentence; empty if they are equal.
        seconds: The total duration of the layout's runs.
    """

    name: str
    layout: Layout = field(default_factory=Layout)
    changed: dict[str, Any] = field(default_factory=dict)
    perturbed: int = 0
    optimizer: str = ""
    holds: bool | None = None
    reason: str = ""
    needs: int | None = None
    differences: dict[str, tuple[float, str]] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    apart: str = ""
    seconds: float = 0.0

    @property
    def largest(self) -> tuple[str, float, str]:
        """The kind of result with the largest difference by its limit, its size and its place."""
        kind = max(self.ratios, key=lambda kind: self.ratios[kind])
        return kind, *self.differences[kind]

    def record(self) -> dict[str, Any]:
        """Return the entry of the certificate's JSON, with the keys of the section ``parallel`` under "place"."""
        kept = {k: v for k, v in asdict(self).items() if k not in ("layout", "changed")}
        return {"place": self.layout.section() | self.changed, **kept}

    def __str__(self) -> str:
        if not self.differences:
            return f"{self.name}: {self.reason}"
        kind, size, at = self.largest
        own = f", with your {self.optimizer} {self.differences[OWN][0]:.0e}" if OWN in self.differences else ""
        found = f"largest difference {size:.0e} ({kind} {at})" if size else "no difference"
        text = f"{self.name}: {found}{own}, {self.seconds:.1f} s"
        return text + f"\n      {self.reason}" * bool(self.reason)


def layouts(
    processes: int, microbatches: int, order: str = "dp_pp", divided: Sequence[Mapping[str, Any]] = ()
) -> Iterator[Layout]:
    """Yield every strategy with every schedule, in layouts of about ``processes`` processes.

    Also yield every strategy that can divide the work of a stage: with one of ``divided``, the variants of these axes
    that the model supports, or with all variants of the strategy's own axis.
    """

    def layout(name: str, dp: int, pp: int, **keys: Any) -> Layout:
        return Layout(name, dp, pp, max(1, microbatches // dp), order=order, **keys)

    most = max(2, processes)  # with one process, nothing is cut
    for name, info in STRATEGIES.items():
        replicas = [1] if not info.replicas else [2] if info.stages else sorted({2, most})
        replicas, half = [most] if info.shards == "node" else replicas, max(2, most // 2)
        stages = [1] if not info.stages else [half] if info.replicas else sorted({2, most})
        for dp, pp in ((dp, pp) for dp in replicas for pp in stages if name != "single" and not info.degree):
            schedules = ["gpipe"] if not info.stage_per_rank else SCHEDULES if pp == stages[0] else ["1f1b"]
            shard = max(1, dp // 2) if info.shards == "node" else None
            yield from (layout(name, dp, pp, schedule=schedule, shard=shard) for schedule in schedules)
    for i, (name, info) in enumerate((name, info) for name, info in STRATEGIES.items() if info.tensor and divided):
        dp, shard = (4, 2) if info.shards == "node" else (1 + info.replicas, None)
        schedule = "1f1b" if info.stages else "gpipe"
        possible = [keys for keys in divided if dp % keys.get("ep", 1) == 0]
        own = [keys for keys in possible if info.degree in keys]
        for keys in own if info.degree else possible[i % max(1, len(possible)) :][:1]:
            found = layout(name, dp, 1 + info.stages, schedule=schedule, shard=shard, **keys)
            if found.processes <= processes:
                yield found


def variants(setup: Setup) -> list[dict[str, Any]]:
    """Return the variants of the axes of a stage that the model and its data support."""
    chain, skeleton, found = setup.chain, setup.chain.skeleton(), []
    for axis in AXES:
        for layout, keys in ((Layout(**keys), keys) for keys in axis.variants):
            with suppress(PlanError, ModelError):
                axis.check(layout, chain, skeleton)
                axis.check_stages(layout, chain, skeleton, [chain.names])
                axis.check_data(layout, setup.data)
                axis.check_facts(layout, chain, setup.examination)
                found.append(keys)
    return found


def typed_name(layout: Layout, changed: Mapping[str, Any] | None = None) -> str:
    """Return a layout as the user types it, followed by the keys of ``train`` that differ from the run."""
    words = [f"parallel={layout.strategy}"]
    keys = (*Layout.DEGREES, "shard")
    words += [f"{key}={value}" for key in keys if (value := getattr(layout, key)) not in (1, None)]
    words += [f"{name}={ranks}" for name, _, ranks in layout.axes]
    options = {key: value for key, value in layout.divided.items() if key in layout.OPTIONS and value}
    words += [f"{key}={str(value).lower()}" for key, value in options.items()]
    words += [f"chunks={layout.chunks}"] if layout.strategy == "single" else []
    words += [f"{key}={str(value).lower()}" for key, value in (changed or {}).items()]
    return " ".join([*words, *[f"schedule={layout.schedule}"] * layout.pipelined])


def in_layout(cfg: Root, layout: Layout, more: Mapping[str, Any] | None = None, **train: Any) -> Any:
    """Return the configuration of a short run in a layout. See ``short_run``."""
    strategy = cfg.parallel.strategy if layout.strategy == cfg.parallel.name else None
    waits = {"timeout_s": cfg.verify.timeout_s}
    return short_run(cfg, {**layout.section(), "strategy": strategy, **waits}, more, **train)


class Runs:
    """Runs layouts, and compares each layout with the first one.

    Attributes:
        cfg: The configuration to verify.
        folder: The folder for the files of the runs.
        chain: The model.
        microbatches: The number of micro-batches per step, over all replicas.
        limits: For each kind of result, the largest difference that counts as equal. In bf16 and fp16 the limit of a
            tensor may be larger, see ``largest``.
        first: The comparison of the reference layout, after it has run.
        perturbed: The comparisons of runs of the reference layout whose results were moved by rounding.
    """

    def __init__(self, cfg: Root, folder: Path, chain: Chain, microbatches: int) -> None:
        """Set up the comparisons. No layout is run."""
        self.cfg, self.folder, self.chain, self.microbatches = cfg, folder, chain, microbatches
        self.limits = {**dict.fromkeys(COMPARED, cfg.verify.tolerance), OWN: math.inf}
        self.steps, self.samples = cfg.verify.steps, cfg.train.global_batch_size // microbatches
        self.first = self._before = Compared("")
        self.perturbed: list[Compared] = []
        self._limits: dict[str, Mapping[Any, float]] = {}  # by kind and name
        self._setup: Setup | None = None  # of the first layout; examined once
        self._plans: dict[str, Plan] = {}  # by the layout's name
        self._optimized: set[Layout] = set()  # divisions of the weights that the user's optimizer has trained
        self._parameters = {name for name, _ in chain.skeleton().named_parameters()}
        self._pool, self._reused = WorkerPool(0), False  # ``launch`` starts processes

    def close(self) -> None:
        """End all processes."""
        self._pool.close()

    def compare(self, layout: Layout, changed: Mapping[str, Any] | None = None, perturbed: int = 0) -> Compared:
        """Train a layout, and one more step from the checkpoint of a layout that holds. Compare the results.

        Processes stay for the next layout, if it has as many. ``changed`` has the keys of ``train`` that differ from
        the run. If the number of a perturbed run is given, all results are moved by rounding, and the limits are raised
        to what the comparison shows.
        """
        began, optimizer = time.monotonic(), self.cfg.optim._target_.rpartition(".")[2]
        name = typed_name(layout, changed) + f", moved by rounding, {perturbed} of {PERTURBED}" * bool(perturbed)
        changed = {"compile": False, "activation_checkpointing": False} if perturbed else dict(changed or {})
        result = Compared(name, layout, changed, perturbed, optimizer)
        try:
            if layout.dp > 1 and self.microbatches > 1 and layout.dp * layout.chunks != self.microbatches:
                raise UserError(f"{self.microbatches} micro-batches cannot be dealt to {layout.dp} replicas")
            if layout.processes > (most := self.cfg.verify.processes or 1):
                result.needs = layout.processes
                raise UserError(f"needs {result.needs} processes, and verify.processes={most}")
            setup = prepare(self._job(result, "plain"), like=self._setup)
            self._setup, self._plans[result.name] = self._setup or setup, setup.plan
        except UserError as error:
            result.reason = str(error)
            return result
        self.first = self.first if self.first.name else result
        before = self._before if self._before.name else result
        self._judge(result, before)
        if not result.holds and self._reused:  # in new processes: earlier layouts may have left something
            self.close()
            self._judge(result, before)
        if result.perturbed:
            self.perturbed.append(result)
            self._limits.clear()
        if result.holds and (result.perturbed or not result.changed):  # later layouts start from right checkpoints
            if before not in (self.first, result, *self.perturbed):
                shutil.rmtree(self.path(before), ignore_errors=True)
            self._before = result
        result.seconds = time.monotonic() - began
        return result

    def _judge(self, result: Compared, before: Compared) -> None:
        jobs = [("plain", None, self.steps), ("next", before, self.steps + 1)]
        # An optimizer depends on the division of the weights alone.
        weights = replace(result.layout, schedule=None, chunks=1, context="gather", sequence=False)
        if weights not in self._optimized and not result.perturbed:
            jobs.insert(1, ("own", None, self.steps))
        result.reason = ""
        try:
            self.launch(result, self.path(result), jobs)
            result.losses = [float(loss) for loss in self.results(result, OWN).values()]
            for kind in (kind for kind in COMPARED if kind != OWN or result.losses):
                if found := self.largest(kind, partial(self.results, kind=kind), result):
                    ratio, size, at = found
                    result.differences[kind] = size, at
                    result.ratios |= {kind: ratio} if kind != OWN else {}
            equal = not result.apart and all(ratio <= 1 for ratio in result.ratios.values())
            result.holds = bool(result.perturbed) or equal
            if result.holds:
                self._optimized.add(weights)
        except UserError as error:
            result.holds, result.reason = False, str(error)

    def largest(
        self, kind: str, results: Callable[[Compared], Mapping[Any, Tensor]], layout: Compared
    ) -> tuple[float, float, Any] | None:
        """Compare results of a layout with those of the reference layout.

        In bf16 and fp16 the limit of a tensor is a multiple of its largest difference, or of the usual one of all
        ``results``, in the perturbed runs.

        Args:
            kind: A name for these results.
            results: A function that returns a layout's results by name.
            layout: The layout.

        Returns:
            The largest difference as a multiple of its limit, the difference, and the name; None without results.
        """
        ours, theirs = results(layout), results(self.first)
        if not ours and not theirs:
            return None
        if kind not in self._limits:
            self._limits[kind] = limits_of(theirs, map(results, self.perturbed), self.cfg.verify.tolerance)
            self.limits |= {kind: self._limits[kind][""]} if kind in COMPARED and kind != OWN else {}
        limits = self._limits[kind]
        sizes = differences(ours, theirs, 0.0) if self.perturbed else differences(ours, theirs)
        ratios = ((size / (limits.get(at, limits[""]) or _TINY), size, at) for at, size in sizes.items())
        return max(ratios, key=itemgetter(0, 1), default=(0.0, 0.0, ""))

    def path(self, layout: Compared) -> Path:
        """Return the folder for the files of a layout's runs."""
        return self.folder / layout.name.removeprefix("parallel=").replace(" ", "-").replace("=", "").replace(",", "")

    def launch(self, result: Compared, folder: Path, jobs: list, record: int | None = None) -> None:
        """Run jobs one after the other in the same processes.

        A job is (part, layout, steps). It starts from the layout's checkpoint, or from the beginning if the layout is
        None. If ``record`` is given, every layer is recorded in this step.

        Raises:
            UserError: If a job fails.
        """
        shutil.rmtree(folder, ignore_errors=True)
        runs = []
        for part, before, steps in jobs:
            (folder / part).mkdir(parents=True)
            runs.append((self._job(result, part, before, steps), folder / part))
        arguments = PlannedRun(self.cfg, self._plans[result.name]), runs, record, result.perturbed
        if self._pool.processes != result.layout.processes:
            self.close()
            self._pool = WorkerPool(result.layout.processes, self.folder / "logs", self.cfg.verify.timeout_s)
        self._reused = self._pool.calls > 0
        apart, *_ = self._pool.call(_run_jobs, arguments)
        result.apart = apart if record is None else result.apart

    def _job(self, result: Compared, part: str, before: Compared | None = None, steps: int | None = None) -> Any:
        """Return the configuration of a run. The run with the user's optimizer neither saves nor evaluates."""
        own = part == "own"
        # Different weights on the ranks are no error here: the comparison names the tensor and the cause.
        more = {"launcher": {"name": "local", "max_restarts": 0, "allow_mixed": True}}
        if not own:
            more |= {"optim": _PLAIN, "scheduler": {"_target_": "training.optimizer.Constant"}, "recipe": None}
        return in_layout(
            self.cfg, result.layout, more, steps=steps or self.steps, eval_every=0 if part == "plain" else None,
            eval_batches=min(self.cfg.train.eval_batches or 2, 2), checkpoint_every=None if own else 1,
            keep_checkpoints=self.steps + 1, max_skipped=0, resume=before and str(self.path(before) / "plain"),
            **result.changed,
        )  # fmt: skip

    # -- results of a run --------------------------------------------------------------------------------------------

    def results(self, layout: Compared, kind: str) -> dict[str, Tensor]:
        """Return a layout's results of one kind in ``COMPARED``, by name."""
        plain = self.path(layout) / "plain"
        if kind == "gradients":
            return self.gradients(layout, 1)
        if kind == "next step":
            losses = numbers_of(plain.with_name("next"), "loss")
            return losses | self.gradients(layout, self.steps + 1, "next")
        if kind == OWN:
            return numbers_of(plain.with_name("own"), "loss")
        if kind in ("weights", "buffers", "optimizer"):
            return tensors_of(plain, self.steps, lambda name: self._kind(name) == kind)
        return numbers_of(plain, kind)

    def _kind(self, name: str) -> str:
        return "optimizer" if "/" in name else "weights" if name in self._parameters else "buffers"

    def gradients(self, layout: Compared, step: int, part: str = "plain") -> dict[str, Tensor]:
        """Return the gradients of a step, computed from the momentum before and after it."""
        part_dir, momentum = self.path(layout) / part, "/momentum_buffer"
        before, now = (tensors_of(part_dir, n, lambda name: name.endswith(momentum)) for n in (step - 1, step))
        return {name.removesuffix(momentum): now[name] - MOMENTUM * before.get(name, 0.0) for name in now}


def limits_of(
    theirs: Mapping[Any, Tensor], perturbed: Iterable[Mapping[Any, Tensor]], tolerance: float
) -> dict[Any, float]:
    """Return the limit of each tensor's difference, and under "" the least limit.

    A limit is a multiple of the tensor's largest difference, or of the usual one, between ``perturbed`` and ``theirs``.
    """
    found = [differences(ours, theirs, least=0.0) for ours in perturbed]
    sizes = {name: max(one.get(name, 0.0) for one in found) for name in theirs} if found else {}
    least = max(_SPREADS * median(sizes.values() or [0.0]), tolerance)
    return {name: max(_SPREADS * size, least) for name, size in sizes.items()} | {"": least}


def tensors_of(run: Path, step: int, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Return the wanted tensors of a checkpoint; none if the step was not saved."""
    folder = run / "checkpoints" / step_name(step)
    stored = stored_tensors(Checkpoint(folder)) if folder.exists() else {}
    return {name: stored[name][...] for name in stored if wanted(name)}


def numbers_of(run: Path, wanted: str) -> dict[str, Tensor]:
    """Return the recorded numbers of a run that belong to one kind in ``COMPARED``."""
    found = {}
    for record in read_records(run / METRICS):
        for key, value in record.items():
            kind = "evaluation" if key.startswith("val_") else _KINDS.get(key, "metrics")
            if kind == wanted and isinstance(value, (int, float)) and not key.endswith(("_s", "_bytes")):
                about = f"{key} " if kind in ("metrics", "evaluation") else ""
                found[f"{about}at step {record['step']}"] = torch.tensor(value, dtype=torch.float64)
    return found


def _run_jobs(world: World, planned: PlannedRun, jobs: list[tuple[Root, Path]], record: int | None, seed: int) -> str:
    """Run the jobs one after the other on a rank. If ``seed`` is given, move all results by rounding.

    Returns:
        Which weights the ranks hold differently, see ``check_weights``.
    """
    folder, found = jobs[0][1].parent, list[str]()
    moved = perturbed(planned.plan.precision, seed) if seed else nullcontext()

    def begin(loop: Loop) -> None:
        loop.strategy.loss_scale.scale, check = LOSS_SCALE, loop.checkpoints.check
        loop.checkpoints.check = lambda: found.append(check() or "")  # the verdict replaces the warning

    with recorded(record, folder / f"record_{world.rank}.pt") if record else nullcontext(), moved:
        for cfg, run_dir in jobs:
            setup = replace(planned, cfg=cfg).setup(world)
            setup.data.test = None  # nothing compares its results
            run(setup, run_dir, world, begin)
    return next(filter(None, found), "").removesuffix(" (launcher.allow_mixed=true)")
