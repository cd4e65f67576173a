"""Train any model under any parallel strategy: python train.py parallel=pipe_ddp model=gpt2 (--help lists the rest)."""

from __future__ import annotations

from launchers import stopping

if __name__ == "__main__":
    stopping.install_handlers()  # what comes during the imports below, which take seconds, is not lost

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
from launchers import Interrupted, World
from training.quoting import quote_values

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
            from training.app import execute

            execute(cfg, Path(hydra_section.runtime.output_dir), World.detect())


@contextmanager
def clear_errors() -> Iterator[None]:
    """What a user can act on is one message and exit code 1; a bug in here keeps its traceback.

    A run that has stopped as it was told to, and can go on, leaves with stopping.EXIT_CODE; where it was told twice,
    with 128 + the signal's number.
    """
    try:
        yield
    except stopping.Stopped as stopped:
        print(stopped, end="\n" if str(stopped) else "", file=sys.stderr)
        raise SystemExit(stopping.EXIT_CODE) from None
    except Interrupted as interrupted:
        fail(str(interrupted), interrupted.exit_code if interrupted.signum in stopping.SIGNALS else 1)
    except KeyboardInterrupt:
        fail("stopped by SIGINT")
    except Exception as error:
        from common.errors import UserError

        if not isinstance(error, UserError):
            raise
        fail(str(error))


def fail(message: str, code: int = 1) -> None:
    """Say why on standard error and leave."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    with clear_errors():
        world = World.detect()
    if world is not None and world.rank > 0:
        from training.app import follow

        with clear_errors():
            follow(world)
    else:
        sys.argv = quote_values(sys.argv)
        with clear_errors():
            main()
