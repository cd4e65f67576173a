"""The table of parity: what is trained, under which layout, on which device, and how near it comes to one process."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
from cases import Layout, Recipe

from parallel.axes.context_attention import WAYS
from parallel.schedules import SCHEDULES
from parallel.strategies import STRATEGIES, StrategyInfo

CONF_MODEL = Path(__file__).resolve().parents[2] / "conf" / "model"

RECIPES = {
    "toy": Recipe("toy", global_batch=24, lr=0.02, steps=8, eval_every=5),
    # Tied embeddings, dropout, clipping, an evaluation in between.
    "gpt2": Recipe("gpt2", global_batch=16, lr=0.4, steps=3, clip=0.25, eval_every=2),
    # Tied, without dropout; several query heads for one of keys.
    "llama": Recipe("llama", global_batch=16, lr=0.4, steps=3, clip=0.25, eval_every=2),
    # In float64: a rounded score may choose another expert.
    "moe": Recipe("moe", global_batch=16, lr=0.4, steps=3, clip=0.25, eval_every=2, precision="fp64"),
    "transformer": Recipe("transformer", global_batch=16, lr=0.2, clip=0.5, steps=3, eval_every=2, dropout=0.2),
    # One of transformers', by its own code.
    "transformers": Recipe("transformers", global_batch=16, lr=0.4, steps=3, clip=0.25, eval_every=2),
    "mixture": Recipe("mixture", global_batch=16, lr=0.4, steps=3, clip=0.25, eval_every=2, precision="fp64"),
    # Chaotic in float32 (another number of threads moves its loss by percents): float64, and a small rate.
    "resnet50": Recipe("resnet50", global_batch=8, lr=1e-3, momentum=0.0, steps=2, eval_every=2, precision="fp64"),
    "classifier": Recipe("classifier", global_batch=16, lr=0.02, steps=3, eval_every=2),
    "convnet": Recipe("convnet", global_batch=32, lr=0.02, steps=3, eval_every=2),
    # In-place layers, layers of torch with statistics, frozen, shared, unused and empty parameters.
    "sequential": Recipe("sequential", global_batch=16, lr=0.1, steps=3, eval_every=2),
    # A parameter that one replica uses and another does not.
    "sequential sometimes": Recipe("sequential sometimes", global_batch=4, lr=0.1, steps=8),
    # Layers, and a loss, that change what they are given, and pass views on.
    "in place": Recipe("in place", global_batch=16, lr=0.1, steps=3, eval_every=2, precision="fp64"),
    # A layer that returns its weight, for another one.
    "passed on": Recipe("passed on", global_batch=16, lr=0.1, steps=4),
    # Under autocast, torch's encoder layer gives another dtype in evaluation than in training.
    "torch's encoder": Recipe("torch's encoder", global_batch=16, lr=0.05, steps=4, eval_every=2, precision="bf16"),
    # Layers that pass tuples of tensors on.
    "unet": Recipe("unet", global_batch=16, lr=0.05, steps=5, clip=0.5, eval_every=5, precision="fp64"),
    # Every layer is cut, also the first and the last one, which have no vocabulary.
    "perceptrons": Recipe("perceptrons", global_batch=8, lr=0.1, steps=4, clip=0.5, eval_every=2),
    "translator": Recipe("translator", global_batch=16, lr=0.05, steps=5, clip=0.5, eval_every=5),
}
# All 16 blocks of ResNet-50, where the others have 5 of them.
RECIPES["whole resnet50"] = replace(RECIPES["resnet50"], model="whole resnet50")
# Models that conf/model has besides: whoever adds one need not add a line here.
ADDED = tuple(sorted({path.stem for path in CONF_MODEL.glob("*.yaml")} - RECIPES.keys()))
RECIPES |= {name: Recipe(name, global_batch=8, lr=0.01, steps=3, eval_every=3) for name in ADDED}
PUBLISHED = ("toy", "resnet50", "transformer", "gpt2", "llama", "moe", "transformers", "classifier", "convnet")
# BatchNorm, and an auxiliary loss, are taken over the micro-batch: one process with the same ones is compared.
BY_MICROBATCH = ("resnet50", "whole resnet50", "convnet", "sequential", "unet", "translator", "torch's encoder", *ADDED)
SPLIT = tuple(name for name in SCHEDULES if SCHEDULES[name].splits_backward)


@dataclass(frozen=True)
class Cell:
    """A training that is to be another one's.

    reference  the layout that it is compared with; wanted  what is trained there
    device     "cpu", or "cuda" for GPUs: pretended ones, or those that there are
    rounded    it must also be farther than this from the reference, or nothing was rounded
    outputs    the tolerance of what evaluations return, where it is another
    """

    recipe: Recipe
    layout: Layout
    tolerance: float
    reference: Layout
    wanted: Recipe
    device: str = "cpu"
    rounded: float | None = None
    outputs: float | None = None
    marks: tuple = ()

    def __str__(self) -> str:
        changed = [f"{key}={value}" for key, value in vars(self.recipe).items()
                   if value != getattr(RECIPES[self.recipe.model], key)]  # fmt: skip
        return " ".join([self.recipe.model, str(self.layout), *changed, *["on a GPU"] * (self.device == "cuda")])

    @property
    def param(self):
        return pytest.param(self, id=str(self), marks=self.marks)


def cell(model: str, layout: Layout, tolerance: float | None = None, slow: bool = False, **changes) -> Cell:
    """A cell with what follows from its model; ``changes`` are those of a Cell, or of the recipe of both trainings."""
    own = {key: changes.pop(key) for key in ("reference", "wanted", "device", "rounded", "outputs") if key in changes}
    planned = {"steps": 5} if layout.schedule == "planned" and RECIPES[model].steps < 5 else {}  # anew after 4 steps
    recipe = replace(RECIPES[model], **{**planned, **changes})
    exact = 1e-10 if recipe.precision == "fp64" else 1e-5
    reference = layout.same_cut if model in BY_MICROBATCH else Layout("single")
    marks = (pytest.mark.slow,) if slow else ()
    return Cell(recipe, layout, tolerance or exact, **{"reference": reference, "wanted": recipe, **own}, marks=marks)


def small_layout(name: str, info: StrategyInfo) -> Layout:
    """Two replicas and two stages, where the strategy has them; four micro-batches in all."""
    hybrid = info.shards == "node"  # two groups of two
    dp, pp = (1 + info.replicas) * (1 + hybrid), 1 + info.stages
    shard = 2 if hybrid else None
    return Layout(name, dp=dp, pp=pp, chunks=4 // dp, schedule="gpipe" if info.replicas else "1f1b", shard=shard)


# Strategies of any model; those of models whose layers can be cut have cells of their own.
COMPARED = [
    (name, info) for name, info in STRATEGIES.items() if not (info.gpu_only or info.degree) and name != "single"
]


def published() -> Iterable[Cell]:
    """Every model under every strategy, whatever the registry has.

    Quick are two models under all of them, all models under one of them, and models that have just been added.
    """
    layouts = [small_layout(name, info) for name, info in COMPARED]
    for model in (*PUBLISHED, *ADDED, "whole resnet50"):
        quick = model in ("toy", "gpt2", *ADDED)
        for layout in layouts:
            rest = not quick and layout.strategy != "pipe_ddp"
            yield cell(model, layout, slow=rest or model.startswith("whole"))


def layouts() -> Iterable[Cell]:
    """The toy and GPT-2 under every schedule, order of ranks, partition and number of replicas."""
    yield cell("gpt2", Layout("single", chunks=8))
    yield cell("toy", Layout("model_parallel", pp=3, chunks=4))
    yield cell("toy", Layout("pipe_ddp", dp=2, pp=3, chunks=3, schedule="1f1b"))
    yield cell("toy", Layout("pipelined", pp=2))
    yield cell("toy", Layout("pipelined", pp=2, chunks=4, balance=(1, 2)))
    # Five rows for three ranks.
    yield from (cell("toy", Layout(name, dp=3, pp=pp, chunks=2)) for name, pp in (("fsdp", 1), ("pipe_fsdp", 2)))
    yield cell("gpt2", Layout("model_parallel", pp=4, chunks=4))
    yield cell("gpt2", Layout("ddp", dp=4, chunks=2), slow=True)
    for s in SCHEDULES:
        yield cell("gpt2", Layout("pipe_ddp", dp=2, pp=2, chunks=4, schedule=s))
    for s in ("gpipe", "1f1b"):
        yield cell("gpt2", Layout("pipe_ddp", dp=2, pp=4, chunks=4, schedule=s), slow=True)
    for s in ("interleaved_1f1b", *SPLIT):
        yield cell("gpt2", Layout("pipelined", pp=2, chunks=8, schedule=s), slow=s != SPLIT[0])
    # Eight stages: of the language models, one that has as many layers.
    yield cell("llama", Layout("pipelined", pp=4, chunks=8, schedule="interleaved_1f1b"), slow=True)
    yield cell("llama", Layout("pipe_ddp", dp=2, pp=4, chunks=4, schedule="interleaved_1f1b"), slow=True)
    yield cell("gpt2", Layout("pipe_ddp", dp=4, pp=2, chunks=2, schedule="1f1b"), slow=True)
    yield cell("gpt2", Layout("pipe_ddp", dp=2, pp=2, chunks=4, schedule="1f1b", order="pp_dp"))
    yield cell("gpt2", Layout("pipelined", pp=2, chunks=4, schedule="1f1b", balance="size"))
    yield cell("gpt2", Layout("pipe_ddp", dp=2, pp=2, chunks=4), precision="fp64", slow=True)
    # Images in channels_last cross the first two borders, what a pooling flattened the third.
    for s in ("interleaved_1f1b", "planned"):
        layout = Layout("pipelined", pp=2, chunks=4, schedule=s, balance=(5, 2, 3, 1))
        yield cell("resnet50", layout, slow=s == "planned")


def shared() -> Iterable[Cell]:
    """Parameters, gradients and optimizer state that replicas share."""
    yield cell("gpt2", Layout("fsdp", dp=4, chunks=2), slow=True)
    yield cell("gpt2", Layout("fsdp", dp=2, chunks=4, reshard=False))
    yield cell("gpt2", Layout("hsdp", dp=4, chunks=2, shard=2, reshard=False), slow=True)
    for s in ("interleaved_1f1b", *SPLIT):
        yield cell("gpt2", Layout("pipe_fsdp", dp=2, pp=2, chunks=4, schedule=s), slow=s == "planned")
    yield cell("gpt2", Layout("pipe_fsdp", dp=2, pp=2, chunks=4, schedule="1f1b", reshard=True, order="pp_dp"))
    looped = Layout("pipe_fsdp", dp=2, pp=2, chunks=4, schedule="interleaved_1f1b")
    for layout in (Layout("fsdp", dp=2, chunks=4), looped):
        yield cell("gpt2", layout, recompute=True, wanted=RECIPES["gpt2"], slow=layout is looped)


def cut() -> Iterable[Cell]:
    """Layers that ranks share, with and without the sequence divided, alone and under every other strategy."""
    exact = {"precision": "fp64"}
    for model in ("gpt2", "llama", "transformer"):
        yield cell(model, Layout("tensor", tp=2, chunks=2), slow=model == "llama", **exact)
        yield cell(model, Layout("tensor", tp=2, chunks=2, sequence=True), **exact)
        others = {"slow": model != "gpt2", **exact}
        yield cell(model, Layout("ddp", dp=2, tp=2, chunks=2, sequence=True), **others)
        yield cell(model, Layout("fsdp", dp=2, tp=2, chunks=2), **others)
        pipelined = Layout("pipelined", tp=2, pp=2, chunks=4, schedule="1f1b", sequence=True)
        yield cell(model, pipelined, **others)
        for s in ("gpipe", "interleaved_1f1b", *SPLIT):
            for name in ("pipe_ddp", "pipe_fsdp"):
                fast = (model, name, s) == ("gpt2", "pipe_ddp", SPLIT[0])  # eight ranks take long
                layout = Layout(name, dp=2, tp=2, pp=2, chunks=4, schedule=s, sequence=s != "gpipe")
                yield cell(model, layout, **{**others, "slow": not fast})
    for sequence in (False, True):
        yield cell("perceptrons", Layout("tensor", tp=2, chunks=2, sequence=sequence), **exact)
        yield cell("transformers", Layout("tensor", tp=2, chunks=2, sequence=sequence))
        layout = Layout("pipe_fsdp", dp=2, tp=2, pp=2, chunks=4, schedule="1f1b", sequence=sequence)
        yield cell("transformers", layout, slow=True)
        yield cell("transformers", replace(layout, strategy="pipelined", dp=1), slow=not sequence)
    yield cell("transformers", Layout("tensor", tp=4))
    yield cell("perceptrons", Layout("pipelined", tp=2, pp=3, chunks=2, sequence=True), **exact)
    yield cell("gpt2", Layout("hsdp", dp=4, tp=2, shard=2, sequence=True), slow=True, **exact)
    yield cell("gpt2", Layout("tensor", tp=4, sequence=True), **exact)
    # Two heads of keys for four ranks.
    yield cell("llama", Layout("tensor", tp=4), slow=True, **exact)
    yield cell("llama", Layout("tensor", tp=4, sequence=True), lora=("q_proj", "k_proj", "o_proj"), slow=True, **exact)
    yield cell("gpt2", Layout("pipelined", tp=2, pp=2, chunks=4, schedule="1f1b"), padded=True, slow=True, **exact)
    yield cell("gpt2", Layout("pipe_ddp", dp=2, tp=2, pp=2, chunks=2, order="pp_dp"), **exact)
    for sequence in (False, True):
        layout = Layout("tensor", tp=2, chunks=2, sequence=sequence)
        yield cell("gpt2", layout, recompute=True, slow=not sequence, **exact)
        for model in ("gpt2", "llama"):  # without dropout a recomputation ends inside a region
            yield cell(model, layout, recompute=True, dropout=0.0, slow=model == "llama" or sequence, **exact)
        yield cell("gpt2", layout, padded=True, slow=not sequence, **exact)
        yield cell("gpt2", layout)
        yield cell("gpt2", layout, 5e-2, precision="bf16", reference=Layout("single", chunks=2), slow=not sequence)
        yield cell("gpt2", layout, lora=("c_attn", "c_proj"), **exact)
        yield cell("llama", layout, lora=("q_proj", "k_proj", "down_proj"), slow=True, **exact)
    for s in ("1f1b", SPLIT[0]):
        layout = Layout("pipe_fsdp", dp=2, tp=2, pp=2, chunks=4, schedule=s, sequence=True)
        yield cell("gpt2", layout, lora=("h.0.attn.c_attn",), slow=True, **exact)


# In fp64, transformers' norms compute in float32 all the same: a last bit may fall on the other side there. One of 6e-8
# in a token's hidden state moves all its logits, where losses and weights are means over many.
IN_PART_FP32 = {"tolerance": 1e-9, "outputs": 1e-6}


def context() -> Iterable[Cell]:
    """Sequences that ranks share, in each way, alone and under every other strategy."""
    exact = {"tolerance": 1e-12, "precision": "fp64"}
    for model in ("gpt2", "llama", "transformer", "transformers"):
        for way, cp in product(WAYS, (2, 4)):
            if way == "ulysses" and cp == 4 and model != "gpt2":
                continue  # they have two heads of keys
            quick = cp == 2 and (model == "gpt2" or way == WAYS[len(model) % 3])
            near = {**exact, **IN_PART_FP32} if model == "transformers" else exact
            yield cell(model, Layout("context", cp=cp, context=way, chunks=2), slow=not quick, **near)
    for i, way in enumerate(WAYS):
        beside = {"cp": 2, "context": way}
        yield cell("gpt2", Layout("ddp", dp=2, chunks=2, **beside), slow=i != 0, **exact)
        yield cell("gpt2", Layout("fsdp", dp=2, chunks=2, **beside), slow=i != 1, **exact)
        yield cell("gpt2", Layout("tensor", tp=2, chunks=2, **beside), slow=i != 2, **exact)
        yield cell("gpt2", Layout("tensor", tp=2, sequence=True, **beside), slow=i != 0, **exact)
        pipelined = Layout("pipelined", pp=2, chunks=4, schedule="1f1b", **beside)
        yield cell("gpt2", pipelined, slow=i != 2, **exact)
        for s in ("gpipe", "interleaved_1f1b", *SPLIT):
            for name in ("pipe_ddp", "pipe_fsdp"):
                yield cell("gpt2", Layout(name, dp=2, pp=2, chunks=4, schedule=s, **beside), slow=True, **exact)
        yield cell("gpt2", replace(pipelined, tp=2, sequence=True), slow=True, **exact)
        yield cell("gpt2", Layout("hsdp", dp=4, shard=2, **beside), slow=True, **exact)
        alone = Layout("context", chunks=2, **beside)
        yield cell("gpt2", alone, recompute=True, slow=i != 2, **exact)
        yield cell("llama", alone, recompute=True, slow=True, **exact)
        yield cell("gpt2", alone, padded=True, slow=i != 0, **exact)
        yield cell("gpt2", alone, lora=("c_attn", "c_proj"), slow=i != 1, **exact)
        yield cell("llama", alone, lora=("k_proj",), slow=True, **exact)
        yield cell("gpt2", alone, widths=(16, 32), slow=i != 2, **exact)
        yield cell("gpt2", alone, slow=True)
        yield cell("gpt2", alone, 5e-2, precision="bf16", reference=Layout("single", chunks=2), slow=True)
    for way, layout in {
        "ulysses": Layout("ddp", dp=2),
        "ring": Layout("fsdp", dp=2),
        "gather": Layout("pipelined", pp=2, chunks=4, schedule="1f1b"),
    }.items():
        yield cell("gpt2", replace(layout, cp=4, context=way), slow=True, **exact)
    yield cell("gpt2", Layout("tensor", tp=2, sequence=True, cp=4, context="ring"), slow=True, **exact)


def experts() -> Iterable[Cell]:
    """Experts that replicas share, with losses of their balance, alone and under every other strategy."""
    exact = {"tolerance": 1e-12}
    yield cell("moe", Layout("expert", dp=2, ep=2, chunks=2), **exact)
    yield cell("moe", Layout("expert", dp=4, ep=4), recompute=True, slow=True, **exact)
    yield cell("moe", Layout("ddp", dp=4, ep=2), slow=True, **exact)
    yield cell("moe", Layout("ddp", dp=2, ep=2, tp=2, sequence=True), slow=True, **exact)
    yield cell("moe", Layout("fsdp", dp=4, ep=2, chunks=2), slow=True, **exact)
    yield cell("moe", Layout("hsdp", dp=4, ep=2, shard=2), slow=True, **exact)
    for name, s in product(("pipe_ddp", "pipe_fsdp"), ("1f1b", *SPLIT)):
        slow = (name, s) != ("pipe_ddp", SPLIT[0])
        yield cell("moe", Layout(name, dp=2, ep=2, pp=2, chunks=4, schedule=s), slow=slow, **exact)
        yield cell("moe", Layout(name, dp=4, ep=2, pp=2, chunks=2, schedule=s), slow=True, **exact)
    for way in WAYS:
        beside = {"cp": 2, "context": way, "ep": 2}
        yield cell("moe", Layout("ddp", dp=2, **beside), slow=True, **exact)
        yield cell("moe", Layout("fsdp", dp=4, **beside), slow=True, **exact)
        yield cell("moe", Layout("pipe_ddp", dp=2, pp=2, chunks=2, **beside), slow=True, **exact)
    for layout in (Layout("fsdp", dp=4), Layout("ddp", dp=4, tp=2), Layout("pipe_ddp", dp=4, pp=2, chunks=2)):
        yield cell("moe", replace(layout, ep=4), slow=True, **exact)
    yield cell("moe", Layout("ddp", dp=2, ep=2), padded=True, slow=True, **exact)
    yield cell("moe", Layout("fsdp", dp=2, ep=2), lora=("q_proj", "o_proj"), slow=True, **exact)


def context_and_experts() -> Iterable[Cell]:
    """Sequences and experts that ranks share, four processes and eight; dropout is that of adapters."""
    exact = {"tolerance": 1e-12}
    two, four = {"dp": 2, "ep": 2, "chunks": 2}, {"dp": 4, "ep": 4, "chunks": 2}
    for i, way in enumerate(WAYS):
        both = {"cp": 2, "context": way}
        layout = Layout("expert", **two, **both)
        yield cell("moe", Layout("context", chunks=2, **both), slow=i != 1, **exact)
        yield cell("moe", layout, recompute=True, padded=True, slow=i != 2, **exact)
        yield cell("moe", layout, lora=("q_proj", "shared_experts.up_proj"), slow=True, **exact)
        yield cell("moe", layout, widths=(16, 32), recompute=True, slow=True, **exact)
        yield cell("mixture", layout, slow=True, **IN_PART_FP32)
        yield cell("moe", Layout("expert", **four, **both), slow=True, **exact)
        yield cell("moe", Layout("hsdp", shard=2, **{**four, "ep": 2}, **both), slow=True, **exact)
        staged = Layout("pipe_fsdp", pp=2, schedule="1f1b", **two, **both)
        yield cell("moe", staged, slow=True, **exact)
        yield cell("moe", replace(staged, chunks=4, schedule=SPLIT[i % len(SPLIT)]), slow=True, **exact)
        if way != "ulysses":  # which cannot divide two heads of keys further
            yield cell("moe", Layout("ddp", cp=4, context=way, **two), slow=True, **exact)
            yield cell("moe", Layout("ddp", tp=2, **two, **both), recompute=True, slow=True, **exact)
            yield cell("moe", Layout("fsdp", tp=2, sequence=True, **two, **both), slow=True, **exact)


def sent() -> Iterable[Cell]:
    """What replicas send each other: rounded, in groups first, in small buckets."""
    yield cell("gpt2", Layout("ddp", dp=2, chunks=2, comm_hook="bf16"), 2e-2, rounded=1e-6)
    layout = Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="1f1b", comm_hook="fp16")
    yield cell("gpt2", layout, 2e-3, rounded=1e-6)
    grouped = {"comm_hook": "hierarchical"}
    yield cell("gpt2", Layout("ddp", dp=4, shard=2, **grouped))
    yield cell("gpt2", Layout("ddp", dp=2, chunks=2, **grouped))  # one node: there is nothing between nodes
    yield cell("gpt2", Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="planned", **grouped), slow=True)
    for group in (2, 1):  # with one replica in a group, all that is sent is sent between groups
        yield cell("gpt2", Layout("ddp", dp=4, shard=group, comm_hook="hierarchical_bf16"), 2e-2, rounded=1e-6)
    for hook, tolerance in (("none", 1e-5), ("bf16", 2e-2)):
        layout = Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="interleaved_zero_bubble", comm_hook=hook)
        yield cell("gpt2", layout, tolerance, bucket_mb=0.05, wanted=RECIPES["gpt2"], slow=hook != "none")


def widths() -> Iterable[Cell]:
    """Batches whose width changes from step to step and comes back, each with a sample of padding."""
    changing = {"widths": (8, 32, 16), "steps": 4, "padded": True, "precision": "fp64"}
    for s in SCHEDULES:
        more = {**changing, "steps": 4 + (s == "planned")}  # planned again after 4 steps
        yield cell("gpt2", Layout("pipelined", pp=2, chunks=4, schedule=s), **more, slow=s != "planned")
        for name in ("pipe_ddp", "pipe_fsdp"):
            slow = (name, s) != ("pipe_fsdp", SPLIT[0])
            yield cell("gpt2", Layout(name, dp=2, pp=2, chunks=2, schedule=s), **more, slow=slow)
    for s in ("1f1b", "interleaved_zero_bubble"):
        wanted = replace(RECIPES["gpt2"], **changing)
        yield cell(
            "gpt2", Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule=s), **changing, recompute=True, wanted=wanted,
            slow=True,
        )  # fmt: skip


def unusual() -> Iterable[Cell]:
    """An ordinary nn.Sequential, models that pass tuples on, and BatchNorm over all replicas."""
    for layout in (
        Layout("model_parallel", pp=2, chunks=4),
        Layout("ddp", dp=2, chunks=2),
        Layout("fsdp", dp=2, chunks=2),
        Layout("fsdp", dp=2, chunks=2, reshard=False),
        *(Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule=s) for s in ("1f1b", "interleaved_zero_bubble")),
        Layout("pipe_fsdp", dp=2, pp=2, chunks=2),
    ):
        yield cell("sequential", layout)
    yield cell("sequential", Layout("single", chunks=4), recompute=True, wanted=RECIPES["sequential"])
    for layout in (
        Layout("single", chunks=2), Layout("ddp", dp=2), Layout("fsdp", dp=2, chunks=2),
        Layout("pipelined", pp=2, chunks=4), Layout("pipe_fsdp", dp=2, pp=2, chunks=2, schedule=SPLIT[0]),
    ):  # fmt: skip
        yield cell("in place", layout, recompute=layout.strategy != "pipe_fsdp", wanted=RECIPES["in place"])
    yield cell("in place", Layout("fsdp", dp=2, chunks=2))
    for name in ("ddp", "fsdp"):
        wanted = replace(RECIPES["sequential sometimes"], fused=True)
        yield cell("sequential sometimes", Layout(name, dp=2), reference=Layout("single", chunks=2), wanted=wanted)
    for model, schedules in (("unet", ("looped_bfs", *SPLIT)), ("translator", ("gpipe", "interleaved_1f1b"))):
        yield cell(model, Layout("model_parallel", pp=3, chunks=4), slow=model == "unet")
        yield cell(model, Layout("ddp", dp=2, chunks=2), slow=model == "unet")
        for s in schedules:
            yield cell(model, Layout("pipelined", pp=2, chunks=4, schedule=s), slow=s == "gpipe")
        yield cell(model, Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="interleaved_1f1b"))
        for balance in ((1, 5), (5, 1)):
            yield cell(model, Layout("pipelined", pp=2, chunks=4, schedule="1f1b", balance=balance))
    yield cell("torch's encoder", Layout("pipelined", pp=2, chunks=4))
    for s in SPLIT:
        yield cell("passed on", Layout("pipelined", pp=2, chunks=4, schedule=s))
        yield cell("passed on", Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule=s))
    # The second of four stages embeds the target's tokens, and passes them on beside what the encoder gave: a weight
    # that reaches a border past all inputs.
    for s in SPLIT:
        layout = Layout("pipelined", pp=2, chunks=4, schedule=s, balance=(1, 2, 1, 2))
        yield cell("translator", layout, slow=s == "planned")
    # Global batch 32: replica 0 works on samples 0-7 while replica 1 works on 16-23, so one process needs the samples
    # in that order.
    interleaved = {"reference": Layout("single", chunks=2), "wanted": replace(RECIPES["convnet"], interleaved=True)}
    for recompute, layout in enumerate((Layout("ddp", dp=2, chunks=2), Layout("pipe_ddp", dp=2, pp=2, chunks=2))):
        yield cell("convnet", layout, sync_batchnorm=True, recompute=bool(recompute), **interleaved)


def adapters() -> Iterable[Cell]:
    """LoRA: frozen layers before, between and behind those that are trained, in stages of their own and not."""
    everywhere, first, last = ("c_attn", "c_proj"), ("h.0.attn.c_attn",), ("h.3.mlp.c_proj",)
    for name, info in COMPARED:
        for targets in (everywhere, first, last):
            # With stages and replicas or shards, the schedule whose backward has two parts is quick: below.
            slow = targets != everywhere or name in ("hsdp", "pipe_ddp", "pipe_fsdp")
            yield cell("gpt2", small_layout(name, info), lora=targets, slow=slow)
        for target in ("net1", "net2"):
            yield cell("toy", small_layout(name, info), lora=(target,), slow=not info.stages)
    for s in SCHEDULES:
        rest = {"slow": s != SPLIT[0]}  # where a backward in two parts may meet nothing that is trained
        yield cell("gpt2", Layout("pipe_ddp", dp=2, pp=2, chunks=4, schedule=s), lora=everywhere, **rest)
        yield cell("gpt2", Layout("pipe_fsdp", dp=2, pp=2, chunks=4, schedule=s), lora=first, **rest)
        yield cell("gpt2", Layout("pipe_fsdp", dp=2, pp=2, chunks=4, schedule=s), lora=last, **rest)
        yield cell("gpt2", Layout("pipe_ddp", dp=2, pp=2, chunks=4, schedule=s), lora=("h.2.mlp.c_fc",), **rest)
        own = ("decoder1.attention.query",)
        yield cell("translator", Layout("pipelined", pp=2, chunks=4, schedule=s), lora=own, slow=True)
    yield cell("gpt2", Layout("fsdp", dp=2, chunks=4, reshard=False), lora=last)
    yield cell("gpt2", Layout("pipe_ddp", dp=2, pp=2, chunks=4, schedule="1f1b"), lora=first, recompute=True)
    yield cell("gpt2", Layout("ddp", dp=2, chunks=2, comm_hook="hierarchical"), lora=first)
    others = {"transformer": ("linear1", "out_proj"), "classifier": ("fc2.1", "fc4"), "sequential": ("used", "6")}
    for model, targets in others.items():
        for layout in (Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="1f1b"), Layout("fsdp", dp=2, chunks=2)):
            yield cell(model, layout, lora=targets, slow=layout.strategy == "fsdp" and model != "sequential")
    for s in ("1f1b", "interleaved_zero_bubble"):
        layout = Layout("pipe_fsdp", dp=2, pp=2, chunks=4, schedule=s)
        yield cell("llama", layout, lora=("q_proj", "down_proj"), slow=True)


# The ways of running that GPUs have: one process's, and these.
ONE_GPU = Layout("single", chunks=4)
GPU_LAYOUTS = (
    Layout("model_parallel", pp=2, chunks=4),
    Layout("ddp", dp=2, chunks=2),
    Layout("pipelined", pp=2, chunks=4, schedule="1f1b"),
    Layout("pipe_ddp", dp=2, pp=2, chunks=2),
)


def on_gpus(model: str, **changes) -> Recipe:
    """A short training of ``model`` on GPUs."""
    batch = {"convnet": 32}.get(model, 8)
    return replace(RECIPES[model], **{"global_batch": batch, "steps": 3, "eval_every": 3, "device": "cuda", **changes})


def gpu_cell(model: str, layout: Layout, tolerance: float = 1e-5, wanted: dict | None = None, **more) -> Cell:
    """A cell on GPUs; ``wanted`` changes the recipe of what it is compared with, ``more`` is as in ``cell``."""
    own = {key: more.pop(key) for key in ("reference", "slow") if key in more}
    recipe = on_gpus(model, **more)
    marks = (pytest.mark.slow,) if own.pop("slow", False) else ()
    own = {"reference": ONE_GPU, "wanted": replace(recipe, **(wanted or {})), **own}
    return Cell(recipe, layout, 1e-10 if recipe.precision == "fp64" else tolerance, device="cuda", marks=marks, **own)


def pretended() -> Iterable[Cell]:
    """Every model under every way of running on pretended GPUs. They are slow: most are left to `pytest -m slow`."""
    for model in PUBLISHED:
        for layout in GPU_LAYOUTS:
            yield gpu_cell(model, layout, slow=model != "gpt2" or layout.strategy != "ddp")
        # In attention a GPU draws other numbers.
        yield gpu_cell(model, ONE_GPU, wanted={"device": "cpu"}, dropout=0.0, slow=model != "gpt2")
    for layout in GPU_LAYOUTS:
        rounded = {"precision": "bf16", "reference": layout.same_cut, "slow": layout.strategy != "ddp"}
        yield gpu_cell("gpt2", layout, 2e-2, **rounded)
    yield gpu_cell("gpt2", layout, 2e-2, **{**rounded, "precision": "fp16"}, loss_scale=1024.0)
    for s in SCHEDULES:
        yield gpu_cell("gpt2", Layout("pipelined", pp=2, chunks=4, schedule=s), steps=5, slow=True)
    for tensor in (Layout("tensor", tp=2, chunks=4), Layout("ddp", dp=2, tp=2, chunks=2, sequence=True)):
        yield gpu_cell("gpt2", tensor, dropout=0.0, slow=tensor.dp == 1)
        yield gpu_cell("llama", tensor, slow=True)
    # Its threads know nothing of the run's autocast, its copies of the head share what the head remembers, and each
    # drops out of its own samples what one GPU drops out of them.
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 2e-2)):
        slow = precision == "fp32"
        yield gpu_cell("gpt2", Layout("data_parallel", chunks=4), tolerance, precision=precision, slow=slow)
    for hook, tolerance in (("none", 1e-5), ("bf16", 1e-3)):
        layout = Layout("ddp", dp=2, chunks=2, comm_hook=hook)
        on_cpus = {"reference": layout, "wanted": {"device": "cpu"}, "slow": hook != "none"}
        yield gpu_cell("convnet", layout, tolerance, sync_batchnorm=True, **on_cpus)


CELLS = [
    *published(), *layouts(), *shared(), *cut(), *context(), *experts(), *context_and_experts(), *sent(),
    *widths(), *unusual(), *adapters(), *pretended(),
]  # fmt: skip
