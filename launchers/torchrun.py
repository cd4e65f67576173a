"""torchrun with an exit code that a queue understands: ``python -m launchers.torchrun`` in place of ``torchrun``.

torchrun ends with code 1, however its ranks have ended. A queue such as Kubernetes would then count a run that has
saved its state to be continued as a failed run.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from launchers.stopping import EXIT_CODE


def run(arguments: list[str] | None = None) -> int:
    """Run torchrun.

    Args:
        arguments: The arguments of torchrun; None for those of this process.

    Returns:
        0, or ``EXIT_CODE`` if the first rank to end ended with it, or if torchrun was asked to stop.

    Raises:
        ChildFailedError: The first rank to end has failed.
    """
    try:
        main(arguments)
    except ChildFailedError as error:
        # The first rank to end decides: torchrun then sends SIGTERM to the other ranks, whatever they are doing.
        _, first = error.get_first_failure()
        if first.exitcode != EXIT_CODE:
            raise
        return EXIT_CODE
    except SignalException:
        return EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(run())
