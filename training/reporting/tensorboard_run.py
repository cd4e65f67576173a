"""TensorBoard: the run's numbers as event files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from conf.masking import mask_secrets
from training.reporting.loggers import scalars


class TensorBoardRun:
    """Event files in ``run_dir/tensorboard``: ``tensorboard --logdir outputs`` shows all runs below a folder."""

    requires = "tensorboard"

    def __init__(self, run_dir: str | Path, run_config: dict, run_name: str, folder: str = "tensorboard") -> None:
        """Store the folder; the first record creates the files. ``run_config`` is shown with its secrets masked."""
        self._folder, self._config, self._writer = Path(run_dir) / folder, mask_secrets(run_config), None

    def log(self, record: dict, step: int) -> None:
        """Add the numbers of a record."""
        for name, value in scalars(record).items():
            self._open(step, after="loss" not in record).add_scalar(name, value, step)
        if self._writer is not None:
            self._writer.flush()  # a killed process would lose what is queued, up to 120 s if TensorFlow is installed

    def histogram(self, name: str, counts: Sequence[float], edges: Sequence[float], step: int) -> None:
        """Add a histogram, see ``Loggers.histogram``. Each element counts as the middle of its bin."""
        middles = [(low + high) / 2 for low, high in zip(edges, edges[1:], strict=False)]
        total = sum(count * x for count, x in zip(counts, middles, strict=True))
        squares = sum(count * x * x for count, x in zip(counts, middles, strict=True))
        self._open(step).add_histogram_raw(
            name, edges[0], edges[-1], int(sum(counts)), total, squares, edges[1:], counts, step
        )

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Add the summary and close the files."""
        if self._writer is not None:
            if summary is not None:
                self._writer.add_text("summary", _as_code(mask_secrets(summary)), summary["steps"])
            self._writer.close()

    def _open(self, step: int, after: bool = False):
        """Return the writer. ``after`` tells whether the record follows ``step``, like an evaluation."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Hides the records of a killed run that are newer than the step to resume from.
            self._writer = SummaryWriter(str(self._folder), purge_step=step + after)
            self._writer.add_text("config", _as_code(self._config), step)
        return self._writer


def _as_code(content: dict) -> str:
    text = json.dumps(content, indent=1, default=str)
    return "    " + text.replace("\n", "\n    ")  # Markdown
