"""Packing on a GPU: a bucket's tensors side by side, by one kernel; and their prescale."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvdlite.buffer import HALVES
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


def prescale(bucket: Bucket, entries: Mapping[int, TensorEntry], values: DeviceArray, gpus: Gpus) -> None:
    """Multiply what is packed, floats, by the bucket's prescale."""
    from hvdlite.compression import codec_cuda

    device, factor = gpus.opened, bucket.request.prescale
    assert device is not None
    if factor == 1.0:
        return
    for one in bucket.segments:
        # What changes nothing is not to be scaled; of 16-bit floats it is made to be.
        if not entries[one.slot].is_stand_in or bucket.dtype in HALVES:
            start = one.offset_bytes // values.itemsize if len(bucket.segments) > 1 else 0
            at = values[start : start + one.num_elements]
            codec_cuda.scale(device, at.address, len(at), bucket.dtype, factor)
