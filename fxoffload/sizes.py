"""Size strings: one parser for the Python API, the options and the command line, and the two ways to print bytes.

A size is a whole number of bytes > 0: an int, or text made of digits and an optional unit. Units are binary, whatever
their spelling: `4GiB` = `4 gb` = 4 * 2**30. Decimals are accepted when they come to a whole number of bytes: `0.5KiB` = 512.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from fxoffload.errors import ConfigError

KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

ACCEPTED_SIZES = (
    "a whole number of bytes > 0, as an int or as text such as '512MiB', '4 gb', '0.5KiB' "
    "(units B, KiB, MiB, GiB, TiB or KB, MB, GB, TB, all binary)"
)

_UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?:([kmgt])i?b|b)?", re.IGNORECASE | re.ASCII)
_LARGEST = 10**30
"""No int has more digits than text may have: a larger one is a mistake, and not even a float may hold it."""
_FACTORS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}


def parse_size(text: str | int, *, what: str = "size") -> int:
    """The bytes that `text` stands for. `what` names the setting in the error.

    Raises TypeError for anything but text and ints (a bool too), ConfigError for text or an int that is no size.

    >>> parse_size("4GiB") == parse_size("4 gb") == 4 * 2**30
    True
    >>> parse_size("0.5KiB")
    512
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"config: {what}: {text!r} is of type {type(text).__name__}; give {ACCEPTED_SIZES}")
    if isinstance(text, int):
        if not 0 < text < _LARGEST:
            shown = str(text) if abs(text) < _LARGEST else f"an int of {text.bit_length()} bits"
            raise ConfigError(f"config: {what}: {shown} is not a size; give {ACCEPTED_SIZES}")
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"config: {what}: {text!r} is not a size; give {ACCEPTED_SIZES}")
    nbytes = Fraction(match[1]) * _FACTORS[(match[2] or "").lower()]
    if nbytes <= 0 or nbytes.denominator != 1:
        raise ConfigError(f"config: {what}: {text!r} comes to {float(nbytes):g} bytes; give {ACCEPTED_SIZES}")
    return int(nbytes)


def format_size(nbytes: int) -> str:
    """A size string to give back to `parse_size`: never less than `nbytes`, at most 0.5% more (`2796MiB`, `22.25GiB`).

    It is the largest unit of which a whole number, or else of halves, or else of quarters, rounded up, stays within that
    0.5%. No hundredths: they come to no whole number of bytes, which `parse_size` refuses.

    >>> format_size(2_931_400_000)
    '2796MiB'
    """
    assert nbytes >= 0, nbytes
    for unit, factor in _UNITS:
        for parts in (1, 2, 4):
            count = -(-nbytes * parts // factor)
            excess = count * factor // parts - nbytes
            if excess * 200 <= nbytes and nbytes > 0:
                return f"{Decimal(count) / parts}{unit}"
    return f"{nbytes}B"


def show_size(nbytes: int) -> str:
    """Bytes for tables and logs, rounded to two decimals.

    >>> show_size(2_931_400_000), show_size(512)
    ('2.73 GiB', '512 B')
    """
    for unit, factor in _UNITS:
        # 1023.995 units and more would print as 1024.00 of them.
        if abs(nbytes) >= factor - factor // 200_000:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} B"
