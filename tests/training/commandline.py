"""train.py as a user starts it: a process of its own, whose console, files and children tests can look at."""

import atexit
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from launchers import stopping

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "train.py"
TIMEOUT_S = 240  # a run of seconds on a machine that others keep busy; pytest itself gives a test 300
# What torchrun, or a test run under it, would leave behind for the command to find.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME")
_FOREIGN_PREFIXES = ("TORCHELASTIC_", "SLURM_", "WANDB_", "HYDRA_", "OMP_NUM_")


@dataclass
class Run:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    folder: Path

    @cached_property
    def metrics(self) -> list[dict]:
        return records(self.folder)

    @cached_property
    def summary(self) -> dict:
        return _json((self.folder / "summary.json").read_text())

    @property
    def steps(self) -> list[dict]:
        """The records of optimizer steps."""
        return [line for line in self.metrics if "loss" in line]

    @property
    def evaluations(self) -> list[dict]:
        return [line for line in self.metrics if "val_loss" in line]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.steps]

    @property
    def val_losses(self) -> list[float]:
        return [line["val_loss"] for line in self.evaluations]

    @property
    def console(self) -> str:
        return self.stdout + self.stderr


class Forked(multiprocessing.get_context("forkserver").Process):
    """``python SCRIPT ARGUMENTS…``, or ``python -m MODULE ARGUMENTS…``, without the seconds of imports: forked from a
    process that has done them."""

    def __init__(self, argv: list[str], **state) -> None:
        super().__init__(name="MainProcess")
        self._argv, self._state = argv, state
        self.start()

    def run(self) -> None:
        """In the forked process: what a new interpreter would find, then the script."""
        os.setsid()
        for descriptor, name in enumerate((os.devnull, self._state["stdout"], self._state["stderr"])):
            os.dup2(os.open(name, os.O_RDWR), descriptor)
        os.chdir(self._state["cwd"])
        os.environ.clear()
        os.environ.update(self._state["env"])
        if self._state["before"] is not None:
            self._state["before"]()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        multiprocessing.set_start_method(None, force=True)
        _fork_the_fork_server()
        first, *rest = self._argv
        sys.argv = rest if first == "-m" else self._argv
        sys.path.insert(0, str(self._state["cwd"]) if first == "-m" else str(Path(first).parent))
        try:
            if first == "-m":
                runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(first, run_name="__main__")
        finally:
            atexit._run_exitfuncs()

    # As subprocess.Popen has it.

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        self.join(timeout_s)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self._argv, timeout_s)
        return self.exitcode

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)


def _fork_the_fork_server() -> None:
    """The process that forks the run's workers is a fork of this one, which has imported everything."""
    start = multiprocessing.util.spawnv_passfds

    def fork(path, args, fds):
        # A lock that another thread holds would stay locked in the fork.
        if "forkserver" not in args[-1] or len(os.listdir("/proc/self/task")) > 1 or threading.active_count() > 1:
            return start(path, args, fds)
        if pid := os.fork():
            return pid
        try:
            for signum in stopping.SIGNALS:
                signal.signal(signum, signal.SIG_DFL)
            stopping._state.__init__()
            for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *fds}:
                with suppress(OSError):
                    os.close(fd)
            exec(args[-1])
        finally:
            os._exit(1)

    if sys.platform == "linux":
        multiprocessing.util.spawnv_passfds = fork


class Started:
    """train.py at the head of its own session. Output goes to files: a pipe would stay open in an orphan.

    prefix  options of Python's before the script; ``-m MODULE …`` has the module start it
    fresh   in a new interpreter, imports and all: where these count, or ``env`` has what Python reads at its start
    before  called in the new process before train.py, where that is not fresh
    """

    def __init__(
        self,
        overrides: Sequence[str],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        cwd: Path = ROOT,
        own_folder: bool = True,
        tag: str = "console",
        fresh: bool = False,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.folder = folder
        self._out, self._err = (folder.parent / f"{folder.name}.{tag}.{kind}" for kind in ("out", "err"))
        where = [f"hydra.run.dir='{folder}'"] if own_folder else []
        arguments = [str(TRAIN), *overrides, *where]
        self._begin = time.monotonic()
        place = {"cwd": cwd, "env": environment(env)}
        with open(self._out, "w") as out, open(self._err, "w") as err:
            if fresh or (prefix and prefix[0] != "-m"):
                files = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
                command = [sys.executable, *prefix, *arguments]
                self.process = subprocess.Popen(command, **place, **files, start_new_session=True)
            else:
                arguments = [*prefix, *arguments]
                self.process = Forked(arguments, **place, stdout=self._out, stderr=self._err, before=before)

    def heeds(self) -> bool:
        """Whether the process has got so far that it handles SIGTERM."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = next(line.split()[1] for line in text.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)

    def family(self) -> list[psutil.Process]:
        """Every living process of the session except the first one, whoever its parent is now."""
        return [p for p in self.session() if p.pid != self.process.pid]

    def workers(self) -> list[psutil.Process]:
        """The ranks that the first process started, in their order."""
        children = psutil.Process(self.process.pid).children()
        return sorted((worker for child in children for worker in child.children()), key=lambda p: p.pid)

    def launched(self) -> list[psutil.Process]:
        """The ranks that torchrun, being the first process, has started, in their order. (In sessions of their own.)"""
        below = psutil.Process(self.process.pid).children(recursive=True)
        ranks = [p for p in below if str(TRAIN) in p.cmdline() and "RANK" in p.environ()]
        return sorted(ranks, key=lambda process: int(process.environ()["RANK"]))

    def session(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
                mine = os.getsid(process.pid) == self.process.pid
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait(self, timeout_s: float = TIMEOUT_S) -> Run:
        """The end of the command; AssertionError, with what it said, where it takes longer."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            said = f"{self._out.read_text()}\n{self._err.read_text()}"
            raise AssertionError(f"no end in {timeout_s} s:\n{said}") from None
        seconds = time.monotonic() - self._begin
        return Run(code, self._out.read_text(), self._err.read_text(), seconds, self.folder)

    def kill(self) -> None:
        """End everything of the session that is left, and what torchrun has started in others."""
        below = []
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.process.pid).children(recursive=True)
        for process in [*self.session(), *below]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def train(overrides: Sequence[str], folder: Path, *, timeout_s: float = TIMEOUT_S, **options) -> Run:
    """``python train.py *overrides`` with the run directory ``folder``, to its end."""
    started = Started(overrides, folder, **options)
    try:
        return started.wait(timeout_s)
    finally:
        started.kill()


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, without what would make the command take itself for a rank, plus ``more``."""
    kept = {k: v for k, v in os.environ.items() if k not in _FOREIGN and not k.startswith(_FOREIGN_PREFIXES)}
    return {**kept, **(more or {})}


def records(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [_json(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_until(condition, timeout_s: float, what: str) -> None:
    """Ask ten times a second; AssertionError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.1)


def _json(text: str) -> dict:
    """What ``text`` says; AssertionError where it has NaN or Infinity, which are not JSON."""
    found = []
    said = json.loads(text, parse_constant=found.append)
    assert not found, text
    return said
