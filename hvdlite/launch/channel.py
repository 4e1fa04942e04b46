"""Channel: messages between hvdrun and a guard, over a local socket in a private directory.

*Wire format*: one JSON object per line. Byte strings travel as Latin-1 text, which maps every byte to one
character and back: JSON holds text only, and what users pass need not be valid in any encoding.
*Threads*: none; both ends are single-threaded.
*Guarantees*: the directory is open to its owner only, and a guard shows the job's random token before it
is told anything.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

#: A peer that takes no bytes for this long is taken for dead. Chosen: the largest job (2 MiB) takes milliseconds.
SEND_TIMEOUT_S = 10.0

_SOCKET = "socket"
_TOKEN = "token"
_READ_BYTES = 1 << 16


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_TIMEOUT_S)
        self._connection = connection
        self._unread = b""

    def fileno(self) -> int:
        """Return the descriptor to wait on; it is readable when :meth:`receive` will not block."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message whole. Raises: OSError when the other end is gone."""
        self._connection.sendall(json.dumps(message).encode("ascii") + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Read what has arrived: the complete messages, or None when the other end has closed or died.

        Raises: ValueError when what arrived is not a message.
        """
        try:
            data = self._connection.recv(_READ_BYTES)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a message is not an object")
        return messages

    def close(self) -> None:
        """Close this end; the other one reads None."""
        self._connection.close()


def pack(data: bytes) -> str:
    """Bytes as text that JSON can carry."""
    return data.decode("latin-1")


def unpack(text: str) -> bytes:
    """Invert :func:`pack`."""
    return text.encode("latin-1")


def listen(directory: str, token: str, backlog: int) -> socket.socket:
    """Write the token and listen in ``directory``, which must be open to its owner only."""
    descriptor = os.open(os.path.join(directory, _TOKEN), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(token)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _with_address(directory, listener.bind)
    listener.listen(backlog)
    return listener


def connect(directory: str) -> tuple[Channel, str]:
    """Connect to the hvdrun that listens in ``directory``; return the channel and the token to show."""
    with open(os.path.join(directory, _TOKEN), encoding="ascii") as file:
        token = file.read()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(SEND_TIMEOUT_S)
    _with_address(directory, connection.connect)
    return Channel(connection), token


def remove(directory: str) -> None:
    """Remove the directory and what :func:`listen` put there; another end may do the same at the same time."""
    for name in (_SOCKET, _TOKEN):
        try:
            os.unlink(os.path.join(directory, name))
        except OSError:
            pass
    try:
        os.rmdir(directory)
    except OSError:
        pass


def _with_address(directory: str, use: Any) -> None:
    # A socket's address holds 107 bytes and TMPDIR may be longer: reach it through a descriptor.
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        use(f"/proc/self/fd/{descriptor}/{_SOCKET}")
    finally:
        os.close(descriptor)
