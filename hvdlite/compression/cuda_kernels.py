"""The codec's CUDA kernels, written out for each bits, scale and dtype: a warp per group, the sum order of the wire format.

*Layout*: lane ``8 q + m`` holds elements ``128 k + 4 lane + j`` of its group in ``v[4 k + j]`` (k and j from 0 to 3): four times
four neighbours, so that every access of float32 has 16 bytes. Such an element lies in row ``4 k + q`` and lane ``4 m + j`` of the
wire format; so butterflies between rows 1 and 2 apart are between lanes 8 and 16 apart, the others within registers. Sums read
the group from shared memory, 2 KiB for each warp, by wire lane and row: so no lane holds more than two times 16 values.

*Tables*: rows of ``spec``'s columns, then END, the groups of all pieces up to this one, and VERDICT, the address of an int32 that
becomes 0 where a final scale is not finite (0: none). A warp takes every n-th group, so one launch serves any number of tensors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda

from hvdlite.compression import warp
from hvdlite.compression.rotation import GROUP, LANES, ROWS, SIGNS
from hvdlite.compression.spec import (
    COUNT,
    FIRST,
    FLOOR,
    GRADIENT,
    ITEM_BYTES,
    LEVELS,
    LOWER,
    MOMENT,
    NAN,
    NUM_COLUMNS,
    OUT,
    RAISE,
    RESIDUAL,
    SHADOW,
    SMALLEST,
    STEPS,
)

END, VERDICT = NUM_COLUMNS, NUM_COLUMNS + 1
TABLE_COLUMNS = NUM_COLUMNS + 2
#: Threads of a block.
WARPS_PER_BLOCK = warp.WARPS_PER_BLOCK
THREADS = WARPS_PER_BLOCK * warp.THREADS_PER_WARP
#: Words that a warp stores in one access, 32 bytes. Chosen: a predicate for each of 32 lanes would take registers.
_WORDS_AT_ONCE = 8
#: Bytes that a warp copies in one step of ``pack``: four accesses of 16 bytes for each lane.
PACK_BYTES = 2048

_PER_LANE = ROWS  # values of a group in each lane
_NEGATIVE = (SIGNS < 0).reshape(4, LANES, 4)  # k, lane, j
#: Of each lane: bit 4 k + j is set where the sign of ``v[4 k + j]`` is turned.
SIGN_MASKS = np.array(
    [sum(int(_NEGATIVE[k, lane, j]) << (4 * k + j) for k in range(4) for j in range(4)) for lane in range(LANES)], np.int32)


def _each(template: str, numbers: Any = range(_PER_LANE)) -> list[str]:
    """A line for each value of a lane; ``{i}`` its number, ``{off}`` its place in the group relative to the lane's first."""
    return [template.format(i=i, off=128 * (i // 4) + i % 4) for i in numbers]


def _fours(template: str, item_bytes: int = 4) -> list[str]:
    """A line for four neighbours each: ``{four}`` names with prefix v, r or m, ``{at}`` bytes between, ``{off}`` elements."""
    made = []
    for k in range(4):
        names = {one: ", ".join(f"{one}{4 * k + j}" for j in range(4)) for one in "vrmd"}
        made.append(template.format(**names, at=128 * item_bytes * k, off=128 * k))
    return made


def _indent(lines: list[str], depth: int = 1) -> list[str]:
    return ["    " * depth + line for line in lines]


def _branch(condition: str, yes: list[str], no: list[str] | None = None) -> list[str]:
    return [f"if {condition}:", *_indent(yes), *(["else:", *_indent(no)] if no else [])]


def _load(prefix: str, address: str, dtype: str) -> list[str]:
    """16-byte accesses where the group is whole and lies so; else element by element."""
    item = ITEM_BYTES[dtype]
    aligned = f"count == {GROUP} and ({address} & {min(15, 4 * item - 1)}) == 0"
    fours = _fours(f"{{{prefix}}} = load4_{dtype}(at + {{at}})", item)
    if dtype == "float64":  # all at once would take 32 registers until they are narrowed
        fours = [line for four in fours for line in (four, "sync_warp()")][:-1]
    return [
        f"at = {address} + {item} * ({GROUP} * fresh(index) + 4 * lane)",
        *_branch(
            aligned,
            fours,
            [_LEFT, *_fours(f"{{{prefix}}} = load4_some_{dtype}(at + {{at}}, left - {{off}})", item)],
        ),
    ]


def _store(prefix: str, address: str, dtype: str) -> list[str]:
    item = ITEM_BYTES[dtype]
    aligned = f"count == {GROUP} and ({address} & {min(15, 4 * item - 1)}) == 0"
    return [
        f"at = {address} + {item} * ({GROUP} * fresh(index) + 4 * lane)",
        *_branch(
            aligned,
            _fours(f"store4_{dtype}(at + {{at}}, {{{prefix}}})", item),
            [_LEFT, *_fours(f"store4_some_{dtype}(at + {{at}}, left - {{off}}, {{{prefix}}})", item)],
        ),
    ]


def _butterflies(name: str) -> list[str]:
    made = ["here = fresh(lane)", "h8, h16 = select((here & 8) != 0, MINUS_ONE, ONE), select((here & 16) != 0, MINUS_ONE, ONE)"]
    made += [f"{name}{i} = from_lane_xor({name}{i}, {mask}) + {name}{i} * {sign}"
             for mask, sign in ((8, "h8"), (16, "h16")) for i in range(_PER_LANE)]
    for half in (1, 2):
        for k in (k for k in range(4) if not k & half):
            for j in range(4):
                a, b = f"{name}{4 * k + j}", f"{name}{4 * (k + half) + j}"
                made.append(f"{a}, {b} = {a} + {b}, {a} - {b}")
    return made


def _signs(name: str) -> list[str]:
    lines = _each(f"{name}{{i}} = multiply({name}{{i}}, select((turned >> {{i}} & 1) != 0, MINUS_QUARTER, QUARTER))")
    return ["turned = SIGN_MASKS[fresh(lane)]", *lines]


def _stage(name: str) -> list[str]:
    """Lay a group out in shared memory, where ``_sums`` finds it by rows and lanes of the wire format."""
    fours = [", ".join(f"{name}{4 * k + j}" for j in range(4)) for k in range(4)]
    return ["sync_warp()", *(f"stage4({512 * k}, {four})" for k, four in enumerate(fours)), "sync_warp()"]


def _sums(**terms: str) -> list[str]:
    """Sums over the staged group, of terms of ``t``: rows in order, then the tree over the wire format's lanes."""
    lines = [f"{name} = ZERO" for name in terms]
    for row in range(ROWS):
        lines += [f"t = staged({4 * LANES * row})", *(f"{name} = {name} + {term}" for name, term in terms.items())]
    for name in terms:
        lines += [f"{name} = {name} + from_lane_xor({name}, {mask})" for mask in (16, 8, 4, 2, 1)]
    return [*lines, *(f"{name} = uniform({name})" for name in terms)]


_HEAD = [
    "lane = lane_index()",
    "zero = to_float(lane & 0)",
    "group, piece = to_int(cuda.grid(1) // WARP), to_int(-1)",
    "while group < num_groups:",
]
_FIND = [
    f"end = to_int(load_int64(table + {8 * TABLE_COLUMNS} * piece + {8 * END}) if piece >= 0 else 0)",
    "if group >= end:",
    "    low, high_piece = piece + 1, num_pieces - 1",
    "    while low < high_piece:",
    "        middle = (low + high_piece) // 2",
    f"        if load_int64(table + {8 * TABLE_COLUMNS} * middle + {8 * END}) > group:",
    "            high_piece = middle",
    "        else:",
    "            low = middle + 1",
    "    piece = to_int(low)",
    f"    end = to_int(load_int64(table + {8 * TABLE_COLUMNS} * piece + {8 * END}))",
    f"row = table + {8 * TABLE_COLUMNS} * piece",
    f"num_elements = load_int64(row + {8 * COUNT})",
    f"index = to_int(group - end + (num_elements + {GROUP - 1}) // {GROUP})",
    f"count = to_int(min({GROUP}, num_elements - {GROUP} * index))",
    f"message = to_int(load_int64(row + {8 * FIRST}) + index)",
]
#: How many elements of the group follow a lane's first one; and a lane's q and m. What follows from the lane alone is found
#: anew where it is needed: compilers would keep it over the loop.
_PLACE = ["here = fresh(lane)", "quarter, eighth = here >> 3, here & 7"]
_LEFT = "left = to_lane_int(count - 4 * fresh(lane))"
#: What was found from staged values is found anew from here on: kept it would take 16 registers.
_ANEW = "sync_warp()"
_NEXT = ["group = to_int(group + num_warps(cuda.gridsize(1)))"]


def _column(name: str, column: int) -> str:
    return f"{name} = load_int64(table + {8 * TABLE_COLUMNS} * fresh(piece) + {8 * column})"


def _divisors() -> list[str]:
    """Stage the moments, and least of them."""
    return [
        _column("moment", MOMENT),
        "least = ZERO",
        *_branch("moment != 0", [
            *_load("m", "moment", "float32"),
            *_stage("m"),
            *_sums(total="t"),
            "least = multiply(FLOOR, square_root(total / to_float(count)))",
        ]),
    ]


def _roots(k: int) -> list[str]:
    """p of four elements, in m; 1 where it would be 0."""
    four = range(4 * k, 4 * k + 4)
    return [f"{', '.join(f'm{i}' for i in four)} = unstage4({512 * k})",
            *_each("m{i} = square_root(m{i}) + least", four), *_each("m{i} = select(m{i} == ZERO, ONE, m{i})", four)]


def _input(kind: str, dtype: str, has_moments: bool, turn: bool) -> list[str]:
    """v = rotated gradient + residual."""
    lines = _divisors() if has_moments else []
    lines += [_column("gradient", GRADIENT), *_branch("gradient != 0", _load("v", "gradient", dtype), _each("v{i} = zero"))]
    if has_moments:
        lines += _branch("moment != 0", [line for k in range(4) for line in (
            *_roots(k), *_each("v{i} = v{i} / m{i}", range(4 * k, 4 * k + 4)))])
    if turn and kind == "rotated":
        lines += _branch(f"count == {GROUP}", _signs("v") + _butterflies("v"))
    return [
        *lines,
        _column("residual", RESIDUAL),
        *_branch("residual != 0", [
            f"at = residual + 4 * ({GROUP} * fresh(index) + 4 * lane)",
            *_fours("{r} = load4_float32(at + {at})"),
            *_each("v{i} = v{i} + r{i}"),
        ], _each("v{i} = v{i} + ZERO")),
    ]


def _read_scales(kind: str, address: str, factor: bool) -> list[str]:
    """To low and high, and whether both are finite."""
    lines = [f"high = load_float({address})"]
    if kind == "two_means":
        lines = [f"low, high = load_float({address}), load_float({address} + 4)"]
    return lines + _last_scales(kind, factor)


def _last_scales(kind: str, factor: bool) -> list[str]:
    lines = ["high = scaled_by_double(high, factor)"] if factor else []
    if kind == "two_means":
        lines += ["low = scaled_by_double(low, factor)"] if factor else []
    else:
        lines += ["low = -high"]
    return [*lines, "finite = is_finite(low) and is_finite(high)"]


def _read_words(bits: int, address: str, then: str = "") -> list[str]:
    """d = the level of each element times the scale, or with one bit low or high. ``then``: what follows for each of them."""
    lines = [*_PLACE]
    for k in range(4):
        at = f"{address} + {4 * bits} * ({4 * k} + quarter)"
        lines += [f"w{plane} = load_word({at} + {4 * plane}) >> to_word(4 * eighth)" for plane in range(bits)]
        for j in range(4):
            i = 4 * k + j
            if bits == 1:
                lines.append(f"d{i} = select((w0 >> {j} & 1) != 0, high, low)")
            else:
                index = " | ".join(f"(w{plane} >> {j} & 1) << {plane}" for plane in range(bits))
                lines.append(f"d{i} = multiply(level_{bits}(to_word({index})), high)")
            lines += [then.format(i=i)] if then else []
    return lines


def _mask(name: str) -> list[str]:
    return _branch(f"count < {GROUP}", [_LEFT, *_each(f"{name}{{i}} = select(left > {{off}}, {name}{{i}}, zero)")])


def _add_incoming(kind: str, bits: int) -> list[str]:
    group_words, group_scales = 4 * ROWS * bits, 8 if kind == "two_means" else 4
    body = [
        f"its_words = load_int64(incoming + 16 * number) + {group_words} * message",
        f"its_scales = load_int64(incoming + 16 * number + 8) + {group_scales} * message",
        *_read_scales(kind, "its_scales", False),
        *_branch("not finite", ["low = high = NAN"]),
        *_read_words(bits, "its_words", "v{i} = v{i} + d{i}"),
    ]
    return ["for number in range(num_incoming):", *_indent(body), *_branch("num_incoming > 0", _mask("v"))]


def _levels_and_scale(kind: str, bits: int) -> list[str]:
    """low and high of the group; with more bits also step, by which a level is found."""
    squares, sizes = "multiply({0}, {0})", "abs({0})"

    def sums(value: str) -> list[str]:
        terms = dict(squares=squares.format(value)) | ({} if bits > 1 else dict(sizes=sizes.format(value)))
        return _sums(**terms)

    lines = [*_stage("v"), *sums("t"), "raised = ONE"]
    again = ["raised = LOWER if squares >= SMALLEST else RAISE", *sums("multiply(t, raised)")]
    lines += _branch("not (squares >= SMALLEST and squares < INFINITY)", again)
    lines.append("length = to_float(count)")
    if bits == 1:
        if kind == "rotated":
            lines += ["high = squares / sizes if sizes != ZERO else sizes", "high = high / raised", "low = -high"]
        elif kind == "l1":
            lines += ["high = sizes / length / raised", "low = -high"]
        elif kind == "rms":
            lines += ["high = square_root(squares / length) / raised", "low = -high"]
        else:
            # By the sign of v, which its multiple may have lost to underflow.
            lines += _sums(below="select(t >= ZERO, ZERO, multiply(t, raised))",
                           above="select(t >= ZERO, multiply(t, raised), ZERO)")
            inside = " + ".join(f"select((v{i} >= ZERO) & (left > {128 * (i // 4) + i % 4}), ONE, ZERO)"
                                for i in range(_PER_LANE))
            lines += [_LEFT, f"num_above = {inside}"]
            lines += [f"num_above = num_above + from_lane_xor(num_above, {mask})" for mask in (1, 2, 4, 8, 16)]
            lines += ["num_above = uniform(num_above)", "num_below = length - num_above",
                      "high = above / (num_above if num_above > ONE else ONE) / raised",
                      "low = below / (num_below if num_below > ONE else ONE) / raised"]
        if kind != "two_means":
            equal = " & ".join(_each("(abs(v{i}) == first)"))
            partly = " & ".join(_each("((abs(v{i}) == first) | (left <= {off}))"))
            lines += [
                "first = abs(from_lane(v0, 0))",
                *_branch(f"count == {GROUP}", [f"same = {equal}"], [_LEFT, f"same = {partly}"]),
                *_branch("all_lanes(same)", ["high = uniform(first)", "low = -high"]),
            ]
        return [*lines, "broken = not (is_finite(high) and is_finite(low))"]
    lines += [
        "step = multiply(STEP, square_root(squares / length))",
        *([] if bits == 2 else ["step = ONE / step if step > ZERO else ZERO"]),
        *_sums(products=f"level_times_value_{bits}(multiply(t, raised), step)"),
        "high = squares / products if products != ZERO else products",
        "high = high / raised",
        "low = -high",
        "broken = not is_finite(multiply(high, TOP))",
    ]
    return lines


def _level(bits: int, value: str) -> list[str]:
    """l = the level of a value in units of the scale."""
    return [f"l = size_{bits}(multiply({value}, raised), step)", f"l = select({value} >= ZERO, l, -l)"]


def _decided(bits: int, k: int, then: str = "") -> list[str]:
    """d = what four staged values v are decoded to. ``then``: what follows for each of them."""
    four = range(4 * k, 4 * k + 4)
    lines = [f"{', '.join(f'v{i}' for i in four)} = unstage4({512 * k})"]
    for i in four:
        if bits == 1:
            lines.append(f"d{i} = select(v{i} >= ZERO, high, low)")
        else:
            lines += [*_level(bits, f"v{i}"), f"d{i} = multiply(l, high)"]
        lines += [then.format(i=i)] if then else []
    return lines


def _write_words(bits: int) -> list[str]:
    """From the staged values, a few words at a time, each by another lane."""
    lines = [_ANEW, "here = fresh(lane)", f"at = words + {4 * ROWS * bits} * message + 4 * lane", "mine = to_word(NO_BITS)"]
    for row in range(ROWS):
        lines.append(f"t = staged({4 * LANES * row})")
        if bits > 1:
            lines += [_ANEW, *_level(bits, "t"), f"n = index_{bits}(l)"]
        for plane in range(bits):
            number = row * bits + plane
            is_set = "t >= ZERO" if bits == 1 else f"(n >> {plane} & 1) != 0"
            turn = number % _WORDS_AT_ONCE
            lines.append(f"mine = select(here == {turn}, ballot({is_set}), mine)")
            if turn == _WORDS_AT_ONCE - 1:
                lines += ["mine = select(broken, NO_BITS, mine)", f"store_word(at + {4 * (number - turn)}, mine, here <= {turn})",
                          "here = fresh(lane)"]
    return lines


def _write_scales(kind: str) -> list[str]:
    each = 8 if kind == "two_means" else 4
    lines = [f"at_scale = scales + {each} * message"]
    if kind == "two_means":
        return [*lines, "store_float(at_scale, NAN if broken else low)", "store_float(at_scale + 4, NAN if broken else high)"]
    return [*lines, "store_float(at_scale, NAN if broken else high)"]


def _hand_out(kind: str, dtype: str, has_moments: bool) -> list[str]:
    """Rotate d back and bring it to OUT; where it is not finite, NaN. Moments are staged."""
    lines = []
    if kind == "rotated":
        lines += _branch(f"count == {GROUP} and finite", _butterflies("d") + _signs("d"))
    if has_moments:
        lines += _branch("moment != 0", [line for k in range(4) for line in (
            *_roots(k), *_each("d{i} = multiply(d{i}, m{i})", range(4 * k, 4 * k + 4)))])
    lines += _each("d{i} = select(d{i} == d{i}, d{i}, NAN)")
    return lines + _store("d", "out", dtype)


def _encode_lines(bits: int, kind: str, dtype: str, has_moments: bool, turn: bool) -> list[str]:
    shadow = [
        f"at = shadow + 4 * ({GROUP} * fresh(index) + 4 * lane)",
        _ANEW,
        *(line for k in range(4) for line in _decided(bits, k, "d{i} = select(broken, NAN, v{i} - d{i})")),
        *_mask("d"),
        *_fours("store4_float32(at + {at}, {d})"),
    ]
    # Once more, from a cache: kept since they were read first they would take 16 registers.
    moments = [_column("moment", MOMENT), *_branch("moment != 0", [*_load("m", "moment", "float32"), *_stage("m")])]
    out = [
        *_branch("broken", ["low = high = NAN"]),
        *_last_scales(kind, True),
        *_branch("not finite", ["low = high = NAN"]),
        _ANEW,
        *(line for k in range(4) for line in _decided(bits, k)),
        *(moments if has_moments else []),
        *_hand_out(kind, dtype, has_moments),
    ]
    return [
        *_input(kind, dtype, has_moments, turn),
        *_add_incoming(kind, bits),
        *_levels_and_scale(kind, bits),
        *_write_words(bits),
        *_write_scales(kind),
        _column("shadow", SHADOW),
        *_branch("shadow != 0", shadow),
        _column("out", OUT),
        *_branch("out != 0", out),
        *_branch("broken", _judge()),
    ]


def _judge() -> list[str]:
    return [_column("verdict", VERDICT), *_branch("verdict != 0", ["store_int32(verdict, 0)"])]


def _decode_lines(bits: int, kind: str, dtype: str, has_moments: bool) -> list[str]:
    group_words, group_scales = 4 * ROWS * bits, 8 if kind == "two_means" else 4
    return [
        *_read_scales(kind, f"scales + {group_scales} * message", True),
        *_branch("not finite", ["low = high = NAN", *_judge()]),
        *(_divisors() if has_moments else []),
        *_read_words(bits, f"words + {group_words} * message"),
        _column("out", OUT),
        *_branch("out != 0", _hand_out(kind, dtype, has_moments)),
    ]


def _decode_within_lines(bits: int, kind: str, add: bool) -> list[str]:
    """To OUT, float32 and padded, in the rotated domain."""
    group_words, group_scales = 4 * ROWS * bits, 8 if kind == "two_means" else 4
    return [
        *_read_scales(kind, f"scales + {group_scales} * message", False),
        *_branch("not finite", ["low = high = NAN"]),
        *_read_words(bits, f"words + {group_words} * message"),
        *_mask("d"),
        _column("out", OUT),
        f"at = out + 4 * ({GROUP} * fresh(index) + 4 * lane)",
        *([*_fours("{r} = load4_float32(at + {at})"), *_each("d{i} = r{i} + d{i}"),
           *_each("d{i} = select(d{i} == d{i}, d{i}, NAN)")] if add else []),
        *_fours("store4_float32(at + {at}, {d})"),
    ]


def _rotate_lines(kind: str, dtype: str) -> list[str]:
    return [
        *_input(kind, dtype, False, True),
        _column("shadow", SHADOW),
        f"at = shadow + 4 * ({GROUP} * fresh(index) + 4 * lane)",
        *_fours("store4_float32(at + {at}, {v})"),
    ]


def _rotate_back_lines(kind: str, dtype: str) -> list[str]:
    return [
        _column("residual", RESIDUAL),
        f"at = residual + 4 * ({GROUP} * fresh(index) + 4 * lane)",
        *_fours("{d} = load4_float32(at + {at})"),
        "finite = True",
        _column("out", OUT),
        *_hand_out(kind, dtype, False),
    ]


def _device_functions() -> dict[str, Any]:
    """How values become sizes of levels, indices and levels."""
    select, to_index, to_float, to_word = warp.select, warp.to_index, warp.to_float, warp.to_word
    multiply = warp.multiply
    inner, outer = np.float32(0.4528), np.float32(1.510)
    assert LEVELS[2].tolist() == [-outer, -inner, inner, outer]
    zero, half = np.float32(0), np.float32(0.5)
    made: dict[str, Any] = {}

    def size_2(w, step):  # type: ignore[no-untyped-def]
        return select((abs(w) >= step) & (step > zero), outer, inner)

    def index_2(level):  # type: ignore[no-untyped-def]
        return to_word(select(abs(level) == inner, select(level < zero, 1, 2), select(level < zero, 0, 3)))

    def level_2(index):  # type: ignore[no-untyped-def]
        size = select((index == 0) | (index == 3), outer, inner)
        return select(index >= 2, size, -size)

    made.update(size_2=size_2, index_2=index_2, level_2=level_2)
    size_of = warp.device_function(size_2)

    def level_times_value_2(w, step):  # type: ignore[no-untyped-def]
        return abs(multiply(w, size_of(w, step)))

    made["level_times_value_2"] = level_times_value_2
    for bits in (4, 8):
        made |= _uniform_functions(bits, select, to_index, to_float, to_word, multiply, zero, half)
    return {name: warp.device_function(function) for name, function in made.items()}


def _uniform_functions(bits, select, to_index, to_float, to_word, multiply, zero, half):  # type: ignore[no-untyped-def]
    top, count = np.float32(2 ** (bits - 1) - 1), 2 ** (bits - 1)
    middle = np.float32(count - 0.5)

    def size(w, inverse):  # type: ignore[no-untyped-def]
        distance = multiply(abs(w), inverse)
        return to_float(to_index(select(distance < top, distance, top))) + half

    def index(level):  # type: ignore[no-untyped-def]
        return to_index(level + middle)

    def level(index):  # type: ignore[no-untyped-def]
        return to_float(index) - middle

    size_of = warp.device_function(size)

    def level_times_value(w, inverse):  # type: ignore[no-untyped-def]
        return abs(multiply(w, size_of(w, inverse)))

    return {f"level_times_value_{bits}": level_times_value, f"size_{bits}": size, f"index_{bits}": index, f"level_{bits}": level}


@lru_cache(1)
def _names() -> dict[str, Any]:
    """What the kernels' source refers to."""
    known: dict[str, Any] = {name: getattr(warp, name) for name in (
        "lane_index", "num_warps", "select", "from_lane_xor", "fresh", "from_lane", "all_lanes", "ballot", "uniform",
        "sync_warp", "stage4", "staged", "unstage4", "multiply", "scaled_by_double", "is_finite", "square_root", "to_float",
        "to_int", "to_lane_int", "to_word", "load_int64", "load_float", "store_float", "store_int32", "load_word", "store_word",
        "copy16", "copy_bytes", "scale_double")}
    for table in ("load4", "load4_some", "store4", "store4_some", "divide_one"):
        known |= {f"{table}_{kind}": function for kind, function in getattr(warp, table).items()}
    known |= _device_functions()
    known |= {f"BIT{j}": np.uint32(1 << j) for j in range(4)}
    known |= dict(
        np=np, cuda=cuda, WARP=warp.THREADS_PER_WARP,
        SIGN_MASKS=SIGN_MASKS, QUARTER=np.float32(0.25), MINUS_QUARTER=np.float32(-0.25), ONE=np.float32(1), ZERO=np.float32(0),
        MINUS_ONE=np.float32(-1), NAN=NAN, FLOOR=FLOOR, SMALLEST=SMALLEST, RAISE=RAISE, LOWER=LOWER,
        INFINITY=np.float32(np.inf), NO_BITS=np.uint32(0))
    return known


def max_registers(compute_capability: tuple[int, int]) -> int:
    """With so many registers of a thread half of a multiprocessor's threads have room: it has 65536, for 1024 threads (7.5) or
    2048. *Source*: CUDA C++ Programming Guide, technical specifications per compute capability."""
    return 128 if compute_capability == (7, 5) else 64


_ARGUMENTS = {
    "encode": ("table num_pieces num_groups incoming num_incoming words scales", "factor"),
    "decode": ("table num_pieces num_groups words scales", "factor"),
    "decode_within": ("table num_pieces num_groups words scales", ""),
    "decode_add": ("table num_pieces num_groups words scales", ""),
    "rotate": ("table num_pieces num_groups", ""),
    "rotate_back": ("table num_pieces num_groups", ""),
}


def _source(name: str, bits: int, kind: str, dtype: str, has_moments: bool, turn: bool) -> str:
    lines = {
        "encode": lambda: _encode_lines(bits, kind, dtype, has_moments, turn),
        "decode": lambda: _decode_lines(bits, kind, dtype, has_moments),
        "decode_within": lambda: _decode_within_lines(bits, kind, False),
        "decode_add": lambda: _decode_within_lines(bits, kind, True),
        "rotate": lambda: _rotate_lines(kind, dtype),
        "rotate_back": lambda: _rotate_back_lines(kind, dtype),
    }[name]()
    integers, real = _ARGUMENTS[name]
    arguments = ", ".join([*integers.split(), *real.split()])
    return "\n".join([f"def {name}({arguments}):", *_indent(_HEAD), *_indent(_FIND + lines + _NEXT, 2)])


def signature(name: str) -> str:
    """The types of a kernel's arguments, as Numba writes them."""
    if name in _PLAIN:
        return _PLAIN[name][1]
    integers, real = _ARGUMENTS[name]
    return f"void({', '.join(['int64'] * len(integers.split()) + ['float64'] * len(real.split()))})"


@lru_cache(None)
def python_kernel(
    name: str, bits: int = 1, kind: str = "rotated", dtype: str = "float32", has_moments: bool = False, turn: bool = True
) -> Any:
    """A kernel's function before it is compiled."""
    known = dict(_names(), __name__=__name__, STEP=STEPS[bits], TOP=LEVELS[bits][-1])
    source = _PLAIN[name][0](dtype) if name in _PLAIN else _source(name, bits, kind, dtype, has_moments, turn)
    exec(compile(source, f"<{name} {bits} {kind} {dtype}>", "exec"), known)
    return known[name]


@lru_cache(None)
def kernel(
    name: str, bits: int = 1, kind: str = "rotated", dtype: str = "float32", has_moments: bool = False, turn: bool = True
) -> Any:
    """A kernel, compiled for the current device (in the simulator: as it is)."""
    function = python_kernel(name, bits, kind, dtype, has_moments, turn)
    if warp.IS_SIMULATED:
        return cuda.jit(function)
    most = max_registers(tuple(cuda.get_current_device().compute_capability))
    return cuda.jit(signature(name), max_registers=most)(function)


# -- copies and scales ------------------------------------------------------------------------------------------------------

def _pack_source(dtype: str) -> str:
    """Rows of source, target, bytes, end; the end in steps of PACK_BYTES of all copies up to this one."""
    whole = [f"copy16(target + at + {512 * k} + 16 * lane, source + at + {512 * k} + 16 * lane)" for k in range(4)]
    body = [
        "if step >= end:",
        "    low, high = row + 1, num_rows - 1",
        "    while low < high:",
        "        middle = (low + high) // 2",
        "        if load_int64(table + 32 * middle + 24) > step:",
        "            high = middle",
        "        else:",
        "            low = middle + 1",
        "    row = low",
        "    source, target = load_int64(table + 32 * low), load_int64(table + 32 * low + 8)",
        "    num_bytes, end = load_int64(table + 32 * low + 16), load_int64(table + 32 * low + 24)",
        f"at = (step - end + (num_bytes + {PACK_BYTES - 1}) // {PACK_BYTES}) * {PACK_BYTES}",
        f"if at + {PACK_BYTES} <= num_bytes and ((source | target) & 15) == 0:",
        *_indent(whole),
        "else:",
        f"    stop = min(at + {PACK_BYTES}, num_bytes)",
        "    while at < stop:",
        "        copy_bytes(target + at + lane, source + at + lane, stop - at - lane)",
        "        at += 32",
        "step += stride",
    ]
    return "\n".join([
        "def pack(table, num_rows, num_steps):",
        "    lane, step, stride = lane_index(), np.int64(cuda.grid(1) // WARP), np.int64(cuda.gridsize(1) // WARP)",
        "    row, end, source, target, num_bytes = -1, 0, 0, 0, 0",
        "    while step < num_steps:", *_indent(body, 2)])


def _scale_source(dtype: str) -> str:
    """Multiply floats in place, 16-bit ones in float32."""
    item = ITEM_BYTES[dtype]
    if dtype == "float64":
        return "\n".join([
            "def scale(address, num_elements, factor):",
            "    lane, step, stride = lane_index(), np.int64(cuda.grid(1) // WARP), np.int64(cuda.gridsize(1) // WARP)",
            "    while 32 * step < num_elements:",
            "        scale_double(address + 8 * (32 * step + lane), num_elements - 32 * step - lane, factor)",
            "        step += stride"])
    values = ", ".join(f"multiply(v{j}, narrow)" for j in range(4))
    body = [
        f"at, left = address + {item} * (128 * step + 4 * lane), num_elements - 128 * step - 4 * lane",
        *_branch(
            f"128 * step + 128 <= num_elements and (address & {4 * item - 1}) == 0",
            [f"v0, v1, v2, v3 = load4_{dtype}(at)", f"store4_{dtype}(at, {values})"],
            [f"v0, v1, v2, v3 = load4_some_{dtype}(at, left)", f"store4_some_{dtype}(at, left, {values})"]),
        "step += stride",
    ]
    return "\n".join([
        "def scale(address, num_elements, factor):",
        "    narrow = np.float32(factor)",
        "    lane, step, stride = lane_index(), np.int64(cuda.grid(1) // WARP), np.int64(cuda.gridsize(1) // WARP)",
        "    while 128 * step < num_elements:", *_indent(body, 2)])


def _divide_source(dtype: str) -> str:
    item = warp.KINDS[dtype]
    return "\n".join([
        "def divide(address, num_elements, divisor):",
        "    lane, step, stride = lane_index(), np.int64(cuda.grid(1) // WARP), np.int64(cuda.gridsize(1) // WARP)",
        "    while 32 * step < num_elements:",
        f"        divide_one_{dtype}(address + {item} * (32 * step + lane), num_elements - 32 * step - lane, divisor)",
        "        step += stride"])


_PLAIN: dict[str, tuple[Any, str]] = {
    "pack": (_pack_source, "void(int64, int64, int64)"),
    "scale": (_scale_source, "void(int64, int64, float64)"),
    "divide": (_divide_source, "void(int64, int64, int64)"),
}
