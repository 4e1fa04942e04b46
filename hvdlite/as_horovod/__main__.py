"""``python -m hvdlite.as_horovod script.py ARGUMENT ...``, also ``-m module ...`` and ``-c code ...``.

The process becomes ``python script.py ARGUMENT ...`` by exec, with Python's own options kept: ``sys.argv``,
``sys.path``, ``__main__`` and everything else are what they are without hvdlite.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hvdlite.launch.environment import with_horovod_alias

_NAME = "hvdlite.as_horovod"


def command(original: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """What to run: the original command line, Python's own options included, without ``-m hvdlite.as_horovod``."""
    options = list(original[1 : len(original) - len(arguments)])
    if options[-1] == _NAME:
        options.pop()
    else:
        options[-1] = options[-1].removesuffix(_NAME)  # -mhvdlite.as_horovod
    switch = options.pop().removesuffix("m")  # "-m", or the end of "-um"
    return [*options, *([switch] if switch != "-" else []), *arguments]


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments:
        sys.exit("usage: python -m hvdlite.as_horovod (script.py | -m module | -c code) [ARGUMENT ...]")
    if sys.flags.ignore_environment or sys.flags.no_site:
        sys.exit("hvdlite.as_horovod: Python's options -E, -I and -S keep it from taking Horovod's place: leave them out")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *command(sys.orig_argv, arguments)], with_horovod_alias(os.environb))


if __name__ == "__main__":
    main()
