"""The loop in plain torch."""

from __future__ import annotations

import math
from contextlib import nullcontext
from unittest.mock import patch

import torch
from plain import blocks
from plain.programs import LAYOUTS, Program
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.packages import load_torchmetrics
from data.loader import TrainBatches
from data.tensors import TensorData

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLASSES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "nadam": "NAdam", "muon": "Muon"}
Found = dict[tuple, float | Tensor]  # what a run or the loop finds, by (step, name), in this order


class Moved(TorchDispatchMode):
    """Multiplies every result by random numbers from 1 - eps to 1 + eps of its dtype, as another rounding could."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in [] if func.is_view else tree_leaves(found):
            if isinstance(x, Tensor) and x.is_floating_point():
                x *= 1 + torch.finfo(x.dtype).eps * (2 * torch.rand(x.shape, generator=self.draw, dtype=x.dtype) - 1)
        return found


def several(given) -> tuple:
    return given if isinstance(given, tuple) else (given,)


class Loop:
    """A training of ``program`` in plain torch."""

    def __init__(self, program: Program) -> None:
        self.program, self.data, self.found = program, program.tensors(), {}
        self.precision = program["train.precision"]
        self.scale = 2.0**17 if self.precision == "fp16" else 1.0
        self.dtype = torch.float64 if self.precision == "fp64" else torch.float32
        self.net = program.net().to(self.dtype)
        for module in self.net.modules():
            vars(module).update({name: f for name, f in blocks.TORCHS.items() if name in vars(module)})
        self.modes = [(module, module.training) for module in self.net.modules()]

    def outputs(self, net: nn.Module, inputs) -> tuple[Tensor, ...]:
        x = [given.to(self.dtype) if given.is_floating_point() else given for given in several(inputs)]
        with torch.autocast("cpu", DTYPES[self.precision], enabled=self.precision in ("bf16", "fp16")):
            outputs = several(blocks.whole(net, *x))
        last = self.program["shared"]
        return tuple((output.movedim(-1, 1) if last else output).to(self.dtype) for output in outputs)

    def losses(self, outputs: tuple[Tensor, ...], targets) -> dict[str, Tensor]:
        """The metrics and the loss, each of all targets that count; {} if none counts."""
        found, total, factors = {}, [], self.program["factors"] or (1.0,) * len(outputs)
        for number, (kind, output, y) in enumerate(zip(self.program.losses, outputs, several(targets), strict=True), 1):
            loss, name = kind.of_torch().to(self.dtype), f"target_{number}_" if len(outputs) > 1 else ""
            counted = None if y.is_floating_point() else y != loss.ignore_index
            if counted is None or counted.any():
                value = loss(output, y.to(self.dtype) if counted is None else y)
                total.append(factors[number - 1] * value)
                found |= {f"{name}loss": value} if name else {}
                if isinstance(loss, nn.CrossEntropyLoss) and loss.weight is None and not kind.other:
                    right = output.argmax(dim=1) == (y.argmax(dim=1) if counted is None else y)
                    found[f"{name}accuracy"] = (right if counted is None else right[counted]).to(self.dtype).mean()
                if isinstance(loss, nn.PoissonNLLLoss):
                    found[f"{name}bias"] = (output.exp() - y).mean()
        return {**found, "loss": sum(total)} if total else {}

    def metric(self, name: str, output: Tensor, y: Tensor) -> dict[str, float]:
        (made, given), loss = blocks.METRICS[name], self.program.losses[0].of_torch()
        if name == "spread":
            return {f"spread_{key}": value for key, value in blocks.spread(output, y).items()}
        if isinstance(loss, nn.CrossEntropyLoss):
            output, y = output.softmax(dim=1), y.argmax(dim=1) if y.is_floating_point() else y
            given = {**given, "task": "multiclass", "num_classes": output.shape[1], "ignore_index": loss.ignore_index}
        elif self.program["shared"]:
            output, y = output.movedim(1, -1), y.movedim(1, -1)
        if isinstance(loss, nn.BCEWithLogitsLoss):
            output, y = output.sigmoid(), y.long()
            given = {**given, "task": "multilabel", "num_labels": output.shape[1]}
        return {name: getattr(load_torchmetrics(), made)(**given)(output, y).item()}

    def factor(self, step: int) -> float:
        """The schedule's factor on the rate; of a plateau, 1."""
        o, name, total = self.program.options("scheduler"), self.program["scheduler"], self.program.total
        if name in ("constant", "plateau"):
            return 1.0
        if name == "step":
            epoch = 1 if o.get("unit") == "step" else self.program["rows"] // self.program["train.global_batch_size"]
            return o.get("gamma", 0.95) ** ((step - 1) // (o.get("every", 1) * epoch))
        warm = o.get("warmup_steps", round({"cosine_warmup": 0.2}.get(name, 0.1) * total))
        least = o.get("min_ratio", {"cosine_warmup": 0.1}.get(name, 0.0))
        if step <= warm:
            return step / warm if name == "cosine_warmup" else least + (1 - least) * step / warm
        decay = o.get("decay_steps", min(round(0.2 * total), total - warm)) if name == "wsd" else total - warm
        x = max(0.0, (step - 1 - total + decay) / max(1, decay))
        kind = {"linear": "linear", "cosine_warmup": "cosine"}.get(name, o.get("decay_type", "cosine"))
        falls = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "1-sqrt": 1 - math.sqrt(x)}
        return least + (1 - least) * falls[kind]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """With a group for each parameter. Muon has the matrices of hidden layers, as docs/extending.md has it."""
        program, name, made = self.program, self.program["optim"], []
        options = program.options("optim")
        rates, decays, vectors = (options.pop(key, {}) for key in ("rates", "decays", "decay_vectors"))
        others = {key[7:]: options.pop(key) for key in [*options] if key.startswith("others.")}
        others = {"weight_decay": options.get("weight_decay", 0.0), "betas": (0.9, 0.95), **others}
        hidden = self.hidden() if name == "muon" else {*self.net.parameters()}
        for kind, given, is_hidden in ((CLASSES[name], {"lr": 0.05, **options}, True), ("AdamW", others, False)):
            groups = []
            for key, parameter in self.net.named_parameters():
                layer, decay = key.partition(".")[0], given.get("weight_decay", 0.0)
                decay = decays.get(layer, decay) if vectors or parameter.dim() >= 2 else 0.0
                group = {"params": [parameter], "rate": given.get("lr", 0.0) * rates.get(layer, 1.0)}
                groups += [{**group, "weight_decay": decay}] * ((parameter in hidden) == is_hidden)
            made += [getattr(torch.optim, kind)(groups, **given)] if groups else []
        return made

    def hidden(self) -> set[nn.Parameter]:
        outer, matrices = set(), []
        for module in self.net.modules():
            named = module.named_parameters(recurse=False)
            mine = {p for name, p in named if p.dim() == 2 and not name.endswith("bias")}
            mine = set() if "norm" in type(module).__name__.lower() else mine
            outer |= mine if isinstance(module, nn.Embedding) else set()
            matrices += [mine] if mine else []
        return set().union(*matrices) - outer - matrices[-1]

    def train(self) -> Found:
        program, numbers, best, best_weights, seen = self.program, self.found, math.inf, {}, []
        optimizers, trained = self.optimizers(), [p for p in self.net.parameters() if p.requires_grad]
        unfreeze = (program["train.unfreeze"] or {}).items()
        until = {p: step for step, names in unfreeze for p in self.net.get_submodule(names[0]).parameters()}
        lr, total, batch = program["optim.lr"], program.total, program["train.global_batch_size"]
        follows = {"patience": 10, **program.options("scheduler")} if program["scheduler"] == "plateau" else {}
        plateau = ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr), **follows)
        how = {"every": 1, "start": math.inf, "use_buffers": True}
        how |= program.options("callbacks.swa") | program.options("callbacks.ema")
        rule = get_ema_multi_avg_fn(how["decay"]) if "decay" in how else None
        average = AveragedModel(self.net, multi_avg_fn=rule, use_buffers=how["use_buffers"])
        numbered = TensorData(torch.arange(program["rows"]), torch.zeros(program["rows"]), valid=0, test=0)
        order = TrainBatches(numbered.train, batch, program["seed"])  # the only thing that is taken from a run
        # torch's Muon computes in bfloat16, which the last bit of a gradient changes.
        wide = patch.object(Tensor, "bfloat16", Tensor.clone) if self.precision in ("fp64", "fp32") else nullcontext()
        for step in range(1, total + 1):
            rows = order[step].inputs
            seen = [*(seen if len(seen) + batch <= program["rows"] else ()), *rows.tolist()]
            assert len({*seen}) == len(seen), "an epoch has no row twice"
            for p in trained:
                p.requires_grad_(until.get(p, 0) < step)
            factor = plateau.optimizer.param_groups[0]["lr"] / lr * self.factor(step)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = factor * group["rate"]
            self.net.zero_grad()
            losses = self.backward(rows)
            now = [p for p in trained if p.requires_grad]
            for p in now:  # as docs/from_a_loop.md has it, a parameter that a step does not use has a gradient of zero
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad / self.scale
            norm = nn.utils.get_total_norm([p.grad for p in now]).item() if now else 0.0
            numbers |= {(step, name): value.item() for name, value in losses.items()}
            numbers |= {(step, "lr"): factor * lr, **({(step, "grad_norm"): norm} if now else {})}
            if not math.isfinite(norm):  # a run scales by about as much, and skips these steps
                raise OverflowError(f"the gradients of step {step} are not finite")
            if losses:  # a step of which no target counts is skipped
                if program["train.clip_value"] is not None and now:
                    nn.utils.clip_grad_value_(now, program["train.clip_value"])
                if program["train.grad_clip"] is not None and now:
                    nn.utils.clip_grad_norm_(now, program["train.grad_clip"])
                with wide:
                    for optimizer in optimizers:
                        optimizer.step()
                if step >= how["start"] and step % how["every"] == 0:
                    average.update_parameters(self.net)
            if not how["use_buffers"]:  # then buffers are those of the last step, not of the last average
                for buffer, present in zip(average.module.buffers(), self.net.buffers(), strict=True):
                    buffer.copy_(present)
            shown, last = average.module if average.n_averaged else self.net, step == total
            if last or (program["train.eval_every"] and step % program["train.eval_every"] == 0):
                value = self.evaluate(shown, step, "val", *self.data[1])
                if program["scheduler"] == "plateau" and value < math.inf:
                    plateau.step(value)
                if value < best:
                    best = value
                    best_weights = {("best", name): x.clone() for name, x in shown.state_dict().items()}
        self.evaluate(shown, "the end", "test", *self.data[2])
        return numbers | best_weights | {("the end", name): x for name, x in shown.state_dict().items()}

    def backward(self, rows: Tensor) -> dict[str, Tensor]:
        """The gradients of the mean over the batch. Running statistics move once, by the mean of the micro-batches."""
        for module, training in self.modes:
            module.training = training
        buffers, after, found, program = [*self.net.buffers()], [], [], self.program
        before = [buffer.clone() for buffer in buffers]
        together = LAYOUTS[program["layout"]] if program["parallel.sync_batchnorm"] else 1
        replicas = rows.view(together, program["parts"] // together, -1)
        for part in replicas.transpose(0, 1).flatten(1):
            for buffer, old in zip(buffers, before, strict=True):
                buffer.data.copy_(old)
            x, y = (tuple(tensor[part] for tensor in several(given)) for given in self.data[0])
            found.append((*self.outputs(self.net, x), *y))
            after.append([buffer.clone() for buffer in buffers])
        for buffer, new in zip(buffers, zip(*after, strict=True), strict=True):
            buffer.data.copy_(torch.stack(new).mean(dim=0) if buffer.is_floating_point() else new[0])
        whole = tuple(map(torch.cat, zip(*found, strict=True)))
        losses = self.losses(whole[: len(whole) // 2], whole[len(whole) // 2 :])
        for buffer, old in zip(buffers, before, strict=True) if not losses else ():
            buffer.data.copy_(old)  # the step is skipped
        if losses and losses["loss"].requires_grad:
            (losses["loss"] * self.scale).backward()
        return losses

    @torch.no_grad()
    def evaluate(self, net: nn.Module, step, split: str, inputs, targets) -> float:
        outputs = self.outputs(net.eval(), inputs)
        found = {name: value.item() for name, value in self.losses(outputs, targets).items()}
        for name in self.program["metrics"] if found else ():
            found |= self.metric(name, outputs[0], targets)
        self.found |= {(step, f"{split}_{name}"): value for name, value in found.items()}
        if self.program["predict"]:
            self.found |= {("the end", f"prediction {i}"): output for i, output in enumerate(outputs)}
        return found.get("loss", math.inf)
