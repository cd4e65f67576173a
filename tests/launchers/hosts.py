"""Two hosts on one machine: network namespaces with addresses of their own and a cable between them."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack

from afterwards import afterwards
from commandline import ROOT, environment


class Hosts:
    """Needs root and the ip command; raises OSError or CalledProcessError where there can be no namespaces."""

    def __init__(self, addresses=("10.213.77.1/24", "10.213.77.2/24")):
        self.addresses = addresses
        self.names = [f"owp{os.getpid()}{side}" for side in "ab"]
        self._end = ExitStack()

    def ip(self, *words):
        command = ["ip", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout

    def __enter__(self):
        for name in self.names:
            leave = f"ip netns pids {name} | xargs -r kill -9; ip netns delete {name}"
            self._end.enter_context(afterwards(leave))
        try:
            for name in self.names:
                self.ip("netns", "add", name)
                self.ip("-n", name, "link", "set", "lo", "up")
            left, right = self.names
            self.ip("link", "add", "cable", "netns", left, "type", "veth", "peer", "name", "cable", "netns", right)
            for name, address in zip(self.names, self.addresses, strict=True):
                self.ip("-n", name, "addr", "add", address, "dev", "cable", *["nodad"] * (":" in address))
                self.ip("-n", name, "link", "set", "cable", "up")
            self.ip("netns", "exec", left, "true")
        except BaseException:
            self._end.close()
            raise
        return self

    def __exit__(self, *exception):
        self._end.close()

    def cut(self):
        """Pull the cable out."""
        self.ip("-n", self.names[1], "link", "set", "cable", "down")

    def torchrun(self, words, outputs, env=({}, {}), program="train.py"):
        """Both agents of ``program`` with ``words``, two ranks each."""
        agents = []
        for node, (name, output) in enumerate(zip(self.names, outputs, strict=True)):
            command = [
                "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                f"--node-rank={node}", "--nproc-per-node=2", f"--master-addr={self.addresses[0].partition('/')[0]}",
                "--master-port=29417", str(program), *words,
            ]  # fmt: skip
            more = environment({"OMP_NUM_THREADS": "1", **env[node]})
            with open(output, "w") as file:
                agents.append(
                    subprocess.Popen(command, cwd=ROOT, env=more, stdout=file, stderr=file, start_new_session=True)
                )
        return agents


def lacking():
    """Why there can be no hosts here, in words; None where they can be tried."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "network namespaces need root and the ip command (apt-get install iproute2)"
    return None
