"""torchrun as a queue needs it: a run that has saved and asks to be continued is not a failed one."""

import signal
import subprocess
import sys

import pytest
from commandline import ROOT, free_port

RANK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
code = int(sys.argv[1 + int(os.environ["RANK"])])
print("started", flush=True)
if code < 0:
    time.sleep(60)
sys.exit(code)
"""


@pytest.fixture
def torchrun(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    started = []

    def start(*codes):
        words = ["--nproc-per-node", f"{len(codes)}", "--master-port", f"{free_port()}", f"{tmp_path / 'rank.py'}"]
        one = subprocess.Popen(
            [sys.executable, "-m", "launchers.torchrun", *words, *codes],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        started.append(one)
        return one

    yield start
    for one in started:
        one.kill()
        one.communicate()


@pytest.mark.parametrize("codes, expected", [(["0", "0"], 0), (["75", "75"], 75), (["-1", "3"], 1)])
def test_its_code_is_75_only_if_no_rank_has_failed(torchrun, codes, expected):
    one = torchrun(*codes)
    assert one.wait(120) == expected


def test_its_code_is_75_where_it_is_told_to_stop_itself(torchrun):
    one = torchrun("-1")
    assert one.stdout.readline() == "started\n"
    one.send_signal(signal.SIGTERM)
    assert one.wait(120) == 75
