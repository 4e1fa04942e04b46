"""hvdrun: the command line."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Sequence

from hvdlite import config
from hvdlite._version import __version__
from hvdlite.errors import ConfigError, UnavailableError
from hvdlite.launch.command import StartRequest, build_command, oversubscription_warning
from hvdlite.launch.environment import job_environment, with_horovod_alias, without_outer_job
from hvdlite.launch.mpi import find_mpi, find_starter
from hvdlite.launch.supervisor import Job, private_directory, run_job

_DESCRIPTION = "Run COMMAND as N ranks that work together, and end them all when one fails."
_EPILOG = """\
examples:
  hvdrun -np 2 python train.py --epochs 3
  hvdrun -np 4 --fusion-threshold-mb 8 --timeline-filename trace.json python train.py
  hvdrun -np 2 -- ./my-program -v
  hvdrun -np 2 --as-horovod python train_with_horovod.py

COMMAND begins at the first word that is not an option of hvdrun; everything from there on goes to the program
unchanged, and so do the environment and the current directory. The ranks read nothing from standard input.
The exit code is that of the rank that failed first (128 + n for signal n), 127 or 126 when COMMAND cannot be
found or run, 130 after Ctrl-C, 2 when hvdrun was called wrongly or no MPI was found.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ``hvdrun`` command and return its exit code."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except UnavailableError as error:
        _say(f"hvdrun: error: {error}")
        return 2
    except KeyboardInterrupt:  # before the job started; afterwards the supervisor has the signals
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of hvdrun's own options; COMMAND is split off before, see :func:`split_command`."""
    parser = argparse.ArgumentParser(
        prog="hvdrun", usage="hvdrun -np N [options] [--] COMMAND [ARGUMENT ...]", description=_DESCRIPTION,
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("-np", "--num-proc", dest="num_ranks", metavar="N", type=_count, help="number of ranks")
    parser.add_argument(
        "--as-horovod", action="store_true", help="programs written for Horovod: import horovod finds hvdlite")
    parser.add_argument(
        "--mpi-args", metavar="ARGS", default=os.environ.get("HVDLITE_MPI_ARGS", ""),
        help="more options for the MPI's own starter, in one word (default: $HVDLITE_MPI_ARGS)")
    parser.add_argument("--verbose", action="store_true", help="print the starter's command before running it")
    parser.add_argument("-v", "--version", action="version", version=f"hvdrun {__version__} (hvdlite)")
    ending = parser.add_argument_group("ending a job")
    ending.add_argument(
        "--unwind", metavar="S", type=_seconds, default=1.0,
        help="seconds that the other ranks have to end by themselves after a failure, before SIGTERM (default 1)")
    ending.add_argument(
        "--grace", metavar="S", type=_seconds, default=5.0, help="seconds from SIGTERM to SIGKILL (default 5)")
    config.add_arguments(parser)
    return parser


def split_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split hvdrun's own words from the user's command, which argparse must never see.

    argparse cannot do it: how REMAINDER treats ``--`` inside the command differs between Python versions.
    """
    takes_value = {name for name, action in parser._option_string_actions.items() if action.nargs is None}
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return list(argv[:index]), list(argv[index + 1:])
        if not word.startswith("-") or word == "-":
            break
        index += 2 if word in takes_value else 1
    return list(argv[:index]), list(argv[index:])


def _run(argv: list[str]) -> int:
    parser = build_parser()
    own, command = split_command(parser, argv)
    arguments = parser.parse_args(own)
    if arguments.num_ranks is None:
        parser.error("the number of ranks is missing: say how many to start, for example -np 2")
    if not command:
        parser.error("the command is missing: say what to run, for example hvdrun -np 2 python train.py")
    try:
        settings = config.environment_from_arguments(arguments)
    except ConfigError as error:
        parser.error(str(error))
    return _launch(arguments, command, settings)


def _launch(arguments: argparse.Namespace, command: list[str], settings: dict[str, str]) -> int:
    starter = find_starter(find_mpi())
    caller = without_outer_job(os.environb)
    if arguments.as_horovod:
        caller = with_horovod_alias(caller)
    job = Job(
        num_ranks=arguments.num_ranks,
        argv=tuple(os.fsencode(word) for word in command),
        environment=job_environment(caller, settings, os.urandom(8).hex()),
        directory=os.getcwdb(),
        unwind_s=arguments.unwind,
        grace_s=arguments.grace)
    with private_directory() as directory:
        request = StartRequest(
            starter=starter, num_ranks=job.num_ranks, num_cpus=len(os.sched_getaffinity(0)),
            is_root=os.geteuid() == 0, directory=directory, mpi_args=tuple(shlex.split(arguments.mpi_args)))
        start = build_command(request)
        if warning := oversubscription_warning(request):
            _say(f"hvdrun: warning: {warning}")
        if arguments.verbose:
            _say(f"hvdrun: {shlex.join(start.argv)}")
        outcome = run_job(job, start, directory)
    if text := outcome.describe():
        _say(text)
    return outcome.exit_code


def _say(text: str) -> None:
    print(text.encode("utf-8", "backslashreplace").decode(), file=sys.stderr, flush=True)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds >= 0")
    return value
