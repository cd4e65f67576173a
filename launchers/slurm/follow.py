"""Follows submitted runs until they end, and reports why a run has failed. It needs no accounting (sacct)."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

from common.errors import LaunchError
from launchers.failure import Death, root_cause
from launchers.slurm.submit import Job, ask
from launchers.slurm.task import read_reports
from launchers.stopping import Interrupted, StopSignals

_SETTLE_S = 60.0  # until the queue and a shared file system show what has happened
_PATIENCE_S = 300.0  # how long the queue may not answer
_LAST_LINES = 20
_SLURM_PREFIXES = ("srun: ", "slurmstepd")  # of SLURM's own lines in a job's output
_ENDED_TASK = r"^srun: error: \S+ tasks? (\d+)\S*: (?:Exited with exit code (\d+)|(.*?))(?: \(core dumped\))?$"
_ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
)  # fmt: skip
_ADVICE = {
    "OUT_OF_MEMORY": "; set launcher.mem_gb higher, or use smaller micro-batches",
    "TIMEOUT": ": it could not save within its time limit; set launcher.time_min or launcher.signal_s higher, and "
    "continue with train.resume=auto in the same directory",
}


class State(NamedTuple):
    """A job in squeue: its state, why it waits or has failed, and its nodes in short form, n[1-2]."""

    name: str
    reason: str
    nodes: str


def wait(jobs: Sequence[Job], poll_s: float, tell: Callable[[str], None]) -> None:
    """Wait until all ``jobs`` have ended. ``job.error`` is then the error of a failed job.

    If there is only one job, this prints the output of its rank 0 meanwhile.

    Args:
        jobs: The result of ``submit``.
        poll_s: Seconds between two queries of the queue.
        tell: Called with a line for the user when a job starts to wait, waits for another reason, or starts to run.

    Raises:
        Interrupted: On SIGINT or a signal of launchers.stopping, after the jobs were cancelled.
        LaunchError: If the queue no longer answers. The jobs are cancelled if possible.
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
    """Return the states of the ``jobs`` that the queue knows. It forgets a job minutes after its end.

    Raises:
        LaunchError: If the queue does not answer.
    """
    wanted = set(jobs)
    numbers = ",".join(sorted({job.partition("_")[0] for job in wanted}))
    done = ask(["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r|%N", f"--jobs={numbers}"])
    if done.returncode and "Invalid job id" not in done.stderr:
        raise LaunchError(f"squeue: {done.stderr.strip()}")
    rows = [line.strip().split("|", 3) for line in done.stdout.splitlines()]
    return {row[0]: State(*row[1:]) for row in rows if row[0] in wanted}


def update(job: Job, state: State | None, tell: Callable[[str], None]) -> None:
    """Update ``job`` with its state in the queue; None if the queue does not know the job."""
    if state is None or state.name in _ENDED:
        job.ended = job.ended or time.monotonic()
        late = None in read_reports(job.folder, job.id, job.ranks).values()
        if late and (state is None or state.name == "COMPLETED") and time.monotonic() < job.ended + _SETTLE_S:
            return
        job.done, job.error = True, explain(job, state)
        return
    job.ended = None
    waits = state.name == "PENDING" or state.name.startswith("REQUEUE")
    words = f"job {job.id} waits in the queue ({state.reason})" if waits else f"job {job.id} runs on {state.nodes}"
    if (waits or state.name == "RUNNING") and words != job.shown:
        job.shown = words
        tell(words)


def explain(job: Job, state: State | None) -> LaunchError | None:
    """Return the error that ended ``job`` in its last ``state``; None if all its ranks have done their work.

    This is the error of the rank that failed first, or otherwise the state of the job and the last lines of its output.
    """
    reports = read_reports(job.folder, job.id, job.ranks)
    if (state is None or state.name == "COMPLETED") and all(report == {} for report in reports.values()):
        return None
    name = "" if state is None else state.name
    deaths = [Death(rank, 1, report) for rank, report in reports.items() if report]
    if name not in ("CANCELLED", *_ADVICE) and not all(death.lost_a_peer for death in deaths):
        return root_cause(deaths, job.log_dir)
    text = job.errors.read_text(errors="replace") if job.errors.exists() else ""
    if ": Out Of Memory" in text:
        name = "OUT_OF_MEMORY"
    ended = "vanished from the queue" if state is None else f"ended as {name} ({state.reason})"
    silent = [rank for rank, report in reports.items() if report is None]
    how = f"ended without a report, as if killed: rank {', '.join(map(str, silent))}" if silent else ""
    if name not in ("CANCELLED", *_ADVICE):  # in these, SLURM itself has killed the ranks
        first = (str(root_cause([death], job.log_dir)) for death in _deaths(text) if death.rank in silent)
        how = next(first, how)
    begun = any(report is not None for report in reports.values())  # the logs then have more than the queue
    lines = [line for line in text.splitlines() if line.startswith(_SLURM_PREFIXES) or not begun]
    shown = "\n".join(lines[-_LAST_LINES:])
    return LaunchError(
        f"job {job.id} {ended}{_ADVICE.get(name, '')}"
        + (f"; {how}" if how else "")
        + (f"\nFrom {job.errors}:\n{shown}" if shown else "")
    )


def _deaths(text: str) -> Iterator[Death]:
    """Yield how tasks have ended, in the order of the lines of srun. Of several tasks in a line, the first is named."""
    numbers = {signal.strsignal(number): number for number in signal.valid_signals()}
    for task, code, words in re.findall(_ENDED_TASK, text, re.MULTILINE):
        if code or words in numbers:
            yield Death(int(task), int(code) if code else -numbers[words], {})


def _cancel(jobs: Sequence[Job]) -> str:
    """Cancel the jobs that have not ended; return in words which jobs are cancelled or may still run."""
    ids = [job.id for job in jobs if not job.done]
    names = f"job{'s' * (len(ids) > 1)} {', '.join(ids)}"
    try:
        done = ask(["scancel", *ids])
    except LaunchError as error:
        return f"{names} may still run: {error}; cancel with: scancel {' '.join(ids)}"
    return f"{names} may still run: {done.stderr.strip()}" if done.returncode else f"{names} cancelled"


def _show(path: Path, stream: TextIO) -> Iterator[None]:
    """Each time that this is resumed, print the new lines of ``path``, without the lines of SLURM itself."""
    offset, rest = 0, b""
    while True:
        with suppress(OSError), open(path, "rb") as file:
            file.seek(offset)
            new = file.read()
            offset += len(new)
            *lines, rest = (rest + new).split(b"\n")
            for line in lines:
                if not (text := line.decode(errors="replace")).startswith(_SLURM_PREFIXES):
                    print(text, file=stream, flush=True)
        yield
