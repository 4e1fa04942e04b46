"""Allocation: the hosts that a batch system gave this job: Slurm, LSF, PBS or Grid Engine. Functions of an environment."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdlite.errors import ConfigError
from hvdlite.launch.hosts import Host, _split, expand, merged


@dataclass(frozen=True)
class Allocation:
    """What a batch system gave: ``origin`` names it and the variables that say so."""

    system: str
    origin: str
    hosts: tuple[Host, ...]


def find_allocation(environ: Mapping[str, str], read: Callable[[str], str] | None = None) -> Allocation | None:
    """Find this job's allocation; None outside of any. Raises: ConfigError where what is said makes no sense."""
    read = read or _read
    for find in (_slurm, _lsf, _pbs, _grid_engine):
        found = find(environ, read)
        if found is not None:
            return found
    return None


def _slurm(environ: Mapping[str, str], read: Callable[[str], str]) -> Allocation | None:
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        return None
    names = [name for entry in _split(nodes) for name in expand(entry)]
    for variable in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE"):
        if variable in environ:
            counts = _counts(environ[variable], variable)
            break
    else:
        variable, counts = "", [1] * len(names)
    if len(counts) != len(names):
        raise ConfigError(f"Slurm: SLURM_JOB_NODELIST={nodes} has {len(names)} hosts, {variable}={environ[variable]} is "
                          f"about {len(counts)}: pass -H")
    origin = "SLURM_JOB_NODELIST" + (f", {variable}" if variable else "")
    return Allocation("Slurm", origin, tuple(Host(*one) for one in zip(names, counts, strict=True)))


def _counts(text: str, variable: str) -> list[int]:
    """``2(x3),1`` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"Slurm: {variable}={text}: {part!r} is not understood: pass -H")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _lsf(environ: Mapping[str, str], read: Callable[[str], str]) -> Allocation | None:
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if not words:
        return None
    if len(words) % 2 or not all(word.isdecimal() for word in words[1::2]):
        raise ConfigError(f"LSF: LSB_MCPU_HOSTS={environ['LSB_MCPU_HOSTS']!r} is not pairs of host and slots: pass -H")
    hosts = merged(Host(name, int(slots)) for name, slots in zip(words[::2], words[1::2], strict=True))
    return Allocation("LSF", "LSB_MCPU_HOSTS", tuple(hosts))


def _pbs(environ: Mapping[str, str], read: Callable[[str], str]) -> Allocation | None:
    file = environ.get("PBS_NODEFILE")
    if not file:
        return None
    names = [line.strip() for line in read(file).splitlines() if line.strip()]
    if not names:
        raise ConfigError(f"PBS: {file} ($PBS_NODEFILE) names no host: pass -H")
    return Allocation("PBS", "PBS_NODEFILE", tuple(merged(Host(name, 1) for name in names)))


def _grid_engine(environ: Mapping[str, str], read: Callable[[str], str]) -> Allocation | None:
    file = environ.get("PE_HOSTFILE")
    if not file:
        return None
    lines = [line.split() for line in read(file).splitlines() if line.strip()]
    if not lines or not all(len(words) >= 2 and words[1].isdecimal() for words in lines):
        raise ConfigError(f"Grid Engine: {file} ($PE_HOSTFILE) has lines that do not begin with host and slots: pass -H")
    return Allocation("Grid Engine", "PE_HOSTFILE", tuple(merged(Host(words[0], int(words[1])) for words in lines)))


def _read(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as stream:
            return stream.read()
    except OSError as reason:
        raise ConfigError(f"{file}: the batch system names it, and it cannot be read: {reason.strerror}: pass -H") from None
