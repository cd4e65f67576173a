"""Questions about what users bring besides layers: data, optimizer, callbacks, loss, metrics and weights to export.

They are asked of a run of two steps in one process, of its second step after a resume, and of evaluations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from common.errors import UserError
from common.files import jsonable
from conf.instantiate import to_dict, with_values
from conf.schema import Root
from data.dataset import Batch, InMemory, Source
from launchers import World, call_in_workers
from parallel.examination import examine
from parallel.layout import Layout
from training.checkpoint.init_from import start
from training.export.write import write_weights
from training.run.loop import Loop
from training.run.prepare import PlannedRun, model_and_data, prepare
from training.run.rank import run
from training.run.restore import restore
from training.run.setup import Setup
from training.run.split_metrics import entries
from training.studies.verification.layouts import LOSS_SCALE, in_layout, numbers_of, tensors_of
from training.studies.verification.probes import Finding, difference, largest_difference

_BATCH, _EVALUATED = 4, 7
_HALF = 0.05  # numbers of bf16 and fp16 are equal up to this difference
_CHANGES = {
    "again": "two runs of the same two steps give other weights: let layers (for their first weights, too), the "
    "optimizer, the callbacks and the loss draw random numbers from torch's generator only",
    "resumed": "the step after a resume gives other weights: let checkpoints have all that the optimizer, callbacks "
    "and layers keep between steps",
}
# Attributes of optimizers and layers of which checkpoints have what is needed.
_COVERED = ("state", "param_groups", "defaults", "_parameters", "_modules")
_WAYS_OUT = {
    "optim": "keep it in self.state[parameter] or in self.param_groups",
    "callbacks": "return it from state_dict() and take it back in load_state_dict()",
    "layer": "keep it in a buffer (register_buffer)",
    "loss": "let the loss depend on its arguments alone",
}
Answers = dict[str, list[str]]  # by question: what was found


def ask(cfg: Root, setup: Setup, folder: Path, sound: Callable[[], bool]) -> Iterator[Finding]:
    """Yield the findings of each question; one without text if there is none.

    Args:
        cfg: The configuration to verify.
        setup: Its objects in one process.
        folder: A folder for the files of the runs.
        sound: Returns whether nothing was found so far. Otherwise only the data is asked.
    """
    found: Answers = {"data": [*_data(setup)][:1]}
    if sound() and not found["data"]:
        found |= _of_runs(cfg, setup, folder)
    for name, texts in found.items():
        yield from [Finding(name, text=text) for text in texts] or [Finding(name, holds=True)]


def _of_runs(cfg: Root, setup: Setup, folder: Path) -> Answers:
    """Ask in runs of two steps."""
    kept = {"callbacks": to_dict(cfg)["callbacks"], "scheduler": to_dict(cfg)["scheduler"]}
    often = {"eval_every": 1, "eval_batches": None, "checkpoint_every": 1, "keep_checkpoints": 2}
    count = 1 if setup.examination.which("gathers") else math.gcd(4, cfg.train.global_batch_size)
    whole = in_layout(cfg, Layout(chunks=count, order=cfg.parallel.order), kept, steps=2, **often)
    tolerance = cfg.verify.tolerance if cfg.train.precision in ("fp64", "fp32") else _HALF
    try:
        plan = prepare(whole).plan
        resumed = {"train.resume": str(folder / "whole/checkpoints/step-00000001")}
        evaluated = {"mode": "eval", "checkpoint": str(folder / "whole"), "train.global_batch_size": _BATCH}
        runs = {"whole": PlannedRun(whole, plan), "again": PlannedRun(whole, plan)}
        runs["resumed"] = PlannedRun(with_values(whole, resumed), plan)
        facts = examine(setup.chain, setup.sample, training=False)
        if not facts.which("draws") and not facts.which("gathers"):  # then numbers depend on the micro-batch
            plan = replace(plan, global_batch_size=_BATCH, chunks=1)
            runs["evaluated"] = PlannedRun(with_values(whole, evaluated), plan)
        return call_in_workers(_answers, (runs, folder, tolerance), 1, folder / "logs")[0]
    except UserError as error:
        return {"resume": [f"two steps, one after a resume, an evaluation or an export fails: {error}"]}


def _data(setup: Setup) -> Iterator[str]:
    """Read samples again, one by one in another order, and as another process does."""
    sources = {split: getattr(setup.data, split) for split in ("train", "valid", "test")}
    again = model_and_data(setup.cfg)[2]  # a program's data set may be the same object
    again.prepare()
    for split, source in sources.items():
        if source is None:
            continue
        rows = np.unique(np.linspace(0, len(source) - 1, _BATCH).astype(np.int64))
        back = rows[::-1].copy()
        first = _samples(source, [rows])
        source.read(back, 1)  # another epoch
        ways = {
            "a second time": _samples(source, [rows]),
            "by another process": _samples(getattr(again, split), [back]),
            "without others": _samples(source, back[:, None]),
        }
        for how, samples in ways.items():
            # Without others, a sample of variable length may be narrower.
            alike = {key: one for key, one in samples.items() if one.shape == first[key].shape}
            size, where = largest_difference(alike, {key: first[key] for key in alike})
            if size > setup.cfg.verify.tolerance:
                yield (
                    f"{type(setup.data).__name__}: tensor {where[1]} of a sample of {split} changes when it is read "
                    f"{how} (by {size:.0e}). Let a sample depend on its index and the epoch alone, and draw random "
                    "numbers from a generator that both seed"
                )


def _samples(source: Source, batches: Iterable[np.ndarray]) -> dict[tuple[int, int], Tensor]:
    """Read samples. Return their tensors by the sample and the tensor's number."""
    read = ((rows, Batch(*source.read(rows, 0)).tensors) for rows in batches)
    return {(row, i): t[n] for rows, tensors in read for i, t in enumerate(tensors) for n, row in enumerate(rows)}


def _answers(world: World, runs: Mapping[str, PlannedRun], folder: Path, tolerance: float) -> Answers:
    """Train twice, and once more after a resume; evaluate in other batches; export."""
    cfg, seen = runs["whole"].cfg, {name: _seen(planned, world, folder / name) for name, planned in runs.items()}
    resume = [
        f"{who}: its attribute {key} begins anew after a resume, because checkpoints do not have it; {_WAYS_OUT[kind]}"
        for (kind, who, key), value in seen["whole"].items()
        if seen["again"].get((kind, who, key)) == value != seen["resumed"].get((kind, who, key))
    ]
    weights = tensors_of(folder / "whole", 2)
    for name, text in _CHANGES.items():
        size, where = largest_difference(tensors_of(folder / name, 2), weights)
        resume += [f"{text} (by {size:.0e}: {where})"] if size > tolerance and not resume else []
    evaluation = []
    ours, theirs = (numbers_of(folder / name, "evaluation") for name in ("evaluated", "whole"))
    for at in (at for at, number in ours.items() if not resume and difference(number, theirs[at]) > tolerance):
        name = at.split()[0].removeprefix("val_")
        metric = next((f"metrics: {e.target}" for e in entries(cfg.metrics) if name.startswith(e.name)), "")
        way_out = "keep sums in update(), and divide in compute()" if metric else "return sums over samples"
        evaluation.append(
            f"{metric or 'the loss'}: {name} of {_EVALUATED} samples is {ours[at]:.6g} in batches of {_BATCH}, and "
            f"{theirs[at]:.6g} in batches of {cfg.train.global_batch_size}; {way_out}"
        )
    return {"resume": resume, "evaluation": evaluation[:1], "export": _exported(cfg, folder, tolerance)}


def _exported(cfg: Root, folder: Path, tolerance: float) -> list[str]:
    """Export the trained weights, read them again, and compare them, without the rows that pad a vocabulary."""
    data, strategy, _ = restore(with_values(cfg, {"checkpoint": str(folder / "whole")}), "cpu")
    data.prepare()
    rows, exported = strategy.chain.limits.get("vocabulary"), folder / "exported"

    def weights() -> dict[str, Tensor]:
        state = {name: tensor.clone() for name, tensor in strategy.state_dict().items()}
        return {name: t[: data.vocab_size] if t.dim() and len(t) == rows else t for name, t in state.items()}

    if strategy.chain.unsaved:
        return []
    exported.mkdir()
    write_weights(exported, data, strategy, cfg.model.init_from)
    before = weights()
    for parameter in strategy.parameters():
        parameter.data.zero_()
    start(with_values(cfg, {"model.init_from": str(exported)}).model, strategy.chain, strategy)
    size, name = largest_difference(weights(), before)
    text = f"{name} is another after an export and model.init_from (by {size:.0e}); map it in Chain.hugging_face"
    return [text] * (size > tolerance)


def _seen(planned: PlannedRun, world: World, run_dir: Path) -> dict[tuple[str, str, str], str]:
    """Run, and return what the attributes of the user's objects have at the end, without addresses in memory."""
    seen: list[tuple[str, str, Any]] = []
    setup = planned.setup(world)
    split = setup.data.valid or setup.data.train
    setup.data.valid = InMemory(*split.read(np.arange(_EVALUATED) % len(split), 0)[:2])
    setup.data.test = None

    def see(loop: Loop) -> None:
        loop.strategy.loss_scale.scale = LOSS_SCALE
        layers = (pair for stage in loop.strategy.stages for pair in stage.layers.named_modules())
        seen.extend(("optim", "optim", one) for one in loop.optimizer.made)
        seen.extend(("callbacks", f"callbacks.{name}", one) for name, one in loop.callbacks.all.items())
        seen.extend(("layer", f"layer {name}", module) for name, module in layers)
        seen.append(("loss", "loss", setup.chain.loss))

    run_dir.mkdir(parents=True)
    run(setup, run_dir, world, see)
    return {
        (kind, f"{name}: {type(one).__name__}", key): re.sub(" at 0x[0-9a-f]+", "", str(jsonable(value)))
        for kind, name, one in seen
        for key, value in getattr(one, "__dict__", {}).items()
        if key not in _COVERED
    }
