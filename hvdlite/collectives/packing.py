"""Packing on a GPU: a bucket's tensors side by side, by one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvdlite.dataplane.device import DeviceArray
from hvdlite.dataplane.gpus import Gpus
from hvdlite.fusion import Bucket
from hvdlite.tensor_queue import TensorEntry


def packed(bucket: Bucket, entries: Mapping[int, TensorEntry], gpus: Gpus) -> tuple[DeviceArray, Callable[[], None]]:
    """The bucket's inputs as one array, and what brings it to the outputs; a tensor alone is its own output already."""
    from hvdlite.compression import codec_cuda

    device = gpus.opened
    assert device is not None
    inputs = [entries[one.slot].inputs[one.tensor_index] for one in bucket.segments]
    outputs = [entries[one.slot].outputs[one.tensor_index] for one in bucket.segments]
    if len(inputs) == 1:
        if inputs[0].address != outputs[0].address:
            device.copy(outputs[0].address, inputs[0].address, inputs[0].array.nbytes)
        return outputs[0].array, lambda: None
    sizes, places, _ = bucket.layout
    values = gpus.scratch(bucket.num_bytes).as_dtype(bucket.dtype)
    at = [values.address + int(place) for place in places]
    codec_cuda.copy(device, [one.address for one in inputs], at, sizes.tolist())
    return values, lambda: codec_cuda.copy(device, at, [one.address for one in outputs], sizes.tolist())
