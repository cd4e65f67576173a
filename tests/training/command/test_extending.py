"""docs/own_model.md and docs/extending.md as written: what they add is in the help page, and trains as single does."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from commandline import ROOT, environment
from slow_cases import slow

FOLDERS = ("planner", "common", "conf", "data", "launchers", "models", "parallel", "training", "hydra_plugins")
SUPPORT = ("preloaded", "ranks", "training/commandline", "training/composed", "training/extended_runs")
FILES = ("train.py", *(f"tests/{name}.py" for name in SUPPORT))
LAYOUTS = {
    "single": ["parallel=single"],
    "tensor": ["parallel=tensor", "parallel.sequence=true"],
    "single in pieces": ["parallel=single", "parallel.chunks=4"],  # for what depends on the micro-batch
    "fsdp": ["parallel=fsdp", "parallel.dp=2", "parallel.chunks=2"],
    "pipelined": ["parallel=pipelined", "parallel.chunks=4"],
    "pipe_ddp": ["parallel=pipe_ddp", "parallel.dp=2", "parallel.chunks=2"],
    "checked_ddp": ["parallel=checked_ddp", "parallel.dp=2", "parallel.chunks=2"],
    "context": ["parallel=context", "parallel.context=ring", "parallel.chunks=2"],
    "expert": ["parallel=expert", "parallel.ep=2", "parallel.chunks=2"],
    "mirror": ["parallel.axes={mirror:{_target_:parallel.mirror.Mirror,ranks:2}}"],
}
SHORT = [
    "train.epochs=null", "train.steps=4", "train.global_batch_size=8", "train.eval_every=null",
    "train.checkpoint_every=null", "train.precision=fp32",
]  # fmt: skip
ADDED = {
    "model": ["gated", "lstm", "mixture", "reader", "skip", "translator", "vae", "vit"],
    "data": ["backwards", "csv_regression"], "optim": ["lion", "rmsprop"],
    "scheduler": ["inverse_sqrt"], "logger": ["losses"], "callbacks": ["weight_norm"],
    "parallel": ["checked_ddp"],
}  # fmt: skip
MISTAKES = {  # in what was added
    "key": (["model=lstm", "model.widht=3"], "did you mean model.width?"),
    "value": (["model=lstm", "model.width=wide"], "model.width: Value 'wide' of type 'str' could not be converted to"),
    "path": (["data=csv_regression", "data.root=/no/such/file"], "data.root=/no/such/file does not exist"),
}


def files_of_the_pages():
    """(path, code), as the pages have them."""
    text = "\n".join((ROOT / "docs" / name).read_text() for name in ("own_model.md", "extending.md"))
    return re.findall(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)```", text, flags=re.S | re.M)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of the repository with everything that the pages add, and nothing else."""
    house = tmp_path_factory.mktemp("extending") / "house"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, house / folder)
    for file in FILES:
        (house / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, house / file)
    for path, code in files_of_the_pages():
        if (house / path).exists():
            assert (house / path).read_text() == code, f"{path} exists already"
        (house / path).write_text(code)
    return house


def command(house, *words):
    env = environment({"PYTHONPATH": os.pathsep.join(map(str, (house, house / "tests", house / "tests/training")))})
    done = subprocess.run([sys.executable, *words], cwd=house, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def runs(house, request):
    """The folder of all runs that the chosen tests need, with their losses and what was said to each mistake."""
    rows = ["a,y,b,c", *(f"{i % 7},{i % 7 - i % 5 / 2},{i % 5},{i % 3}" for i in range(120))]
    (house.parent / "table.csv").write_text("\n".join(rows) + "\n")
    (house.parent / "text.txt").write_text("the cat and the dog saw the bird and the bird saw the cat\n" * 2000)
    here = house.parent
    text = ["data=text", f"data.root={here}/text.txt", f"data.cache_dir={here}/cache", "data.seq_len=16"]
    lstm = ["model=lstm", "model.width=16", "scheduler=inverse_sqrt", "scheduler.warmup_steps=2", *text]
    table = ["data=csv_regression", f"data.root={here}/table.csv", "model.in_features=3", "model.out_features=1"]
    top3 = "model.loss={_target_: models.top_k.TopK, k: 3}"
    places = {
        "lstm": (lstm, ["single", "pipelined"]),
        "csv": (table, ["single", "checked_ddp", "mirror"]),
        "skip": (["model=skip", "optim=rmsprop", top3, "train.eval_every=2"], ["single", "pipe_ddp"]),
    }
    others = {
        "vit": (["model=vit", "optim=sgd", "optim.lr=0.5"], ["single", "pipelined"]),
        "reader": (["model=reader", "optim=sgd", "optim.lr=0.5"], ["single", "fsdp"]),
        "translator": (["model=translator", "optim=sgd", "optim.lr=0.5"], ["single in pieces", "pipelined"]),
        "gated": (["model=gated", "optim.lr=0.2", *text], ["single", "tensor", "context"]),
        "vae": (["model=vae", "optim=sgd", "optim.lr=0.01"], ["single in pieces", "pipelined"]),
        "mixture": (["model=mixture", "model.width=16", "optim=sgd", *text], ["single", "pipelined", "expert"]),
    }
    chosen = [item for item in request.session.items if item.path == request.path]
    if any(item.get_closest_marker("slow") for item in chosen):
        places |= others
    runs = {
        f"{name} {layout}": [*words, *LAYOUTS[layout]]
        for name, (words, layouts) in places.items()
        for layout in layouts
    }
    runs["muon"] = [*lstm, *LAYOUTS["single"], "optim=muon", "logger=losses", "logger.file=x.csv"]
    runs = {name: [*SHORT, *words] for name, words in runs.items()}
    mistakes = {name: words for name, (words, _) in MISTAKES.items()}
    command(house, "tests/training/extended_runs.py", str(house.parent), json.dumps(runs), json.dumps(mistakes))
    return house.parent


@pytest.fixture(scope="module")
def losses(runs):
    """The losses of every run, by name."""
    return json.loads((runs / "losses.json").read_text())


@pytest.mark.parametrize(
    "model", ["lstm", "csv", "skip", *map(slow, ("vit", "reader", "translator", "gated", "mixture", "vae"))]
)
def test_every_strategy_trains_what_was_added_as_single_does(losses, model):
    runs = {name: values for name, values in losses.items() if name.startswith(f"{model} ")}
    assert len(runs) > 1
    (reference,) = (values for name, values in runs.items() if "single" in name)
    for name, values in runs.items():
        assert values == pytest.approx(reference, rel=1e-5), name
    if model not in ("skip", "translator", "vit", "reader", "vae"):  # whose four batches are all different
        assert values[-1] < values[0]


def test_an_added_optimizer_and_logger_are_used(losses, runs):
    assert losses["muon"] != losses["lstm single"]
    lines = (runs / "muon" / "x.csv").read_text().splitlines()
    assert [float(line.split(",")[1]) for line in lines] == losses["muon"]


def test_an_added_metric_is_in_the_records_of_training_and_of_validation(runs):
    lines = [json.loads(line) for line in (runs / "skip pipe_ddp" / "metrics.jsonl").read_text().splitlines()]
    for prefix, count in {"": 4, "val_": 2}.items():
        names = f"{prefix}accuracy", f"{prefix}top3_accuracy"
        found = [tuple(line[name] for name in names) for line in lines if f"{prefix}loss" in line]
        assert len(found) == count and all(0 <= first <= third <= 1 for first, third in found)
        assert any(third > 0 for _, third in found)


def test_the_help_page_lists_what_was_added(house):
    page = command(house, "train.py", "--help").stdout
    for group, options in ADDED.items():
        listed = re.search(rf"^  {group}= +((?:.*\n)(?: {{14}}.*\n)*)", page, flags=re.M)[1]
        assert set(options) <= set(re.findall(r"\w+", listed)), group


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_an_added_option_is_one_line(runs, name):
    code, said = json.loads((runs / "mistakes.json").read_text())[name]
    assert code == 1 and said.startswith("error: ") and MISTAKES[name][1] in said and said.count("\n") == 1
