"""Where a run's numbers go while it trains."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from parallel.strategy import Strategy
from training.config import instantiate, to_dict
from training.loop import due
from training.reporting import MetricsFile, Progress, describe, write_json
from training.reporting.console import METRICS, SUMMARY
from training.setup import Setup


class Recorder:
    """Where rank 0's numbers go: metrics.jsonl, wandb, the progress bar. Silent on other ranks."""

    def __init__(self, setup: Setup, strategy: Strategy, run_dir: Path, first_step: int) -> None:
        self._talks = strategy.mesh.rank == 0
        if not self._talks:
            return
        cfg = setup.cfg
        self._setup, self._run_dir = setup, run_dir
        write_json(run_dir / "environment.json", describe())
        with suppress(OSError):
            (run_dir / SUMMARY).unlink()  # of the run that this one goes on with: it speaks of fewer steps
        self._metrics = MetricsFile(run_dir / METRICS)
        if cfg.train.resume is not None:
            self._metrics.truncate_after(first_step - 1)
        self._logger = instantiate(
            to_dict(cfg.logger), run_dir=run_dir, run_config=to_dict(cfg), run_name=_run_name(cfg)
        )
        self._progress = Progress(setup.total_steps, first_step, tokens=setup.tokens_per_sample is not None)

    def lacks_evaluation(self, step: int) -> bool:
        """Whether the run was stopped before or in the evaluation that was due after ``step``, so that it is on record
        with its training only. As rank 0 knows; False on other ranks."""
        if step == 0 or not self._talks or not due(self._setup.cfg.train.eval_every, step, self._setup.total_steps):
            return False
        lines = self._metrics.of_step(step)
        return bool(lines) and not any("val_loss" in line for line in lines)

    def record(self, line: dict) -> None:
        if self._talks:
            self._metrics.write(line)
            self._logger.log(line, line["step"])

    def show(self, *args) -> None:
        if self._talks:
            self._progress.update(*args)

    def say(self, text: str) -> None:
        if self._talks:
            self._progress.say(text)

    def close(self, summary: dict | None) -> None:
        """``summary`` is None for a run that failed: no summary.json then."""
        if not self._talks:
            return
        self._progress.close()
        if summary is not None:
            write_json(self._run_dir / SUMMARY, summary)
        self._metrics.close()
        self._logger.finish(summary, exit_code=0 if summary is not None else 1)


def _run_name(cfg: Any) -> str:
    return f"{cfg.model.name}-{cfg.parallel.name}"
