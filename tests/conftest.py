"""Shared by all tests: tests/parallel runs under hvdrun only, through test_parallel.py."""

import os

collect_ignore = [] if os.environ.get("HVDLITE_LAUNCHER") else ["parallel"]
