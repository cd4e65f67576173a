"""mode=eval: evaluate a checkpoint on the validation and the test split."""

from __future__ import annotations

from training.command.app import Command
from training.command.launch import launch


def run(command: Command) -> None:
    """Evaluate in the layout of the command, whatever layout has saved the checkpoint."""
    launch(command)
