"""Train any model under any parallel strategy: python train.py parallel=pipe_ddp model=gpt2 (--help lists the rest)."""

from common.errors import TrainingError
from common.machine import spin_briefly, unfailing_output
from launchers import stopping

if __name__ == "__main__":
    stopping.install_handlers()  # before the imports below, which take seconds: a signal during them is not lost
    spin_briefly()

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf import COMMAND, help_page
from conf.composition import check_keys, compose, compose_and_run, is_override, quote_values, with_schema
from launchers import World
from training.command.app import clear_errors, completed, execute, follow, leading, plain, saved_config


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line in this process, as often as one likes, and return its exit code.

    An error that the user can act on is one message on standard error; one of the program's own is raised. The code is
    0, 1 after an error, or ``stopping.EXIT_CODE`` for a run that was told to stop and can go on. ``argv`` does not hold
    the program's name.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        with unfailing_output(), clear_errors():
            world = World.detect()
            if world is not None and world.rank > 0:
                follow(world, arguments)
                return 0
            with leading(world, arguments):
                _lead(arguments)
    except SystemExit as leaving:  # Hydra leaves this way after --cfg
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def _lead(arguments: Sequence[str]) -> None:
    """Do what a command line says, in the one process of a run that reads it."""
    from training.reporting.run_directory import locked_directories

    if {"-h", "--help"} & set(arguments):
        print(help_page(), end="", flush=True)
        return
    words = quote_values(arguments)
    saved = saved_config(words)
    if saved is not None and {"--cfg", "-c"} & set(words):  # of which Hydra would show the files' part
        print(OmegaConf.to_yaml(compose(list(filter(is_override, words)), words, saved=saved)))
        return
    with locked_directories():
        compose_and_run(partial(run, saved=saved), words, saved.words if saved else ())


def run(cfg: Any, hydra_section: Any, saved: Any = None) -> float | None:
    """Run what Hydra has composed: one run, or one job of a sweep, whose objective is returned."""
    from training.reporting.run_directory import removed_if_unused

    folder = Path(hydra_section.runtime.output_dir)
    with removed_if_unused(folder, hydra_section.output_subdir):
        cfg, hydra_section = completed(cfg, hydra_section, saved)
        cfg = check_keys(with_schema(cfg))
        if cfg.mode.name == "verify" and hydra_section.mode.name == "RUN":
            from training.studies.verification.report import prove

            cfg = plain(cfg, hydra_section)
            report = prove(cfg, folder, cfg[COMMAND]["typed"])
            if not report.ok:
                said = "is not the same in every layout" if report.failed else "could not be compared"
                raise TrainingError(f"model={cfg.model.name} {said}; see above")
            return None
        if hydra_section.mode.name == "MULTIRUN":
            from training.command.sweep_jobs import run_job

            return run_job(cfg, hydra_section, World.detect())
        execute(cfg, folder, World.detect(), hydra_section)
    return None


if __name__ == "__main__":
    raise SystemExit(main())
