"""Of tools/gpu_check.py: what one of several ranks checks. Ranks are processes that meet in a hub; no MPI is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import reduce
from multiprocessing.managers import BaseManager
from typing import Any

import numpy as np
import torch

import hvdlite.torch as hvd
from hvdlite import submission
from hvdlite.compressor import Compression, compressed_allreduce
from hvdlite.config import Config
from hvdlite.control.local import LocalControl, LocalGroup
from hvdlite.dataplane.gpus import Gpus
from hvdlite.dataplane.local import LocalPlane
from hvdlite.message import Collective, ReduceOp
from hvdlite.runtime import Runtime, use_as_default
from hvdlite.submission import Submission
from hvdlite.timeline.phase import Phase
from hvdlite.timeline.recorder import NullTimeline

Row = dict[str, Any]
NUM_STEPS = 20
DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int16", "int32", "int64")


class Hub(BaseManager):
    """Where the ranks' LocalGroup lives."""


def serve(size: int, key: bytes) -> Hub:
    """Start a hub in a process of its own; ``address`` tells where."""
    hub = Hub(("127.0.0.1", 0), key)
    Hub.register("group", _group, exposed=["exchange", "post", "collect", "abort"])
    hub.start(initializer=_groups.append, initargs=(LocalGroupOf(size),))
    return hub


class LocalGroupOf:
    """How the hub's process makes its group."""

    def __init__(self, size: int) -> None:
        self.size = size


_groups: list[Any] = []


def _group() -> LocalGroup:
    if isinstance(_groups[0], LocalGroupOf):
        _groups[0] = LocalGroup(_groups[0].size)
    group: LocalGroup = _groups[0]
    return group


class RemoteGroup:
    """A LocalGroup in another process."""

    def __init__(self, size: int, address: tuple[str, int], key: bytes) -> None:
        Hub.register("group", exposed=["exchange", "post", "collect", "abort"])
        hub = Hub(address, key)
        hub.connect()
        self.size, self._group = size, hub.group()  # type: ignore[attr-defined]
        self.job = key.hex()[:16]  # the same on every rank
        self.post, self.collect, self.abort = self._group.post, self._group.collect, self._group.abort

    def exchange(self, rank: int, value: Any, pause: Any = None) -> list[Any]:
        values: list[Any] = self._group.exchange(rank, value)
        return values

    def fold(self, rank: int, value: Any, function: Callable[[Any, Any], Any], pause: Any) -> Any:
        return reduce(function, self.exchange(rank, value))


class Notes(NullTimeline):
    """Keeps when buckets were executed."""

    is_recording = True

    def __init__(self) -> None:
        self.buckets: list[tuple[int, int]] = []

    def span(self, phase: Phase, name: str, start_ns: int, end_ns: int, *_: Any, **__: Any) -> None:
        if phase == Phase.BUCKET:
            self.buckets.append((start_ns, end_ns))


def start(rank: int, size: int, address: tuple[str, int], key: bytes, on_gpu: bool) -> tuple[Runtime, Notes, torch.device]:
    """Join the others; GPU tensors go over NCCL or not at all."""
    group: Any = RemoteGroup(size, address, key)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    config = Config(gpu_plane="nccl" if on_gpu else "auto", fusion_threshold_bytes=256 << 10,
                    explicit=frozenset(["fusion_threshold_bytes"]))
    notes = Notes()
    gpus = Gpus(config.gpu_plane, device.index or 0)
    runtime = Runtime(config, LocalControl(group, rank), LocalPlane(group, rank), notes, gpus)
    use_as_default(runtime.start())
    return runtime, notes, device


def collectives(runtime: Runtime, device: torch.device) -> Iterator[Row]:
    """Every collective and dtype, against closed forms."""
    n, r = hvd.size(), hvd.rank()
    wrong: list[str] = []

    def expect(what: str, got: torch.Tensor, values: Any) -> None:
        if got.device.type != device.type or got.double().tolist() != torch.as_tensor(values).double().tolist():
            wrong.append(what)

    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        for count in (0, 1, 5, 3001):
            base = torch.arange(count) % 7
            mine = (base + r).to(device, kind)
            expect(f"sum {dtype}", hvd.allreduce(mine, op=hvd.Sum, name=f"s{dtype}{count}"), n * base + n * (n - 1) // 2)
            expect(f"max {dtype}", hvd.allreduce(mine, op=hvd.Max, name=f"m{dtype}{count}"), base + n - 1)
            average = hvd.allreduce((2 * base).to(device, kind), name=f"a{dtype}{count}")
            expect(f"average {dtype}", average, 2 * base)
        rows = torch.full((r + 1, 2), r).to(device, kind)
        expect(f"allgather {dtype}", hvd.allgather(rows, name=f"g{dtype}"), [[k, k] for k in range(n) for _ in range(k + 1)])
        for root in range(n):
            expect(f"broadcast {dtype}", hvd.broadcast(rows[:1].clone(), root, name=f"b{dtype}{root}"), [[root, root]])
        sent = torch.tensor([10 * r + k for k in range(n)]).to(device, kind)
        expect(f"alltoall {dtype}", hvd.alltoall(sent, name=f"t{dtype}"), [10 * k + r for k in range(n)])
        scattered = hvd.reducescatter(torch.ones(n + 1, 2).to(device, kind), op=hvd.Sum, name=f"r{dtype}")
        expect(f"reducescatter {dtype}", scattered, torch.full((1 + (r == 0), 2), n))
    total = int(hvd.allreduce(torch.tensor([len(wrong)]), op=hvd.Sum, name="wrong")[0])
    yield dict(check=f"collectives, {n} ranks", result=f"{total} wrong {', '.join(sorted(set(wrong))[:3])}".strip(), limit="0",
               ok=total == 0)


def exchange(runtime: Runtime, device: torch.device) -> Iterator[Row]:
    """The 1-bit exchange of several steps, bitwise against the same on hosts, with ranks as threads of this process."""
    n, r, sizes = hvd.size(), hvd.rank(), (0, 1, 513, 100_003)

    def gradient(rank: int, step: int, size: int) -> np.ndarray:
        return np.random.default_rng([rank, step, size]).standard_normal(size).astype(np.float32)

    def run(on: Runtime, rank: int, make: Callable[[np.ndarray], Any], read: Callable[[Any], np.ndarray]) -> list[np.ndarray]:
        found = []
        for step in range(4):
            tensors = [make(gradient(rank, step, size)) for size in sizes]
            call = Submission(Collective.ALLREDUCE, tensors, is_group=True, name="one bit", runtime=on)
            made = compressed_allreduce(call, Compression.quantized(schedule="two_shot"), in_place=False, average=None,
                                        op=ReduceOp.Average, prescale_factor=1.0, postscale_factor=1.0).wait(60)
            found += [read(one) for one in made]
        return found + [one.copy() for _, one, _ in on.residuals.items(0, "one bit")]

    mine = run(runtime, r, lambda values: torch.from_numpy(values).to(device), lambda one: one.cpu().numpy())
    group, expected = LocalGroup(n), [[]] * n
    hosts = [Runtime.local(group, rank, Config(heartbeat_ms=5)).start() for rank in range(n)]

    def on_host(rank: int) -> None:
        expected[rank] = run(hosts[rank], rank, np.array, np.asarray)

    threads = [threading.Thread(target=on_host, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in hosts:
        one.background.leave("compared", failed=False)
    differing = sum(int((one.view(np.uint32) != other.view(np.uint32)).sum())
                    for one, other in zip(mine, expected[r], strict=True))
    total = int(hvd.allreduce(torch.tensor([differing]), op=hvd.Sum, name="differing")[0])
    yield dict(check=f"1-bit exchange, {n} ranks, against hosts", result=f"{total} values differ", limit="0", ok=total == 0)


def training(notes: Notes, device: torch.device) -> Iterator[Row]:
    """Steps of an MLP, against one process with the whole batch; and whether buckets leave before backward is over."""
    n, r, batch = hvd.size(), hvd.rank(), 64

    def model() -> Any:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
        return torch.nn.Sequential(*layers, torch.nn.Linear(512, 10)).to(device)

    def step(network: Any, optimizer: Any, inputs: torch.Tensor, labels: torch.Tensor, *, is_timed: bool = False) -> bool:
        """Whether a bucket left within backward; on a GPU that lasts until its kernels have run."""
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(inputs), labels)
        started = time.monotonic_ns()
        loss.backward()
        if is_timed and device.type == "cuda":
            torch.cuda.synchronize(device)
        ended = time.monotonic_ns()
        optimizer.step()
        return any(started < begun < ended for begun, _ in notes.buckets)

    generator = torch.Generator().manual_seed(1)
    alone, ours = model(), model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.05, momentum=0.9), ours.named_parameters())
    for _ in range(NUM_STEPS):
        inputs = torch.randn(n * batch, 512, generator=generator).to(device)
        labels = torch.randint(10, (n * batch,), generator=generator).to(device)
        step(alone, plain, inputs, labels)
        mine = slice(r * batch, (r + 1) * batch)
        step(ours, wrapped, inputs[mine], labels[mine])
    worst = max(float((one - other).abs().max()) for one, other in zip(alone.parameters(), ours.parameters(), strict=True))
    worst = float(hvd.allreduce(torch.tensor([worst]), op=hvd.Max, name="worst")[0])
    yield dict(check=f"training, {NUM_STEPS} steps, {n} ranks", result=f"parameters differ by {worst:.1e}", limit="1e-4",
               ok=worst <= 1e-4)
    if device.type == "cuda":  # ranks that share a processor tell nothing
        inputs, labels = torch.randn(1 << 14, 512, device=device), torch.randint(10, (1 << 14,), device=device)
        early = sum(step(ours, wrapped, inputs, labels, is_timed=True) for _ in range(NUM_STEPS))
        yield dict(check="overlap: steps with a bucket on its way before backward is over", result=f"{early} of {NUM_STEPS}",
                   limit=f">= {NUM_STEPS // 2}", ok=early >= NUM_STEPS // 2)


def run(what: str, rank: int, size: int, address: tuple[str, int], key: bytes, on_gpu: bool) -> list[Row]:
    """Check things, named with commas between, as one of the ranks; the rows are the same on all."""
    runtime, notes, device = start(rank, size, address, key, on_gpu)
    checks = {"collectives": lambda: collectives(runtime, device), "exchange": lambda: exchange(runtime, device),
              "training": lambda: training(notes, device)}
    rows = [row for one in what.split(",") for row in checks[one]()]
    submission.barrier(Submission(Collective.BARRIER, None, runtime=runtime)).wait(60)
    hvd.shutdown()
    return rows
