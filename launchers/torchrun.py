"""torchrun with an exit code that a queue understands: ``python -m launchers.torchrun`` in place of ``torchrun``.

torchrun ends with code 1, however its ranks have ended. A queue such as Kubernetes then counts a run that has saved
and asks to be continued as a failed one.
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
        0, or ``EXIT_CODE`` if the ranks ended with it or torchrun was asked to stop.

    Raises:
        ChildFailedError: A rank has failed.
    """
    try:
        main(arguments)
    except ChildFailedError as error:
        if any(failure.exitcode != EXIT_CODE for failure in error.failures.values()):
            raise
        return EXIT_CODE
    except SignalException:
        return EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(run())
