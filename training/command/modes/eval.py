"""mode=eval: evaluate a checkpoint on the validation and the test split."""

from __future__ import annotations

from conf.composition import Composed
from training.command.launch import launch


def run(composed: Composed) -> None:
    """Evaluate in the layout of the command. Any layout may have saved the checkpoint."""
    launch(composed)
