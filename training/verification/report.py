"""Probing a model and comparing its layouts, with a line for each, and the certificate that is left."""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.errors import LaunchError, TrainingError, UserError
from common.files import jsonable, write_atomically
from common.machine import changed_environment, styled
from conf import COMMAND
from conf.instantiate import environment, to_config, to_dict
from conf.masking import mask_secrets
from launchers import World, start_fork_server
from training.reporting.recorder import git_state
from training.setup import Setup, prepare
from training.verification.difference import first_difference
from training.verification.layouts import COMPARED, PLACE, Outcome, Runs, as_run, name_of, places
from training.verification.probes import Finding, probe

MICROBATCHES = 4
_SAMPLES = 8  # of a step, where no batch was typed
# Under bf16 and fp16, differences up to this many times that of other micro-batches are rounding.
_SPREADS = 3.0
JSON, PAGE = "certificate.json", "certificate.html"


@dataclass
class Report:
    """What was found.

    Attributes:
        about: Model, parameters, data, seed, precision, commit, versions, machine, and the command.
        probes: The findings of each probe.
        outcomes: The layouts, the reference first; those that cannot be cut too.
        limits: The largest difference of each thing compared that is no difference.
        problem: Why nothing could be compared.
    """

    about: dict[str, Any]
    probes: dict[str, list[Finding]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    problem: str | None = None
    seconds: float = 0.0

    @property
    def findings(self) -> list[Finding]:
        """All findings."""
        return [finding for found in self.probes.values() for finding in found]

    @property
    def compared(self) -> list[Outcome]:
        """The layouts that were run, without the reference."""
        return [outcome for outcome in self.outcomes[1:] if outcome.cannot is None]

    @property
    def failed(self) -> list[Outcome]:
        """The layouts that differ or failed."""
        return [outcome for outcome in self.compared if outcome.failed(self.limits)]

    @property
    def ok(self) -> bool:
        """Whether no probe has found what changes results, and all layouts that can be cut hold, at least one."""
        return (
            self.problem is None and bool(self.compared) and not self.failed and not any(f.fatal for f in self.findings)
        )

    def __str__(self) -> str:
        """Say what does not hold, or that all does."""
        probes = [f"probe {finding.probe}: {finding}" for finding in self.findings if finding.fatal]
        layouts = [f"{outcome.name}: {outcome.first or outcome.problem}" for outcome in self.failed]
        problem = [self.problem] if self.problem is not None else []
        held = f"{len(self.compared) - len(self.failed)} of {len(self.compared)} layouts hold"
        return "\n".join([*problem, *probes, *layouts, held])


def prove(cfg: Any, run_dir: Path, typed: Collection[str]) -> Report:
    """Probe the model, compare its layouts, print a line for each, and write the certificate into the run directory.

    ``typed`` are the keys that the user has set: precision, batch and layout are his then.

    Raises:
        UserError: The configuration cannot run in one process either.
    """
    began = time.monotonic()
    if World.detect() is not None:
        raise TrainingError("mode=verify starts its processes itself: call it without torchrun or srun")
    cfg = _settled(cfg, typed)
    report = Report({})
    _check(cfg.verify)
    with changed_environment(environment(cfg)):
        start_fork_server(["training.preload"])
    setup = prepare(to_config(as_run(cfg, _single(cfg, chunks=1))))
    report.about = _about(cfg, setup)
    print(_headline(report), flush=True)
    for name, found in probe(setup):
        report.probes[name] = found
        for finding in found:
            print(f"  {_mark(not finding.fatal)} {name:18} {finding}", flush=True)
        if not found:
            print(f"  {_mark(True)} {name}", flush=True)
    print(f"  probes: {time.monotonic() - began:.0f} s", flush=True)
    typed_layout = cfg.parallel.name != "single" and any(key.partition(".")[0] == "parallel" for key in typed)
    _compare(report, cfg, setup, run_dir / "layouts", typed_layout)
    report.seconds = time.monotonic() - began
    write(report, run_dir)
    print(f"\n{report}\n{run_dir / PAGE}", flush=True)
    return report


def _settled(cfg: Any, typed: Collection[str]) -> Any:
    """Return the configuration with what was not typed chosen for a proof: precision, batch, processes."""
    tree = to_dict(cfg)
    train = tree["train"]
    if train["precision"] == "auto" or "train.precision" not in typed:
        train["precision"] = "fp32" if tree["device"] == "mps" else "fp64"  # no rounding is taken for a difference
    if "train.global_batch_size" not in typed:
        train["global_batch_size"] = min(train["global_batch_size"], _SAMPLES)
    if tree["verify"]["processes"] is None:
        gpus = torch.cuda.device_count() if tree["device"] in ("auto", "cuda") else 0
        tree["verify"]["processes"] = gpus or 4
    return to_config(tree)


def _check(verify: Any) -> None:
    for key, least in (("processes", 1), ("steps", 1), ("tolerance", 0), ("timeout_s", 1)):
        if verify[key] < least:
            raise TrainingError(f"verify.{key}={verify[key]} must be at least {least}")


def _single(cfg: Any, chunks: int) -> dict[str, Any]:
    """Return the section ``parallel`` of one process, to be compared with."""
    return {**to_dict(cfg)["parallel"], **PLACE, "name": "single", "schedule": "gpipe", "chunks": chunks}


def _wanted(cfg: Any, layout: bool) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of micro-batches in a step, and the layouts: the one of the configuration, or all."""
    if layout:
        place = to_dict(cfg)["parallel"]
        plan = prepare(to_config(as_run(cfg, place))).plan
        place |= {"dp": plan.dp, "pp": plan.pp, "chunks": plan.chunks}
        return plan.dp * plan.chunks, [place]
    count = next(n for n in range(MICROBATCHES, 0, -1) if cfg.train.global_batch_size % n == 0)
    return count, list(places(cfg.verify.processes, count))


def _compare(report: Report, cfg: Any, setup: Setup, folder: Path, typed: bool) -> None:
    """Run every layout and say how it compares."""
    report.limits = dict.fromkeys(COMPARED, cfg.verify.tolerance)
    count, wanted = _wanted(cfg, typed)
    reference = _single(cfg, count)
    runs = Runs(cfg, folder, reference, setup.chain, report.limits)
    try:
        report.outcomes.append(runs.start())
    except UserError as error:
        report.problem = f"{name_of(reference)} cannot run: {error}"
        print(f"  {_mark(False)} {report.problem}", flush=True)
        return
    print(f"  {_mark(True)} {report.outcomes[0].name}: the reference, {report.outcomes[0].seconds:.1f} s", flush=True)
    batch = cfg.train.global_batch_size
    other = next((n for n in (2 * count, *range(count - 1, 0, -1)) if batch % n == 0), None)
    again = {**reference, "chunks": other}
    by_microbatch = [finding for finding in report.findings if finding.probe == "halves" and not finding.fatal]
    if cfg.train.precision in ("bf16", "fp16") and other is not None:
        spread = runs.compare(again).differences
        report.limits |= {key: max(_SPREADS * d, report.limits[key]) for key, (d, _) in spread.items()}
        report.limits["next step"] = max(report.limits.values())
    elif other is not None and by_microbatch:
        why = f"numbers of {by_microbatch[0].layer} depend on the micro-batch"
        report.outcomes.append(Outcome(name_of(again), again, cannot=why))
    elif other is not None and not typed:
        wanted.insert(0, again)
    for place in wanted:
        _one(report, runs, place, setup.chain.names, batch // count)
    if report.ok:
        shutil.rmtree(folder, ignore_errors=True)


def _one(report: Report, runs: Runs, place: dict[str, Any], names: list[str], size: int) -> None:
    outcome = runs.compare(place)
    report.outcomes.append(outcome)
    if outcome.cannot is not None:
        print(f"  - {outcome.name}: {outcome.cannot}", flush=True)
        return
    if outcome.failed(report.limits) and outcome.place["dp"] * outcome.place["chunks"] * size != runs.samples:
        outcome.first = "differs with micro-batches of another size"
    elif outcome.failed(report.limits) and outcome.problem is None:
        try:
            outcome.first = first_difference(runs, outcome, report.findings, names, size)
        except (LaunchError, UserError, OSError) as error:
            outcome.first = f"the first difference was not found: {error}"
    largest, what = outcome.largest
    held = not outcome.failed(report.limits)
    text = outcome.problem or f"largest difference {largest:.0e} ({what}), {outcome.seconds:.1f} s"
    optimizer = runs.cfg.optim._target_.rpartition(".")[2]
    own = f"; with your {optimizer} {outcome.own:.0e}" if outcome.own is not None else ""
    print(f"  {_mark(held)} {outcome.name}: {text}{own}", flush=True)
    if outcome.first:
        print(f"      {outcome.first}", flush=True)


def _mark(held: bool) -> str:
    return styled("✓", "green", sys.stdout) if held else styled("✗", "red", sys.stdout)


def _headline(report: Report) -> str:
    about = report.about
    return f"{about['model']}, {about['parameters']:,} parameters, {about['data']}, {about['precision']}"


def _about(cfg: Any, setup: Setup) -> dict[str, Any]:
    import numpy

    command = shlex.join(["python", "train.py", *mask_secrets(sys.argv[1:])])  # Hydra's words, from Python too
    command += "  # with the objects of a Python program" * (cfg.model.name == "given")
    return {
        "model": cfg.model.name,
        "parameters": setup.plan.parameters,
        "data": setup.data.description,
        "seed": cfg.seed,
        "precision": cfg.train.precision,
        "batch": cfg.train.global_batch_size,
        "steps": cfg.verify.steps,
        "tolerance": cfg.verify.tolerance,
        "commit": git_state()[0],
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}",
        "machine": f"{platform.machine()}, {platform.system()}, {torch.get_num_threads()} threads",
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
        "configuration": {k: v for k, v in mask_secrets(to_dict(cfg)).items() if k != COMMAND},
    }


def write(report: Report, run_dir: Path) -> None:
    """Write certificate.json and certificate.html."""
    import jinja2

    tree = {
        "ok": report.ok,
        "problem": report.problem,
        **report.about,
        "seconds": report.seconds,
        "limits": report.limits,
        "probes": {name: [asdict(finding) for finding in found] for name, found in report.probes.items()},
        "layouts": [
            {**asdict(outcome), "holds": None if outcome.cannot else not outcome.failed(report.limits)}
            for outcome in report.outcomes
        ],
    }
    write_atomically(run_dir / JSON, json.dumps(jsonable(tree), indent=1))
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.get_template("certificate.html.jinja")
    page = template.render(report=report, compared=COMPARED, curves=_curves(report))
    write_atomically(run_dir / PAGE, page)


def _curves(report: Report) -> list[tuple[str, str]]:
    """Return the losses of the reference and of each layout as points of an SVG of 600 by 160."""
    all_losses = [one for outcome in report.outcomes for one in outcome.losses if one == one]
    low, high = (min(all_losses), max(all_losses)) if all_losses else (0.0, 1.0)
    curves = []
    for outcome in report.outcomes:
        wide, points = max(len(outcome.losses) - 1, 1), []
        for i, loss in enumerate(outcome.losses):
            points.append(f"{10 + 580 * i / wide:.1f},{10 + 140 * (high - loss) / ((high - low) or 1.0):.1f}")
        if points:
            curves.append((outcome.name, " ".join(points)))
    return curves
