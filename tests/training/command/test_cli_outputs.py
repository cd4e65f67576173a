"""What a run leaves behind, and where: files that other tools read, and a console from which a user goes on."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
from commandline import train

from train import main
from training.reporting import describe
from training.run.loop import Loop

PIPE_DDP = ["parallel=pipe_ddp", "parallel.chunks=4"]  # as test_cli_models has it: the run is shared
TINY_PARAMETERS = 50304 * 64 + 256 * 64 + 6 * (12 * 64 * 64 + 13 * 64) + 2 * 64

NUMBERS = ("loss", "lr", "grad_norm", "step_time_s", "samples_per_s", "tokens_per_s")
STEP = {"step": int, **dict.fromkeys(NUMBERS, float), "skipped": bool}
SUMMARY = {
    **dict.fromkeys(("model", "parallel", "schedule", "precision"), str),
    **dict.fromkeys(("world_size", "dp", "shards", "pp", "chunks", "parameters", "steps"), int),
    **dict.fromkeys(("first_loss", "final_loss", "best_val_loss", "test_loss"), float),
    **dict.fromkeys(("step_time_s", "samples_per_s", "tokens_per_s"), float),
    **dict.fromkeys(("bubble_fraction", "ideal_bubble_fraction"), float),
    **dict.fromkeys(("peak_memory_bytes", "weights_bytes", "gradients_bytes", "optimizer_bytes", "stages"), list),
}


def types(record):
    return {key: type(value) for key, value in record.items()}


def test_relative_paths_are_meant_where_they_were_typed_in_a_directory_of_the_job_too(tmp_path):
    (tmp_path / "x.txt").write_text("a text of some words\n" * 500)
    words = ["model=gpt2", "model.size=tiny", "data=text", "data.seq_len=16", "train.global_batch_size=4"]
    words += ["data.vocabulary=words", "model.vocab_size=64"]
    words += ["train.steps=1", "logger=none", "device=cpu", "hydra.job.chdir=true"]
    trained = train([*words, "data.root=x.txt", "parallel=ddp", "parallel.dp=2"], tmp_path / "run", cwd=tmp_path)
    assert trained.code == 0, trained.console
    words = ["mode=export", "checkpoint=run", "export_to=weights", "hydra.job.chdir=true"]
    exported = train(words, tmp_path / "exported", cwd=tmp_path)
    assert exported.code == 0 and (tmp_path / "exported" / "weights").is_dir(), exported.console


@pytest.fixture
def gpt2(cli):
    """A pipeline of two stages, twice: 4 processes, with wandb."""
    return cli(*PIPE_DDP)


def test_metrics_hold_one_record_per_step_and_per_evaluation_with_exactly_these_fields(gpt2):
    assert [types(line) for line in gpt2.steps] == [STEP] * 5
    assert [line["step"] for line in gpt2.steps] == [1, 2, 3, 4, 5]
    for line in gpt2.steps:
        assert line["lr"] == 0.05 and not line["skipped"]
        assert line["samples_per_s"] == pytest.approx(16 / line["step_time_s"])
        assert line["tokens_per_s"] == pytest.approx(32 * line["samples_per_s"])
    assert [types(line) for line in gpt2.evaluations] == [{"step": int, "val_loss": float, "val_perplexity": float}] * 3
    for line in gpt2.evaluations:
        assert line["val_perplexity"] == pytest.approx(2.718281828 ** line["val_loss"], rel=1e-6)
    order = [line["step"] for line in gpt2.metrics]
    assert order == sorted(order) and len(order) == 8


def test_the_summary_has_all_its_fields_with_plausible_values(gpt2):
    """What it has of losses and stages, test_cli_models compares with the records of every model."""
    summary = gpt2.summary
    assert {key: type(summary[key]) for key in SUMMARY} == SUMMARY
    layout = {"world_size": 4, "dp": 2, "pp": 2, "chunks": 4, "schedule": "gpipe", "precision": "fp32", "steps": 5}
    assert {key: summary[key] for key in layout} == layout
    assert summary["parameters"] == TINY_PARAMETERS, "the head and the embedding are one tensor"
    assert summary["test_loss"] == pytest.approx(summary["best_val_loss"], rel=0.1)
    times = [line["step_time_s"] for line in gpt2.steps]
    assert min(times) <= summary["step_time_s"] <= max(times)
    assert summary["tokens_per_s"] == pytest.approx(16 * 32 / summary["step_time_s"])
    first, second = summary["stages"]
    assert [*first["layers"], *second["layers"]] == ["embedding", *(f"h.{i}" for i in range(6)), "head"]
    assert first["parameters"] + second["parameters"] == TINY_PARAMETERS + 50304 * 64  # a copy of the head
    peaks = summary["peak_memory_bytes"]
    assert len(peaks) == 4 and all(type(peak) is int and 100 * 2**20 < peak < 4 * 2**30 for peak in peaks)
    assert 0 < summary["bubble_fraction"] < 1
    assert summary["ideal_bubble_fraction"] == pytest.approx(1 / 5)  # (pp - 1) / (chunks + pp - 1)


def test_a_run_of_one_process_on_numbers_has_neither_tokens_nor_a_pipeline(toy):
    assert [types(line) for line in toy.steps] == [{k: t for k, t in STEP.items() if k != "tokens_per_s"}] * 312
    assert types(toy.metrics[-1]) == {"step": int, "val_loss": float}
    summary = toy.summary
    assert set(SUMMARY) <= set(summary)
    nothing = ("schedule", "bubble_fraction", "ideal_bubble_fraction", "tokens_per_s")
    assert [summary[key] for key in nothing] == [None] * 4
    assert (summary["world_size"], summary["parameters"], summary["steps"]) == (1, 165, 312)
    assert len(summary["peak_memory_bytes"]) == len(summary["stages"]) == 1


def test_the_checkpoint_can_be_read_without_this_project(gpt2):
    link = gpt2.folder / "checkpoints" / "latest"
    assert os.readlink(link) == "step-00000005", "relative: the run directory can be moved"
    manifest = json.loads((link / "manifest.json").read_text())
    assert manifest["step"] == 5
    assert manifest["config"]["choices"]["model"] == "gpt2"
    assert manifest["layout"]["stages"] == [stage["layers"] for stage in gpt2.summary["stages"]]
    for name, entry in manifest["files"].items():
        assert hashlib.sha256((link / name).read_bytes()).hexdigest() == entry["sha256"]
    script = (
        "import glob, math, sys; from safetensors import safe_open\n"
        "tensors = {}\n"
        "for path in glob.glob(sys.argv[1] + '/model-*.safetensors'):\n"
        "    with safe_open(path, 'np') as file:\n"
        "        for name in file.keys():\n"
        "            assert name not in tensors, name\n"
        "            tensors[name] = file.get_tensor(name)\n"
        "print(sum(t.size for t in tensors.values()), tensors['embedding.wte.weight'].shape, "
        "any(name.startswith('head.lm_head') for name in tensors))\n"
    )
    command = [sys.executable, "-I", "-c", script, str(link)]
    said = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True).stdout
    assert said == f"{TINY_PARAMETERS} (50304, 64) False\n"


def test_the_circumstances_of_the_run_are_kept_with_the_command_that_was_typed(gpt2):
    """Also where workers wrote it down, whose own command line is multiprocessing's."""
    found, here = json.loads((gpt2.folder / "environment.json").read_text()), describe()
    assert found.keys() == here.keys() and found["packages"] == here["packages"]
    assert found["git_commit"] == here["git_commit"]
    assert "parallel=pipe_ddp" in found["command"], found["command"]


def test_a_run_leaves_nothing_else(gpt2, toy):
    usual = {".hydra", "metrics.jsonl", "summary.json", "environment.json", "checkpoints"}
    assert usual <= set(os.listdir(toy.folder)) <= usual | {"train.log", "curves.png", "report.html"}
    more = {"wandb", "wandb_id.txt", "logs", "train.log"}
    assert usual | {"wandb"} <= set(os.listdir(gpt2.folder)) <= usual | more
    assert len([*gpt2.folder.glob("wandb/offline-run-*/*.wandb")]) == 1
    assert not [name for name in os.listdir(gpt2.folder / "checkpoints") if "tmp" in name]


# -- directories: one for each run, and never another's --------------------------------------------------------------


def test_each_run_gets_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["train.epochs=null", "train.steps=1", "train.eval_every=null", "logger=none"]) == 0
    names = [folder.parent.name for folder in (tmp_path / "outputs").glob("*/*/summary.json")]
    # The time to the second, and what tells two of the same second apart.
    assert all(re.fullmatch(r"\d\d-\d\d-\d\d-[0-9a-f]{6}", name) for name in names)
    assert len({name[-6:] for name in names}) == 2


def contents(folder):
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


# What is missing of the run in the directory, and what is typed to begin there. FROM is the run itself.
TAKEN = {
    "another run": (None, "seed=1"),
    "a run that goes on from elsewhere, without checkpoints": ("checkpoints", "train.resume=FROM"),
    "a run that goes on from elsewhere, without records": ("metrics.jsonl", "train.resume=FROM"),
    "a new run beside checkpoints": ("metrics.jsonl", ""),
    "a run within it": (None, "train.resume=HERE/within"),
    "a checkpoint within it": (None, "train.resume=HERE/within/checkpoints/latest"),
    "its evaluation": (None, "mode=eval checkpoint=HERE"),
    "its evaluation again": (None, "mode=eval checkpoint=HERE train.resume=auto"),
}


@pytest.mark.parametrize("missing, typed", TAKEN.values(), ids=TAKEN)
def test_a_directory_takes_nothing_that_would_replace_the_run_in_it(toy, tmp_path, capsys, missing, typed):
    folder = shutil.copytree(toy.folder, tmp_path / "run", symlinks=True)
    shutil.copytree(toy.folder, folder / "within", symlinks=True)
    if missing:
        (folder / missing).rename(tmp_path / missing)
    before = contents(folder)
    words = [word.replace("HERE", str(folder)).replace("FROM", str(toy.folder)) for word in typed.split()]
    assert main(["logger=none", *words, f"hydra.run.dir={folder}"]) == 1
    said = f"{folder} holds another run; choose another hydra.run.dir"
    printed = capsys.readouterr().err
    assert said + "\n" * typed.startswith("mode=eval") in printed, "an evaluation does not go on"
    assert "Traceback" not in printed and (typed != "seed=1" or "or continue it with train.resume=auto" in printed)
    assert contents(folder) == before


def test_a_run_that_failed_before_its_first_step_leaves_its_directory_to_the_mended_command(tmp_path, monkeypatch):
    words = ["model=toy", "train.steps=1", "train.epochs=null", "logger=none", f"hydra.run.dir={tmp_path}/run"]
    assert main([*words, "optim.lr=-1"]) == 1
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a bug"):
        patch.setattr(Loop, "run", Mock(side_effect=RuntimeError("a bug")))
        main(words)
    assert (tmp_path / "run" / "environment.json").exists()
    assert [main(words), main(words)] == [0, 1], "the second finds a run"


@pytest.mark.parametrize("sweep, name", [(False, "logs/rank_0001.log"), (True, "0/checkpoints")])
def test_a_link_that_leads_out_of_a_run_directory_is_refused_before_anything_is_written(tmp_path, capsys, name, sweep):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    link = folder / name
    link.parent.mkdir(parents=True)
    outside.mkdir()
    link.symlink_to(outside / "not there" if "." in link.name else outside)
    where = [f"hydra.sweep.dir={folder}", "-m", "seed=1"] if sweep else [f"hydra.run.dir={folder}"]
    assert main(["logger=none", "train.resume=auto", *where]) == 1
    assert f"{link} is a link that leads out of" in capsys.readouterr().err
    assert list(outside.iterdir()) == []
    assert [path for path in folder.rglob("*") if path not in (link, *link.parents)] == []


def test_a_link_inside_a_run_directory_and_one_to_it_are_followed(tmp_path, capsys):
    (tmp_path / "disk" / "checkpoints").mkdir(parents=True)
    (tmp_path / "disk" / "checkpoints" / "latest").symlink_to("step-00000009")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    assert main(["mode=plan", "logger=none", f"hydra.run.dir={tmp_path}/run"]) == 0, capsys.readouterr().err
