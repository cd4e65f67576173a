"""torchrun as a queue needs it: a run that has saved and asks to be continued is not a failed one."""

import signal
import subprocess

import pytest
from commandline import free_port, wait_until

RANK = """
import os, signal, sys, time
code = int(sys.argv[1 + int(os.environ["RANK"])])
if code != -15:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("started", flush=True)
if code < 0:
    time.sleep(60)
sys.exit(code)
"""


@pytest.fixture
def torchrun(tmp_path, started):
    (tmp_path / "rank.py").write_text(RANK)

    def start(*codes):
        words = ["--nproc-per-node", f"{len(codes)}", "--master-port", f"{free_port()}", f"{tmp_path / 'rank.py'}"]
        return started("-m", "launchers.torchrun", *words, *codes, stderr=subprocess.DEVNULL)

    return start


@pytest.mark.parametrize(
    "codes, expected",
    [
        pytest.param(["0", "0"], 0, marks=pytest.mark.slow),
        pytest.param(["75", "75"], 75, marks=pytest.mark.slow),
        (["75", "-15"], 75),  # torchrun ends those that have not left yet, wherever they are
        (["-1", "3"], 1),  # here they say 75, as another one has failed
    ],
)
def test_its_code_is_75_if_the_first_rank_to_end_has_saved(torchrun, codes, expected):
    assert torchrun(*codes).wait(120) == expected


def test_its_code_is_75_where_it_is_told_to_stop_itself(torchrun):
    one = torchrun("-1")
    assert one.stdout.readline() == "started\n"
    one.send_signal(signal.SIGTERM)
    assert one.wait(120) == 75


@pytest.mark.slow
def test_where_one_pod_is_evicted_every_pod_says_that_the_run_asks_to_be_continued(tmp_path, started):
    port, run = free_port(), tmp_path / "run"
    words = ["train.py", "parallel=ddp", "device=cpu", "logger=none", "train.epochs=null", "train.steps=10000000"]
    words += ["train.eval_every=null", f"hydra.run.dir={run}", "train.resume=auto"]
    agent = ["-m", "launchers.torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    agent += ["--master-port", f"{port}"]
    pods = [started(*agent, "--node-rank", f"{number}", *words, stdout=None) for number in range(2)]
    wait_until(lambda: (run / "metrics.jsonl").exists(), 150, "the first step")
    pods[1].terminate()
    assert [pod.wait(100) for pod in pods] == [75, 75]
    assert (run / "checkpoints" / "latest").exists()
