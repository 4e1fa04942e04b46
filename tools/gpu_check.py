#!/usr/bin/env python3
"""Check everything that needs a GPU, in under 5 minutes: kernels against NumPy, their rates, NCCL, the 1-bit exchange, training.

    python tools/gpu_check.py [--on-hosts] [--json]

Prints a table. Exit code 0: all is as it must be; 1: something is not; 2: there is no GPU, or a package is missing, and nothing
was checked. It fetches nothing and needs no MPI: ranks are processes that it starts. Where there are fewer GPUs than ranks they
share, which NCCL allows with NCCL_MULTI_RANK_GPU_ENABLE=1 from a certain version on; else that row says "not possible here".
``--on-hosts`` runs what the ranks do on tensors of the host: it checks this script, not GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

Row = dict[str, Any]
#: Processes among which the compiling of kernels is shared out, and seconds that one part of the check may take. Chosen.
SHARDS, PART_S = 4, 150
RATE_BYTES = 1 << 30
#: What ranks check, and how many of them.
ON_GPUS = (("collectives", 1), ("collectives", 2), ("collectives", 4), ("exchange", 2), ("training", 2))
ON_HOSTS = (("collectives,exchange,training", 2),)
COLUMNS = ("check", "result", "limit", "ok")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--on-hosts", action="store_true", help="let the ranks work on host tensors: a check of this script")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", nargs="*", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part:
        print(json.dumps(run_part(chosen.part)))
        return 0
    reason = "" if chosen.on_hosts else why_not()
    if reason:
        print(f"gpu_check: nothing was checked: {reason}: run it on a machine with a GPU and pip install hvdlite[gpu,torch]",
              file=sys.stderr)
        return 2
    started = time.monotonic()
    rows = on_ranks(False, ON_HOSTS) if chosen.on_hosts else everything()
    report(rows, chosen.json, time.monotonic() - started)
    return int(any(row["ok"] is False for row in rows))


def why_not() -> str:
    """Why there is nothing to check here."""
    from hvdlite.dataplane.cuda import load_nccl, why_unavailable
    from hvdlite.errors import UnavailableError

    reason = why_unavailable()
    if not reason:
        try:
            import torch

            load_nccl()
            reason = "" if torch.cuda.is_available() else "torch finds no GPU"
        except (ImportError, UnavailableError) as error:
            reason = str(error)
    return reason


def everything() -> list[Row]:
    """All parts: kernels side by side, then what is timed, then ranks."""
    shards = [start(["kernels", str(number)]) for number in range(SHARDS)]
    rows = [row for number, shard in enumerate(shards) for row in finish(f"kernels, part {number}", [shard])]
    rows += finish("rates", [start(["rates"])])
    return rows + on_ranks(True, ON_GPUS)


def on_ranks(on_gpu: bool, plan: Sequence[tuple[str, int]]) -> list[Row]:
    """What is to be checked by how many ranks, each in processes of its own."""
    rows = []
    for what, size in plan:
        from gpu_check_ranks import serve

        key = os.urandom(16)
        hub = serve(size, key)
        try:
            address = json.dumps(hub.address)
            ranks = [start([what, str(rank), str(size), address, str(int(on_gpu))], key) for rank in range(size)]
            rows += finish(f"{what}, {size} ranks", ranks)
        finally:
            hub.shutdown()
    return rows


def start(part: list[str], key: bytes = b"") -> subprocess.Popen[str]:
    """One part as a process."""
    environment = os.environ | {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "GPU_CHECK_KEY": key.hex()}
    return subprocess.Popen([sys.executable, __file__, "--part", *part], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=environment)


def finish(name: str, processes: list[subprocess.Popen[str]]) -> list[Row]:
    """The first process's rows, if all end well; a process that failed or hangs takes the others with it."""
    deadline = time.monotonic() + PART_S
    while any(one.poll() is None for one in processes) and time.monotonic() < deadline and not any(map(_failed, processes)):
        time.sleep(0.05)
    late = [one for one in processes if one.poll() is None]
    first_to_fail = next(filter(_failed, processes), None)
    for one in late:
        one.kill()
    said = [one.communicate() for one in processes]
    if first_to_fail is None and not late:
        rows: list[Row] = json.loads(said[0][0].splitlines()[-1])
        return rows
    if first_to_fail is None:
        return [dict(check=name, result=f"no end after {PART_S} s", limit="", ok=False)]
    text = said[processes.index(first_to_fail)][1].strip()
    if "Duplicate GPU" in text:
        return [dict(check=name, result="not possible here: NCCL takes one rank for each GPU", limit="", ok=None)]
    return [dict(check=name, result=text.splitlines()[-1][:300] if text else f"exit code {first_to_fail.returncode}", limit="",
                 ok=False)]


def _failed(process: subprocess.Popen[str]) -> bool:
    return bool(process.poll())


def run_part(part: list[str]) -> list[Row]:
    """What a process started here does."""
    name, *arguments = part
    if name in ("kernels", "rates"):
        import gpu_check_kernels as kernels

        from hvdlite.dataplane.cuda import CudaDevice

        device = CudaDevice(0)
        if name == "rates":
            return list(kernels.rates(device, RATE_BYTES, must_reach="H200" in card()))
        number = int(arguments[0])
        rows = [kernels.compare(device, *case, kernels.SIZES) for case in kernels.CASES[number::SHARDS]]
        return rows + (list(kernels.compare_plain(device, kernels.SIZES)) if number == 0 else [])
    import gpu_check_ranks as ranks

    rank, size, address, on_gpu = (json.loads(one) for one in arguments)
    return ranks.run(name, rank, size, tuple(address), bytes.fromhex(os.environ["GPU_CHECK_KEY"]), bool(on_gpu))


def card() -> str:
    """The GPU's name."""
    import torch

    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else "no GPU"


def report(rows: list[Row], as_json: bool, seconds: float) -> None:
    """Print the table, and a line that counts."""
    if as_json:
        print(json.dumps(rows))
        return
    words = {True: "yes", False: "NO", None: "-"}
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for row in rows:
        print("| " + " | ".join([row["check"], row["result"], row["limit"], words[row["ok"]]]) + " |")
    bad, skipped = (sum(row["ok"] is kind for row in rows) for kind in (False, None))
    print(f"\n{card()}: {len(rows)} checks in {seconds:.0f} s, {bad} failed, {skipped} not possible here")


if __name__ == "__main__":
    sys.exit(main())
