"""The plugins that Hydra calls for a sweep. Hydra finds them in this package only; training/command does the work."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn


class JobSweeper(BasicSweeper):
    """Runs one job for every combination of the swept values, numbered in order.

    Unlike Hydra's own sweeper, it records a failed job and runs the next jobs, and leaves out jobs that an earlier
    attempt in the same directory has finished.
    """

    def sweep(self, arguments: list[str]) -> None:
        """Run all jobs that the overrides ``arguments`` describe."""
        from training.command.sweep_jobs import sweep

        sweep(self, arguments)


class SlurmArray(BasicLauncher):
    """Hydra's launcher for launcher=slurm: jobs that passed the checks here are elements of a SLURM job array."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Return one JobReturn per job. Whether a job failed is recorded in its directory."""
        from training.command.sweep_jobs import queue_checked

        logging.getLogger(BasicLauncher.__module__).setLevel(logging.WARNING)  # it says that jobs run locally
        return queue_checked(super().launch(job_overrides, initial_job_idx))
