"""The verification of a model: probes, comparisons of layouts, and the certificate, written after each result."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from common.errors import TrainingError, UserError
from common.files import jsonable, write_atomically
from common.machine import changed_environment, styled
from conf import COMMAND
from conf.instantiate import environment, to_config, to_dict, with_values
from conf.masking import mask_secrets
from conf.schema import Root
from launchers import Interrupted, World, start_fork_server
from parallel.layout import Layout
from training.reporting.console import columns
from training.reporting.environment import describe
from training.reporting.page import render
from training.reporting.progress import progress
from training.run.prepare import prepare
from training.run.setup import Setup
from training.studies.short_run import modules_of_workers
from training.studies.verification.difference import first_difference
from training.studies.verification.layouts import COMPARED, PERTURBED, Compared, Runs, in_layout, layouts, variants
from training.studies.verification.probes import Finding, probe
from training.studies.verification.questions import ask

_SAMPLES = 8  # per step, unless a batch was typed
JSON, PAGE = "certificate.json", "certificate.html"


@dataclass
class Report:
    """The results of a verification.

    Attributes:
        about: Model, parameters, data, seed, configuration, commit, versions, machine, and the command.
        limits: For each kind of result, the largest difference that counts as equal.
        probes: The findings, at least one per probe.
        layouts: The comparisons, the reference layout first. Layouts that cannot be run are included.
        planned: The number of layouts to compare; None until all layers are probed.
        complete: Whether the verification ran to its end.
        seconds: The duration of the verification.
    """

    about: dict[str, Any]
    limits: dict[str, float] = field(default_factory=dict)
    probes: list[Finding] = field(default_factory=list)
    layouts: list[Compared] = field(default_factory=list)
    planned: int | None = None
    complete: bool = False
    seconds: float = 0.0

    @property
    def compared(self) -> list[Compared]:
        """The layouts that were compared with the reference layout."""
        return [layout for layout in self.layouts[1:] if layout.holds is not None and not layout.perturbed]

    @property
    def left_out(self) -> str:
        """A sentence about the layouts that were not compared, with the reasons; empty if all were compared."""
        skipped = [layout for layout in self.layouts[1:] if layout.holds is None]
        needs = [layout.needs for layout in skipped if layout.needs]
        reasons = []
        if needs:
            reasons.append(f"{len(needs)} need more processes (verify.processes={max(needs)} compares them)")
        if others := len(skipped) - len(needs):
            reasons.append(f"{others} are not possible with this model, batch or device")
        return f"{len(skipped)} not compared: {', '.join(reasons)}." if skipped else ""

    @property
    def failed(self) -> list[Finding | Compared]:
        """The findings and comparisons that do not hold."""
        return [result for result in [*self.probes, *self.layouts] if result.holds is False]

    @property
    def ok(self) -> bool:
        """Whether the verification is complete, nothing failed, and at least one layout was compared."""
        return self.complete and bool(self.compared) and not self.failed

    @property
    def reached(self) -> str:
        """The progress of the verification."""
        return f"{len(self.layouts)} of {self.planned} layouts" if self.planned else "the probes of layers"

    def table(self) -> str:
        """Return a table of the largest differences of each layout, by kind of result."""
        lines = [["", *COMPARED]]
        for layout in self.layouts:
            sizes = {kind: f"{size:.0e}" if size else "0" for kind, (size, _) in layout.differences.items()}
            lines += [[layout.name, *(sizes.get(kind, "") for kind in COMPARED)]] * bool(sizes)
        return columns(lines)

    def __str__(self) -> str:
        """Return the failures and the number of layouts that hold."""
        held = sum(layout.holds is True for layout in self.compared)
        partly = f"partial: it ended after {self.reached}, and says nothing of those that are left"
        lines = [f"{held} of {len(self.compared)} layouts hold", self.left_out, partly * (not self.complete)]
        return "\n".join([*map(str, self.failed), *filter(None, lines)])


def prove(cfg: Root, run_dir: Path, typed: Collection[str]) -> Report:
    """Probe the model, compare its layouts, print a line for each, and write the certificate into the run directory.

    The certificate is written after each line, so a verification leaves its results even if SIGKILL ends it. ``typed``
    are the keys that the user has set. A typed precision, batch or layout is kept.

    Raises:
        UserError: If the configuration does not run in one process either.
        KeyboardInterrupt: If the verification was stopped, after its results were printed.
    """
    began = time.monotonic()
    if World.detect() is not None:
        raise TrainingError("mode=verify starts its processes itself: call it without torchrun or srun")
    if cfg.verify.steps < 1:
        raise TrainingError(f"verify.steps={cfg.verify.steps} must be at least 1")
    own = _own_microbatch(cfg)
    cfg = _settled(cfg, typed)
    with changed_environment(environment(cfg)):
        start_fork_server(modules_of_workers(cfg))
    setup = prepare(in_layout(cfg, _single(cfg, chunks=1), steps=cfg.verify.steps))
    if cfg.parallel.sync_batchnorm and setup.has_batchnorm:
        raise TrainingError(
            "mode=verify compares layouts whose micro-batches are those of one process, and "
            "parallel.sync_batchnorm=true normalizes over the micro-batches of all replicas together. Leave it out, or "
            "compare the losses of parallel.chunks=1 with those of parallel=single parallel.chunks=1"
        )
    report = Report(_about(cfg, setup))
    print(f"{cfg.model.name}, {setup.plan.parameters:,} parameters, {setup.data.description}, {cfg.train.precision}")

    reasons: dict[str, str] = {}  # each reason with the first layout that had it

    def note(result: Finding | Compared, said: str = "") -> None:
        report.seconds = time.monotonic() - began
        write(report, run_dir)
        words = str(result)
        if isinstance(result, Compared) and result.holds is None:
            first = reasons.setdefault(re.sub(r"\d+", "", result.reason), result.name)
            if first != result.name and len(result.reason) > len(first):
                words = f"{result.name}: as {first}"
        print(f"  {_mark(result)} {said}{words}", flush=True)

    try:
        questions = ask(cfg, setup, run_dir / "layouts" / "questions", lambda: not report.failed)
        for finding in chain(probe(setup, own), questions):
            report.probes.append(finding)
            note(finding)
        since = time.monotonic()
        print(f"  probes and questions: {since - began:.0f} s")
        for layout in _layouts(report, cfg, setup, run_dir / "layouts", typed, own):
            report.layouts.append(layout)
            note(layout, f"{progress(len(report.layouts), report.planned or 0, since)}  ")
        report.complete = True
    except KeyboardInterrupt as stopped:
        signum = getattr(stopped, "signum", signal.SIGINT)
        raise Interrupted(signum, f"{report.reached} were reached, which the certificate has") from None
    finally:
        if not report.failed:
            shutil.rmtree(run_dir / "layouts", ignore_errors=True)
        write(report, run_dir)
        print(f"\n{report.table()}\n\n{report}\n{run_dir / PAGE}", flush=True)
    return report


def _mark(result: Finding | Compared) -> str:
    return "-" if result.holds is None else styled(*(("✓", "green") if result.holds else ("✗", "red")), sys.stdout)


def _own_microbatch(cfg: Root) -> int:
    """Return the micro-batch size of the run to verify, or the largest possible one if it is chosen automatically."""
    pieces = (n for n in (cfg.parallel.dp, cfg.parallel.chunks) if isinstance(n, int) and n > 0)
    return cfg.train.global_batch_size // math.prod(pieces)


def _settled(cfg: Root, typed: Collection[str]) -> Any:
    """Return the configuration with a verification's own precision, batch and processes, unless they were typed."""
    tree = to_dict(cfg)
    train, gpus = tree["train"], torch.cuda.device_count() if tree["device"] in ("auto", "cuda") else 0
    if train["precision"] == "auto" or "train.precision" not in typed:
        train["precision"] = "fp32" if tree["device"] == "mps" else "fp64"  # rounding stays below the tolerance
    if "train.global_batch_size" not in typed:
        train["global_batch_size"] = min(train["global_batch_size"], _SAMPLES)
    tree["verify"]["processes"] = tree["verify"]["processes"] or gpus or 4
    return to_config(tree)


def _single(cfg: Root, chunks: int) -> Layout:
    """Return the layout of one process. A typed order of the ranks is kept."""
    return Layout(chunks=chunks, order=cfg.parallel.order)


def _layouts(
    report: Report, cfg: Root, setup: Setup, folder: Path, typed: Collection[str], own: int
) -> Iterator[Compared]:
    """Yield the comparison of one process, and then of the typed layout or of all layouts, as soon as each ends."""
    batch, half_precision = cfg.train.global_batch_size, cfg.train.precision in ("bf16", "bf16_residual", "fp16")
    named = cfg.parallel.name != "auto" and (cfg.parallel.axes or cfg.parallel.name != "single")
    chosen = named and any(key.partition(".")[0] == "parallel" for key in typed)
    gathers = setup.examination.which("gathers")  # no layout divides a replica's samples
    if chosen:
        layout = Layout.of(cfg.parallel)
        layout = replace(layout, chunks=2) if layout.chunks == "auto" else layout
        plan = prepare(in_layout(cfg, layout, steps=cfg.verify.steps)).plan
        balance = plan.balance if isinstance(layout.balance, str) else layout.balance  # layers are measured once
        wanted = [replace(layout, dp=plan.dp, pp=plan.pp, chunks=plan.chunks, balance=balance)]
        count = 1 if gathers else plan.dp * plan.chunks
        cfg = with_values(cfg, {"verify.processes": plan.processes})
    else:
        count = 1 if gathers else next(n for n in (4, 2, 1) if batch % n == 0)
        wanted = [*layouts(cfg.verify.processes or 1, count, cfg.parallel.order, variants(setup))]
    one, again = _single(cfg, count), not cfg.train.activation_checkpointing
    # Each layout, with the keys of ``train`` that differ from the run, and the number of a perturbed run.
    planned: list[tuple[Layout, dict[str, Any], int]] = [(one, {}, 0)]
    planned += [(one, {}, i + 1) for i in range(PERTURBED * half_precision)]
    by_rule = any(finding.probe == "halves" and finding.text and finding.holds for finding in report.probes)
    if not by_rule and not chosen:  # by a rule, the training differs with other micro-batches
        chunks = [n for n in (2 * count, *range(count - 1, 0, -1)) if batch % n == 0][:1]
        chunks += [1, *([batch // own] if own and batch % own == 0 else [])]  # all at once; the run's
        planned += [(_single(cfg, n), {}, 0) for n in dict.fromkeys(chunks) if n != count]
    planned += [] if chosen and again else [(one, {"activation_checkpointing": again}, 0)]
    planned += [(layout, {}, 0) for layout in sorted(wanted, key=lambda layout: layout.processes)]  # which stay
    report.planned = len(planned)
    with closing(Runs(cfg, folder, setup.chain, count)) as runs:
        report.limits = runs.limits
        for one in planned:
            result = runs.compare(*one)
            if result.layout.strategy == "single" and not result.changed:
                if result.holds is False:
                    result.reason = result.reason or "micro-batches of another size change what is learned"
            elif result.holds is False and result.differences:
                try:
                    wrong = [finding for finding in report.probes if not finding.holds]
                    result.reason = first_difference(runs, result, wrong)
                except (UserError, OSError) as error:
                    result.reason = f"the first difference was not found: {error}"
            yield result
            if not runs.first.holds:
                return


def _about(cfg: Root, setup: Setup) -> dict[str, Any]:
    given = "  # with the objects of a Python program" * (cfg.model.name == "given")
    return {
        "model": cfg.model.name,
        "parameters": setup.plan.parameters,
        "data": setup.data.description,
        "date": time.strftime("%Y-%m-%d"),
        **describe(),  # commit, versions, machine
        "command": shlex.join(["python", "train.py", *mask_secrets(sys.argv[1:])]) + given,  # Hydra's, from Python too
        "seed": cfg.seed,
        "configuration": {key: value for key, value in mask_secrets(to_dict(cfg)).items() if key != COMMAND},
    }


def write(report: Report, run_dir: Path) -> None:
    """Write certificate.json and certificate.html."""
    tree = {"ok": report.ok, **report.about, **{k: v for k, v in asdict(report).items() if k != "about"}}
    tree["layouts"] = [result.record() for result in report.layouts]
    write_atomically(run_dir / JSON, json.dumps(jsonable(tree), indent=1))
    template = Path(__file__).with_name("certificate.html.jinja")
    write_atomically(run_dir / PAGE, render(template, report.about, report=report, compared=COMPARED))
