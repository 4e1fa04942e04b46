"""The CUDA kernels without a GPU: in Numba's simulator bitwise equal to the reference, and as the compiler makes them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_everything_for_gpus_in_the_simulator():
    """tests/simulated, in a process of its own: whether Numba simulates is decided when it is imported."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/simulated"], capture_output=True, text=True,
        timeout=300, stdin=subprocess.DEVNULL, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout
