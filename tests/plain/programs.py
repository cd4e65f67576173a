"""A random program: plain values, from which the model, the data and the words of a run follow."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator
from random import Random

import torch
from plain import blocks
from torch import nn

# The words of each layout, and its replicas. The micro-batches of a step are as many in all layouts of a program.
LAYOUTS = {
    "single": 1, "model_parallel parallel.devices=[cpu,cpu]": 1, "ddp parallel.dp=2": 2, "fsdp parallel.dp=2": 2,
    "hsdp parallel.dp=4 parallel.shard=2": 4, "pipe_ddp parallel.dp=2": 2,
    "pipe_fsdp parallel.dp=2 parallel.schedule=1f1b": 2, "pipelined": 1,
    "pipelined parallel.schedule=1f1b parallel.balance=size": 1, "pipelined parallel.schedule=interleaved_1f1b": 1,
    "pipelined parallel.schedule=looped_bfs": 1, "pipelined parallel.schedule=interleaved_zero_bubble": 1,
    "tensor": 1, "tensor parallel.sequence=true": 1, "fsdp parallel.dp=2 parallel.tp=2": 2,
    "pipelined parallel.tp=2": 1, "context": 1, "context parallel.context=ring": 1,
    "context parallel.context=ulysses": 1, "ddp parallel.dp=2 parallel.cp=2": 2, "expert parallel.dp=2": 2,
    "fsdp parallel.dp=2 parallel.ep=2": 2,
}  # fmt: skip
# What a layout asks for: stages, chunks, and blocks with these letters.
NEEDS = {"pipe": "stages", "model_parallel": "stages", "tensor": "t", "tp=": "t", "context": "p", "cp=": "p",
         "sequence=": "p", "expert": "e", "ep=": "e", "schedule=": "chunks"}  # fmt: skip
# What is drawn: the default, how often another value is, and the others. Keys with a dot are words of the command.
CHOICES = {
    "domain": ("rows", 0.8, ["rows", "sequences", "tokens", "images"]),
    "second": (False, 0.15, [True]),  # input
    "tied": (False, 0.2, [True]),  # the first and the last linear layer share a weight
    "again": (False, 0.1, [True]),  # the first block is also the last
    "whole": (False, 0.2, [True]),  # given as a module with a forward of its own
    "skip": (False, 0.15, [True]),  # layers pass on two tensors
    "dense": (False, 0.3, [True]),  # targets of every position
    "held": (4, 0.8, [1, 3, 7, 20]),  # samples to evaluate, and to test
    "then": (None, 0.2, [*LAYOUTS][:2]),  # the layout in which the first checkpoint is resumed
    "predict": (False, 0.08, [True]),
    "train.epochs": (1, 0.8, [2, 2.5, 3]),
    "train.grad_clip": (None, 0.5, [0.1, 1.0]),
    "train.clip_value": (None, 0.25, [0.05]),
    "train.eval_every": (0, 0.8, [1, 2, 3]),
    "train.precision": ("fp64", 0.25, ["fp32", "bf16", "bf16", "fp16"]),
    "train.activation_checkpointing": (False, 0.15, [True]),
    "train.compile": (False, 0.004, [True]),
    "optim.decay_vectors": (False, 0.3, [True]),
    "parallel.sync_batchnorm": (False, 0.3, [True]),
}
DEFAULTS = {key: default for key, (default, *_) in CHOICES.items()} | {
    "blocks": (), "frozen": (), "in_eval": (), "targets": ("mse",), "factors": (), "metrics": (), "shared": False,
    "rows": 16, "parts": 1, "layout": "single", "optim": "sgd", "optim.lr": 0.05, "scheduler": "constant", "seed": 0,
    "train.global_batch_size": 4, "train.unfreeze": None,
}  # fmt: skip
ADAM = {"lr": [0.003, 0.01], "betas": [[0.9, 0.999], [0.5, 0.9]], "weight_decay": [0.0, 0.1]}
DECOUPLED, MOMENTUM = {"decoupled_weight_decay": [False, True]}, {"momentum": [0.5, 0.9], "weight_decay": [0.0, 0.1]}
# The word, options that are given always, and options to draw. With torch's eps, the rounding of a gradient that is
# zero would become whole steps.
OPTIMIZERS = [
    ("sgd", {"lr": 0.05}, {"lr": [0.02, 0.1], "maximize": [False, True], "weight_decay": [0.0, 0.1]}),
    ("sgd", {"lr": 0.05, "momentum": 0.5}, {**MOMENTUM, "dampening": [0.0, 0.3]}),
    ("sgd", {"lr": 0.05, "momentum": 0.5, "nesterov": True}, MOMENTUM),
    ("adam", {"lr": 1e-3, "eps": 1e-3}, {**ADAM, **DECOUPLED, "amsgrad": [False, True]}),
    ("adamw", {"lr": 1e-3, "eps": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
     {**ADAM, "amsgrad": [False, True], "maximize": [False, True]}),
    ("nadam", {"lr": 2e-3, "eps": 1e-3}, {**ADAM, **DECOUPLED, "momentum_decay": [4e-3, 0.1]}),
    ("muon", {"lr": 0.02, "weight_decay": 0.1, "others.lr": 0.01, "others.eps": 1e-3},
     {"momentum": [0.5, 0.95], "nesterov": [False, True], "adjust_lr_fn": ["original", "match_rms_adamw"],
      "ns_steps": [2, 5], "others.betas": [[0.9, 0.95], [0.5, 0.9]], "others.weight_decay": [0.0, 0.3]}),
]  # fmt: skip
FIXED = {f"optim.{key}" for _, always, _ in OPTIMIZERS for key in always}  # whose defaults are others than torch's
SCHEDULES = {
    "constant": {}, "step": {"every": [1, 2], "unit": ["epoch", "step"], "gamma": [0.5, 0.9]},
    "linear": {"warmup_steps": [0, 1, 3], "min_ratio": [0.0, 0.2]},
    "cosine_warmup": {"warmup_steps": [0, 2], "min_ratio": [0.0, 0.1]},
    "wsd": {"warmup_steps": [0, 2], "decay_steps": [1, 2], "min_ratio": [0.0, 0.3], "decay_type": ["linear", "1-sqrt"]},
    "plateau": {"factor": [0.1, 0.3], "patience": [0, 1], "threshold": [0.01, 0.3]},
}  # fmt: skip
AVERAGES = {"every": [1, 2], "use_buffers": [True, False], "start": [1, 3]}
ALWAYS = {
    "logger": "none", "device": "cpu", "parallel.threads": 1, "train.steps": None, "train.keep_checkpoints": 99,
    "train.max_skipped": 99,
}  # fmt: skip


class Program(dict):
    """What is trained on what, and how: what differs from ``DEFAULTS``.

    frozen and in_eval are numbers of blocks, factors those of the losses of ``targets``, parts the micro-batches of a
    step over all replicas. If ``shared``, ranks can divide positions and words.
    """

    def __missing__(self, key: str):
        return DEFAULTS[key]

    def options(self, of: str) -> dict:
        """The options of an object, such as ``optim``."""
        return {key.removeprefix(f"{of}."): value for key, value in self.items() if key.startswith(f"{of}.")}

    @property
    def total(self) -> int:
        """The number of steps."""
        return math.ceil(self["train.epochs"] * (self["rows"] // self["train.global_batch_size"]))

    @property
    def losses(self) -> list[blocks.Target]:
        return [blocks.LOSSES[name] for name in self["targets"]]

    @property
    def needs(self) -> set[str]:
        """What the layouts ask of the model."""
        return {need for mark, need in NEEDS.items() if mark in f"{self['layout']} {self['then']}"}

    def net(self) -> nn.Module:
        """The model, always with the same weights: ``stem``, ``b0``, ``b1`` …, ``head``."""
        torch.manual_seed(self["seed"])
        inner = [blocks.BLOCKS[name][1]() for name in self["blocks"]]
        for number in self["frozen"]:
            inner[number].requires_grad_(False)
        alike = [m for block in inner for m in block.modules() if type(m) is nn.Linear and m.weight.shape == (8, 8)]
        if self["tied"] and alike:
            alike[-1].weight = alike[0].weight
        last = blocks.head(self["targets"], self["domain"], self["dense"], self["shared"])
        first = blocks.stem(self["domain"], self["second"], self["shared"])
        layers = [first, *inner, *inner[: self["again"]], last]
        if self["skip"]:
            between = [lambda m, x, y: (m.a(x), y)] * (len(layers) - 2)
            forwards = [blocks.begins, *between, lambda m, x, y: m.a(x + y)]
            layers = [blocks.Own(forward, a=layer) for forward, layer in zip(forwards, layers, strict=True)]
        for number in self["in_eval"]:
            layers[1 + number].eval()
        named = dict(zip(["stem", *(f"b{i}" for i in range(len(layers) - 2)), "head"], layers, strict=True))
        return blocks.Own(blocks.whole, **named) if self["whole"] else nn.Sequential(OrderedDict(named))

    def tensors(self, last: bool = False) -> list[tuple]:
        """Inputs of float32 or tokens, and targets [b, k, ...], or [b, ..., k]: to train, to evaluate and to test."""
        draw, shape = torch.Generator().manual_seed(self["seed"]), blocks.INPUTS[self["domain"]]
        places = (shape[1:] if self["domain"] == "images" else shape[:1]) if self["dense"] else ()
        found = []
        for n in (self["rows"], self["held"], self["held"]):
            x = torch.randn(n, *shape, generator=draw)
            x = x.argsort(dim=-1) * 2 if self["domain"] == "tokens" else x
            y = [loss.make((n, *places), loss.size, draw) for loss in self.losses]
            y = [one.movedim(1, -1) if last and one.is_floating_point() else one for one in y]
            inputs = (x, torch.randn(n, 2, generator=draw)) if self["second"] else x
            found.append((inputs, tuple(y) if len(y) > 1 else y[0]))
        return found

    def cut(self, net: nn.Module) -> dict:
        """How ranks divide modules of the net."""
        names = [name for name, _ in net.named_modules(remove_duplicate=False)]
        return {name: blocks.CUT[last] for name in names if (last := name.rpartition(".")[2]) in blocks.CUT}

    def words(self, layout: str) -> list[str]:
        """The words of a run, without those that name folders."""
        typed = {key: self[key] for key in {**DEFAULTS, **self} if "." in key} | ALWAYS
        typed |= {key: self[key] for key in ("seed", "optim", "scheduler")}
        typed["parallel.chunks"] = self["parts"] // LAYOUTS[layout]
        typed["train.checkpoint_every"] = max(1, self.total // 2)
        named = [blocks.METRICS[name] for name in self["metrics"]]
        typed |= {"metrics": [{"_target_": name, **given} for name, given in named]} if named else {}
        typed |= {"callbacks": [*{key.split(".")[1] for key in self if key.startswith("callbacks.")}]}
        return [*f"parallel={layout}".split(), *(f"{key}={word(value)}" for key, value in typed.items())]


def word(value: object) -> str:
    """A value as it is typed: JSON without quotes."""
    return value if isinstance(value, str) else json.dumps(value).replace('"', "")


def drawn(seed: int, number: int) -> Program:
    """The program of this number."""
    draw = Random(f"{seed} {number}")

    def some(chance: float) -> bool:
        return draw.random() < chance

    def of(table: dict, place: str) -> dict:
        return {f"{place}.{key}": draw.choice(values) for key, values in table.items() if some(0.7)}

    def numbers(chance: float) -> tuple[int, ...]:
        return tuple(i for i in range(len(chosen)) if some(chance))

    p = Program({key: draw.choice(values) for key, (_, often, values) in CHOICES.items() if some(often)})
    p |= {"seed": draw.randrange(1000), "layout": draw.choice([*LAYOUTS] if some(0.14) else [*LAYOUTS][:2])}
    if p["then"] and some(0.2):
        p["then"] = draw.choice([*LAYOUTS])
    letters, p["shared"] = p.needs & {*"tpe"}, "p" in p.needs
    if letters:
        p |= {"domain": draw.choice(["sequences", "tokens"]), "dense": p["shared"] or p["dense"]}
    letter = p["domain"].replace("tokens", "sequences")[0]
    kinds = {name: kind for name, (kind, _) in blocks.BLOCKS.items() if letter in kind}
    if p["shared"]:  # what computes each position alone
        kinds = {name: kind for name, kind in kinds.items() if name not in blocks.MOVES and {*kind} & {"p", "r"}}
    chosen = [draw.choice([*kinds]) for _ in range(draw.randint(1, 5))]
    chosen += [draw.choice([n for n in kinds if need in kinds[n]]) for need in sorted(letters - {"p"})]
    draw.shuffle(chosen)
    if moves := not blocks.MOVES.isdisjoint(chosen) and some(0.9):  # they want the whole batch at once
        p |= {"layout": "single", "then": p["then"] and "single", "train.activation_checkpointing": False}
    fewest = max(LAYOUTS[p["layout"]], LAYOUTS[p["then"] or "single"], 2 * ("chunks" in p.needs))
    parts = 1 if moves else fewest * (draw.choice([1, 1, 2, 4]) if fewest < 4 else 1)
    batch = parts * draw.choice([2, 3, 5])
    losses = [*blocks.SHARED] if p["shared"] else [*blocks.LOSSES][:-1]
    targets = [draw.choice(losses) for _ in range(1 if p["shared"] or some(0.7) else draw.randint(2, 3))]
    word, always, others = draw.choice(OPTIMIZERS)
    schedule = draw.choice([*SCHEDULES])
    p |= {
        "blocks": tuple(chosen), "targets": tuple(targets), "parts": parts, "train.global_batch_size": batch,
        "rows": batch * draw.randint(1, 4) + draw.randrange(batch), "frozen": numbers(0.08), "in_eval": numbers(0.08),
        "optim": word, "scheduler": schedule, **of(SCHEDULES[schedule], "scheduler"),
        **{f"optim.{key}": value for key, value in always.items()}, **of(others, "optim"),
    }  # fmt: skip
    if len(targets) > 1 and some(0.6):
        p["factors"] = tuple(draw.choice([1.0, 0.3, 2.0]) for _ in targets)
    if len(targets) == 1 and some(0.25):
        p["metrics"] = (draw.choice(blocks.LOSSES[targets[0]].metrics),)
    if some(0.12):
        name = draw.choice(["callbacks.ema", "callbacks.swa"])
        p |= {f"{name}.start": draw.choice([1, 3]), **of(AVERAGES, name)}
        p |= {f"{name}.decay": 0.8} if name == "callbacks.ema" else {}
    if schedule == "plateau":
        p["train.eval_every"] = draw.choice([1, 2])
    if p["parallel.sync_batchnorm"]:
        p |= {"then": None, "parallel.sync_batchnorm": LAYOUTS[p["layout"]] > 1}
    decays = p.options("optim").get("weight_decay", 0.0)
    p |= {"optim.decay_vectors": p["optim.decay_vectors"] and decays > 0}
    if p["domain"] == "rows":
        p["dense"] = False
    p |= {"whole": p["whole"] and not p.needs, "second": p["second"] and not p["shared"]}
    p |= {"again": p["again"] and "orm" not in chosen[0], "tied": p["tied"] and not letters}
    trained = [name for name, m in p.net().named_children() if any(x.requires_grad for x in m.parameters())]
    for key, factors in (("optim.rates", [0.1, 3]), ("optim.decays", [0.0, 0.5])):
        p |= {key: {draw.choice(trained): draw.choice(factors)}} if some(0.2) else {}
    p |= {"train.unfreeze": {draw.choice([1, 2]): [draw.choice(trained)]}} if some(0.12) else {}
    return Program({key: value for key, value in p.items() if key not in DEFAULTS or value != DEFAULTS[key]})


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less."""
    for key, value in program.items():
        if key not in FIXED or program["optim"] == "sgd":
            yield Program({k: v for k, v in program.items() if not f"{k}.".startswith(f"{key}.")})
        for i in range(len(value)) if isinstance(value, tuple) else ():
            yield Program({**program, key: value[:i] + value[i + 1 :]})
