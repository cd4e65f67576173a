"""From the arguments of a command line to a composed configuration, by Hydra."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from common.errors import UserError
from common.machine import check_working_directory
from conf import FOLDER, environment
from conf.schema import register
from launchers.world import launcher_start

_FULL_ERROR = "HYDRA_FULL_ERROR"


def compose_and_run(task: Callable[[Any, Any], None], arguments: Sequence[str]) -> None:
    """Compose the configuration, make the run directory and call ``task``; in a sweep, for each job.

    Args:
        task: Called with the configuration and Hydra's own section.
        arguments: The command line without the program's name.

    Raises:
        HydraException: Where the configuration cannot be composed.
        UserError: For an argument that has Hydra read a pickle, and where its logging cannot be set up.
        SystemExit: After an answer of Hydra's own (--cfg job).
    """
    if rerun := [argument for argument in arguments if argument.startswith("--e")]:
        raise UserError(f"{rerun[0]} has Hydra read a pickle, which can run any code: repeat the run by its command")
    check_working_directory()
    register()
    environment.register()
    # A rank that torchrun starts again finds the directory of the attempt before.
    began, run_id = launcher_start() or (time.time(), secrets.token_hex(3))
    OmegaConf.register_new_resolver("run_id", lambda: run_id, replace=True)
    OmegaConf.register_new_resolver("began", lambda form: time.strftime(form, time.localtime(began)), replace=True)

    @hydra.main(version_base="1.3", config_path=str(FOLDER), config_name="train")
    def job(cfg: Any) -> None:
        task(cfg, HydraConfig.get())

    argv, full_error = sys.argv, os.environ.get(_FULL_ERROR)
    sys.argv = [str(FOLDER.parent / "train.py"), *arguments]
    os.environ[_FULL_ERROR] = "1"  # Hydra raises its errors then; otherwise it prints them in its own form
    GlobalHydra.instance().clear()
    try:
        job()
    finally:
        GlobalHydra.instance().clear()
        sys.argv = argv
        if full_error is None:
            del os.environ[_FULL_ERROR]
