"""What all ranks say together beside the messages of the program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_cyclic.errors import CyclicError, PlanError, VerificationError
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.transport.crew import Crew
from tests.harness import processes
from tests.runtime.transport.rings import join


def say() -> list[Any]:
    """Return what a rank hears."""
    rank, _ = join()
    assembly = Assembly(Crew(20.0))
    met: list[str] = []

    def find(error: CyclicError | None = None) -> list[int]:
        met.append("asked")
        if error is not None:
            raise error
        return [rank, 7]

    heard: list[Any] = [assembly.share({"ä" * rank: (rank, None)}, "to share")]
    heard += [assembly.ask_first(find, "to find"), list(met)]
    for error in (PlanError("none"), VerificationError("other bits")):
        with pytest.raises(type(error)) as caught:
            assembly.ask_first(lambda error=error: find(error), "to find")  # type: ignore[misc]
        heard.append(str(caught.value))
    held = {"a": torch.full((2, 3), float(rank)), "b": torch.tensor(rank)}
    held |= {"c": torch.full((4,), rank + 0.5)[::2], "none": torch.empty(0)}
    spread = assembly.spread(held, 1, "to spread")
    heard.append({name: x.tolist() for name, x in spread.items()})
    mine = [torch.full((2,), float(rank)), torch.tensor(rank)]
    assembly.copy_first(mine, "to copy")
    heard.append([x.tolist() for x in mine])
    assembly.meet("to end")
    assembly.close()
    return heard


@pytest.mark.multi
def test_all_ranks_hear_the_same() -> None:
    for rank, heard in enumerate(processes.run(say, 3)):
        said, found, met, *errors, spread, copied = heard
        assert said == [{"ä" * r: (r, None)} for r in range(3)]
        assert (found, met) == ([0, 7], ["asked"] if rank == 0 else [])
        assert errors == ["none", "other bits"]
        assert spread == {"a": [[1.0] * 3] * 2, "b": 1, "c": [1.5] * 2, "none": []}
        assert copied == [[0.0, 0.0], 0]


def test_one_process_says_everything_to_itself() -> None:
    alone, kept = Assembly(), torch.ones(2)
    assert alone.share(mine := object(), "") == alone.collect(mine, "") == [mine]
    assert alone.ask_first(lambda: mine, "") is mine
    assert torch.equal(alone.spread({"a": kept}, 0, "")["a"], kept)
    alone.copy_first([kept], "")
    alone.meet("")
    alone.close()
    assert alone.group is None


def groups() -> list[int]:
    """Count the process groups that there are while it is made, at its end, and behind that."""
    join()
    assembly, counts = Assembly(Crew(20.0)), []
    for bring in (lambda: None, assembly.close, lambda: assembly.meet("to save"), assembly.close):
        bring()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    dist.barrier()
    return counts


@pytest.mark.multi
def test_what_is_said_behind_the_end_takes_a_group_that_is_closed_again() -> None:
    assert processes.run(groups, 2) == [[2, 1, 2, 1]] * 2


class Kept(torch.Tensor):
    """Is of a kind that only torch.save knows, as 8-bit optimizer state is."""


class Unknown(torch.Tensor):
    """Is of a kind that no checkpoint can be read with."""


def bring() -> Any:
    """Let every rank give tensors of all kinds; return what rank 0 has."""
    rank, _ = join()
    torch.serialization.add_safe_globals([Kept])
    large = torch.arange(5000.0).add_(rank)
    mine = {
        "large": large, "turned": large.view(50, 100).t(), "bits": large.bfloat16(),
        "small": torch.tensor(rank), "none": None, "name": f"rank {rank}",
        "nested": {"more": [large + 1, 2.5]}, "kind": large.clone().as_subclass(Kept),
        "sparse": torch.eye(60).to_sparse(), "rate": np.float64(0.5),
    }  # fmt: skip
    parts = Assembly(Crew(20.0)).collect(mine, "to bring it")
    for part in parts or []:
        kept: Any = part["kind"]
        part |= {"kind": [type(kept).__name__, kept.as_subclass(torch.Tensor)]}  # type: ignore[operator]
        part |= {"sparse": part["sparse"].to_dense()}
    return parts


@pytest.mark.multi
def test_what_ranks_have_comes_to_rank_0() -> None:
    parts, *others = processes.run(bring, 3)
    assert others == [None, None]
    for rank, part in enumerate(parts):
        large = torch.arange(5000.0).add_(rank)
        assert torch.equal(part["large"], large)
        assert torch.equal(part["turned"], large.view(50, 100).t())
        assert torch.equal(part["bits"], large.bfloat16())
        assert torch.equal(part["nested"]["more"][0], large + 1)
        assert part["kind"][0] == "Kept"
        assert torch.equal(part["kind"][1], large)
        assert torch.equal(part["sparse"], torch.eye(60))
        assert (int(part["small"]), part["none"], part["name"]) == (rank, None, f"rank {rank}")
        assert part["nested"]["more"][1] == part["rate"] + 2 == 2.5


def bring_unknown() -> None:
    join()
    Assembly(Crew(20.0)).collect({"state": torch.zeros(3).as_subclass(Unknown)}, "to bring it")


@pytest.mark.multi
def test_values_that_no_checkpoint_can_be_read_with_are_refused_by_name() -> None:
    found = r"rank 1 has values of tests.*test_assembly.Unknown in .*; allowed: tensors, numbers"
    with pytest.raises(processes.RanksFailedError, match=found):
        processes.run(bring_unknown, 2)


def pickled(num: int) -> list[int] | None:
    join()
    buffer = torch.zeros(num)
    parts = Assembly(Crew(20.0)).collect({"small": buffer[:3]}, "to bring it")
    return None if parts is None else [part["small"].untyped_storage().nbytes() for part in parts]


@pytest.mark.multi
def test_what_is_small_travels_without_the_buffer_in_which_it_lies() -> None:
    sizes, _ = processes.run(pickled, 2, 5000)
    assert sizes == [4 * 5000, 4 * 3]  # the own one lies where it lay
