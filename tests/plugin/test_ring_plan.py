"""Data-parallel presets by name on a network: what is said of them, and what is chosen."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader, IterableDataset

from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plugin.auto import lies_on_hosts, network_of, on_hosts
from lightning_cyclic.plugin.ring_plan import _group_sizes
from lightning_cyclic.simulate import Network
from lightning_cyclic.strategy import CyclicStrategy
from tests import processes
from tests.corpus import assert_same, weights_of
from tests.plugin.test_auto import Net, make_trainer
from tests.processes import RanksFailedError

NUMBERS = "stages", "slack", "groups"
NOT_CHOSEN = '="auto" with preset .*, for which it is not chosen'
FAR = {"bandwidth": "10Gbit/s", "latency": "20ms"}  # which lockstep waits for in each step
# where bytes take all the time lockstep sends less: to three workers 4/3 of the model's
NARROW = {"bandwidth": 1e4, "latency": 0.0}


def fit(arguments: dict[str, Any], ckpt_path: str | None = None, **flags: Any) -> dict[str, Any]:
    """Train, and return what comes out, what was said, and what was chosen."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    strategy = CyclicStrategy(**arguments)
    trainer, module = make_trainer(strategy, **flags), Net()
    seed_everything(7, verbose=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, ckpt_path=ckpt_path)
    chosen = strategy._chosen
    return {
        "weights": weights_of(module),
        "random": (torch.rand(2), module.made_loaders),
        "said": [text for text in said if "predict" in text],
        "warned": [str(w.message) for w in caught if "predict" in str(w.message)],
        "chosen": {name: getattr(chosen, name) for name in NUMBERS},
        "plan": strategy.plan,
    }


def save(arguments: dict[str, Any], path: str) -> dict[str, Any]:
    class Saver(L.Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: L.LightningModule) -> None:
            trainer.save_checkpoint(path)

    return fit(arguments, max_epochs=1, enable_checkpointing=True, callbacks=[Saver()])


@pytest.mark.parametrize("preset", ["cyclic_dp", "cyclic_dp_v1", "cyclic_zero"])
@pytest.mark.multi
def test_who_names_a_preset_is_told_what_ddp_would_take(preset: str) -> None:
    ranks = processes.run(fit, 3, {"preset": preset, **NARROW})
    (text,) = ranks[0]["warned"]
    assert text.startswith("DDP is predicted to take 0.")
    assert "10 kB/s" in text
    assert "strategy='ddp'" in text
    assert [rank["warned"] for rank in ranks[1:]] == [[], []]
    assert [rank["random"][1] for rank in ranks] == [2, 1, 1]  # rank 0 asks once more for data


@pytest.mark.multi
def test_it_changes_no_bit() -> None:
    told, plain = (
        processes.run(fit, 2, {"preset": "cyclic_dp", **network}) for network in (FAR, {})
    )
    assert told[0]["warned"] == []
    (text,) = told[0]["said"]
    assert "times as long as this step" in text
    assert plain[0]["said"] == plain[0]["warned"] == []
    for one, other in zip(told, plain, strict=True):
        assert_same(one["weights"], other["weights"])
        assert torch.equal(one["random"][0], other["random"][0])


class Once(IterableDataset[Any]):
    """Give each batch once."""

    def __init__(self) -> None:
        self._rows = iter([(torch.zeros(6), 1)] * 32)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self._rows)


class OnceNet(Net):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Once(), batch_size=4)

    val_dataloader = None  # type: ignore[assignment]


def fit_once(arguments: dict[str, Any]) -> None:
    make_trainer(CyclicStrategy(**arguments), max_steps=2).fit(OnceNet())


@pytest.mark.multi
def test_data_that_can_be_read_once_are_trained_on_but_nothing_is_chosen_by_them() -> None:
    processes.run(fit_once, 2, {"preset": "cyclic_dp", **FAR})
    with pytest.raises(RanksFailedError, match="can be read once only") as caught:
        processes.run(fit_once, 2, {"preset": "cyclic_dp", "slack": "auto", **FAR})
    assert sorted(caught.value.errors) == [0, 1]


@pytest.mark.parametrize("fixed", [{}, {"stages": 2}])
@pytest.mark.multi
def test_a_run_is_the_one_of_the_numbers_that_were_chosen(fixed: dict[str, Any]) -> None:
    auto = processes.run(fit, 2, {"preset": "cyclic_dp", "slack": "auto", **FAR, **fixed})
    chosen = auto[0]["chosen"]
    assert [rank["chosen"] for rank in auto] == [chosen, chosen]
    assert isinstance(chosen["slack"], int)
    assert chosen["stages"] == fixed.get("stages", chosen["stages"])
    assert auto[0]["plan"].slack == chosen["slack"]
    assert "lightning_cyclic chose CyclicStrategy" in auto[0]["said"][0]
    named = processes.run(fit, 2, {"preset": "cyclic_dp", **chosen})
    for one, other in zip(auto, named, strict=True):
        assert_same(one["weights"], other["weights"])
        assert torch.equal(one["random"][0], other["random"][0])


@pytest.mark.parametrize("name", ["slack", "groups"])
@pytest.mark.multi
def test_a_checkpoint_keeps_the_numbers(name: str, tmp_path: Path) -> None:
    path, asked = str(tmp_path / "a.ckpt"), {"preset": "cyclic_dp", name: "auto", **FAR}
    first = processes.run(save, 2, asked, path)
    kept = torch.load(path, weights_only=False)["lightning_cyclic"]["ring"]
    assert kept["options"][name] == first[0]["chosen"][name]
    resumed = processes.run(fit, 2, asked, path)
    assert resumed[0]["chosen"] == first[0]["chosen"]
    assert [rank["random"][1] for rank in resumed] == [1, 1]  # nobody measured
    named = processes.run(fit, 2, {"preset": "cyclic_dp", **first[0]["chosen"]}, path)
    for one, other in zip(resumed, named, strict=True):
        assert_same(one["weights"], other["weights"])


@pytest.mark.multi
def test_one_worker_has_nothing_to_choose() -> None:
    assert CyclicStrategy("cyclic_dp", slack="auto", **FAR).slack == "auto"
    (rank,) = processes.run(fit, 1, {"preset": "cyclic_dp", "slack": "auto", **FAR})
    assert rank["chosen"]["slack"] == 0
    assert (rank["random"][1], rank["said"]) == (1, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "cyclic_dp", "slack": "auto"}, 'slack="auto" without a network'),
        (
            {"preset": "cyclic_dp", "slack": "much", **FAR},
            "slack 'much' is unknown; allowed: auto",
        ),
        ({"preset": "cyclic_dp_v1", "slack": "auto", **FAR}, NOT_CHOSEN),
        ({"preset": "cyclic_dp", "groups": "auto"}, 'groups="auto" without a network'),
        ({"preset": "cyclic_dp", "groups": "many", **FAR}, "groups 'many' is unknown"),
        ({"preset": "cyclic_zero", "groups": "auto", **FAR}, NOT_CHOSEN),
        ({"preset": "lockstep_dp", "groups": "auto", **FAR}, "cyclic_dp_v1"),
        ({"preset": "1f1b", "slack": "auto", **FAR}, NOT_CHOSEN),
        ({"preset": "cyclic_mp", "latency": 1e-3}, "is of no use with placement 'shared'"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CyclicStrategy(**arguments)


@pytest.mark.parametrize(
    ("asked", "groups"),
    [
        ({"preset": "cyclic_dp", "slack": "auto", "groups": "auto"}, 2),
        ({"preset": "cyclic_dp", "slack": "auto", "groups": 2}, 2),
        # where all weights are old, leads wait for their group as long as for another worker
        ({"preset": "cyclic_dp_v1", "groups": "auto"}, None),
    ],
)
@pytest.mark.multi
def test_groups_are_chosen_and_are_those_of_a_run_with_the_numbers(
    asked: dict[str, Any], groups: int | None
) -> None:
    """Ranks of a host between which messages take long: two groups have fewer to wait for."""
    auto = processes.run(fit, 4, {**asked, **FAR})
    chosen = auto[0]["chosen"]
    assert [rank["chosen"] for rank in auto] == [chosen] * 4
    assert chosen["groups"] == groups
    assert auto[0]["plan"].num_groups == (groups or 4)
    named = processes.run(fit, 4, {"preset": asked["preset"], **chosen})
    for one, other in zip(auto, named, strict=True):
        assert_same(one["weights"], other["weights"])


def test_workers_of_a_group_are_on_one_host_and_hand_no_buffers_on_within_a_step() -> None:
    options = CyclicStrategy("cyclic_dp", groups="auto", **FAR)._chosen
    hosts, plan = list("aaaabbbb"), make_plan("cyclic_dp", num_stages=1, num_workers=8)
    for module, batches, expected in (
        (torch.nn.Linear(1, 1), 2, (1, 2, 4)),
        (torch.nn.BatchNorm1d(1), 1, (1, 2, 4)),
        (torch.nn.BatchNorm1d(1), 2, (1,)),
    ):
        trainer: Any = SimpleNamespace(lightning_module=module, accumulate_grad_batches=batches)
        assert _group_sizes(trainer, options, plan, hosts) == expected
    fixed = CyclicStrategy("cyclic_dp", groups=4, **FAR)._chosen
    in_four = make_plan("cyclic_dp", num_stages=1, num_workers=8, groups=4)
    assert _group_sizes(trainer, fixed, in_four, hosts) == (2,)


def test_links_inside_hosts_are_no_slower_than_those_between_them() -> None:
    network = network_of("1Gbit/s", "1ms")
    assert on_hosts(network, list("aaaa")) == on_hosts(network, list("abcd")) == network
    both = on_hosts(network, list("bbaa"))
    assert (both.hosts, both.latency_s) == ((0, 0, 1, 1), 1e-3)
    assert both.inside == Network(latency_s=5e-6, bandwidth_bytes_per_s=1.25e10)
    quick = network_of("1Tbit/s", "1us")
    assert on_hosts(quick, list("aabb")).inside == quick


@pytest.mark.multi
def test_what_is_given_by_number_is_not_taken_from_a_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    both = {"preset": "cyclic_dp", "slack": "auto", "groups": "auto", **FAR}
    first = processes.run(save, 2, both, path)
    slack = first[0]["chosen"]["slack"] + 2
    resumed = processes.run(fit, 2, {**both, "slack": slack}, path)
    assert resumed[0]["chosen"] == first[0]["chosen"] | {"slack": slack}
    assert resumed[0]["plan"].slack == slack
    assert [rank["random"][1] for rank in resumed] == [1, 1]  # nobody measured
    more = {**both, "stages": 1}  # saved without a choice of groups, which is made now
    processes.run(save, 2, {**more, "groups": None}, path)
    resumed = processes.run(fit, 2, more, path)
    assert [rank["random"][1] for rank in resumed] == [2, 1]


def test_groups_of_other_hosts_are_chosen_anew() -> None:
    assert lies_on_hosts(None, [])
    assert lies_on_hosts(2, list("aabb"))
    assert not lies_on_hosts(2, list("abcd"))
    assert not lies_on_hosts(2, list("aaab"))
