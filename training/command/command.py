"""The argument of every mode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import TrainingError
from conf.composition import Composed
from launchers import World


@dataclass(frozen=True)
class Command:
    """A checked configuration and where it is to run.

    Attributes:
        cfg: The configuration, as plain data; ``auto`` is replaced in it by the chosen value.
        composed: The composed configuration that it was made from.
        world: The ranks that exist already; None if this process starts those that the run needs.
        isolated: Run in separate processes even if one process is enough, so that a job of a sweep leaves no state in
            this process for the next job.
    """

    cfg: Any
    composed: Composed
    world: World | None
    isolated: bool = False

    @property
    def run_dir(self) -> Path:
        """The run directory, which exists."""
        return self.composed.run_dir

    @cached_property
    def words(self) -> list[str]:
        """The command line, for commands to copy."""
        return self.composed.words()

    def check_alone(self) -> None:
        """Check that no other processes were started. Raises TrainingError."""
        if self.world is not None and self.world.size > 1:
            raise TrainingError(
                f"mode={self.cfg.mode} runs in one process, but {self.world.size} were started (WORLD_SIZE): start it "
                "without torchrun"
            )
