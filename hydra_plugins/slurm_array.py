"""Hydra's launcher for launcher=slurm: each job of a sweep is an element of a SLURM job array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, open_dict


class SlurmArray(Launcher):
    """Composes and checks every job here, queues those that passed as one array per shape, and waits for them.

    A job that fails is recorded in its directory and does not end the others (see training.sweep).
    """

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        """Hydra calls it before ``launch``."""
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Return one JobReturn per job; whether the job failed is recorded in its directory."""
        from training.sweep.cluster import check, objective_of, run_all

        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        returned = [self._compose(list(job), num, check) for num, job in enumerate(job_overrides, initial_job_idx)]
        runs = {num: job.return_value for num, job in enumerate(returned) if job.return_value is not None}
        run_all(list(runs.values()))
        for num, run in runs.items():
            returned[num].return_value = objective_of(run)
        return returned

    def _compose(self, overrides: list[str], num: int, check: Any) -> JobReturn:
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(num), num
        return run_job(
            hydra_context=self.hydra_context,
            task_function=check,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
