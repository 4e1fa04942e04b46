"""Planned: a job as it would be started, from settings: where each rank goes, by what command, with which environment.

:func:`plan_job` asks nobody and starts nothing but the probe of this Python's MPI; :meth:`Planned.run` does the rest.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hvdlite.errors import ConfigError, UnavailableError, format_ranks
from hvdlite.launch import remote
from hvdlite.launch.allocation import Allocation, find_allocation
from hvdlite.launch.binding import gpu_of, num_threads, share
from hvdlite.launch.channel import listen_tcp
from hvdlite.launch.command import (
    REMOTE_SHELL,
    StartCommand,
    StartRequest,
    build_command,
    oversubscription_warning,
    starter_hosts,
)
from hvdlite.launch.environment import (
    CONTACT,
    Passing,
    for_another_host,
    for_this_host_only,
    is_secret,
    job_environment,
    of_this_host,
    with_horovod_alias,
    without_outer_job,
)
from hvdlite.launch.hosts import Host, format_hosts, parse_hostfile, parse_hosts, place
from hvdlite.launch.job import Job, OutputOptions
from hvdlite.launch.mpi import Mpi, Starter, StarterKind, find_mpi, find_starter, use_starter
from hvdlite.launch.network import SshOptions, address_towards, is_this_host, resolve
from hvdlite.launch.options import Settings
from hvdlite.launch.outcome import Outcome
from hvdlite.launch.supervisor import private_directory, run_job

#: Until every rank has started, unless --start-timeout says otherwise. Sourced: horovodrun's 30 s; on one host nothing but a
#: slow file system is in the way.
START_TIMEOUT_S, LOCAL_START_TIMEOUT_S = 30.0, 120.0


@dataclass(frozen=True)
class Planned:
    """A job that can be started, any number of times."""

    job: Job
    request: StartRequest
    mpi: Mpi
    settings: Settings
    origin: str
    warnings: tuple[str, ...]
    caller: dict[bytes, bytes]
    withheld: tuple[str, ...]

    def run(self, attempt: int, verbose: bool) -> Outcome:
        """Start it and supervise it to its end. Raises: UnavailableError for hosts that are not known."""
        environment = {**self.job.environment, b"HVDLITE_JOB": os.urandom(8).hex().encode()}
        if attempt:
            environment[b"HVDLITE_RESTART"] = str(attempt).encode()
        output = self.job.output
        if attempt and output.directory:
            output = replace(output, directory=os.path.join(output.directory, f"restart.{attempt}"))
        job = replace(self.job, environment=environment, output=output)
        with private_directory() as directory:
            request = replace(self.request, directory=directory)
            own: dict[str, str] = {}
            listener, token = None, os.urandom(16).hex()
            if request.is_remote:
                address, bound = self._own_address()
                listener = listen_tcp(bound, backlog=min(job.num_ranks + 8, 4096))
                shown = f"[{address}]" if ":" in address else address
                own = {CONTACT: f"{token}@{shown}:{listener.getsockname()[1]}"}
                request = replace(request, local_address=address)
            command = build_command(request, self._starter_environment(environment), own)
            self._write_files(directory, request, command)
            if verbose:
                print(f"hvdrun: {shlex.join(command.argv)}", file=sys.stderr, flush=True)
            try:
                return run_job(job, command, directory, token=token, tcp=listener, environ=dict(os.environ))
            finally:
                if listener is not None:
                    listener.close()

    def _starter_environment(self, environment: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """What the starter gets: the job's, what ssh needs to show who the user is, and what is true of this host only."""
        if not self.request.is_remote:
            environment = for_this_host_only(environment)
        return {**of_this_host(os.environb), **environment,
                **{name: value for name, value in self.caller.items() if name.startswith(b"SSH_")}}

    def _own_address(self) -> tuple[str, str]:
        """The address that other hosts are told, and the one to listen at: the same where all are in one network."""
        others = [host for host in dict.fromkeys(self.request.placement) if not is_this_host(host.name)]
        found = resolve(others, self._ssh(), lambda text: None)
        own = list(dict.fromkeys(filter(None, map(address_towards, filter(None, found.values())))))
        if not own:
            raise UnavailableError(
                f"network: this host has no address towards {format_hosts(others)}: check its routes: ip route")
        if len(own) == 1:
            return own[0], own[0]
        return own[0], "::" if any(":" in one for one in own) else "0.0.0.0"

    def _ssh(self) -> SshOptions:
        return SshOptions(
            self.settings.ssh_port, self.settings.ssh_identity_file, self.settings.ssh_args, self.job.start_timeout_s)

    def _write_files(self, directory: str, request: StartRequest, command: StartCommand) -> None:
        if not request.is_remote:
            return
        for name, text in command.files.items():
            _write(os.path.join(directory, name), text)
        hosts = {name: {"target": host.target, "name": host.name, "argv": self._ssh().argv()}
                 for name, host, _ in starter_hosts(request)}
        _write(os.path.join(directory, remote.HOSTS), json.dumps(hosts))
        words = [sys.executable, "-I", "-S", os.path.abspath(remote.__file__), directory]
        _write(os.path.join(directory, REMOTE_SHELL), f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', 0o700)

    # -- telling -----------------------------------------------------------------------------------------------

    def placement(self) -> list[dict[str, Any]]:
        """Each rank with its host and what it would get there; what only its host knows is absent."""
        rows = []
        cpus = sorted(os.sched_getaffinity(0))
        for rank in range(self.job.num_ranks):
            local_rank, local_size = self.job.local_rank(rank), self.job.local_size(rank)
            row: dict[str, Any] = {"rank": rank, "host": self.job.host(rank) or "localhost", "local_rank": local_rank,
                                   "local_size": local_size}
            if not self.job.is_remote or is_this_host(self.job.host(rank)):
                row["cpus"] = list(share(cpus, local_size, local_rank) if self.job.binds else ()) or cpus
                if self.job.sets_threads:
                    row["omp_num_threads"] = num_threads(len(cpus), local_size)
            if self.job.gpus:
                row["gpu"] = gpu_of(self.job.gpus, local_rank)
            rows.append(row)
        return rows

    def facts(self) -> dict[str, Any]:
        """All of it, as plain data; values of secrets are masked."""
        command = build_command(replace(
            self.request, directory="/tmp/hvdrun-XXXXXXXX", local_address="ADDRESS" * self.request.is_remote))
        return {
            "num_ranks": self.job.num_ranks, "origin": self.origin, "mpi": str(self.mpi),
            "command": [os.fsdecode(word) for word in self.job.argv], "directory": os.fsdecode(self.job.directory),
            "starter": list(command.argv), "placement": self.placement(), "warnings": list(self.warnings),
            "environment": {os.fsdecode(name): "***" if is_secret(name) else os.fsdecode(value)
                            for name, value in sorted(self.job.environment.items())},
            "withheld": list(self.withheld)}

    def json(self) -> str:
        """:meth:`facts` as JSON."""
        return json.dumps(self.facts(), indent=2)

    def describe(self) -> str:
        """The same for people."""
        facts = self.facts()
        lines = [f"{self.job.num_ranks} ranks ({self.origin}), {facts['mpi']}", f"command: {shlex.join(facts['command'])}",
                 f"starter: {shlex.join(facts['starter'])}"]
        for row in facts["placement"]:
            cpus = f", processors {format_ranks(row['cpus']).split(' ', 1)[1]}" if "cpus" in row else ""
            threads = f", OMP_NUM_THREADS={row['omp_num_threads']}" if "omp_num_threads" in row else ""
            gpu = f", GPU {row['gpu']}" if "gpu" in row else ""
            lines.append(f"rank {row['rank']}: {row['host']}, local rank {row['local_rank']} of {row['local_size']}"
                         f"{cpus}{threads}{gpu}")
        lines += [f"warning: {one}" for one in self.warnings]
        return "\n".join([*lines, "nothing was started"])


def plan_job(settings: Settings, command: list[str]) -> Planned:
    """Decide everything that can be decided without asking other hosts. Raises: ConfigError, UnavailableError."""
    hosts, allocation, origin = find_hosts(settings, dict(os.environ))
    if not hosts and settings.np is None:
        raise ConfigError("the number of ranks is missing: say how many to start, for example -np 2")
    if command and settings.hosts and _is_host(command[0]):
        raise ConfigError(
            f"-H {settings.hosts} {command[0]}: hosts are separated by commas: write -H {settings.hosts},{command[0]}")
    placement = tuple(place(hosts, settings.np)) if hosts else ()
    num_ranks = len(placement) if hosts else settings.np
    is_remote = any(not is_this_host(host.name) for host in set(placement))
    mpi = find_mpi()
    starter = use_starter(settings.starter, mpi) if settings.starter else find_starter(mpi)
    caller, passing, withheld = _environment(settings)
    if is_remote:
        caller = for_another_host(caller, passing.named)
    environment = job_environment(
        {**caller, **_network_variables(settings, starter)}, settings.variables, "0000000000000000")
    gpus = settings.gpus
    job = Job(
        num_ranks=num_ranks, argv=tuple(os.fsencode(word) for word in command), environment=environment, directory=os.getcwdb(),
        unwind_s=settings.unwind, grace_s=settings.grace,
        hosts=tuple(host.name for host in placement), is_remote=is_remote,
        binds=settings.bind == "auto" and not settings.binding_args, sets_threads=b"OMP_NUM_THREADS" not in environment,
        gpus=() if gpus in ("auto", "none", "") else tuple(word.strip() for word in gpus.split(",")), finds_gpus=gpus == "auto",
        stdin_rank=settings.stdin, hang_timeout_s=settings.hang_timeout, output=_output(settings),
        start_timeout_s=settings.start_timeout or (START_TIMEOUT_S if is_remote else LOCAL_START_TIMEOUT_S))
    if job.stdin_rank >= num_ranks:
        raise ConfigError(f"--stdin {job.stdin_rank}: there are ranks 0 to {num_ranks - 1} only")
    request = StartRequest(
        starter=starter, num_ranks=num_ranks, num_cpus=len(os.sched_getaffinity(0)), is_root=os.geteuid() == 0, directory="",
        mpi_args=(*_interface_options(settings, starter), *shlex.split(settings.mpi_args), *shlex.split(settings.binding_args)),
        placement=placement, is_remote=is_remote, allocation=allocation.system if allocation else "")
    warnings = [*_withheld_warning(withheld), *filter(None, [oversubscription_warning(request)])]
    warnings += [f"-x {name}: there is no such variable" for name in passing.missing(os.environb)]
    return Planned(job, request, mpi, settings, origin, tuple(warnings), dict(os.environb), tuple(withheld))


def find_hosts(settings: Settings, environ: dict[str, str]) -> tuple[list[Host], Allocation | None, str]:
    """The hosts that were asked for, else those of the batch system; and who said so. Raises: ConfigError."""
    if settings.hosts and settings.hostfile:
        raise ConfigError(f"-H {settings.hosts} and --hostfile {settings.hostfile}: say where to run once: leave one of them out")
    if settings.hosts:
        return parse_hosts(settings.hosts), None, f"-H: {settings.origin('hosts')}"
    if settings.hostfile:
        try:
            with open(settings.hostfile, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as reason:
            raise ConfigError(f"{settings.hostfile}: cannot be read: {getattr(reason, 'strerror', reason)}: "
                              "pass an existing file to --hostfile") from None
        return parse_hostfile(text, settings.hostfile), None, settings.hostfile
    allocation = find_allocation(environ)
    if allocation is None:
        return [], None, f"-np: {settings.origin('np')}"
    return list(allocation.hosts), allocation, f"{allocation.system}: {allocation.origin}"


def explain_environment(settings: Settings) -> str:
    """Each variable of the caller, and whether the ranks get it."""
    caller, passing, withheld = _environment(settings)
    lines = []
    for name in sorted({*os.environb, *caller}):
        if os.fsdecode(name) in withheld:
            how = "withheld: its name is that of a secret; -x passes it, or --env-all"
        elif name not in caller:
            how = "withheld: it tells ssh or another job about this process"
        elif name in passing.named:
            how = "passed: -x"
        else:
            how = "passed"
        lines.append(f"{os.fsdecode(name)}  ({how})")
    return "\n".join(lines)


def _environment(settings: Settings) -> tuple[dict[bytes, bytes], Passing, list[str]]:
    try:
        passing = Passing.of(settings.env, settings.env_all)
    except ValueError as reason:
        raise ConfigError(str(reason)) from None
    caller, withheld = passing.apply(without_outer_job(os.environb))
    return (with_horovod_alias(caller) if settings.as_horovod else caller), passing, withheld


def _withheld_warning(withheld: Iterable[str]) -> list[str]:
    names = ", ".join(withheld)
    return [f"the ranks do not get {names}: the name is that of a secret: -x NAME passes one, --env-all all"] if names else []


def _output(settings: Settings) -> OutputOptions:
    prefix = settings.prefix
    if prefix is None and settings.prefix_timestamp:
        prefix = "[{rank}] {time} "
    return OutputOptions(prefix, settings.fold, settings.color, settings.output_dir, settings.raw)


def _network_variables(settings: Settings, starter: Starter) -> dict[bytes, bytes]:
    """What makes MPI and NCCL use the interfaces that were named, or TCP only."""
    variables: dict[str, str] = {}
    if settings.network_interfaces:
        variables["NCCL_SOCKET_IFNAME"] = settings.network_interfaces
        if starter.kind is StarterKind.HYDRA:
            variables["UCX_NET_DEVICES"] = settings.network_interfaces
        else:
            variables["OMPI_MCA_btl_tcp_if_include"] = settings.network_interfaces
    if settings.tcp:
        variables["NCCL_IB_DISABLE"] = "1"
        variables.update({"UCX_TLS": "tcp,sm,self"} if starter.kind is StarterKind.HYDRA else
                         {"OMPI_MCA_btl": "tcp,sm,self", "OMPI_MCA_pml": "ob1"})
    return {name.encode(): os.fsencode(value) for name, value in variables.items()}


def _interface_options(settings: Settings, starter: Starter) -> list[str]:
    if not settings.network_interfaces:
        return []
    first = settings.network_interfaces.split(",")[0]
    return ["-iface", first] if starter.kind is StarterKind.HYDRA else []


def _is_host(word: str) -> bool:
    try:
        return parse_hosts(word)[0].slots is not None
    except ConfigError:
        return False


def _write(path: str, text: str, mode: int = 0o600) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
