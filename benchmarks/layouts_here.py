"""What the planner predicts for this machine, held to runs: the part ``here`` of ``python -m benchmarks planner``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.table import Table
from conf.composition import Composed
from launchers import start_fork_server
from planner.search import Candidate
from training.command.api import load_config
from training.command.app import plain
from training.studies.planning.choice import nearest, pick, predict_here
from training.studies.planning.trial import Trial, try_layout

MODELS = {
    "toy": ("model=toy",),
    "classifier": ("model=classifier",),
    "convnet": ("model=convnet",),
    "transformer": ("model=transformer", "data.seq_len=32"),
    "gpt2": ("model=gpt2", "model.size=tiny", "train.global_batch_size=16"),
    "resnet50": ("model=resnet50", "train.global_batch_size=16", "data.image_size=64"),
}
SAME = ("logger=none", "train.precision=fp32", "parallel=auto")
PROCESSES = 1, 2, 4
CHUNKS = 1, 2, 4, 8
_SECONDS = 1.0  # of a trial
_LIMITS = np.arange(0.25, 1.5, 0.125)  # GiB that a rank could have, to count what is wrongly said to fit

Pair = tuple[Candidate, Trial]


def tables(quick: bool) -> Iterator[Table]:
    """Yield each layout as predicted and measured, and what that says of each model."""
    from benchmarks import figure  # here, because matplotlib need not be there for what benchmarks.gpu takes from here

    start_fork_server(["training.command.preload"])
    models = ["toy"] if quick else [*MODELS]
    measured, chosen = {}, {}
    for name in models:
        measured[name], chosen[name] = _pairs(name, quick)
    rows = [row(name, *pair) for name, pairs in measured.items() for pair in pairs]
    points = [
        (name, trial.seconds, candidate.seconds.total) for name, pairs in measured.items() for candidate, trial in pairs
    ]
    yield Table("planner_here_layouts", rows, draw=partial(figure.against_measured, points=points))
    lines = [_line(name, pairs) | _choice(pairs, chosen[name]) for name, pairs in measured.items()]
    yield Table("planner_here", [*lines, _line("all", [pair for pairs in measured.values() for pair in pairs])])


def _pairs(name: str, quick: bool) -> tuple[list[Pair], Candidate]:
    """Predict all layouts of a model, let parallel=auto take one of them, and then run them all."""
    cfg = plain(Composed(load_config(*MODELS[name], *SAME), Path())).cfg
    found, _ = predict_here(cfg, PROCESSES)
    some = [
        candidate
        for candidate in found.best
        if candidate.layout.chunks in CHUNKS and candidate.layout.recompute == "none"
    ]
    some, pairs = some[:4] if quick else some, []
    chosen, _ = pick(cfg, some)
    for candidate in some:
        trial = try_layout(cfg, candidate, _SECONDS)
        if trial.problem:
            raise RuntimeError(f"{name}, {candidate.name}: {trial.problem}")
        print(f"{name}: {candidate.name}: {candidate.seconds.total:.4f} s, measured {trial.seconds:.4f}", flush=True)
        pairs.append((candidate, trial))
    return pairs, chosen


def row(name: str, candidate: Candidate, trial: Trial) -> dict[str, object]:
    """Return a line of the table: a layout as predicted and measured."""
    return {
        "model": name, "layout": candidate.name, "processes": candidate.layout.processes,
        "predicted ms": f"{1e3 * candidate.seconds.total:.1f}", "measured ms": f"{1e3 * trial.seconds:.1f}",
        "off": f"{candidate.seconds.total / trial.seconds - 1:+.0%}",
        "predicted MiB": f"{candidate.memory.total / 2**20:.0f}", "measured MiB": f"{trial.peak / 2**20:.0f}",
        "memory off": f"{candidate.memory.total / trial.peak - 1:+.0%}",
    }  # fmt: skip


def _line(name: str, pairs: Sequence[Pair]) -> dict[str, object]:
    from scipy.stats import spearmanr

    seconds, real = (
        np.array(x) for x in zip(*((candidate.seconds.total, t.seconds) for candidate, t in pairs), strict=True)
    )
    memory, peak = (
        np.array(x) for x in zip(*((candidate.memory.total, t.peak) for candidate, t in pairs), strict=True)
    )
    off, off_memory = np.abs(seconds / real - 1), np.abs(memory / peak - 1)
    says, does = (size[:, None] / 2**30 <= _LIMITS for size in (memory, peak))
    rank = "" if name == "all" else f"{spearmanr(seconds, real).statistic:.3f}"
    return {
        "model": name, "layouts": len(pairs), "step time, mean": f"{off.mean():.1%}",
        "90th percentile": f"{np.quantile(off, 0.9):.1%}",
        "rank correlation": rank, "memory, mean": f"{off_memory.mean():.1%}",
        "fits or not, right": f"{(says == does).mean():.1%}",
        '"fits" that are wrong': f"{(says & ~does).sum() / max(1, says.sum()):.1%}",
        "best": "", "chosen": "", "regret": "", "of several processes, by prediction": "", "and after short runs": "",
    }  # fmt: skip


def _choice(pairs: Sequence[Pair], chosen: Candidate) -> dict[str, str]:
    """Return the fastest layout, the one that parallel=auto takes, and what that loses.

    The same again of the layouts of several processes: of the first by prediction, and of the fastest of those that
    parallel=auto would try.
    """
    took = {candidate.name: trial.seconds for candidate, trial in pairs}  # they come in the order of what is predicted
    several = [candidate for candidate, _ in pairs if candidate.layout.processes > 1]
    best, least = min(took, key=took.get), min(took[candidate.name] for candidate in several)
    tried = min(took[candidate.name] for candidate in nearest(several))
    return {
        "best": best, "chosen": chosen.name, "regret": f"{took[chosen.name] / took[best] - 1:.1%}",
        "of several processes, by prediction": f"{took[several[0].name] / least - 1:.1%}",
        "and after short runs": f"{tried / least - 1:.1%}",
    }  # fmt: skip
