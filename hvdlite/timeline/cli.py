"""hvdtrace: the command line of the trace inspector."""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hvdlite._version import __version__
from hvdlite.config import wants_colour
from hvdlite.errors import HvdliteError

if TYPE_CHECKING:
    from hvdlite.timeline.job import Job

#: MB that viewers load within some seconds. Chosen; Chrome's limit is 256.
_MAX_MB = 200
#: Records that a report takes in. Measured: they take 12 s and 0.7 GB.
_MOST_RECORDS = 2_000_000
_DESCRIPTION = "Look into the timelines that hvdlite records: who made whom wait, and what to do about it."
_EPILOG = """\
examples:
  hvdrun -np 4 --timeline trace python train.py     record, then:
  hvdtrace report trace                             what to change, with its gain
  hvdtrace report trace --html report.html
  hvdtrace export trace --output trace.json         for ui.perfetto.dev or chrome://tracing
  hvdtrace diff before after --fail-if 'step>+5%'   for CI
  hvdtrace doctor trace                             why a job hung or died
  hvdtrace top trace                                while the job runs
  hvdtrace sql trace 'select rank, avg(idle_ns) from steps group by rank'

Exit code: 0; 1 when a --fail-if holds, or doctor found a fault; 2 for wrong use; 4 for a timeline that cannot be trusted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hvdtrace`` and return its exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:  # who reads it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (HvdliteError, OSError) as error:
        print(f"hvdtrace: {error}", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="hvdtrace", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"hvdtrace {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    report = commands.add_parser("report", help="who made whom wait, and what to change")
    _add_directory(report)
    report.add_argument("--html", metavar="FILE", help="write one page that needs no network")
    report.add_argument("--json", metavar="FILE", help="write everything as JSON; - for standard output")
    report.add_argument("--csv", metavar="FILE", help="write a row for every step of every rank; - for standard output")
    report.add_argument("--steps", metavar="A:B", type=_window, help="of steps A to B - 1 only")
    report.add_argument("--width", type=int, default=0, metavar="N", help="of the terminal (default: as it is)")
    report.set_defaults(run=_report)

    for name, help_text in (("export", "merge the rings of a job into one Chrome JSON file"),
                            ("cut", "the same for some steps or ranks, or up to a size")):
        export = commands.add_parser(name, help=help_text)
        _add_directory(export)
        export.add_argument("--output", metavar="FILE", required=True, help="ends in .gz: compressed; viewers take that too")
        export.add_argument("--steps", metavar="A:B", type=_window, help="steps A to B - 1 only")
        export.add_argument("--ranks", metavar="R,R", type=_ranks, help="these ranks only")
        export.add_argument("--max-mb", metavar="N", type=float, default=_MAX_MB,
                            help="leave out what is oldest above this size (default: %(default)g; 0: write everything)")
        export.add_argument("--with", dest="others", metavar="FILE", action="append", default=[],
                            help="also show a Horovod timeline or a trace of torch's profiler or viztracer, by the time of day")
        export.set_defaults(run=_export)

    imported = commands.add_parser("import", help="repair and merge Horovod timelines, traces of torch's profiler and viztracer")
    imported.add_argument("files", metavar="FILE", nargs="+")
    imported.add_argument("--output", metavar="FILE", required=True)
    imported.set_defaults(run=_import)

    diff = commands.add_parser("diff", help="compare two recordings, with intervals")
    diff.add_argument("before", metavar="A")
    diff.add_argument("after", metavar="B")
    diff.add_argument("--fail-if", action="append", default=[], metavar="TEST", help="exit with 1 when it holds: 'step>+5%%'")
    diff.add_argument("--json", metavar="FILE")
    diff.add_argument("--steps", metavar="A:B", type=_window, help="of steps A to B - 1 only, in both")
    _add_allowances(diff)
    diff.set_defaults(run=_diff)

    doctor = commands.add_parser("doctor", help="why a job hung or died")
    doctor.add_argument("directory", metavar="DIR")
    doctor.set_defaults(run=_doctor)

    sql = commands.add_parser("sql", help="ask a recording in SQL; .schema shows its tables")
    sql.add_argument("directory", metavar="DIR", help="what hvdrun --timeline wrote")
    sql.add_argument("query", metavar="QUERY", help="'select phase, count(*), avg(dur_ns) from spans group by phase', or .schema")
    sql.add_argument("--output", metavar="FILE", default="", help="keep the tables in an SQLite database")
    sql.add_argument("--steps", metavar="A:B", type=_window, help="of steps A to B - 1 only")
    _add_allowances(sql)
    sql.set_defaults(run=_sql)

    top = commands.add_parser("top", help="watch a job that runs")
    top.add_argument("directory", metavar="DIR", help="what the job was given as --timeline")
    top.add_argument("--interval", type=float, default=1.0, metavar="S")
    top.add_argument("--once", action="store_true", help="print one picture and stop")
    top.set_defaults(run=_top)
    return parser


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="what hvdrun --timeline wrote")
    _add_allowances(parser)


def _add_allowances(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allow-missing", action="store_true", help="go on when ranks left no ring")
    parser.add_argument("--allow-unsynced", action="store_true", help="place ranks whose clocks were not compared by time of day")


def _window(text: str) -> tuple[int, int]:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B with A < B, as 100:110")
    return int(first), int(end)


def _ranks(text: str) -> list[int]:
    if not all(one.isdecimal() for one in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks, as 0,2")
    return [int(one) for one in text.split(",")]


def _load(arguments: argparse.Namespace, directory: str) -> Job:
    """A job to report about: what was asked for, or the newest that memory and patience are enough for; it says so."""
    from hvdlite.timeline.job import load_job
    from hvdlite.timeline.ring import num_ranks_in

    newest = 1 + _MOST_RECORDS // max(1, num_ranks_in(directory)) if arguments.steps is None else None
    job = load_job(directory, allow_missing=arguments.allow_missing, allow_unsynced=arguments.allow_unsynced, newest=newest,
                   steps=arguments.steps)
    left_out = sum(rank.cut for rank in job.ranks)
    if arguments.steps is not None or not left_out:
        return job
    return replace(job, notes=(*job.notes, f"{left_out} older records were left out, because they are too many to take in at "
                                           "once: name some steps with --steps A:B"))


def _report(arguments: argparse.Namespace) -> int:
    from hvdlite.timeline.report import as_rows, as_values, make_report
    from hvdlite.timeline.report_text import as_text

    report = make_report(_load(arguments, arguments.directory))
    if arguments.html:
        from hvdlite.timeline.report_html import as_html

        _write(arguments.html, as_html(report))
    if arguments.json:
        _write(arguments.json, json.dumps(as_values(report), allow_nan=False, indent=1) + "\n")
    if arguments.csv:
        with (open(arguments.csv, "w", encoding="ascii", newline="") if arguments.csv != "-" else
              open(sys.stdout.fileno(), "w", encoding="ascii", newline="", closefd=False)) as file:
            csv.writer(file).writerows(as_rows(report))
    if "-" not in (arguments.json, arguments.csv):
        width = arguments.width or shutil.get_terminal_size((100, 40)).columns
        sys.stdout.write(as_text(report, width=width, colour=wants_colour(sys.stdout.isatty())))
    return 4 if report.violations else 0


def _write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def _export(arguments: argparse.Namespace) -> int:
    from hvdlite.timeline.export import cut, newest_of, write_job
    from hvdlite.timeline.imported import as_events, read_trace
    from hvdlite.timeline.job import load_job

    max_bytes = int(arguments.max_mb * 1e6)
    job = load_job(arguments.directory, allow_missing=arguments.allow_missing, allow_unsynced=arguments.allow_unsynced,
                   newest=newest_of(arguments.directory, max_bytes) if arguments.steps is None else None, steps=arguments.steps)
    more = []
    for number, path in enumerate(arguments.others):
        trace = read_trace(path)
        _tell(trace)
        more += as_events(trace, job.from_time_of_day, 100_000 + 1000 * number)
        print(f"hvdtrace: {path}: placed by the time of day, within +- {job.time_of_day_error_ns / 1e3:.1f} us of rank 0's clock",
              file=sys.stderr)
    kept, dropped = cut(job, steps=arguments.steps, ranks=arguments.ranks, max_bytes=max_bytes)
    dropped += sum(rank.cut for rank in job.ranks)
    count = write_job(kept, arguments.output, more=more)
    size = os.path.getsize(arguments.output)
    print(f"{arguments.output}: {count} spans, {size / 1e6:.1f} MB; open it in https://ui.perfetto.dev or chrome://tracing")
    wish = "as asked for" if arguments.steps or arguments.ranks or arguments.max_mb != _MAX_MB else (
        f"older ones, so that viewers can load the file: see --steps, --ranks and --max-mb ({_MAX_MB} if not given)")
    for note in (*job.notes, *([f"{dropped} records were left out, {wish}"] if dropped else [])):
        print(f"hvdtrace: {note}", file=sys.stderr)
    if size > 1.3e6 * _MAX_MB:
        print("hvdtrace: viewers have trouble with so large a file: see hvdtrace cut --steps, --ranks, --max-mb", file=sys.stderr)
    return 0


def _tell(trace: object) -> None:
    print(f"hvdtrace: {trace}", file=sys.stderr)


def _import(arguments: argparse.Namespace) -> int:
    from hvdlite.timeline.imported import merge_traces, read_trace

    traces = [read_trace(path) for path in arguments.files]
    for trace in traces:
        _tell(trace)
    count = merge_traces(traces, arguments.output)
    print(f"{arguments.output}: {count} events; open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from hvdlite.timeline.diff import as_text, compare, parse_test
    from hvdlite.timeline.report import make_report

    tests = [parse_test(text) for text in arguments.fail_if]
    before, after = (make_report(_load(arguments, path)) for path in (arguments.before, arguments.after))
    changes = compare(before, after)
    sys.stdout.write(as_text(changes))
    if arguments.json:
        _write(arguments.json, json.dumps([one._asdict() for one in changes], allow_nan=False, indent=1) + "\n")
    failed = [test for test in tests if test.holds(changes)]
    for test in failed:
        print(f"hvdtrace: {test.text} holds: {test.why(changes)}", file=sys.stderr)
    return 1 if failed else 0


def _doctor(arguments: argparse.Namespace) -> int:
    from hvdlite.timeline.doctor import examine

    findings, is_well = examine(arguments.directory)
    print("\n".join(findings))
    return 0 if is_well else 1


def _sql(arguments: argparse.Namespace) -> int:
    from hvdlite.timeline.sql import SCHEMA, answer, as_database

    job = _load(arguments, arguments.directory)
    for note in job.notes:
        print(f"hvdtrace: {note}", file=sys.stderr)
    database = as_database(job, arguments.output or ":memory:")
    if arguments.query == ".schema":
        print(SCHEMA, end="")
    else:
        names, rows = answer(database, arguments.query)
        csv.writer(sys.stdout, lineterminator="\n").writerows([names, *rows])
    database.close()
    return 0


def _top(arguments: argparse.Namespace) -> int:
    from hvdlite.timeline.top import watch

    return watch(arguments.directory, interval_s=arguments.interval, once=arguments.once)


if __name__ == "__main__":
    sys.exit(main())
