"""The environment of the ranks: the caller's, byte for byte, plus what the launcher and the starter set.

Pure functions over ``dict[bytes, bytes]``: names and values need not be text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: Tells a guard on another host the job's token, and where hvdrun listens: ``TOKEN@ADDRESS:PORT,...``; no rank gets it.
CONTACT = "HVDRUN_CONTACT"

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
#: How starters recognise that they are in an allocation of Slurm, PBS, LSF, Grid Engine or Cobalt.
_BATCH_PREFIXES = (b"SLURM_", b"PBS_", b"LSB_", b"LSF_", b"LS_", b"PE_HOSTFILE", b"SGE_", b"JOB_ID", b"COBALT_")
_SETTINGS_PREFIXES = (b"PMIX_MCA_", b"PMIX_PREFIX")

#: Names of what should be told to nobody who need not know: a program's environment ends up in its logs and crash reports.
_SECRET = re.compile(
    rb"(^|_)(SECRETS?|PASSWORD|PASSWD|PASSPHRASE|TOKENS?|APIKEY|API_KEY|ACCESS_KEY|PRIVATE_KEY|AUTH_KEY|SIGNING_KEY|"
    rb"CREDENTIALS?)(_|$)", re.IGNORECASE)
#: Names that tell where a secret is kept, and hold none.
_LOCATION = re.compile(rb"(_FILE|_PATH|_DIR|_URL|_NAME)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)
_WITHHELD_PREFIXES = (b"SSH_",)
#: What describes the caller's host or terminal, and would be wrong on another.
_OF_THIS_HOST = frozenset((
    b"HOSTNAME", b"HOST", b"DISPLAY", b"XAUTHORITY", b"WAYLAND_DISPLAY", b"DBUS_SESSION_BUS_ADDRESS", b"XDG_RUNTIME_DIR",
    b"XDG_SESSION_ID", b"PWD", b"OLDPWD", b"SHLVL", b"_", b"TTY", b"WINDOWID", b"HOME", b"USER", b"LOGNAME", b"SHELL"))

#: Holds the sitecustomize that answers the guard, and the one that offers hvdlite as ``horovod`` to every Python started.
_STARTUP = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "as_horovod", "startup")
_OWN_STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")


@dataclass(frozen=True)
class Passing:
    """What of the caller's environment the ranks get. ``named``: what ``-x NAME[=VALUE]`` says; None is the caller's value.
    ``everything``: withhold no secrets (``--env-all``)."""

    named: Mapping[bytes, bytes | None] = field(default_factory=dict)
    everything: bool = False

    @classmethod
    def of(cls, words: Iterable[str], everything: bool) -> Passing:
        """Read the words of ``-x``; several names may stand in one, with commas, if none has a value.

        Raises: ValueError for one without a name.
        """
        named: dict[bytes, bytes | None] = {}
        for word in words:
            name, equals, value = word.partition("=")
            for one in [name] if equals else name.split(","):
                if not one:
                    raise ValueError(f"-x {word!r} has no name: write -x NAME or -x NAME=VALUE")
                named[os.fsencode(one)] = os.fsencode(value) if equals else None
        return cls(named, everything)

    def apply(self, caller: Mapping[bytes, bytes]) -> tuple[dict[bytes, bytes], list[str]]:
        """The environment that is passed, and the names of the secrets that are not."""
        passed, withheld = {}, []
        for name, value in caller.items():
            if not self.everything and name not in self.named:
                if is_secret(name):
                    withheld.append(os.fsdecode(name))
                    continue
                if name.startswith(_WITHHELD_PREFIXES):
                    continue
            passed[name] = value
        passed.update((name, value) for name, value in self.named.items() if value is not None)
        return passed, sorted(withheld)

    def missing(self, caller: Mapping[bytes, bytes]) -> list[str]:
        """Names that were asked for and that the caller does not have."""
        return sorted(os.fsdecode(name) for name, value in self.named.items() if value is None and name not in caller)


def is_secret(name: bytes) -> bool:
    """Whether a variable of this name is one that is passed only when named."""
    return _SECRET.search(name) is not None and _LOCATION.search(name) is None


def for_another_host(environment: Mapping[bytes, bytes], named: Iterable[bytes] = ()) -> dict[bytes, bytes]:
    """Less what describes this host, unless it was named."""
    return {name: value for name, value in environment.items() if name not in _OF_THIS_HOST or name in set(named)}


def of_this_host(environment: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """What describes this host: its programs get it, those of other hosts do not."""
    return {name: value for name, value in environment.items() if name in _OF_THIS_HOST}


def with_startup(environment: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """With the directory whose sitecustomize the first Python of each rank runs, and which it takes out again."""
    path = [os.fsencode(_OWN_STARTUP), *filter(None, [environment.get(b"PYTHONPATH")])]
    return {**environment, b"PYTHONPATH": os.pathsep.encode().join(path)}


def for_this_host_only(environment: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """For a starter that is to start processes here: less what would have it ask a batch system to do so elsewhere."""
    return {name: value for name, value in environment.items() if not name.startswith(_BATCH_PREFIXES)}


def without_outer_job(caller: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The caller's environment less the traces of an MPI job that the caller itself is a rank of."""
    return {name: value for name, value in caller.items() if not _tells_outer_job(name)}


def job_environment(caller: Mapping[bytes, bytes], settings: Mapping[str, str], job_id: str) -> dict[bytes, bytes]:
    """What hvdrun sends to the guards: the caller's environment, the flags' variables, and the job's identity."""
    environment = dict(caller)
    # Lines of a program that dies are lost in its buffer otherwise; a caller who set it, even to nothing, chose.
    environment.setdefault(b"PYTHONUNBUFFERED", b"1")
    environment.setdefault(b"PYTHONFAULTHANDLER", b"1")  # a crash in native code shows the line of Python that led there
    environment.update((name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in settings.items())
    environment[b"HVDLITE_LAUNCHED_BY"] = b"hvdrun"
    environment[b"HVDLITE_JOB"] = job_id.encode()
    return with_startup(environment)


def with_horovod_alias(caller: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The caller's environment, in which every Python finds hvdlite as ``horovod``."""
    path = [os.fsencode(_STARTUP), *filter(None, [caller.get(b"PYTHONPATH")])]
    return {**caller, b"HVDLITE_AS_HOROVOD": b"1", b"PYTHONPATH": os.pathsep.encode().join(path)}


def rank_environment(job: Mapping[bytes, bytes], guard: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """What the rank gets: ``job`` as sent, except that the starter's own variables are those the guard was given."""
    environment = {name: guard[name] for name in _OF_THIS_HOST if name in guard}
    environment.update(job)
    environment.update((name, value) for name, value in guard.items() if name.startswith(_STARTER_PREFIXES))
    return environment


def _tells_outer_job(name: bytes) -> bool:
    if name.startswith(_SETTINGS_PREFIXES):
        return False
    return name in _OUTER_NAMES or name.startswith(_OUTER_PREFIXES)
