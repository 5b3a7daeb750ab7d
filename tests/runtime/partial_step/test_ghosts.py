"""Ghosts know what a tensor looks like, give way to it once it came, and refuse before."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lightning_cyclic.errors import StepError
from lightning_cyclic.runtime.partial_step.ghosts import (
    Ghost,
    TensorSpec,
    reads_metadata,
    real,
    user_line,
)

CPU = torch.device("cpu")
X = torch.arange(6.0).reshape(3, 2).t()  # strides (1, 2)


class Pair(NamedTuple):
    first: Any
    second: Any


def ghost_of(x: torch.Tensor, value: torch.Tensor | None = None) -> Ghost:
    ghost = Ghost(TensorSpec.of(x), (1, 2, 0), CPU)
    ghost.value = value
    return ghost


def test_a_ghost_has_the_metadata_of_its_tensor_but_no_values():
    x = X.to(torch.float64).requires_grad_()
    ghost = ghost_of(x)
    assert TensorSpec.of(ghost) == TensorSpec.of(x)
    assert (ghost.shape, ghost.size(0), len(ghost), ghost.dim()) == (x.shape, 2, 2, 2)
    assert (ghost.stride(), ghost.is_contiguous(), ghost.numel()) == ((1, 2), False, 6)
    assert (ghost.dtype, ghost.device, ghost.requires_grad) == (torch.float64, CPU, True)
    assert ghost.is_floating_point()
    assert not ghost.is_complex()
    assert isinstance(ghost, torch.Tensor)
    assert "stage 1, event 2, leaf 0, filled=False" in repr(ghost)
    assert {ghost: 1}[ghost] == 1


def test_what_was_on_the_host_stays_there():
    spec = TensorSpec.of(X)
    assert spec.on_host
    meta = torch.device("meta")
    assert Ghost(spec, (0, 0, 0), meta).device == CPU
    assert Ghost(spec._replace(on_host=False), (0, 0, 0), meta).device == meta


def test_torch_functions_get_the_tensor_that_came():
    ghost = ghost_of(X, X)
    assert torch.equal(ghost + 1, X + 1)
    assert torch.equal(torch.cat([ghost, X]), torch.cat([X, X]))
    assert torch.equal(nn.functional.relu(input=ghost), X)
    assert torch.equal(ghost[0], X[0])
    assert torch.equal(ghost.T, X.T)
    assert float(ghost.sum()) == 15
    assert type(ghost * 1) is torch.Tensor


def test_the_tensor_that_came_answers_for_itself():
    """Its ghost was made of an earlier description: of another requires_grad, say."""
    ghost = ghost_of(X, X.clone().requires_grad_())
    assert ghost.requires_grad
    assert (ghost * 2).requires_grad


def test_a_ghost_without_a_tensor_is_refused_with_the_line():
    ghost, line = ghost_of(X), inspect.currentframe().f_lineno
    with pytest.raises(StepError) as caught:
        ghost + 1
    assert f"a tensor of stage 1 is used at {__file__}:{line + 2}" in str(caught.value)
    for use in (float, torch.sum, lambda x: x.T, lambda x: [1, 2][x], lambda x: X[x]):
        with pytest.raises(StepError, match="a tensor of stage 1"):
            use(ghost)


def test_an_operation_that_did_not_pass_through_python_is_refused():
    ghost = ghost_of(X)
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(StepError) as caught:
        ghost.exp()
    assert "aten.exp" in str(caught.value)
    assert __file__ in str(caught.value)


def test_containers_are_rebuilt_only_where_they_hold_a_ghost():
    ghost, marker = ghost_of(X, X), object()
    for value in ((1, X), [X, None], {"a": X}, Pair(X, marker), slice(1, 2), marker, (), X):
        made = real(value)
        assert made is value or (type(value) is slice and made == value)
    assert real(ghost) is X
    made = real((1, [ghost], {"a": ghost}, Pair(ghost, marker), slice(None, ghost)))
    assert made[0] == 1
    assert made[1][0] is made[2]["a"] is made[3].first is made[4].stop is X
    assert type(made[3]) is Pair
    assert made[3].second is marker


def test_every_property_of_a_tensor_that_is_a_tensor_is_known():
    x = torch.zeros(2, 2, dtype=torch.complex64)
    x.grad = torch.zeros_like(x)
    for name in set(dir(torch.Tensor)) - {"volatile"}:  # reading that warns
        attribute = getattr(torch.Tensor, name)
        if type(attribute).__name__ in ("getset_descriptor", "property") and name[0] != "_":
            is_tensor = isinstance(getattr(x, name, None), torch.Tensor)
            assert is_tensor != reads_metadata(attribute.__get__), name


HOSTS = ["lightning/pytorch/x.py", "lightning/fabric/x.py", "pytorch_lightning/x.py",
         "lightning_fabric/x.py"]  # fmt: skip


def asked_in(file):
    """Return the path of a file beside the package, and the line that code in it is told."""
    place = {"user_line": user_line}
    path = Path(inspect.getsourcefile(user_line)).parents[3] / file
    exec(compile("def ask(): return user_line()", str(path), "exec"), place)
    return path, place["ask"]()


@pytest.mark.parametrize("file", [*HOSTS, "lightning_cyclic/pipeline_strategy.py"])
def test_lines_of_hosts_and_of_the_package_are_not_the_users(file):
    assert asked_in(file)[1].startswith(f"{__file__}:")


def test_a_folder_whose_name_begins_as_the_packages_is_the_users():
    path, line = asked_in("lightning_cyclic_and_more/train.py")
    assert line == f"{path}:1"


def test_the_line_is_the_users():
    line = inspect.currentframe().f_lineno + 1
    assert user_line() == f"{__file__}:{line}"
    seen = []
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: seen.append(user_line()))
    layer(X.t())
    assert len(seen) == 1
    assert seen[0].startswith(f"{__file__}:")
