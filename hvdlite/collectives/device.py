"""Buckets of GPU tensors: over NCCL where they lie, or through host memory (``staged``).

All that goes over NCCL is enqueued on the device's stream, nothing waits on this side. NCCL takes dense sums, extremes and
products of what it combines, and everything that only moves; where it does not join hosts it sums within them (``hierarchical``).
Quantised buckets have an exchange on the GPU over either. Integers with factors, int16, Adasum and ``Compression.auto`` go
through the host, which is said once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from hvdlite.collectives import allgather, alltoall, device_quantized, hierarchical, staged
from hvdlite.collectives.packing import packed, prescale
from hvdlite.collectives.scaling import unscaled_op
from hvdlite.collectives.workspace import Workspace
from hvdlite.dataplane import order
from hvdlite.dataplane.base import DataPlane, even_counts
from hvdlite.dataplane.device import Device, DeviceArray
from hvdlite.dataplane.gpus import Gpus
from hvdlite.dataplane.nccl import NcclPlane
from hvdlite.fusion import Bucket
from hvdlite.message import Collective, ReduceOp
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import Phase

Entries = Mapping[int, TensorEntry]
Execute = Callable[[Bucket, Entries, DataPlane, Workspace], None]


def execute(bucket: Bucket, entries: Entries, host: DataPlane, gpus: Gpus, workspace: Workspace, on_host: Execute) -> None:
    """Run one bucket; what its tensors' outputs hold is there in the order of the device's stream. ``on_host``: how it is run on
    the process set's plane for host memory."""
    way = gpus.way(bucket.request.key.process_set_id, host)
    device = gpus.opened
    if device is None:
        on_host(bucket, entries, host, workspace)  # the framework has made copies
        return
    for slot in {one.slot for one in bucket.segments}:
        order.begin(device, entries[slot])
    if way.by_hosts is not None and _is_dense_allreduce(bucket) and _nccl_takes(bucket, way.by_hosts[0]):
        hierarchical.allreduce(bucket, _brought(bucket, entries, device), way.by_hosts, gpus, workspace)
        return
    if way.nccl is not None and _nccl_takes(bucket, way.nccl):
        run = _NCCL[bucket.request.key.collective]
        run(bucket, _brought(bucket, entries, device), way.nccl, gpus, workspace)
        return
    if way.nccl is not None:
        gpus.note(host, f"{_kind(bucket)} of GPU tensors go through host memory: over NCCL there is no such thing here")
    if way.in_segments and _is_quantized(bucket):
        levels = None if workspace.hierarchical == "off" else way.by_hosts
        device_quantized.execute(bucket, _brought(bucket, entries, device), host, levels, gpus, workspace)
    elif way.in_segments and staged.takes(bucket):
        staged.allreduce(bucket, _brought(bucket, entries, device), host, gpus, workspace)
    else:
        staged.whole(bucket, entries, host, device, workspace, on_host)


def _kind(bucket: Bucket) -> str:
    request = bucket.request
    if request.compressor != "none":
        return f"{request.compressor} exchanges"
    return f"{ReduceOp(request.op).name} of {bucket.dtype or request.dtypes[0]} in {request.key.collective}"


def _is_dense_allreduce(bucket: Bucket) -> bool:
    return bucket.request.key.collective == Collective.ALLREDUCE and bucket.request.compressor == "none"


def _is_quantized(bucket: Bucket) -> bool:
    """Whether it has an exchange on the GPU."""
    return bucket.request.compressor.startswith("quantized")


def _nccl_takes(bucket: Bucket, plane: NcclPlane) -> bool:
    """Told by the request alone, so all ranks agree."""
    request = bucket.request
    if request.key.collective not in (Collective.ALLREDUCE, Collective.REDUCESCATTER):
        return True
    factors = request.prescale != 1.0 or request.postscale != 1.0
    if request.compressor != "none":
        return _is_quantized(bucket)
    return (request.op != ReduceOp.Adasum
            and all(plane.combines(dtype) and ("float" in dtype or not factors) for dtype in (bucket.dtype and [bucket.dtype])
                    or request.dtypes))


def _brought(bucket: Bucket, entries: Entries, device: Device) -> Entries:
    """The entries, with a copy on the device of what stands in for a joined rank's tensors, and of second moments."""
    slots = {one.slot for one in bucket.segments}
    stand_ins = {slot for slot in slots if entries[slot].is_stand_in}
    with_moments = {slot for slot in slots if entries[slot].moments}
    if not stand_ins and not with_moments:
        return entries
    made = dict(entries)
    for slot in with_moments:
        made[slot] = replace(entries[slot], moments=tuple(
            one if isinstance(one, DeviceArray) else DeviceArray(device.upload(one), len(one), "float32")
            for one in entries[slot].moments))
    for slot in stand_ins:
        buffers = []
        for buffer in entries[slot].inputs:
            there = DeviceArray(device.upload(buffer.array), len(buffer.array), buffer.dtype)
            buffers.append(replace(buffer, array=there, known_address=there.address, on=device))
        made[slot] = replace(entries[slot], inputs=tuple(buffers), outputs=tuple(buffers))
    return made


def _allreduce(bucket: Bucket, entries: Entries, plane: NcclPlane, gpus: Gpus, workspace: Workspace) -> None:
    request, timeline = bucket.request, workspace.timeline
    if request.compressor != "none":
        # Hosts of several ranks sum inside first, unless that is switched off.
        levels = None if workspace.hierarchical == "off" else gpus.levels(request.key.process_set_id)
        device_quantized.execute(bucket, entries, plane, levels, gpus, workspace)
        return
    with timeline.timed(Phase.MEMCPY_IN_FUSION_BUFFER, bucket.label, bucket.num_bytes):
        values, unpack = packed(bucket, entries, gpus)
        prescale(bucket, entries, values, gpus)
    with timeline.timed(Phase.NCCL_ALLREDUCE, bucket.label, bucket.num_bytes):
        _combine(plane, values, request.op, lambda op: plane.allreduce(values, values, op), values, request.postscale)
    with timeline.timed(Phase.MEMCPY_OUT_FUSION_BUFFER, bucket.label, bucket.num_bytes):
        unpack()


def _combine(
    plane: NcclPlane, source: DeviceArray, asked: int, run: Callable[[ReduceOp], None], result: DeviceArray, factor: float
) -> None:
    """Run a combining call, with averages and factors as NCCL or a kernel makes them."""
    from hvdlite.compression import codec_cuda

    op, divisor = unscaled_op(asked, plane.size)
    if divisor > 1 and plane.averages(source.dtype):
        op, divisor = ReduceOp.Average, 1
    run(op)
    if "float" in source.dtype:
        codec_cuda.scale(plane.device, result.address, len(result), source.dtype, factor / divisor)
    else:
        codec_cuda.divide(plane.device, result.address, len(result), source.dtype, divisor)


def _reducescatter(bucket: Bucket, entries: Entries, plane: NcclPlane, gpus: Gpus, workspace: Workspace) -> None:
    from hvdlite.compression import codec_cuda

    entry = entries[bucket.segments[0].slot]
    assert entry.allocate is not None
    request, outputs = entry.request, []
    for index, source in enumerate(entry.inputs):
        rows = even_counts(source.shape[0], plane.size)
        target = entry.allocate(index, (rows[plane.rank], *source.shape[1:]))
        counts = [count * prod(source.shape[1:]) for count in rows]
        with workspace.timeline.timed(Phase.NCCL_REDUCESCATTER, bucket.label, source.array.nbytes):
            values = source.array
            if request.prescale != 1.0:
                values = gpus.scratch(values.nbytes).as_dtype(source.dtype)
                plane.device.copy(values.address, source.array.address, values.nbytes)
                codec_cuda.scale(plane.device, values.address, len(values), source.dtype, request.prescale)

            def run(op: ReduceOp, values: DeviceArray = values, result: DeviceArray = target.array,
                    counts: list[int] = counts) -> None:
                plane.reducescatter(values, result, counts, op)

            _combine(plane, values, request.op, run, target.array, request.postscale)
        outputs.append(target)
    entry.outputs = tuple(outputs)


def _allgather(bucket: Bucket, entries: Entries, plane: NcclPlane, gpus: Gpus, workspace: Workspace) -> None:
    allgather.execute(bucket, entries, plane, workspace, Phase.NCCL_ALLGATHER)


def _broadcast(bucket: Bucket, entries: Entries, plane: NcclPlane, gpus: Gpus, workspace: Workspace) -> None:
    entry = entries[bucket.segments[0].slot]
    for source, target in zip(entry.inputs, entry.outputs, strict=True):
        if plane.rank == entry.root_in_set and target is not source:
            plane.device.copy(target.address, source.address, source.array.nbytes)
        with workspace.timeline.timed(Phase.NCCL_BCAST, bucket.label, target.array.nbytes):
            plane.broadcast(target.array, entry.root_in_set)


def _alltoall(bucket: Bucket, entries: Entries, plane: NcclPlane, gpus: Gpus, workspace: Workspace) -> None:
    alltoall.execute(bucket, entries, plane, workspace, Phase.NCCL_ALLTOALL)


_NCCL: dict[str, Callable[[Bucket, Entries, NcclPlane, Gpus, Workspace], None]] = {
    Collective.ALLREDUCE: _allreduce, Collective.REDUCESCATTER: _reducescatter, Collective.ALLGATHER: _allgather,
    Collective.BROADCAST: _broadcast, Collective.ALLTOALL: _alltoall,
}
