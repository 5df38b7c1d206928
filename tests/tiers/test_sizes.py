"""Byte counts as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unwall.tiers.sizes import ALIGNMENT, align_up, format_bytes, parse_bytes, readable_bytes, written_bytes


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("20GiB", 20 * 2**30),
        (" 1.5 TB ", 1_500_000_000_000),
        ("500mb", 500_000_000),
        ("20G", 20 * 2**30),
        ("0.1KiB", 102),
        ("9007199254740993", 9007199254740993),  # 2**53 + 1: lost by anything that goes through a float
    ],
)
def test_parse(written, nbytes):
    assert parse_bytes(written) == nbytes


@pytest.mark.parametrize("wrong", ["", "GiB", "20 GiBs", "20H", "-5", "1e9", "1,5GiB", "½GiB"])
def test_parse_says_how_to_write_it(wrong):
    with pytest.raises(ValueError, match=r"host_bytes: cannot read .*20GiB"):
        parse_bytes(wrong, "host_bytes")


@pytest.mark.parametrize("wrong", [True, 1.5, None, b"20GiB"])
def test_parse_refuses_other_types(wrong):
    with pytest.raises(ValueError, match=r"disk_bytes must be an int \(bytes\) or a string"):
        parse_bytes(wrong, "disk_bytes")


def test_parse_refuses_a_negative_number():
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        parse_bytes(-1)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (20 * 2**30, "20.0 GiB"), (3 * 2**50, "3072.0 TiB")]
)
def test_format(nbytes, text):
    assert format_bytes(nbytes) == text


@given(st.integers(0, 2**50), st.sampled_from([1, 2, ALIGNMENT, 3 * ALIGNMENT]))
def test_align_up_is_the_next_multiple(nbytes, alignment):
    aligned = align_up(nbytes, alignment)
    assert aligned % alignment == 0
    assert nbytes <= aligned < nbytes + alignment


@given(st.integers(0, 2**50))
def test_a_readable_number_is_close_below_and_written_in_short(nbytes):
    short = readable_bytes(nbytes)
    assert short <= nbytes <= short * 1.02
    assert parse_bytes(written_bytes(short)) == short
    assert nbytes < 2**20 or len(written_bytes(short)) <= 7


@given(st.integers(0, 2**50))
def test_what_is_written_is_read_back_exactly(nbytes):
    assert parse_bytes(written_bytes(nbytes)) == nbytes
