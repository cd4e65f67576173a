"""What can go wrong between processes, as exceptions."""

import signal

from common.errors import LaunchError


class WorkerFailed(LaunchError):
    """A local worker ended before its work was done; this is the first cause, not what followed from it.

    rank: the global rank that failed first.
    kind: "exception" (it raised), "message" (so it did, what says all in its own words), "signal" (it was killed),
    "exit" (it left without raising) or "stall" (the others waited for it in vain).
    text: for an exception that rank's own traceback, otherwise what happened and the last lines of its log.
    """

    def __init__(self, rank: int, kind: str, text: str):
        super().__init__(rank, kind, text)
        self.rank = rank
        self.kind = kind
        self.text = text

    def __str__(self) -> str:
        return f"rank {self.rank} raised\n{self.text}" if self.kind == "exception" else self.text


class Interrupted(KeyboardInterrupt):
    """The launching process was told to stop; its workers are gone.

    A KeyboardInterrupt, so that no `except Exception` on the way up takes a wish to stop for a failed run.
    signum: the signal that came; exit_code: what a shell expects of a process ended by it; left: what has become of
    the work, in words.
    """

    def __init__(self, signum: int, left: str = "all workers have ended"):
        super().__init__(signum)
        self.signum = signum
        self.left = left
        self.exit_code = 128 + signum

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signum).name}; {self.left}"
