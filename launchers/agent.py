"""torch's elastic agent, kept on loopback, quick to end, asked which worker failed first. Imports torch."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from launchers.errors import WorkerFailed
from launchers.failure import Death, read_report, root_cause, stalled
from launchers.heartbeat import Board
from launchers.loopback import LOOPBACK, listen
from launchers.processes import end_processes, is_stopped
from launchers.signals import StopSignals
from launchers.spawning import spawning
from launchers.worker import PEER_DELAY_S, work
from launchers.world import LOCAL_ROLE

_STORE_TIMEOUT = timedelta(seconds=60)
_POLL_S = 0.1
# All ranks of a run that was told to stop leave within moments of each other.
_LEAVE_S = 10.0
# When one has given up waiting, so do the others: those for whom it waited too see it leave, PEER_DELAY_S later. The
# rest began to wait at other moments of the step.
_GIVE_UP_S = PEER_DELAY_S + 1.5
_GIVE_UP_LATE_S = 15.0


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of one agent with itself. The store it shares with the workers listens on 127.0.0.1."""

    def __init__(self):
        listener = listen(LOOPBACK, 0)
        self._port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            self._port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._rounds = 0

    def get_backend(self) -> str:
        """The name of this rendezvous in torch's records."""
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        """True: workers are clients of the store hosted here."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Rank 0 of 1 agents; each round (first start or restart) has its own prefix in the store."""
        self._rounds += 1
        store = PrefixStore(f"agent/round-{self._rounds}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        """False: nobody else could close it."""
        return False

    def set_closed(self) -> None:
        """Nothing to close for anyone else."""

    def num_nodes_waiting(self) -> int:
        """0: no other agent can join."""
        return 0

    def get_run_id(self) -> str:
        """Unique on this machine while the run lasts."""
        return f"local-{os.getpid()}-{self._port}"

    def shutdown(self) -> bool:
        """The store goes with this object."""
        return True


class LocalAgent(LocalElasticAgent):
    """Starts `processes` workers; after run(), `failure` is the root cause of a failed run, or None, and `stopped` what
    a run says that was told to stop, or None.

    payload: pickle of (entry, args), see launchers.worker. env: set before a worker's interpreter starts.
    private_dir: where workers leave their error reports. stop: asked between polls whether to go on.
    stoppable: whether entry looks at launchers.stopping. timeout_s: how long workers wait for each other, where known.
    on_restart: told of each failure after which all workers are started anew.
    """

    def __init__(
        self,
        payload: bytes,
        processes: int,
        log_dir: str,
        env: Mapping[str, str],
        max_restarts: int,
        private_dir: str,
        stop: StopSignals,
        stoppable: bool = False,
        timeout_s: float | None = None,
        on_restart: Callable[[WorkerFailed], None] | None = None,
    ):
        board_path = os.path.join(private_dir, "board")
        spec = WorkerSpec(
            role=LOCAL_ROLE,
            local_world_size=processes,
            rdzv_handler=LoopbackRendezvous(),
            entrypoint=work,
            args=(payload, os.getpid(), log_dir, board_path, stoppable),
            max_restarts=max_restarts,
            monitor_interval=_POLL_S,
        )
        # There is no other agent to wait for at the exit barrier.
        super().__init__(spec, DefaultLogsSpecs(log_dir=private_dir), "spawn", exit_barrier_timeout=5)
        self.failure: WorkerFailed | None = None
        self.stopped: str | None = None
        self._log_dir, self._timeout_s = log_dir, timeout_s
        self._board = Board(board_path, processes)
        self._stop = stop
        self._on_restart = on_restart
        # torch would install handlers that raise wherever they strike, even between two spawns: name none to
        # install.
        self._env = {**env, "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}

    def _start_workers(self, worker_group: WorkerGroup) -> dict:
        self._stop.check()
        if self.failure is not None and self._on_restart is not None:
            self._on_restart(self.failure)
        self.failure = None
        before = set(multiprocessing.active_children())
        try:
            with spawning(self._env):
                return super()._start_workers(worker_group)
        except BaseException:
            # torch forgets the workers that it had started when the next one would not start.
            end_processes(set(multiprocessing.active_children()) - before)
            raise

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._stop.check()
        if self._stop.wanted:
            self._board.ask_to_stop()
            self._remaining_restarts = 0
        # A worker that is done waits for the agent, so one that has ended has failed or was told to stop, whatever
        # its exit code: torch would wait for ever for the result of one that left with code 0.
        ended = self._ended()
        if not ended:
            if not self._all_done():
                return RunResult(state=WorkerState.HEALTHY)
            result = super()._monitor_workers(worker_group)
            if result.state != WorkerState.FAILED:
                return result
            # It ended between the look above and torch's own; torch has killed the others by now.
            ended = set(result.failures)
        deaths = [self._death(rank) for rank in ended]
        self.stopped = next((death.stopped for death in deaths if death.stopped is not None), None)
        if self.stopped is not None:
            self._wait_while(lambda: len(self._ended()) < len(self._processes()), _LEAVE_S)
            end_processes(self._processes())
            # torch's own account wants to hear of each.
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(range(len(self._processes()))))
        # Judged before the others are ended here, so that their deaths are not taken for causes.
        stall = None
        if all(death.lost_a_peer for death in deaths):
            stall = self._stall()
            deaths = [self._death(rank) for rank in self._ended()]
        self.failure = stall or root_cause(deaths, self._log_dir)
        if any(death.repeats for death in deaths):
            self._remaining_restarts = 0
        # Not left to torch, which gives a worker 30 s between SIGTERM and SIGKILL.
        end_processes(self._processes())
        return RunResult(state=WorkerState.FAILED)

    def _stall(self) -> WorkerFailed | None:
        """Names the ranks for which all others have given up waiting: they alone neither moved nor complained."""

        def silent() -> list[int]:
            ended = self._ended()
            return [
                rank
                for rank in range(len(self._processes()))
                if rank not in ended and read_report(self._pcontext.error_files[rank]) is None
            ]

        self._wait_while(silent, _GIVE_UP_S)
        self._wait_while(lambda: len(silent()) > 1, _GIVE_UP_LATE_S)
        pids = {rank: self._processes()[rank].pid for rank in silent()}
        pids = {rank: pid for rank, pid in pids.items() if is_stopped(pid)} or pids
        if not pids:
            return None
        return stalled({rank: self._board.read(rank) for rank in pids}, pids, self._timeout_s)

    def _wait_while(self, condition: Callable[[], object], at_most_s: float) -> None:
        deadline = time.monotonic() + at_most_s
        while condition() and time.monotonic() < deadline:
            self._stop.check()
            time.sleep(_POLL_S)

    def _shutdown(self, *args, **kwargs) -> None:
        end_processes(self._processes())
        super()._shutdown(*args, **kwargs)

    def _construct_event(self, *args, **kwargs) -> Event:
        # torch asks the name server for this machine's name for each event, which can take seconds where
        # there is none; and then nobody reads the event.
        return Event(name=LOCAL_ROLE, source=EventSource.AGENT)

    def _all_done(self) -> bool:
        # What torch itself waits for. Asked here first: its own look at workers ends them all by SIGTERM, with
        # patience, where one has died since the look at `_ended`.
        return all(not value.empty() for value in self._pcontext._ret_vals.values())

    def _ended(self) -> set[int]:
        return {rank for rank, process in enumerate(self._processes()) if process.exitcode is not None}

    def _processes(self) -> list:
        # torch has no public view of a worker's exit code. Local rank and rank are the same here.
        started = getattr(self._pcontext, "_pc", None)
        return list(started.processes) if started else []

    def _death(self, rank: int) -> Death:
        return Death(rank, self._processes()[rank].exitcode, read_report(self._pcontext.error_files[rank]))
