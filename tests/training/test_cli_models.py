"""`python train.py model=…`: each of the six models under ranks of its own, what a run of it says, and its options."""

import pytest
from commandline import ROOT, train
from composed import QUIET, compose, config, losses, records, run, run_on_rank

from conf.instantiate import to_dict
from training.app import execute
from training.reporting.console import number

REAL = ROOT.parent / "shared" / "data"
SHORT = ["logger=none", "device=cpu", "train.epochs=null"]

# What is typed, and the names of the layers at both ends of each stage.
RUNS = {
    "toy": (
        ["parallel=ddp", "parallel.dp=2", "parallel.comm_hook=bf16", "train.tf32=true", "train.cudnn_benchmark=true"],
        [("net1", "net2")],
    ),
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
    "gpt2": (["parallel=pipelined", "parallel.pp=2", "parallel.chunks=8", "parallel.schedule=1f1b"], None),
}
PROCESSES = {"single": 1, "model_parallel": 1, "ddp": 2, "pipelined": 2, "pipe_ddp": 4}
MODELS = [pytest.param(name, marks=[pytest.mark.slow] * (name == "resnet50")) for name in RUNS]
METRIC = {"transformer": "perplexity", "gpt2": "perplexity", "classifier": "accuracy", "convnet": "accuracy"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cli, text):
    """``trained("resnet50")``: that model's run, with the words of RUNS."""
    runs = {}

    def get(model):
        words, _ = RUNS[model]
        if model == "gpt2":
            return cli(*words)
        if model not in runs:
            data = text if model == "transformer" else []
            folder = tmp_path_factory.mktemp(model) / "run"
            fixed = [f"model={model}", *SHORT, "train.steps=3", "train.precision=fp32"]
            runs[model] = train([*fixed, *data, *words], folder)
            assert runs[model].code == 0, runs[model].console
        return runs[model]

    return get


@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_under_ranks_of_its_own(trained, model):
    run, (words, spans) = trained(model), RUNS[model]
    summary = run.summary
    strategy = words[0].partition("=")[2]
    assert (summary["model"], summary["parallel"]) == (model, strategy)
    assert summary["world_size"] == len(summary["peak_memory_bytes"]) == PROCESSES[strategy]
    assert summary["steps"] == len(run.steps) and not any(line["skipped"] for line in run.steps)
    assert (summary["first_loss"], summary["final_loss"]) == (run.losses[0], run.losses[-1])
    assert summary["best_val_loss"] == min(run.val_losses)
    assert (summary["bubble_fraction"] is None) == (strategy in ("ddp", "model_parallel"))
    if spans is not None:
        assert [(s["layers"][0], s["layers"][-1]) for s in summary["stages"]] == spans


@pytest.mark.parametrize("model", MODELS)
def test_every_model_says_how_good_it_is_by_its_own_metric(trained, model):
    run, metric = trained(model), METRIC.get(model)
    validation = run.metrics[-1]
    found = {key.partition("_")[2] for key in validation if key.startswith("val_")}
    assert found == {"loss", metric} - {None}
    # The same of the test split: in the summary and on the console.
    test = {key: value for key, value in run.summary.items() if key.startswith("test_")}
    assert {key.partition("_")[2] for key in test} == found
    if metric == "accuracy":
        assert 0 <= test["test_accuracy"] <= 1
        assert f"test accuracy {test['test_accuracy']:.2%}" in run.stdout
    elif metric == "perplexity":
        assert test["test_perplexity"] == pytest.approx(2.718281828 ** test["test_loss"], rel=1e-6)
        assert f"test perplexity {number('test_perplexity', test['test_perplexity'])}" in run.stdout
    assert f"test loss {number('test_loss', test['test_loss'])}" in run.stdout


def test_gradients_sent_in_bf16_are_not_quite_what_they_were(trained, tmp_path):
    words = ["train.epochs=null", "train.steps=3", "train.precision=fp32"]
    run(tmp_path, *words)
    exact, compressed = losses(tmp_path), trained("toy").losses
    assert compressed[0] == pytest.approx(exact[0], rel=1e-6), "before the first update"
    assert compressed[1:] != pytest.approx(exact[1:], rel=1e-7)
    assert compressed[1:] == pytest.approx(exact[1:], rel=1e-2)


def test_synchronised_batchnorm_that_is_typed_is_batchnorm_of_one(ranks, tmp_path):
    convnet = ["model=convnet", "train.epochs=null", "train.steps=3", "train.precision=fp64", "train.eval_batches=2"]
    convnet.append("train.global_batch_size=32")
    (tmp_path / "two").mkdir()
    tree = to_dict(compose(*QUIET, *convnet, "parallel=ddp", "parallel.dp=2", "parallel.sync_batchnorm=true"))
    ranks.run(2, run_on_rank, tree, str(tmp_path / "two"), str(tmp_path / "meeting"))
    run(tmp_path / "one", *convnet)
    one, two = (records(tmp_path / name) for name in ("one", "two"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-9)
    assert two[-1]["val_loss"] == pytest.approx(one[-1]["val_loss"], rel=1e-9)


# Where real data lies, and what to plan with where it does not.
EXPERIMENTS = {
    "resnet50_split": (None, None),
    "transformer_wikitext2": ("wikitext-2", None),
    "transformer_1b": ("wikitext-2", None),
    "classifier_cifar10": ("cifar-10-batches-py", ["data=random_images", "data.samples=500"]),
    "convnet_mnist": ("MNIST", ["data=digits"]),
    "gpt2_524k": (None, None),
}
PARAMETERS = {
    "resnet50_split": "25,557,032",
    "transformer_wikitext2": "11,675,118",
    "transformer_1b": "1,041,444,974",
    "classifier_cifar10": "622,954",
    "convnet_mnist": "29,034",
    "gpt2_524k": "124,475,904",
}


def test_every_experiment_is_among_these():
    assert {path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")} == EXPERIMENTS.keys()


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "gpt2_524k")) for n in EXPERIMENTS])
def test_every_experiment_has_a_plan(name, tmp_path, capsys):
    folder, otherwise = EXPERIMENTS[name]
    overrides = [f"experiment={name}", "mode=plan"]
    if folder is not None and (REAL / folder).is_dir():
        overrides.append(f"data.root={REAL / folder}")
    elif otherwise is not None:
        overrides += otherwise
    elif folder is not None:
        compose(*overrides)
        pytest.skip(f"only composed: to run it needs the published {folder}, which this repository does not contain")
    execute(config(*overrides), tmp_path, None)
    said = capsys.readouterr().out
    assert f"{PARAMETERS[name]} parameters" in said
    assert "all ranks together:" in said
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
    assert min(accuracies) >= 0.98, accuracies
    assert abs(accuracies[0] - accuracies[1]) <= 0.003, accuracies
