"""Torch functions: one watch of them, what they are, and on whose line they are called."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_cyclic.runtime.torch_functions import (
    FunctionWatch,
    known,
    leave_modes,
    moves_nothing,
    num_modes,
    reads_metadata,
    user_line,
)


class Users(TorchFunctionMode):
    """A mode of the user's own code."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def watched():
    """Return a watch, and the names of what it has heard."""
    heard = []

    def hear(func, types, args, kwargs):
        heard.append(func.__name__)
        return func(*args, **kwargs)

    return FunctionWatch(hear), heard


def test_who_listens_answers():
    x, watch = torch.ones(1), FunctionWatch(lambda func, _, args, kwargs: (func.__name__, kwargs))
    with watch:
        assert torch.add(x, 1, alpha=2) == ("add", {"alpha": 2})
        watch.hear = None  # nobody: torch answers
        assert torch.add(torch.ones(1), 1).item() == 2


def test_a_watch_steps_aside_and_comes_back():
    watch, heard = watched()
    with watch:
        torch.zeros(1)
        assert watch.step_aside()
        torch.ones(1)
        watch.come_back()
        torch.arange(1)
    assert heard == ["zeros", "arange"]


def test_beneath_a_mode_of_the_users_it_stays():
    watch, heard = watched()
    with watch, Users():
        assert not watch.step_aside()
        torch.zeros(1)
    assert heard == ["zeros"]


def test_it_is_put_beneath_the_modes_that_were_entered_since():
    watch, heard = watched()
    depth = num_modes()
    with Users() as users:
        watch.insert(depth)
        torch.zeros(1)
        assert not watch.step_aside()  # the user's is on top
        assert num_modes() == depth + 2
    leave_modes(depth)
    assert num_modes() == depth
    torch.ones(1)
    assert heard == ["zeros"]
    assert users is not None


def test_what_functions_are():
    about = known(torch.Tensor.add_)
    assert (about.name, about.changes_first, about.reads_value) == ("add_", True, False)
    assert known(torch.Tensor.item).reads_value
    assert known(torch.nn.functional.dropout).is_random
    assert known(torch.Tensor.size).is_metadata
    assert known(torch.Tensor.T.__get__).name == "T.get"


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
    path = Path(inspect.getsourcefile(user_line)).parents[2] / file
    exec(compile("def ask(): return user_line()", str(path), "exec"), place)
    return path, place["ask"]()


@pytest.mark.parametrize("file", [*HOSTS, "lightning_cyclic/pipeline_strategy.py"])
def test_lines_of_hosts_and_of_the_package_are_not_the_users(file):
    assert asked_in(file)[1].file == __file__


def test_a_folder_whose_name_begins_as_the_packages_is_the_users():
    path, line = asked_in("lightning_cyclic_and_more/train.py")
    assert (line.file, line.number) == (str(path), 1)


def test_the_line_is_the_users():
    line = inspect.currentframe().f_lineno + 1
    assert user_line() == (__file__, line)
    seen = []
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: seen.append(user_line()))
    layer(torch.ones(3, 2))
    assert len(seen) == 1
    assert seen[0].file == __file__


@pytest.mark.parametrize(
    ("move", "is_none"),
    [
        (lambda p: p.to(torch.float32), True),
        (lambda p: p.to(p.device, None, True), True),
        (lambda p: p.to(torch.zeros(1)), True),
        (lambda p: p.float(), True),
        (lambda p: p.cpu(), True),
        (lambda p: p.to(torch.float64), False),
        (lambda p: p.half(), False),
        (lambda p: p.to(torch.float32, copy=True), False),
        (lambda p: p.to("cpu", torch.float32, False, True), False),
        (lambda p: p.to(memory_format=torch.channels_last), False),
        (lambda p: p.float(memory_format=torch.channels_last), False),
        (lambda p: p.detach(), False),
    ],
)
def test_what_moves_nothing_gives_the_parameter_itself(move, is_none):
    p, seen = nn.Parameter(torch.zeros(2, 3, 4, 5)), []

    def hear(func, types, args, kwargs):
        seen.append(moves_nothing(func, args, kwargs))
        return func(*args, **kwargs)

    with FunctionWatch(hear):
        moved = move(p)
    assert seen[-1] is is_none
    assert (moved is p) is is_none
