"""These tests run in Numba's simulator, through tests/test_codec_cuda.py, which starts them with NUMBA_ENABLE_CUDASIM=1."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
collect_ignore_glob = [] if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" else ["test_*.py"]


def pytest_configure(config):
    # Infinite and NaN values are tested on purpose; the simulator's threads know no np.errstate.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")
