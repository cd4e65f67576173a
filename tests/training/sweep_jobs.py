"""Directories as the jobs of a sweep leave them, made by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

from training.reporting.job_record import Job, Status, write_job


def leave(
    sweep: Path,
    num: int,
    *overrides: str,
    times: list[float] | None = None,
    losses: Sequence[float] | None = None,
    status: Status = "finished",
    error: str | None = None,
    **results,
) -> Path:
    """Writes the directory of a job whose steps took ``times`` seconds; ``results`` are more of its summary."""
    folder = sweep / str(num)
    folder.mkdir(parents=True)
    write_job(folder, Job(num, overrides, status, error, 12.5))
    if times is None:
        return folder
    steps = zip(times, losses or [2 / i for i in range(1, len(times) + 1)], strict=losses is None)
    lines = [{"step": i, "loss": loss, "step_time_s": t} for i, (t, loss) in enumerate(steps, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status == "finished":
        median = sorted(times[2:])[len(times[2:]) // 2]
        summary = {"model": "resnet50", "parallel": "single", "chunks": 1, "final_loss": lines[-1]["loss"]}
        summary |= {"step_time_s": median, "samples_per_s": 60 / median, "peak_memory_bytes": [3 << 30, 2 << 30]}
        summary |= {"stages": [{"layers": ["a", "b"], "parameters": 7}], **results}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def chunk_sweep(sweep: Path) -> Path:
    """Nine numbers of chunks of a pipeline, of which 12 is the fastest and 2 ran out of memory."""
    seconds = {1: 5.7, 2: 4.4, 3: 3.9, 5: 3.3, 6: 3.15, 10: 2.95, 12: 2.9, 20: 3.0, 30: 3.3}
    for num, chunks in enumerate(seconds):
        overrides = ("model=resnet50", "parallel=pipelined", f"parallel.chunks={chunks}")
        if chunks == 2:
            error = "Traceback (most recent call last):\n  File …\ncommon.errors.TrainingError: no memory <left> &"
            leave(sweep, num, *overrides, status="failed", error=error)
        else:
            times = [seconds[chunks] * (1 + 0.03 * (i % 5 - 2)) for i in range(12)]
            ideal = 1 / (chunks + 1)
            bubble = {"ideal_bubble_fraction": ideal, "bubble_fraction": 1.2 * ideal}
            leave(sweep, num, *overrides, times=times, parallel="pipelined", schedule="gpipe", chunks=chunks, **bubble)
    return sweep
