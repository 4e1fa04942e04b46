"""hvdtrace: the command line of the trace inspector."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hvdlite._version import __version__
from hvdlite.timeline.export import write_chrome_json
from hvdlite.timeline.ring import TimelineError


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hvdtrace`` and return its exit code: 0, 2 for wrong use, 4 for a timeline that cannot be trusted."""
    parser = argparse.ArgumentParser(prog="hvdtrace", description="Look into the timelines that hvdlite records.")
    parser.add_argument("--version", action="version", version=f"hvdtrace {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="merge the rings of a job into one Chrome JSON file")
    export.add_argument("directory", metavar="DIR", help="what hvdrun --timeline wrote")
    export.add_argument("--output", metavar="FILE", required=True)
    export.add_argument("--allow-missing", action="store_true", help="go on when ranks left no ring")
    arguments = parser.parse_args(argv)
    try:
        count = write_chrome_json(arguments.directory, arguments.output, allow_missing=arguments.allow_missing)
        if not count:
            raise TimelineError(f"{arguments.directory}: the rings hold no record: the job ended before its first operation")
    except (TimelineError, OSError) as error:
        print(f"hvdtrace: {error}", file=sys.stderr)
        return 4
    print(f"{arguments.output}: {count} phases; open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
