"""The codec on GPUs: the functions of ``codec`` as CUDA kernels, bitwise the same words, scales, residuals and results.

All tensors of a segment in one launch, through a table of addresses in the GPU's memory; the grid is persistent. Everything is
enqueued on the device's communication stream and nothing waits. Residuals, shadows, words and scales lie at multiples of 16 bytes
(the device's allocations do, and so do whole groups within them); gradients anywhere.

*Bytes moved* for each element, with g bytes of a gradient's dtype and b bits; the count is ``bytes_moved``:
encode: g + 4 (residual) + 4 (shadow) + b / 8 + 4 / 512, and with a result g more, with moments 4;
each incoming message b / 8 + 4 / 512; decode: g + b / 8 + 4 / 512, with moments 4; pack: 2 g.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.compression import cuda_kernels
from hvdlite.compression.cuda_kernels import END, PACK_BYTES, TABLE_COLUMNS, VERDICT
from hvdlite.compression.rotation import GROUP
from hvdlite.compression.spec import (
    COUNT,
    FIRST,
    GRADIENT,
    ITEM_BYTES,
    MOMENT,
    NUM_COLUMNS,
    OUT,
    RESIDUAL,
    SHADOW,
    CodecSpec,
    check_pieces,
    check_table,
)
from hvdlite.dataplane.device import Device

#: Addresses of a message's words and scales.
Message = tuple[int, int]


class CudaCodec:
    """The codec's kernels on one device, which uploads tables and launches kernels. Never run on a GPU so far."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def encode_pieces(
        self, spec: CodecSpec, dtype: str, pieces: np.ndarray, incoming: Sequence[Message], own: Message, factor: float,
        verdicts: np.ndarray | None = None,
    ) -> None:
        """As ``codec.encode_pieces``. ``verdicts``: of each piece the address of an int32 that becomes 0 where a final scale is
        not finite, 0 for none. *Shapes*: pieces as there; verdicts (num_pieces,), int64."""
        table, num_groups = self._table(spec, pieces, verdicts)
        messages = self._device.upload(np.array(incoming, np.int64)) if incoming else 0
        kernel = cuda_kernels.kernel("encode", spec.bits, spec.scale, dtype, bool(pieces[:, MOMENT].any()))
        self._launch(kernel, table, pieces, num_groups, messages, len(incoming), *own, factor)

    def decode_pieces(
        self, spec: CodecSpec, dtype: str, pieces: np.ndarray, own: Message, factor: float, verdicts: np.ndarray | None = None
    ) -> None:
        """As ``codec.decode_pieces``; verdicts as in ``encode_pieces``."""
        table, num_groups = self._table(spec, pieces, verdicts)
        kernel = cuda_kernels.kernel("decode", spec.bits, spec.scale, dtype, bool(pieces[:, MOMENT].any()))
        self._launch(kernel, table, pieces, num_groups, *own, factor)

    def encode_rotated(self, spec: CodecSpec, pieces: np.ndarray, own: Message) -> None:
        """As ``codec.encode_rotated``, from GRADIENT to SHADOW."""
        table, num_groups = self._table(spec, pieces, None)
        kernel = cuda_kernels.kernel("encode", spec.bits, spec.scale, "float32", False, False)
        self._launch(kernel, table, pieces, num_groups, 0, 0, *own, 1.0)

    def decode(self, spec: CodecSpec, pieces: np.ndarray, own: Message, *, add: bool = False) -> None:
        """As ``codec.decode`` or ``codec.decode_add``, to OUT, which is float32 and padded."""
        table, num_groups = self._table(spec, pieces, None)
        kernel = cuda_kernels.kernel("decode_add" if add else "decode_within", spec.bits, spec.scale)
        self._launch(kernel, table, pieces, num_groups, *own)

    def rotate(self, spec: CodecSpec, dtype: str, pieces: np.ndarray) -> None:
        """As ``codec.rotate``, from GRADIENT and RESIDUAL to SHADOW."""
        table, num_groups = self._table(spec, pieces, None)
        self._launch(cuda_kernels.kernel("rotate", 1, spec.scale, dtype), table, pieces, num_groups)

    def rotate_back(self, spec: CodecSpec, dtype: str, pieces: np.ndarray) -> None:
        """As ``codec.rotate_back``, from RESIDUAL to OUT."""
        table, num_groups = self._table(spec, pieces, None)
        self._launch(cuda_kernels.kernel("rotate_back", 1, spec.scale, dtype), table, pieces, num_groups)

    def compile(self, spec: CodecSpec, dtype: str, has_moments: bool) -> None:
        """Compile what an exchange needs (seconds for each kernel, once in a process)."""
        for name in ("encode", "decode"):
            cuda_kernels.kernel(name, spec.bits, spec.scale, dtype, has_moments)

    def _table(self, spec: CodecSpec, pieces: np.ndarray, verdicts: np.ndarray | None) -> tuple[int, int]:
        check_table(pieces)
        check_pieces(spec, bool((pieces[:, [COUNT, FIRST]] < 0).any()), bool((pieces[:, MOMENT] != 0).any()))
        table = np.zeros((len(pieces), TABLE_COLUMNS), np.int64)
        table[:, :NUM_COLUMNS] = pieces
        table[:, END] = np.cumsum(-(-pieces[:, COUNT] // GROUP))
        if verdicts is not None:
            table[:, VERDICT] = verdicts
        num_groups = int(table[-1, END]) if len(table) else 0
        return (self._device.upload(table) if num_groups else 0), num_groups

    def _launch(self, kernel: Any, table: int, pieces: np.ndarray, num_groups: int, *arguments: Any) -> None:
        if num_groups:
            self._device.launch(kernel, num_groups, table, len(pieces), num_groups, *arguments)


def copy(device: Device, sources: Sequence[int], targets: Sequence[int], sizes_bytes: Sequence[int]) -> None:
    """Copy many pieces of memory in one launch: pack and unpack. Moves twice the bytes."""
    if not len(sizes_bytes):
        return
    table = np.zeros((len(sizes_bytes), 4), np.int64)
    table[:, 0], table[:, 1], table[:, 2] = sources, targets, sizes_bytes
    table[:, 3] = np.cumsum(-(-table[:, 2] // PACK_BYTES))
    num_steps = int(table[-1, 3])
    if num_steps:
        device.launch(cuda_kernels.kernel("pack"), num_steps, device.upload(table), len(table), num_steps)


def scale(device: Device, address: int, num_elements: int, dtype: str, factor: float) -> None:
    """Multiply floats in place; 16-bit ones in float32, rounded once. Moves twice the bytes."""
    if num_elements and factor != 1.0:
        device.launch(cuda_kernels.kernel("scale", dtype=dtype), -(-num_elements // 128), address, num_elements, factor)


def divide(device: Device, address: int, num_elements: int, dtype: str, divisor: int) -> None:
    """Divide integers in place, toward zero."""
    if num_elements and divisor != 1:
        device.launch(cuda_kernels.kernel("divide", dtype=dtype), -(-num_elements // 32), address, num_elements, divisor)


def bytes_moved(spec: CodecSpec, dtype: str, pieces: np.ndarray, num_incoming: int | None) -> int:
    """What a launch of ``encode_pieces``, with so many messages incoming, or with None of ``decode_pieces`` reads and writes."""
    groups = -(-pieces[:, COUNT] // GROUP)
    message = 4 * (spec.words_per_group + spec.scales_per_group) * groups
    item = ITEM_BYTES[dtype] * pieces[:, COUNT]
    total = message + (item + np.where(pieces[:, MOMENT] != 0, 4 * pieces[:, COUNT], 0)) * (pieces[:, OUT] != 0)
    if num_incoming is not None:
        total = message * (1 + num_incoming) + item * ((pieces[:, GRADIENT] != 0) * 1 + (pieces[:, OUT] != 0) * 1)
        total = total + 4 * GROUP * groups * ((pieces[:, RESIDUAL] != 0) * 1 + (pieces[:, SHADOW] != 0) * 1)
        total = total + np.where(pieces[:, MOMENT] != 0, 4 * pieces[:, COUNT], 0)
    return int(total.sum())
