"""Weights & Biases as a view of the run: offline by default."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shlex
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from common.errors import brief
from common.files import write_atomically
from common.machine import changed_environment
from conf.masking import mask_secrets
from training.reporting.environment import git_state
from training.reporting.loggers import grouped
from training.reporting.metrics import METRICS, read_records

log = logging.getLogger("training")

ID_FILE = "wandb_id.txt"
_INPUTS = "wandb.sdk.launch.inputs.internal"
# wandb's files (tried with 0.31): LevelDB's log, in blocks. A piece of a record has a head of CRC, length and kind.
_BEGINS, _BLOCK, _PIECE, _ENDS_RECORD = b":W&B\xe1\xbe\x00", 1 << 15, struct.Struct("<IHB"), (1, 4)


class WandbRun:
    """One wandb run, kept in ``run_dir/wandb``; only one may be open in a process.

    Starting and finishing wait no longer than their timeouts. The commit and the machine's load are stored. The
    machine's name, the environment and the command line are not. wandb itself does not notice a full disk.

    The run's id is kept in ``run_dir/wandb_id.txt``: a resumed training continues the same online run, and
    ``wandb sync`` merges its offline parts. A resumed offline run first cuts off earlier parts at the step where it
    continues. Then it logs the records of metrics.jsonl that these parts, or the server, lack, because a killed process
    loses the records of up to 15 s. Uploaded steps cannot be removed and are not logged again; a warning names them.
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
        init_timeout_s: float = 20.0,
        finish_timeout_s: float = 30.0,
    ) -> None:
        """Start the run with the options of conf/logger/wandb.yaml; ``run_config`` is stored with its secrets masked.

        Without an API key, or if the server does not answer in time, an online run becomes an offline one, after a
        warning.
        """
        self._run_dir = Path(run_dir).absolute()
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._init_timeout_s, self._finish_timeout_s = init_timeout_s, finish_timeout_s
        shown = {"name": name or run_name, "group": group or run_config.get("model", {}).get("name")}
        self._arguments = mask_secrets({**shown, "project": project or None, "tags": [*tags], "config": run_config})
        try:
            Path.home()
        except RuntimeError:  # a user without a name, as in containers
            os.environ["HOME"] = str(self._run_dir)
        with _service_ended_on_error():
            records = read_records(metrics := self._run_dir / METRICS)
            done = records[-1]["step"] if records else 0
            self._run: Any = self._start_online() if mode == "online" else None
            if self._run is not None:
                self._logged: int = self._run.starting_step - 1  # the last step that the server has
            else:
                before = done if records or metrics.exists() else math.inf
                self._logged = _last_step_kept(self._run_dir / "wandb", before)
                self._run = self._start("offline")
            if self._logged > done:
                log.warning("wandb has steps up to %d of this run, and cannot remove them. If steps %d to %d get other "
                            "results now, they keep their first numbers there; metrics.jsonl has the new ones",
                            self._logged, done + 1, self._logged)  # fmt: skip
            for record in records:
                if record["step"] > self._logged:
                    self.log(record, record["step"])

    def log(self, record: dict, step: int) -> None:
        """Log the values of a record as train/loss, val/loss and so on; records of the same step are merged."""
        if step < self._logged or (step == self._logged and "loss" in record):
            return
        with _service_ended_on_error():
            self._run.log(grouped(record), step=step)

    def histogram(self, name: str, counts: Sequence[float], edges: Sequence[float], step: int) -> None:
        """Log a histogram, see ``Loggers.histogram``."""
        import numpy as np
        import wandb

        with _service_ended_on_error():
            self._run.log({name: wandb.Histogram(np_histogram=(np.array(counts), np.array(edges)))}, step=step)

    def finish(self, summary: dict | None = None, exit_code: int = 0) -> None:
        """Store the summary and close the run. An exit code other than 0 marks the run as failed."""
        with _service_ended_on_error():
            self._run.summary.update(mask_secrets(summary or {}))
            self._run.finish(exit_code=exit_code)
        _end_service()  # it would keep using this run's folders for the next job of a sweep

    def _start_online(self) -> Any:
        """Return the online run; None, after a warning, if it cannot be started."""
        import wandb

        try:
            with _private_environment(self._run_dir, "online"):
                logged_in = wandb.login(prompt=False, verify=False)
            if logged_in:
                run = self._start("online")
                log.info("wandb: %s", run.url)
                return run
            reason = "no API key is set up on this machine; run `wandb login` once"
        except Exception as error:
            reason = brief(error)
        log.warning("wandb cannot log online (%s). This run logs offline instead; upload it later with: "
                    "wandb sync %s/offline-run-*", reason, shlex.quote(str(self._run_dir / "wandb")))  # fmt: skip
        _end_service()  # it still holds the failed run, and would refuse its id to the offline one
        return None

    def _start(self, mode: Literal["offline", "online"]) -> Any:
        import wandb

        settings = wandb.Settings(
            mode=mode,
            silent=True,
            console="off",
            root_dir=str(self._run_dir),
            init_timeout=self._init_timeout_s,
            finish_timeout=self._finish_timeout_s,
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
        with _private_environment(self._run_dir, mode), _without_inputs():
            return wandb.init(
                id=run_id(self._run_dir / ID_FILE), dir=str(self._run_dir), settings=settings, **self._arguments
            )


def _private_environment(run_dir: Path, mode: str) -> contextlib.AbstractContextManager[None]:
    """Start wandb's service silently, with its files in ``run_dir``, and without error reports to wandb's server.

    No setting does this. The environment is restored afterwards, so that no other child process inherits these
    variables or the address of the service (WANDB_SERVICE), which a child's wandb would use instead of starting one.
    """
    settings = {"SILENT": "true", "ERROR_REPORTING": "false", "MODE": mode, "SERVICE": None}
    folders = {f"{kind.upper()}_DIR": str(run_dir / "wandb" / kind) for kind in ("cache", "data", "artifact")}
    return changed_environment({f"WANDB_{name}": value for name, value in {**settings, **folders}.items()})


@contextlib.contextmanager
def _without_inputs() -> Iterator[None]:
    """Keep wandb.init from importing wandb's launcher, which takes a second, to ask it for its inputs (wandb 0.31)."""
    if _INPUTS in sys.modules:
        yield
        return
    module = sys.modules[_INPUTS] = ModuleType(_INPUTS)
    module.__dict__["StagedLaunchInputs"] = _NoInputs
    try:
        yield
    finally:
        del sys.modules[_INPUTS]


class _NoInputs:
    def apply(self, run: Any) -> None:
        """Without the launcher there are no inputs."""


@contextlib.contextmanager
def _service_ended_on_error() -> Iterator[None]:
    """End wandb's service if the block raises. Otherwise wandb prints a traceback at exit if its service has died."""
    try:
        yield
    except Exception:
        _end_service()
        raise


def _end_service() -> None:
    with contextlib.suppress(Exception):
        import wandb

        wandb.teardown()


def _last_step_kept(folder: Path, before: float) -> int:
    """Cut the offline parts of a run off before a step, and return the last remaining step of all parts.

    Parts without a step are removed, because ``wandb sync`` stops at a file with an incomplete beginning.
    """
    last = -1
    for path in folder.glob("*run-*/run-*.wandb"):
        uploaded = path.parent.name.startswith("run-") or path.with_name(f"{path.name}.synced").exists()
        step, end = _last_record(path, math.inf if uploaded else before)
        last = max(last, step)
        if not uploaded and step < 0:
            shutil.rmtree(path.parent)
        elif not uploaded:
            os.truncate(path, end)
    return last


def _last_record(path: Path, before: float) -> tuple[int, int]:
    """Return the last step below ``before`` in a wandb file, and the offset where its last record ends."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    content, at, record, step, end = path.read_bytes(), len(_BEGINS), b"", -1, 0
    if not content.startswith(_BEGINS):
        raise ValueError(f"{path} is of an unknown version of wandb")
    while True:
        left = -at % _BLOCK
        start = at + _PIECE.size + (left if left < _PIECE.size else 0)
        _, length, kind = _PIECE.unpack_from(content, start - _PIECE.size) if start <= len(content) else (0, 1, 0)
        at = start + length
        if at > len(content):
            return step, end
        record += content[start:at]
        if kind in _ENDS_RECORD:
            whole, record = Record.FromString(record), b""
            if whole.HasField("history") and whole.history.step.num >= before:
                return step, end
            step, end = whole.history.step.num if whole.HasField("history") else step, at


def run_id(path: Path) -> str:
    """Return the id of a run in the file ``path``, which is generated at the first start."""
    if not path.exists():
        write_atomically(path, secrets.token_hex(4) + "\n")
    return path.read_text().strip()
