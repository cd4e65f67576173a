"""What the jobs of a sweep leave behind, made by hand."""

from __future__ import annotations

import json
from pathlib import Path

from training.reporting.job_record import FINISHED, Job, write_job


def leave(
    sweep: Path,
    num: int,
    *overrides: str,
    times: list[float] | None = None,
    status: str = FINISHED,
    error: str | None = None,
    batch: int = 60,
    model: str = "resnet50",
    chunks: int | None = None,
) -> Path:
    """Job ``num`` of ``sweep``, whose steps took ``times`` seconds; with ``chunks``, in a GPipe of two stages."""
    folder = sweep / str(num)
    folder.mkdir(parents=True)
    write_job(folder, Job(num, overrides, status, error, 12.5))
    if times is None:
        return folder
    lines = [{"step": i, "loss": 2 / i, "step_time_s": t} for i, t in enumerate(times, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status == FINISHED:
        kept = sorted(times[2:])
        middle = kept[len(kept) // 2]
        summary = {"model": model, "parallel": "pipelined" if chunks else "single", "schedule": chunks and "gpipe"}
        summary |= {"chunks": chunks or 1, "step_time_s": middle, "samples_per_s": batch / middle}
        summary |= {"ideal_bubble_fraction": chunks and 1 / (chunks + 1)}
        summary |= {"bubble_fraction": chunks and 1.2 / (chunks + 1), "peak_memory_bytes": [3 << 30, 2 << 30]}
        summary |= {"stages": [{"layers": ["a", "b"], "parameters": 7}], "final_loss": 2 / len(times)}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def chunk_sweep(sweep: Path) -> Path:
    """Nine chunk counts of a pipeline with a best one at 12, one of them without memory."""
    for num, (chunks, seconds) in enumerate(
        [(1, 5.7), (2, 4.4), (3, 3.9), (5, 3.3), (6, 3.15), (10, 2.95), (12, 2.9), (20, 3.0), (30, 3.3)]
    ):
        override = ("model=resnet50", "parallel=pipelined", f"parallel.chunks={chunks}")
        if chunks == 2:
            error = "Traceback (most recent call last):\n  File …\ntraining.errors.TrainingError: no memory <left> &"
            leave(sweep, num, *override, status="failed", error=error)
        else:
            spread = [1 + 0.03 * (i % 5 - 2) for i in range(12)]
            leave(sweep, num, *override, times=[seconds * s for s in spread], chunks=chunks)
    return sweep
