"""Train any model under any parallel strategy: python train.py parallel=pipe_ddp model=gpt2 (--help lists the rest)."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf.schema import register
from launchers import World

RUN_ID = secrets.token_hex(3)

register()
OmegaConf.register_new_resolver("run_id", lambda: RUN_ID, replace=True)


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    """Hydra has composed ``cfg`` and made the run directory; one job runs."""
    hydra_section = HydraConfig.get()
    with clear_errors():
        if hydra_section.mode == RunMode.MULTIRUN:
            from training.sweep.job import run_job

            run_job(cfg, hydra_section, World.detect())
        else:
            from training.job import execute

            execute(cfg, Path(hydra_section.runtime.output_dir), World.detect())


@contextmanager
def clear_errors() -> Iterator[None]:
    """What a user can act on is one message and exit code 1; a bug in here keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt as stopped:  # launchers.Interrupted, which says by what signal, is one
        fail(str(stopped) or "stopped by SIGINT")
    except Exception as error:
        from training.errors import USER_ERRORS

        if not isinstance(error, USER_ERRORS):
            raise
        fail(str(error))


def fail(message: str) -> None:
    """Say why on standard error and leave with exit code 1."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    with clear_errors():
        world = World.detect()
    if world is not None and world.rank > 0:
        from training.job import follow

        with clear_errors():
            follow(world)
    else:
        with clear_errors():
            main()
