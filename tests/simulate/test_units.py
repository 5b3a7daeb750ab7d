import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.simulate import (
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
    show_bytes,
    show_seconds,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1Gbit/s", 125e6), ("100Mbit/s", 12.5e6), ("10GB/s", 10e9), ("25 Gbps", 3.125e9),
        ("1e9", 1e9), ("1GiB/s", 2.0**30), ("8kbit/s", 1e3), (".5MB/s", 5e5),
    ],
)  # fmt: skip
def test_bandwidths(text, expected):
    assert parse_bandwidth(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0), ("1.5GB", 1.5e9), ("4 KiB", 4096), ("3KB", 3e3), ("7B", 7)]
)
def test_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("0.05", 0.05), ("2ms", 2e-3), ("150us", 150e-6), ("3s", 3.0)]
)
def test_seconds(text, expected):
    assert parse_seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_bandwidth, "fast"), (parse_bandwidth, "1GB"), (parse_bandwidth, "-1GB/s"),
        (parse_bytes, ""), (parse_bytes, "1Gbit"), (parse_seconds, "2min"), (parse_seconds, "nan"),
    ],
)  # fmt: skip
def test_what_is_no_quantity_is_refused_with_an_example(parse, text):
    with pytest.raises(PlanError, match=r"is not a .*; allowed: .*; write it like \d") as error:
        parse(text)
    assert repr(text) in str(error.value)


def test_showing():
    assert [show_bytes(n) for n in (0, 999, 1e3, 123456789, 2e12)] == [
        "0 B", "999 B", "1 kB", "123.5 MB", "2 TB",
    ]  # fmt: skip
    assert [show_seconds(s) for s in (0, 1.5, 0.02, 5e-5)] == ["0 s", "1.5 s", "20 ms", "50 µs"]
