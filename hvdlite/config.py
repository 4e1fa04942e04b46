"""Every setting of hvdlite: one frozen dataclass, and the only module that reads the environment.

Each field carries its ``HVDLITE_*`` variable, the ``HOROVOD_*`` variable it also honours, its launcher
flag and its help. The launcher's flags (:func:`add_arguments`, :func:`environment_from_arguments`) and the
README's table (:func:`markdown_table`) are generated from the same fields. The environment is read at
``init()``, never at import. Standard library only: the launcher imports this module.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from hvdlite.errors import ConfigError

_MEBIBYTE = 1 << 20
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


def _steps(text: str) -> str:
    first, colon, end = text.partition(":")
    if text and not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ValueError("is not FIRST:END with FIRST < END, as 100:110")
    return text


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("is neither of 1/true/yes/on and 0/false/no/off")


def _at_least(parse: Callable[[str], Any], low: float) -> Callable[[str], Any]:
    def checked(text: str) -> Any:
        try:
            value = parse(text)
        except ValueError:
            raise ValueError("is not a number" if parse is float else "is not a whole number") from None
        if not value >= low:
            raise ValueError(f"must be >= {low:g}")
        return value

    return checked


def _choice(*allowed: str) -> Callable[[str], str]:
    def checked(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"is none of {', '.join(allowed)}")
        return text.lower()

    return checked


def _setting(
    default: Any,
    parse: Callable[[str], Any],
    *,
    env: str,
    horovod: str | None = None,
    flag: str | None,
    help: str,
    flag_scale: float = 1,
) -> Any:
    """Declare one field.

    ``env`` and ``horovod`` omit their prefixes. ``flag_scale`` is how many of the variable's units make one
    of the flag's. ``parse`` turns text into the value or raises ValueError with a predicate ("must be ...").
    """
    metadata = dict(parse=parse, env=env, horovod=horovod, flag=flag, help=help, flag_scale=flag_scale)
    return field(default=default, metadata=metadata)


_count = _at_least(int, 0)
_positive = _at_least(int, 1)
_duration = _at_least(float, 0)


@dataclass(frozen=True)
class Config:
    """All settings, in the units their names say."""

    fusion_threshold_bytes: int = _setting(
        4 * _MEBIBYTE, _count, env="FUSION_THRESHOLD", horovod="FUSION_THRESHOLD", flag="--fusion-threshold-mb",
        flag_scale=_MEBIBYTE,
        help="largest bucket that tensors are packed into; 0 packs nothing. A bucket that fits in cache is fastest")
    cycle_time_ms: float = _setting(
        0.0, _duration, env="CYCLE_TIME", horovod="CYCLE_TIME", flag="--cycle-time-ms",
        help="how long free-standing calls below the threshold wait for more to fuse with; nothing else waits for it")
    cache_capacity: int = _setting(
        1024, _count, env="CACHE_CAPACITY", horovod="CACHE_CAPACITY", flag="--cache-capacity",
        help="how many agreed requests are remembered, so that repeating them needs no new agreement")
    heartbeat_ms: float = _setting(
        50.0, _at_least(float, 1), env="HEARTBEAT_MS", flag="--heartbeat-ms",
        help="how often a rank with nothing to do still answers its peers; up to four times as long after seconds of idleness")
    timeline_filename: str = _setting(
        "", str, env="TIMELINE", horovod="TIMELINE", flag="--timeline-filename",
        help="rank 0 appends its timeline to this Chrome JSON file while the job runs; DYNAMIC waits for start_timeline()")
    timeline_mark_cycles: bool = _setting(
        False, _flag, env="TIMELINE_MARK_CYCLES", horovod="TIMELINE_MARK_CYCLES", flag="--timeline-mark-cycles",
        help="mark every cycle in the timeline")
    timeline_dir: str = _setting(
        "", str, env="TIMELINE_DIR", flag="--timeline",
        help="every rank records into ring files in this directory, after what an earlier job left there has moved "
             "to earlier/ in it; merged.json is written at shutdown")
    timeline_ring_bytes: int = _setting(
        16 * _MEBIBYTE, _at_least(int, 4096), env="TIMELINE_RING", flag="--timeline-ring-mb", flag_scale=_MEBIBYTE,
        help="size of one ring file; when it is full the oldest records are overwritten")
    timeline_steps: str = _setting(
        "", _steps, env="TIMELINE_STEPS", flag="--timeline-steps",
        help="record these training steps only, as 100:110 (110 not included), counted from 0")
    stall_check_disable: bool = _setting(
        False, _flag, env="STALL_CHECK_DISABLE", horovod="STALL_CHECK_DISABLE", flag="--no-stall-check",
        help="do not report tensors that wait for some ranks")
    stall_warning_s: float = _setting(
        60.0, _duration, env="STALL_CHECK_TIME_SECONDS", horovod="STALL_CHECK_TIME_SECONDS",
        flag="--stall-check-warning-time-seconds",
        help="report a tensor, and the ranks it waits for, after this long")
    stall_shutdown_s: float = _setting(
        0.0, _duration, env="STALL_SHUTDOWN_TIME_SECONDS", horovod="STALL_SHUTDOWN_TIME_SECONDS",
        flag="--stall-check-shutdown-time-seconds",
        help="end the job when a tensor has waited this long; 0 never does")
    log_level: str = _setting(
        "warning", _choice("trace", "debug", "info", "warning", "error", "fatal"), env="LOG_LEVEL",
        horovod="LOG_LEVEL", flag="--log-level", help="least severe message to log: trace ... fatal")
    log_hide_time: bool = _setting(
        False, _flag, env="LOG_HIDE_TIME", horovod="LOG_HIDE_TIME", flag="--log-without-timestamp",
        help="log without the time of day")
    gpu_plane: str = _setting(
        "auto", _choice("auto", "nccl", "mpi"), env="GPU_PLANE", flag="--gpu-plane",
        help="how GPU tensors travel: nccl, or mpi through host memory; auto: nccl where every rank has it and a GPU of its own. "
             "NCCL joins hosts by itself; in auto, where it cannot, see hierarchical_allreduce")
    hierarchical_allreduce: bool = _setting(
        False, _flag, env="HIERARCHICAL_ALLREDUCE", horovod="HIERARCHICAL_ALLREDUCE", flag="--hierarchical-allreduce",
        help="dense allreduces of GPU tensors go over NCCL within hosts and MPI between them, if all hosts hold equally many "
             "ranks, more than one. Off: only where NCCL cannot join hosts (its versions differ, it does not connect)")
    hierarchical_quantized: str = _setting(
        "auto", _choice("auto", "on", "off"), env="HIERARCHICAL_QUANTIZED", flag=None,
        help="whether quantised exchanges sum densely within hosts of several ranks first; auto: if that is measured to pay")
    autotune: bool = _setting(
        False, _flag, env="AUTOTUNE", horovod="AUTOTUNE", flag="--autotune",
        help="try bucket sizes on the first training steps and stay with the fastest; an explicit threshold is obeyed instead")
    autotune_log: str = _setting(
        "", str, env="AUTOTUNE_LOG", horovod="AUTOTUNE_LOG", flag="--autotune-log-file",
        help="rank 0 appends to this file what --autotune tried, and chose: one JSON object a line")
    cache_dir: str = _setting(
        "", str, env="CACHE_DIR", flag=None,
        help="where bucket sizes found are kept for later jobs; empty: $XDG_CACHE_HOME/hvdlite or ~/.cache/hvdlite")
    max_mpi_count: int = _setting(
        2**31 - 1, _positive, env="MAX_MPI_COUNT", flag=None,
        help="largest count handed to one MPI call; larger transfers are cut (tests lower it)")
    #: The names of the settings that the environment gave.
    explicit: frozenset[str] = frozenset()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read every setting; ``HVDLITE_X`` wins over ``HOROVOD_X``, and both over the default.

        Raises: ConfigError that names the variable, its text and what it must be.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for one in settings():
            for variable in variable_names(one):
                if variable in environ:
                    values[one.name] = _parse(one, environ[variable], f"environment variable {variable}")
                    break
        return cls(**values, explicit=frozenset(values))


def settings() -> list[Field[Any]]:
    """The fields of Config that a user sets."""
    return [one for one in fields(Config) if "env" in one.metadata]


def variable_names(one: Field[Any]) -> tuple[str, ...]:
    """The environment variables of a setting, the winning one first."""
    own = f"HVDLITE_{one.metadata['env']}"
    alias = one.metadata["horovod"]
    return (own, f"HOROVOD_{alias}") if alias else (own,)


def _parse(one: Field[Any], text: str, where: str) -> Any:
    try:
        return one.metadata["parse"](text)
    except ValueError as reason:
        raise ConfigError(f"{where}: {text!r} {reason}: {one.metadata['help']}") from None


def parse_flag(text: str, where: str) -> bool:
    """Read a yes or no. Raises: ConfigError that says where it stood."""
    try:
        return _flag(text)
    except ValueError as reason:
        raise ConfigError(f"{where}: {text!r} {reason}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` one flag per setting; a flag that was not used is absent from the namespace."""
    group = parser.add_argument_group("settings of the runtime (also as environment variables)")
    for one in settings():
        flag = one.metadata["flag"]
        if flag is None:
            continue
        options: dict[str, Any] = dict(dest=one.name, default=argparse.SUPPRESS)
        options["help"] = f"{one.metadata['help'].replace('%', '%%')} [{variable_names(one)[0]}]"
        if one.type in ("bool", bool):
            group.add_argument(flag, action="store_true", **options)
        else:
            group.add_argument(flag, metavar=flag.rsplit("-", 1)[-1].upper(), **options)


def environment_from_arguments(arguments: argparse.Namespace) -> dict[str, str]:
    """Turn the flags that were used into the variables that carry them to the ranks.

    Raises: ConfigError that names the flag, its text and what it must be.
    """
    environment = {}
    for one in settings():
        if not hasattr(arguments, one.name):
            continue
        text = getattr(arguments, one.name)
        if text is True:
            text = "1"
        elif one.metadata["flag_scale"] != 1:
            text = _scaled(one, text)
        _parse(one, text, one.metadata["flag"])
        environment[variable_names(one)[0]] = text
    return environment


def _scaled(one: Field[Any], text: str) -> str:
    try:
        return str(int(float(text) * one.metadata["flag_scale"]))
    except (ValueError, OverflowError):
        raise ConfigError(f"{one.metadata['flag']}: {text!r} is not a number: {one.metadata['help']}") from None


def markdown_table() -> str:
    """The settings as a Markdown table; the README holds it, and a test holds the README to it."""
    rows = ["| setting | default | environment | flag of hvdrun | meaning |", "|---|---|---|---|---|"]
    for one in settings():
        names = "<br>".join(f"`{name}`" for name in variable_names(one))
        flag = f"`{one.metadata['flag']}`" if one.metadata["flag"] else ""
        default = f"`{one.default!r}`"
        rows.append(f"| `{one.name}` | {default} | {names} | {flag} | {one.metadata['help']} |")
    return "\n".join(rows)


def cache_directory(config: Config, environ: Mapping[str, str] | None = None) -> str:
    """Where measured values are kept from job to job."""
    environ = os.environ if environ is None else environ
    home = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return config.cache_dir or os.path.join(home, "hvdlite")


def wants_colour(is_terminal: bool, environ: Mapping[str, str] | None = None) -> bool:
    """Whether to paint what is printed: on a terminal that can, unless NO_COLOR says otherwise."""
    environ = os.environ if environ is None else environ
    return is_terminal and environ.get("TERM", "dumb") != "dumb" and not environ.get("NO_COLOR")


@dataclass(frozen=True)
class Starter:
    """Who started this process as one of several ranks. ``size`` is what it says; None where it does not."""

    name: str
    size: int | None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Starter | None:
        """Recognise Open MPI's and PMIx starters, PMI ones (Hydra), and srun; None without a starter.

        *Source*: the variables that PRRTE 3, Hydra 4 and 5 and srun set, looked at in a started process.
        """
        environ = os.environ if environ is None else environ
        for name, variable in (("mpirun (Open MPI)", "OMPI_COMM_WORLD_SIZE"), ("mpiexec (PMI)", "PMI_SIZE")):
            if variable in environ:
                return cls(name, int(environ[variable]))
        if "PMIX_RANK" in environ or "PMI_RANK" in environ:
            return cls("a PMIx or PMI starter", None)
        if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in environ:
            return cls("srun", int(environ["SLURM_STEP_NUM_TASKS"]))
        return None
