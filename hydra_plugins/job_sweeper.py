"""Hydra's grid sweeper, which goes on when a job fails. Hydra looks for plugins in this package only."""

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
    """Runs one job for every combination of the swept values, numbered in order.

    Unlike Hydra's own sweeper, it records a job that cannot be composed or that fails and runs the others, leaves out
    jobs that an earlier attempt in the same directory has finished, and calls the callbacks however the sweep ends.
    """

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Runs all jobs that the overrides ``arguments`` describe.

        Returns:
            Hydra's result of each job that was run.

        Raises:
            KeyboardInterrupt: If the user ends the sweep.
        """
        from conf.composition import check_keys
        from conf.words import expand_lists
        from training.sweep.queue import batches, compose_all, open_folders

        logging.getLogger("hydra._internal.core_plugins.basic_launcher").addFilter(_mask)
        loader = self.hydra_context.config_loader
        overrides = OverridesParser.create(config_loader=loader).parse_overrides([*self._parse_config(), *arguments])
        jobs = [expand_lists(job) for job in self.split_arguments(overrides, None)[0]]
        sweep_dir = Path(self.config.hydra.sweep.dir)
        entries = compose_all(lambda job: check_keys(loader.load_sweep_config(self.config, job)), jobs, sweep_dir)
        todo = open_folders(entries, sweep_dir)
        OmegaConf.save(self.config, sweep_dir / "multirun.yaml")
        results = []
        try:
            for batch in batches(todo, self.max_batch_size):
                returned = self.launcher.launch([entry.overrides for entry in batch], batch[0].job.num)
                for entry, result in zip(batch, returned, strict=True):
                    if result.status != JobStatus.COMPLETED:
                        entry.record_failure(result)
                results += returned
        except BaseException:
            with suppress(SystemExit):  # the exception that ended the sweep says more
                self.hydra_context.callbacks.on_multirun_end(config=self.config, config_name=None)
            raise
        return results


def _mask(record: logging.LogRecord) -> bool:
    """Hydra announces each job with its overrides."""
    from training.reporting import mask_secrets

    record.msg, record.args = mask_secrets(record.getMessage()), ()
    return True
