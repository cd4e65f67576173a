"""The command line: Hydra composes the configuration, one run or a sweep's job runs, errors become messages."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf import help_page
from launchers import Interrupted, World, stopping
from launchers.stopping import Stopped
from training.app import execute, follow
from training.config import quote_values

ROOT = Path(__file__).resolve().parents[1]
_FULL_ERROR = "HYDRA_FULL_ERROR"


def main(argv: Sequence[str] | None = None) -> int:
    """Compose the configuration that a command line describes and run it in this process.

    May be called several times in one process. An error that the user can act on is one message on standard error,
    without a traceback; an error of the program's own is raised.

    Args:
        argv: The arguments, without the program's name; those of this process by default.

    Returns:
        The exit code: 0, 1 after an error, ``stopping.EXIT_CODE`` for a run that was told to stop and can go on.
    """
    try:
        with clear_errors():
            world = World.detect()
            if world is not None and world.rank > 0:
                follow(world)
            else:
                _compose_and_run(sys.argv[1:] if argv is None else argv, world)
    except SystemExit as leaving:  # Hydra leaves this way after --help and --cfg, and its callbacks when they refuse
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def _compose_and_run(arguments: Sequence[str], world: World | None) -> None:
    if {"-h", "--help"} & set(arguments):  # Hydra's own page takes seconds
        print(help_page(), end="")
        return
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from conf.schema import register

    register()
    run_id = secrets.token_hex(3)
    OmegaConf.register_new_resolver("run_id", lambda: run_id, replace=True)

    @hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="train")
    def job(cfg: Any) -> None:
        section = HydraConfig.get()
        with clear_errors():
            if section.mode == RunMode.MULTIRUN:
                from training.sweep.job import run_job

                run_job(cfg, section, world)
            else:
                execute(cfg, Path(section.runtime.output_dir), world)

    before = sys.argv, os.environ.get(_FULL_ERROR)
    sys.argv = [str(ROOT / "train.py"), *quote_values(arguments)]
    os.environ[_FULL_ERROR] = "1"  # Hydra raises its errors then; otherwise it prints them in its own form
    try:
        GlobalHydra.instance().clear()
        job()
    finally:
        GlobalHydra.instance().clear()
        sys.argv = before[0]
        if before[1] is None:
            del os.environ[_FULL_ERROR]


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn what a user can act on into one message and an exit code; an error of the program's own keeps its traceback.

    Raises:
        SystemExit: With code 1 after an error. With ``stopping.EXIT_CODE`` for a run that has stopped as it was told to
            and can go on; with 128 + the signal's number where it was told twice.
    """
    try:
        yield
    except Stopped as stopped:
        print(stopped, end="\n" if str(stopped) else "", file=sys.stderr)
        raise SystemExit(stopping.EXIT_CODE) from None
    except Interrupted as interrupted:
        _fail(str(interrupted), interrupted.exit_code if interrupted.signum in stopping.SIGNALS else 1)
    except KeyboardInterrupt:
        _fail("stopped by SIGINT")
    except Exception as error:
        from conf.messages import explain

        message = explain(error)
        if message is None:
            raise
        _fail(message)


def _fail(message: str, code: int = 1) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)
