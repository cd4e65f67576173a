"""Notices, in the middle of the work, that another rank has died without a word or that the network to it is gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_FAREWELL = b"."
# By then srun, an agent or a failed collective has ended this process too, if they know of the death.
_GRACE_S = 10.0
_ASKED = 3


class Watch:
    """An idle connection to a rank that listens at ``address``, asked by the kernels of both machines, however busy
    the processes are, whether it is still there.

    died  called _GRACE_S after that rank has gone without ``say_farewell``
    lost  called with the reason, in words, where its machine has not answered for two thirds of ``timeout_s``

    At most one of them is called, once, in a thread of its own. Raises OSError where there is no way to the address.
    """

    def __init__(
        self,
        address: tuple[str, int],
        timeout_s: float,
        died: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        self._died, self._lost = died, lost
        self._closed = False
        self._connection = socket.create_connection(address, timeout=timeout_s)
        self._connection.settimeout(None)
        _keep_asking(self._connection, timeout_s)
        threading.Thread(target=self._listen, name="watch", daemon=True).start()

    def close(self) -> None:
        """From now on nothing is called."""
        self._closed = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        why, farewell = None, b""
        try:
            farewell = self._connection.recv(1)
        except ConnectionError:
            pass
        except OSError as error:
            why = (error.strerror or str(error)).lower()
        if self._closed or farewell:
            return
        if why is not None:
            self._lost(why)
            return
        time.sleep(_GRACE_S)
        if not self._closed:
            self._died()


def say_farewell(listener: socket.socket) -> None:
    """Tell all who watch the rank that listens there that its work is done."""
    with suppress(OSError):  # nobody else is waiting
        listener.setblocking(False)
        while True:
            connection, _ = listener.accept()
            with suppress(OSError), connection:
                connection.send(_FAREWELL)


def _keep_asking(connection: socket.socket, timeout_s: float) -> None:
    """Have the kernel take the other end for lost after a silence of two thirds of ``timeout_s``, but 4 s at least."""
    if not hasattr(socket, "TCP_KEEPIDLE"):
        return  # collectives notice it, in their own time
    every = max(1, int(timeout_s / (2 * _ASKED)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASKED)
