"""Channel: messages between hvdrun and a guard, over a local socket or, where ranks are on other hosts, TCP.

*Wire format*: frames: 4 bytes length (big-endian, of what follows), 1 byte kind, payload. Kind ``J`` is one JSON object;
``O`` and ``E`` are raw bytes of a rank's standard output and error, ``I`` of its input. Inside JSON, byte strings travel as
Latin-1 text, which maps every byte to one character and back. Nothing from the wire is ever unpickled.
*Threads*: none; both ends are single-threaded and never block: what cannot be sent at once waits in ``unsent``.
*Guarantees*: both ends prove that they know the job's random token, by HMAC over the other's nonce, before either is told
anything; until then a frame of more than ``MAX_HELLO_BYTES`` ends the connection.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

#: A guard that cannot be reached for this long has no hvdrun. Chosen: a busy machine's worst is a second.
CONNECT_TIMEOUT_S = 10.0
#: Largest frame before the token was shown, and after. Chosen: a hello is 300 bytes, the largest job (argv and environment)
#: that Linux can start 2 MiB, which JSON may triple.
MAX_HELLO_BYTES = 4096
MAX_FRAME_BYTES = 32 << 20

_SOCKET = "socket"
_TOKEN = "token"
_READ_BYTES = 1 << 18
_HEADER = struct.Struct("!IB")
_JSON = ord("J")
#: Raw kinds, by the descriptor whose bytes they carry.
_STREAMS = {0: ord("I"), 1: ord("O"), 2: ord("E")}
_STREAM_OF = {kind: stream for stream, kind in _STREAMS.items()}


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, *, trusted: bool = False) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._unread = bytearray()
        self.unsent = bytearray()
        #: Whether the peer has shown the token.
        self.trusted = trusted

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; what the peer does not take now waits. Raises: OSError when the peer is gone."""
        self._send_frame(_JSON, json.dumps(message).encode("ascii"))

    def send_data(self, stream: int, data: bytes) -> None:
        """Send bytes of a rank's stream 0, 1 or 2; none at all tell its end."""
        self._send_frame(_STREAMS[stream], data)

    def _send_frame(self, kind: int, payload: bytes) -> None:
        self.unsent += _HEADER.pack(len(payload) + 1, kind)
        self.unsent += payload
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the peer takes it now. Raises: OSError when the peer is gone."""
        while self.unsent:
            try:
                sent = self._connection.send(memoryview(self.unsent)[:_READ_BYTES])
            except (BlockingIOError, InterruptedError):
                return
            del self.unsent[:sent]

    def drain(self, timeout_s: float) -> None:
        """Send what waits, for so long at most."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while self.unsent and (left_s := deadline_s - time.monotonic()) > 0:
                select.select([], [self._connection], [], left_s)
                self.flush()
        except OSError:
            pass  # the peer is gone

    def receive(self) -> list[dict[str, Any]] | None:
        """Read what has arrived: the complete messages, or None when the other end has closed or died.

        Raw bytes come as ``{"kind": "data", "stream": n, "data": bytes}``. Raises: ValueError when what arrived is no message.
        """
        try:
            data = self._connection.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not data:
            return None
        self._unread += data
        messages = []
        offset = 0
        while len(self._unread) - offset >= _HEADER.size:
            length, kind = _HEADER.unpack_from(self._unread, offset)
            if not 1 <= length <= (MAX_FRAME_BYTES if self.trusted else MAX_HELLO_BYTES):
                raise ValueError(f"a frame of {length} bytes")
            end = offset + 4 + length
            if len(self._unread) < end:
                break
            messages.append(_message(kind, bytes(memoryview(self._unread)[offset + _HEADER.size:end])))
            offset = end
        del self._unread[:offset]
        return messages

    def events(self) -> int:
        """What to poll for: something arrives, or what waits can be sent."""
        return select.POLLIN | (select.POLLOUT if self.unsent else 0)

    def close(self) -> None:
        """Close this end; the other one reads None."""
        self._connection.close()


def receive(channel: Channel) -> list[dict[str, Any]] | None:
    """Send what waits and take what has arrived; whoever talks nonsense is treated like one who hung up: None."""
    try:
        channel.flush()
        return channel.receive()
    except (OSError, ValueError):
        return None


def _message(kind: int, payload: bytes) -> dict[str, Any]:
    if kind in _STREAM_OF:
        return {"kind": "data", "stream": _STREAM_OF[kind], "data": payload}
    if kind != _JSON:
        raise ValueError(f"a frame of kind {kind}")
    try:
        message = json.loads(payload)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str) or message["kind"] == "data":
        raise ValueError("a message is no object with a kind")
    return message


def proof(token: str, role: str, nonce: str, *facts: object) -> str:
    """What shows that ``role`` knows the token, in answer to ``nonce``; it also binds ``facts``."""
    text = "\0".join((role, nonce, *map(str, facts)))
    return hmac.new(token.encode(), text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def is_proof(given: object, *expected: Any) -> bool:
    """Compare in constant time with ``proof(*expected)``."""
    return isinstance(given, str) and hmac.compare_digest(given.encode("utf-8", "replace"), proof(*expected).encode())


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
    listener.setblocking(False)
    return listener


def listen_tcp(address: str, backlog: int) -> socket.socket:
    """Listen on a free port of one address of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(backlog)
    listener.setblocking(False)
    return listener


def connect(directory: str) -> tuple[Channel, str]:
    """Connect to the hvdrun that listens in ``directory``; return the channel and the token. Raises: OSError."""
    with open(os.path.join(directory, _TOKEN), encoding="ascii") as file:
        token = file.read()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_TIMEOUT_S)
    _with_address(directory, connection.connect)
    return Channel(connection), token


def connect_tcp(addresses: Sequence[str]) -> Channel:
    """Connect to the first of ``host:port`` that answers. Raises: OSError that names them all."""
    reasons = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)
        except OSError as reason:
            reasons.append(f"{address}: {reason.strerror or reason}")
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Channel(connection)
    raise OSError("; ".join(reasons))


def remove(directory: str) -> None:
    """Remove the directory and what is in it; another end may do the same at the same time."""
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
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
