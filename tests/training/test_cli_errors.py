"""Bad input: one message with the numbers and the way out, in seconds, and nothing started."""

import os
import resource
import subprocess
import sys

import pytest
from commandline import ROOT, environment, train

GPT2 = ["model=gpt2", "model.size=tiny"]
NOWHERE = "/no/such/place"

# Overrides, and all that the message must say.
CASES = {
    "a batch that cannot be cut": (
        ["parallel=pipe_ddp", "parallel.dp=2", "train.global_batch_size=10"],
        ["train.global_batch_size=10 cannot be cut into dp=2 x chunks=4", "8 and 16"],
    ),
    "more stages than layers": (
        ["parallel=pipelined", "parallel.pp=4"],
        ["4 stages", "3 layers", "net1, relu, net2", "parallel.pp=3"],
    ),
    "fewer chunks than stages under 1f1b": (
        ["parallel=pipelined", "parallel.schedule=1f1b", "parallel.chunks=1"],
        [
            "schedule=1f1b",
            "parallel.chunks=1",
            "parallel.pp=2",
            "parallel.chunks=2",
            "parallel.schedule=gpipe",
        ],
    ),
    "an unknown option of a group": (["model=gpt3"], ["'model/gpt3'", "gpt2", "toy"]),
    "an unknown strategy": (
        ["parallel=pipeddp"],
        ["'parallel/pipeddp'", "single", "model_parallel", "ddp", "pipelined", "pipe_ddp"],
    ),
    "a mistyped key": (["train.stepz=5"], ["there is no key train.stepz", "did you mean train.steps?"]),
    "a mistyped section": (["trian.steps=5"], ["trian"]),
    "a word for a number": (["train.steps=many"], ["'many'", "Integer", "train.steps"]),
    "a fraction for a whole number": (["parallel.pp=1.5"], ["'1.5'", "Integer", "parallel.pp"]),
    "an unknown precision": (["train.precision=fp8"], ["fp8", "auto", "fp64", "fp32", "bf16", "fp16"]),
    "an unknown schedule": (["parallel.schedule=zigzag"], ["zigzag", "gpipe", "1f1b", "interleaved_1f1b"]),
    "a sequence longer than the positions": (
        [*GPT2, "data.seq_len=300"],
        ["data.seq_len=300", "256 positions", "data.seq_len=256", "model.block_size=300"],
    ),
    "a data folder that is not there": (
        [*GPT2, "data=text", f"data.root={NOWHERE}"],
        [f"data.root={NOWHERE}", "does not exist", "folder"],
    ),
    "a data set smaller than one batch": (
        ["data.samples=20"],
        ["20 samples", "train.global_batch_size=64", "20"],
    ),
    "neither steps nor epochs": (["train.epochs=null"], ["train.steps", "train.epochs", "train.steps=100"]),
    "no replicas": (["parallel=ddp", "parallel.dp=0"], ["parallel.dp=0", "at least 1"]),
    "evaluation of nothing": (["mode=eval"], ["mode=eval", "checkpoint=PATH"]),
    "evaluation of a checkpoint that is not there": (
        ["mode=eval", f"checkpoint={NOWHERE}"],
        [f"no checkpoint at {NOWHERE}", "manifest.json"],
    ),
    "going on from a checkpoint that is not there, on workers": (
        ["parallel=pipelined", f"train.resume={NOWHERE}"],
        [f"no checkpoint at {NOWHERE}", "manifest.json"],
    ),
    "compiling without a compiler": (
        ["train.compile=true", "logger=none"],
        ["train.compile=true", "C++ compiler", "CXX", "train.compile=false"],
    ),
    "a rank without a world": ([], ["WORLD_SIZE is not set", "RANK=0"]),
    "a world of another size": (["parallel=single"], ["1 processes", "2 were started"]),
}
ENVIRONMENTS = {
    "compiling without a compiler": {"CXX": f"{NOWHERE}/g++"},
    "a rank without a world": {"RANK": "0"},
    "a world of another size": {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29999",
    },
}


def test_a_new_interpreter_says_so_for_a_few_times_the_work_of_importing_torch(tmp_path):
    """By the processors' time, which does not depend on what else the machine does."""

    def work() -> float:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime

    begin = work()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=environment(), cwd=ROOT)
    torchs = work() - begin
    run = train(CASES["a batch that cannot be cut"][0], tmp_path / "run", fresh=True)
    assert run.code == 1 and work() - begin - torchs < 8 * torchs, run.console
    assert "Traceback" not in run.console


@pytest.mark.parametrize("case", CASES)
def test_bad_input_ends_with_the_numbers_and_the_way_out(case, tmp_path, monkeypatch, capsys):
    from train import main

    overrides, wanted = CASES[case]
    for name, value in ENVIRONMENTS.get(case, {}).items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "run"
    assert main([*overrides, f"hydra.run.dir='{folder}'"]) == 1
    printed = capsys.readouterr()
    missing = [words for words in wanted if words not in printed.err]
    assert missing == [], printed.err
    assert "Traceback" not in printed.out + printed.err
    assert printed.err.startswith("error: ")
    assert len(printed.err.strip().splitlines()) <= 20, printed.err
    # Workers' logs lie there as long as they run, and rank 0 opens its files before the first step.
    left = set(os.listdir(folder)) if folder.exists() else set()
    assert left & {"logs", "metrics.jsonl", "summary.json", "checkpoints", "wandb"} == set()


def test_what_only_the_workers_can_find_out_ends_the_run_with_its_advice(tmp_path):
    """A loss that explodes on two ranks: the user sees what to try, and the steps before are on record."""
    overrides = [
        "parallel=pipelined",
        "train.epochs=null",
        "train.steps=50",
        "optim.lr=1e30",
        "train.max_skipped=3",
    ]
    run = train([*overrides, "logger=none"], tmp_path / "run")
    assert run.code == 1
    assert "not finite for 4 steps in a row (train.max_skipped=3)" in run.stderr
    assert "optim.lr" in run.stderr
    assert run.steps[0]["loss"] > 0 and run.steps[-1]["skipped"]
    assert not (run.folder / "summary.json").exists()
