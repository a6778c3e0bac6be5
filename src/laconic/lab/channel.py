"""The messages between a lab and its keeper: JSON and file descriptors over a socket pair."""

import json
import os
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

_MAX_FDS = 250  # the kernel takes 253 in one message


class Channel:
    """One end of the socket pair. One thread uses it, so it needs no lock."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._connection = Connection(os.dup(sock.fileno()))

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a message arrives or the other side ends."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message and duplicates of open file descriptors.

        Raises: BrokenPipeError if the other side has ended.
        """
        socket.send_fds(self._socket, [b"\0"], fds)
        self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message, and return it with its descriptors.

        Raises: EOFError if the other side has ended.
        """
        try:
            _, fds, _, _ = socket.recv_fds(self._socket, 1, _MAX_FDS)
            return json.loads(self._connection.recv_bytes()), fds
        except OSError as error:  # the other side ended in the middle of a message
            raise EOFError from error

    def close(self) -> None:
        """Close this end. The other side then gets an EOFError from `receive`."""
        self._connection.close()
        self._socket.close()
