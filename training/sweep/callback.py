"""What Hydra calls when a sweep has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf


class SweepReport(Callback):
    """Writes sweep.csv, sweep.png and report.html into the sweep's directory; exit code 1 if a job failed."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from training.sweep.report import report

        # With launcher.wait=false the jobs are still to come.
        waited = OmegaConf.select(config, "launcher.wait", default=True)
        if not report(Path(config.hydra.sweep.dir), ended=waited):
            raise SystemExit(1)
