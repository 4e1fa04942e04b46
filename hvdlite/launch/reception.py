"""Reception: whoever connects to hvdrun is asked for the job's token, and hung up on without.

*Guarantees*: a stranger learns nothing, sends little, and does no harm to the job; it is told of, a few times.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hvdlite.launch.channel import Channel, is_proof, receive

#: How long whoever connects may take to show the token. Chosen.
GREETING_TIMEOUT_S = 10.0
_MAX_REFUSALS_TOLD = 5


class _Stranger(NamedTuple):
    channel: Channel
    nonce: str
    deadline_s: float
    who: str


class Reception:
    """Listening sockets, and who has connected to them and not shown the token yet."""

    def __init__(self, listeners: Sequence[socket.socket], token: str, say: Callable[[str], None]) -> None:
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._token, self._say = token, say
        self._strangers: dict[int, _Stranger] = {}
        self._num_refused = 0

    def descriptors(self) -> dict[int, int]:
        """What to poll, for which events."""
        return {**dict.fromkeys(self._listeners, select.POLLIN),
                **{descriptor: one.channel.events() for descriptor, one in self._strangers.items()}}

    def deadline_s(self) -> float:
        """When :meth:`act_on_time` has something to do."""
        return min((one.deadline_s for one in self._strangers.values()), default=float("inf"))

    def act_on_time(self, now_s: float) -> None:
        """Hang up on those who say nothing."""
        for descriptor in [one for one, stranger in self._strangers.items() if now_s >= stranger.deadline_s]:
            stranger = self._strangers.pop(descriptor)
            stranger.channel.close()
            self._refuse(stranger.who, f"said nothing for {GREETING_TIMEOUT_S:g} s")

    def serve(self, descriptor: int) -> tuple[Channel, dict[str, Any]] | None:
        """Accept or hear somebody; return a guard's channel with its greeting, once it has shown the token."""
        if descriptor in self._listeners:
            self._accept(self._listeners[descriptor])
            return None
        one = self._strangers[descriptor]
        greetings = receive(one.channel)
        if greetings == []:
            return None  # not complete yet
        del self._strangers[descriptor]
        hello = greetings[0] if greetings else {}
        if hello.get("kind") == "hello" and is_proof(hello.get("proof"), self._token, "guard", one.nonce, hello.get("rank")):
            return one.channel, hello
        one.channel.close()
        self._refuse(one.who, "cannot show this job's token")
        return None

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError:
            return  # it has gone again
        who = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "this host"
        channel, nonce = Channel(connection), os.urandom(16).hex()
        self._strangers[connection.fileno()] = _Stranger(channel, nonce, time.monotonic() + GREETING_TIMEOUT_S, who)
        try:
            channel.send({"kind": "challenge", "nonce": nonce})
        except OSError:
            pass  # its end of the socket says so next

    def _refuse(self, who: str, why: str) -> None:
        self._num_refused += 1
        if self._num_refused <= _MAX_REFUSALS_TOLD:
            last = "; further ones are not told" if self._num_refused == _MAX_REFUSALS_TOLD else ""
            self._say(f"hvdrun: warning: connection from {who} refused: it {why}: the job goes on{last}")
