"""How well fusion filled its buckets, why each was closed, and what other settings would have done. Pure functions of a Job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdlite.fusion import compile_plan, num_bytes
from hvdlite.message import Collective, Key, Request
from hvdlite.timeline.bandwidth import Fit
from hvdlite.timeline.job import Job
from hvdlite.timeline.phase import REASONS, Phase

#: Thresholds that are tried, in bytes.
THRESHOLDS = tuple(1 << power for power in range(16, 27))
#: Cycle times that are tried, in ms.
CYCLES_MS = (0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True)
class FusionUse:
    """``fill``: the mean share of the threshold that packed buckets hold; ``reasons``: how many buckets were closed for what."""

    operations: int
    tensors_per_operation: float
    bytes_per_operation: float
    packed: int
    fill: float
    reasons: dict[str, int]
    threshold_bytes: int


@dataclass(frozen=True)
class WhatIf:
    """Another setting: operations of the whole recording, and the seconds that moving its data would take."""

    setting: str
    value: float
    operations: int
    seconds: float


def fusion_use(job: Job) -> FusionUse:
    """Look at the buckets of the first rank; they are the same on all."""
    records = job.ranks[0].of(Phase.BUCKET)
    threshold = int(job.settings.get("fusion_threshold_bytes", 0))
    reasons = Counter(REASONS[code] if code < len(REASONS) else "?" for code in records["detail"].tolist())
    packed = records[records["count"] > 1]
    sizes = packed["num_bytes"].astype(float)
    return FusionUse(
        len(records), float(records["count"].mean()) if len(records) else 0.0,
        float(records["num_bytes"].mean()) if len(records) else 0.0, len(packed),
        float(np.minimum(1.0, sizes / threshold).mean()) if len(packed) and threshold else 0.0,
        dict(reasons.most_common()), threshold)


def recorded_plans(job: Job) -> list[tuple[int, list[Request], int]]:
    """Every plan of the first rank: its number, its requests in order, and when the last of them was submitted."""
    plans: dict[int, list[tuple[int, Request, int]]] = {}
    known: dict[int, Request | None] = {}
    for plan, name, operation, start_ns in job.ranks[0].of(Phase.QUEUE)[["plan", "name", "operation", "start_ns"]].tolist():
        if name not in known:
            known[name] = _request(job, job.names[name])
        request = known[name]
        if request is not None:
            plans.setdefault(plan, []).append((operation, request, start_ns))
    return [(plan, [request for _, request, _ in sorted(own, key=lambda one: one[0])], max(one[2] for one in own))
            for plan, own in sorted(plans.items())]


def in_rounds(plans: Sequence[tuple[int, list[Request], int]]) -> list[tuple[int, list[Request], int]]:
    """The same with all buckets of an optimizer's step together, where the last of them was: each goes as soon as it is complete,
    with others or alone, but they are cut from one list of gradients."""
    found: list[tuple[int, list[Request], int]] = []
    rounds: dict[str, dict[int, Request]] = {}

    def close(owner: str, plan: int, at: int) -> None:
        own = rounds.pop(owner)
        found.append((plan, [own[number] for number in sorted(own)], at))

    for plan, requests, at in plans:
        others = []
        for request in requests:
            owner, _, number = request.key.name.rpartition(".")
            if request.key.collective != Collective.ALLREDUCE or not request.names or not number.isdecimal():
                others.append(request)
                continue
            if int(number) in rounds.get(owner, ()):
                close(owner, plan, at)
            rounds.setdefault(owner, {})[int(number)] = request
        if others:
            found.append((plan, others, at))
    for owner in list(rounds):
        close(owner, plans[-1][0], plans[-1][2])
    return found


def _request(job: Job, name: str) -> Request | None:
    for about in job.about.get(name, {}).values():
        shapes = tuple(tuple(shape) for shape in about["shapes"])
        return Request(Key(*about["key"]), tuple(about["dtypes"]), shapes, op=about["op"], root_rank=about["root"],
                       device=about["device"], compressor=about["compressor"], names=tuple(about["names"]))
    return None


def count_operations(plans: Sequence[Sequence[Request]], threshold_bytes: int) -> list[int]:
    """The bytes of every operation that these plans make under another threshold."""
    sizes: list[int] = []
    memory: dict[tuple[Request, ...], list[int]] = {}
    for requests in plans:
        key = tuple(requests)
        if key not in memory:
            plan = compile_plan(enumerate(_recut(requests, threshold_bytes)), threshold_bytes)
            memory[key] = [bucket.num_bytes for bucket in plan.buckets]
        sizes += memory[key]
    return sizes


def _recut(requests: Sequence[Request], threshold_bytes: int) -> list[Request]:
    """An optimizer's buckets, which are cut from the same list of gradients by the same threshold, cut by another one."""
    found: list[Request] = []
    owners: dict[str, list[tuple[str, tuple[int, ...], str, Request]]] = {}
    for request in requests:
        if request.key.collective != Collective.ALLREDUCE or not request.names:
            found.append(request)
            continue
        tensors = owners.setdefault(request.key.name.rpartition(".")[0], [])
        tensors += [(dtype, shape, name, request)
                    for dtype, shape, name in zip(request.dtypes, request.shapes, request.names, strict=True)]
    for owner, tensors in owners.items():
        groups: list[list[tuple[str, tuple[int, ...], str, Request]]] = []
        filled = 0
        for one in tensors:
            size = num_bytes(one[0], one[1])
            if not groups or filled + size > threshold_bytes or one[3].compressor != groups[-1][0][3].compressor:
                groups.append([])
                filled = 0
            groups[-1].append(one)
            filled += size
        for number, group in enumerate(groups):
            like = group[0][3]
            found.append(like._replace(
                key=like.key._replace(name=f"{owner}.{number}"), dtypes=tuple(one[0] for one in group),
                shapes=tuple(one[1] for one in group), names=tuple(one[2] for one in group)))
    return found


def what_if(job: Job, fits: Sequence[Fit]) -> list[WhatIf]:
    """Replay the recorded calls under other thresholds and cycle times; empty where no time can be told from sizes."""
    model = next((one for one in fits if one.phase == Phase.MPI_ALLREDUCE.name), None)
    plans = in_rounds(recorded_plans(job))
    if model is None or not plans:
        return []
    requests = [own for _, own, _ in plans]
    current = int(job.settings.get("fusion_threshold_bytes", 0))

    def tried(setting: str, value: float, plans: Sequence[Sequence[Request]], threshold: int) -> WhatIf:
        sizes = count_operations(plans, threshold)
        return WhatIf(setting, value, len(sizes), float(sum(model.seconds(size) for size in sizes)))

    found = [tried("fusion_threshold_bytes", value, requests, value) for value in sorted({*THRESHOLDS, current})]
    for cycle_ms in CYCLES_MS:
        merged: list[list[Request]] = []
        opened = -1 << 62
        for _, own, at in plans:
            free = all(len(one.shapes) == 1 and one.key.collective == Collective.ALLREDUCE for one in own)
            names = {one.key for one in merged[-1]} if merged else set()
            if merged and free and at - opened <= cycle_ms * 1e6 and not names & {one.key for one in own}:
                merged[-1] = merged[-1] + own
            else:
                merged.append(list(own))
                opened = at if free else -1 << 62
        one = tried("cycle_time_ms", cycle_ms, merged, current)
        found.append(WhatIf(one.setting, one.value, one.operations, one.seconds))
    return found
