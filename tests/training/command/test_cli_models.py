"""`python train.py`: the models under ranks of their own, one result however the ranks are started, and memory."""

import pytest
from commandline import ROOT, Started, free_port, train
from composed import QUIET, compose, config, execute, for_rank, losses, records, run, run_on_rank
from slow_cases import slow, with_slow

from training.reporting.console import number

REAL = ROOT.parent / "shared" / "data"
SHORT = ["logger=none", "device=cpu", "train.epochs=null"]

# What is typed, and the names of the layers at both ends of each stage.
RUNS = {
    "resnet50": (
        ["parallel=pipelined", "parallel.chunks=2", "train.global_batch_size=8"]
        + ["data.image_size=32", "data.samples=80"],
        [("conv1", "layer2.3"), ("layer3.0", "fc")],
    ),
    "transformer": (
        ["parallel=pipe_ddp", "parallel.dp=2", "parallel.pp=2", "parallel.comm_hook=bf16", "train.eval_batches=2"]
        + ["data.min_frequency=2", "model.d_model=32", "model.d_hid=64"],
        [("encoder", "layers.0"), ("layers.1", "decoder")],
    ),
    "classifier": (
        ["parallel=pipelined", "parallel.balance=[3,4]", "parallel.schedule=1f1b"],
        [("conv1", "conv3"), ("fc1", "fc4")],
    ),
    "convnet": (["parallel=model_parallel"], [("layer1", "layer2"), ("fc", "fc")]),
    "llama": (
        ["parallel=pipe_fsdp", "parallel.dp=2", "parallel.pp=2", "train.eval_batches=2", "data.vocabulary=words"]
        + ["model.n_embd=64", "model.head_dim=16", "model.mlp_width=128"],
        [("embedding", "layers.1"), ("layers.2", "head")],
    ),
    "gpt2": (["parallel=pipe_ddp", "parallel.chunks=4"], [("embedding", "h.2"), ("h.3", "head")]),
}
PROCESSES = {"model_parallel": 1, "ddp": 2, "pipelined": 2, "pipe_ddp": 4, "pipe_fsdp": 4}
METRIC = dict.fromkeys(("transformer", "gpt2", "llama"), "perplexity") | dict.fromkeys(
    ("classifier", "convnet"), "accuracy"
)


@pytest.mark.parametrize("model", with_slow(RUNS, ("resnet50", "transformer", "llama", "classifier", "convnet")))
def test_every_model_trains_under_ranks_of_its_own_and_says_how_good_it_is(model, cli, text, tmp_path):
    (words, spans), metric = RUNS[model], METRIC.get(model)
    data = text if model in ("transformer", "llama") else []
    fixed = [f"model={model}", *SHORT, "train.steps=3", "train.precision=fp32"]
    run = cli(*words) if model == "gpt2" else train([*fixed, *data, *words], tmp_path / "run")
    assert run.code == 0, run.console
    summary, strategy = run.summary, words[0].partition("=")[2]
    assert (summary["model"], summary["parallel"]) == (model, strategy)
    assert summary["world_size"] == len(summary["peak_memory_bytes"]) == PROCESSES[strategy]
    assert summary["steps"] == len(run.steps) and not any(line["skipped"] for line in run.steps)
    assert (summary["first_loss"], summary["final_loss"]) == (run.losses[0], run.losses[-1])
    assert summary["best_val_loss"] == min(run.val_losses)
    assert (summary["bubble_fraction"] is None) == (strategy in ("ddp", "model_parallel"))
    assert [(s["layers"][0], s["layers"][-1]) for s in summary["stages"]] == spans
    # Its own metric: of the validation, and of the test split in the summary and on the console.
    test = {key: value for key, value in summary.items() if key.startswith("test_")}
    assert {f"test_{key[4:]}" for key in run.metrics[-1] if key.startswith("val_")} == test.keys()
    assert test.keys() == {"test_loss", f"test_{metric}"} - {"test_None"}
    if metric == "accuracy":
        assert 0 <= test["test_accuracy"] <= 1 and f"test accuracy {test['test_accuracy']:.2%}" in run.stdout
    elif metric == "perplexity":
        assert test["test_perplexity"] == pytest.approx(2.718281828 ** test["test_loss"], rel=1e-6)
        assert f"test perplexity {number('test_perplexity', test['test_perplexity'])}" in run.stdout
    assert f"test loss {number('test_loss', test['test_loss'])}" in run.stdout


@pytest.mark.parametrize(
    "words, option, nearer, farther",
    [
        (["model=toy"], "parallel.comm_hook=bf16", 1e-2, 1e-7),
        (["model=convnet", "train.global_batch_size=32"], "parallel.sync_batchnorm=true", 1e-9, 0),
    ],
)
def test_what_two_replicas_are_told_by_an_option_reaches_them(ranks, tmp_path, words, option, nearer, farther):
    """Gradients sent in bf16 are not quite what they were; BatchNorm over both is that of one process."""
    words = [*words, "train.epochs=null", "train.steps=3", "train.precision=fp64", "train.eval_batches=2"]
    run(tmp_path / "one", *words)
    ranks.run(2, run_on_rank, *for_rank(tmp_path / "two", *words, "parallel=ddp", "parallel.dp=2", option))
    one, two = ([*losses(tmp_path / n), records(tmp_path / n)[-1]["val_loss"]] for n in ("one", "two"))
    assert two == pytest.approx(one, rel=nearer) and two != pytest.approx(one, rel=farther, abs=0)


# -- however the ranks are started -----------------------------------------------------------------------------------


# Each rank's C++ side then has something to say, and says who it is; torch reads it when it is imported.
TALKATIVE = {"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "INFO"}


def launched(cli, tmp_path):
    return cli("parallel=pipe_ddp", "parallel.chunks=4")


def only_folder(cwd):
    """The run directory, made by Hydra under outputs/ as for a user."""
    found = list((cwd / "outputs").glob("*/*"))
    assert len(found) == 1, f"one run, one directory: {found}"
    return found[0]


def by_torchrun(cli, tmp_path):
    prefix = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    words = [*cli.recipe, "parallel=pipelined", "parallel.chunks=8", "parallel.schedule=1f1b"]
    run = train(words, tmp_path / "run", prefix=prefix, cwd=tmp_path, own_folder=False)
    run.folder = only_folder(tmp_path)
    assert (run.stdout.count("best validation loss"), run.stderr.count("step 5: val_loss")) == (1, 1)
    return run


def by_hand(cli, tmp_path):
    """Two ranks that meet by their environment; only rank 0 talks."""
    words = [*cli.recipe, "parallel=ddp", "parallel.dp=2", "parallel.chunks=4"]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **TALKATIVE}
    options = {"cwd": tmp_path, "own_folder": False, "fresh": True}
    # Rank 1 may come first.
    both = [Started(words, tmp_path / f"rank{n}", env={**meeting, "RANK": str(n)}, **options) for n in (1, 0)]
    try:
        other, first = (one.wait() for one in both)
    finally:
        for one in both:
            one.kill()
    assert other.code == 0 and other.stdout == "" and "step" not in other.stderr, other.console
    first.folder = only_folder(tmp_path)
    # What rank 1 had to say once it knew the run directory.
    assert (first.folder / "logs" / "rank_0001.log").read_text() != ""
    return first


@pytest.mark.parametrize("start, size", [(launched, 4), slow(by_torchrun, 2), slow(by_hand, 2)])
def test_however_the_ranks_are_started_the_numbers_are_those_of_one_process(cli, tmp_path, start, size):
    single, run = cli("parallel=single", "parallel.chunks=8"), start(cli, tmp_path)
    assert run.code == 0, run.console
    assert single.losses[-1] < single.losses[0] - 0.1 and single.steps[0]["grad_norm"] > 0.5, "it learns, and clips"
    assert (run.summary["world_size"], len(run.steps), len(run.evaluations)) == (size, 5, 3)
    for ours, wanted in zip(run.metrics, single.metrics, strict=True):
        assert ours["step"] == wanted["step"] and ours.keys() == wanted.keys()
        for key in {"loss", "val_loss", "grad_norm"} & ours.keys():
            assert ours[key] == pytest.approx(wanted[key], rel=1e-4 if key == "grad_norm" else 1e-5)
    assert run.summary["test_loss"] == pytest.approx(single.summary["test_loss"], rel=1e-5)


@pytest.mark.slow  # gigabytes; estimates against a small run are in test_mode_plan
def test_no_rank_holds_a_layer_that_it_does_not_run(tmp_path):
    """By what each process really took, above a process of the toy model."""
    # 76 million parameters, 19 of them the embedding: with AdamW 1.2 GB, next to which two tiny sequences are nothing.
    big = [
        *SHORT, "model=gpt2", "model.size=tiny", "model.n_embd=384", "model.n_layer=30", "data.seq_len=16",
        "train.global_batch_size=4", "train.steps=2", "train.precision=fp32", "train.eval_every=null",
        "train.checkpoint_every=null",
    ]  # fmt: skip
    idle = train([*SHORT, "parallel=pipelined", "train.steps=2"], tmp_path / "toy").summary
    single = train([*big, "parallel=single", "parallel.chunks=4"], tmp_path / "single").summary
    pipelined = train([*big, "parallel=pipelined", "parallel.pp=4"], tmp_path / "pipelined").summary
    base = max(idle["peak_memory_bytes"])
    (whole,), ranks = ([peak - base for peak in run["peak_memory_bytes"]] for run in (single, pipelined))
    assert whole > 16 * single["parameters"], "weights, gradients and two optimizer states of everything"
    for stage, peak in zip(pipelined["stages"], ranks, strict=True):
        share = stage["parameters"] / single["parameters"]
        assert 0.5 * share * whole < peak < (share + 0.25) * whole, f"{stage['layers']}: {peak / 2**20:.0f} MiB"
    # The model once, and the tied weight twice.
    assert sum(stage["parameters"] for stage in pipelined["stages"]) == single["parameters"] + 50304 * 384
    layers = [layer for stage in pipelined["stages"] for layer in stage["layers"]]
    assert layers == single["stages"][0]["layers"]


# -- experiments -----------------------------------------------------------------------------------------------------

# Its parameters; the folder of its real data, and what to plan with where that is not there.
EXPERIMENTS = {
    "resnet50_split": ("25,557,032", None, None),
    "transformer_wikitext2": ("11,675,118", "wikitext-2", None),
    "transformer_1b": ("1,041,444,974", "wikitext-2", None),
    "classifier_cifar10": ("622,954", "cifar-10-batches-py", ["data=random_images", "data.samples=500"]),
    "convnet_mnist": ("29,034", "MNIST", ["data=digits"]),
    "gpt2_524k": ("124,475,904", None, None),
    "gsm8k_lora": ("460,800", None, ["data.root=ROWS"]),
}
NAMES = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", with_slow(NAMES, ("gpt2_524k",)))
def test_every_experiment_has_a_plan(name, rows, tmp_path, capsys):
    parameters, folder, otherwise = EXPERIMENTS[name]
    overrides = [f"experiment={name}", "mode=plan"]
    if folder is not None and (REAL / folder).is_dir():
        overrides.append(f"data.root={REAL / folder}")
    elif otherwise is not None:
        overrides += [word.replace("ROWS", str(rows)) for word in otherwise]
    elif folder is not None:
        compose(*QUIET, *overrides)
        pytest.skip(f"only composed: to run it needs the published {folder}, which this repository does not contain")
    execute(config(*overrides), tmp_path, None)
    said = capsys.readouterr().out
    assert f"{parameters} parameters" in said and "all ranks together:" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_one_epoch_of_mnist_reads_98_percent_of_the_test_digits_on_one_process_and_on_two(tmp_path):
    if not (REAL / "MNIST").is_dir():
        pytest.skip("needs the published MNIST (docs/data.md), which this repository does not contain")
    recipe = ["experiment=convnet_mnist", f"data.root={REAL / 'MNIST'}", "logger=none", "device=cpu"]
    single = train([*recipe, "parallel.threads=2"], tmp_path / "single")
    ddp = train([*recipe, "parallel=ddp", "parallel.dp=2"], tmp_path / "ddp")
    assert (single.code, ddp.code) == (0, 0), single.console + ddp.console
    accuracies = [run.summary["test_accuracy"] for run in (single, ddp)]
    assert min(accuracies) >= 0.98 and abs(accuracies[0] - accuracies[1]) <= 0.003, accuracies
