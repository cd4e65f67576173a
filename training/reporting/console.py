"""The text on the console: the configuration and the plan at the start, and the results at the end."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # both import torch
    from parallel.plan import Plan
    from planner.memory import Memory
    from planner.work import Works

_RESULTS = ("best_val_loss", "test_loss", "test_accuracy", "test_perplexity")
_FAR_ABOVE, _TIMES_ABOVE = 0.1, 1.5  # the bubble's reason is printed if it exceeds the ideal by both


def number(name: str, value: float | None) -> str:
    """Format a result for the console. Losses have 3 decimals, or 4 digits if they are below 1.

    The name determines the format: "loss", "val_accuracy", "test_perplexity". None stands for NaN, as in JSON files.
    """
    if value is None:
        return "nan"
    if name.endswith(("accuracy", "mfu")):
        return f"{value:.{1 + name.endswith('accuracy')}%}"
    if name.endswith(("perplexity", "_per_s")):
        decimals = 2 if value < 10 else 1 if value < 100 else 0
        return f"{value:,.{decimals}f}"
    return f"{value:.3f}" if abs(value) >= 1 else f"{value:.4g}"


def numbers(record: Mapping[str, float], extent: str | None = None) -> str:
    """Format an evaluation's results in one line, with the evaluated part of the split unless it is all of it."""
    results = [f"{name} {number(name, value)}" for name, value in record.items()]
    return "  ".join([*results, f"({extent})"] if extent else results)


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Format lines of cells as a table. A line may have fewer cells than the first one."""
    whole = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(map(len, cells)) for cells in zip(*whole, strict=True)]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=False)).rstrip() for line in lines)


def describe_plan(setup: Any) -> str:
    """Describe the model, the data and the layout: stages with their layers and parameters, and the split of a batch.

    Each stage is shown with its fraction of the measured cost, or of all parameters if no cost was measured. Copies of
    tied parameters count. ``setup`` is the run's ``training.run.setup.Setup``.
    """
    from parallel.axes import axes_of

    cfg, plan, data, tokens = setup.cfg, setup.plan, setup.data, setup.data.seq_len
    where = f"{plan.processes} process{'es' * (plan.processes > 1)} on {plan.device_type}"
    frozen = f" (and {plan.frozen:,} frozen)" * bool(plan.frozen)
    lines = [f"{cfg.model.name}: {plan.parameters:,} parameters{frozen}   {plan.strategy}: {where}, {plan.precision}"]
    lines.append(f"data: {data.description}")
    if (entropy := data.unigram_entropy) is not None:
        lines.append(f"      unigram entropy {entropy:.3f} nats: the loss that counting its tokens reaches")
    if cfg.mode != "predict" and (cfg.train.eval_every is not None or cfg.mode == "eval") and setup.extents:
        parts = ", ".join(f"{split} {extent}" for split, extent in setup.extents.items())
        lines.append(f"      evaluations: {parts}, spread evenly (train.eval_batches)")
    shape = f" x {tokens} tokens" if tokens else ""
    lines.append(
        f"global batch {plan.global_batch_size}{shape} = {plan.dp} replica{'s' * (plan.dp > 1)} x {plan.chunks} "
        f"micro-batch{'es' * (plan.chunks > 1)} of {plan.microbatch_size}"
    )
    lines += filter(None, (axis.describe(plan) for _, axis in axes_of(plan)))
    if plan.gpus is not None and plan.shares_gpus:
        lines.append(
            f"{plan.processes} processes share {plan.gpus} GPU{'s' * (plan.gpus > 1)}: tensors between them go through "
            "main memory and do not overlap with computation, which is slower than one GPU per process"
        )
    if plan.pipelined:
        lines.append(f"schedule {plan.schedule}, ideal bubble {plan.ideal_bubble:.1%}")
        layers = [len(stage.layers) for stage in plan.stages]
        if setup.shares is None and max(layers) - min(layers) <= 1:
            lines.append(
                "equally many layers in each stage, the same on every machine; parallel.balance=time measures them and "
                "evens out the stages"
            )
    held = sum(stage.weights for stage in plan.stages)
    parts, unit = setup.shares or ([stage.weights / held for stage in plan.stages], "of what the stages hold")
    for stage in plan.stages:
        size = f"{_where(plan, stage.index):<22} {stage.parameters:>13,}"
        share = f"  {parts[stage.index]:.1%} {unit}" if len(plan.stages) > 1 else ""
        lines.append(f"  stage {stage.index} {size}  {_span(stage.layers)}{share}")
    return "\n".join(lines)


def describe_memory(ranks: Sequence[Memory]) -> str:
    """Return a table of the memory that each rank will need, in MiB."""
    parts = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "gathered": "gathered",
             "activations": "kept", "process": "process", "total": "used"}  # fmt: skip
    if not any(rank.gathered for rank in ranks):  # no parameter is sharded
        del parts["gathered"]
    lines = ["rank " + " ".join(f"{name:>11}" for name in parts) + "  MiB"]
    for number, rank in enumerate(ranks):
        sizes = (getattr(rank, part) / 2**20 for part in parts.values())
        lines.append(f"{number:>4} " + " ".join(f"{size:>11,.0f}" for size in sizes))
    total = sum(rank.used for rank in ranks)
    return "\n".join([*lines, f"all ranks together: {total / 2**30:.1f} GiB (an estimate)"])


def describe_sent(plan: Plan, layers: Works) -> list[str]:
    """Return a line for each axis along which layers send something, with the layer that sends most."""
    from planner.layout import PlannedLayout
    from planner.memory import Allocation
    from planner.work import sent_of

    layout, number = PlannedLayout.of_plan(plan), Allocation.here(plan.precision, plan.device_type).activation
    sent = sorted((axis, size, work.name) for work in layers for axis, size in sent_of(work, layout).items())
    return [
        f"along {axis} each rank sends {number * plan.microbatch_size * size / 2**20:,.2f} MiB for layer {name} and a "
        "micro-batch, forward and backward"
        for axis, (size, name) in {axis: (size, name) for axis, size, name in sent}.items()
    ]


def _where(plan: Plan, stage: int) -> str:
    if plan.devices:
        return f"on {plan.devices[stage]}"
    if not plan.pipelined:
        return f"on ranks 0-{plan.processes - 1}" if plan.processes > 1 else ""
    ranks = plan.mesh(0).holders(stage % plan.pp)
    return f"on rank{'s' * (len(ranks) > 1)} {','.join(map(str, ranks))}"


def _span(layers: tuple[str, ...]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]} ({len(layers)} layers)"


def describe_results(
    summary: Mapping[str, Any], run_dir: Path, extents: Mapping[str, str] | None = None, idle: str = ""
) -> str:
    """Return a run's results, its speed, and the directory of its files.

    Args:
        summary: The content of summary.json.
        run_dir: The directory of the run.
        extents: The evaluated part of "val" and "test"; without splits that are evaluated as a whole.
        idle: The reason why the bubble is above the ideal; empty if this is unknown.
    """
    lines = []
    if summary["first_loss"] is not None:
        first, final = (number("loss", summary[key]) for key in ("first_loss", "final_loss"))
        skipped = f", {summary['skipped_steps']} of them skipped" if summary["skipped_steps"] else ""
        lines.append(f"trained {summary['steps']} steps{skipped}: loss {first} -> {final}")
    name = summary.get("monitor", "val_loss")
    known = {f"best_{name}": ("best", "best_step"), "test_loss": (summary.get("tested_weights"), "tested_step")}
    weights = {key: f"{of} weights, step {summary[step]}" for key, (of, step) in known.items() if summary.get(step)}
    words = {f"best_{name}": f"best {name}", "best_val_loss": "best validation loss"}
    for key in dict.fromkeys((f"best_{name}", *_RESULTS, name.replace("val_", "test_", 1))):
        if summary.get(key) is not None:
            extent = (extents or {}).get("val" if "val" in key else "test") if key.endswith("loss") else None
            notes = "; ".join(filter(None, (extent, weights.get(key))))
            said = words.get(key, key.replace("_", " "))
            lines.append(f"{said} {number(key, summary[key])}" + (f" ({notes})" if notes else ""))
    return "\n".join([*lines, *_speed(summary, idle), f"files: {run_dir}"])


def call_of(words: Iterable[str], given: Iterable[str] | None = None) -> str:
    """Return a command line with ``words``, or a call of ``training.train`` with the names of ``given`` objects."""
    if given is None:
        return shlex.join(["python", "train.py", *words])
    return f"training.train({', '.join([*map(json.dumps, words), *(f'{name}=...' for name in given)])})"


def what_to_type(link: str, length: Sequence[str], typed: Sequence[str], python: bool = False) -> str:
    """Return the commands that evaluate a checkpoint and that continue its training.

    Args:
        link: The checkpoint or run directory.
        length: The overrides for the length of the training, and for the learning rate if a longer run would restart
            its schedule.
        typed: The typed words that are not saved in a checkpoint.
        python: Whether to return calls for a Python program.
    """
    given = () if python else None
    where = [word for word in typed if not word.startswith("callbacks")]
    evaluate = call_of(["mode=eval", f"checkpoint={link}", *where], given)
    return f"evaluate: {evaluate}\ncontinue: {call_of([f'train.resume={link}', *length, *typed], given)}"


def _speed(summary: Mapping[str, Any], idle: str) -> list[str]:
    """Return the speed, the memory and the bubble, with the reason if the bubble is far above the ideal."""
    name = "tokens_per_s" if summary["tokens_per_s"] is not None else "samples_per_s"
    if summary[name] is None:
        return []
    speed = f"{number(name, summary[name])} {name.replace('_per_', '/')}"
    speed += f"   {number('mfu', summary['mfu'])} MFU" if summary.get("mfu") is not None else ""
    line = f"{speed}   peak memory {sum(summary['peak_memory_bytes']) / 2**30:.2f} GiB over all ranks"
    bubble, ideal = summary["bubble_fraction"], summary["ideal_bubble_fraction"]
    if bubble is None:
        return [line]
    reason = f"; {idle}" if idle and bubble > max(ideal + _FAR_ABOVE, ideal * _TIMES_ABOVE) else ""
    return [f"{line}   bubble {bubble:.1%} (ideal {ideal:.1%}{reason})"]
