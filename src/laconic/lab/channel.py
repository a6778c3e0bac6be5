"""Messages between a lab and its keeper: JSON over a socket pair, with file descriptors beside it."""

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

_MAX_FDS = 250  # the kernel takes 253 in one message
_LENGTH = struct.Struct("!I")


class Channel:
    """One end. Each side waits for the other's answer, so nothing here needs a lock."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        data = json.dumps(message).encode()
        socket.send_fds(self._socket, [_LENGTH.pack(len(data))], fds)
        self._socket.sendall(data)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and its descriptors, or None when the other side is gone."""
        try:
            header, fds, _, _ = socket.recv_fds(self._socket, _LENGTH.size, _MAX_FDS)
            data = bytearray()
            while header and len(data) < _LENGTH.unpack(header)[0]:
                part = self._socket.recv(_LENGTH.unpack(header)[0] - len(data))
                if not part:
                    return None
                data += part
        except ConnectionError:
            return None
        return (json.loads(data), fds) if header else None

    def close(self) -> None:
        self._socket.close()
