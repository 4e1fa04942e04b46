"""What this installation can do: versions, the MPI and its starter, arrays, GPUs. Nothing is imported here but metadata."""

from __future__ import annotations

import shutil
import sys
from importlib import metadata
from importlib.util import find_spec

from hvdlite._version import __version__
from hvdlite.errors import UnavailableError
from hvdlite.launch.mpi import find_mpi, find_starter

_ARRAYS = ("numpy", "torch", "cupy")


def describe_build() -> str:
    """A page for people; a missing part says how to get it."""
    lines = [f"hvdlite {__version__}, Python {sys.version.split()[0]} ({sys.executable})", "", "arrays"]
    lines += [_row(name, _version(name)) for name in _ARRAYS]
    lines += ["", "control plane and host buffers"]
    try:
        mpi = find_mpi()
        lines.append(_row("MPI", f"{mpi}, mpi4py {_version('mpi4py')}"))
        starter = find_starter(mpi)
        version = ".".join(map(str, starter.version))
        lines.append(_row("starter", f"{starter.kind.value} {version} ({starter.path})"))
    except UnavailableError as reason:
        lines.append(_row("MPI", "", str(reason)))
    lines += ["", "GPU buffers", _row("NCCL through CuPy", _version("cupy"), "pip install 'hvdlite[gpu]'"),
              "", "launching", _row("ssh (other hosts)", shutil.which("ssh") or "", "install an ssh client")]
    lines += [_row(f"{name} (this batch system)", shutil.which(program) or "", f"no {program} on PATH")
              for name, program in (("Slurm", "srun"), ("LSF", "jsrun"), ("PBS", "pbsdsh"), ("Grid Engine", "qrsh"))]
    return "\n".join(lines)


def _row(name: str, what: str, otherwise: str = "not installed") -> str:
    return f"    [{'X' if what else ' '}] {name}: {what or otherwise}"


def _version(package: str) -> str:
    if find_spec(package) is None:
        return ""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(version unknown)"
