"""Sizes and rates for people: three digits and the unit that suits them."""

from __future__ import annotations

_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


class Amount(str):
    """A number with its unit: stands on the right of a column, as numbers do."""

    __slots__ = ()


def size(num_bytes: float) -> Amount:
    """Bytes: ``262 kB``."""
    return _amount(num_bytes, "B")


def rate(bytes_per_s: float) -> Amount:
    """Bytes per second: ``12.3 MB/s``."""
    return _amount(bytes_per_s, "B/s")


def _amount(value: float, unit: str) -> Amount:
    # Rounded first: 999.9 kB is 1 MB, and not 1e+03 kB.
    rounded = float(f"{value:.3g}")
    step, letter = next(((step, letter) for step, letter in _STEPS if rounded >= step), (1.0, ""))
    return Amount(f"{rounded / step:.3g} {letter}{unit}")
