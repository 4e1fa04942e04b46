"""Operations on rows of 32 lanes of which Numba's loops make no good vector code, as LLVM vectors of 8; and pointers.

Those of rows take addresses of float32 arrays and the index of a row's first element, unchecked. Measured on Zen 3: making
words and residuals of a group takes 38 ns so, 75 to 140 ns as loops. They compute what the loops would, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hvdlite.compression.rotation import LANES

#: Lanes per vector: an AVX register; other processors split or join them.
_WIDTH = 8
#: What a row must be aligned to, to be streamed: what NumPy's arrays are; aligned to 32, it took as long.
STREAM_BYTES = 16
_INT32 = ir.IntType(32)
_VECTOR = ir.VectorType(ir.FloatType(), _WIDTH)
_ZERO = ir.Constant(_VECTOR, [0.0] * _WIDTH)


def _pointer(builder: Any, address: Any, index: Any, offset: int) -> Any:
    first = builder.inttoptr(address, ir.FloatType().as_pointer())
    return builder.gep(first, [builder.add(index, ir.Constant(index.type, offset))])


def _splat(builder: Any, value: Any) -> Any:
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT32, _WIDTH), [0] * _WIDTH))


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()))
    value.align = 4
    return value


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, _VECTOR.as_pointer())).align = 4


def _stream(builder: Any, value: Any, pointer: Any) -> None:
    """Store past the caches, to an aligned address."""
    store = builder.store(value, builder.bitcast(pointer, _VECTOR.as_pointer()))
    store.align = STREAM_BYTES
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT32, 1)]))


def _chosen(builder: Any, word: Any, offset: int, low: Any, high: Any) -> Any:
    """``high`` where a bit of the word is set, else ``low``."""
    bits = builder.trunc(builder.lshr(word, ir.Constant(_INT32, offset)), ir.IntType(_WIDTH))
    return builder.select(builder.bitcast(bits, ir.VectorType(ir.IntType(1), _WIDTH)), high, low)


def _coding(write: Callable[[Any, Any, Any], None]) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rotated, residual, index, low, high = arguments
        below, above = _splat(builder, low), _splat(builder, high)
        word = ir.Constant(_INT32, 0)
        for offset in range(0, LANES, _WIDTH):
            value = _load(builder, _pointer(builder, rotated, index, offset))
            positive = builder.fcmp_ordered(">=", value, _ZERO)
            bits = builder.zext(builder.bitcast(positive, ir.IntType(_WIDTH)), _INT32)
            word = builder.or_(word, builder.shl(bits, ir.Constant(_INT32, offset)))
            left = builder.fsub(value, builder.select(positive, above, below))
            write(builder, left, _pointer(builder, residual, index, offset))
        return word

    return generate


@intrinsic
def code_row(typing_context: Any, rotated: Any, residual: Any, index: Any, low: Any, high: Any) -> Any:
    """The word of a row, bit = v >= 0; ``residual = v - (high or low)``. Both arrays at the same index."""
    return types.uint32(types.int64, types.int64, types.int64, types.float32, types.float32), _coding(_store)


@intrinsic
def code_row_streamed(typing_context: Any, rotated: Any, residual: Any, index: Any, low: Any, high: Any) -> Any:
    """``code_row``, the residual past the caches; it is aligned to ``STREAM_BYTES``. ``fence`` before others read it."""
    return types.uint32(types.int64, types.int64, types.int64, types.float32, types.float32), _coding(_stream)


@intrinsic
def fence(typing_context: Any) -> Any:
    """Order what was streamed before what follows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _decoding(finish: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, low, high, out, index = arguments
        below, above = _splat(builder, low), _splat(builder, high)
        for offset in range(0, LANES, _WIDTH):
            pointer = _pointer(builder, out, index, offset)
            _store(builder, finish(builder, _chosen(builder, word, offset, below, above), pointer), pointer)
        return context.get_dummy_value()

    return generate


@intrinsic
def decode_row(typing_context: Any, word: Any, low: Any, high: Any, out: Any, index: Any) -> Any:
    """Write ``high`` where a bit is set, else ``low``."""
    generate = _decoding(lambda builder, value, pointer: value)
    return types.void(types.uint32, types.float32, types.float32, types.int64, types.int64), generate


@intrinsic
def decode_add_row(typing_context: Any, word: Any, low: Any, high: Any, total: Any, index: Any) -> Any:
    """Add ``high`` where a bit is set, else ``low``."""
    generate = _decoding(lambda builder, value, pointer: builder.fadd(_load(builder, pointer), value))
    return types.void(types.uint32, types.float32, types.float32, types.int64, types.int64), generate


def _prefetching(write: int) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        how, keep, data = (ir.Constant(_INT32, value) for value in (write, 3, 1))
        builder.call(prefetch, [builder.inttoptr(arguments[0], byte), how, keep, data])
        return context.get_dummy_value()

    return generate


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for a cache line to read; it may lie anywhere."""
    return types.void(types.int64), _prefetching(0)


@intrinsic
def prefetch_to_write(typing_context: Any, address: Any) -> Any:
    """Ask for a cache line to write; it may lie anywhere."""
    return types.void(types.int64), _prefetching(1)


def _pointing(kind: Any) -> Any:
    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


#: Addresses as pointers: indexed as arrays are, without the counts of references that cost a kernel 100 ns per group.
to_float32, to_float64, to_uint16, to_uint32 = (
    _pointing(kind) for kind in (types.float32, types.float64, types.uint16, types.uint32)
)
