"""One torchrun agent on each of two hosts: one run, the same losses, and a network that fails is named."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from commandline import Run, wait_until
from hosts import Hosts, lacking
from slurm_commands import TOY

pytestmark = pytest.mark.slurm

LAYOUTS = Path(__file__).with_name("layouts.py")


IPV6 = ("fd00:77::1/64", "fd00:77::2/64")


@pytest.fixture
def hosts(request):
    if reason := lacking():
        pytest.skip(reason)
    with ExitStack() as end:
        try:
            pair = end.enter_context(Hosts(*getattr(request, "param", ())))
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no network namespaces here: {(getattr(error, 'stderr', None) or str(error)).strip()}")
        yield pair


def end(agents, timeout_s):
    """Both agents' exit codes, and the seconds until each had ended."""
    begin, ended = time.monotonic(), {}
    try:
        while len(ended) < len(agents) and time.monotonic() < begin + timeout_s:
            for agent in agents:
                if agent not in ended and agent.poll() is not None:
                    ended[agent] = time.monotonic() - begin
            time.sleep(0.05)
        return [agent.poll() for agent in agents], list(ended.values())
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()


def test_two_torchrun_agents_give_the_same_losses_in_one_run_directory(hosts, recipe, local_losses, tmp_path):
    outputs = [tmp_path / "a", tmp_path / "b"]
    codes, _ = end(hosts.torchrun([*recipe, f"hydra.run.dir={tmp_path}/run"], outputs), 150)
    assert codes == [0, 0], "\n".join(path.read_text() for path in outputs)
    assert Run(0, "", "", 0.0, tmp_path / "run").losses == pytest.approx(local_losses(), rel=1e-6)
    assert re.search(r"10.213.77.1: ranks 0-1 .*10.213.77.2: ranks 2-3", outputs[0].read_text())


@pytest.mark.parametrize("hosts", [[IPV6]], indirect=True, ids=["IPv6"])
def test_hosts_with_addresses_of_ipv6_only_meet_and_train(hosts, tmp_path):
    outputs = [tmp_path / "a", tmp_path / "b"]
    toy = [*TOY, "logger=none", "train.steps=2", "parallel=pipe_ddp", f"hydra.run.dir={tmp_path}/run"]
    codes, _ = end(hosts.torchrun(toy, outputs), 90)
    assert codes == [0, 0], "\n".join(path.read_text() for path in outputs)
    assert re.search(r": ranks 0-1 .*: ranks 2-3", outputs[0].read_text())


def test_a_cable_that_is_cut_in_the_middle_ends_the_run_soon_after_the_timeout_and_names_the_ranks(hosts, tmp_path):
    outputs = [tmp_path / "a", tmp_path / "b"]
    endless = [*TOY, "logger=none", "train.steps=10000000", "parallel=pipe_ddp", "parallel.timeout_s=30"]
    agents = hosts.torchrun([*endless, f"hydra.run.dir={tmp_path}/run"], outputs)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 1000, 120, "some steps")
    finally:
        hosts.cut()
        codes, seconds = end(agents, 90)
    said = [path.read_text() for path in outputs]
    assert codes == [1, 1], said
    assert max(seconds) < 30 + 60  # 19 until all others have complained, and torchrun ends its ranks in its own time
    for rank in (2, 3):
        assert re.search(rf"rank {rank} \([^)]*10.213.77.2\) has not moved since step \d+ ", said[0])
    assert re.search(r"rank 0 \([^)]*10.213.77.1\) has not moved .* does not answer rank [23] ", said[1])


def test_hosts_that_cannot_reach_each_other_are_named_before_the_run_starts(hosts, tmp_path):
    outputs = [tmp_path / "a", tmp_path / "b"]
    wrong = ({}, {"GLOO_SOCKET_IFNAME": "lo"})
    toy = [*TOY, "logger=none", "train.steps=2", "parallel=pipe_ddp", "parallel.timeout_s=20"]
    codes, _ = end(hosts.torchrun([*toy, f"hydra.run.dir={tmp_path}/run"], outputs, wrong), 90)
    assert codes == [1, 1]
    assert re.search(r"rank 0 \(.*10.213.77.1\) cannot connect to rank 2 \(.*127.0.0.1\): ", outputs[0].read_text())
    assert "the network that joins them; this machine has lo (127.0.0.1), cable" in outputs[0].read_text()


@pytest.mark.slow
def test_groups_of_replicas_on_a_host_send_fewer_bytes_between_hosts(hosts, tmp_path):
    """Per step and direction two ranks of each host all-reduce half of the gradients; the rest stays on the host."""
    steps, outputs = 4, [tmp_path / "a", tmp_path / "b"]
    model = ["model=gpt2", "model.size=tiny", "data=text", f"data.root='{os.__file__}'", "data.seq_len=32"]
    quiet = [f"data.cache_dir={tmp_path}/cache", "train.eval_every=null", "train.checkpoint_every=null"]
    train = ["train.epochs=null", f"train.steps={steps}", "train.global_batch_size=8", "train.precision=fp32"]
    layouts = [
        "ddp:parallel=ddp", "hierarchical:parallel=ddp parallel.comm_hook=hierarchical", "fsdp:parallel=fsdp",
        "hsdp:parallel=hsdp",
    ]  # fmt: skip
    words = [str(tmp_path), *model, *quiet, *train, "parallel.dp=4", "--", *layouts]
    codes, _ = end(hosts.torchrun(words, outputs, program=LAYOUTS), 150)
    assert codes == [0, 0], "\n".join(path.read_text() for path in outputs)
    runs = {name: Run(0, "", "", 0.0, tmp_path / name) for name in ("ddp", "hierarchical", "fsdp", "hsdp")}
    crossed = json.loads((tmp_path / "crossed.json").read_text())
    sent = {name: crossed[name] / steps / (4 * run.summary["parameters"]) for name, run in runs.items()}
    print({name: f"{times:.2f} x the weights" for name, times in sent.items()})
    assert all(run.losses == pytest.approx(runs["ddp"].losses, rel=1e-6) for run in runs.values())
    # Of the ring of an all-reduce over four ranks, two links cross, with 3/2 of the weights each.
    assert sent["hierarchical"] < 0.8 * sent["ddp"]
    assert sent["hsdp"] < 0.8 * sent["ddp"]
    assert sent["hsdp"] < 0.5 * sent["fsdp"]
