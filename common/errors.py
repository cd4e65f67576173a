"""Errors that a user can act on. They are shown as one message, without a traceback."""

from __future__ import annotations

import bdb
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

_NEED_LESS = (
    "Smaller micro-batches (more parallel.chunks), train.activation_checkpointing=true, parallel=fsdp, or a smaller "
    "train.global_batch_size, model or data set need less; mode=plan estimates the memory of each rank"
)


class UserError(Exception):
    """An error that a user can act on. The message states the numbers and a fix.

    Attributes:
        repeats: Whether the error would occur again if the run were started again.
    """

    repeats = True


class PlanError(UserError, ValueError):
    """A layout that cannot run."""


class DataError(UserError, ValueError):
    """Wrong data, or wrong options of a data set."""


class ModelError(UserError, ValueError):
    """A model that cannot be built from its description."""


class TrainingError(UserError, RuntimeError):
    """A run that cannot start or continue."""


class CheckpointError(TrainingError):
    """A checkpoint that cannot be written or read."""


class LaunchError(UserError, RuntimeError):
    """The processes of a run that cannot be described, started or connected."""

    repeats = False


def message_for_user(error: BaseException) -> str | None:
    """Return the message about an error that a user can act on, without a traceback; None for any other error.

    Such errors are ``UserError``, and errors of the operating system about files or memory. (Lost connections between
    the processes of a run are handled by ``launchers.failure``.)
    """
    if isinstance(error, UserError):
        return _with_notes(str(error), error)
    if isinstance(error, OSError) and not isinstance(error, ConnectionError) and error.errno is not None:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        reason = (error.strerror or str(error)).lower()
        return f"{where}{reason}; check the path, its permissions and the space on its disk"
    if is_out_of_memory(error):
        reason = str(error).strip().partition("\n")[0].partition(" See documentation")[0]
        reason = reason[reason.find("DefaultCPUAllocator") :] if "DefaultCPUAllocator" in reason else reason
        where = f" ({'; '.join(notes)})" if (notes := getattr(error, "__notes__", ())) else ""
        return f"memory is exhausted{where}{reason and f': {reason}'}\n{_NEED_LESS}"
    if isinstance(error, IndexError) and re.match(r"Target -?\d+ is out of bounds", str(error)):  # a cross entropy's
        way_out = "classes count from 0: correct the targets, or give the model more outputs (model.num_classes)"
        return _with_notes(f"{str(error).rstrip('.')}; {way_out}", error)
    if isinstance(error, bdb.BdbQuit):
        # The debugger has the frame in which it stopped. At the end of a function the traceback does not have it.
        *_, (quitting, _) = traceback.walk_tb(error.__traceback__)
        frame = quitting.f_locals.get("frame", quitting)
        return (
            f"the debugger ended in {frame.f_code.co_filename}, line {frame.f_lineno}. Workers have no terminal; "
            "start a run of one process, parallel=single, or parallel=model_parallel for several stages"
        )
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether there was too little main memory or memory of a device.

    torch's own class is not checked: ``common`` does not import torch, and not every backend raises it.
    """
    words = ("can't allocate memory", "out of memory", "_ALLOC_FAILED")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def brief(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, as ``error.add_note`` does from Python 3.11 on."""
    notes = [*getattr(error, "__notes__", ()), note]
    error.__notes__ = notes  # pyright: ignore[reportAttributeAccessIssue]  # declared from 3.11 on


def format_exception(error: BaseException, trace: TracebackType | None) -> str:
    """Return the traceback with the error's notes, which Python prints by itself from 3.11 on."""
    text = "".join(traceback.format_exception(type(error), error, trace))
    return text if sys.version_info >= (3, 11) else _with_notes(text.rstrip("\n"), error) + "\n"


def _with_notes(text: str, error: BaseException) -> str:
    return "\n".join([text, *getattr(error, "__notes__", ())])


@contextmanager
def exit_is_failure() -> Iterator[None]:
    """Turn ``sys.exit`` in a user's code into an error, since a run that was left early is not finished.

    Raises:
        TrainingError: If the block raised SystemExit with any code. The message names the line.
    """
    try:
        yield
    except SystemExit as leaving:
        frames = traceback.extract_tb(leaving.__traceback__)
        at = [frame for frame in frames if not frame.filename.endswith("exit_hooks.py")][-1]  # wandb's own sys.exit
        raise TrainingError(
            f"sys.exit() was called in {at.filename}, line {at.lineno}; the run is not finished. A callback ends a run "
            "early by run.stop(reason)"
        ) from leaving


def printable(text: str) -> str:
    """Return a text without characters that a terminal would interpret as commands; line ends and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
