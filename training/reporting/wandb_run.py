"""Weights & Biases as a view of the run: offline by default, and never a reason for training to end."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from common.files import free_space
from common.machine import changed_environment
from training.reporting.disk import DiskWatch
from training.reporting.environment import mask_secrets

log = logging.getLogger("training")

INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 30.0
RETRY_S = 60.0  # between two tries to start on a disk that is full
ID_FILE = "wandb_id.txt"


class WandbRun:
    """One wandb run, kept in `run_dir/wandb`; only one may be open in a process.

    `mode` is "offline" (no key, no prompt, no network, no output) or "online". Without an API key, or where
    the server does not answer within `init_timeout_s`, an online run becomes an offline one, after a warning.
    `name` is the display name (`run_name` where it is None). `run_config` is stored with secrets masked; it
    is not called config, as `hydra.utils.instantiate` has that name for itself. The machine's name, the
    environment and the command line are not stored.

    The run's id is kept in `run_dir/wandb_id.txt`: a resumed training continues the same online run, and
    `wandb sync` merges its offline parts. No method raises; starting and finishing wait no longer than their
    timeouts (seconds). Where it cannot start it is tried again each minute or so; after an exception later on it is
    off for the rest of the run. `metrics.jsonl` is the record of truth: wandb itself does not notice a full disk,
    so that is watched for here and warned about.
    """

    def __init__(self, run_dir, run_config: dict, run_name: str | None = None,
                 mode: Literal["offline", "online"] = "offline",
                 project: str = "", group: str | None = None, name: str | None = None, tags: Sequence[str] = (),
                 init_timeout_s: float = INIT_TIMEOUT_S, finish_timeout_s: float = FINISH_TIMEOUT_S):
        self._run_dir = Path(run_dir).absolute()
        self._timeouts = {"init_timeout": init_timeout_s, "finish_timeout": finish_timeout_s}
        self._run = None
        self._mode = getattr(mode, "value", mode)
        self._what = mask_secrets({"project": project or None, "group": group, "name": name or run_name,
                                   "tags": list(tags), "config": run_config})
        self._disk = DiskWatch(self._run_dir)
        self._next_start: float | None = None  # None: it runs, or is off for good
        self._open()

    @property
    def url(self) -> str | None:
        """Where an online run can be seen; None for an offline run and where wandb is off."""
        return self._run.url if self._run is not None else None

    def log(self, record: dict, step: int) -> None:
        """Log the values of `record` (its own "step" apart) at optimizer step `step`, counted from 1.

        Records of one step are merged. wandb drops a step smaller than the newest it has seen.
        """
        if self._disk.has_filled():
            log.warning("wandb: the disk is full (%s); %s/wandb will lack what is logged meanwhile. Training goes on; "
                        "metrics.jsonl will have every number", free_space(self._run_dir / "wandb"), self._run_dir)
        if self._run is None and self._next_start is not None and time.monotonic() >= self._next_start:
            self._open()
        if self._run is None:
            return
        try:
            self._run.log({key: value for key, value in record.items() if key != "step"}, step=step)
        except Exception as error:
            self._turn_off("could not log", error)

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Store `summary` and close the run, waiting for uploads up to the finish timeout.

        A non-zero `exit_code` marks the run as failed. A second call does nothing.
        """
        run, self._run = self._run, None
        if run is None:
            return
        try:
            import wandb

            run.summary.update(mask_secrets(summary or {}))
            run.finish(exit_code=exit_code)
            wandb.teardown()  # the service keeps this run's folders; the next job of a sweep has its own
        except Exception as error:
            self._turn_off("could not finish", error)

    def _open(self) -> None:
        again, self._next_start = self._next_start is not None, None
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            if self._mode == "online":
                self._run = self._start_online(self._what)
            if self._run is None:
                self._run = self._start("offline", self._what)
            if again:
                log.warning("wandb could start now: it lacks what was logged before")
        except Exception as error:
            self._turn_off("could not start", error, quietly=again)
            if isinstance(error, OSError) or self._disk.is_full():
                self._next_start = time.monotonic() + RETRY_S

    def _start_online(self, what: dict):
        """The online run, or None, after a warning, where there can be none."""
        import wandb

        try:
            with _private_environment(self._run_dir, "online"):
                logged_in = wandb.login(prompt=False, verify=False)
            if not logged_in:
                reason = "no API key is set up on this machine; run `wandb login` once"
            else:
                run = self._start("online", what)
                log.info("wandb: %s", run.url)
                return run
        except Exception as error:
            reason = _first_line(error)
        log.warning("wandb cannot log online (%s). This run logs offline instead; upload it later with: "
                    "wandb sync %s/wandb/offline-run-*", reason, self._run_dir)
        # The service still holds the failed run, and would refuse its id to the offline one.
        _close_service()
        return None

    def _start(self, mode: str, what: dict):
        import wandb

        settings = wandb.Settings(
            mode=mode, silent=True, console="off", root_dir=str(self._run_dir), **self._timeouts,
            resume="allow" if mode == "online" else None,  # an offline run cannot resume, and says so aloud
            # What this project records by itself, or not at all: code, packages, host, user, command line.
            host="", disable_code=True, disable_git=True, disable_job_creation=True, x_disable_meta=True,
            x_disable_machine_info=True, x_save_requirements=False)
        with _private_environment(self._run_dir, mode):
            return wandb.init(id=_run_id(self._run_dir), dir=str(self._run_dir), settings=settings, **what)

    def _turn_off(self, what: str, error: Exception, quietly: bool = False) -> None:
        self._run = None
        if not quietly:
            log.warning("wandb %s (%s; %s). Training goes on without wandb; metrics.jsonl in %s has every number",
                        what, _first_line(error), free_space(self._run_dir / "wandb"), self._run_dir)
        _close_service()


class NoLogger:
    """Takes what `WandbRun` takes and does nothing with it (`logger=none`)."""

    url = None

    def __init__(self, run_dir=None, run_config: dict | None = None, run_name: str | None = None):
        pass

    def log(self, record: dict, step: int) -> None:
        """Do nothing."""

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Do nothing."""


def _private_environment(run_dir: Path, mode: str) -> contextlib.AbstractContextManager[None]:
    """While wandb's service starts: keep it silent, inside `run_dir`, and from reporting its errors home.

    No setting does this. The environment is put back, so that no other child inherits it: neither these nor
    the address of the service (WANDB_SERVICE), which a child's wandb would use instead of starting its own.
    """
    changes: dict[str, str | None] = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false",
                                      "WANDB_MODE": mode, "WANDB_SERVICE": None}
    for kind in ("cache", "data", "artifact"):
        changes[f"WANDB_{kind.upper()}_DIR"] = str(run_dir / "wandb" / kind)
    return changed_environment(changes)


def _close_service() -> None:
    """End wandb's service now: at exit, wandb would print a traceback about one that has died."""
    with contextlib.suppress(Exception):
        import wandb

        wandb.teardown()


def _run_id(run_dir: Path) -> str:
    """The id in `run_dir/wandb_id.txt`, made up at the first start."""
    path = run_dir / ID_FILE
    try:
        if known := path.read_text().strip():
            return known
    except FileNotFoundError:
        pass
    new = secrets.token_hex(4)
    path.write_text(new + "\n")
    return new


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
