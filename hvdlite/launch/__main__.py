"""``python -m hvdlite.launch``: the same as ``hvdrun``."""

import sys

from hvdlite.launch.cli import main

sys.exit(main())
