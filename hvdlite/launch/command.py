"""StartCommand: the command line that makes a starter start one guard per rank. Pure: values in, values out.

What the user runs is no part of it. Starters give meanings of their own to words of a command (a lone ``:``
separates programs) and to names of variables; the guards get the job as data instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdlite.launch import guard
from hvdlite.launch.environment import CONTACT
from hvdlite.launch.hosts import Host
from hvdlite.launch.mpi import Starter, StarterKind

#: Files in the private directory: the hosts as the starter reads them, and the program it takes for ssh.
HOSTFILE = "hosts"
REMOTE_SHELL = "ssh"


@dataclass(frozen=True)
class StartRequest:
    """Everything the command line depends on. ``directory``: where the guards find hvdrun's socket. ``mpi_args``: the
    user's own options for the starter, which come last. ``placement``: the host of each rank; empty: all on this one.
    ``is_remote``: some are not this one. ``allocation``: the batch system whose means start processes on hosts."""

    starter: Starter
    num_ranks: int
    num_cpus: int
    is_root: bool
    directory: str
    python: str = sys.executable
    mpi_args: tuple[str, ...] = ()
    placement: tuple[Host, ...] = ()
    is_remote: bool = False
    local_address: str = ""
    allocation: str = ""

    @property
    def oversubscribed(self) -> bool:
        """Whether ranks share processors."""
        return not self.is_remote and self.num_ranks > self.num_cpus


@dataclass(frozen=True)
class StartCommand:
    """``environment``: defaults for the starter, which a variable of the caller's (``caller``) overrides.
    ``own_environment``: what overrides both."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    caller: Mapping[bytes, bytes] = field(default_factory=dict)
    own_environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


def build_command(request: StartRequest, caller: Mapping[bytes, bytes] | None = None,
                  own: Mapping[str, str] | None = None) -> StartCommand:
    """Build the command for any starter."""
    argv = [request.starter.path, *_starter_options(request), *request.mpi_args, *_guard_argv(request)]
    return StartCommand(tuple(argv), _starter_environment(request), dict(caller or {}), dict(own or {}), _files(request))


def oversubscription_warning(request: StartRequest) -> str:
    """One line for people, or nothing."""
    if not request.oversubscribed:
        return ""
    return (
        f"{request.num_ranks} ranks on {request.num_cpus} allowed processor{'s' * (request.num_cpus != 1)}: "
        "they share them and wait for each other: expect it to be slow")


def starter_hosts(request: StartRequest) -> list[tuple[str, Host, int]]:
    """The hosts in the order of their ranks: (the name the starter uses, the host, its number of ranks).

    A name of ours stands for what a starter cannot read: a user's name, an IPv6 address.
    """
    counts: dict[Host, int] = {}
    for host in request.placement:
        counts[host] = counts.get(host, 0) + 1
    return [(f"hvdrun-host-{index}" if host.user or ":" in host.name else host.name, host, count)
            for index, (host, count) in enumerate(counts.items())]


def _starter_options(request: StartRequest) -> list[str]:
    count = ["-n", str(request.num_ranks)]
    hostfile = os.path.join(request.directory, HOSTFILE)
    shell = os.path.join(request.directory, REMOTE_SHELL)
    if request.starter.kind is StarterKind.HYDRA:
        if not request.is_remote:
            return count  # Hydra does not bind, does not count processors, and does not mind root
        launcher = [] if request.allocation else ["-launcher", "ssh", "-launcher-exec", shell]
        local = ["-localhost", request.local_address] if request.local_address else []
        # MPICH finds its own addresses: the names of the hosts may be ours.
        return ["-f", hostfile, *launcher, *local, "-disable-hostname-propagation", "-genvlist", CONTACT, *count]
    root = ["--allow-run-as-root"] if request.is_root else []
    remote: list[str] = []
    if request.is_remote:
        agent = [] if request.allocation else (
            ["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", shell]
            if request.starter.kind is StarterKind.PRRTE else ["--mca", "plm_rsh_agent", shell])
        remote = ["--hostfile", hostfile, *agent, "-x", CONTACT]
    # Always allowed to oversubscribe, because both count cores and not the processors this process may use:
    # as many ranks as hardware threads would be refused. hvdrun itself warns where ranks share a processor.
    if request.starter.kind is StarterKind.PRRTE:
        return [*root, *remote, "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", *count]
    return [*root, *remote, "--oversubscribe", "--bind-to", "none", *count]


def _files(request: StartRequest) -> dict[str, str]:
    if not request.is_remote:
        return {}
    separator = ":" if request.starter.kind is StarterKind.HYDRA else " slots="
    return {HOSTFILE: "".join(f"{name}{separator}{count}\n" for name, _, count in starter_hosts(request))}


def _starter_environment(request: StartRequest) -> dict[str, str]:
    # MPICH yields the processor in its waiting loops of itself (MPIR_CVAR_POLLS_BEFORE_YIELD).
    if request.oversubscribed and request.starter.kind is not StarterKind.HYDRA:
        return {"OMPI_MCA_mpi_yield_when_idle": "1"}
    return {}


def _guard_argv(request: StartRequest) -> list[str]:
    return [request.python, "-I", "-S", os.path.abspath(guard.__file__), "-" if request.is_remote else request.directory]
