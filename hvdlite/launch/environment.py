"""The environment of the ranks: the caller's, byte for byte, plus what the launcher and the starter set.

Pure functions over ``dict[bytes, bytes]``: names and values need not be text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

#: What a starter tells its children. Whatever the guard was given under these names wins over the caller's.
_STARTER_PREFIXES = (
    b"PMI_", b"PMI2_", b"PMIX_", b"HYDI_", b"HYDRA_", b"MPI_LOCAL", b"MPIR_", b"MPIEXEC_", b"I_MPI_",
    b"OMPI_", b"OPAL_", b"PRTE_", b"GFORTRAN_UNBUFFERED_PRECONNECTED")

#: What an *outer* starter told this process about its place in the outer job. With these in its environment
#: a starter takes itself for a rank of that job. Settings that people make (``*_MCA_*``, ``*_PREFIX``,
#: ``OMPI_ALLOW_RUN_AS_ROOT``) are not among them.
_OUTER_PREFIXES = (b"PMI_", b"PMI2_", b"PMIX_", b"HYDI_", b"OMPI_COMM_WORLD_", b"OMPI_WORLD_", b"HVDLITE_JOB")
_OUTER_NAMES = frozenset((
    b"MPI_LOCALNRANKS", b"MPI_LOCALRANKID", b"OMPI_APP_CTX_NUM_PROCS", b"OMPI_ARGV", b"OMPI_COMMAND",
    b"OMPI_FILE_LOCATION", b"OMPI_FIRST_RANKS", b"OMPI_MCA_initial_wdir", b"OMPI_MCA_num_procs",
    b"OMPI_NUM_APP_CTX", b"OMPI_TOOL_NAME", b"OMPI_UNIVERSE_SIZE", b"OMPI_VERSION", b"OPAL_USER_PARAMS_GIVEN",
    b"PRTE_LAUNCHED", b"PRTE_SHARED_FS"))
_SETTINGS_PREFIXES = (b"PMIX_MCA_", b"PMIX_PREFIX")

#: Holds the sitecustomize that offers hvdlite as ``horovod`` to every Python started.
_STARTUP = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "as_horovod", "startup")


def without_outer_job(caller: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The caller's environment less the traces of an MPI job that the caller itself is a rank of."""
    return {name: value for name, value in caller.items() if not _tells_outer_job(name)}


def job_environment(caller: Mapping[bytes, bytes], settings: Mapping[str, str], job_id: str) -> dict[bytes, bytes]:
    """What hvdrun sends to the guards: the caller's environment, the flags' variables, and the job's identity."""
    environment = dict(caller)
    # Lines of a program that dies are lost in its buffer otherwise; a caller who set it, even to nothing, chose.
    environment.setdefault(b"PYTHONUNBUFFERED", b"1")
    environment.update((name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in settings.items())
    environment[b"HVDLITE_LAUNCHER"] = b"hvdrun"
    environment[b"HVDLITE_JOB"] = job_id.encode()
    return environment


def with_horovod_alias(caller: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The caller's environment, in which every Python finds hvdlite as ``horovod``."""
    path = [os.fsencode(_STARTUP), *filter(None, [caller.get(b"PYTHONPATH")])]
    return {**caller, b"HVDLITE_AS_HOROVOD": b"1", b"PYTHONPATH": os.pathsep.encode().join(path)}


def rank_environment(job: Mapping[bytes, bytes], guard: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """What the rank gets: ``job`` as sent, except that the starter's own variables are those the guard was given."""
    environment = dict(job)
    environment.update((name, value) for name, value in guard.items() if name.startswith(_STARTER_PREFIXES))
    return environment


def _tells_outer_job(name: bytes) -> bool:
    if name.startswith(_SETTINGS_PREFIXES):
        return False
    return name in _OUTER_NAMES or name.startswith(_OUTER_PREFIXES)
