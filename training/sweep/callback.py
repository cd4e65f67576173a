"""What Hydra calls when a sweep has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SweepReport(Callback):
    """Writes sweep.csv, sweep.png and report.html into the sweep's directory; exit code 1 if a job did not finish."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from training.sweep.report import report

        if not report(Path(config.hydra.sweep.dir)):
            raise SystemExit(1)
