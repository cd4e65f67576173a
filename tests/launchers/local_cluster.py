"""A real SLURM on one machine: a controller, several nodes and munge, for tests and for people without a cluster.

    python -m tests.launchers.local_cluster start FOLDER --nodes 2      # prints how to use it
    export SLURM_CONF=FOLDER/slurm.conf
    python train.py launcher=slurm launcher.nodes=2 parallel=pipe_ddp model=gpt2 model.size=tiny
    python -m tests.launchers.local_cluster stop FOLDER

Needs root (slurmd starts jobs for any user) and Debian's packages slurm-wlm and munge. All files are in FOLDER, which
must not exist yet; the daemons listen on 127.0.0.1 only, and nothing of the machine's own SLURM is read or changed.
The queue keeps account of memory, but no cgroups limit it.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from common.errors import LaunchError
from launchers.meeting import LOOPBACK, listen

_DAEMONS = ("munged", "slurmctld", "slurmd", "slurmstepd")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
_START_S = 30.0
_STOP_S = 10.0

# cred_expire: for so long a job that was queued again is held back. The machine's cores and memory are shared by nodes
# that are made up: config_overrides.
_CONF = """\
ClusterName=local
SlurmctldHost={host}({address})
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
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
    """Return what this machine lacks to start a cluster, in words; None when it lacks nothing."""
    if not sys.platform.startswith("linux"):
        return f"SLURM runs on Linux, this is {sys.platform}"
    absent = [program for program in _PROGRAMS if _find(program) is None]
    if absent:
        return f"{', '.join(absent)} not found; on Debian: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "starting SLURM's daemons needs root"
    return None


class LocalCluster:
    """A cluster of nodes n1, n2, …

    Args:
        folder: For the cluster's files; absent or empty.
        nodes: The number of nodes.
        cpus: The number of CPUs of each node; may be more than the machine has.
        memory_mb: The memory of each node in MB.
    """

    def __init__(self, folder: str | os.PathLike, nodes: int = 2, cpus: int = 8, memory_mb: int = 8192) -> None:
        self.folder = Path(folder).absolute()
        self.nodes, self.cpus, self.memory_mb = nodes, cpus, memory_mb

    @property
    def environment(self) -> dict[str, str]:
        """What SLURM's commands need to find the cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons and return when every node is idle.

        Raises:
            LaunchError: The cluster cannot start. Nothing is left running.
        """
        if lacking := missing():
            raise LaunchError(f"no local SLURM here: {lacking}")
        if self.folder.exists() and any(self.folder.iterdir()):
            raise LaunchError(f"{self.folder} is not empty: stop the cluster there, or choose another folder")
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        try:
            self._write_conf()
            self._start_munge()
            self._run("slurmctld")
            for node in range(1, self.nodes + 1):
                self._run("slurmd", "-N", f"n{node}")
            self._wait_until_idle()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill all daemons and what runs in jobs, and return when they are gone. Nothing happens where none runs."""
        import psutil

        deadline = time.monotonic() + _STOP_S
        while (processes := self._processes()) and time.monotonic() < deadline:
            for process in processes:
                process.kill()
            psutil.wait_procs(processes, timeout=1)

    def _processes(self) -> list:
        """The daemons and the processes of jobs, whoever their parent is. A user's shell has SLURM_CONF too."""
        import psutil

        own = []
        for process in psutil.process_iter():
            try:
                environment = process.environ() if process.pid != os.getpid() else {}
                if environment.get("SLURM_CONF") == self.environment["SLURM_CONF"] and (
                    process.name() in _DAEMONS or "SLURM_JOB_ID" in environment
                ):
                    own.append(process)
            except psutil.Error:
                continue
        return own

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        names = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{name}" for option, name in names.items()]
        # --force: it would refuse a folder that other users cannot enter.
        self._run("munged", "--force", f"--key-file={key}", "--num-threads=2", *options)

    def _write_conf(self) -> None:
        with ExitStack() as held:
            sockets = [held.enter_context(listen(LOOPBACK, 0)) for _ in range(self.nodes + 1)]
            ports = [listener.getsockname()[1] for listener in sockets]
        text = _CONF.format(
            folder=self.folder,
            host=socket.gethostname().partition(".")[0],
            address=LOOPBACK,
            nodes=self.nodes,
            controller_port=ports[0],
            node_ports=ports[1] if self.nodes == 1 else f"[{','.join(map(str, ports[1:]))}]",
            cpus=self.cpus,
            memory=self.memory_mb,
            memory_per_cpu=self.memory_mb // self.cpus // 2,
        )
        (self.folder / "slurm.conf").write_text(text)

    def _run(self, program: str, *arguments: str) -> str:
        """Run ``program`` to its end, or until it is in the background: its standard output."""
        foreign = ("SLURM_", "SBATCH_", "SRUN_")
        env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        output = self.folder / "output"  # not a pipe: daemons would hold it open
        with open(output, "w+") as file:
            done = subprocess.run(
                [_find(program), *arguments], env={**env, **self.environment}, stdin=subprocess.DEVNULL, stdout=file,
                stderr=file, timeout=_START_S,
            )  # fmt: skip
        said = output.read_text()
        if done.returncode:
            raise LaunchError(f"{program} does not start: {said.strip() or f'exit code {done.returncode}'}")
        return said

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                states = self._run("sinfo", "--noheader", "--Node", "--format=%T").split()
            except LaunchError:
                states = ["unknown"]
            if states == ["idle"] * self.nodes:
                return
            if time.monotonic() > deadline:
                logs = "\n".join(_tail(path) for path in sorted(self.folder.glob("slurm*.log")))
                raise LaunchError(f"after {_START_S:g} s the nodes are {', '.join(states)}, not idle\n{logs}")
            time.sleep(0.1)


def _find(program: str) -> str | None:
    # Debian keeps daemons out of an ordinary user's PATH.
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")


def _tail(path: Path) -> str:
    return f"{path}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-5:])


def main() -> None:
    """Start or stop a cluster from the command line."""
    parser = argparse.ArgumentParser(description="A real SLURM on this machine, on the loopback interface.")
    parser.add_argument("action", choices=("start", "stop"))
    parser.add_argument("folder", type=Path, help="its configuration, state and logs")
    parser.add_argument("--nodes", type=int, default=2)
    arguments = parser.parse_args()
    cluster = LocalCluster(arguments.folder, arguments.nodes)
    if arguments.action == "stop":
        cluster.stop()
        shutil.rmtree(cluster.folder, ignore_errors=True)
        return
    try:
        cluster.start()
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    print(f"{arguments.nodes} nodes are idle. Use them with:\nexport SLURM_CONF={cluster.environment['SLURM_CONF']}")


if __name__ == "__main__":
    main()
