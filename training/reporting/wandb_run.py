"""Weights & Biases as a view of the run: offline by default, and never a reason for training to end."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from common.files import free_space, read_regular
from common.machine import changed_environment
from training.reporting.environment import git_state
from training.reporting.loggers import grouped
from training.reporting.masking import mask_secrets

log = logging.getLogger("training")

INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 30.0
ID_FILE = "wandb_id.txt"


class WandbRun:
    """One wandb run, kept in ``run_dir/wandb``; only one may be open in a process.

    No method raises, and starting and finishing wait no longer than their timeouts: after an exception wandb is off
    for the rest of the run, which is warned about once. metrics.jsonl is the record of truth; wandb itself does not
    notice a full disk. The commit and the machine's load are stored;
    its name, the environment and the command line are not.

    The run's id is kept in ``run_dir/wandb_id.txt``: a resumed training continues the same online run, and
    ``wandb sync`` merges its offline parts.
    """

    def __init__(
        self,
        run_dir: str | Path,
        run_config: dict,
        run_name: str | None = None,
        mode: Literal["offline", "online"] = "offline",
        project: str = "",
        group: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        init_timeout_s: float = INIT_TIMEOUT_S,
        finish_timeout_s: float = FINISH_TIMEOUT_S,
    ) -> None:
        """Starts the run.

        Args:
            run_dir: The directory of the training run.
            run_config: The configuration, stored with its secrets masked.
            run_name: The display name where ``name`` is None.
            mode: "offline" (no key, no prompt, no network, no output) or "online". Without an API key, or where the
                server does not answer in time, an online run becomes an offline one, after a warning.
            project: The project's name.
            group: The group's name. None: the model's, so that its runs under all strategies are one group.
            name: The display name.
            tags: The run's tags.
            init_timeout_s: The longest wait for the start, in seconds.
            finish_timeout_s: The longest wait for uploads at the end, in seconds.
        """
        self._run_dir = Path(run_dir).absolute()
        self._timeouts = {"init_timeout": init_timeout_s, "finish_timeout": finish_timeout_s}
        self._run = None
        arguments = mask_secrets(
            {
                "project": project or None,
                "group": group or run_config.get("model", {}).get("name"),
                "name": name or run_name,
                "tags": list(tags),
                "config": run_config,
            }
        )
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            if getattr(mode, "value", mode) == "online":
                self._run = self._start_online(arguments)
            if self._run is None:
                self._run = self._start("offline", arguments)
        except Exception as error:
            self._turn_off("could not start", error)

    @property
    def url(self) -> str | None:
        """The address of an online run; None for an offline run and where wandb is off."""
        return self._run.url if self._run is not None else None

    def log(self, record: dict, step: int) -> None:
        """Logs the values of a record, except for its "step", as train/loss, val/loss and so on.

        Args:
            record: Numbers by name. Records of the same step are merged.
            step: The optimizer step, counted from 1. wandb drops a step smaller than the newest it has seen.
        """
        if self._run is None:
            return
        try:
            self._run.log(grouped(record), step=step)
        except Exception as error:
            self._turn_off("could not log", error)

    def histogram(self, name: str, counts: Sequence[float], edges: Sequence[float], step: int) -> None:
        """Logs a histogram, see ``Loggers.histogram``."""
        if self._run is None:
            return
        try:
            import wandb

            self._run.log({name: wandb.Histogram(np_histogram=(list(counts), list(edges)))}, step=step)
        except Exception as error:
            self._turn_off("could not log", error)

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Stores the summary and closes the run. A second call does nothing.

        Args:
            summary: Results by name.
            exit_code: A value other than 0 marks the run as failed.
        """
        run, self._run = self._run, None
        if run is None:
            return
        try:
            import wandb

            run.summary.update(mask_secrets(summary or {}))
            run.finish(exit_code=exit_code)
            wandb.teardown()  # its service keeps this run's folders; the next job of a sweep has its own
        except Exception as error:
            self._turn_off("could not finish", error)

    def _start_online(self, arguments: dict) -> Any:
        """Returns the online run, or None, after a warning, where there can be none."""
        import wandb

        try:
            with _private_environment(self._run_dir, "online"):
                logged_in = wandb.login(prompt=False, verify=False)
            if not logged_in:
                reason = "no API key is set up on this machine; run `wandb login` once"
            else:
                run = self._start("online", arguments)
                log.info("wandb: %s", run.url)
                return run
        except Exception as error:
            reason = _first_line(error)
        log.warning(
            "wandb cannot log online (%s). This run logs offline instead; upload it later with: "
            "wandb sync %s/offline-run-*",
            reason,
            shlex.quote(str(self._run_dir / "wandb")),
        )
        # The service still holds the failed run, and would refuse its id to the offline one.
        _close_service()
        return None

    def _start(self, mode: str, arguments: dict) -> Any:
        import wandb

        settings = wandb.Settings(
            mode=mode,
            silent=True,
            console="off",
            root_dir=str(self._run_dir),
            **self._timeouts,
            resume="allow" if mode == "online" else None,  # an offline run cannot resume, and would print that
            # The commit, but not the remote's address, which may hold a key.
            git_commit=git_state()[0],
            disable_git=True,
            # What this project records by itself, or not at all: code, packages, host, user, command line.
            host="",
            disable_code=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        with _private_environment(self._run_dir, mode):
            return wandb.init(id=_run_id(self._run_dir), dir=str(self._run_dir), settings=settings, **arguments)

    def _turn_off(self, problem: str, error: Exception) -> None:
        self._run = None
        log.warning(
            "wandb %s (%s; %s). Training goes on without wandb; metrics.jsonl in %s has every number",
            problem,
            _first_line(error),
            free_space(self._run_dir / "wandb"),
            self._run_dir,
        )
        _close_service()


def _private_environment(run_dir: Path, mode: str) -> contextlib.AbstractContextManager[None]:
    """Keeps wandb's service silent, inside ``run_dir``, and from reporting its errors home while it starts.

    No setting does this. The environment is restored, so that no other child inherits it: neither these variables nor
    the address of the service (WANDB_SERVICE), which a child's wandb would use instead of starting its own.
    """
    changes: dict[str, str | None] = {
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_MODE": mode,
        "WANDB_SERVICE": None,
    }
    for kind in ("cache", "data", "artifact"):
        changes[f"WANDB_{kind.upper()}_DIR"] = str(run_dir / "wandb" / kind)
    return changed_environment(changes)


def _close_service() -> None:
    """Ends wandb's service now. At exit, wandb would print a traceback about one that has died."""
    with contextlib.suppress(Exception):
        import wandb

        wandb.teardown()


def _run_id(run_dir: Path) -> str:
    """Returns the id in ``run_dir/wandb_id.txt``, which is drawn at the first start."""
    path = run_dir / ID_FILE
    try:
        if known := read_regular(path).decode().strip():
            return known
    except FileNotFoundError:
        pass
    new = secrets.token_hex(4)
    path.write_text(new + "\n")
    return new


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
