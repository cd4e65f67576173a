"""What stages hand to each other on one machine: by shared memory, in place of a network.

A tensor that gloo carries is copied into the kernel and out of it again by threads that take their time from the very
cores that compute, after messages to and fro: has it been asked for, may it come? Here the sender copies it once, to
where the receiver uses it, and puts its number into a pipe; nobody waits for anything but data.

Only Linux has what this needs; elsewhere, between machines and on GPUs, torch's own sends and receives do it.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import uuid
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.mesh import Mesh

_NUMBER = struct.Struct("<q")  # written and read whole: far below what a pipe takes in one piece
_ALIGNMENT = 4096


class Route(NamedTuple):
    """From whom to whom, by rank; ``what``: tells the routes between the same two apart."""

    sender: int
    receiver: int
    what: tuple


class Address(NamedTuple):
    """Where the other end of an ``Inbox`` is found. ``name``: what nothing else on any machine is called."""

    process: int
    memory: int
    pipe: int
    name: str


class Inbox:
    """The receiving end: room for ``slots`` tensors of ``size`` bytes each, ``number`` 0, 1, …

    Once the sender has opened its end, or cannot, ``close_sender``. Raises OSError, AttributeError where the system
    knows nothing of the kind.
    """

    def __init__(self, slots: int, size: int, sender: str) -> None:
        self._sender = sender
        self._arrived: set[int] = set()
        name = uuid.uuid4().hex
        memory = _open(os.memfd_create(name), "r+b")
        os.ftruncate(memory.fileno(), slots * _padded(size))
        self._slots = _map(memory, slots, size)
        reading, writing = os.pipe()
        self._pipe = _open(reading, "rb")
        self._for_sender = (memory, _open(writing, "wb"))
        self.address = Address(os.getpid(), *(file.fileno() for file in self._for_sender), name)

    def close_sender(self) -> None:
        """Let go of the sender's end: from now on this one sees when the sender goes."""
        for file in self._for_sender:
            file.close()

    def slot(self, number: int, like: Tensor) -> Tensor:
        """Where the tensor comes, of the shape and type of ``like``."""
        return _view(self._slots[number], like)

    def wait(self, number: int, what: str, timeout_s: float) -> None:
        """Until the tensor is there; then it stays until the sender puts the next in its place.

        Raises ConnectionError where the sender has gone, or nothing has come for ``timeout_s``.
        """
        while number not in self._arrived:
            poll = select.poll()
            poll.register(self._pipe, select.POLLIN)
            if not poll.poll(timeout_s * 1000):
                raise ConnectionError(f"waited {timeout_s:g} s for the {what}, which {self._sender} has not sent")
            told = self._pipe.read(64 * _NUMBER.size)
            if not told:
                raise ConnectionResetError(f"{self._sender} has gone before it sent the {what}")
            self._arrived.update(number for (number,) in _NUMBER.iter_unpack(told))
        self._arrived.remove(number)

    def close(self) -> None:
        self.close_sender()
        self._pipe.close()


class Outbox:
    """The sending end. Raises OSError where ``address`` is not to be reached: it is another machine's."""

    def __init__(self, address: Address, slots: int, size: int) -> None:
        place = f"/proc/{address.process}/fd"
        if address.name not in os.readlink(f"{place}/{address.memory}"):
            raise FileNotFoundError(f"{place}/{address.memory} is something else")
        with open(f"{place}/{address.memory}", "r+b", buffering=0) as memory:
            self._slots = _map(memory, slots, size)
        self._pipe = _open(os.open(f"{place}/{address.pipe}", os.O_WRONLY), "wb")

    def put(self, number: int, tensor: Tensor) -> None:
        """Copy ``tensor`` to the receiver. What was there under this number must not be in use any more. Raises
        BrokenPipeError where the receiver has gone."""
        _view(self._slots[number], tensor).copy_(tensor.detach())
        self._pipe.write(_NUMBER.pack(number))

    def close(self) -> None:
        self._pipe.close()


def open_routes(mesh: Mesh, sizes: Mapping[Route, int], slots: int) -> tuple[dict[Route, Inbox], dict[Route, Outbox]]:
    """The ends of all routes that this rank is an end of, where both can be had. All ranks call it together.

    sizes  for each of this rank's routes, the bytes of a tensor
    slots  how many tensors each route has room for
    """
    inboxes, outboxes = {}, {}
    for route, size in sizes.items():
        if route.receiver == mesh.rank:
            with suppress(OSError, AttributeError):
                inboxes[route] = Inbox(slots, size, f"rank {route.sender}")
    found = mesh.gather({route: inbox.address for route, inbox in inboxes.items()})
    addresses = {route: address for of_rank in found for route, address in of_rank.items()}
    for route, size in sizes.items():
        if route.sender == mesh.rank and route in addresses:
            with suppress(OSError):
                outboxes[route] = Outbox(addresses[route], slots, size)
    opened = set().union(*mesh.gather(set(outboxes)))
    for inbox in inboxes.values():
        inbox.close_sender()
    for route in set(inboxes) - opened:
        inboxes.pop(route).close()
    return inboxes, outboxes


def _open(descriptor: int, mode: str) -> FileIO:
    """The descriptor as a file, which is closed with its last reference."""
    return open(descriptor, mode, buffering=0)


def _map(memory: FileIO, slots: int, size: int) -> Tensor:
    """[slots, size] bytes."""
    mapped = mmap.mmap(memory.fileno(), slots * _padded(size))
    return torch.frombuffer(mapped, dtype=torch.uint8).view(slots, _padded(size))[:, :size]


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _view(slot: Tensor, like: Tensor) -> Tensor:
    return slot.view(like.dtype).view(like.shape)
