"""The quantised allreduce of a bucket of GPU tensors: over NCCL, through pinned memory, or between hosts.

Hosts of several ranks: as in ``quantized``, every tensor is cut for the ranks of a host, in whole groups; NCCL sums each rank's
piece within the host, it is exchanged with the ranks of other hosts that have the same piece, over NCCL or through pinned memory,
and NCCL hands the results out.
Done wherever hosts hold equally many ranks, more than one, and ``hierarchical_quantized`` is not off: what joins a host's GPUs is
taken to be much faster than a network, nothing is measured. The schedule ``auto`` is two_shot here.

*Differs* from hosts: sums within a host are NCCL's, of 16-bit floats rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from hvdlite.collectives import quantized
from hvdlite.collectives.workspace import Workspace
from hvdlite.compression.exchange import ExchangeSpec
from hvdlite.dataplane.base import DataPlane
from hvdlite.dataplane.device import Device, DeviceArray
from hvdlite.dataplane.gpus import Gpus
from hvdlite.dataplane.nccl import NcclPlane
from hvdlite.dataplane.quantized import Tensors
from hvdlite.fusion import Bucket
from hvdlite.message import ReduceOp
from hvdlite.tensor_queue import TensorEntry
from hvdlite.timeline.phase import Phase

Levels = tuple[NcclPlane, NcclPlane | DataPlane]


def execute(
    bucket: Bucket, entries: Mapping[int, TensorEntry], plane: DataPlane | NcclPlane, levels: Levels | None, gpus: Gpus,
    workspace: Workspace,
) -> None:
    """Run one bucket over ``plane``, or over the planes within and between hosts, ``levels``."""
    from hvdlite.dataplane import quantized_device

    request, device = bucket.request, gpus.opened
    assert device is not None
    factor = request.prescale * request.postscale / (plane.size if request.op == ReduceOp.Average else 1)
    if plane.size == 1:
        _scale_alone(bucket, entries, device, factor)
        return
    exchange = ExchangeSpec.parse(request.compressor)
    if exchange.schedule == "auto":
        exchange = replace(exchange, schedule="two_shot")
    keys, tensors = quantized.find_tensors(bucket, entries, workspace, exchange, device)
    with workspace.timeline.timed(Phase.QUANTIZED_ALLREDUCE, bucket.label, bucket.num_bytes):
        if levels is not None:
            known = _by_hosts(levels, gpus, device, exchange, tensors, factor)
        elif isinstance(plane, NcclPlane):
            known = quantized_device.allreduce(plane, device, exchange, tensors, factor)
        else:
            known = quantized_device.allreduce_through_host(plane, device, exchange, tensors, factor)
    workspace.residuals.end({key: lambda index=index: bool(known()[index])  # type: ignore[misc]
                             for index, key in enumerate(keys) if key is not None})


def _scale_alone(bucket: Bucket, entries: Mapping[int, TensorEntry], device: Device, factor: float) -> None:
    """The result where there is one rank: nothing is quantised."""
    from hvdlite.compression import codec_cuda

    for one in bucket.segments:
        source, target = (some[one.tensor_index] for some in (entries[one.slot].inputs, entries[one.slot].outputs))
        if target.address != source.address:
            device.copy(target.address, source.address, source.array.nbytes)
        codec_cuda.scale(device, target.address, one.num_elements, bucket.dtype, factor)


def _by_hosts(
    levels: Levels, gpus: Gpus, device: Device, exchange: ExchangeSpec, tensors: Tensors, factor: float
) -> Callable[[], np.ndarray]:
    """Sum within hosts, exchange between them, hand out within hosts; as ``quantized_device.allreduce``."""
    from hvdlite.compression import codec_cuda
    from hvdlite.dataplane import quantized_device

    local, cross = levels
    cuts = quantized.cuts_of(tensors, local.size)
    pieces = cuts[:, 1:] - cuts[:, :-1]  # (tensors, ranks of the host), in elements
    counts = pieces.sum(axis=0).tolist()
    offsets = (cuts[:, :-1] * tensors.item_bytes).T.reshape(-1)
    sizes = np.ascontiguousarray(pieces.T).reshape(-1) * tensors.item_bytes
    places = np.cumsum(sizes) - sizes

    packed = device.allocate(int(sizes.sum())).as_dtype(tensors.dtype)
    mine = device.allocate(counts[local.rank] * tensors.item_bytes).as_dtype(tensors.dtype)
    sources, targets = (np.tile(one, local.size) + offsets for one in (tensors.sources, tensors.targets))
    codec_cuda.copy(device, sources.tolist(), (packed.address + places).tolist(), sizes.tolist())
    local.reducescatter(packed, mine, counts, ReduceOp.Sum)

    own, starts = pieces[:, local.rank], cuts[:, local.rank]
    at = mine.address + (np.cumsum(own) - own) * tensors.item_bytes

    def shifted(addresses: np.ndarray) -> np.ndarray:
        return np.where(addresses, addresses + 4 * starts, 0)

    part = replace(tensors, sizes=tuple(own.tolist()), sources=at, targets=at, residuals=shifted(tensors.residuals),
                   shadows=shifted(tensors.shadows), moments=shifted(tensors.moments))
    def agree(finite: DeviceArray) -> None:
        """A tensor is finite if it is on every rank of the host, each of which knows its piece."""
        local.allreduce(finite, finite, ReduceOp.Min)

    if isinstance(cross, NcclPlane):
        known = quantized_device.allreduce(cross, device, exchange, part, factor, agree=agree)
    else:
        gpus.wait(device.record())
        known = quantized_device.allreduce_through_host(cross, device, exchange, part, factor, agree)
    local.allgather(mine, packed, counts)
    codec_cuda.copy(device, (packed.address + places).tolist(), targets.tolist(), sizes.tolist())
    device.keep(packed, mine)
    return known
