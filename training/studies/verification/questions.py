"""Questions about what users bring besides layers: data, optimizer, callbacks, loss, metrics and weights to export.

They are asked of a run of two steps in one process, of its second step after a resume, and of evaluations.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from conf.instantiate import to_dict, with_values
from conf.schema import Root
from data.dataset import Batch, InMemory, Source
from launchers import World, call_in_workers
from parallel.examination import examine
from parallel.layout import Layout
from training.checkpoint.init_from import start
from training.export.write import write_weights
from training.run.evaluate import evaluate
from training.run.loop import Loop
from training.run.prepare import PlannedRun, model_and_data, prepare
from training.run.rank import run
from training.run.restore import restore
from training.run.setup import Setup
from training.run.split_metrics import SplitMetrics, entries
from training.studies.verification.layouts import in_layout, tensors_of
from training.studies.verification.probes import Finding, difference, generators, largest_difference

_ROWS, _EVALUATED = 4, 8
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
    yield from _findings({"data": [*_data(setup)][:1]}, "data")
    if not sound():
        return
    kept = {"callbacks": to_dict(cfg)["callbacks"], "scheduler": to_dict(cfg)["scheduler"]}
    often = {"eval_every": 1, "eval_batches": 1, "checkpoint_every": 1, "keep_checkpoints": 2}
    count = 1 if setup.examination.which("gathers") else math.gcd(4, cfg.train.global_batch_size)
    whole = in_layout(cfg, Layout(chunks=count, order=cfg.parallel.order), kept, steps=2, **often)
    resumed = with_values(whole, {"train.resume": str(folder / "whole/checkpoints/step-00000001")})
    try:
        planned = PlannedRun(whole, prepare(whole).plan)
        tolerance = cfg.verify.tolerance if cfg.train.precision in ("fp64", "fp32") else _HALF
        (found,) = call_in_workers(_answers, (planned, resumed, folder, tolerance), 1, folder / "logs")
    except UserError as error:
        found = {"resume": [f"two steps, or one after a resume, cannot be trained: {error}"]}
    yield from _findings(found, "resume", "evaluation", "export")


def _findings(found: Answers, *names: str) -> Iterator[Finding]:
    for name in names:
        yield from [Finding(name, text=text) for text in found.get(name, ())] or [Finding(name, holds=True)]


def _data(setup: Setup) -> Iterator[str]:
    """Read samples again, in another order, one by one, and as another process does."""
    sources = {split: getattr(setup.data, split) for split in ("train", "valid", "test")}
    again, drawn = model_and_data(setup.cfg)[2], set()
    again.prepare()

    def read(source: Source, rows: np.ndarray, state: int) -> tuple[Tensor, ...]:
        with generators(state, drawn), torch.random.fork_rng(devices=[]):
            torch.manual_seed(state)
            began = torch.get_rng_state()
            tensors = Batch(*source.read(rows, 0)).tensors
            drawn.update(["torch's generator"] * (not torch.equal(began, torch.get_rng_state())))
        return tensors

    for split, source in sources.items():
        if source is None:
            continue
        rows = np.unique(np.linspace(0, len(source) - 1, _ROWS).astype(np.int64))
        first, back = read(source, rows, 0), rows[::-1].copy()
        source.read(back, 1)  # another epoch
        alone = [*zip(*(read(source, rows[i : i + 1], 4) for i in range(len(rows))), strict=True)]
        others = {
            "read a second time": read(source, rows, 1),
            "read after others": [tensor.flip(0) for tensor in read(source, back, 2)],
            "read by another process": [tensor.flip(0) for tensor in read(getattr(again, split), back, 3)],
        }
        if all(len({tensor.shape for tensor in tensors}) == 1 for tensors in alone):
            others["read without others"] = [torch.cat(tensors) for tensors in alone]
        for how, tensors in others.items():
            for i, (tensor, one) in enumerate(zip(first, tensors, strict=True)):
                # Without others, a sample of variable length may be narrower.
                if one.shape == tensor.shape and (size := difference(one, tensor)) > setup.cfg.verify.tolerance:
                    why = f"; it draws from {' and '.join(sorted(drawn))}" if drawn else ""
                    yield (
                        f"{type(setup.data).__name__}: tensor {i} of a sample of {split} changes when it is {how} (by "
                        f"{size:.0e}){why}. Let a sample depend on its index and the epoch alone, and draw from a "
                        "generator that both seed"
                    )


def _answers(world: World, planned: PlannedRun, resumed: Root, folder: Path, tolerance: float) -> Answers:
    """Train twice, and once more after a resume; then evaluate."""
    jobs = {"whole": planned.cfg, "again": planned.cfg, "resumed": resumed}
    whole, again, after = (_trained(replace(planned, cfg=cfg), world, folder / name) for name, cfg in jobs.items())
    texts = [
        f"{who}: its attribute {key} begins anew after a resume, because checkpoints do not have it; "
        + _WAYS_OUT[re.split("[:. ]", who)[0]]
        for who, values in whole.items()
        for key, value in values.items()
        if again[who].get(key) == value != after[who].get(key)
    ]
    for name, text in _CHANGES.items():
        tensors = ({key: of[key][...] for key in of} for of in (tensors_of(folder / run, 2) for run in (name, "whole")))
        size, where = largest_difference(*tensors)
        texts += [f"{text} (by {size:.0e}: {where})"] if size > tolerance and not texts else []
    return {"resume": texts, **_evaluations(planned, folder, tolerance)}


def _trained(planned: PlannedRun, world: World, run_dir: Path) -> dict[str, dict[str, Any]]:
    """Run two steps. Return the attributes of the user's objects at the end, by object."""
    seen: list[tuple[str, Any]] = []
    setup = planned.setup(world)
    setup.data.test, loss = None, setup.chain.loss

    def see(loop: Loop) -> None:
        seen.extend(("optim", one) for one in loop.optimizer.made)
        seen.extend((f"callbacks.{name}", one) for name, one in loop.callbacks.all.items())
        seen.extend((f"layer {name}", m) for stage in loop.strategy.stages for name, m in stage.layers.named_modules())
        seen.extend(("loss", one) for one in (loss, *vars(loss).values()))

    run_dir.mkdir(parents=True)
    run(setup, run_dir, world, see)
    return {
        f"{who}: {type(one).__name__}": {key: _plain(of) for key, of in vars(one).items() if key not in _COVERED}
        for who, one in seen
        if hasattr(one, "__dict__")
    }


def _plain(value: Any) -> Any:
    """Return the numbers, texts and containers in a value, to compare them; None for other objects."""
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, (Tensor, np.ndarray)):
        return torch.as_tensor(value).detach().cpu().double().numpy().tobytes()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):  # a callback's tuples become lists in a checkpoint
        return [*map(_plain, value)]
    if isinstance(value, (int, float)):
        return repr(float(value))
    return value if isinstance(value, (str, bytes, set)) else None


def _evaluations(planned: PlannedRun, folder: Path, tolerance: float) -> Answers:
    """Evaluate the trained weights in batches of several sizes, and after an export."""
    cfg = with_values(planned.cfg, {"checkpoint": str(folder / "whole")})
    data = model_and_data(cfg)[2]
    data.prepare()
    rows = np.arange(min(_EVALUATED - 1, len(data.valid or data.train)))
    source = InMemory(*(data.valid or data.train).read(rows, 0)[:2])

    def evaluated(size: int, exported: Path | None = None) -> dict[str, Any]:
        strategy = restore(cfg, planned.plan.device_type, size).strategy
        if exported is not None:
            for parameter in strategy.parameters():
                parameter.data.zero_()
            start(with_values(cfg, {"model.init_from": str(exported)}).model, strategy.chain, strategy)
        metrics = SplitMetrics(cfg.metrics, strategy.chain.loss) if cfg.metrics and exported is None else None
        found = evaluate(strategy, source, None, metrics)
        return found | (metrics.results(strategy.mesh, folder, "val") if metrics else {})

    def differs(one: float, other: float) -> bool:
        return not math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)

    found: Answers = {"evaluation": [], "export": []}
    strategy = restore(cfg, "cpu").strategy
    first = evaluated(len(source))  # other batches are filled up with samples that do not count
    facts = examine(strategy.chain, Batch(*source.read(np.arange(1), 0)), training=False)
    by_rule = facts.which("draws") or facts.which("gathers")  # numbers depend on the micro-batch
    for size in () if by_rule else (_EVALUATED, _EVALUATED // 2):
        changed = {name: value for name, value in evaluated(size).items() if differs(value, first[name])}
        for name, value in [*changed.items()][: not found["evaluation"]]:
            metric = next((f"metrics: {e.target}" for e in entries(cfg.metrics) if f"val_{e.name}" in name), "")
            way_out = "keep sums in update(), and divide in compute()" if metric else "return sums over samples"
            found["evaluation"] = [
                f"{metric or 'the loss'}: {name.removeprefix('val_')} of {len(source)} samples is {value:.6g} in "
                f"batches of {size}, and {first[name]:.6g} in one of {len(source)}; {way_out}"
            ]
    if not strategy.chain.unsaved:
        (exported := folder / "exported").mkdir()
        write_weights(exported, data, strategy, cfg.model.init_from)
        found["export"] = [
            f"{name} is {value:.6g} with exported weights, and {first[name]:.6g} with those of the checkpoint; map "
            "every tensor in Chain.hugging_face"
            for name, value in evaluated(len(source), exported).items()
            if differs(value, first[name])
        ][:1]
    return found
