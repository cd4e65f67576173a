"""The worker's side of run_workers: what happens in a spawned process around the user's function."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback

from launchers import heartbeat, stopping
from launchers.failure import log_path, write_report, write_stop
from launchers.loopback import use_loopback
from launchers.processes import lead_group, leave_with_parent
from launchers.world import World

# A rank that only lost its connection leaves last, so that the rank that broke it is seen to fail first.
PEER_DELAY_S = 2.5
_LEAVE_S = 10.0


def work(payload: bytes, parent_pid: int, log_dir: str, board_path: str, stoppable: bool) -> None:
    """Runs `entry(world, *args)` from payload = pickle of (entry, args). The function that the agent starts.

    An exception is written to the file named by TORCHELASTIC_ERROR_FILE, and the process exits with code 1,
    without any clean-up that could wait for a peer; with launchers.stopping.EXIT_CODE after a Stopped.
    board_path: see launchers.heartbeat. stoppable: whether entry looks at launchers.stopping.
    """
    lead_group()
    leave_with_parent(parent_pid)
    world = World.detect()
    board = heartbeat.Board(board_path)
    heartbeat.publish(board, world.rank)
    if stoppable:
        stopping.install_handlers()
        stopping.also(board.stop_wanted)
    _heed_the_parent_only()
    if world.rank > 0:
        redirect_output(log_path(log_dir, world.rank))
    try:
        use_loopback()
        entry, args = pickle.loads(payload)
        entry(world, *args)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            _leave(_exit_code(leaving))
    except stopping.Stopped as stopped:
        write_stop(os.environ["TORCHELASTIC_ERROR_FILE"], stopped)
        _leave(stopping.EXIT_CODE)
    except BaseException as error:
        _fail(error, world)
    multiprocessing.util.Finalize(None, _leave_in_time, exitpriority=1000)


def _heed_the_parent_only() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent blocked them while this process was being started.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *stopping.SIGNALS})
    # Meant for the agent alone (see launchers.agent).
    os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)


def redirect_output(path) -> None:
    """Sends file descriptors 1 and 2 to `path`: native code and child processes do not know sys.stdout."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # By line, so that the file tells how far a killed process came.
    sys.stdout.reconfigure(line_buffering=True)
    sys.stderr.reconfigure(line_buffering=True)


def _fail(error: BaseException, world: World) -> None:
    try:
        report = write_report(os.environ["TORCHELASTIC_ERROR_FILE"], error)
    except OSError:
        # A full disk must not hide the error.
        traceback.print_exception(error)
        _leave(1)
    # Rank 0's traceback is shown by the parent, on the same console.
    if world.rank > 0:
        traceback.print_exception(error)
    if report["peer"]:
        time.sleep(PEER_DELAY_S)
    _leave(1)


def _exit_code(leaving: SystemExit) -> int:
    if isinstance(leaving.code, int):
        return leaving.code
    print(leaving.code, file=sys.stderr)
    return 1


def _leave(code: int) -> None:
    """Ends the process now: a normal exit destroys process groups, which can wait for peers that are gone."""
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a log on a full disk
            stream.flush()
    os._exit(code)


def _leave_in_time() -> None:
    """Bounds the interpreter's shutdown after finished work: a thread left behind must not hold it up."""

    def leave() -> None:
        time.sleep(_LEAVE_S)
        late = f"a thread or process was still running {_LEAVE_S:g} s after the work was done"
        print(late, file=sys.stderr)
        _leave(0)

    threading.Thread(target=leave, name="leave-in-time", daemon=True).start()
