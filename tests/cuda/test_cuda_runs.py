"""Runs on GPUs, as far as they can be told without one: how ranks leave a group, and what a queue is told."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pretend_cuda
import pytest
import torch
import torch.distributed as dist

from launchers import World
from parallel import devices
from training.run import rank as training_run

TWO = World(rank=1, size=2, local_rank=1, local_size=2, origin="environment")


@pytest.fixture
def group(monkeypatch):
    """What is done with a process group of NCCL."""
    done = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **kwargs: done.append(backend))
    monkeypatch.setattr(dist, "barrier", lambda: done.append("barrier"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroy"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(name="pretend", uuid=f"gpu-{torch.device(device).index}"),
    )
    return done


@pytest.mark.parametrize(
    "gpu_of_rank_0, error, calls",
    [
        ("gpu-0", None, ["nccl", "barrier", "destroy"]),
        ("gpu-1", None, ["host", "barrier", "destroy"]),  # theirs is one: not NCCL
        ("gpu-0", MemoryError, ["nccl"]),  # a rank that fails does not wait for the others
    ],
)
def test_a_rank_that_is_done_leaves_its_group_with_the_others(group, gpu_of_rank_0, error, calls, monkeypatch):
    store = dist.HashStore()
    store.set("gpu-0", gpu_of_rank_0)
    setup = SimpleNamespace(
        cfg=SimpleNamespace(parallel=SimpleNamespace(timeout_s=5.0)), plan=SimpleNamespace(device_type="cuda")
    )
    met = replace(TWO, meeting=SimpleNamespace(store=store))
    with pytest.raises(error) if error else nullcontext(), training_run._process_group(met, setup):
        if error:
            raise error
    assert group == calls


def test_a_rank_that_sees_one_gpu_takes_it(group, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert devices.local_device("cuda", 3) == torch.device("cuda", 0)


def test_the_submitting_machine_is_not_asked_for_its_devices(monkeypatch):
    from composed import config

    from training.command.slurm_job import prepare_here
    from training.run import prepare

    monkeypatch.setattr(devices.Hardware, "here", lambda *args, **more: pytest.fail("it was asked"))
    monkeypatch.setattr(prepare, "seconds_per_layer", lambda *args: pytest.fail("it was measured"))
    queued = ["model=toy", "launcher=slurm", "launcher.gpus_per_node=4", "device=auto", "train.precision=auto"]
    ddp = prepare_here(config(*queued, "parallel=ddp"))
    assert (ddp.plan.device_type, ddp.plan.dp, ddp.plan.precision) == ("cuda", 4, "auto")
    assert prepare_here(config(*queued, "parallel=data_parallel")).plan.devices == tuple(f"cuda:{i}" for i in range(4))
    piped = prepare_here(config(*queued, "parallel=pipelined", "parallel.chunks=2", "parallel.balance=time"))
    assert piped.cfg.parallel.balance == "time"


@pytest.mark.slow
def test_one_gpu_is_enough_for_every_layout(pretended, tmp_path):
    """The whole command, on one pretend GPU: it says that it is shared, draws its timeline, and learns the same."""
    from interpreters import python

    common = ["model=gpt2", "model.size=tiny", "data.seq_len=32", "train.global_batch_size=8", "train.steps=4"]
    common += ["logger=none", "train.precision=fp32", "parallel.threads=1", "train.eval_every=0"]
    layouts = {
        "shared": ["parallel=pipe_ddp", "parallel.dp=1", "parallel.chunks=4", "train.trace=true", "device=cuda"],
        "cpu": ["parallel=single", "parallel.chunks=4", "device=cpu"],
    }
    losses = {}
    for name, layout in layouts.items():
        env, folder = pretend_cuda.environment(devices=1) if name == "shared" else {}, tmp_path / name
        ended = python("train.py", *common, *layout, f"hydra.run.dir={folder}", **env)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses[name] = [line["loss"] for line in lines if "loss" in line]
        if name == "shared":
            assert "2 processes share 1 GPU: tensors between them go through main memory" in ended.stdout
            assert (folder / "timeline.png").exists()
            assert 0.0 < json.loads((folder / "summary.json").read_text())["bubble_fraction"] < 1.0
    assert losses["shared"] == pytest.approx(losses["cpu"], rel=1e-5)
