"""A trace of some steps by torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

WARM_UP_STEPS = 3


@contextmanager
def profiler(steps: int, run_dir: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Records some steps with torch.profiler into ``run_dir/profile/rank_0000.json``, a Chrome trace.

    Args:
        steps: How many steps are recorded, after three of warm-up; 0 for none.
        run_dir: The run's directory.
        rank: This process's rank.

    Yields:
        A function to call after each step.
    """
    if steps == 0:
        yield lambda: None
        return
    from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

    target = run_dir / "profile" / f"rank_{rank:04d}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    with profile(
        activities=list(supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}),
        schedule=schedule(wait=WARM_UP_STEPS - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(target)),
    ) as recorder:
        yield recorder.step
