"""What one layout saved any other goes on from: the next losses are those of the uninterrupted single run."""

import json
from itertools import product

import pytest
from composed import LAYOUTS, losses, records, run_layout, saved
from tokenizer_folders import tokenizer_folder

NAMES = list(LAYOUTS)
RING = list(zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True))
SAVED, NEXT = 2, 4
COMMON = ["train.epochs=null", "train.global_batch_size=8", "train.precision=fp64", "train.eval_batches=2"]
COMMON += ["scheduler=constant", "optim=adamw", "optim.lr=1e-3"]


@pytest.fixture(scope="session")
def models(text, tmp_path_factory):
    """GPT-2, whose head is its embedding, at the other end of the pipeline; a network with running statistics."""
    gpt2 = ["model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=32", "model.dropout=0.1"]
    gpt2 += ["model.n_head=2", *COMMON]  # small: what is compared is the layouts
    folder = tmp_path_factory.mktemp("rows")
    (folder / "x.jsonl").write_text("".join(json.dumps({"text": "word " * (i * 7 % 64)}) + "\n" for i in range(200)))
    rows = ["data=jsonl", f"data.root={folder}/x.jsonl", f"data.cache_dir={folder}/cache", "data.seq_len=64"]
    # A few hundred tokens: with GPT-2's, the last layer took most of the time.
    rows += [f"data.tokenizer={tokenizer_folder(folder / 'tokenizer')}", "model.vocab_size=384"]
    return {
        "gpt2": [*gpt2, *text, "data.vocabulary=words", "model.vocab_size=384", "data.seq_len=16"],
        "gpt2 on rows": [*gpt2, *rows, "data.bucket_by_length=true"],
        "gpt2 on packed rows": [*gpt2, *rows, "data.packing=split"],
        "convnet": ["model=convnet", *COMMON],
    }


@pytest.fixture(scope="session")
def train(ranks, models, tmp_path_factory):
    """``train("gpt2", "ddp", …)``: the run's folder."""

    def begin(model, layout, *more):
        return run_layout(
            ranks, layout, tmp_path_factory.mktemp(f"{model}-{layout}".replace(" ", "-")), *models[model], *more
        )

    return begin


@pytest.fixture(scope="session")
def start(train):
    """``start("gpt2", "ddp")``: the folder of a run that has saved step 2. That of single went on to the end."""
    known = {}

    def get(model, layout):
        if (model, layout) not in known:
            end = SAVED + NEXT if layout == "single" else SAVED
            rhythm = [f"train.checkpoint_every={SAVED}", "train.keep_checkpoints=99", f"train.steps={end}"]
            known[model, layout] = train(model, layout, *rhythm)
        return known[model, layout]

    return get


CUT = [name for name, (_, words) in LAYOUTS.items() if any("tensor" in word or "tp=" in word for word in words)]


def marks(model, before, after):
    fast = model == "gpt2" and before == "pipe_ddp" and (before, after) in RING  # `pytest -m slow` has the rest
    return () if fast else (pytest.mark.slow,)


@pytest.mark.parametrize(
    "model, before, after",
    [
        pytest.param(model, *pair, marks=marks(model, *pair))
        for model, *pair in product(("gpt2", "convnet"), NAMES, NAMES)
        if model == "gpt2" or not {*pair} & {*CUT}  # whose layers are not cut
    ]
    # In the middle of an epoch whose batches differ in width.
    + [
        pytest.param("gpt2 on rows", "pipe_ddp", "pipelined", marks=pytest.mark.slow),
        pytest.param("gpt2 on rows", "single", "pipe_fsdp", marks=pytest.mark.slow),
        pytest.param("gpt2 on packed rows", "pipe_fsdp", "tensor", marks=pytest.mark.slow),
        pytest.param("gpt2 on packed rows", "pipelined", "ddp", marks=pytest.mark.slow),
    ],
)
def test_from_every_layout_to_every_other(start, train, model, before, after):
    single = start(model, "single")
    path = start(model, before) / "checkpoints" / f"step-{SAVED:08d}"
    rest = train(model, after, f"train.resume='{path}'", f"train.steps={SAVED + NEXT}")
    assert [line["step"] for line in records(rest) if "loss" in line] == list(range(SAVED + 1, SAVED + NEXT + 1))
    assert losses(rest) == pytest.approx(losses(single)[SAVED:], rel=1e-5)
    assert records(rest)[-1]["val_loss"] == pytest.approx(records(single)[-1]["val_loss"], rel=1e-5)
    for kind in ("model", "optimizer"):
        shapes = [{k: t.shape for k, t in saved(run, SAVED + NEXT, kind).items()} for run in (rest, single)]
        assert shapes[0] == shapes[1], "each tensor once, whatever the layout"
