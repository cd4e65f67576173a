"""A real SLURM on one machine: a controller, several nodes and munge, for tests and for people without a cluster.

    python -m launchers.local_cluster start FOLDER --nodes 2      # prints how to use it
    export SLURM_CONF=FOLDER/slurm.conf
    python train.py launcher=slurm launcher.nodes=2 parallel=pipe_ddp model=gpt2 model.size=tiny
    python -m launchers.local_cluster stop FOLDER

Needs root (slurmd starts jobs for any user) and Debian's packages slurm-wlm and munge. Everything lies in FOLDER, which
must not exist yet; the daemons listen on 127.0.0.1 only, and nothing of the machine's own SLURM is read or changed.
Memory limits are those of the queue's book-keeping: no cgroups are set up.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from common.errors import LaunchError
from launchers.loopback import LOOPBACK

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
_START_S = 30.0
_STOP_S = 10.0

_CONF = """\
ClusterName=local
SlurmctldHost={host}({address})
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU={memory_per_cpu}
# The machine's cores and memory are shared by nodes that are made up.
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5,bf_interval=5,sched_min_interval=100000
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=10
SlurmctldTimeout=30
SlurmdTimeout=30
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr={address} Port={node_ports} CPUs={cpus} RealMemory={memory} \
State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """What this machine lacks to start a cluster, in words; None when it lacks nothing."""
    if not sys.platform.startswith("linux"):
        return f"SLURM runs on Linux, this is {sys.platform}"
    absent = [program for program in _PROGRAMS if _find(program) is None]
    if absent:
        return f"{', '.join(absent)} not found; on Debian: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "starting SLURM's daemons needs root"
    return None


class LocalCluster:
    """A cluster in ``folder`` (absent or empty) of ``nodes`` nodes n1, n2, … with ``cpus`` CPUs and ``memory_mb`` each.

    Use as a context manager, or call start() and stop(). ``environment`` is what SLURM's commands need to find it.
    """

    def __init__(self, folder: str | os.PathLike, nodes: int = 2, cpus: int = 8, memory_mb: int = 8192) -> None:
        self.folder = Path(folder).absolute()
        self.nodes, self.cpus, self.memory_mb = nodes, cpus, memory_mb

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *exception) -> None:
        self.stop()

    def start(self) -> None:
        """Start all daemons and return when every node is idle. Raises LaunchError, with nothing left running."""
        lacking = missing()
        if lacking:
            raise LaunchError(f"no local SLURM here: {lacking}")
        if self.folder.exists() and any(self.folder.iterdir()):
            raise LaunchError(f"{self.folder} is not empty: stop the cluster there, or choose another folder")
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        try:
            self._start_munge()
            self._write_conf()
            self._run("slurmctld")
            for node in self._names():
                self._run("slurmd", "-N", node)
            self._wait_until_idle()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all jobs and daemons; returns when they are gone. Does nothing where none runs."""
        if self._pids("slurmctld"):
            self._query("scancel", "--user", str(os.geteuid()), "--signal", "KILL", "--full")
        daemons = [pid for name in ("slurmctld", "slurmd-*", "munged") for pid in self._pids(name)]
        for pid in daemons:
            _kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while any(map(_alive, daemons)) and time.monotonic() < deadline:
            time.sleep(0.05)
        # Jobs are processes of their own, which outlive their node's daemon.
        for pid in [*daemons, *_job_processes(self.environment["SLURM_CONF"])]:
            _kill(pid, signal.SIGKILL)

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge{'d' * (name == 'pid')}.{name}" for option, name in names.items()]
        # --force: it would refuse a folder that other users cannot enter.
        self._run("munged", "--force", f"--key-file={key}", "--num-threads=2", *options)

    def _write_conf(self) -> None:
        ports = _free_ports(self.nodes + 1)
        text = _CONF.format(
            folder=self.folder,
            host=socket.gethostname().partition(".")[0],
            address=LOOPBACK,
            user="root",
            nodes=self.nodes,
            controller_port=ports[0],
            node_ports=ports[1] if self.nodes == 1 else f"[{','.join(map(str, ports[1:]))}]",
            cpus=self.cpus,
            memory=self.memory_mb,
            memory_per_cpu=self.memory_mb // self.cpus // 2,
        )
        (self.folder / "slurm.conf").write_text(text)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [_find(program), *arguments], env=self._env(), text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=_START_S,
        )  # fmt: skip
        if done.returncode:
            raise LaunchError(f"{program} does not start: {done.stderr.strip() or f'exit code {done.returncode}'}")

    def _query(self, program: str, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [_find(program), *arguments], env=self._env(), text=True, capture_output=True, timeout=_STOP_S
            )
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            states = self._query("sinfo", "--noheader", "--Node", "--format=%N %T").split()[1::2]
            if states == ["idle"] * self.nodes:
                return
            if time.monotonic() > deadline:
                logs = "\n".join(_tail(path) for path in sorted(self.folder.glob("slurm*.log")))
                found = ", ".join(states) or "unknown"
                raise LaunchError(f"after {_START_S:g} s the nodes are {found}, not idle\n{logs}")
            time.sleep(0.1)

    def _env(self) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        return {**clean, **self.environment}

    def _names(self) -> list[str]:
        return [f"n{index}" for index in range(1, self.nodes + 1)]

    def _pids(self, name: str) -> list[int]:
        """Of the daemons whose pid files match ``name``, those that run."""
        found = []
        for path in self.folder.glob(f"{name}.pid"):
            try:
                found.append(int(path.read_text()))
            except (OSError, ValueError):
                continue
        return [pid for pid in found if _alive(pid)]


def _find(program: str) -> str | None:
    # Debian keeps daemons out of an ordinary user's PATH.
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _kill(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


def _job_processes(conf: str) -> list[int]:
    """Steps, and what they have started, of the cluster that ``conf`` describes, whoever their parent is now."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        in_job = command.startswith(b"slurmstepd") or any(line.startswith(b"SLURM_JOB_ID=") for line in environment)
        if in_job and os.fsencode(f"SLURM_CONF={conf}") in environment and entry.name != str(os.getpid()):
            found.append(int(entry.name))
    return found


def _tail(path: Path) -> str:
    return f"{path}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-5:])


def main() -> None:
    parser = argparse.ArgumentParser(description="A real SLURM on this machine, on the loopback interface.")
    parser.add_argument("action", choices=("start", "stop"))
    parser.add_argument("folder", type=Path, help="its configuration, state and logs")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=8, help="of each node; may be more than the machine has")
    parser.add_argument("--memory", type=int, default=8192, help="of each node, in MB")
    arguments = parser.parse_args()
    if arguments.action == "stop":
        nodes = len(list(arguments.folder.glob("slurmd-*.pid"))) or arguments.nodes
        LocalCluster(arguments.folder, nodes).stop()
        shutil.rmtree(arguments.folder, ignore_errors=True)
        return
    cluster = LocalCluster(arguments.folder, arguments.nodes, arguments.cpus, arguments.memory)
    try:
        cluster.start()
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    print(f"{arguments.nodes} nodes are idle. Use them with:\nexport SLURM_CONF={cluster.environment['SLURM_CONF']}")


if __name__ == "__main__":
    main()
