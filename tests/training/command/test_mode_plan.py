"""What a run is before it starts: how long, in which pieces, on which layout and with how much memory (mode=plan)."""

import re
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from commandline import train
from composed import config, execute

from common.errors import UserError
from models.chain import Chain, LayerSpec
from models.losses import SquaredError, Sums, gather
from training.run.prepare import describe, prepare

TINY = ["model=gpt2", "model.size=tiny"]


@pytest.fixture
def plan(tmp_path, capsys):
    """``plan("parallel=ddp")``: what mode=plan prints."""

    def said(*words):
        execute(config("mode=plan", *words), tmp_path, None)
        return capsys.readouterr().out

    yield said
    assert list(tmp_path.iterdir()) == []


def table(said):
    """The memory table: one dict of MiB a rank."""
    lines = said.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("rank "))
    names = lines[start].split()[1:-1]
    rows = [line.replace(",", "").split() for line in lines[start + 1 :] if re.match(r" *\d", line)]
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    return [dict(zip(names, map(int, row[1:]), strict=True)) for row in rows]


def test_the_plan_of_gpt2_shows_the_layout_the_batch_cut_the_bubble_and_the_memory_of_every_rank(plan):
    """The default one, 124M, on two stages x two replicas."""
    said = plan("parallel=pipe_ddp", "model=gpt2", "train.precision=fp32")
    assert "gpt2: 124,475,904 parameters   pipe_ddp: 4 processes on cpu, fp32" in said
    assert "the documentation of torch" in said
    assert re.search(r"unigram entropy [56]\.\d+ nats: the loss that counting its tokens reaches", said)
    assert re.search(r"global batch 16 x \d+ tokens = 2 replicas x 4 micro-batches of 2", said)
    assert "schedule gpipe, ideal bubble 20.0%" in said
    stages = re.findall(r"stage (\d) on ranks ([\d,]+) +([\d,]+)  (.*)", said)
    assert [(number, ranks, rest) for number, ranks, _, rest in stages] == [
        ("0", "0,2", "embedding … h.5 (7 layers)  50.2% of what the stages hold"),
        ("1", "1,3", "h.6 … head (7 layers)  49.8% of what the stages hold"),
    ]
    whole = 124_475_904 + 50304 * 768  # the head and the embedding lie on both stages
    assert sum(int(parameters.replace(",", "")) for _, _, parameters, _ in stages) == whole
    rows = table(said)
    assert rows[:2] == rows[2:], "replicas need the same"
    for row in rows:
        assert row["total"] == pytest.approx(sum(v for name, v in row.items() if name != "total"), abs=3)
        assert row["gradients"] == row["weights"] == pytest.approx(whole / 2 * 4 / 2**20, rel=0.01)
        assert row["optimizer"] == pytest.approx(2 * row["weights"], abs=1)  # AdamW's two moments
    together = float(re.search(r"all ranks together: ([\d.]+) GiB", said)[1])
    assert together == pytest.approx(sum(row["total"] for row in rows) / 1024, abs=0.1)


@pytest.mark.parametrize("more, sums", [([], 4), (["train.activation_checkpointing=true"], 6)])
def test_the_plan_shows_what_a_layer_sends_along_an_axis(plan, more, sums):
    said = plan(*TINY, "parallel=tensor", "data.seq_len=64", "train.global_batch_size=8", "train.precision=fp32", *more)
    size = sums * 8 * 64 * 64 * 4 / 2**20  # of two ranks, each sends as many bytes as it sums
    line = rf"along tensor each rank sends {size:.2f} MiB for layer h.\d and a micro-batch, forward and backward\n$"
    assert re.search(line, said)


def test_the_plan_of_a_job_counts_a_precision_that_is_not_known_as_fp32(plan):
    job = [*TINY, "launcher=slurm", "launcher.nodes=2", "launcher.gpus_per_node=1", "parallel=ddp"]
    said = plan(*job)
    assert "ddp: 2 processes on cpu, auto" in said
    assert table(said) == table(plan(*job, "train.precision=fp32"))


def test_the_plan_of_one_process_has_no_bubble_and_says_how_much_a_limited_evaluation_covers(plan):
    said = plan()
    assert "toy: 165 parameters   single: 1 process" in said
    assert "bubble" not in said and "evaluations" not in said and len(table(said)) == 1
    limited = plan("train.eval_batches=3", "train.global_batch_size=100")
    assert "evaluations: val 3 of 10 batches, test 3 of 10 batches, spread evenly" in limited


def test_the_plan_shows_the_shares_and_what_is_whole_during_a_step(plan, text):
    gpt2 = [*TINY, "model.n_layer=2", "model.n_embd=512", *text, "train.global_batch_size=8", "train.precision=fp32"]
    (one,) = table(plan(*gpt2))
    shares = table(plan(*gpt2, "parallel=fsdp", "parallel.dp=4"))
    assert "gathered" not in one and len(shares) == 4
    for share in shares:
        for kind in ("weights", "gradients", "optimizer"):
            assert share[kind] == pytest.approx(one[kind] / 4, abs=1)
        assert 0 < share["gathered"] <= 2 * one["weights"] + 2
    hybrid = table(plan(*gpt2, "parallel=hsdp", "parallel.dp=4", "parallel.shard=2"))
    assert hybrid[0]["weights"] == pytest.approx(one["weights"] / 2, abs=1)


def test_recomputed_activations_take_less(text, plan):
    words = [*TINY, "model.n_layer=4", "model.n_embd=256", *text, "data.seq_len=128", "train.global_batch_size=8"]
    kept, again = (table(plan(*words, f"train.activation_checkpointing={on}"))[0] for on in ("false", "true"))
    assert again["activations"] < kept["activations"] and again["weights"] == kept["weights"]


@pytest.mark.slow
def test_the_estimate_is_within_a_factor_of_two_of_what_a_run_takes(tmp_path, text, plan, tmp_path_factory):
    recipe = [
        *TINY, "model.n_layer=4", "model.n_embd=256", *text, "data.seq_len=128", "parallel=pipelined", "device=cpu",
        "train.precision=fp32", "train.steps=2", "train.eval_every=null", "train.checkpoint_every=null",
        "train.global_batch_size=8",
    ]  # fmt: skip
    rows = table(plan(*recipe))
    run = train([*recipe, "logger=none"], tmp_path_factory.mktemp("measured") / "run")
    assert run.code == 0, run.console
    for row, truth in zip(rows, run.summary["peak_memory_bytes"], strict=True):
        assert truth / 2 < row["total"] * 2**20 < truth * 2, rows
        assert row["total"] > 1.2 * row["process"], "the process alone is much of it: what the model adds is seen too"


# -- before that -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("datasets") is not None, reason="Hugging Face datasets is installed here")
def test_wikitext_without_a_folder_and_without_a_downloader_says_both_ways_out(tmp_path):
    with pytest.raises(UserError) as error:
        prepare(config(*TINY, "data=wikitext2", f"data.cache_dir={tmp_path}"))
    assert "data.root=" in str(error.value) and "pip install datasets" in str(error.value)


@pytest.mark.parametrize(
    "steps, epochs, expected",
    [(7, None, 7), (None, 2, 20), (7, 2, 7), (30, 2, 20), (None, 0.25, 3), (None, 1.01, 11), (1000, 0.1, 1)],
)
def test_a_run_ends_with_its_steps_or_its_epochs_whichever_comes_first(steps, epochs, expected):
    words = [f"train.{key}={'null' if n is None else n}" for key, n in (("steps", steps), ("epochs", epochs))]
    assert prepare(config("data.samples=80", "train.global_batch_size=8", *words)).total_steps == expected


def test_an_epoch_has_as_many_steps_as_whole_batches():
    setup = prepare(config("data.samples=1000", "train.global_batch_size=64", "train.epochs=2"))
    assert (setup.per_epoch, setup.total_steps) == (15, 30)


DDP, SYNCHRONIZED = "parallel=ddp parallel.dp=2", "parallel=ddp parallel.dp=2 parallel.sync_batchnorm=true"
NORMALIZED = {
    DDP: "of 32: the numbers of parallel=single parallel.chunks=2",
    SYNCHRONIZED: "of 64 (32 of each of 2 replicas): the numbers of parallel=single parallel.chunks=1",
    f"{SYNCHRONIZED} parallel.chunks=2": "of 32 (16 of each of 2 replicas): not the numbers of parallel=single "
    "parallel.chunks=2, where other samples meet",
    "parallel=single": None,
}


@pytest.mark.parametrize("words", NORMALIZED)
def test_the_plan_says_over_what_batchnorm_normalizes(words):
    setup = prepare(config("model=convnet", "train.global_batch_size=64", "device=cpu", *words.split()))
    said = NORMALIZED[words]
    assert setup.by_microbatch[1] == ([] if said is None else [f"BatchNorm over micro-batches {said}"])
    assert (said or "")[3:5] in setup.by_microbatch[0]


def having(setup, chain):
    """The setup with another model, examined."""
    setup = replace(setup, chain=chain)
    return replace(setup, plan=replace(setup.plan, **setup.examination.for_plan()))


class Passes(torch.nn.Linear):
    """Passes on a number beside its output: what ``number`` gives of its input."""

    def __init__(self, number):
        super().__init__(10, 5)
        self.number = number

    def forward(self, x):
        return super().forward(x), self.number(x)


class First(SquaredError):
    def __call__(self, output, targets, weights):
        return super().__call__(output[0], targets, weights)


class Contrast:
    metrics = ()

    def __init__(self, of=lambda features: features):
        self.of = of

    def __call__(self, output, targets, weights):
        x, y = self.of(output), self.of(targets)
        loss = torch.nn.functional.cross_entropy(x @ y.T, torch.arange(len(x)), reduction="sum")
        return Sums(loss, torch.tensor(len(x)))


class OwnSquaredError(SquaredError):
    def __call__(self, output, targets, weights):
        return super().__call__(output, targets, weights)


linear = partial(torch.nn.Linear, 10, 5)
WHOLE = {
    "contrastive": (linear, Contrast(), "the loss Contrast"),
    "gathered": (linear, Contrast(gather), None),
    "a sum": (linear, OwnSquaredError(), None),
    "an auxiliary loss": (lambda: Passes(lambda x: x.mean(0).square().sum()), First(), "layer only"),
    "a gathered one": (lambda: Passes(lambda x: gather(x).mean(0).square().sum()), First(), None),
    "a constant": (lambda: Passes(lambda x: x.new_zeros(()) + torch.arange(x.shape[1])), First(), None),
    "each with all": (lambda: Passes(lambda x: x @ x.T), First(), "layer only"),
}


@pytest.mark.parametrize("build, loss, said", WHOLE.values(), ids=WHOLE)
def test_the_plan_says_which_layers_and_losses_take_the_micro_batch_as_a_whole(build, loss, said):
    setup = prepare(config("train.global_batch_size=16", "device=cpu", "parallel=ddp", "parallel.dp=2"))
    mine = having(setup, Chain([LayerSpec("only", build)], loss=loss))
    line = f"{said} over micro-batches of 8: the numbers of parallel=single parallel.chunks=2"
    assert mine.by_microbatch == (("8", [line]) if said else (None, []))
    assert said is None or line in describe(mine)


class OwnDropout(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.1, self.training)


class Noisy(SquaredError):
    def __call__(self, output, targets, weights):
        return super().__call__(output + torch.randn_like(output), targets, weights)


def test_the_plan_names_layers_and_losses_that_draw_by_themselves():
    setup = prepare(config("train.global_batch_size=4", "device=cpu"))
    layers = [LayerSpec(f"h.{i}", lambda: OwnDropout(10, 10)) for i in range(5)]
    plain = [LayerSpec("last", lambda: torch.nn.Linear(10, 5))]
    for drawing, loss, said in (
        (layers[:1], SquaredError(), "layer h.0 draws by itself"),
        (layers, SquaredError(), "layers h.0, h.1, h.2 and 2 more draw by themselves"),
        (plain, Noisy(), "the loss Noisy draws by itself"),
        ([*layers[:2], *plain], Noisy(), "layers h.0, h.1 and the loss Noisy draw by themselves"),
    ):
        mine = having(setup, Chain(drawing, loss=loss))
        assert mine.by_microbatch == ("4", [f"numbers depend on the micro-batch (4 samples): {said}"])
        assert said in describe(mine)
