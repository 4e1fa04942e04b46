"""What CUDA kernels ask of a warp: memory by address, shuffles, votes, exact products. Each with a twin for Numba's simulator.

On a GPU a kernel's variables are those of one lane of 32. In the simulator (``NUMBA_ENABLE_CUDASIM=1``) one simulated thread is a
whole warp, and a lane's variables are arrays of 32: what is written for a lane runs unchanged, a hundred times as fast as with a
thread per lane. So kernels branch only on what is equal in a warp, and choose between lanes' values by ``select``.

*Accesses*: ``load4`` and ``store4`` move four neighbouring elements of a lane in one instruction, 16 bytes of float32.
*Rounding*: ``multiply`` is never contracted with an addition; everything else of float32 is IEEE as it is.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from numba import config, cuda

IS_SIMULATED = bool(config.ENABLE_CUDASIM)
#: Threads of a simulated warp, and of a real one.
THREADS_PER_WARP = 1 if IS_SIMULATED else 32

#: How elements are named in ``load4`` and its like, and their bytes.
KINDS = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8}

_ALL = 0xFFFFFFFF
#: Bytes of shared memory for each warp, a group of float32, and warps of a block.
STAGE_BYTES, WARPS_PER_BLOCK = 2048, 8

if IS_SIMULATED:
    _LANES = np.arange(32, dtype=np.int64)

    def _memory(address: int, length: int, dtype: Any) -> np.ndarray:
        kind = np.dtype(dtype)
        return np.ctypeslib.as_array((ctypes.c_uint8 * (length * kind.itemsize)).from_address(int(address))).view(kind)

    def lane_index() -> Any:
        return _LANES

    def num_warps(num_threads: int) -> int:
        """Of the grid, given its threads."""
        return int(num_threads)

    def select(condition: Any, yes: Any, no: Any) -> Any:
        return np.where(condition, yes, no)

    def from_lane_xor(value: Any, mask: int) -> Any:
        return value[_LANES ^ mask]

    def fresh(value: Any) -> Any:
        return value

    def from_lane(value: Any, lane: int) -> Any:
        return value[lane]

    _stages = threading.local()

    def sync_warp() -> None:
        pass

    def stage4(place: int, a: Any, b: Any, c: Any, d: Any) -> None:
        """Four neighbours of each lane to the warp's shared memory. ``place``: bytes."""
        if not hasattr(_stages, "memory"):
            _stages.memory = np.empty(512, np.float32)
        _stages.memory[place // 4 : place // 4 + 128] = np.stack(np.broadcast_arrays(a, b, c, d), axis=1).reshape(-1)

    def staged(place: int) -> Any:
        """What was staged, neighbours in neighbouring lanes. ``place``: bytes."""
        return _stages.memory[place // 4 : place // 4 + 32].copy()

    def unstage4(place: int) -> Any:
        """What the lane itself staged there."""
        four = _stages.memory[place // 4 : place // 4 + 128].reshape(32, 4).copy()
        return four[:, 0], four[:, 1], four[:, 2], four[:, 3]

    def uniform(value: Any) -> Any:
        """What all lanes hold alike, to branch on."""
        return value if np.isscalar(value) else value[0]

    def ballot(condition: Any) -> Any:
        """A word with each lane's condition in the lane's bit."""
        return np.uint32((np.broadcast_to(condition, 32).astype(np.uint64) << _LANES.astype(np.uint64)).sum())

    def all_lanes(condition: Any) -> bool:
        return bool(np.all(condition))

    def multiply(a: Any, b: Any) -> Any:
        return np.float32(a) * np.float32(b) if np.ndim(a) == np.ndim(b) == 0 else a * b

    def scaled_by_double(value: Any, factor: float) -> Any:
        return np.float32(np.float64(value) * np.float64(factor))

    def is_finite(value: Any) -> Any:
        return np.isfinite(value)

    def square_root(value: Any) -> Any:
        return np.sqrt(np.float32(value)) if np.ndim(value) == 0 else np.sqrt(value)

    def to_float(value: Any) -> Any:
        return np.float32(value) if np.ndim(value) == 0 else value.astype(np.float32)

    def to_index(value: Any) -> Any:
        """Toward zero; NaN: anything."""
        return np.nan_to_num(value, nan=0.0).astype(np.uint32)

    def to_int(value: Any) -> Any:
        return int(value)

    def to_lane_int(value: Any) -> Any:
        return value

    def to_word(value: Any) -> Any:
        return np.asarray(value).astype(np.uint32)

    def load_int64(address: int) -> int:
        return int(_memory(address, 1, np.int64)[0])

    def load_float(address: int) -> Any:
        return _memory(address, 1, np.float32)[0]

    def store_float(address: int, value: Any) -> None:
        _memory(address, 1, np.float32)[0] = value

    def store_int32(address: int, value: int) -> None:
        _memory(address, 1, np.int32)[0] = value

    def load_word(address: Any) -> Any:
        return np.array([_memory(one, 1, np.uint32)[0] for one in address])

    def store_word(address: Any, word: Any, condition: Any) -> None:
        for one, value, stores in zip(address, np.broadcast_to(word, 32), np.broadcast_to(condition, 32), strict=True):
            if stores:
                _memory(one, 1, np.uint32)[0] = value

    def _widened(values: np.ndarray, kind: str) -> np.ndarray:
        if kind == "bfloat16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)

    def _narrowed(values: np.ndarray, kind: str) -> np.ndarray:
        if kind == "bfloat16":
            bits = values.view(np.uint32)
            return np.where(np.isnan(values), bits >> 16, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return values.astype(kind)

    def _stored(kind: str) -> str:
        return "uint16" if kind == "bfloat16" else kind

    def _loading(kind: str) -> Any:
        def load4(address: Any) -> Any:
            four = _widened(_memory(address[0], 128, _stored(kind)), kind).reshape(32, 4)
            return four[:, 0], four[:, 1], four[:, 2], four[:, 3]

        return load4

    def _loading_some(kind: str) -> Any:
        def load4_some(address: Any, left: Any) -> Any:
            whole = np.zeros(128, np.float32)
            count = int(min(128, max(0, left[0])))
            whole[:count] = _widened(_memory(address[0], count, _stored(kind)), kind)
            four = whole.reshape(32, 4)
            return four[:, 0], four[:, 1], four[:, 2], four[:, 3]

        return load4_some

    def _storing_some(kind: str) -> Any:
        def store4_some(address: Any, left: Any, a: Any, b: Any, c: Any, d: Any) -> None:
            count = int(min(128, max(0, left[0])))
            values = np.stack(np.broadcast_arrays(a, b, c, d), axis=1).astype(np.float32).reshape(-1)
            _memory(address[0], count, _stored(kind))[:] = _narrowed(values[:count], kind)

        return store4_some

    def _storing(kind: str) -> Any:
        some = _storing_some(kind)

        def store4(address: Any, a: Any, b: Any, c: Any, d: Any) -> None:
            some(address, 128 - 4 * _LANES, a, b, c, d)

        return store4

    def copy16(target: Any, source: Any) -> None:
        _memory(target[0], 512, np.uint8)[:] = _memory(source[0], 512, np.uint8)

    def copy_bytes(target: Any, source: Any, left: Any) -> None:
        count = int(min(32, max(0, left[0])))
        _memory(target[0], count, np.uint8)[:] = _memory(source[0], count, np.uint8)

    def scale_double(address: Any, left: Any, factor: float) -> None:
        values = _memory(address[0], int(min(32, max(0, left[0]))), np.float64)
        values *= factor

    def _dividing(kind: str) -> Any:
        def divide_one(address: Any, left: Any, divisor: int) -> None:
            values = _memory(address[0], int(min(32, max(0, left[0]))), kind)
            values[:] = np.trunc(values.astype(np.longdouble) / divisor).astype(kind)

        return divide_one

    def device_function(function: Any) -> Any:
        return function
else:
    from llvmlite import ir
    from numba import types
    from numba.cuda import libdevice

    try:  # numba-cuda
        from numba.cuda.extending import intrinsic
    except ImportError:  # the copy that Numba itself had
        from numba.core.extending import intrinsic

    _F, _I64, _U32 = types.float32, types.int64, types.uint32
    _TYPES = {"float32": ir.FloatType(), "float64": ir.DoubleType(), "float16": ir.HalfType(), "bfloat16": ir.IntType(16)}
    _INT32 = ir.IntType(32)

    def device_function(function: Any) -> Any:
        return cuda.jit(device=True)(function)

    @device_function
    def lane_index():  # type: ignore[no-untyped-def]
        return np.int32(cuda.threadIdx.x & 31)

    @intrinsic
    def select(typing_context, condition, yes, no):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return builder.select(context.cast(builder, arguments[0], signature.args[0], types.boolean), *arguments[1:])

        kind = types.float32 if types.float32 in (yes, no) else types.uint32 if types.uint32 in (yes, no) else types.int64
        return kind(types.boolean, kind, kind), generate

    @device_function
    def from_lane_xor(value, mask):  # type: ignore[no-untyped-def]
        return cuda.shfl_xor_sync(_ALL, value, mask)

    @intrinsic
    def fresh(typing_context, value):  # type: ignore[no-untyped-def]
        """The value, of which no compiler knows that it stays: what follows from it is not kept in registers over the loop."""
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            kind = ir.FunctionType(_INT32, [_INT32])
            return builder.call(ir.InlineAsm(kind, "mov.b32 $0, $1;", "=r,r", side_effect=True), arguments)

        return types.int32(types.int32), generate

    @intrinsic
    def num_warps(typing_context, num_threads):  # type: ignore[no-untyped-def]
        """Of the grid, asked for anew each time: given by ``num_threads`` it would be kept in a register over the loop."""
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            blocks = builder.call(ir.InlineAsm(ir.FunctionType(_INT32, []), "mov.u32 $0, %nctaid.x;", "=r", side_effect=True), [])
            return builder.mul(blocks, _INT32(WARPS_PER_BLOCK))

        return types.int32(types.int64), generate

    @device_function
    def from_lane(value, lane):  # type: ignore[no-untyped-def]
        return cuda.shfl_sync(_ALL, value, lane)

    @device_function
    def uniform(value):  # type: ignore[no-untyped-def]
        return value

    def _stage_of(builder: Any) -> Any:
        """The block's shared memory, one and the same in all of a kernel."""
        name, memory = "hvdlite_stage", ir.ArrayType(ir.IntType(8), WARPS_PER_BLOCK * STAGE_BYTES)
        known = builder.module.globals.get(name)
        if known is None:
            known = ir.GlobalVariable(builder.module, memory, name, addrspace=3)
            known.linkage, known.align = "internal", 16
            known.initializer = ir.Constant(memory, ir.Undefined)
        return known

    @intrinsic
    def sync_warp(typing_context):  # type: ignore[no-untyped-def]
        """What lanes staged before is there for all afterwards; nothing read before is known any more."""
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            # The address as an operand: else LLVM holds that nobody but this lane changes the memory. Convergent: else LLVM may
            # move it to where only some of the warp's lanes come by.
            kind, stage = ir.FunctionType(ir.VoidType(), [ir.IntType(64)]), _stage_of(builder)
            barrier = ir.InlineAsm(kind, "bar.warp.sync 0xffffffff;", "l,~{memory}", side_effect=True)
            builder.call(barrier, [builder.ptrtoint(stage, ir.IntType(64))], attrs=("convergent",))
            return context.get_dummy_value()

        return types.void(), generate

    def _shared(builder: Any, item_bytes: int, place: Any, kind: Any) -> Any:
        """Where a lane's item of the warp's stage lies, ``place`` bytes from the first lane's."""
        thread = builder.call(builder.module.declare_intrinsic(
            "llvm.nvvm.read.ptx.sreg.tid.x", (), ir.FunctionType(_INT32, [])), [])
        lane = builder.and_(thread, _INT32(31))
        at = builder.add(builder.mul(builder.lshr(thread, _INT32(5)), _INT32(STAGE_BYTES)), builder.mul(lane, _INT32(item_bytes)))
        at = builder.add(at, builder.trunc(place, _INT32))
        return builder.bitcast(builder.gep(_stage_of(builder), [_INT32(0), at]), kind.as_pointer(3))

    @intrinsic
    def stage4(typing_context, place, a, b, c, d):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            vector = ir.VectorType(ir.FloatType(), 4)
            value = ir.Constant(vector, ir.Undefined)
            for i in range(4):
                value = builder.insert_element(value, arguments[1 + i], _INT32(i))
            builder.store(value, _shared(builder, 16, arguments[0], vector)).align = 16
            return context.get_dummy_value()

        return types.void(_I64, _F, _F, _F, _F), generate

    @intrinsic
    def staged(typing_context, place):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            loaded = builder.load(_shared(builder, 4, arguments[0], ir.FloatType()))
            loaded.align = 4
            return loaded

        return _F(_I64), generate

    @intrinsic
    def unstage4(typing_context, place):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            loaded = builder.load(_shared(builder, 16, arguments[0], ir.VectorType(ir.FloatType(), 4)))
            loaded.align = 16
            items = [builder.extract_element(loaded, _INT32(i)) for i in range(4)]
            return context.make_tuple(builder, signature.return_type, items)

        return types.UniTuple(_F, 4)(_I64), generate

    @device_function
    def ballot(condition):  # type: ignore[no-untyped-def]
        return np.uint32(cuda.ballot_sync(_ALL, condition))

    @device_function
    def all_lanes(condition):  # type: ignore[no-untyped-def]
        return cuda.all_sync(_ALL, condition)

    @device_function
    def multiply(a, b):  # type: ignore[no-untyped-def]
        return libdevice.fmul_rn(a, b)

    @device_function
    def scaled_by_double(value, factor):  # type: ignore[no-untyped-def]
        return np.float32(np.float64(value) * factor)

    @device_function
    def is_finite(value):  # type: ignore[no-untyped-def]
        return abs(value) < np.float32(np.inf)

    @device_function
    def square_root(value):  # type: ignore[no-untyped-def]
        return libdevice.fsqrt_rn(value)

    @device_function
    def to_float(value):  # type: ignore[no-untyped-def]
        return np.float32(value)

    @device_function
    def to_index(value):  # type: ignore[no-untyped-def]
        return np.uint32(libdevice.float2uint_rz(value))

    @device_function
    def to_int(value):  # type: ignore[no-untyped-def]
        return np.int32(value)

    to_lane_int = to_int

    @device_function
    def to_word(value):  # type: ignore[no-untyped-def]
        return np.uint32(value)

    def _pointer(builder: Any, address: Any, kind: Any) -> Any:
        return builder.inttoptr(address, kind.as_pointer(1))  # global memory

    def _loader(kind: Any, result: Any) -> Any:
        @intrinsic
        def load(typing_context, address):  # type: ignore[no-untyped-def]
            def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
                return builder.load(_pointer(builder, arguments[0], kind))

            return result(_I64), generate

        return load

    def _storer(kind: Any, given: Any) -> Any:
        @intrinsic
        def store(typing_context, address, value):  # type: ignore[no-untyped-def]
            def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
                builder.store(arguments[1], _pointer(builder, arguments[0], kind))
                return context.get_dummy_value()

            return types.void(_I64, given), generate

        return store

    load_int64, load_float, load_word = (
        _loader(*one) for one in ((ir.IntType(64), _I64), (ir.FloatType(), _F), (_INT32, _U32)))
    _store_float, _store_int32, _store_word = (
        _storer(*one) for one in ((ir.FloatType(), _F), (_INT32, types.int32), (_INT32, _U32)))

    @device_function
    def store_float(address, value):  # type: ignore[no-untyped-def]
        """One lane stores for the warp."""
        if cuda.threadIdx.x & 31 == 0:
            _store_float(address, value)

    @device_function
    def store_int32(address, value):  # type: ignore[no-untyped-def]
        """One lane stores for the warp."""
        if cuda.threadIdx.x & 31 == 0:
            _store_int32(address, np.int32(value))

    @device_function
    def store_word(address, word, condition):  # type: ignore[no-untyped-def]
        if condition:
            _store_word(address, word)

    def _to_float32(builder: Any, value: Any, kind: str) -> Any:
        if kind == "bfloat16":
            return builder.bitcast(builder.shl(builder.zext(value, _INT32), _INT32(16)), ir.FloatType())
        if kind == "float16":
            return builder.fpext(value, ir.FloatType())
        return builder.fptrunc(value, ir.FloatType()) if kind == "float64" else value

    def _from_float32(builder: Any, value: Any, kind: str) -> Any:
        if kind == "float64":
            return builder.fpext(value, ir.DoubleType())
        is_nan = builder.fcmp_unordered("uno", value, value)
        if kind == "float16":  # the GPU's own NaN is 0x7FFF
            bits = builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
            return builder.bitcast(builder.select(is_nan, ir.IntType(16)(0x7E00), bits), ir.HalfType())
        if kind == "bfloat16":
            bits = builder.bitcast(value, _INT32)
            odd = builder.and_(builder.lshr(bits, _INT32(16)), _INT32(1))
            rounded = builder.lshr(builder.add(builder.add(bits, _INT32(0x7FFF)), odd), _INT32(16))
            return builder.trunc(builder.select(is_nan, builder.lshr(bits, _INT32(16)), rounded), ir.IntType(16))
        return value

    def _chunks(kind: str) -> tuple[int, int]:
        """Elements of one access, which is at most 16 bytes, and accesses for four."""
        return (2, 2) if kind == "float64" else (4, 1)

    def _loading(kind: str) -> Any:
        length, times = _chunks(kind)
        vector = ir.VectorType(_TYPES[kind], length)

        @intrinsic
        def load4(typing_context, address):  # type: ignore[no-untyped-def]
            def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
                items = []
                for number in range(times):
                    at = builder.add(arguments[0], ir.IntType(64)(number * 16))
                    loaded = builder.load(_pointer(builder, at, vector))
                    loaded.align = length * KINDS[kind]
                    items += [_to_float32(builder, builder.extract_element(loaded, _INT32(i)), kind) for i in range(length)]
                return context.make_tuple(builder, signature.return_type, items)

            return types.UniTuple(_F, 4)(_I64), generate

        return load4

    def _storing(kind: str) -> Any:
        length, times = _chunks(kind)
        vector = ir.VectorType(_TYPES[kind], length)

        @intrinsic
        def store4(typing_context, address, a, b, c, d):  # type: ignore[no-untyped-def]
            def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
                for number in range(times):
                    at = builder.add(arguments[0], ir.IntType(64)(number * 16))
                    value = ir.Constant(vector, ir.Undefined)
                    for i in range(length):
                        one = _from_float32(builder, arguments[1 + number * length + i], kind)
                        value = builder.insert_element(value, one, _INT32(i))
                    builder.store(value, _pointer(builder, at, vector)).align = length * KINDS[kind]
                return context.get_dummy_value()

            return types.void(_I64, _F, _F, _F, _F), generate

        return store4

    def _element_loader(kind: str) -> Any:
        @intrinsic
        def load(typing_context, address):  # type: ignore[no-untyped-def]
            def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
                return _to_float32(builder, builder.load(_pointer(builder, arguments[0], _TYPES[kind])), kind)

            return _F(_I64), generate

        return load

    def _element_storer(kind: str) -> Any:
        @intrinsic
        def store(typing_context, address, value):  # type: ignore[no-untyped-def]
            def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
                builder.store(_from_float32(builder, arguments[1], kind), _pointer(builder, arguments[0], _TYPES[kind]))
                return context.get_dummy_value()

            return types.void(_I64, _F), generate

        return store

    def _loading_some(kind: str) -> Any:
        load, item = _element_loader(kind), KINDS[kind]

        @device_function
        def load4_some(address, left):  # type: ignore[no-untyped-def]
            a = b = c = d = np.float32(0)
            if left > 0:
                a = load(address)
            if left > 1:
                b = load(address + item)
            if left > 2:
                c = load(address + 2 * item)
            if left > 3:
                d = load(address + 3 * item)
            return a, b, c, d

        return load4_some

    def _storing_some(kind: str) -> Any:
        store, item = _element_storer(kind), KINDS[kind]

        @device_function
        def store4_some(address, left, a, b, c, d):  # type: ignore[no-untyped-def]
            if left > 0:
                store(address, a)
            if left > 1:
                store(address + item, b)
            if left > 2:
                store(address + 2 * item, c)
            if left > 3:
                store(address + 3 * item, d)

        return store4_some

    @intrinsic
    def copy16(typing_context, target, source):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            vector = ir.VectorType(_INT32, 4)
            value = builder.load(_pointer(builder, arguments[1], vector))
            value.align = 16
            builder.store(value, _pointer(builder, arguments[0], vector)).align = 16
            return context.get_dummy_value()

        return types.void(_I64, _I64), generate

    _load_byte, _store_byte = _loader(ir.IntType(8), types.uint8), _storer(ir.IntType(8), types.uint8)

    @device_function
    def copy_bytes(target, source, left):  # type: ignore[no-untyped-def]
        """One byte of each lane."""
        if left > 0:
            _store_byte(target, _load_byte(source))

    @intrinsic
    def _scale_double(typing_context, address, factor):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            place = _pointer(builder, arguments[0], ir.DoubleType())
            builder.store(builder.fmul(builder.load(place), arguments[1]), place)
            return context.get_dummy_value()

        return types.void(_I64, types.float64), generate

    @device_function
    def scale_double(address, left, factor):  # type: ignore[no-untyped-def]
        if left > 0:
            _scale_double(address, factor)

    def _dividing(kind: str) -> Any:
        integer = ir.IntType(8 * KINDS[kind])

        @intrinsic
        def divide(typing_context, address, divisor):  # type: ignore[no-untyped-def]
            def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
                place = _pointer(builder, arguments[0], integer)
                wide = ir.IntType(64)
                extend, by = (builder.zext, builder.udiv) if kind.startswith("u") else (builder.sext, builder.sdiv)
                value = builder.load(place)
                value = value if integer == wide else extend(value, wide)
                quotient = by(value, arguments[1])
                builder.store(quotient if integer == wide else builder.trunc(quotient, integer), place)
                return context.get_dummy_value()

            return types.void(_I64, _I64), generate

        @device_function
        def divide_one(address, left, divisor):  # type: ignore[no-untyped-def]
            if left > 0:
                divide(address, divisor)

        return divide_one


load4 = {kind: _loading(kind) for kind in ("float32", "float64", "float16", "bfloat16")}
load4_some = {kind: _loading_some(kind) for kind in load4}
store4 = {kind: _storing(kind) for kind in load4}
store4_some = {kind: _storing_some(kind) for kind in load4}
divide_one = {kind: _dividing(kind) for kind in KINDS if "int" in kind}
