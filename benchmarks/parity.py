"""The promise in numbers: every model under every strategy, compared with its own ``parallel=single``.

    python -m benchmarks parity            measures (59 runs of the command line), writes results/parity.csv
    python -m benchmarks readme            puts the results into README.md and docs/

The models are those of conf/model and the strategies those of conf/parallel. Each run is a real command line, with SGD;
the table has the largest relative difference of any step. ``single`` has one micro-batch, but under BatchNorm those of
the others. The language models train with dropout and clipping, and GPT-2 under every schedule too.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator

from omegaconf import OmegaConf

from benchmarks.command_line import ROOT, read_metrics, run_directory
from benchmarks.table import Benchmark, Table

SINGLE = ["parallel=single"]
MICROBATCHES = 4
NORMALISED = ("resnet50", "convnet")  # by BatchNorm, over the micro-batch
COMMON = [
    "device=cpu", "optim=sgd", "optim.momentum=0.9", "scheduler=constant", "train.epochs=null", "train.steps=20",
    "train.global_batch_size=16", "train.precision=fp32", "train.eval_every=10", "train.eval_batches=2",
    "train.checkpoint_every=null", "logger=none", "parallel.threads=1",
]  # fmt: skip
# Small sizes, and a learning rate at which the model learns; a model that is not named here trains as it comes.
RECIPES = {
    "toy": ["optim.lr=0.02"],
    # Chaotic: even in float64 a difference in the last bit grows tenfold at every step, so few steps are compared.
    "resnet50": [
        "data.image_size=64", "data.samples=160", "optim.lr=1e-3", "optim.momentum=0", "train.precision=fp64",
        "train.steps=5", "train.eval_batches=1",
    ],
    "transformer": [
        "model.d_model=32", "model.d_hid=64", "model.n_head=2", "model.n_layer=3", "data.seq_len=32", "optim.lr=0.2",
        "train.grad_clip=0.5",
    ],
    "gpt2": ["model.size=tiny", "model.dropout=0.1", "data.seq_len=64", "optim.lr=0.1", "train.grad_clip=0.5"],
    # Seven plain layers learn nothing from 20 different batches, but they do from 20 times the same.
    "classifier": ["model.image_size=16", "optim.lr=0.2", "train.overfit=true"],
    "convnet": ["model.image_size=12", "optim.lr=0.02"],
}  # fmt: skip
MORE_LAYOUTS = {
    "gpt2": [
        ["parallel=model_parallel", "parallel.pp=4"],
        ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=gpipe"],
        ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=interleaved_1f1b"],
        ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=looped_bfs"],
        ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=interleaved_zero_bubble"],
        ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=planned"],
        ["parallel=pipelined", "parallel.pp=4", "parallel.schedule=1f1b"],
        ["parallel=pipe_ddp", "parallel.dp=2", "parallel.pp=2", "parallel.schedule=gpipe"],
        ["parallel=pipe_ddp", "parallel.dp=2", "parallel.pp=2", "parallel.schedule=interleaved_1f1b"],
        ["parallel=pipe_ddp", "parallel.dp=2", "parallel.pp=2", "parallel.schedule=planned"],
        ["parallel=pipe_fsdp", "parallel.dp=2", "parallel.pp=2", "parallel.schedule=interleaved_zero_bubble"],
    ]
}


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of all models, of the first one if ``quick``."""
    rows = []
    recipes = {model: RECIPES.get(model, []) for model in models()[: 1 if chosen.quick else None]}
    for model, recipe in recipes.items():
        settings = merged(COMMON, [f"model={model}"], recipe)
        reference = None
        for layout in [SINGLE, *layouts(), *MORE_LAYOUTS.get(model, [])]:
            alone = reference is None and model not in NORMALISED
            result = trained(settings, layout, 1 if alone else MICROBATCHES)
            reference = reference or result
            about = {"model": model, "precision": settings["train.precision"], "run": " ".join(layout)}
            rows.append(about | compare(result, reference))
            print(*rows[-1].values(), file=sys.stderr)
    words = {model: " ".join(recipe) for model, recipe in recipes.items()}
    yield Table("parity", rows, {"microbatches": MICROBATCHES, "every_model": " ".join(COMMON), **words})


def merged(*lists: list[str]) -> dict[str, str]:
    """Return the overrides by their keys; the last one of a key counts."""
    return dict(word.split("=") for words in lists for word in words)


def trained(settings: dict[str, str], layout: list[str], microbatches: int) -> list[dict]:
    """Return the records of a run whose ``microbatches`` are dealt to the replicas of ``layout``."""
    chunks = microbatches // int(merged(layout).get("parallel.dp", 1))
    words = [f"{key}={value}" for key, value in settings.items()]
    with run_directory(*words, *layout, f"parallel.chunks={chunks}") as folder:
        return read_metrics(folder)


def models() -> list[str]:
    """Return the names of all models: those with a recipe, then the others of conf/model."""
    return list(dict.fromkeys([*RECIPES, *sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))]))


def layouts() -> list[list[str]]:
    """Return one layout for each strategy of conf/parallel that has replicas, stages or both.

    A strategy has those for which its YAML file sets ``dp`` or ``pp``; it is a pipeline if the file sets ``chunks``,
    and has groups of replicas if it sets ``shard``.
    """
    found = []
    for path in sorted((ROOT / "conf" / "parallel").glob("*.yaml")):
        keys = OmegaConf.load(path).keys()
        sizes = {"dp": 4 if "shard" in keys else 2, "pp": 2, "shard": 2}
        words = [f"parallel.{key}={size}" for key, size in sizes.items() if key in keys]
        if words:
            found.append([f"parallel={path.stem}", *words, *["parallel.schedule=1f1b"] * ("chunks" in keys)])
    return sorted(found, key=len)


def compare(result: list[dict], reference: list[dict]) -> dict:
    """Return the first and last loss, and the largest relative differences from ``reference`` over all steps."""
    losses = [record["loss"] for record in result if "loss" in record]

    def difference(key: str) -> str:
        pairs = [(a[key], b[key]) for a, b in zip(result, reference, strict=True) if key in a]
        return f"{max(abs(a - b) / abs(b) for a, b in pairs):.1e}"

    return {
        "steps": len(losses),
        "first loss": f"{losses[0]:.3f}",
        "last loss": f"{losses[-1]:.3f}",
        "loss": difference("loss"),
        "gradient norm": difference("grad_norm"),
        "validation loss": difference("val_loss"),
    }


BENCHMARK = Benchmark(measure)
