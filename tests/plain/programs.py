"""A random program: plain values, from which the model, the data and the words of a run follow."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from random import Random

import torch
from plain import blocks
from torch import nn

# The replicas of each layout, and its words. The micro-batches of a step are as many in all layouts of a program.
LAYOUTS = {
    "single": (1, "single"), "model_parallel": (1, "model_parallel parallel.devices=[cpu,cpu]"),
    "ddp": (2, "ddp parallel.dp=2"), "fsdp": (2, "fsdp parallel.dp=2"), "pipelined": (1, "pipelined"),
    "1f1b": (1, "pipelined parallel.schedule=1f1b"), "pipe_ddp": (2, "pipe_ddp parallel.dp=2"),
    "interleaved": (1, "pipelined parallel.schedule=interleaved_1f1b"),
    "looped": (1, "pipelined parallel.schedule=looped_bfs"), "hsdp": (4, "hsdp parallel.dp=4 parallel.shard=2"),
    "zero bubble": (1, "pipelined parallel.schedule=interleaved_zero_bubble"),
    "pipe_fsdp": (2, "pipe_fsdp parallel.dp=2 parallel.schedule=1f1b"),
}  # fmt: skip
IN_ONE_PROCESS, WITHOUT_STAGES = ["single", "model_parallel"], {"single", "ddp", "fsdp", "hsdp"}
DECAY, DECOUPLED = {"weight_decay": [0.0, 0.1]}, {"decoupled_weight_decay": [False, True]}
MOMENTUM = {"lr": [0.02, 0.1], "momentum": [0.5, 0.9], **DECAY}
ADAM = {"lr": [0.003, 0.01], "betas": [[0.9, 0.999], [0.5, 0.9]], **DECAY}
# The word, torch's class, options that are given always, and options to draw. With torch's eps, the rounding of a
# gradient that is zero would become whole steps.
OPTIMIZERS = {
    "sgd": ("sgd", "SGD", {"lr": 0.05}, {"lr": [0.02, 0.1], "maximize": [False, True], **DECAY}),
    "momentum": ("sgd", "SGD", {"lr": 0.05, "momentum": 0.5}, {**MOMENTUM, "dampening": [0.0, 0.3]}),
    "nesterov": ("sgd", "SGD", {"lr": 0.05, "momentum": 0.5, "nesterov": True}, MOMENTUM),
    "adam": ("adam", "Adam", {"lr": 1e-3, "eps": 1e-3}, {**ADAM, **DECOUPLED, "amsgrad": [False, True]}),
    "adamw": ("adamw", "AdamW", {"lr": 1e-3, "eps": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
              {**ADAM, "amsgrad": [False, True], "maximize": [False, True]}),
    "nadam": ("nadam", "NAdam", {"lr": 2e-3, "eps": 1e-3}, {**ADAM, **DECOUPLED, "momentum_decay": [4e-3, 0.1]}),
}  # fmt: skip
SCHEDULES = {
    "constant": {}, "step": {"every": [1, 2], "unit": ["epoch", "step"], "gamma": [0.5, 0.9]},
    "linear": {"warmup_steps": [0, 1, 3], "min_ratio": [0.0, 0.2]},
    "cosine_warmup": {"warmup_steps": [0, 2], "min_ratio": [0.0, 0.1]},
    "wsd": {"warmup_steps": [0, 2], "decay_steps": [1, 2], "min_ratio": [0.0, 0.3], "decay_type": ["linear", "1-sqrt"]},
    "plateau": {"factor": [0.1, 0.3], "patience": [0, 1], "threshold": [0.01, 0.3]},
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Program:
    """What is trained on what, and how. ``repr`` leaves out the fields that have their defaults.

    seed        of the weights, the data and the order of samples
    domain      of the inputs: rows, sequences, tokens, images; ``second``: there is a second input
    blocks      in ``blocks.BLOCKS``; ``tied``: the first and the last linear layer share a weight; ``again``: the first
                block is also the last; ``frozen`` and ``in_eval``: numbers of blocks
    whole       given as a module with a forward of its own; ``skip``: layers pass on two tensors
    targets     in ``blocks.LOSSES``, with their ``factors``; ``dense``: of every position
    rows        of the training; as many as ``held`` are evaluated, and as many tested
    parts       micro-batches of a step, over all replicas
    then        the layout in which the first checkpoint is resumed
    """

    seed: int = 0
    domain: str = "rows"
    second: bool = False
    blocks: tuple[str, ...] = ()
    tied: bool = False
    again: bool = False
    frozen: tuple[int, ...] = ()
    in_eval: tuple[int, ...] = ()
    whole: bool = False
    skip: bool = False
    targets: tuple[str, ...] = ("mse",)
    factors: tuple[float, ...] = ()
    dense: bool = False
    rows: int = 16
    held: int = 4
    batch: int = 4
    parts: int = 1
    epochs: float = 1.0
    optim: str = "sgd"
    options: tuple = ()
    rates: tuple = ()
    decays: tuple = ()
    decay_vectors: bool = False
    clip: float | None = None
    clip_value: float | None = None
    scheduler: str = "constant"
    schedule: tuple = ()
    precision: str = "fp64"
    layout: str = "single"
    then: str | None = None
    recompute: bool = False
    compiled: bool = False
    every: int = 0
    metric: bool = False
    average: tuple = ()
    unfreeze: tuple = ()
    predict: bool = False

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        kept = [f"{field.name}={given[field.name]!r}" for field in fields(self) if given[field.name] != field.default]
        return f"Program({', '.join(kept)})"

    @property
    def total(self) -> int:
        """The number of steps."""
        return math.ceil(self.epochs * (self.rows // self.batch))

    @property
    def losses(self) -> list[blocks.Target]:
        return [blocks.LOSSES[name] for name in self.targets]

    @property
    def settings(self) -> dict:
        """The options of the optimizer."""
        return {**OPTIMIZERS[self.optim][2], **dict(self.options)}

    def net(self) -> nn.Module:
        """The model, always with the same weights: ``stem``, ``b0``, ``b1`` …, ``head``."""
        torch.manual_seed(self.seed)
        inner = [blocks.BLOCKS[name][1]() for name in self.blocks]
        for number in self.frozen:
            inner[number].requires_grad_(False)
        alike = [m for block in inner for m in block.modules() if type(m) is nn.Linear and m.weight.shape == (8, 8)]
        if self.tied and alike:
            alike[-1].weight = alike[0].weight
        last = blocks.head([loss.size for loss in self.losses], self.dense, self.domain != "images")
        layers = [blocks.stem(self.domain, self.second), *inner, *inner[: self.again], last]
        if self.skip:
            forwards = (
                [blocks.begins] + [lambda m, x, y: (m.a(x), y)] * (len(layers) - 2) + [lambda m, x, y: m.a(x + y)]
            )
            layers = [blocks.Own(forward, a=layer) for forward, layer in zip(forwards, layers, strict=True)]
        for number in self.in_eval:
            layers[1 + number].eval()
        named = dict(zip(["stem", *(f"b{i}" for i in range(len(layers) - 2)), "head"], layers, strict=True))
        return blocks.Own(blocks.whole, **named) if self.whole else nn.Sequential(OrderedDict(named))

    def tensors(self) -> list[tuple]:
        """Inputs of float32 or tokens, and targets: to train on, to evaluate and to test."""
        draw, shape = torch.Generator().manual_seed(self.seed), blocks.INPUTS[self.domain]
        places = (shape[1:] if self.domain == "images" else shape[:1]) if self.dense else ()
        found = []
        for n in (self.rows, self.held, self.held):
            x = torch.randn(n, *shape, generator=draw)
            x = x.argsort(dim=-1) * 2 if self.domain == "tokens" else x
            y = tuple(loss.make((n, *places), loss.size, draw) for loss in self.losses)
            found.append(((x, torch.randn(n, 2, generator=draw)) if self.second else x, y if len(y) > 1 else y[0]))
        return found

    def words(self, layout: str) -> list[str]:
        """The words of a run, without those that name folders."""
        replicas, chosen = LAYOUTS[layout]
        average, typed = dict(self.average), {
            "seed": self.seed, "logger": "none", "device": "cpu", "parallel.threads": 1, "train.steps": None,
            "train.epochs": self.epochs, "train.global_batch_size": self.batch, "train.eval_every": self.every,
            "parallel.chunks": self.parts // replicas, "optim.decay_vectors": self.decay_vectors,
            "train.grad_clip": self.clip, "train.clip_value": self.clip_value, "train.compile": self.compiled,
            "train.activation_checkpointing": self.recompute, "train.checkpoint_every": max(1, self.total // 2),
            "train.keep_checkpoints": 99, "train.max_skipped": 99, "train.precision": self.precision,
            "optim": OPTIMIZERS[self.optim][0], **{f"optim.{key}": value for key, value in self.settings.items()},
            "scheduler": self.scheduler, **{f"scheduler.{key}": value for key, value in self.schedule},
        }  # fmt: skip
        typed |= {f"optim.{key}": dict(pairs) for key in ("rates", "decays") if (pairs := getattr(self, key))}
        typed |= {"train.unfreeze": {step: [name] for step, name in self.unfreeze}} if self.unfreeze else {}
        typed |= {"metrics": [{"_target_": "plain.blocks.spread"}]} if self.metric else {}
        if average:
            name = average.pop("name")
            typed |= {"callbacks": [name], **{f"callbacks.{name}.{key}": value for key, value in average.items()}}
        return [*f"parallel={chosen}".split(), *(f"{key}={word(value)}" for key, value in typed.items())]


def word(value: object) -> str:
    """A value as it is typed."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {word(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(word, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def drawn(seed: int, number: int) -> Program:
    """The program of this number."""
    draw = Random(f"{seed} {number}")

    def some(chance: float, then=True, other=False):
        return then if draw.random() < chance else other

    def of(table: dict) -> tuple:
        return tuple((key, draw.choice(values)) for key, values in table.items() if some(0.7))

    domain = draw.choice(["rows", "rows", "sequences", "tokens", "images"])
    letter = domain.replace("tokens", "sequences")[0]
    names = [name for name, (domains, _) in blocks.BLOCKS.items() if letter in domains]
    chosen = tuple(draw.choice(names) for _ in range(draw.randint(1, 5)))
    layout = some(0.12, draw.choice([*LAYOUTS][2:]), draw.choice(["single", *IN_ONE_PROCESS]))
    then = some(0.2, some(0.2, draw.choice([*LAYOUTS]), draw.choice(IN_ONE_PROCESS)), None)
    moves = not {"spectral_norm", "Moving"}.isdisjoint(chosen) and some(0.9)  # wants the whole batch at once
    layout, then = ("single", then and "single") if moves else (layout, then)
    fewest = max(LAYOUTS[layout][0], LAYOUTS[then or layout][0])
    parts = 1 if moves else fewest * (draw.choice([1, 1, 2, 4]) if fewest < 4 else 1)
    batch, scheduler, optim = parts * draw.choice([2, 3, 5]), draw.choice([*SCHEDULES]), draw.choice([*OPTIMIZERS])
    targets = tuple(draw.choice([*blocks.LOSSES]) for _ in range(some(0.7, 1, draw.randint(2, 3))))
    options, sgd = of(OPTIMIZERS[optim][3]), OPTIMIZERS[optim][0] == "sgd"
    average = (("name", draw.choice(["ema", "swa"])), *of({"every": [1, 2], "use_buffers": [True, False]}))
    average += (("start", draw.choice([1, 3])), *((("decay", 0.8),) if average[0][1] == "ema" else ()))
    program = Program(
        seed=draw.randrange(1000), domain=domain, second=some(0.15), blocks=chosen, tied=some(0.2),
        again=some(0.1) and "orm" not in chosen[0],
        frozen=tuple(i for i in range(len(chosen)) if some(0.08)),
        in_eval=tuple(i for i in range(len(chosen)) if some(0.08)), skip=some(0.15), targets=targets,
        whole=some(0.2) and {layout, then or layout} <= WITHOUT_STAGES, dense=some(0.3) and domain != "rows",
        factors=tuple(draw.choice([1.0, 0.3, 2.0]) for _ in targets) if len(targets) > 1 and some(0.6) else (),
        rows=batch * draw.randint(1, 4) + draw.randrange(batch), held=draw.choice([1, 3, 7, 20]), parts=parts,
        batch=batch, epochs=draw.choice([1, 2, 2.5, 3]), optim=optim, options=options,
        clip=draw.choice([None, None, 0.1, 1.0]),
        decay_vectors=some(0.4) and bool(dict(options).get("weight_decay", optim == "adamw")),
        clip_value=some(0.25, 0.05, None), scheduler=scheduler, schedule=of(SCHEDULES[scheduler]),
        precision=draw.choice(["fp64"] * 6 + ["fp32", "bf16"] * sgd), layout=layout, then=then,
        recompute=some(0.15) and not moves, every=draw.choice([1, 2] if scheduler == "plateau" else [0, 1, 2, 3]),
        metric=some(0.1) and len(targets) == 1, average=some(0.12, average, ()), predict=some(0.08),
        compiled=some(0.004),
    )  # fmt: skip
    trained = [name for name, m in program.net().named_children() if any(p.requires_grad for p in m.parameters())]
    return replace(
        program, rates=((draw.choice(trained), draw.choice([0.1, 3])),) * some(0.2),
        decays=((draw.choice(trained), draw.choice([0.0, 0.5])),) * some(0.2),
        unfreeze=((draw.choice([1, 2]), draw.choice(trained)),) * some(0.12),
    )  # fmt: skip


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less."""
    for field in fields(Program):
        value = getattr(program, field.name)
        if value != field.default:
            yield replace(program, **{field.name: field.default})
        if isinstance(value, tuple) and (value[1:] or field.name != "targets"):
            for i in range(len(value)):
                yield replace(program, **{field.name: value[:i] + value[i + 1 :]})
