"""A launching process to send signals to: python driver.py FOLDER stubborn|mild. Exit code 7: interrupted."""

import signal
import sys

import launched
import torch.distributed  # noqa: F401  as train.py has by then: a second in which a signal has to wait

from launchers import Interrupted, run_workers

if __name__ == "__main__":
    # A test run in the background is started with SIGINT ignored, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, stubborn = sys.argv[1], sys.argv[2] == "stubborn"
    print("started", flush=True)
    try:
        run_workers(launched.linger, (folder, stubborn), 2, folder)
    except Interrupted as interrupted:
        print(interrupted.signum, flush=True)
        sys.exit(7)
