"""Network: which hosts are this one, how ssh reaches the others, and the address at which they reach this one."""

from __future__ import annotations

import ipaddress
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdlite.errors import UnavailableError
from hvdlite.launch.hosts import Host

#: How long a name service may take. Sourced: the issue's 10 s for an unknown host, less the rest of a start.
RESOLVE_TIMEOUT_S = 8.0


def is_this_host(name: str) -> bool:
    """Whether a name or address means the host this runs on; nothing is sent anywhere."""
    own = socket.gethostname()
    if name in ("localhost", own, own.split(".")[0], "localhost.localdomain"):
        return True
    try:
        address = ipaddress.ip_address(name.split("%")[0])
    except ValueError:
        return False
    if address.is_loopback:
        return True
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


@dataclass(frozen=True)
class SshOptions:
    """How ssh is called. ``connect_timeout_s``: for one connection, its handshake included."""

    port: int | None = None
    identity_file: str = ""
    args: str = ""
    connect_timeout_s: float = 30.0

    def argv(self) -> list[str]:
        """ssh with its options, before the host."""
        argv = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(self.connect_timeout_s))}",
                "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2"]
        if self.port:
            argv += ["-p", str(self.port)]
        if self.identity_file:
            argv += ["-i", self.identity_file]
        return [*argv, *shlex.split(self.args)]


def resolve(hosts: Sequence[Host], ssh: SshOptions, say: Callable[[str], None]) -> dict[Host, str]:
    """The address of each host, as ssh would reach it; empty for one behind a jump host. Raises: UnavailableError."""
    answers: dict[Host, str | OSError] = {}

    def ask(host: Host) -> None:
        try:
            answers[host] = _address(host, ssh)
        except OSError as reason:
            answers[host] = reason

    threads = [threading.Thread(target=ask, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + RESOLVE_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    found = {}
    for host in hosts:
        answer = answers.get(host)
        if not isinstance(answer, str):
            why = f"no answer from the name service in {RESOLVE_TIMEOUT_S:g} s" if answer is None else answer.strerror
            raise UnavailableError(f"host {host.name!r} is not known: {why}: check its spelling, /etc/hosts, or give its address")
        found[host] = answer
    return found


def _address(host: Host, ssh: SshOptions) -> str:
    try:
        done = subprocess.run([*ssh.argv(), "-G", host.target], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=RESOLVE_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise UnavailableError("ssh: not found, and other hosts are reached by it: install an ssh client") from None
    except subprocess.TimeoutExpired:
        return ""
    said = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    if said.get("proxyjump", "none") != "none" or said.get("proxycommand", "none") != "none":
        return ""
    found = socket.getaddrinfo(said.get("hostname", host.name), None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def address_towards(remote: str) -> str:
    """This host's address on the way to another; empty where there is none. Nothing is sent."""
    family = socket.AF_INET6 if ":" in remote else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((remote, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""
