"""Why a SLURM job has ended, from its state, its ranks' reports and what srun wrote."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from common.errors import LaunchError
from launchers.failure import Death, root_cause
from launchers.slurm_queue import State
from launchers.slurm_worker import read_reports

_TASKS = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+)$", re.MULTILINE)
_OUT_OF_MEMORY = "Out Of Memory"
_ATTEMPT_ENDS = "DUE TO JOB REQUEUE"
_WORDS = {
    "CANCELLED": "was cancelled",
    "NODE_FAIL": "lost a node",
    "PREEMPTED": "was preempted and not queued again",
    "OUT_OF_MEMORY": "was killed for using more memory than it asked for; set launcher.mem_gb higher, or use smaller "
    "micro-batches",
    "TIMEOUT": "ran past its time limit of {limit} min and could not save in time; set launcher.time_min or "
    "launcher.signal_s higher, and go on by train.resume=auto in the same directory",
}


def explain(job: str, state: State, folder: Path, log_dir: Path, ranks: int, limit: int) -> LaunchError | None:
    """Return the error that ended ``job``, None where all its ranks have done their work.

    Args:
        job: The job's number.
        state: Its last state.
        folder: Where its output and its ranks' reports are.
        log_dir: Where the ranks other than 0 wrote their logs.
        ranks: The number of its processes.
        limit: Its time limit in minutes.
    """
    errors = folder / f"{job}.err"
    text = errors.read_text(errors="replace") if errors.exists() else ""
    killed = [str(rank) for rank, words in _ended(text) if words == _OUT_OF_MEMORY]
    if killed or (words := _WORDS.get(state.name)):
        who = f" (rank {', '.join(killed)})" if killed else ""
        words = _WORDS["OUT_OF_MEMORY"] if killed else words
        return LaunchError(f"job {job}{who} {words.format(limit=limit)}")
    reports = read_reports(folder, job, ranks)
    if deaths := find_deaths(reports, exit_codes(text)):
        return root_cause(deaths, log_dir)
    if state.name == "COMPLETED":
        if all(report == {} for report in reports.values()):
            return None
        return LaunchError(f"job {job} has ended before any rank began; its output: {folder / job}.out")
    last_words = "".join(f"\n{line}" for line in text.splitlines()[-20:])
    return LaunchError(f"job {job} ended as {state.name} ({state.reason}){':' * bool(last_words)}{last_words}")


def find_deaths(reports: Mapping[int, dict | None], codes: Mapping[int, int]) -> list[Death]:
    """Return the ranks that ended by themselves before their work was done, as far as can be told.

    Args:
        reports: What each rank has left (see launchers.slurm_worker.read_reports).
        codes: What srun said about them (see ``exit_codes``).
    """
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
    codes: dict[int, int] = {}
    for rank, words in _ended(text):
        code = _code(words)
        if code is not None:
            codes.setdefault(rank, code)
    return codes


def _ended(text: str) -> Iterator[tuple[int, str]]:
    """Each rank that srun's messages about the last attempt name, in their order, with srun's words."""
    for ranks, words in _TASKS.findall(text.rpartition(_ATTEMPT_ENDS)[2]):
        for piece in ranks.split(","):
            low, _, high = piece.partition("-")
            for rank in range(int(low), int(high or low) + 1):
                yield rank, words.removesuffix(" (core dumped)").strip()


def _code(words: str) -> int | None:
    exited = re.match(r"Exited with exit code (\d+)", words)
    if exited:
        return int(exited.group(1))
    by_words = {signal.strsignal(number): number for number in signal.valid_signals()}
    number = signal.SIGKILL if words == _OUT_OF_MEMORY else by_words.get(words)
    return None if number is None else -number
