"""torch's elastic agent, kept on loopback, quick to end, asked which worker failed first. Imports torch."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from launchers.errors import WorkerFailed
from launchers.failure import Death, read_report, root_cause
from launchers.loopback import LOOPBACK, listen
from launchers.processes import end_processes
from launchers.signals import StopSignals
from launchers.spawning import spawning
from launchers.worker import work
from launchers.world import LOCAL_ROLE

_STORE_TIMEOUT = timedelta(seconds=60)


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
    """Starts `processes` workers; after run(), `failure` is the root cause of a failed run, or None.

    payload: pickle of (entry, args), see launchers.worker. env: set before a worker's interpreter starts.
    private_dir: where workers leave their error reports. stop: asked between polls whether to go on.
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
    ):
        spec = WorkerSpec(
            role=LOCAL_ROLE,
            local_world_size=processes,
            rdzv_handler=LoopbackRendezvous(),
            entrypoint=work,
            args=(payload, os.getpid(), log_dir),
            max_restarts=max_restarts,
            monitor_interval=0.1,
        )
        # There is no other agent to wait for at the exit barrier.
        super().__init__(spec, DefaultLogsSpecs(log_dir=private_dir), "spawn", exit_barrier_timeout=5)
        self.failure: WorkerFailed | None = None
        self._log_dir = log_dir
        self._stop = stop
        # torch would install handlers that raise wherever they strike, even between two spawns: name none to
        # install.
        self._env = {**env, "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}

    def _start_workers(self, worker_group: WorkerGroup) -> dict:
        self._stop.check()
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
        # A worker that is done waits for the agent, so one that has ended has failed, whatever its exit code:
        # torch would wait for ever for the result of one that left with code 0.
        ended = self._ended()
        if not ended:
            result = super()._monitor_workers(worker_group)
            if result.state != WorkerState.FAILED:
                return result
            # It ended between the look above and torch's own; torch has killed the others by now.
            ended = set(result.failures)
        # Judged before the others are ended here, so that their deaths are not taken for causes.
        self.failure = root_cause([self._death(rank) for rank in ended], self._log_dir)
        # Not left to torch, which gives a worker 30 s between SIGTERM and SIGKILL.
        end_processes(self._processes())
        return RunResult(state=WorkerState.FAILED)

    def _shutdown(self, *args, **kwargs) -> None:
        end_processes(self._processes())
        super()._shutdown(*args, **kwargs)

    def _construct_event(self, *args, **kwargs) -> Event:
        # torch asks the name server for this machine's name for each event, which can take seconds where
        # there is none; and then nobody reads the event.
        return Event(name=LOCAL_ROLE, source=EventSource.AGENT)

    def _ended(self) -> set[int]:
        return {rank for rank, process in enumerate(self._processes()) if process.exitcode is not None}

    def _processes(self) -> list:
        # torch has no public view of a worker's exit code. Local rank and rank are the same here.
        started = getattr(self._pcontext, "_pc", None)
        return list(started.processes) if started else []

    def _death(self, rank: int) -> Death:
        return Death(rank, self._processes()[rank].exitcode, read_report(self._pcontext.error_files[rank]))
