"""``launcher=slurm``, ``sbatch launchers/train.sbatch`` and torchrun on two hosts, as a user types them."""

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commandline import ROOT, Run, Started, environment, train, wait_until

pytestmark = pytest.mark.slurm

TWO_NODES = ["launcher=slurm", "launcher.nodes=2", "launcher.poll_s=0.5", "launcher.mem_gb=2", "launcher.time_min=10"]
TOY = ["device=cpu", "train.epochs=null", "train.eval_every=null", "logger=none"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Four steps of the tiny GPT-2 on a small text, two stages x two replicas."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(Path(argparse.__file__).read_text())
    return [
        "parallel=pipe_ddp", "model=gpt2", "model.size=tiny", "data=text", f"data.root={folder}/text.txt",
        f"data.cache_dir={folder}/cache", "data.seq_len=32", "train.steps=4", "train.global_batch_size=16",
        "train.precision=fp32", "optim=sgd", "scheduler=constant", "train.eval_batches=1", "logger=none",
        "parallel.timeout_s=60",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def local(recipe, tmp_path_factory):
    """The losses of the same run on this machine's own workers."""
    run = train(recipe, tmp_path_factory.mktemp("local") / "run")
    assert run.code == 0, run.console
    return run.losses


def slurm(cluster, overrides, folder, **more):
    return train([*overrides, *TWO_NODES], folder, env=cluster.environment, **more)


def queue(cluster):
    command = ["squeue", "--noheader", "--array"]
    return subprocess.run(command, capture_output=True, text=True, env=environment(cluster.environment)).stdout


def submitted(run):
    """The number of the job that a console speaks of."""
    return re.search(r"^job (\d+) is queued", run.stdout, re.MULTILINE).group(1)


def test_two_nodes_give_the_losses_of_one_machine(cluster, recipe, local, tmp_path):
    run = slurm(cluster, recipe, tmp_path / "run")
    assert run.code == 0, run.console
    assert run.losses == pytest.approx(local, rel=1e-6)
    assert "n1: ranks 0-1   n2: ranks 2-3" in run.stdout
    assert "2 nodes x 2 processes" in run.stdout
    assert "best validation loss" in run.stdout, "rank 0's output is shown"
    assert run.summary["world_size"] == 4
    assert queue(cluster) == ""


def test_without_waiting_the_command_returns_at_once_and_says_how_to_follow(cluster, tmp_path):
    toy = [*TOY, "train.steps=2", "parallel=ddp", "parallel.dp=2", "launcher.wait=false"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = slurm(cluster, toy, tmp_path / "run")
    assert run.code == 0, run.console
    job = submitted(run)
    assert f"follow: tail -F {tmp_path}/run/slurm/{job}_0_log.out" in run.stdout
    assert f"scancel {job}" in run.stdout
    # Of processor time: how long that takes depends on what else the machine does.
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert not (tmp_path / "run" / "summary.json").exists(), "returned before the job's end"
    wait_until(lambda: (tmp_path / "run" / "summary.json").exists(), 60, "the job's end")
    wait_until(lambda: queue(cluster) == "", 30, "an empty queue")


def test_a_rank_that_is_killed_in_the_middle_ends_the_command_with_code_1(cluster, tmp_path):
    overrides = [*TOY, "train.steps=10000000", "parallel=pipe_ddp", *TWO_NODES]
    run = Started(overrides, tmp_path / "run", env=cluster.environment)
    try:
        metrics = run.folder / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 1000, 90, "some steps")
        os.kill(rank_pid(cluster, 3), signal.SIGKILL)
        begin = time.monotonic()
        ended = run.wait(60)
    finally:
        run.kill()
    assert ended.code == 1
    assert "error: rank 3 was killed by signal 9 (SIGKILL)" in ended.stderr
    assert time.monotonic() - begin < 60
    assert queue(cluster) == ""


def test_more_nodes_than_the_cluster_has_ends_the_command_with_code_1(cluster, tmp_path):
    three = [*TOY, "train.steps=2", "train.global_batch_size=6", "parallel=ddp", "parallel.dp=3", *TWO_NODES]
    three.append("launcher.nodes=3")
    run = train(three, tmp_path / "run", env=cluster.environment)
    assert run.code == 1
    assert "can never start: it asks for more nodes than the partition has" in run.stderr
    assert "Traceback" not in run.console


def test_a_sweep_is_one_array_with_one_table(cluster, tmp_path):
    overrides = [
        "-m", "parallel=pipelined", "parallel.chunks=1,2,3", *TOY[:3], "train.steps=3",
        f"hydra.sweep.dir={tmp_path}/sweep", "launcher=slurm", "launcher.poll_s=0.5", "launcher.mem_gb=2",
        "train.global_batch_size=16",
    ]  # fmt: skip
    run = train(overrides, tmp_path / "run", own_folder=False, env=cluster.environment)
    assert run.code == 1, "one of the three cannot be cut"
    assert "train.global_batch_size=16 cannot be cut into dp=1 x chunks=3" in run.stderr
    assert re.search(r"jobs (\d+)_0, \1_1 queued", run.stdout)
    status = [json.loads((tmp_path / "sweep" / str(n) / "job.json").read_text())["status"] for n in range(3)]
    assert status == ["finished", "finished", "failed"]
    assert (tmp_path / "sweep" / "sweep.csv").read_text().count("\n") == 4
    assert list((tmp_path / "sweep" / "1").glob("wandb/offline-run-*/*.wandb"))
    assert queue(cluster) == ""


# What SLURM does by itself: a signal to all tasks some time before the limit; preemption.
@pytest.mark.parametrize("command", [["scancel", "--signal=USR2"], ["scontrol", "requeue"]], ids=["time", "preemption"])
def test_a_job_whose_time_is_over_saves_queues_again_and_goes_on(cluster, tmp_path, command):
    overrides = [*TOY[:3], "train.steps=60", "parallel=ddp", "parallel.dp=2", *TWO_NODES]
    run = Started(overrides, tmp_path / "run", env=cluster.environment)
    try:
        wandb = run.folder / "wandb_id.txt"
        wait_until(lambda: wandb.exists() and wandb.read_text().strip(), 90, "the start")
        wandb_id = wandb.read_text()
        job = run.folder / "slurm"
        number = next(job.glob("*_submitted.pkl")).name.partition("_")[0]
        subprocess.run([*command, number], env=environment(cluster.environment), check=True)
        ended = run.wait(150)
    finally:
        run.kill()
    assert ended.code == 0, ended.console
    assert re.search(r"stopped after step \d+ of 60, saved in ", ended.console)
    assert [line["step"] for line in ended.steps] == list(range(1, 61)), "no gap, nothing twice"
    assert wandb.read_text() == wandb_id
    assert queue(cluster) == ""


def test_a_batch_script_of_ones_own_gives_the_same_losses(cluster, recipe, local, tmp_path):
    folder = tmp_path / "run"
    words = [*recipe, f"hydra.run.dir={folder}"]
    python = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    command = ["sbatch", "--wait", "--nodes=2", "--mem=2G", f"--output={tmp_path}/out", "launchers/train.sbatch"]
    env = environment({**cluster.environment, "PATH": python})
    done = subprocess.run([*command, *words], cwd=ROOT, env=env, timeout=120)
    assert done.returncode == 0, (tmp_path / "out").read_text()
    assert Run(0, "", "", 0.0, folder).losses == pytest.approx(local, rel=1e-6)
    assert "n1: ranks 0-1   n2: ranks 2-3" in (tmp_path / "out").read_text()


def rank_pid(cluster, rank):
    """The process of a rank, found by its environment."""
    for entry in Path("/proc").iterdir():
        try:
            env = dict(pair.partition(b"=")[::2] for pair in (entry / "environ").read_bytes().split(b"\0"))
            here = env.get(b"SLURM_CONF", b"").decode() == cluster.environment["SLURM_CONF"]
            if here and env.get(b"SLURM_PROCID") == b"%d" % rank and b"SLURM_STEP_ID" in env:
                if b"submitit" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"no process of rank {rank}")


class Hosts:
    """Two network namespaces joined by a cable, as two hosts."""

    ADDRESSES = ("10.213.77.1", "10.213.77.2")

    def __init__(self):
        self.names = [f"owp{os.getpid()}{side}" for side in "ab"]

    def ip(self, *words, check=True):
        return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)

    def __enter__(self):
        for name in self.names:
            self.ip("netns", "add", name)
            self.ip("-n", name, "link", "set", "lo", "up")
        left, right = self.names
        self.ip("link", "add", "cable", "netns", left, "type", "veth", "peer", "name", "cable", "netns", right)
        for name, address in zip(self.names, self.ADDRESSES, strict=True):
            self.ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            self.ip("-n", name, "link", "set", "cable", "up")
        return self

    def __exit__(self, *exception):
        for name in self.names:
            self.ip("netns", "del", name, check=False)

    def cut(self):
        self.ip("-n", self.names[1], "link", "set", "cable", "down")

    def torchrun(self, overrides, folder, outputs, env=({}, {})):
        """Both agents, two ranks each."""
        agents = []
        for node, (name, output) in enumerate(zip(self.names, outputs, strict=True)):
            command = [
                "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                f"--node-rank={node}", "--nproc-per-node=2", f"--master-addr={self.ADDRESSES[0]}",
                "--master-port=29417", "train.py", *overrides, f"hydra.run.dir={folder}",
            ]  # fmt: skip
            more = environment({"OMP_NUM_THREADS": "1", **env[node]})
            with open(output, "w") as file:
                agents.append(
                    subprocess.Popen(command, cwd=ROOT, env=more, stdout=file, stderr=file, start_new_session=True)
                )
        return agents


@pytest.fixture
def hosts():
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the ip command (apt-get install iproute2)")
    try:
        with Hosts() as pair:
            yield pair
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")


def end(agents, timeout_s):
    """Both agents' exit codes."""
    deadline = time.monotonic() + timeout_s
    try:
        return [agent.wait(max(0.1, deadline - time.monotonic())) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()


def test_two_torchrun_agents_on_two_hosts_give_the_same_losses_in_one_run_directory(hosts, recipe, local, tmp_path):
    outputs = [tmp_path / "a", tmp_path / "b"]
    codes = end(hosts.torchrun(recipe, tmp_path / "run", outputs), 120)
    assert codes == [0, 0], "\n".join(path.read_text() for path in outputs)
    assert Run(0, "", "", 0.0, tmp_path / "run").losses == pytest.approx(local, rel=1e-6)
    assert re.search(r"10.213.77.1: ranks 0-1 .*10.213.77.2: ranks 2-3", outputs[0].read_text())


def test_a_cable_that_is_cut_in_the_middle_names_the_ranks_that_are_lost(hosts, tmp_path):
    outputs = [tmp_path / "a", tmp_path / "b"]
    endless = [*TOY, "train.steps=10000000", "parallel=pipe_ddp", "parallel.timeout_s=5"]
    agents = hosts.torchrun(endless, tmp_path / "run", outputs)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 1000, 90, "some steps")
    finally:
        hosts.cut()
        codes = end(agents, 40)
    assert codes == [1, 1]
    assert "rank 0 (" in outputs[0].read_text()
    assert re.search(r"lost the connection to rank 2 \([^)]*10.213.77.2\)", outputs[0].read_text())
    assert re.search(r"lost the connection to rank 0 \([^)]*10.213.77.1\)", outputs[1].read_text())


def test_hosts_that_cannot_reach_each_other_are_named_before_the_run_starts(hosts, tmp_path):
    outputs = [tmp_path / "a", tmp_path / "b"]
    wrong = ({}, {"GLOO_SOCKET_IFNAME": "lo"})
    toy = [*TOY, "train.steps=2", "parallel=pipe_ddp", "parallel.timeout_s=10"]
    codes = end(hosts.torchrun(toy, tmp_path / "run", outputs, wrong), 60)
    assert codes == [1, 1]
    assert re.search(r"rank 0 \(.*10.213.77.1\) cannot connect to rank 2 \(.*127.0.0.1\): ", outputs[0].read_text())
    assert "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; here there are lo (127.0.0.1), cable" in outputs[0].read_text()
