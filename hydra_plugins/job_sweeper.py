"""Hydra's grid sweeper, made to survive its jobs. Here, since Hydra looks for plugins in this package only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf


class JobSweeper(BasicSweeper):
    """Every combination of the swept values is a job, numbered in order.

    Beyond Hydra's own: a job that cannot be composed or that fails is recorded and the others run; jobs that an
    earlier attempt in the same directory has finished are left out; callbacks hear of the end in any case.
    """

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run all jobs that ``arguments`` describe. Raises KeyboardInterrupt, and what a launcher raises."""
        from training.sweep.queue import compose_all, consecutive, open_folders

        logging.getLogger("hydra._internal.core_plugins.basic_launcher").addFilter(_mask)
        loader = self.hydra_context.config_loader
        overrides = OverridesParser.create(config_loader=loader).parse_overrides([*self._parse_config(), *arguments])
        (jobs,) = self.split_arguments(overrides, None)
        sweep_dir = Path(self.config.hydra.sweep.dir)
        entries = compose_all(lambda job: loader.load_sweep_config(self.config, job), jobs, sweep_dir)
        todo = open_folders(entries, sweep_dir)
        OmegaConf.save(self.config, sweep_dir / "multirun.yaml")
        results = []
        try:
            for run in consecutive(todo, self.max_batch_size):
                returned = self.launcher.launch([entry.overrides for entry in run], run[0].job.num)
                for entry, result in zip(run, returned, strict=True):
                    if result.status != JobStatus.COMPLETED:
                        entry.note_loss(result)
                results += returned
        except BaseException:
            with suppress(SystemExit):  # what ended the sweep says more
                self.hydra_context.callbacks.on_multirun_end(config=self.config, config_name=None)
            raise
        return results


def _mask(record: logging.LogRecord) -> bool:
    """Hydra announces each job with its overrides."""
    from training.reporting import mask_secrets

    record.msg, record.args = mask_secrets(record.getMessage()), ()
    return True
