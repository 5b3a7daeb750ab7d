"""Numbers of ranks, from where they say that they are."""

from __future__ import annotations

import socket

import pytest

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.runtime.rank_order import Place, here, numbers


def places(text: str) -> list[Place]:
    """Return places, as host:address for each rank."""
    pairs = (word.partition(":") for word in text.split())
    return [Place(host, tuple(a.split(".")) if a else ()) for host, _, a in pairs]


@pytest.mark.parametrize(
    ("address", "pattern", "found"),
    [
        ("", "", ()),
        ("s0.s3.node7", "switch.switch.node", ("s0", "s3", "node7")),
        ("s0.node7.there", "switch.node", ("s0", "node7.there")),
        ("node7.there", "node", ("node7.there",)),
        ("s0.node7", "", ("s0", "node7")),
    ],
)
def test_slurm_says_where_this_process_is(
    address: str, pattern: str, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", address)
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", pattern)
    assert here() == Place(socket.gethostname(), found)


@pytest.mark.parametrize(
    ("where", "order"),
    [
        ("a b a b", (0, 2, 1, 3)),
        ("x:s.a x:s.b x:s.a x:s.b", (0, 2, 1, 3)),  # nodes of one machine, as SLURM has them
        ("a:s.a b:t.b c:s.c d:t.d", (0, 2, 1, 3)),
        ("a:s.a b:t.b c:s.c d", (0, 1, 2, 3)),  # of one rank SLURM says nothing
        ("a:s.a b:s.a a:s.a b:s.a", (0, 2, 1, 3)),  # inherited from the first node
    ],
)
def test_switches_count_where_slurm_knows_them_of_all_ranks(
    where: str, order: tuple[int, ...]
) -> None:
    found = numbers(places(where), "auto")
    assert found.order == order
    assert found.is_new == (order != (0, 1, 2, 3))


def test_as_launched_and_by_a_list() -> None:
    where = places("a b c a b c")
    assert not numbers(where, "launch").is_new
    assert numbers(where, ["c", "b", "a"]).order == (0, 3, 2, 5, 1, 4)
    assert numbers(places("x:s.a x:s.b"), ["b", "a"]).order == (0, 1)  # by the names of nodes


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (["a", "b", "c"], "names no rank's host with ['c']; allowed"),
        (["a"], "leaves out ['b']; allowed"),
        (["a", "c"], "names no rank's host with ['c'] and leaves out ['b']; allowed"),
    ],
)
def test_a_list_that_does_not_name_the_hosts_is_refused(listed: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        numbers(places("a b a b"), listed)
    text = str(caught.value)
    assert text.startswith(f"rank_order={listed} ")
    assert words in text
    assert text.endswith("use CyclicStrategy(rank_order=['a', 'b'])")


def test_what_has_changed_is_said() -> None:
    text = str(numbers(places("a b a b"), "auto"))
    assert "2 of 4 hops of the ring go from host to host (4 as launched); rank 1 was" in text
    assert "rank 1 was launched as 2, rank 2 was launched as 1. Local ranks" in text
    text = str(numbers(places("a:s.a b:t.b c:s.c d:t.d"), "auto"))
    assert "4 of 4 hops of the ring go from host to host (4 as launched), 2 of 4" in text
    assert "2 of 4 hops of the ring go from switch to switch (4 as launched); rank" in text
    text = str(numbers(places(" ".join("ab" * 16)), "auto"))
    assert "rank 8 was launched as 16, and 22 more have moved. Local" in text
