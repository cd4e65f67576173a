"""How far the planner's predictions are off: on layouts that others have measured, and on this machine.

    python -m benchmarks planner [published] [here] [--quick]

published, seconds: published_layouts.csv has published step times of Megatron-LM (Narayanan et al. 2021, arXiv
2104.04473, table 1; from TFLOP/s by the paper's own formula; its micro-batches are not published and assumed),
Korthikanti et al. 2022 (arXiv 2205.05198, tables 4 and 5, figure 1) and torchtitan (its benchmarks of Llama 3.1 8B
without float8; BSD-3). Larger tables (vTrain, llm-foundry, KempnerForge) are read from ../shared/data beside the
repository, where that exists.

A row is predicted in four ways:

* by the cluster's file;
* for a table with many rows, by a device that is fitted again without the rows of the same model;
* for a table to which the device was fitted, without the whole table: products are fitted to the device's other tables,
  and attention is that of kernels measured by themselves;
* by the file, after one row of the same model, tensor parallelism and micro-batch has said by how much all are off.

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

from benchmarks import figure
from benchmarks.table import Benchmark, Table
from conf.composition import compose
from conf.instantiate import to_dict
from planner.cluster import Cluster, Link, read_cluster
from planner.costs import PaperCosts
from planner.layout import PlannedLayout
from planner.memory import Allocation, Memory, fullest
from planner.step import seconds_of
from planner.work import LayerWork

OWN = Path(__file__).with_name("published_layouts.csv")
MORE = Path(__file__).resolve().parents[2] / "shared" / "data"
# Tables to whose rows a device's products and attention were fitted.
FITTED = ("Megatron-LM 2021", "Korthikanti 2022", "vTrain", "llm-foundry", "llm-foundry H100", "KempnerForge")
Fitted = tuple[float, float]
_PUBLISHED, _HERE = "published", "here"
_UNFITTED = 0.7, 0.5  # where a fit of products and attention starts
# The parts of a peak that kernels reach by themselves, by the peak: products of 8192 x 8192 matrices on an H200
# (benchmarks/results/gpu_peaks.csv), and FlashAttention 2, 50 to 73 % on an A100 and 335 TFLOP/s on an H100 (Dao 2023,
# arXiv 2307.08691).
_PRODUCTS, _ATTENTION = {989e12: 0.759}, {312e12: 0.615, 989e12: 0.339}
_FEW = 20  # rows: each model of a larger table is left out in turn
_LOSS_SCALE = 0.02  # errors beyond it count less in a fit: a table has rows that nothing explains
_PRIOR = 0.05  # how much a fit is held to where it starts, beside an error


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
        total: GiB of everything, likewise.
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
    total: float | None = None
    own: Callable[[Cluster], Cluster] = lambda cluster: cluster
    number: int = 4


@dataclass(frozen=True)
class Kernels:
    """The bytes that a code's kernels outside products move in a forward in half precision, counted by operator.

    Attributes:
        norm: For each number of the width, of a norm. Fused: read and written once, 4. RMSNorm in plain operators, in
            float32: cast 6, square 8, mean 4, scale 8, cast back 6, weight 4.
        add: For each number of the width, of a residual connection: two read, one written, 6; dropout's mask, 7.
        gate: For each number of a gated MLP's width: two read, one written, 6; silu and product apart, 10.
        rotate: For each number of queries and keys, of rotary positions: 4; in float32 and complex numbers, 20.
        scores: For each of attention's scores where they are in memory: softmax 4, dropout 5.
        loss: For each logit: half precision read once, 2; in plain operators in float32, cast 6 and log-softmax 8;
            Megatron-LM casts 6, and reads for a maximum 4, subtracts 8, raises 8, sums 4 and divides 8.
        skips: Whether fused attention leaves the masked half out, as FlashAttention 2 does. The first one and Triton's
            took about twice as long (Dao 2023), as if they did not.
        norm_kept: Bytes that a norm keeps beyond its input, for each number of the width. In plain operators four
            tensors of float32, 16.
        logit_kept: Bytes held for each logit: in float32 once, 4; in half precision, in float32, and their gradients
            in both, 14 with what the loss keeps; 10 without the copies in half precision of gradients and of the loss.
        cuts_logits: Whether ranks that share layers also share the vocabulary in the loss.
    """

    norm: float = 4
    add: float = 6
    gate: float = 6
    rotate: float = 4
    scores: float = 9
    loss: float = 10
    skips: bool = True
    norm_kept: float = 0
    logit_kept: float = 14
    cuts_logits: bool = True


MEGATRON = Kernels(add=7, loss=38, logit_kept=4)  # LayerNorm, bias with GELU or dropout and softmax are fused
MPT = Kernels(loss=2, skips=False, logit_kept=4)  # LayerNorm in half precision, no dropout, flash-attn's loss
COMPILED = Kernels()  # blocks; the loss is not
KEMPNER = Kernels(logit_kept=10)  # blocks and loss are compiled
EAGER = Kernels(norm=36, gate=10, rotate=20, scores=33, norm_kept=16)


def decoder(
    hidden: int, layers: int, heads: int, sequence: int, vocabulary: int, kv_heads: int = 0, mlp: int = 0,
    scores: str = "fused", tied: bool = True, alternate: bool = False, kernels: Kernels = COMPILED,
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
            torchtitan's selective recomputation has it: beside three passes, half of the products are computed again,
            and all other operators but attention.
        kernels: What the code's kernels move.
    """
    s, h, wide = sequence, hidden, mlp or 4 * hidden
    keys = h * (kv_heads or heads) // heads
    weights = 2 * h * (h + keys) + h * wide * (3 if mlp else 2)
    whole = 2 * (kernels.norm + kernels.add) * s * h
    inner = kernels.gate * wide + kernels.rotate * (h + keys) if mlp else 4 * wide  # GELU: read and written
    times = {"fused": 0, "kept": 1, "again": 4 / 3}[scores]  # again: four passes, where a step has three
    in_memory = 4 * s * h + kernels.scores * heads * s * s  # what heads return is put in order
    moved = whole + s * inner + times * in_memory
    kept = s * h * (24 if mlp else 34) + (6 * s * wide if mlp else 0) + (scores == "kept") * 5 * heads * s * s
    kept = 2 * s * (4 * h + keys + wide) if alternate else kept + 2 * kernels.norm_kept * s * h
    # Inputs and outputs of norms, and masks of dropout, which blocks with a gated MLP do not have.
    kept_whole = 4 * s * h if alternate else s * h * ((8 if mlp else 10) + 2 * kernels.norm_kept)
    flops, attention = 2 * s * weights, 4 * s * s * h
    if alternate:
        flops, moved, whole = flops * 7 / 6, moved * 4 / 3, whole * 4 / 3
    block = LayerWork(
        "block", flops, attention, 6, moved, weights, 2 * s * h, kept, cast=2 * weights, hidden=s * h, whole=whole,
        kept_whole=kept_whole, masked=attention / 2 if scores == "fused" and kernels.skips else 0,
        queries=s * h, keys=2 * s * keys,
    )  # fmt: skip
    words = vocabulary * h
    embedding = LayerWork("embedding", 0, 0, 0, 4 * s * h, words, 2 * s * h, 0, cast=2 * words, whole=4 * s * h)
    own, last = 0 if tied else words, kernels.norm * s * h
    moved, kept = kernels.loss * s * vocabulary + last, kernels.logit_kept * s * vocabulary
    head = LayerWork("head", 2 * s * words, 0, 1, moved, own, 4, kept, cast=2 * own,
                     whole=last if kernels.cuts_logits else moved,
                     kept_whole=0 if kernels.cuts_logits else kept)  # fmt: skip
    return [embedding, *[block] * layers, head]


def rows() -> list[Row]:
    """Read the project's own table and, where they are present, the larger ones."""
    found = [_published(row) for row in _read(OWN)]
    if (MORE / "published").is_dir():
        found += [_kempner(row) for row in _read(MORE / "published" / "kempnerforge_h200.csv")]
        foundry = _read(MORE / "published" / "llm_foundry_fsdp.csv")
        found += [_foundry(row) for row in foundry if row["precision"] in ("bf16", "amp_bf16")]
        found += [_foundry(row) for row in _read(MORE / "published" / "llm_foundry_h100.csv")]
    if (MORE / "vtrain").is_dir():
        found += [_vtrain(row) for row in _read(MORE / "vtrain" / "measured_a100.csv")]
    return found


def _read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _published(row: dict[str, str]) -> Row:
    n = {key: int(value) for key, value in row.items() if value.isdigit()}
    recompute, megatron = row["recompute"], row["table"].startswith(("Megatron", "Korthikanti"))
    layout = PlannedLayout(
        "pipe_ddp" if n["shards"] == 1 else "fsdp", n["dp"], n["pp"], n["chunks"],
        "interleaved_1f1b" if n["per_rank"] > 1 else "1f1b", n["per_rank"], order="pp_dp" if megatron else "dp_pp",
        shard=n["shards"], reshard=True, tp=n["tp"], samples=n["samples"],
        recompute=recompute if megatron else "none", sequence=recompute == "selective", overlaps=not megatron,
        scatters=megatron, gradient=2 if megatron else 4, ends_on_top=megatron,
    )  # fmt: skip
    layers = decoder(
        n["hidden"], n["layers"], n["heads"], n["sequence"], n["vocabulary"], n.get("kv_heads", 0), n.get("mlp", 0),
        scores={"full": "kept", "selective": "again"}[recompute] if megatron else "fused", tied=megatron,
        alternate=not megatron, kernels=MEGATRON if megatron else COMPILED if "compiled" in row["table"] else EAGER,
    )  # fmt: skip
    gib = [float(row[key]) if row[key] else None for key in ("state_gib", "kept_gib", "total_gib")]
    sweep = row["table"], row["model"]
    own = (lambda cluster: cluster) if megatron else _of_meta
    return Row(row["table"], sweep, (*sweep, n["tp"], n["samples"]), row["cluster"], layers, layout,
               float(row["seconds"]), *gib, own)  # fmt: skip


def _of_meta(h100x128: Cluster) -> Cluster:
    """Return torchtitan's cluster, whose H100 have 96 GB of HBM2e, and 500 W of 700: power is the cube of the clock."""
    peak = {precision: most * (500 / 700) ** (1 / 3) for precision, most in h100x128.peak.items()}
    return replace(h100x128, peak=peak, memory=96e9, memory_bandwidth=2.4e12)


def _vtrain(row: dict[str, str]) -> Row:
    size, devices, batch, samples, hidden, heads, layers, sequence, tp, dp, pp, ms = map(float, row.values())
    layout = PlannedLayout(
        "pipe_ddp", int(dp), int(pp), int(batch / dp / samples), "1f1b", order="pp_dp", tp=int(tp),
        samples=int(samples), recompute="full", overlaps=False, scatters=True, gradient=2, ends_on_top=True,
    )  # fmt: skip
    layers = decoder(int(hidden), int(layers), int(heads), int(sequence), 51200, scores="kept", kernels=MEGATRON)
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
    table, cluster = ("llm-foundry H100", "h100x128") if "h100" in row["gpu"] else ("llm-foundry", "a100x64")
    key = table, row["model"], sequence, row["global_batch"]
    seconds = float(row["global_batch"]) * sequence / float(row["tokens_per_s"])
    layers, small = decoder(*_MPT[row["model"]], sequence, 50368, kernels=MPT), row["gpu"] == "a100_40gb"
    return Row(table, key, (*key, samples), cluster, layers, layout, seconds,
               own=_SMALL if small else Row.own)  # fmt: skip


def _kempner(row: dict[str, str]) -> Row:
    n = {key: int(value) for key, value in row.items() if value.isdigit()}
    seconds = float(row["step_time_s"])
    batch = round(float(row["tokens_per_s"]) * seconds / n["seq_len"])
    usual = {"7B": 4, "70B": 2}[row["model"]]  # where a row does not say it, as in the other rows of the model
    samples = 1 if n["pp"] > 1 else n.get("micro_batch", usual)  # a rank's batch is cut into at least pp micro-batches
    layout = PlannedLayout(
        "fsdp" if n["pp"] == 1 else "pipe_fsdp", n["dp_shard"], n["pp"], round(batch / n["dp_shard"] / samples), "1f1b",
        reshard=True, tp=n["tp"], samples=samples, recompute="full",
    )  # fmt: skip
    kernels, mlp = KEMPNER if row["compile"] == "true" else EAGER, 14336 if row["model"] == "7B" else 28672
    layers = decoder(n["dim"], n["layers"], n["heads"], n["seq_len"], 128256, n["kv_heads"], mlp, tied=False,
                     kernels=replace(kernels, cuts_logits=False))  # fmt: skip
    layers = [replace(work, cast=0) for work in layers]  # weights are in the compute dtype
    key = "KempnerForge", row["model"]
    sweep = *key, n["gpus"], batch
    group = n["tp"] if n["tp"] > 1 else n["dp_shard"]
    return Row("KempnerForge", sweep, (*key, n["tp"]), "h200x8", layers, layout, seconds,
               total=float(row["mem_gb_gpu"]), own=partial(_of_four, group=min(group, 4)), number=2)  # fmt: skip


def _of_four(h200x8: Cluster, group: int) -> Cluster:
    """Return a cluster whose nodes have four devices and no switch: each pair has a third of a device's links.

    Two devices exchange over those, and of a ring each has two neighbours.
    """
    bandwidth = h200x8.inside.bandwidth * min(2, max(1, group - 1)) / 3
    return replace(h200x8, devices=4, inside=Link(bandwidth, h200x8.inside.latency))


# -- predictions -----------------------------------------------------------------------------------------------------


@cache
def cluster_of(name: str) -> Cluster:
    """Return the cluster of a file."""
    return read_cluster(to_dict(compose(["parallel=auto", "mode=plan", f"cluster={name}"]).cluster))


def predicted(
    measured: Sequence[Row], cluster: Callable[[Row], Cluster] = lambda row: cluster_of(row.cluster)
) -> np.ndarray:
    """Return the seconds of each row, by its own cluster's file or by what ``cluster`` returns."""
    costs = [PaperCosts(row.own(cluster(row)), "bf16") for row in measured]
    return np.array([seconds_of(row.layers, row.layout, one).total for row, one in zip(measured, costs, strict=True)])


def fit(measured: Sequence[Row]) -> Fitted:
    """Return the parts of a device's peak that products and attention reach, by rows of such devices."""
    from scipy.optimize import least_squares

    truth, first = np.array([row.seconds for row in measured]), np.log(_UNFITTED)

    def off(logs: np.ndarray) -> np.ndarray:
        errors = np.log(predicted(measured, partial(_having, tuple(np.exp(logs)))) / truth)
        return np.concatenate([errors, _PRIOR * (logs - first)])

    product, attention = np.exp(least_squares(off, first, loss="soft_l1", f_scale=_LOSS_SCALE).x)
    return product, attention


def _having(fitted: Fitted, row: Row) -> Cluster:
    product, attention = fitted
    return replace(cluster_of(row.cluster), product=product, attention=attention)


def without_models(measured: Sequence[Row], everything: Sequence[Row]) -> np.ndarray:
    """Predict the rows of each model of a table by a device that was fitted to all others."""
    seconds, models = np.zeros(len(measured)), [row.sweep[1] for row in measured]
    device = cluster_of(measured[0].cluster).device
    alike = [row for row in everything if cluster_of(row.cluster).device == device]
    for model in {*models}:
        own = [i for i, name in enumerate(models) if name == model]
        others = [row for row in alike if (row.table, row.sweep[1]) != (measured[0].table, model)]
        seconds[own] = predicted([measured[i] for i in own], partial(_having, fit(others)))
    return seconds


def without_table(measured: Sequence[Row], everything: Sequence[Row]) -> np.ndarray:
    """Predict a table by a device whose products were fitted to the other tables. No network was fitted to a table.

    What attention reaches, and products where few rows are of such devices, is that of kernels measured by themselves.
    """
    own = cluster_of(measured[0].cluster)
    others = [row for row in everything if row.table != measured[0].table]
    others = [row for row in others if cluster_of(row.cluster).device == own.device]
    product = fit(others)[0] if len(others) > _FEW else _PRODUCTS[own.peak["bf16"]]
    return predicted(measured, partial(_having, (product, _ATTENTION[own.peak["bf16"]])))


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
        if len(measured) > _FEW:
            unseen = without_models(measured, everything)
            lines.append(_line(name, "without the model", unseen, truth) | _ranking(measured, unseen))
        if name in FITTED and not chosen.quick:
            unseen = without_table(measured, everything)
            lines.append(_line(name, "without the table", unseen, truth) | _ranking(measured, unseen))
        places, corrected = by_one_row(measured, seconds)
        if len(places) > 2:
            rest = [measured[i] for i in places]
            lines.append(_line(name, "calibrated by one row", corrected, truth[places]) | _ranking(rest, corrected))
    yield Table("planner", lines, {"rows": len(everything)}, partial(figure.against_measured, points=points))
    if memory := [line for row in everything if row.state or row.total for line in _memory(row)]:
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
    return _held(row, cluster.reserved).total <= cluster.memory


def _held(row: Row, process: float = 0.0) -> Memory:
    return fullest(row.layers, row.layout, Allocation(row.number, gathered=2, process=process))


def _memory(row: Row) -> Iterator[dict[str, object]]:
    held = _held(row)
    of_weights, of_samples = held.state + held.gathered + held.cast, held.activations + held.recomputed
    parts = {
        "weights, gradients, optimizer": (row.state, of_weights), "activations": (row.kept, of_samples),
        "everything": (row.total, held.total),
    }  # fmt: skip
    for what, (wanted, predicted_bytes) in parts.items():
        if wanted:
            gib, layout = predicted_bytes / 2**30, row.layout
            yield {
                "table": row.table, "model": row.sweep[1], "dp, tp, pp": f"{layout.dp}, {layout.tp}, {layout.pp}",
                "recomputed": layout.recompute, "what": what,
                "published GiB": f"{wanted:.1f}", "predicted GiB": f"{gib:.1f}", "off": f"{gib / wanted - 1:+.1%}",
            }  # fmt: skip


BENCHMARK = Benchmark(measure, parts=(_PUBLISHED, _HERE))
