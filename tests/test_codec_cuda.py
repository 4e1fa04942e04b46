"""The CUDA kernels without a GPU: in Numba's simulator bitwise equal to the reference, and as the compiler makes them."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_kernels_as_they_are_compiled(capsys):
    """No spill, no stack, room for half of the threads, 16-byte accesses. Prints the table."""
    if find_spec("numba_cuda") is None or not any(Path(root).glob("*/bin/nvdisasm") for root in _nvidia_packages()):
        pytest.skip("NVIDIA's compilers are not installed: pip install hvdlite[gpu-test]")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    done = subprocess.run([sys.executable, "tools/kernel_table.py"], capture_output=True, text=True, timeout=900,
                          stdin=subprocess.DEVNULL, env=environment, cwd=ROOT)
    with capsys.disabled():
        print("\n" + done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines()[2:]]
    numbers = {cc: sum(row[1].strip() == cc for row in rows) for cc in ("7.5", "8.0", "9.0")}
    assert numbers["7.5"] == numbers["8.0"] >= 4 and numbers["9.0"] >= 14


def _nvidia_packages():
    spec = find_spec("nvidia")
    return list(spec.submodule_search_locations or []) if spec else []


def test_a_kernel_that_spills_is_a_fault():
    """The table's own judgement, on made rows."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import kernel_table
    finally:
        sys.path.pop(0)
    good = dict(kernel="encode 1 rotated float32", spills=0, stack=0, local=0, occupancy=0.5, loads16=8, stores16=8)
    assert kernel_table.faults(good) == []
    for change in (dict(spills=4), dict(stack=8), dict(local=1), dict(occupancy=0.49), dict(loads16=0)):
        assert len(kernel_table.faults(good | change)) == 1, change
    assert kernel_table.occupancy(64, 256, 16384, (9, 0)) == 0.5 and kernel_table.occupancy(65, 256, 0, (9, 0)) < 0.5
    assert kernel_table.occupancy(128, 256, 0, (7, 5)) == 0.5 and kernel_table.occupancy(32, 256, 65536, (7, 5)) == 0.25
