"""Why a SLURM job has ended, from its state, its ranks' reports and what srun wrote."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from common.errors import LaunchError
from launchers.failure import Death, read_report, root_cause
from launchers.slurm_queue import State
from launchers.slurm_worker import report_path

_TASKS = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.+)$", re.MULTILINE)
_ATTEMPT_ENDS = "DUE TO JOB REQUEUE"
_WORDS = {
    "CANCELLED": "was cancelled",
    "OUT_OF_MEMORY": "was killed for using more memory than it asked for; set launcher.mem_gb higher, or use smaller "
    "micro-batches",
    "NODE_FAIL": "lost a node",
    "BOOT_FAIL": "lost a node, which did not start",
    "PREEMPTED": "was preempted and not queued again",
    "DEADLINE": "could not start before its deadline",
    "REVOKED": "was taken over by another cluster",
}


def explain(
    job: str, state: State, folder: Path, log_dir: str | os.PathLike, ranks: int, limit: int
) -> LaunchError | None:
    """The error that ended ``job``; None where all its ``ranks`` have done their work.

    folder: submitit's, with the ranks' results, reports and output. limit: the job's time limit in minutes.
    """
    if state.name == "TIMEOUT":
        return LaunchError(
            f"job {job} ran past its time limit of {limit} min and could not save in time; set launcher.time_min or "
            "launcher.signal_s higher, and go on by train.resume=auto in the same directory"
        )
    if state.name in _WORDS:
        return LaunchError(f"job {job} {_WORDS[state.name]}")
    deaths = find_deaths(job, folder, ranks)
    if deaths:
        return root_cause(deaths, log_dir)
    if state.name == "COMPLETED":
        return None
    return LaunchError(f"job {job} ended as {state.name} ({state.reason}){_last_words(job, folder)}")


def find_deaths(job: str, folder: Path, ranks: int) -> list[Death]:
    """The ranks that ended by themselves before their work was done, as far as can be told."""
    open_ranks = [rank for rank in range(ranks) if not (folder / f"{job}_{rank}_result.pkl").exists()]
    reports = {rank: read_report(report_path(folder, job, rank)) for rank in open_ranks}
    codes = exit_codes(_read(folder / f"{job}_0_log.err"))
    first = next(iter(codes), None)
    deaths = []
    for rank in open_ranks:
        code = codes.get(rank)
        if reports[rank] is not None:
            deaths.append(Death(rank, 1, reports[rank]))
        elif code is None:
            # srun is silent about a task that left with code 0; without any line it never came that far.
            if codes or len(open_ranks) < ranks:
                deaths.append(Death(rank, 0, None))
        elif code >= 0 or rank == first:
            # Later kills are srun's own, of the tasks that were left.
            deaths.append(Death(rank, code, None))
    return deaths


def exit_codes(text: str) -> dict[int, int]:
    """Rank -> exit code (-N for signal N) of the tasks that srun's messages in ``text`` name, in their order."""
    found: dict[int, int] = {}
    for ranks, words in _TASKS.findall(text.rpartition(_ATTEMPT_ENDS)[2]):
        code = _code(words)
        if code is not None:
            for piece in ranks.split(","):
                low, _, high = piece.partition("-")
                for rank in range(int(low), int(high or low) + 1):
                    found.setdefault(rank, code)
    return found


def _code(words: str) -> int | None:
    exited = re.match(r"Exited with exit code (\d+)", words)
    if exited:
        return int(exited.group(1))
    by_words = {signal.strsignal(number): number for number in signal.valid_signals()}
    number = by_words.get(words.removesuffix(" (core dumped)").strip())
    return None if number is None else -number


def _last_words(job: str, folder: Path, count: int = 20) -> str:
    lines = _read(folder / f"{job}_0_log.err").splitlines()[-count:]
    return ":\n" + "\n".join(lines) if lines else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
