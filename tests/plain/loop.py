"""The loop in plain torch, a run beside it, and what differs."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from plain import blocks
from plain.programs import OPTIMIZERS, Program, simpler
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common.errors import UserError
from data.loader import TrainBatches
from data.tensors import TensorData
from models.losses import Several
from training import train

# Relative. In fp64, the rounding of the first steps grows in later ones; in bf16, every operation rounds by 4e-3, which
# changes the sign of some terms of nn.L1Loss.
NEAR = {"fp64": 1e-9, "fp32": 2e-3, "bf16": 0.1}


class Found(NamedTuple):
    """Of a run or of the loop: numbers by (step, name), in their order, and tensors by name."""

    numbers: dict[tuple, float]
    tensors: dict[str, Tensor]


class Outcome(NamedTuple):
    """kind: equal, refused, torch refuses, diverges, crash or bad; what is said; the largest relative difference."""

    kind: str
    words: str = ""
    difference: float = 0.0


def several(given) -> tuple:
    return given if isinstance(given, tuple) else (given,)


class Loop:
    """A training of ``program`` in plain torch."""

    def __init__(self, program: Program) -> None:
        self.program, self.data, self.found = program, program.tensors(), Found({}, {})
        self.dtype = torch.float64 if program.precision == "fp64" else torch.float32
        self.net = program.net().to(self.dtype)
        self.modes = [(module, module.training) for module in self.net.modules()]

    def outputs(self, net: nn.Module, inputs) -> tuple[Tensor, ...]:
        x = [given.to(self.dtype) if given.is_floating_point() else given for given in several(inputs)]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.program.precision == "bf16"):
            return tuple(output.to(self.dtype) for output in several(blocks.whole(net, *x)))

    def losses(self, outputs: tuple[Tensor, ...], targets) -> dict[str, Tensor]:
        """The metrics and the loss, each of all targets that count; {} if none counts."""
        found, total, factors = {}, [], self.program.factors or (1.0,) * len(outputs)
        for number, (kind, output, y) in enumerate(zip(self.program.losses, outputs, several(targets), strict=True), 1):
            loss, name = (kind.of_torch or kind.loss)().to(self.dtype), f"target_{number}_" if len(outputs) > 1 else ""
            ignored = None if y.is_floating_point() else loss.ignore_index
            if (y != ignored).any() if ignored is not None else True:
                value = loss(output, y.to(self.dtype) if ignored is None else y)
                total.append(factors[number - 1] * value)
                found |= {f"{name}loss": value} if name else {}
                if isinstance(loss, nn.CrossEntropyLoss) and loss.weight is None:
                    right = output.argmax(dim=1) == (y.argmax(dim=1) if ignored is None else y)
                    found[f"{name}accuracy"] = (right if ignored is None else right[y != ignored]).to(self.dtype).mean()
                if kind.of_torch:
                    found[f"{name}bias"] = (output.exp() - y).mean()
        return {**found, "loss": sum(total)} if total else {}

    def factor(self, step: int) -> float:
        """The schedule's factor on the rate; of a plateau, 1."""
        o, name, total = dict(self.program.schedule), self.program.scheduler, self.program.total
        if name in ("constant", "plateau"):
            return 1.0
        if name == "step":
            epoch = self.program.rows // self.program.batch
            return o.get("gamma", 0.95) ** (
                (step - 1) // (o.get("every", 1) * (1 if o.get("unit") == "step" else epoch))
            )
        warm = o.get("warmup_steps", round({"cosine_warmup": 0.2}.get(name, 0.1) * total))
        least = o.get("min_ratio", {"cosine_warmup": 0.1}.get(name, 0.0))
        if step <= warm:
            return step / warm if name == "cosine_warmup" else least + (1 - least) * step / warm
        decay = o.get("decay_steps", min(round(0.2 * total), total - warm)) if name == "wsd" else total - warm
        x = max(0.0, (step - 1 - total + decay) / max(1, decay))
        kind = {"linear": "linear", "cosine_warmup": "cosine"}.get(name, o.get("decay_type", "cosine"))
        falls = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "1-sqrt": 1 - math.sqrt(x)}
        return least + (1 - least) * falls[kind]

    def optimizer(self) -> torch.optim.Optimizer:
        """With a group for each parameter."""
        program, groups = self.program, []
        for name, parameter in self.net.named_parameters():
            layer, decay = name.partition(".")[0], program.settings.get("weight_decay", 0.0)
            decay = dict(program.decays).get(layer, decay) if program.decay_vectors or parameter.dim() >= 2 else 0.0
            rate = program.settings["lr"] * dict(program.rates).get(layer, 1.0)
            groups.append({"params": [parameter], "lr": rate, "rate": rate, "weight_decay": decay})
        return getattr(torch.optim, OPTIMIZERS[program.optim][1])(groups, **program.settings)

    def train(self) -> Found:
        program, numbers, best, seen = self.program, self.found.numbers, math.inf, []
        optimizer, trained = self.optimizer(), [p for p in self.net.parameters() if p.requires_grad]
        until = {p: step for step, layer in program.unfreeze for p in self.net.get_submodule(layer).parameters()}
        follows = {"patience": 10, **dict(program.schedule)} if program.scheduler == "plateau" else {}
        plateau = ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], program.settings["lr"]), **follows)
        how = {"every": 1, "start": math.inf, "use_buffers": True, **dict(program.average)}
        rule = get_ema_multi_avg_fn(how["decay"]) if "decay" in how else None
        average = AveragedModel(self.net, multi_avg_fn=rule, use_buffers=how["use_buffers"])
        numbered = TensorData(torch.arange(program.rows), torch.zeros(program.rows), valid=0, test=0)
        order = TrainBatches(numbered.train, program.batch, program.seed)  # the only thing that is taken from a run
        for step in range(1, program.total + 1):
            rows = order[step].inputs
            seen = [*(seen if len(seen) + program.batch <= program.rows else ()), *rows.tolist()]
            assert len({*seen}) == len(seen), "an epoch has no row twice"
            for p in trained:
                p.requires_grad_(until.get(p, 0) < step)
            factor = plateau.optimizer.param_groups[0]["lr"] / program.settings["lr"] * self.factor(step)
            for group in optimizer.param_groups:
                group["lr"] = factor * group["rate"]
            optimizer.zero_grad()
            losses = self.backward(rows)
            now = [p for p in trained if p.requires_grad]
            for p in now:  # as docs/from_a_loop.md has it, a parameter that a step does not use has a gradient of zero
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            numbers |= {(step, name): value.item() for name, value in losses.items()}
            numbers |= {(step, "lr"): factor * program.settings["lr"]}
            numbers |= {(step, "grad_norm"): nn.utils.get_total_norm([p.grad for p in now]).item()} if now else {}
            if losses:  # a step of which no target counts is skipped
                if program.clip_value is not None and now:
                    nn.utils.clip_grad_value_(now, program.clip_value)
                if program.clip is not None and now:
                    nn.utils.clip_grad_norm_(now, program.clip)
                optimizer.step()
                if step >= how["start"] and step % how["every"] == 0:
                    average.update_parameters(self.net)
            shown, last = average.module if average.n_averaged else self.net, step == program.total
            if last or (program.every and step % program.every == 0):
                value = self.evaluate(shown, step, "val", *self.data[1])
                if program.scheduler == "plateau":
                    plateau.step(value)
                if value < best:
                    best = value
                    self.found.tensors.update({f"best {n}": t.clone() for n, t in shown.state_dict().items()})
        self.evaluate(shown, "the end", "test", *self.data[2])
        self.found.tensors.update(shown.state_dict())
        return self.found

    def backward(self, rows: Tensor) -> dict[str, Tensor]:
        """The gradients of the mean over the batch. Running statistics move once, by the mean of the micro-batches."""
        for module, training in self.modes:
            module.training = training
        buffers, after, found = [*self.net.buffers()], [], []
        before = [buffer.clone() for buffer in buffers]
        for part in rows.chunk(self.program.parts):
            for buffer, old in zip(buffers, before, strict=True):
                buffer.data.copy_(old)
            x, y = (tuple(tensor[part] for tensor in several(given)) for given in self.data[0])
            found.append((*self.outputs(self.net, x), *y))
            after.append([buffer.clone() for buffer in buffers])
        for buffer, new in zip(buffers, zip(*after, strict=True), strict=True):
            buffer.data.copy_(torch.stack(new).mean(dim=0) if buffer.is_floating_point() else new[0])
        whole = tuple(map(torch.cat, zip(*found, strict=True)))
        losses = self.losses(whole[: len(whole) // 2], whole[len(whole) // 2 :])
        if losses and losses["loss"].requires_grad:
            losses["loss"].backward()
        return losses

    @torch.no_grad()
    def evaluate(self, net: nn.Module, step, split: str, inputs, targets) -> float:
        outputs = self.outputs(net.eval(), inputs)
        found = {name: value.item() for name, value in self.losses(outputs, targets).items()}
        if self.program.metric:
            found |= {f"spread_{name}": value for name, value in blocks.spread(outputs[0], targets).items()}
        self.found.numbers.update({(step, f"{split}_{name}"): value for name, value in found.items()})
        if self.program.predict:
            self.found.tensors.update({f"prediction {i}": output for i, output in enumerate(outputs)})
        return found.get("loss", math.inf)


def run(program: Program, layout: str, folder: Path, *words: str) -> Found:
    """What a run finds."""
    losses, (first, valid, test) = [kind.loss() for kind in program.losses], program.tensors()
    loss = Several(losses, {f"target_{i}": f for i, f in enumerate(program.factors, 1)}) if losses[1:] else losses[0]
    given = {"model": program.net(), "loss": loss, "data": TensorData(*first, valid=valid, test=test)}
    result = train(*program.words(layout), *words, f"hydra.run.dir='{folder}'", **given)
    numbers = {(line["step"], key): value for line in result.metrics for key, value in line.items()}
    numbers |= {("the end", key): value for key, value in result.summary.items()}
    best = result.state_dict("best") if (folder / "checkpoints/best").exists() else {}
    tensors = {**result.state_dict(), **{f"best {name}": tensor for name, tensor in best.items()}}
    outputs = several(result.predict("test", "parallel.threads=1")) if program.predict else ()
    return Found(numbers, tensors | {f"prediction {i}": torch.from_numpy(output) for i, output in enumerate(outputs)})


def compared(found: Found, wanted: Found, near: float, since: int = 0) -> tuple[float, str]:
    """The largest relative difference, and the first that is larger than ``near``; of the steps after ``since``."""
    worst, first = 0.0, ""
    numbers = [(key, torch.tensor(value, dtype=torch.float64)) for key, value in wanted.numbers.items()]
    pairs = [(f"{name} of {at}", value, found.numbers.get((at, name))) for (at, name), value in numbers
             if not isinstance(at, int) or at > since]  # fmt: skip
    pairs += [(name, value, found.tensors.get(name)) for name, value in wanted.tensors.items()]
    for name, value, other in pairs:
        if other is None or name.endswith("num_batches_tracked"):  # steps are counted here, and also in eval mode
            first, worst = (first, worst) if other is not None else (first or f"{name} is missing", math.inf)
            continue
        other = torch.as_tensor(other, dtype=value.dtype)
        off = ((other - value).abs().max() / value.abs().max().clamp(min=1e-3)).item() if value.numel() else 0.0
        if not off <= near and not first:
            first = f"{name} is {other.item():.9g}, not {value.item():.9g}" if value.dim() == 0 else f"{name} differs"
        worst = max(worst, math.inf if math.isnan(off) else off)
    return worst, first


def outcome(program: Program, folder: Path) -> Outcome:
    """How a run of the program ends beside the loop, and a second one that resumes it elsewhere."""
    threads, worst, since, resumed = torch.get_num_threads(), 0.0, 0, []
    torch.set_num_threads(1)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        try:
            wanted = Loop(program).train()
        except RuntimeError as error:
            return Outcome("torch refuses", str(error))
        if not all(abs(value) < 1e6 for value in wanted.numbers.values()):
            return Outcome("diverges")
        for number, layout in enumerate([program.layout, *[program.then] * (program.then is not None)]):
            found = run(program, layout, folder / str(number), *resumed)
            difference, words = compared(found, wanted, NEAR[program.precision], since)
            worst = max(worst, difference)
            if words:
                return Outcome("bad", f"{'resumed in ' * number}{layout}: {words} ({difference:.0e})", difference)
            saved = min((folder / str(number) / "checkpoints").glob("step-*"))
            since, resumed = int(saved.name[5:]), [f"train.resume='{saved}'"]
            if since == program.total:
                break
    except UserError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("crash", f"{type(error).__name__}: {error}")
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome("equal", difference=worst)


def sentence(words: str) -> str:
    """What a refusal says, without its numbers and names."""
    first = re.split(r"[.:;] |, (?=so |and )", re.sub(r"^layer '[^']*' \(\w+\): ", "", words.strip()))[0]
    return re.sub(r"\d[\d.]*|'[^']*'|\b(b\d|stem|head|module)\b[\w.]*", "…", first)


def shrunk(program: Program, fails: Callable[[Program], bool], tries: int = 100) -> Program:
    """A simpler program that fails, too: one thing less at a time, until nothing can be left out."""
    candidates = simpler(program)
    while tries > 0 and (candidate := next(candidates, None)) is not None:
        tries -= 1
        if fails(candidate):
            program, candidates = candidate, simpler(candidate)
    return program
