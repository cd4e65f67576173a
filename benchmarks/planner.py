"""How far the planner's predictions are off: on layouts that others have measured, and on this machine.

    python -m benchmarks planner [published] [here] [--quick]

published, seconds: published_layouts.csv has published step times of Megatron-LM (Narayanan et al. 2021, arXiv
2104.04473, table 1; from TFLOP/s by the paper's own formula; its micro-batches are not published and assumed),
Korthikanti et al. 2022 (arXiv 2205.05198, tables 4 and 5, figure 1) and torchtitan (its benchmarks of Llama 3.1 8B
without float8; BSD-3). Larger tables (vTrain, llm-foundry, KempnerForge) are read from ../shared/data beside the
repository, where that exists.

A row is predicted in three ways: by the cluster's file; for a table to which that file was fitted, by a file that is
fitted again to five sixths of the rows, of which the row is none; and by the file after one row of the same model,
tensor parallelism and micro-batch has said by how much all of them are off.

here, half an hour on two cores: six small models in all layouts of 1, 2 and 4 processes with 1, 2, 4 or 8
micro-batches, predicted from what is measured in seconds, and then run.
"""

from __future__ import annotations

import csv
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from benchmarks import figure
from benchmarks.table import Benchmark, Table
from conf import FOLDER
from planner.cluster import Cluster, Link, read_cluster
from planner.costs import PaperCosts
from planner.layout import PlannedLayout
from planner.memory import Allocation, fullest
from planner.step import seconds_of
from planner.work import LayerWork

OWN = Path(__file__).with_name("published_layouts.csv")
MORE = Path(__file__).resolve().parents[2] / "shared" / "data"
FITTED = {"vTrain": "a100x512", "llm-foundry": "a100x64", "torchtitan": "h100x128", "KempnerForge": "h200x8"}
_PUBLISHED, _HERE = "published", "here"
_FOLDS = 6
# Where the fit of unseen rows starts: round efficiencies, and the links as the makers of such nodes of A100 state them.
_UNFITTED = {
    "product": 0.7, "attention": 0.5, "traffic": 1.0, "launch": 2e-5, "message": 0.5, "step": 0.1,
    "inside": Link(300e9, 1e-5), "between": Link(25e9, 2e-5),
}  # fmt: skip
_LOSS_SCALE = 0.02  # errors beyond it count less in a fit: a table has rows that nothing explains
_PRIOR = 0.05  # how much a fit is held to what the file says, beside an error


@dataclass(frozen=True)
class Row:
    """A measured layout.

    Attributes:
        table: Whose.
        sweep: Rows of the same sweep train the same model on the same batch.
        alike: Rows that are calibrated together.
        cluster: The name of a cluster's file.
        layers: The layers' work.
        layout: The layout.
        seconds: The step as measured.
        state: GiB of weights, gradients and optimizer state as published; None where they are not.
        kept: GiB of activations, likewise.
        own: Makes the row's cluster of the file's.
        number: Bytes of a weight, of a gradient, and of a number of the optimizer's state.
    """

    table: str
    sweep: tuple
    alike: tuple
    cluster: str
    layers: list[LayerWork]
    layout: PlannedLayout
    seconds: float
    state: float | None = None
    kept: float | None = None
    own: Callable[[Cluster], Cluster] = lambda cluster: cluster
    number: int = 4


def decoder(
    hidden: int, layers: int, heads: int, sequence: int, vocabulary: int, kv_heads: int = 0, mlp: int = 0,
    scores: str = "fused", tied: bool = True, alternate: bool = False,
) -> list[LayerWork]:  # fmt: skip
    """Return the work of a decoder in half precision, of which each number is arithmetic (Korthikanti et al. 2022).

    Args:
        hidden: The width.
        layers: Blocks.
        heads: Of attention.
        sequence: Tokens of a sample.
        vocabulary: Words.
        kv_heads: Heads of keys and values; 0: as many as ``heads``.
        mlp: The width of a gated MLP; 0: a plain one of four times ``hidden``.
        scores: Of attention. "fused": never in memory; "kept"; "again": not kept, but computed again for the backward.
        tied: Whether the head is the embedding.
        alternate: Whether a block keeps its input, what attention returns, and what every other product does, as
            torchtitan's selective recomputation has it.
    """
    s, h, wide = sequence, hidden, mlp or 4 * hidden
    keys = h * (kv_heads or heads) // heads
    weights = 2 * h * (h + keys) + h * wide * (3 if mlp else 2)
    times = {"fused": 0, "kept": 1, "again": 4 / 3}[scores]  # again: four passes, where a step has three
    moved = 36 * s * h + times * 8 * heads * s * s + (4 * s * wide if mlp else 0)
    kept = s * h * (24 if mlp else 34) + (6 * s * wide if mlp else 0) + (scores == "kept") * 5 * heads * s * s
    kept = 2 * s * (4 * h + keys + wide) if alternate else kept
    block = LayerWork(
        "block", 2 * s * weights, 4 * s * s * h, 6, moved, weights, 2 * s * h, kept, cast=2 * weights, hidden=s * h
    )
    words = vocabulary * h
    embedding = LayerWork("embedding", 0, 0, 0, 4 * s * h, words, 2 * s * h, 0, cast=2 * words)
    own = 0 if tied else words
    moved, kept = 6 * s * (vocabulary + h), 4 * s * vocabulary
    head = LayerWork("head", 2 * s * words, 0, 1, moved, own, 4, kept, cast=2 * own)
    return [embedding, *[block] * layers, head]


def rows() -> list[Row]:
    """Read the project's own table and, where they are present, the larger ones."""
    found = [_published(row) for row in _read(OWN)]
    if (MORE / "published").is_dir():
        found += [_kempner(row) for row in _read(MORE / "published" / "kempnerforge_h200.csv") if row["grad_accum"]]
        foundry = _read(MORE / "published" / "llm_foundry_fsdp.csv")
        found += [_foundry(row) for row in foundry if row["precision"] in ("bf16", "amp_bf16")]
    if (MORE / "vtrain").is_dir():
        found += [_vtrain(row) for row in _read(MORE / "vtrain" / "measured_a100.csv")]
    return found


def _read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _published(row: dict[str, str]) -> Row:
    n = {key: int(value) for key, value in row.items() if value.isdigit()}
    recompute, megatron = row["recompute"], row["cluster"] == "selene"
    layout = PlannedLayout(
        "pipe_ddp" if n["shards"] == 1 else "pipe_fsdp", n["dp"], n["pp"], n["chunks"],
        "interleaved_1f1b" if n["per_rank"] > 1 else "1f1b", n["per_rank"], order="pp_dp" if megatron else "dp_pp",
        shard=n["shards"], reshard=True, tp=n["tp"], samples=n["samples"], recompute=recompute,
        sequence=recompute == "selective", overlaps=not megatron, ends_on_top=megatron,
    )  # fmt: skip
    layers = decoder(
        n["hidden"], n["layers"], n["heads"], n["sequence"], n["vocabulary"], n.get("kv_heads", 0), n.get("mlp", 0),
        scores={"full": "kept", "selective": "again"}[recompute] if megatron else "fused", tied=megatron,
        alternate=not megatron,
    )  # fmt: skip
    gib = [float(row[key]) if row[key] else None for key in ("state_gib", "kept_gib")]
    sweep = row["table"], row["model"]
    name, own = ("a100x512", _selene) if megatron else (row["cluster"], partial(replace, memory=96e9))
    return Row(row["table"], sweep, (*sweep, n["tp"], n["samples"]), name, layers, layout, float(row["seconds"]), *gib,
               own)  # fmt: skip


def _selene(a100x512: Cluster) -> Cluster:
    """Return NVIDIA's cluster, whose network it has published, of the devices of vTrain's.

    Its fastest published step takes 1.1 s: it cannot have vTrain's second that is in no other part.
    """
    return replace(a100x512, between=_UNFITTED["between"], step=_UNFITTED["step"])


def _vtrain(row: dict[str, str]) -> Row:
    size, devices, batch, samples, hidden, heads, layers, sequence, tp, dp, pp, ms = map(float, row.values())
    layout = PlannedLayout(
        "pipe_ddp", int(dp), int(pp), int(batch / dp / samples), "1f1b", order="pp_dp", tp=int(tp),
        samples=int(samples), recompute="full", sequence=False, overlaps=False, ends_on_top=True,
    )  # fmt: skip
    layers = decoder(int(hidden), int(layers), int(heads), int(sequence), 51200, scores="kept")
    return Row("vTrain", ("vTrain", size), ("vTrain", size, tp, samples), "a100x512", layers, layout, ms / 1e3)


_SMALL = partial(replace, device="A100 40 GB", memory=42.3e9, memory_bandwidth=1.555e12)
_MPT = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip


def _foundry(row: dict[str, str]) -> Row:
    devices, samples, sequence = int(row["gpus"]), int(row["micro_batch"]), int(row["seq_len"])
    chunks = round(float(row["global_batch"]) / devices / samples) or 1
    layout = PlannedLayout("fsdp", devices, chunks=chunks, samples=samples,
                           recompute="full" if row["activation_checkpointing"] == "True" else "none")  # fmt: skip
    key = "llm-foundry", row["model"], sequence, row["global_batch"]
    seconds = float(row["global_batch"]) * sequence / float(row["tokens_per_s"])
    layers, small = decoder(*_MPT[row["model"]], sequence, 50368), row["gpu"] == "a100_40gb"
    return Row("llm-foundry", key, (*key, samples), "a100x64", layers, layout, seconds,
               own=_SMALL if small else Row.own)  # fmt: skip


def _kempner(row: dict[str, str]) -> Row:
    n = {key: int(value) for key, value in row.items() if value.isdigit()}
    layout = PlannedLayout(
        "fsdp" if n["pp"] == 1 else "pipe_fsdp", n["dp_shard"], n["pp"], n["grad_accum"], "1f1b", reshard=True,
        tp=n["tp"], samples=n["micro_batch"], recompute="full",
    )  # fmt: skip
    mlp = 14336 if row["model"] == "7B" else 28672
    layers = decoder(n["dim"], n["layers"], n["heads"], n["seq_len"], 128256, n["kv_heads"], mlp, tied=False)
    key = "KempnerForge", row["model"]
    sweep = *key, n["gpus"], n["dp_shard"] * n["micro_batch"] * n["grad_accum"]
    group = n["tp"] if n["tp"] > 1 else n["dp_shard"]
    return Row("KempnerForge", sweep, (*key, n["tp"]), "h200x8", layers, layout, float(row["step_time_s"]),
               own=partial(_of_four, group=min(group, 4)), number=2)  # fmt: skip


def _of_four(h200x8: Cluster, group: int) -> Cluster:
    """Return a cluster whose nodes have four devices and no switch: each pair has a third of a device's links."""
    bandwidth = h200x8.inside.bandwidth * max(1, group - 1) / 3
    return replace(h200x8, devices=4, inside=Link(bandwidth, h200x8.inside.latency))


# -- predictions -----------------------------------------------------------------------------------------------------


@cache
def cluster_of(name: str) -> Cluster:
    """Return the cluster of a file."""
    return read_cluster(OmegaConf.to_container(OmegaConf.load(FOLDER / "cluster" / f"{name}.yaml")))


def costs_of(row: Row, cluster: Cluster | None = None) -> PaperCosts:
    """Return the costs of a row, by its own cluster's file or by ``cluster``."""
    return PaperCosts(row.own(cluster or cluster_of(row.cluster)), "bf16")


def predicted(measured: Sequence[Row], cluster: Cluster | None = None) -> np.ndarray:
    """Return the seconds of each row, by its own cluster's file or by ``cluster``."""
    return np.array([seconds_of(row.layers, row.layout, costs_of(row, cluster)).total for row in measured])


_SPREADS = {
    "product": 0.15, "attention": 0.4, "traffic": 0.5, "launch": 1.0, "step": 1.5, "message": 0.5,
    "inside.bandwidth": 0.4, "inside.latency": 1.0, "between.bandwidth": 0.7, "between.latency": 1.0,
}  # fmt: skip


def fit(measured: Sequence[Row], start: Cluster) -> Cluster:
    """Return a cluster whose efficiencies and links are nearer to what was measured."""
    from scipy.optimize import least_squares

    spreads, truth = np.array(list(_SPREADS.values())), np.array([row.seconds for row in measured])
    numbers = [start.product, start.attention, start.traffic, start.launch, start.step, start.message]
    first = np.log([*numbers, start.inside.bandwidth, start.inside.latency, start.between.bandwidth,
                    start.between.latency])  # fmt: skip

    def changed(logs: np.ndarray) -> Cluster:
        product, attention, traffic, launch, step, message, *links = np.exp(logs)
        return replace(start, product=product, attention=attention, traffic=traffic, launch=launch, step=step,
                       message=message, inside=Link(*links[:2]), between=Link(*links[2:]))  # fmt: skip

    def off(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([np.log(predicted(measured, changed(logs)) / truth), _PRIOR * (logs - first) / spreads])

    return changed(least_squares(off, first, loss="soft_l1", f_scale=_LOSS_SCALE).x)


def by_unseen(measured: Sequence[Row], like: Cluster) -> np.ndarray:
    """Predict each row by a cluster that was fitted to the other five sixths."""
    seconds, start = np.zeros(len(measured)), replace(like, **_UNFITTED)
    for fold in range(_FOLDS):
        others = [row for i, row in enumerate(measured) if i % _FOLDS != fold]
        seconds[fold::_FOLDS] = predicted(measured[fold::_FOLDS], fit(others, start))
    return seconds


def by_one_row(measured: Sequence[Row], seconds: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Return which rows have another one that is alike and comes before, and what that makes of their seconds."""
    first: dict[tuple, float] = {}
    places, corrected = [], []
    for i, row in enumerate(measured):
        if row.alike in first:
            places.append(i)
            corrected.append(seconds[i] * first[row.alike])
        first.setdefault(row.alike, row.seconds / seconds[i])
    return places, np.array(corrected)


# -- tables ----------------------------------------------------------------------------------------------------------


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the tables of the parts."""
    parts = chosen.parts or [_PUBLISHED, _HERE]
    if _PUBLISHED in parts:
        yield from published(chosen)
    if _HERE in parts:
        from benchmarks.layouts_here import tables

        yield from tables(chosen.quick)


def published(chosen: Namespace) -> Iterator[Table]:
    """Yield the errors of step times, their ranking, and the memory."""
    everything = [row for row in rows() if not chosen.quick or row.table.startswith(("Korthikanti", "torchtitan"))]
    tables: dict[str, list[Row]] = defaultdict(list)
    for row in everything:
        tables[row.table.removesuffix(" compiled")].append(row)
    lines, points = [], []
    for name, measured in tables.items():
        seconds, truth = predicted(measured), np.array([row.seconds for row in measured])
        way = "fitted to it" if name in FITTED else "not fitted to it"
        points += [(f"{name} ({way})", t, s) for t, s in zip(truth, seconds, strict=True)]
        lines.append(_line(name, way, seconds, truth) | _ranking(measured, seconds))
        if name in FITTED and len(measured) > 2 * _FOLDS:
            unseen = by_unseen(measured, cluster_of(FITTED[name]))
            lines.append(_line(name, "unseen rows", unseen, truth) | _ranking(measured, unseen))
        places, corrected = by_one_row(measured, seconds)
        if len(places) > 2:
            rest = [measured[i] for i in places]
            lines.append(_line(name, "calibrated by one row", corrected, truth[places]) | _ranking(rest, corrected))
    yield Table("planner", lines, {"rows": len(everything)}, partial(figure.against_measured, points=points))
    if memory := [line for row in everything if row.state for line in _memory(row)]:
        yield Table("planner_memory", memory)
    yield Table("planner_fits", [_fits(name, measured) for name, measured in tables.items()])


def _line(table: str, way: str, seconds: np.ndarray, truth: np.ndarray) -> dict[str, object]:
    off = np.abs(seconds / truth - 1)
    return {
        "table": table, "cluster's file": way, "rows": len(truth), "mean": f"{off.mean():.1%}",
        "median": f"{np.median(off):.1%}", "90th percentile": f"{np.quantile(off, 0.9):.1%}",
        "rank correlation": "", "regret": "",
    }  # fmt: skip


def _ranking(measured: Sequence[Row], seconds: np.ndarray) -> dict[str, str]:
    """Return how well layouts of one sweep are put in order, and what the one chosen costs beyond the best."""
    from scipy.stats import spearmanr

    sweeps: dict[tuple, list[int]] = defaultdict(list)
    for i, row in enumerate(measured):
        sweeps[row.sweep].append(i)
    large = [np.array(places) for places in sweeps.values() if len(places) > 4]
    if not large:
        return {}
    truth = np.array([row.seconds for row in measured])
    ranks = [spearmanr(seconds[places], truth[places]).statistic for places in large]
    regrets = [truth[places][seconds[places].argmin()] / truth[places].min() - 1 for places in large]
    return {"rank correlation": f"{np.mean(ranks):.3f}", "regret": f"{np.mean(regrets):.1%}"}


def _fits(table: str, measured: Sequence[Row]) -> dict[str, object]:
    """Count which layouts that have run are said to fit, and which of those that need more than there is.

    Without recomputing, Korthikanti et al.'s models need 105 to 164 GiB of a GPU's 80.
    """
    large = [row for row in measured if row.state and row.layout.recompute == "full"]
    large = [replace(row, layout=replace(row.layout, recompute="none")) for row in large]
    ran, not_run = (sum(map(_is_said_to_fit, some)) for some in (measured, large))
    right = ran + len(large) - not_run
    return {
        "table": table, "have run": len(measured), "said to fit": ran, "do not fit": len(large),
        '"fits" that are wrong': not_run, "right": f"{right / (len(measured) + len(large)):.0%}",
    }  # fmt: skip


def _is_said_to_fit(row: Row) -> bool:
    cluster = row.own(cluster_of(row.cluster))
    needed = fullest(row.layers, row.layout, Allocation(gathered=2, process=cluster.reserved))
    return needed.total - needed.state * (1 - row.number / 4) <= cluster.memory


def _memory(row: Row) -> Iterator[dict[str, object]]:
    held = fullest(row.layers, row.layout, Allocation(gathered=2, process=0.0))
    of_weights, of_samples = held.state + held.gathered + held.cast, held.activations + held.recomputed
    state, kept = of_weights / 2**30, of_samples / 2**30
    for what, wanted, gib in (("weights, gradients, optimizer", row.state, state), ("activations", row.kept, kept)):
        if wanted:
            yield {
                "model": row.sweep[1], "recomputed": row.layout.recompute, "what": what,
                "published GiB": f"{wanted:.1f}", "predicted GiB": f"{gib:.1f}", "off": f"{gib / wanted - 1:+.1%}",
            }  # fmt: skip


BENCHMARK = Benchmark(measure, parts=(_PUBLISHED, _HERE))
