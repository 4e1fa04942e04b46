"""StartCommand: the command line that makes a starter start one guard per rank. Pure: values in, values out.

What the user runs is no part of it. Starters give meanings of their own to words of a command (a lone ``:``
separates programs) and to names of variables; the guards get the job as data instead.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from hvdlite.launch import guard
from hvdlite.launch.mpi import Starter, StarterKind


@dataclass(frozen=True)
class StartRequest:
    """Everything the command line depends on. ``directory``: where the guards find hvdrun's socket. ``mpi_args``: the
    user's own options for the starter, which come last."""

    starter: Starter
    num_ranks: int
    num_cpus: int
    is_root: bool
    directory: str
    python: str = sys.executable
    mpi_args: tuple[str, ...] = ()

    @property
    def oversubscribed(self) -> bool:
        """Whether ranks share processors."""
        return self.num_ranks > self.num_cpus


@dataclass(frozen=True)
class StartCommand:
    """``environment``: defaults for the starter, which a variable of the caller's overrides."""

    argv: tuple[str, ...]
    environment: dict[str, str]


def build_command(request: StartRequest) -> StartCommand:
    """Build the command for any starter."""
    argv = [request.starter.path, *_starter_options(request), *request.mpi_args, *_guard_argv(request)]
    return StartCommand(tuple(argv), _starter_environment(request))


def oversubscription_warning(request: StartRequest) -> str:
    """One line for people, or nothing."""
    if not request.oversubscribed:
        return ""
    return (
        f"{request.num_ranks} ranks on {request.num_cpus} allowed processor{'s' * (request.num_cpus != 1)}: "
        "they share them and wait for each other: expect it to be slow")


def _starter_options(request: StartRequest) -> list[str]:
    count = ["-n", str(request.num_ranks)]
    if request.starter.kind is StarterKind.HYDRA:
        return count  # Hydra does not bind, does not count processors, and does not mind root
    root = ["--allow-run-as-root"] if request.is_root else []
    # Always allowed to oversubscribe, because both count cores and not the processors this process may use:
    # as many ranks as hardware threads would be refused. hvdrun itself warns where ranks share a processor.
    if request.starter.kind is StarterKind.PRRTE:
        return [*root, "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", *count]
    return [*root, "--oversubscribe", "--bind-to", "none", *count]


def _starter_environment(request: StartRequest) -> dict[str, str]:
    # MPICH yields the processor in its waiting loops of itself (MPIR_CVAR_POLLS_BEFORE_YIELD).
    if request.oversubscribed and request.starter.kind is not StarterKind.HYDRA:
        return {"OMPI_MCA_mpi_yield_when_idle": "1"}
    return {}


def _guard_argv(request: StartRequest) -> list[str]:
    # -I -S: no site and no PYTHON* variable, which are the rank's; measured 8 ms faster as well.
    return [request.python, "-I", "-S", os.path.abspath(guard.__file__), request.directory]
