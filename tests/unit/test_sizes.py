"""Size strings: what is accepted, what is refused and with which text, and what is printed."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxoffload.errors import ConfigError
from fxoffload.sizes import GIB, KIB, MIB, TIB, format_size, parse_size, show_size

ACCEPTED = (
    "give a whole number of bytes > 0, as an int or as text such as '512MiB', '4 gb', '0.5KiB' "
    "(units B, KiB, MiB, GiB, TiB or KB, MB, GB, TB, all binary)"
)

NO_SIZES = [
    *("", " ", "-1", "-1GiB", "+1", "1e9", "1_000", "1,5GiB", "1 000", ".5GiB", "5.GiB", "0x10", "nan", "inf", "9" * 5000),
    *("4g", "4 k", "4ib", "GiB", "4 Gi B", "4bb", "4pib", "auto", "50%", "4GiB 2MiB"),
    *("\N{ARABIC-INDIC DIGIT FOUR}GiB", "4\N{KELVIN SIGN}iB"),
]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        (4 * GIB, 4 * GIB),
        ("1", 1),
        ("512", 512),
        ("512b", 512),
        ("512 B", 512),
        ("3.0", 3),
        ("4GiB", 4 * GIB),
        ("4gib", 4 * GIB),
        ("4GB", 4 * GIB),
        ("4gb", 4 * GIB),
        ("  4 GiB\t", 4 * GIB),
        ("1kb", KIB),
        ("1KiB", KIB),
        ("512MiB", 512 * MIB),
        ("2mb", 2 * MIB),
        ("1TiB", TIB),
        ("1 tb", TIB),
        ("0.5KiB", 512),
        ("1.5GiB", 3 * GIB // 2),
        ("0.0009765625kb", 1),
        ("007mib", 7 * MIB),
    ],
)
def test_accepted(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", NO_SIZES)
def test_no_size(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text, what="memory_budget")
    assert str(caught.value) == f"config: memory_budget: {text!r} is not a size; {ACCEPTED}"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", "0"), ("0GiB", "0"), ("0.0", "0"), ("0.1b", "0.1"), ("0.5", "0.5"), ("0.3KiB", "307.2"), ("2.73GiB", "2.93132e+09")],
)
def test_no_whole_number_of_bytes(text: str, nbytes: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert str(caught.value) == f"config: size: {text!r} comes to {nbytes} bytes; {ACCEPTED}"


@pytest.mark.parametrize("number", [0, -1, -4 * GIB])
def test_no_size_as_int(number: int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(number, what="max_inflight_prefetch_bytes")
    assert str(caught.value) == f"config: max_inflight_prefetch_bytes: {number} is not a size; {ACCEPTED}"


@pytest.mark.parametrize(("number", "bits"), [(10**30, 100), (10**400, 1329), (-(10**5000), 16610)], ids=["30", "400", "-5000"])
def test_an_int_with_more_digits_than_a_size_has(number: int, bits: int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(number, what="memory_budget")
    assert str(caught.value) == f"config: memory_budget: an int of {bits} bits is not a size; {ACCEPTED}"


@pytest.mark.parametrize(
    ("value", "kind"), [(True, "bool"), (False, "bool"), (1.0, "float"), (None, "NoneType"), (b"1", "bytes")]
)
def test_wrong_type(value: object, kind: str) -> None:
    with pytest.raises(TypeError) as caught:
        parse_size(value, what="memory_budget")  # type: ignore[arg-type]
    assert str(caught.value) == f"config: memory_budget: {value!r} is of type {kind}; {ACCEPTED}"


@given(
    st.integers(1, 2**60),
    st.sampled_from(["", "b", "kb", "KiB", "mB", "MIB", "Gb", "gib", "tb", "TiB"]),
    st.sampled_from(["", " "]),
)
def test_every_whole_number_with_a_unit(number: int, unit: str, space: str) -> None:
    factor = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}[unit[:1].lower()]
    assert parse_size(f"{number}{space}{unit}") == number * factor


@given(st.decimals(0, 10**6, places=4))
def test_decimals_are_exact(number: object) -> None:
    exact = Fraction(str(number)) * GIB
    if exact > 0 and exact.denominator == 1:
        assert parse_size(f"{number}GiB") == exact
        return
    with pytest.raises(ConfigError):
        parse_size(f"{number}GiB")


@given(st.integers(0, 60).flatmap(lambda bits: st.integers(1, 2**bits)))
def test_a_formatted_size_can_be_given_back(nbytes: int) -> None:
    back = parse_size(format_size(nbytes))
    assert nbytes <= back <= nbytes * 1.005


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (1, "1B"),
        (1000, "1000B"),
        (KIB, "1KiB"),
        (3 * KIB // 2, "1.5KiB"),
        (100_000, "98KiB"),
        (2_931_315_179, "2796MiB"),
        (8 * GIB, "8GiB"),
        (8 * GIB + 1, "8193MiB"),
        (23_804_856_238, "22.25GiB"),
        (3 * TIB, "3TiB"),
    ],
)
def test_formatted(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1018, "1018 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (MIB - 1, "1.00 MiB"),
        (GIB - 6 * KIB, "1023.99 MiB"),
        (2_931_315_179, "2.73 GiB"),
        (2 * TIB, "2.00 TiB"),
        (-3 * MIB // 2, "-1.50 MiB"),
    ],
)
def test_shown(nbytes: int, text: str) -> None:
    assert show_size(nbytes) == text
