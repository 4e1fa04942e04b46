"""hvdrun: the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hvdlite import config
from hvdlite._version import __version__
from hvdlite.errors import ConfigError, UnavailableError
from hvdlite.launch import options
from hvdlite.launch.options import Settings
from hvdlite.launch.plan import Planned, plan_job
from hvdlite.launch.sweep import sweep_shared_memory

_DESCRIPTION = "Run COMMAND as N ranks that work together, and end them all when one fails."
_EPILOG = """\
examples:
  hvdrun -np 2 train.py --epochs 3
  hvdrun -np 4 --fusion-threshold-mb 8 --timeline-filename trace.json python train.py
  hvdrun -H h1:4,h2:4 --output-dir logs -m mypackage.train --epochs 3
  hvdrun -np 2 -- ./my-program -v
  hvdrun -np 2 --as-horovod python train_with_horovod.py
  hvdrun doctor -H h1,h2,h3                     checks hosts, the network between them, versions

COMMAND begins at the first word that is not an option of hvdrun; everything from there on goes to the program
unchanged, and so do the environment (less what looks like a secret) and the current directory. A COMMAND that is a file of
Python is run with this Python. The ranks read nothing from standard input unless --stdin says so.

Each option may also stand in a TOML file (--config FILE or $HVDLITE_CONFIG; np = 4) or in a variable HVDLITE_NAME; the
command line wins, then the variable. --explain tells what decided.

signals: the first Ctrl-C (SIGINT), SIGTERM and SIGHUP go to the ranks, which are killed --grace seconds later; a second one
kills them at once. SIGUSR1 and SIGUSR2 go to the ranks. SIGQUIT (Ctrl-\\) shows where all ranks are.
The exit code is that of the rank that failed first (128 + n for signal n), 127 or 126 when COMMAND cannot be
found or run, 124 after --hang-timeout, 130 after Ctrl-C, 3 when hosts could not be reached in time, 2 when hvdrun was called
wrongly or no MPI was found.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``hvdrun`` command and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _occupy_standard_descriptors()
    try:
        if argv[:1] == ["doctor"]:
            from hvdlite.launch.doctor import main as doctor

            return doctor(argv[1:])
        return _run(argv)
    except (UnavailableError, ConfigError) as error:
        _say(f"hvdrun: error: {error}")
        return 2
    except BrokenPipeError:  # of what is printed without starting anything, as in hvdrun --dry-run | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python's own last flush says nothing
        return 141
    except KeyboardInterrupt:  # before the job started; afterwards the supervisor has the signals
        return 130


def _occupy_standard_descriptors() -> None:
    """A closed standard descriptor would be that of the next file opened here, which must not be taken for it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def build_parser() -> argparse.ArgumentParser:
    """The parser of hvdrun's own options; COMMAND is split off before, see :func:`split_command`."""
    parser = argparse.ArgumentParser(
        prog="hvdrun", usage="hvdrun -np N [options] [--] COMMAND [ARGUMENT ...]", description=_DESCRIPTION,
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--config", "--config-file", dest="config_file", metavar="FILE", default=None,
                        help="TOML file of options (default: $HVDLITE_CONFIG)")
    parser.add_argument("--verbose", action="store_true", help="print the starter's command before running it")
    parser.add_argument("-v", "--version", action="version", version=f"hvdrun {__version__} (hvdlite)")
    look = parser.add_argument_group("looking without starting anything")
    look.add_argument("--dry-run", action="store_true", help="print which rank would run where, and how")
    look.add_argument("--json", action="store_true", help="--dry-run as JSON")
    look.add_argument("--explain", nargs="?", const="settings", metavar="env",
                      help="print each setting with what decided it; --explain env: each variable and whether the ranks get it")
    look.add_argument("-cb", "--check-build", action="store_true", help="print what this installation can do")
    options.add_options(parser)
    config.add_arguments(parser)
    return parser


def split_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split hvdrun's own words from the user's command, which argparse must never see.

    argparse cannot do it: how REMAINDER treats ``--`` inside the command differs between Python versions.
    """
    num_values = {
        name: action.nargs if isinstance(action.nargs, int) else 1
        for name, action in parser._option_string_actions.items() if action.nargs is None or isinstance(action.nargs, int)}
    ends = {name for name, action in parser._option_string_actions.items() if action.dest == "module"}
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return list(argv[:index]), list(argv[index + 1:])
        if not word.startswith("-") or word == "-":
            break
        if word == "--explain":
            index += 2 if argv[index + 1:index + 2] == ["env"] else 1
            continue
        index += 1 + num_values.get(word, 0)
        if word in ends:  # as with python -m, what follows is the module's
            rest = list(argv[index:])
            return list(argv[:index]), rest[1:] if rest[:1] == ["--"] else rest
    return list(argv[:index]), list(argv[index:])


def _run(argv: list[str]) -> int:
    parser = build_parser()
    own, command = split_command(parser, argv)
    # argparse takes an optional value where there is none: --explain stands alone.
    own = [f"{word}=settings" if word == "--explain" and own[index + 1:index + 2] != ["env"] else word
           for index, word in enumerate(own)]
    arguments = parser.parse_args(options.joined(parser, own))
    if arguments.check_build:
        from hvdlite.launch.build import describe_build

        print(describe_build())
        return 0
    try:
        ignored = options.ignored_flags(arguments)
        settings = _settings(arguments)
    except ConfigError as error:
        parser.error(str(error))
    if ignored:
        _say(f"hvdrun: warning: {', '.join(ignored)}: means nothing here and is left out")
    if arguments.explain == "settings":
        print(options.explain(settings))
        return 0
    command = _command(settings, command)
    if arguments.explain == "env":
        from hvdlite.launch.plan import explain_environment

        print(explain_environment(settings))
        return 0
    if not command and not arguments.dry_run:
        parser.error("the command is missing: say what to run, for example hvdrun -np 2 python train.py")
    planned = plan_job(settings, command)
    if arguments.dry_run:
        print(planned.json() if arguments.json else planned.describe())
        return 0
    return _launch(planned, settings, arguments.verbose)


def _settings(arguments: argparse.Namespace) -> Settings:
    environ = dict(os.environ)
    file = arguments.config_file or environ.get(options.CONFIG_VARIABLE, "")
    return options.resolve(arguments, environ, file, options.read_file(file) if file else {})


def _command(settings: Settings, command: list[str]) -> list[str]:
    """What is run: a module, and a file of Python that is no program by itself, with this Python."""
    if settings.module:
        return [sys.executable, "-m", settings.module, *command]
    if command and command[0].endswith((".py", ".pyw")) and os.path.isfile(command[0]):
        is_program = os.access(command[0], os.X_OK) and os.path.dirname(command[0])
        return command if is_program else [sys.executable, *command]
    return command


def _launch(planned: Planned, settings: Settings, verbose: bool) -> int:
    for warning in planned.warnings:
        _say(f"hvdrun: warning: {warning}")
    sweep_shared_memory()
    reasons: list[str] = []
    while True:
        outcome = planned.run(len(reasons), verbose)
        if not outcome.exit_code or outcome.is_unwanted or outcome.error or len(reasons) >= settings.restarts:
            break
        reasons.append(outcome.describe().removeprefix("hvdrun: "))
        if text := outcome.box(_is_unicode()):
            _say(text)
        _say(f"hvdrun: starting again ({len(reasons)} of {settings.restarts}): {reasons[-1]}")
    if text := outcome.box(_is_unicode()):
        for number, reason in enumerate(reasons, 1):
            _say(f"hvdrun: attempt {number}: {reason}")
        _say(text)
    sweep_shared_memory()
    return outcome.exit_code


def _is_unicode() -> bool:
    return "utf" in (getattr(sys.stderr, "encoding", "") or "").lower()


def _say(text: str) -> None:
    try:
        print(text.encode("utf-8", "backslashreplace").decode(), file=sys.stderr, flush=True)
    except (OSError, UnicodeEncodeError):
        pass  # nobody reads it any more, or its disk is full: the exit code still counts
