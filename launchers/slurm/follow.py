"""Follows submitted runs to their end, and says why one has failed. Nothing here needs accounting (sacct)."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from common.errors import LaunchError
from launchers.failure import Death, root_cause
from launchers.slurm.submit import Job, ask
from launchers.slurm.task import read_reports
from launchers.stopping import Interrupted, StopSignals

_SETTLE_S = 60.0  # until the queue and a shared file system show what has happened
_PATIENCE_S = 300.0  # how long the queue may be silent, and a job wait for what it can hardly get
_ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip
# Reasons to wait that mostly last: the job asks for too much. (Priority, Resources or a node that is down pass.)
_TOO_MUCH = re.compile(
    r"Partition(Config|NodeLimit|TimeLimit)|BadConstraints|AccountNotAllowed|InvalidAccount|InvalidQOS|QOSNotAllowed"
    r"|AccountingPolicy|DependencyNeverSatisfied|(QOS|Assoc)Max\w+PerJob"
)
_WHY = {
    "CANCELLED": "was cancelled",
    "NODE_FAIL": "lost a node",
    "PREEMPTED": "was preempted and not queued again",
    "OUT_OF_MEMORY": "was killed for using more memory than it asked for; set launcher.mem_gb higher, or use smaller "
    "micro-batches",
    "TIMEOUT": "ran past its time limit of {limit} min and could not save in time; set launcher.time_min or "
    "launcher.signal_s higher, and go on by train.resume=auto in the same directory",
}
_TASKS = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+)$", re.MULTILINE)
_OUT_OF_MEMORY = "Out Of Memory"
_ATTEMPT_ENDS = "DUE TO JOB REQUEUE"


class State(NamedTuple):
    """A job as squeue shows it: its state, why it waits or has failed, and its nodes in short form, n[1-2]."""

    name: str
    reason: str
    nodes: str


def wait(jobs: Sequence[Job], poll_s: float, tell: Callable[[str], None]) -> None:
    """Return when all ``jobs`` have ended; ``job.error`` says why one has failed.

    The output of rank 0 is shown as it comes, where there is only one job.

    Args:
        jobs: What ``submit`` returned.
        poll_s: The time between two looks at the queue, in seconds.
        tell: Called with a line for the user when a job starts to wait, waits for another reason, or starts to run.

    Raises:
        Interrupted: On SIGINT, SIGTERM or SIGHUP, after the jobs were cancelled.
        LaunchError: The queue does not answer any more. The jobs are cancelled, if that is possible.
    """
    shown = [_show(jobs[0].output, sys.stdout), _show(jobs[0].errors, sys.stderr)] if len(jobs) == 1 else []
    answered = time.monotonic()
    with StopSignals() as stop:
        try:
            while left := [job for job in jobs if not job.done]:
                try:
                    states = look([job.id for job in left])
                    answered = time.monotonic()
                    for job in left:
                        update(job, states.get(job.id), tell)
                except LaunchError:
                    if time.monotonic() - answered > _PATIENCE_S:
                        raise
                for output in shown:
                    next(output)
                deadline = time.monotonic() + poll_s
                while time.monotonic() < deadline and not all(job.done for job in jobs):
                    stop.check()
                    time.sleep(0.1)
        except Interrupted as interrupted:
            raise Interrupted(interrupted.signum, _cancel(jobs)) from None
        except BaseException:
            _cancel(jobs)
            raise


def look(jobs: Iterable[str]) -> dict[str, State]:
    """Return the states of those of ``jobs`` that the queue knows (it forgets a job minutes after its end).

    Raises:
        LaunchError: The queue does not answer.
    """
    wanted = set(jobs)
    numbers = ",".join(sorted({job.partition("_")[0] for job in wanted}))
    done = ask(["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%N", f"--jobs={numbers}"])
    if done.returncode and "Invalid job id" not in done.stderr:
        raise LaunchError(f"squeue: {done.stderr.strip()}")
    rows = [line.strip().split("|", 3) for line in done.stdout.splitlines()]
    return {row[0]: State(*row[1:]) for row in rows if row[0] in wanted}


def update(job: Job, state: State | None, tell: Callable[[str], None]) -> None:
    """Note what the queue says about ``job``; None where it does not know the job."""
    if state != job.answer:
        job.answer, job.since = state, time.monotonic()
    lasted = time.monotonic() - job.since
    reports = read_reports(job.folder, job.id, job.ranks).values()
    if state is None:
        if lasted > _SETTLE_S:
            job.done = True
            # The queue may have forgotten a finished job while nobody asked.
            if any(report != {} for report in reports):
                words = "has vanished from the queue without an end; its output so far"
                job.error = LaunchError(f"job {job.id} {words}: {job.output}")
    elif state.name in _ENDED:
        if state.name != "COMPLETED" or None not in reports or lasted > _SETTLE_S:
            job.done, job.error = True, explain(job, state)
    else:
        asks_too_much = state.name == "PENDING" and _TOO_MUCH.match(state.reason)
        minutes = f"{_PATIENCE_S / 60:g} min"
        if asks_too_much and lasted >= _PATIENCE_S:
            _scancel([job.id])
            job.done = True
            job.error = LaunchError(
                f"job {job.id} does not start: it has waited for {state.reason} for {minutes}, and was cancelled. Its "
                "partition, account or qos does not allow what it asks for: change launcher.nodes, launcher.time_min, "
                "launcher.partition, launcher.account, launcher.qos or launcher.sbatch"
            )
        elif state.name == "RUNNING":
            _say(job, f"job {job.id} runs on {state.nodes}", tell)
        elif state.name == "PENDING" or state.name.startswith("REQUEUE"):
            limit = f"; it is cancelled if that lasts {minutes}" if asks_too_much else ""
            _say(job, f"job {job.id} waits in the queue ({state.reason}{limit})", tell)


def _say(job: Job, words: str, tell: Callable[[str], None]) -> None:
    if words != job.said:
        job.said = words
        tell(words)


def _scancel(ids: Sequence[str]) -> None:
    done = ask(["scancel", *ids]) if ids else None
    if done and done.returncode:
        raise LaunchError(f"scancel: {done.stderr.strip()}")


def _cancel(jobs: Sequence[Job]) -> str:
    """Cancel those of ``jobs`` that have not ended, and wait for it; return what has become of them, in words."""
    ids = [job.id for job in jobs if not job.done]
    names = f"job{'s' * (len(ids) > 1)} {', '.join(ids)}"
    try:
        _scancel(ids)
        deadline = time.monotonic() + _SETTLE_S
        while any(state.name not in _ENDED for state in look(ids).values()):
            if time.monotonic() > deadline:
                return f"the queue was asked to cancel {names}, which had not ended after {_SETTLE_S:g} s"
            time.sleep(0.2)
    except LaunchError as error:
        return f"{names} may still run: {error}; cancel with: scancel {' '.join(ids)}"
    return f"{names} cancelled"


def _show(path: Path, stream: TextIO) -> Iterator[None]:
    """Print, each time that it is resumed, what was written to ``path`` meanwhile, without SLURM's own lines."""
    offset, rest = 0, b""
    while True:
        with suppress(OSError), open(path, "rb") as file:
            file.seek(offset)
            new = file.read()
            offset += len(new)
            *lines, rest = (rest + new).split(b"\n")
            for line in lines:
                if not line.startswith((b"srun: ", b"slurmstepd")):
                    print(line.decode(errors="replace"), file=stream, flush=True)
        yield


def explain(job: Job, state: State) -> LaunchError | None:
    """Return the error that ended ``job`` in its last ``state``, None where all its ranks have done their work."""
    text = job.errors.read_text(errors="replace") if job.errors.exists() else ""
    killed = [str(rank) for rank, words in _ended(text) if words == _OUT_OF_MEMORY]
    if why := _WHY.get("OUT_OF_MEMORY" if killed else state.name):
        who = f" (rank {', '.join(killed)})" if killed else ""
        return LaunchError(f"job {job.id}{who} {why.format(limit=job.time_min)}")
    reports = read_reports(job.folder, job.id, job.ranks)
    if deaths := _deaths(reports, exit_codes(text)):
        return root_cause(deaths, job.log_dir)
    if state.name == "COMPLETED":
        if all(report == {} for report in reports.values()):
            return None
        return LaunchError(f"job {job.id} has ended before any rank began; its output: {job.output}")
    last_words = "".join(f"\n{line}" for line in text.splitlines()[-20:])
    return LaunchError(f"job {job.id} ended as {state.name} ({state.reason}){':' * bool(last_words)}{last_words}")


def _deaths(reports: Mapping[int, dict | None], codes: Mapping[int, int]) -> list[Death]:
    """Return the ranks that ended by themselves before their work was done, as far as reports and srun's codes tell."""
    unfinished = [rank for rank, report in reports.items() if report != {}]
    first = next(iter(codes), None)
    deaths = []
    for rank in unfinished:
        code = codes.get(rank)
        if reports[rank] is not None:
            deaths.append(Death(rank, 1, reports[rank]))
        elif code is None:
            # srun does not mention a task that left with code 0; without any message it never came that far.
            if codes or len(unfinished) < len(reports):
                deaths.append(Death(rank, 0, None))
        elif code >= 0 or rank == first:
            # Later kills are srun's own, of the tasks that were left.
            deaths.append(Death(rank, code, None))
    return deaths


def exit_codes(text: str) -> dict[int, int]:
    """Return the exit code (-N for signal N) of each rank that srun's messages in ``text`` name, in their order.

    Only the messages about the job's last attempt count.
    """
    signals = {signal.strsignal(number): number for number in signal.valid_signals()}
    signals[_OUT_OF_MEMORY] = signal.SIGKILL
    codes: dict[int, int] = {}
    for rank, words in _ended(text):
        if exited := re.match(r"Exited with exit code (\d+)", words):
            codes.setdefault(rank, int(exited.group(1)))
        elif words in signals:
            codes.setdefault(rank, -signals[words])
    return codes


def _ended(text: str) -> Iterator[tuple[int, str]]:
    """Yield each rank that srun's messages about the last attempt name, in their order, with srun's words."""
    for ranks, words in _TASKS.findall(text.rpartition(_ATTEMPT_ENDS)[2]):
        for piece in ranks.split(","):
            low, _, high = piece.partition("-")
            for rank in range(int(low), int(high or low) + 1):
                yield rank, words.removesuffix(" (core dumped)").strip()
