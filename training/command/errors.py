"""Turns an error that the user can act on into one message and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import printable
from common.machine import styled
from conf.masking import hide
from launchers import Interrupted, stopping
from launchers.failure import EndedTogether
from launchers.stopping import Stopped


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn an error that the user can act on into one message and an exit code. A bug keeps its traceback.

    Raises:
        SystemExit: With code 1 after an error; with ``stopping.EXIT_CODE`` after a run that has stopped on request and
            can be continued; with 128 + the number of the signal after a second request.
    """
    try:
        yield
    except Stopped as stopped:
        print(stopped, end="\n" if str(stopped) else "", file=sys.stderr)
        raise SystemExit(stopping.EXIT_CODE) from None
    except (KeyboardInterrupt, Exception) as error:
        code, message = described(error)
        if message is None:
            raise
        if message:
            print(f"{styled('error:', 'red', sys.stderr)} {message}", file=sys.stderr)
        raise SystemExit(code) from None


def described(error: BaseException) -> tuple[int, str | None]:
    """Return the exit code of an error and its message; the message of a bug is None."""
    if isinstance(error, EndedTogether | Interrupted):
        code, message = error.exit_code, str(error)
    elif isinstance(error, KeyboardInterrupt):
        code, message = 1, "stopped by SIGINT"
    else:
        from conf.messages import explain

        code, message = 1, explain(error)
    return code, message and printable(hide(message))
