#!/usr/bin/env python3
"""Compile the CUDA kernels as NVIDIA's own tools do, without a GPU: registers, spills, stack, occupancy, 16-byte accesses.

Needs the extra ``gpu-test``: ``pip install hvdlite[gpu-test]``. Usage: ``tools/kernel_table.py [--full | --all] [--json] [--match
TEXT]``. Without further ado: most of the usual kernels for the newest architecture, the hardest ones for the others too.
Exit code 0 where every kernel is as it must be: no spill, no stack, room for half of a multiprocessor's threads, and 16-byte
loads from global memory where a kernel reads float32.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: Compute capability: the threads that a multiprocessor holds, and its bytes of shared memory, of which each block takes 1024
#: more than it asks for from 8.0 on. Each has 65536 registers, given to warps in units of 256. *Source*: CUDA C++ Programming
#: Guide, technical specifications per compute capability.
ARCHITECTURES = {(7, 5): (1024, 65536), (8, 0): (2048, 167936), (9, 0): (2048, 233472)}
LEAST_OCCUPANCY = 0.5


#: Of the usual kernels those that come closest to a limit on some architecture, and the plainest. Measured with ``--full``.
HARD = {("encode", 1, "rotated", "float32", False), ("encode", 1, "rotated", "float32", True), ("pack",),
        ("encode", 8, "rotated", "bfloat16", True)}


def kernels(everything: bool) -> list[tuple[Any, ...]]:
    """What to compile: arguments of ``cuda_kernels.kernel``."""
    made: list[tuple[Any, ...]] = []
    for bits in (1, 2, 4, 8):
        made += [("encode", bits, "rotated", "float32", False), ("decode", bits, "rotated", "float32", False)]
    made += [("encode", 1, "rotated", "float32", True), ("decode", 1, "rotated", "float32", True),
             ("encode", 1, "rotated", "float16", False), ("encode", 1, "rotated", "bfloat16", False),
             ("encode", 1, "two_means", "float32", False), ("encode", 8, "rotated", "bfloat16", True),
             ("decode_add", 1, "rotated"), ("rotate", 1, "rotated", "float32"), ("rotate_back", 1, "rotated", "float32"),
             ("pack",), ("scale", 1, "rotated", "float32")]
    if everything:
        for dtype in ("float32", "float16", "bfloat16", "float64"):
            ways = [*((bits, "rotated") for bits in (1, 2, 4, 8)), *((1, kind) for kind in ("l1", "rms", "two_means"))]
            for bits, kind in ways:
                made += [(name, bits, kind, dtype, moments) for name in ("encode", "decode") for moments in (False, True)]
            made += [("scale", 1, "rotated", dtype)]
        made += [(name, bits, "rotated") for name in ("decode_add", "decode_within") for bits in (1, 2, 4, 8)]
    return list(dict.fromkeys(made))


def is_usual(kernel: tuple[Any, ...], cc: tuple[int, int]) -> bool:
    """Whether it is compiled without further ado: what differs little from others is not."""
    differs_little = len(kernel) > 2 and (kernel[1] in (2, 4) or kernel[2] == "two_means")
    return kernel in HARD or (cc == max(ARCHITECTURES) and not differs_little)


def tool(name: str) -> str:
    """The path of ptxas or nvdisasm from NVIDIA's packages. Raises: SystemExit."""
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or [] if spec else []):
        if found := sorted(Path(root).glob(f"*/bin/{name}")):
            return str(found[-1])
    raise SystemExit(f"{name} is not installed: pip install hvdlite[gpu-test]")


def look_at(kernel: tuple[Any, ...], cc: tuple[int, int]) -> dict[str, Any]:
    """Compile one kernel for one architecture."""
    from numba import cuda
    from numba.cuda import dispatcher

    # Signatures are looked up per device: none is needed to compile for a given one.
    dispatcher.get_current_device = lambda: type("Chosen", (), {"compute_capability": cc})()
    from hvdlite.compression import cuda_kernels

    began = time.monotonic()
    ptx, _ = cuda.compile_ptx(cuda_kernels.python_kernel(*kernel), _types(cuda_kernels.signature(kernel[0])), cc=cc)
    compiled = time.monotonic()
    threads, most = 32 * cuda_kernels.WARPS_PER_BLOCK, cuda_kernels.max_registers(cc)
    with tempfile.TemporaryDirectory() as directory:
        source, cubin = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source.write_text(ptx)
        said = subprocess.run(
            [tool("ptxas"), "-v", f"-arch=sm_{cc[0]}{cc[1]}", f"--maxrregcount={most}", source, "-o", cubin],
            capture_output=True, text=True, check=True).stderr
        sass = subprocess.run([tool("nvdisasm"), cubin], capture_output=True, text=True, check=True).stdout
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    shared = int((re.search(r"(\d+) bytes smem", said) or [0, 0])[1])
    return dict(
        kernel=" ".join(str(one) for one in kernel[:4]) + (" moments" if len(kernel) > 4 and kernel[4] else ""),
        cc=f"{cc[0]}.{cc[1]}", registers=registers, threads=threads,
        spills=sum(map(int, re.findall(r"(\d+) bytes spill", said))), stack=int(re.search(r"(\d+) bytes stack frame", said)[1]),
        shared=shared, local=len(re.findall(r"\b(?:LDL|STL)\b", sass)), occupancy=occupancy(registers, threads, shared, cc),
        loads16=len(re.findall(r"\bLDG\.E\.\S*128", sass)), stores16=len(re.findall(r"\bSTG\.E\.\S*128", sass)),
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/", sass, re.MULTILINE)),
        seconds=round(compiled - began, 1), assembling=round(time.monotonic() - compiled, 1))


def _types(text: str) -> Any:
    from numba.core import sigutils

    return sigutils.normalize_signature(text)[0]


def occupancy(registers: int, threads: int, shared_bytes: int, cc: tuple[int, int]) -> float:
    """Share of a multiprocessor's threads that have room, by registers and shared memory."""
    most_threads, most_shared = ARCHITECTURES[cc]
    per_warp = -(-registers * 32 // 256) * 256
    blocks = min(65536 // per_warp // (threads // 32), most_threads // threads)
    per_block = shared_bytes + 1024 * (cc >= (8, 0))
    if per_block:
        blocks = min(blocks, most_shared // per_block)
    return blocks * threads / most_threads


def faults(row: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    found = [f"{row[name]} {what}" for name, what in (
        ("spills", "bytes spilled"), ("stack", "bytes of stack"), ("local", "accesses of local memory")) if row[name]]
    if row["occupancy"] < LEAST_OCCUPANCY:
        found.append(f"occupancy {row['occupancy']:.0%}")
    name = row["kernel"].split()[0]
    # A decode reads words, of 4 bytes for a row, and moments if there are any; float64 is scaled one by one.
    if (name not in ("decode", "decode_within") and "float16" not in row["kernel"] and not row["loads16"]
            and not row["kernel"].startswith("scale 1 rotated float64")):
        found.append("no 16-byte loads")
    if name not in ("encode", "rotate_back", "decode", "scale") and not row["stores16"]:
        found.append("no 16-byte stores")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="the usual kernels for every architecture (minutes)")
    parser.add_argument("--all", action="store_true", help="every kernel there is (most of an hour)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--match", default="", help="only kernels whose name holds this")
    parser.add_argument("--cc", default="", help="only this architecture, as 9.0")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    tool("ptxas"), tool("nvdisasm")
    work = [(one, cc) for one in kernels(chosen.all) for cc in ARCHITECTURES
            if chosen.match in " ".join(map(str, one)) and chosen.cc in ("", f"{cc[0]}.{cc[1]}")
            and (chosen.full or chosen.all or chosen.cc or is_usual(one, cc))]
    with ProcessPoolExecutor(chosen.processes) as pool:
        rows = list(pool.map(look_at, *zip(*work, strict=True)))
    if chosen.json:
        print(json.dumps(rows))
    else:
        columns = list(rows[0])
        print("| " + " | ".join([*columns, "fault"]) + " |\n" + "|---" * (len(columns) + 1) + "|")
        for row in rows:
            print("| " + " | ".join([*(f"{row[name]}" for name in columns), "; ".join(faults(row))]) + " |", flush=True)
    return int(any(map(faults, rows)))


if __name__ == "__main__":
    sys.exit(main())
