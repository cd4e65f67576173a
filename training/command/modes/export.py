"""mode=export: write the model of a checkpoint in a format of other programs (``training.export``)."""

from __future__ import annotations

from pathlib import Path

from common.errors import TrainingError
from common.files import expand_home
from conf.composition import Composed
from conf.schema import Root
from launchers import stopping
from training.command.app import check_alone
from training.export.write import check_export, write
from training.run.restore import restore


def run(composed: Composed) -> None:
    """Export in one process. A checkpoint contains the whole model, so ``parallel`` and ``launcher`` do not matter."""
    check_alone(composed)
    stopping.at_once()
    print(export(composed.cfg, composed.run_dir), flush=True)


def export(cfg: Root, run_dir: Path) -> str:
    """Write the model of ``cfg.checkpoint`` to the folder ``cfg.export_to``, in the format of ``cfg.export``.

    A relative folder is in ``run_dir``. The folder appears complete or not at all.

    Returns:
        A sentence that describes what was written.

    Raises:
        TrainingError: The folder exists, or ``training.export.write`` raises it.
        CheckpointError: The checkpoint cannot be read, or the folder cannot be written.
    """
    folder = expand_home(cfg.export_to, Path(run_dir).absolute())
    if folder.exists():
        raise TrainingError(f"{folder} exists already; choose another export_to=")
    check_export(cfg)
    restored = restore(cfg, "cpu")
    written = write(cfg, folder, restored.data, restored.strategy)
    return f"exported {cfg.model.name} after step {restored.step} to {folder}: {written}"
