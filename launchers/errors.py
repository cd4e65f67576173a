"""What can go wrong between processes, as exceptions."""

import signal

from common.errors import LaunchError


class WorkerFailed(LaunchError):
    """A local worker ended before its work was done; this is the first cause, not what followed from it.

    Attributes:
        rank: The global rank that failed first.
        kind: "exception" (it raised), "message" (it raised a UserError), "signal" (it was killed), "exit" (it left
            without raising) or "stall" (the others waited for it in vain).
        text: That rank's traceback or message; otherwise what happened and the last lines of its log.
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

    A KeyboardInterrupt, so that no `except Exception` on the way up takes a request to stop for a failed run.

    Attributes:
        signum: The signal that came.
        left: What has become of the work, in words.
        exit_code: What a shell expects of a process that this signal has ended.
    """

    def __init__(self, signum: int, left: str = "all workers have ended"):
        super().__init__(signum)
        self.signum = signum
        self.left = left
        self.exit_code = 128 + signum

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signum).name}; {self.left}"
