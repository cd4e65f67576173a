"""What a user reads on the console: the plan at the start and the result at the end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # both import torch
    from parallel.memory import MemoryEstimate
    from parallel.plan import Plan

_RESULTS = {
    "best_val_loss": "best validation loss {:.3f}",
    "test_loss": "test loss {:.3f}",
    "test_accuracy": "test accuracy {:.2%}",
    "test_perplexity": "test perplexity {:.1f}",
}


def describe_plan(
    plan: Plan,
    model: str,
    data: str,
    tokens_per_sample: int | None,
    shares: tuple[list[float], str] | None = None,
) -> str:
    """Returns the layout in words: processes, stages with their layers and parameters, and how a batch is split.

    Args:
        plan: The layout.
        model: The model's name.
        data: A description of the data.
        tokens_per_sample: None for data that are not text.
        shares: Each stage's measured fraction of the cost, and of which cost, such as "of the time". Without it the
            fractions of the parameters are shown.
    """
    where = f"{plan.processes} process{'es' * (plan.processes > 1)} on {plan.device_type}"
    lines = [
        f"{model}: {plan.parameters:,} parameters   {plan.strategy}: {where}, {plan.precision}",
        f"data: {data}",
    ]
    shape = f" x {tokens_per_sample} tokens" if tokens_per_sample else ""
    lines.append(
        f"global batch {plan.global_batch_size}{shape} = {plan.dp} replica{'s' * (plan.dp > 1)} x {plan.chunks} "
        f"micro-batch{'es' * (plan.chunks > 1)} of {plan.microbatch_size}"
    )
    if plan.pipelined:
        lines.append(f"schedule {plan.schedule}, ideal bubble {plan.ideal_bubble:.1%}")
    held = sum(stage.parameters for stage in plan.stages)
    parts, unit = shares or ([stage.parameters / held for stage in plan.stages], "of the parameters")
    for stage in plan.stages:
        size = f"{_where(plan, stage.index):<22} {stage.parameters:>13,}"
        share = f"  {parts[stage.index]:.1%} {unit}" if len(plan.stages) > 1 else ""
        lines.append(f"  stage {stage.index} {size}  {_span(stage.layers)}{share}")
    return "\n".join(lines)


def describe_memory(estimates: list[MemoryEstimate]) -> str:
    """Returns a table of what each rank will hold, in MiB."""
    columns = ["weights", "gradients", "optimizer", "gathered", "activations", "process", "total"]
    if not any(estimate.gathered for estimate in estimates):  # nothing is shared
        columns.remove("gathered")
    lines = ["rank " + " ".join(f"{name:>11}" for name in columns) + "  MiB"]
    for estimate in estimates:
        lines.append(f"{estimate.rank:>4} " + " ".join(f"{_mib(getattr(estimate, name)):>11}" for name in columns))
    total = sum(estimate.total for estimate in estimates)
    return "\n".join([*lines, f"all ranks together: {total / 2**30:.1f} GiB (an estimate)"])


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}"


def _where(plan: Plan, stage: int) -> str:
    if not plan.pipelined:
        if plan.devices:
            return f"on {plan.devices[stage]}"
        return "on ranks 0-" + str(plan.dp - 1) if plan.dp > 1 else ""
    mesh = plan.mesh(0)
    ranks = mesh.replicas(stage % plan.pp)
    return f"on rank{'s' * (len(ranks) > 1)} {','.join(map(str, ranks))}"


def _span(layers: tuple[str, ...]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} … {layers[-1]} ({len(layers)} layers)"


def final_words(summary: dict, run_dir: Path, overrides: list[str], link: str | None) -> str:
    """Returns the best metric, where the files are, and what to type next.

    Args:
        summary: The content of summary.json.
        run_dir: The run's directory.
        overrides: What the user typed.
        link: The path of the newest checkpoint, quoted for Hydra; None where there is no checkpoint.
    """
    lines = []
    if summary["first_loss"] is not None:
        lines.append(
            f"trained {summary['steps']} steps: loss {summary['first_loss']:.3f} -> {summary['final_loss']:.3f}"
        )
    for key, words in _RESULTS.items():
        if summary.get(key) is not None:
            lines.append(words.format(summary[key]))
    speed = summary["tokens_per_s"], "tokens/s"
    if speed[0] is None:
        speed = summary["samples_per_s"], "samples/s"
    if speed[0] is not None:
        bubble = summary["bubble_fraction"]
        shown = "" if bubble is None else f"   bubble {bubble:.1%} (ideal {summary['ideal_bubble_fraction']:.1%})"
        peak = sum(summary["peak_memory_bytes"]) / 2**30
        lines.append(f"{speed[0]:,.0f} {speed[1]}   peak memory {peak:.2f} GiB over all ranks{shown}")
    lines.append(f"files: {run_dir}")
    if link is not None:
        dropped = ("mode=", "checkpoint=", "train.resume=", "hydra.")
        kept = [o for o in overrides if not o.startswith(dropped)]
        longer = [o for o in kept if not o.startswith(("train.steps=", "train.epochs="))]
        further = [f"train.resume={link}", f"train.steps={2 * summary['steps']}", "train.epochs=null"]
        lines.append(f"evaluate: python train.py {shlex.join(['mode=eval', f'checkpoint={link}', *kept])}")
        lines.append(f"go on:    python train.py {shlex.join([*further, *longer])}")
    return "\n".join(lines)
