"""Options: hvdrun's own settings, each from the command line, the environment, a TOML file or its default, in that order.

What decided is remembered: ``--explain`` tells it. The runtime's settings (:mod:`hvdlite.config`) are options as well.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdlite import config
from hvdlite.errors import ConfigError
from hvdlite.launch.output import check_prefix

CONFIG_VARIABLE = "HVDLITE_CONFIG"


def count(text: str) -> int:
    """A whole number >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def whole(text: str) -> int:
    """A whole number >= 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 0")
    return int(text)


def seconds(text: str) -> float:
    """Seconds >= 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds >= 0")
    return value


def prefix(text: str) -> str:
    """A template of prefixes."""
    try:
        return check_prefix(text)
    except ValueError as reason:
        raise argparse.ArgumentTypeError(str(reason)) from None


def stdin_rank(text: str) -> int:
    """Which rank reads standard input, as a Job has it."""
    if text in ("all", "none"):
        return -2 if text == "all" else -1
    return whole(text)


def one_of(*allowed: str) -> Callable[[str], str]:
    """One of these words."""
    def checked(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(allowed)}")
        return text

    return checked


@dataclass(frozen=True)
class Option:
    """One of hvdrun's own options. ``parse``: from its text; None for a flag without a value. ``is_list``: may be repeated."""

    name: str
    flags: tuple[str, ...]
    group: str
    help: str
    parse: Callable[[str], Any] | None = str
    default: Any = None
    metavar: str = ""
    is_list: bool = False
    off_flags: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"HVDLITE_{self.name.upper()}"


_START, _HOSTS, _OUTPUT, _END, _ENV = "what to start", "hosts", "output", "ending a job", "environment"

OPTIONS: tuple[Option, ...] = (
    Option("np", ("-np", "-n", "--num-proc", "--np"), _START, "number of ranks (default: all slots of -H, a hostfile or the "
           "batch system's allocation)", count, metavar="N"),
    Option("module", ("-m", "--module"), _START, "run a module as python -m does; the rest are its arguments", metavar="MODULE"),
    Option("as_horovod", ("--as-horovod",), _START, "programs written for Horovod: import horovod finds hvdlite", None, False),
    Option("restarts", ("--restarts", "--max-restarts"), _START,
           "after a failure start all ranks again, so many times at most; they find HVDLITE_RESTART and the last commit",
           whole, 0, "N"),
    Option("stdin", ("--stdin",), _START, "rank that reads hvdrun's standard input, or all; else it is closed",
           stdin_rank, -1, "RANK"),
    Option("bind", ("--bind-to",), _START, "auto: each rank gets its part of the allowed processors where that is two or more; "
           "none", one_of("auto", "none"), "auto", "HOW"),
    Option("gpus", ("--gpus",), _START, "auto or a list as 0,1: each rank sees one GPU, by local rank; none: all see all and "
           "choose by hvdlite.local_rank()", str, "none", "GPUS"),
    Option("launcher", ("--launcher",), _START, "mpi: the starter of mpi4py's MPI", one_of("mpi", "auto"), "mpi", "HOW"),
    Option("starter", ("--starter",), _START, "the MPI's own starter, where it is not found by itself", str, "", "PATH"),
    Option("mpi_args", ("--mpi-args",), _START, "more options for the MPI's own starter, in one word", str, "", "ARGS"),
    Option("binding_args", ("--binding-args",), _START, "the same, as horovodrun has it; hvdrun then binds nothing",
           str, "", "ARGS"),
    Option("hosts", ("-H", "--hosts", "--host"), _HOSTS, "h1:2,user@h2:2,[fd00::1]:2,n[01-03,7]:2", str, "", "HOSTS"),
    Option("hostfile", ("-hostfile", "--hostfile", "-f"), _HOSTS, "file of hosts, as Open MPI, MPICH or DeepSpeed write it",
           str, "", "FILE"),
    Option("ssh_port", ("-p", "--ssh-port"), _HOSTS, "port of the hosts' ssh servers", count, None, "PORT"),
    Option("ssh_identity_file", ("-i", "--ssh-identity-file"), _HOSTS, "key for ssh", str, "", "FILE"),
    Option("ssh_args", ("--ssh-args",), _HOSTS, "more options for ssh, in one word", str, "", "ARGS"),
    Option("start_timeout", ("--start-timeout",), _HOSTS, "seconds until every rank must have started (default 30, 120 on one "
           "host)", seconds, None, "S"),
    Option("network_interfaces", ("--network-interfaces", "--network-interface"), _HOSTS,
           "interfaces for the MPI's traffic, with commas", str, "", "NAMES"),
    Option("tcp", ("--tcp",), _HOSTS, "let MPI and NCCL use TCP only", None, False),
    Option("env", ("-x",), _ENV, "pass a variable although it looks like a secret, or set it", str, (), "NAME[=VALUE]", True),
    Option("env_all", ("--env-all",), _ENV, "pass all variables, those that look like secrets too", None, False),
    Option("prefix", ("--prefix",), _OUTPUT, "before each line: {rank} {local_rank} {host} {time} {stream} (default: "
           "'[{rank}] ' on a terminal, nothing else)", prefix, None, "TEMPLATE"),
    Option("prefix_timestamp", ("-prefix-timestamp", "--prefix-output-with-timestamp"), _OUTPUT,
           "the same as --prefix '[{rank}] {time} '", None, False),
    Option("fold", ("--fold",), _OUTPUT, "equal lines of several ranks become one, as [0-3] line (default: where lines have a "
           "prefix that tells the rank)", None, None, off_flags=("--no-fold",)),
    Option("color", ("--color",), _OUTPUT, "colour prefixes: auto, always, never; NO_COLOR is honoured",
           one_of("auto", "always", "never"), "auto", "WHEN"),
    Option("output_dir", ("--output-dir", "--output-filename"), _OUTPUT, "keep each rank's output in DIR/rank.N/stdout and "
           "stderr, and all of it in DIR/output.log", str, "", "DIR"),
    Option("raw", ("--raw",), _OUTPUT, "pass the ranks' bytes as they come: no whole lines, no prefix", None, False),
    Option("unwind", ("--unwind",), _END, "seconds that the other ranks have to end by themselves after a failure, before "
           "SIGTERM", seconds, 1.0, "S"),
    Option("grace", ("--grace",), _END, "seconds from SIGTERM to SIGKILL", seconds, 5.0, "S"),
    Option("hang_timeout", ("--hang-timeout",), _END, "end the job with code 124, and tell where all ranks are, when something "
           "has been pending for so many seconds, or nothing has happened at all", seconds, 0.0, "S"),
)

#: Flags of horovodrun that mean nothing here, with their number of values; they are accepted with a warning.
IGNORED = {
    **dict.fromkeys((
        "--disable-cache", "--mpi", "--gloo", "--jsrun",
        "--hierarchical-allgather", "--no-hierarchical-allgather", "--torus-allreduce", "--no-torus-allreduce",
        "--mpi-threads-disable", "--no-mpi-threads-disable"), 0),
    **dict.fromkeys((
        "--autotune-warmup-samples", "--autotune-steps-per-sample", "--autotune-bayes-opt-max-samples",
        "--autotune-gaussian-process-noise", "--num-nccl-streams", "--thread-affinity", "--gloo-timeout-seconds"), 1),
}
#: Those that are right without any effect.
_SILENT = frozenset(("--disable-cache", "--mpi"))
#: Flags of horovodrun whose work nothing here does.
_REFUSED = {
    **dict.fromkeys(("--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--slots-per-host", "--host-discovery-script",
                     "--elastic-timeout", "--reset-limit"), 1),
    "--blacklist-cooldown-range": 2}
#: horovodrun's opposites of flags: variable and value.
_OPPOSITES = {
    "--no-autotune": "autotune", "--no-timeline-mark-cycles": "timeline_mark_cycles", "--stall-check": "stall_check_disable",
    "--no-hierarchical-allreduce": "hierarchical_allreduce",
    "--log-with-timestamp": "log_hide_time", "--no-log-hide-timestamp": "log_hide_time"}


@dataclass(frozen=True)
class Value:
    """A setting's value and what decided it."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Settings:
    """All settings. ``runtime``: variables of the runtime's settings that the ranks get. ``unknown``: flags without effect."""

    values: Mapping[str, Value]
    runtime: Mapping[str, Value]
    variables: Mapping[str, str] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name].value
        except KeyError:
            raise AttributeError(name) from None

    def origin(self, name: str) -> str:
        """What decided one."""
        return self.values[name].origin


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give the parser every option; one that was not used is absent from the namespace."""
    groups: dict[str, Any] = {}
    for one in OPTIONS:
        group = groups.setdefault(one.group, parser.add_argument_group(one.group))
        kwargs: dict[str, Any] = {"dest": one.name, "default": argparse.SUPPRESS, "help": _help(one)}
        if one.parse is None:
            group.add_argument(*one.flags, action="store_true", **kwargs)
        else:
            action = "append" if one.is_list else "store"
            group.add_argument(*one.flags, type=one.parse, action=action, metavar=one.metavar or None, **kwargs)
        for flag in one.off_flags:
            group.add_argument(flag, dest=one.name, action="store_false", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for flag, num_values in {**IGNORED, **_REFUSED}.items():
        kwargs = {"action": "store_true"} if num_values == 0 else {"nargs": num_values} if num_values > 1 else {}
        parser.add_argument(flag, dest=f"other:{flag}", default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kwargs)
    for flag, name in _OPPOSITES.items():
        parser.add_argument(flag, dest=f"off:{name}", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def joined(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Join each long option and its value by ``=``: argparse refuses a separate value that looks like an option, as those
    of --ssh-args do."""
    taking = {name for name, action in parser._option_string_actions.items()
              if name.startswith("--") and action.nargs is None and not isinstance(action, argparse._HelpAction)}
    result, left = [], list(words)
    while left:
        word = left.pop(0)
        result.append(f"{word}={left.pop(0)}" if word in taking and left else word)
    return result


def _help(one: Option) -> str:
    default = "" if one.default in (None, False, "", (), -1) else f" (default {one.default:g})" if isinstance(
        one.default, float) else f" (default {one.default})"
    return (one.help + default).replace("%", "%%")


def ignored_flags(arguments: argparse.Namespace) -> list[str]:
    """Flags that were given and mean nothing here. Raises: ConfigError for those whose absence would matter."""
    given = [name.removeprefix("other:") for name in vars(arguments) if name.startswith("other:")]
    for flag in given:
        if flag in _REFUSED:
            raise ConfigError(f"{flag}: hvdrun starts a fixed number of ranks, and cannot add or remove any while it runs: "
                              "leave it out; --restarts N starts all of them again after a failure")
    return [flag for flag in given if flag not in _SILENT]


def resolve(arguments: argparse.Namespace, environ: Mapping[str, str], file: str, table: Mapping[str, Any]) -> Settings:
    """Decide each setting. ``table``: what the configuration ``file`` says. Raises: ConfigError."""
    table = {name.replace("-", "_"): value for name, value in table.items()}
    _check_names(table, file)
    values = {}
    for one in OPTIONS:
        if hasattr(arguments, one.name):
            value = getattr(arguments, one.name)
            if one.is_list:
                value = (*_of_file(one, table, file), *value)
            values[one.name] = Value(value, "command line")
        elif one.variable in environ and not one.is_list:
            values[one.name] = Value(_parsed(one, environ[one.variable], f"environment variable {one.variable}"),
                                     f"environment variable {one.variable}")
        elif one.name in table:
            values[one.name] = Value(_of_file(one, table, file) if one.is_list else _from_table(one, table[one.name], file), file)
        else:
            values[one.name] = Value(one.default, "default")
    runtime, variables = _runtime(arguments, environ, file, table)
    return Settings(values, runtime, variables)


def _of_file(one: Option, table: Mapping[str, Any], file: str) -> tuple[str, ...]:
    """``env`` in a file is a table of values, or a list of words as for -x."""
    value = table.get(one.name, ())
    if isinstance(value, Mapping):
        return tuple(f"{name}={text}" for name, text in value.items())
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
        raise ConfigError(f'{file}: {one.name}: write a list of names, or a table: [env] NAME = "value"')
    return tuple(value)


def _from_table(one: Option, value: Any, file: str) -> Any:
    if one.parse is None:
        if not isinstance(value, bool):
            raise ConfigError(f"{file}: {one.name}: {value!r} is neither true nor false: {one.help}")
        return value
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        value = ",".join(value)
    if isinstance(value, (dict, list, bool)):
        raise ConfigError(f"{file}: {one.name}: {value!r} is no single value: {one.help}")
    return _parsed(one, str(value), f"{file}: {one.name}")


def _parsed(one: Option, text: str, where: str) -> Any:
    if one.parse is None:
        return config.parse_flag(text, where)
    try:
        return one.parse(text)
    except argparse.ArgumentTypeError as reason:
        raise ConfigError(f"{where}: {reason}: {one.help}") from None


def _runtime(arguments: argparse.Namespace, environ: Mapping[str, str], file: str, table: Mapping[str, Any],
             ) -> tuple[dict[str, Value], dict[str, str]]:
    """The runtime's settings: each one's value and origin, and the variables that carry what is not in the environment."""
    given = config.environment_from_arguments(arguments)
    given.update({config.variable_names(one)[0]: "0" for one in config.settings() if hasattr(arguments, f"off:{one.name}")})
    texts = argparse.Namespace(**{
        name: value if value is True else str(value) for name, value in _runtime_names(table).items() if value is not False})
    in_file = config.environment_from_arguments(texts)
    told, variables = {}, {}
    for one in config.settings():
        names = config.variable_names(one)
        present = next((name for name in names if name in environ), None)
        if names[0] in given:
            told[one.name] = Value(given[names[0]], "command line")
            variables[names[0]] = given[names[0]]
        elif present is not None:
            told[one.name] = Value(environ[present], f"environment variable {present}")
        elif names[0] in in_file:
            told[one.name] = Value(in_file[names[0]], file)
            variables[names[0]] = in_file[names[0]]
        else:
            told[one.name] = Value(one.default, "default")
    return told, variables


def _runtime_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """Names of a file that are the runtime's settings, by the setting's name or its flag's."""
    names = {}
    for one in config.settings():
        flag = one.metadata["flag"]
        if flag and _flag_name(flag) in table:
            names[one.name] = table[_flag_name(flag)]
    return names


def _flag_name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _check_names(table: Mapping[str, Any], file: str) -> None:
    known = {one.name for one in OPTIONS} | {
        _flag_name(one.metadata["flag"]) for one in config.settings() if one.metadata["flag"]}
    for name in table:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {close[0]!r}?" if close else "see hvdrun --help"
            raise ConfigError(f"{file}: {name!r} is no setting: {advice}")


def read_file(file: str) -> dict[str, Any]:
    """Read a configuration file. Raises: ConfigError."""
    try:
        tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise ConfigError(f"{file}: Python 3.10 reads no TOML by itself: pip install tomli, or use Python 3.11") from None
    if file.endswith((".yaml", ".yml")):
        raise ConfigError(f"{file}: configuration is TOML here, not YAML: write lines such as: np = 4")
    try:
        with open(file, "rb") as stream:
            table: dict[str, Any] = tomllib.load(stream)
            return table
    except OSError as reason:
        raise ConfigError(f"{file}: cannot be read: {reason.strerror}: pass an existing file to --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as reason:
        raise ConfigError(f"{file}: is no TOML: {reason}") from None


def explain(settings: Settings, names: Sequence[str] = ()) -> str:
    """Each setting with its value and where that came from."""
    rows = [(name, _shown(one.value), one.origin) for name, one in {**settings.values, **settings.runtime}.items()
            if not names or name in names]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  ({origin})" for name, value, origin in rows)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(word.split("=")[0] for word in value) or "-"  # values of -x may be secrets
    if value in (None, ""):
        return "-"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
