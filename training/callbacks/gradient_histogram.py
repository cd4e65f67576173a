"""Writes histograms of each parameter's gradient at regular steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from common.errors import TrainingError
from training.callbacks import Callback, TrainingRun
from training.reporting.metrics import MetricsFile, truncate_after

_MOST_BINS = 512  # the most that wandb accepts


class GradientHistogram(Callback):
    """Writes a histogram of each parameter's gradient to gradients.jsonl, and to loggers that draw histograms."""

    def __init__(self, every: int = 10, bins: int = 32) -> None:
        """Check the numbers.

        Args:
            every: Number of steps from one histogram to the next, beginning with the first step.
            bins: Number of bins between the smallest and the largest element.

        Raises:
            TrainingError: A number is out of range.
        """
        if every < 1 or not 1 <= bins <= _MOST_BINS:
            raise TrainingError(
                f"gradient_histogram: every={every} must be at least 1, and bins={bins} from 1 to {_MOST_BINS}"
            )
        self.every, self.bins = every, bins
        self._file: MetricsFile | None = None

    def on_step(self, run: TrainingRun, record: Mapping[str, Any]) -> None:
        """Gather the histograms of all stages on rank 0. Of ranks with equal gradients, only the first one counts."""
        if (run.step - 1) % self.every or record["skipped"]:  # a skipped step's gradients may be infinite
            return
        mesh, own = run.strategy.mesh, {}
        for name, parameter in run.strategy.named_parameters():
            if parameter.grad is not None:
                gradient = run.strategy.whole(name, parameter.grad.detach())  # gathered from all ranks with a part
                if mesh.owns():
                    counts, edges = torch.histogram(gradient.flatten().float().cpu(), self.bins)
                    own[name] = counts.tolist(), edges.tolist()
        stages = mesh.gather(own)
        if mesh.rank > 0:
            return
        if self._file is None:
            self._file = MetricsFile(run.run_dir / "gradients.jsonl")
            truncate_after(self._file.path, run.step - 1)  # steps that are computed again after a restart
        for name, (counts, edges) in {name: h for stage in stages for name, h in stage.items()}.items():
            self._file.write({"step": run.step, "name": name, "counts": counts, "edges": edges})
            run.histogram(f"gradients/{name}", counts, edges, run.step)

    def on_end(self, run: TrainingRun, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
