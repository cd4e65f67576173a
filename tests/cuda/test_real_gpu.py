"""What only a real GPU can show: ``pytest -m gpu``. One GPU is enough: ranks share it.

``GPU_TESTS_DEVICE=cpu pytest -m gpu`` runs the same on the CPU with fewer signals: it shows that the tests do what they
should, and nothing about a GPU.
"""

import dataclasses
import os
import re
import time

import pytest
import torch
from cases import Layout, assert_same_training, train
from cells import GPU_LAYOUTS, ONE_GPU, PUBLISHED, on_gpus
from commandline import train as train_command
from composed import config
from faults.runs import RECIPE, final_tensors
from faults.trials import interrupt, moments

from planner.memory import memory_of_ranks
from training.optimizer.kinds import states_of
from training.run.prepare import prepare

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(),
        reason="torch finds no CUDA GPU here; GPU_TESTS_DEVICE=cpu runs the same on the CPU",
    ),
]
TOLERANCE = 1e-4  # relative, in float32: kernels add up in another order
# Runs are started afresh: a fork of a process that has asked for its GPUs could not use them.
EXACT = [f"device={DEVICE}", "train.deterministic=true"]
RUNS, SIGNALS_EACH = (4, 5) if DEVICE == "cuda" else (1, 2)
# The update of a larger model is still under way on the GPU when a signal arrives. Its checkpoints are large: with one
# every two steps the test would write hundreds of gigabytes.
LARGER = ["model.n_layer=8", "model.n_embd=512", "model.n_head=8", "train.checkpoint_every=20"]
LARGER = LARGER if DEVICE == "cuda" else []
SOON_S = 60


def on_device(model: str, **changes):
    return on_gpus(model, device=DEVICE, **changes)


@pytest.fixture(scope="module")
def device_ranks():
    """Up to four ranks: one GPU each where there are as many, else they share."""
    from ranks import Ranks

    backend = "gloo" if DEVICE == "cpu" else "nccl" if torch.cuda.device_count() >= 4 else "host"
    # Products and convolutions in full float32.
    pool = Ranks(4, {"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, backend)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def on_one_device(device_ranks):
    """``on_one_device(recipe)``: what one process on the device saw; each recipe runs once."""
    known = {}

    def run(recipe):
        if recipe not in known:
            (known[recipe],) = device_ranks.run(1, train, ONE_GPU, recipe)
        return known[recipe]

    return run


@pytest.mark.parametrize("model", PUBLISHED)
def test_twelve_steps_are_those_of_the_cpu(on_one_device, ranks, model):
    recipe = on_device(model, steps=12, eval_every=6, dropout=0.0)
    (reference,) = ranks.run(1, train, ONE_GPU, dataclasses.replace(recipe, device="cpu"))
    assert_same_training([on_one_device(recipe)], reference, TOLERANCE)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("layout", [ONE_GPU, *GPU_LAYOUTS], ids=str)
@pytest.mark.parametrize("model", ["gpt2", "transformer"])
def test_dropout_is_the_same_under_every_layout(device_ranks, on_one_device, model, layout, recompute):
    recipe = on_device(model, dropout=0.2)
    if layout.strategy == "model_parallel" and DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("model_parallel: its two stages need a GPU each")
    run = device_ranks.run(layout.processes, train, layout, dataclasses.replace(recipe, recompute=recompute))
    assert_same_training(run, on_one_device(recipe), TOLERANCE)
    without = on_one_device(dataclasses.replace(recipe, dropout=0.0))
    with pytest.raises(AssertionError, match="farther than"):  # or there was no dropout
        assert_same_training(run, without, TOLERANCE)


def test_batchnorm_across_replicas_is_that_of_the_cpu(device_ranks, ranks):
    recipe = on_device("classifier", steps=12, sync_batchnorm=True)
    layout = Layout("ddp", dp=2, chunks=2)
    reference, _ = ranks.run(2, train, layout, dataclasses.replace(recipe, device="cpu"))
    assert_same_training(device_ranks.run(2, train, layout, recipe), reference, TOLERANCE)


@pytest.mark.parametrize("strategy", ["single", "pipe_ddp"])
def test_a_resumed_run_gives_the_same_bits(tmp_path, strategy):
    words = [f"parallel={strategy}", *RECIPE, *EXACT, "train.steps=12", "train.keep_checkpoints=6"]
    whole = train_command(words, tmp_path / "whole", fresh=True)
    assert whole.code == 0, whole.console
    half = tmp_path / "whole" / "checkpoints" / "step-00000006"
    resumed = train_command([*words, f"train.resume='{half}'"], tmp_path / "resumed", fresh=True)
    assert resumed.code == 0, resumed.console
    assert resumed.losses == whole.losses[6:]
    assert final_tensors(resumed.folder) == final_tensors(whole.folder) != {}


@pytest.mark.parametrize("seed", range(1, RUNS + 1))
def test_checkpoints_of_a_run_that_is_told_to_stop_are_those_of_an_undisturbed_one(tmp_path, seed):
    trials = interrupt("single", moments("single", SIGNALS_EACH, seed), tmp_path, *EXACT, *LARGER)
    assert len(trials) == SIGNALS_EACH
    assert not [trial for trial in trials if not trial.survived or not trial.equal or trial.problem]


HUNGRY = """
import torch
from torch import nn

from models.chain import Chain, LayerSpec
from models.losses import SquaredError


class Hungry(nn.Module):
    def forward(self, x):
        if x.device.type != "meta":
            torch.empty(2**50, dtype=torch.uint8, device=x.device)
        return x


def hungry() -> Chain:
    layers = [LayerSpec("first", lambda: nn.Linear(10, 8)), LayerSpec("second", lambda: nn.Linear(8, 5))]
    return Chain([*layers, LayerSpec("hungry", Hungry)], loss=SquaredError())
"""


def test_a_rank_that_is_out_of_memory_is_named_in_seconds(tmp_path):
    """The others wait for it in a collective operation, and would for parallel.timeout_s."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "hungry_model.py").write_text(HUNGRY)
    (tmp_path / "conf" / "model" / "hungry.yaml").write_text("_target_: hungry_model.hungry\n")
    words = [f"--config-dir={tmp_path}/conf", "model=hungry", "parallel=pipelined"]
    words += ["parallel.chunks=2", "parallel.balance=[1,2]", "parallel.timeout_s=600", f"device={DEVICE}"]
    start = time.monotonic()
    ended = train_command([*words, "logger=none", "train.epochs=null", "train.steps=50"], tmp_path / "run", fresh=True)
    assert ended.code == 1
    assert time.monotonic() - start < SOON_S, "of which most is the start"
    assert re.search(r"rank 1\b.*(out of memory|allocate)", ended.stderr, re.IGNORECASE | re.DOTALL), ended.console


def test_peak_memory_is_what_the_plan_said(tmp_path):
    words = [*RECIPE, "model.n_layer=6", "model.n_embd=256", "model.n_head=4", "model.block_size=128"]
    words += [
        "data.seq_len=128",
        "train.global_batch_size=16",
        "parallel.chunks=1",
        "train.steps=4",
        f"device={DEVICE}",
    ]
    words += ["train.eval_every=null", "train.checkpoint_every=null", "parallel=single", f"device={DEVICE}"]
    ended = train_command(words, tmp_path / "run", fresh=True)
    assert ended.code == 0, ended.console
    (peak,) = ended.summary["peak_memory_bytes"]
    setup = prepare(config(*words))
    (planned,) = memory_of_ranks(setup.plan, setup.work[0], states_of(setup.cfg.optim))
    expected = planned.used - (planned.process if DEVICE == "cuda" else 0)
    assert 0.75 < peak / expected < 1.5, f"{peak / 2**20:.0f} MiB, and {expected / 2**20:.0f} MiB were expected"
