"""Hosts: what ``-H`` and hostfiles mean, and which rank goes where. Pure functions of text.

Hostfiles are read as Open MPI (``h slots=2``), MPICH (``h:2``) and DeepSpeed write them; blank lines and comments do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hvdlite.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MAX_HOSTS = 100_000
_HOW = "write host:slots, such as h1:2,user@h2:2,[fd00::1]:2,n[01-03,7]:2"


@dataclass(frozen=True)
class Host:
    """A host that ranks can run on. ``slots``: how many; None: as many as needed."""

    name: str
    slots: int | None = None
    user: str = ""

    @property
    def target(self) -> str:
        """What ssh is given."""
        return f"{self.user}@{self.name}" if self.user else self.name

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        who = f"{self.user}@{name}" if self.user else name
        return who if self.slots is None else f"{who}:{self.slots}"


def parse_hosts(text: str, where: str = "-H") -> list[Host]:
    """Read a list of hosts with commas. Raises: ConfigError that quotes the part it is about."""
    entries = _split(text)
    if not any(entries):
        raise ConfigError(f"{where}: {text!r} names no host: {_HOW}")
    return merged(host for entry in entries for host in _parse_entry(entry, where))


def format_hosts(hosts: Iterable[Host]) -> str:
    """Invert :func:`parse_hosts`."""
    return ",".join(map(str, hosts))


def parse_hostfile(text: str, file: str) -> list[Host]:
    """Read a hostfile. Raises: ConfigError that begins with ``file:line:`` and quotes the line."""
    hosts = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        try:
            hosts += _parse_line(line)
        except ConfigError as reason:
            raise ConfigError(f"{file}:{number}: {reason} (the line is {raw.strip()!r})") from None
    if not hosts:
        raise ConfigError(f"{file}: names no host: write a host in each line, such as: h1 slots=2")
    return merged(hosts)


def _parse_line(line: str) -> list[Host]:
    head, *options = re.sub(r"\s*=\s*", "=", line).split()
    hosts = _parse_entry(head, "")
    for option in options:
        name, equals, value = option.partition("=")
        if name == "slots" and equals:
            hosts = [replace(host, slots=_slots(value, option)) for host in hosts]
        elif name == "user" and value:
            hosts = [replace(host, user=value) for host in hosts]
        elif name.replace("_", "-") in ("max-slots", "binding", "port", "ib-device") and equals:
            continue  # a limit and a hint of the MPIs, which change nothing here
        else:
            raise ConfigError(f"{option!r} is not understood: write: host slots=N")
    return hosts


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth <= 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]


def _parse_entry(entry: str, where: str) -> list[Host]:
    about = f"{where}: " if where else ""
    user, at, rest = entry.rpartition("@")
    if at and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", user):
        raise ConfigError(f"{about}{entry!r}: {user!r} is no user name: {_HOW}")
    address = re.fullmatch(r"\[([0-9A-Fa-f:.%a-z]*:[0-9A-Fa-f:.%a-z]*)\](?::(.*))?", rest)
    if address:
        return [Host(address[1], None if address[2] is None else _slots(address[2], entry, about), user)]
    if re.match(r"\[[^\]]*:", rest):
        raise ConfigError(f"{about}{entry!r} is no IPv6 address in brackets: write [fd00::1]:2")
    if rest.count(":") > 1 and "[" not in rest:
        raise ConfigError(f"{about}{entry!r} is an IPv6 address without brackets: write [{rest.rpartition(':')[0]}]:"
                          f"{rest.rpartition(':')[2] or 'slots'}")
    names, colon, slots = rest.partition(":") if "]" not in rest else _after_bracket(rest)
    count = _slots(slots, entry, about) if colon else None
    return [Host(name, count, user) for name in expand(names, entry, about)]


def _after_bracket(rest: str) -> tuple[str, str, str]:
    end = rest.rindex("]")
    head, colon, slots = rest[end:].partition(":")
    return rest[:end] + head, colon, slots


def _slots(text: str, entry: str, about: str = "") -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise ConfigError(
            f"{about}{entry!r}: {text!r} is no number of slots: {_HOW}" if about else f"{entry!r} is not a number")
    if int(text) == 0:
        raise ConfigError(f"{about}{entry!r}: 0 slots hold no rank: leave the host out")
    return int(text)


def expand(names: str, entry: str = "", about: str = "") -> list[str]:
    """``n[01-03,7]`` are n01, n02, n03, n7. Raises: ConfigError."""
    entry = entry or names
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", names)
    if match is None:
        if not _NAME.fullmatch(names):
            raise ConfigError(f"{about}{entry!r}: {names!r} is no host name: {_HOW}")
        return [names]
    numbers: list[str] = []
    for part in match[2].split(","):
        bounds = _RANGE.fullmatch(part.strip())
        if bounds is None:
            raise ConfigError(f"{about}{entry!r}: {part!r} is no range: write n[01-03,7]")
        first, last = bounds[1], bounds[2] or bounds[1]
        if int(last) < int(first) or int(last) - int(first) >= _MAX_HOSTS:
            raise ConfigError(f"{about}{entry!r}: the range {part} is empty or too long: write the smaller number first")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [name for number in numbers for name in expand(f"{match[1]}{number}{match[3]}", entry, about)]


def merged(hosts: Iterable[Host]) -> list[Host]:
    """Each host once, in the order of first mention; one that is listed several times has the sum of its slots, and 1 for
    each mention without."""
    found: dict[tuple[str, str], Host] = {}
    for host in hosts:
        key = (host.user, host.name)
        if key in found:
            host = replace(host, slots=(found[key].slots or 1) + (host.slots or 1))
        found[key] = host
    return list(found.values())


def place(hosts: Sequence[Host], num_ranks: int | None) -> list[Host]:
    """The host of each rank: hosts are filled in order; those without slots share evenly what the others do not take.

    Raises: ConfigError where they do not suffice.
    """
    known = sum(host.slots or 0 for host in hosts)
    open_hosts = [host for host in hosts if host.slots is None]
    if num_ranks is None:
        num_ranks = known + len(open_hosts)
    if known < num_ranks and not open_hosts:
        raise ConfigError(
            f"-np {num_ranks}: more ranks than the {known} slots of {format_hosts(hosts)}: ask for {known} or fewer, or give "
            "the hosts more slots")
    left = max(0, num_ranks - known)
    shares = {host: left // len(open_hosts) + (index < left % len(open_hosts)) for index, host in enumerate(open_hosts)}
    placed = [host for host in hosts for _ in range(shares[host] if host.slots is None else host.slots)]
    return placed[:num_ranks]
