"""CyclicStrategy("auto"): the planner's choice, and the run that a user with that choice has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_cyclic import SparseStatePrecision
from lightning_cyclic.errors import ConfigurationError, PlanError
from lightning_cyclic.plan.presets import PRESETS
from lightning_cyclic.strategy import CyclicStrategy
from tests import processes
from tests.corpus import assert_same, weights_of
from tests.processes import RanksFailedError, here
from tests.pruned import random_masks
from tests.rows import more

ROWS, NUM_STEPS = 8, 3


class Net(L.LightningModule):
    """Layers with dropout and BatchNorm on shuffled data: all that random states move."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 16),
            nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2),
        )  # fmt: skip
        self.made_loaders = 0
        self.has_unused = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        net = self.net[:6] if self.has_unused else self.net
        loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("valid", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def data(self) -> TensorDataset:
        g, count = torch.Generator().manual_seed(2), ROWS * NUM_STEPS * here().num_ranks
        return TensorDataset(torch.randn(count, 6, generator=g), torch.arange(count) % 2)

    def train_dataloader(self) -> DataLoader[Any]:
        self.made_loaders += 1
        return DataLoader(self.data(), batch_size=ROWS, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data(), batch_size=ROWS)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def make_trainer(strategy: Any, **flags: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu", devices=1, num_nodes=here().num_ranks, strategy=strategy,
        **(quiet | {"enable_checkpointing": False, "max_epochs": 2} | flags),
    )  # fmt: skip


def fit(
    arguments: dict[str, Any], ckpt_path: str | None = None, reported: bool = False, **flags: Any
) -> dict[str, Any]:
    """Train, and return what comes out, with the arguments that name the plan that ran."""
    strategy = CyclicStrategy(**arguments)
    trainer, module = make_trainer(strategy, **flags), Net()
    seed_everything(7, verbose=False)
    trainer.fit(module, ckpt_path=ckpt_path)
    chosen = strategy._chosen
    names = ("preset", "stages", "num_micro", "width", "remat", "slack", "groups")
    return {
        "weights": weights_of(module),
        "metrics": {name: float(x) for name, x in trainer.callback_metrics.items()},
        "random": (torch.rand(2), module.made_loaders),
        "chosen": {name: getattr(chosen, name) for name in names},
        "plan": strategy.plan.preset,
        "step": trainer.global_step,
        "report": strategy.report() if reported else None,
    }


def save(arguments: dict[str, Any], path: str) -> dict[str, Any]:
    return fit(arguments, max_epochs=1, enable_checkpointing=True, callbacks=[_Saver(path)])


class _Saver(Callback):
    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(self._path)


def assert_same_runs(auto: list[dict[str, Any]], named: list[dict[str, Any]]) -> None:
    for r, (one, other) in enumerate(zip(auto, named, strict=True)):
        assert_same(one["weights"], other["weights"], f"rank {r}")
        assert (one["metrics"], one["step"]) == (other["metrics"], other["step"])
        assert torch.equal(one["random"][0], other["random"][0])


@pytest.mark.parametrize(
    ("num_ranks", "asked"),
    [
        (1, {}),
        (1, {"num_micro": 4, "weights": "sync"}),
        (2, {"latency": "20ms"}),  # for which lockstep waits more than once in a step
        (2, {"latency": "20ms", "placement": "replicated"}),
        (2, {"weights": "sync", "placement": "pipelined", "latency": 1e-6}),
        (2, {"weights": "freshest", "placement": "pipelined", "remat": "always"}),
        (2, {"width": 2, "num_micro": 2}),
        (2, {"sharding": "full"}),
        (2, {"placement": "shared"}),
        (4, {"latency": "20ms", "weights": "freshest", "placement": "replicated"}),
    ],
)
@pytest.mark.multi
def test_a_run_is_the_one_of_the_plan_that_was_chosen(
    num_ranks: int, asked: dict[str, Any]
) -> None:
    auto = processes.run(fit, num_ranks, {"preset": "auto", **asked})
    chosen = auto[0]["chosen"]
    assert [rank["chosen"] for rank in auto] == [chosen] * num_ranks
    assert {rank["plan"] for rank in auto} == {chosen["preset"]}
    for name in ("num_micro", "width", "remat"):
        assert chosen[name] == asked.get(name, chosen[name])
    assert (chosen["groups"] == 2) == (num_ranks == 4)  # fewer to wait for
    named = processes.run(fit, num_ranks, chosen)
    assert_same_runs(auto, named)
    made = [rank["random"][1] for rank in auto]  # rank 0 asks for the data once more
    assert made == [2] + [1] * (num_ranks - 1)


def fit_by_lightning(unused: bool, flags: dict[str, Any]) -> dict[str, Any]:
    trainer, module = make_trainer(DDPStrategy(find_unused_parameters=unused), **flags), Net()
    module.has_unused = unused
    seed_everything(7, verbose=False)
    trainer.fit(module)
    metrics = {name: float(x) for name, x in trainer.callback_metrics.items()}
    return {"weights": weights_of(module), "metrics": metrics, "step": trainer.global_step}


def fit_lockstep(unused: bool, path: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Train by what "auto" chooses where messages cost nothing."""
    strategy = CyclicStrategy("auto", placement="replicated", bandwidth=1e15, latency=0.0)
    trainer, module = make_trainer(strategy, **flags), Net()
    module.has_unused = unused
    seed_everything(7, verbose=False)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    metrics = {name: float(x) for name, x in trainer.callback_metrics.items()}
    return {
        "weights": weights_of(module),
        "metrics": metrics,
        "step": trainer.global_step,
        "why": (strategy._auto.state() or {})["why"] if strategy._auto else "",
        "arguments": strategy._chosen.ddp_arguments,
        "stages": set(strategy.stage_of.values()),
    }


@pytest.mark.parametrize(
    ("unused", "flags"), [(False, {}), (True, {}), (False, {"accumulate_grad_batches": 3})]
)
@pytest.mark.multi
def test_where_lockstep_is_as_fast_a_run_is_that_of_ddp(
    unused: bool, flags: dict[str, Any], tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    auto = processes.run(fit_lockstep, 2, unused, path, flags)
    ddp = processes.run(fit_by_lightning, 2, unused, flags)
    for one, other in zip(auto, ddp, strict=True):
        assert_same(one["weights"], other["weights"])
        assert (one["metrics"], one["step"]) == (other["metrics"], other["step"])
        assert one["arguments"] == {"find_unused_parameters": unused}
        assert one["stages"] == {0}
    assert 'chose what strategy="ddp" does' in auto[0]["why"]
    assert_same(torch.load(path)["state_dict"], auto[0]["weights"])


@pytest.mark.multi
def test_a_checkpoint_keeps_the_choice(tmp_path: Path) -> None:
    path, asked = str(tmp_path / "a.ckpt"), {"preset": "auto", "placement": "pipelined"}
    first = processes.run(save, 2, asked, path)
    kept = torch.load(path, weights_only=False)["lightning_cyclic"]["auto"]
    assert kept["options"].items() <= first[0]["chosen"].items()
    # a choice that no measurement would make now, of another shape of the same stages
    resumed = processes.run(fit, 2, asked | {"memory_limit_bytes": 1}, path)
    assert resumed[0]["chosen"] == first[0]["chosen"]
    assert [rank["random"][1] for rank in resumed] == [1, 1]  # nobody measured
    assert_same_runs(resumed, processes.run(fit, 2, first[0]["chosen"], path))


def fit_pruned(arguments: dict[str, Any]) -> dict[str, Any]:
    plugin = SparseStatePrecision(random_masks(Net()))
    strategy, module = CyclicStrategy(**arguments), Net()
    trainer = make_trainer(strategy, plugins=[plugin])
    seed_everything(7, verbose=False)
    trainer.fit(module)
    auto = strategy._auto
    return {
        "weights": weights_of(module),
        "chosen": None if auto is None else auto.state()["options"],
        "problem": None if auto is None else auto._problem,
    }


@pytest.mark.parametrize(
    ("num_ranks", "asked"),
    [
        (1, {}),
        more(2, {}),
        (2, {"placement": "pipelined"}),
        (2, {"placement": "replicated"}),
    ],
)
@pytest.mark.multi
def test_compressed_states_are_planned_with_their_bytes(
    num_ranks: int, asked: dict[str, Any]
) -> None:
    auto = processes.run(fit_pruned, num_ranks, {"preset": "auto", **asked})
    problem = auto[0]["problem"]
    pruned = sum(int((~mask).sum()) for mask in random_masks(Net()).values())
    assert problem.sparsity == pruned / sum(p.numel() for p in Net().parameters())
    assert problem.precision == "bf16-true"
    assert not any(PRESETS[name].weights == "predicted" for name in problem.presets)
    assert len(problem.presets) > 1
    named = processes.run(fit_pruned, num_ranks, auto[0]["chosen"])
    for one, other in zip(auto, named, strict=True):
        assert one["chosen"] == auto[0]["chosen"]
        assert_same(one["weights"], other["weights"])


def fit_pruned_as_was_chosen_without() -> None:
    strategy = CyclicStrategy("auto")
    options = {"preset": "pipeoptim", "stages": ["net.4"], "num_micro": 1}
    assert strategy._auto is not None
    strategy._auto.load({"options": options, "num_workers": 2, "why": ""})
    make_trainer(strategy, plugins=[SparseStatePrecision(sparsity=0.5)]).fit(Net())


@pytest.mark.multi
def test_a_choice_of_a_checkpoint_that_does_not_fit_compressed_states_is_refused() -> None:
    with pytest.raises(RanksFailedError, match="'pipeoptim', which predicts weights") as caught:
        processes.run(fit_pruned_as_was_chosen_without, 2)
    assert sorted(caught.value.errors) == [0, 1]


@pytest.mark.multi
def test_presets_that_the_trainer_cannot_run_are_left_out() -> None:
    asked = {"preset": "auto", "placement": "pipelined"}
    ranks = processes.run(accumulate, 2, asked)
    assert {rank["chosen"]["preset"] for rank in ranks} <= {"gpipe", "1f1b"}


def accumulate(arguments: dict[str, Any]) -> dict[str, Any]:
    return fit(arguments, accumulate_grad_batches=2)


def fit_twice() -> tuple[list[int], list[bool], str]:
    strategy, module, other = CyclicStrategy("auto"), Net(), Net()
    trainer, choices = make_trainer(strategy, max_epochs=0), []
    for net in (module, module, other):
        trainer.fit_loop.max_epochs += 1
        trainer.fit(net)
        choices.append(strategy._auto.state())
    same = [choices[1] is choices[0], choices[2] is choices[1]]
    return [module.made_loaders, other.made_loaders], same, choices[0]["why"]


def test_a_second_fit_of_the_module_keeps_the_choice() -> None:
    ((made, same, why),) = processes.run(fit_twice, 1)
    assert made == [3, 2]  # one for each fit, and one for each choice
    assert same == [True, False]
    assert why.startswith("lightning_cyclic chose CyclicStrategy(")
    assert why.endswith("the weights that forwards read are always the newest")


def test_the_table_on_demand() -> None:
    text = processes.run(fit, 1, {"preset": "auto"}, None, True)[0]["report"]
    assert text.startswith(f"Net: {ROWS} samples per update, 1 workers")


def evaluate(arguments: dict[str, Any]) -> dict[str, float]:
    trainer = make_trainer(CyclicStrategy(**arguments))
    (metrics,) = trainer.validate(Net(), verbose=False)
    return metrics


def test_evaluation_alone_chooses_nothing() -> None:
    assert processes.run(evaluate, 1, {"preset": "auto"}) == processes.run(
        evaluate, 1, {"preset": "cyclic_dp"}
    )


# ---------------------------------------------------------------------- refusals


@pytest.mark.multi
def test_all_workers_hear_that_nothing_fits() -> None:
    with pytest.raises(RanksFailedError) as caught:
        processes.run(fit, 2, {"preset": "auto", "memory_limit_bytes": 1000})
    assert sorted(caught.value.errors) == [0, 1]
    for text in caught.value.errors.values():
        assert "no plan fits into memory_bytes=1000" in text
        assert "PlanError" in text or "NothingFitsError" in text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stages": 2}, ConfigurationError, 'stages=2 with preset "auto"'),
        ({"remat": "except_last"}, ConfigurationError, "remat='except_last' with preset"),
        ({"backward_weights": "predicted"}, ConfigurationError, "backward_weights='predicted'"),
        ({"warmup_steps": 5}, ConfigurationError, "warmup_steps=5 .*pipedream_2bw"),
        ({"lookahead_lrs": True}, ConfigurationError, "lookahead_lrs=True .*pipeoptim"),
        ({"weights": "none"}, ConfigurationError, "no preset .* has {'weights': 'none'}"),
        ({"placement": "replicated", "num_micro": 2}, ConfigurationError, "with num_micro=2"),
        ({"bandwidth": "fast"}, PlanError, "'fast' is not a bandwidth"),
    ],
)
def test_arguments_that_do_not_go_with_auto(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        CyclicStrategy("auto", **arguments)


def test_links_are_of_no_use_where_nothing_is_chosen_or_compared() -> None:
    CyclicStrategy("1f1b", bandwidth="1Gbit/s")
    CyclicStrategy("cyclic_dp", latency=0)
    with pytest.raises(ConfigurationError, match="latency=0 is of no use with .* 'shared'"):
        CyclicStrategy("cyclic_mp", latency=0)


def stages_of(**arguments: Any) -> list[str]:
    """Cut a pipeline of two stages; return where the second begins, and what each worker has."""
    strategy = CyclicStrategy("1f1b", num_micro=4, **arguments)
    trainer, module = make_trainer(strategy, max_steps=1, max_epochs=-1), Net()
    trainer.fit(module)
    return sorted({name.rpartition(".")[0] for name, j in strategy.stage_of.items() if j == 0})


def cut(arguments: dict[str, Any]) -> list[str]:
    return stages_of(**arguments)


@pytest.mark.multi
def test_the_stages_of_a_named_pipeline_fit_into_memory() -> None:
    # three layers of 16 x 16, of which two do not fit beside what training keeps of them
    least = "memory_limit_bytes=1 cannot be met with stages=2; allowed: (?P<bytes>\\d+) bytes"
    with pytest.raises(RanksFailedError) as caught:
        processes.run(cut, 2, {"memory_limit_bytes": 1})
    found = re.search(least, str(caught.value))
    assert found is not None
    limit = int(found["bytes"])
    first = processes.run(cut, 2, {"memory_limit_bytes": limit})
    assert first[0] == first[1]
    with pytest.raises(RanksFailedError, match=f"allowed: {limit} bytes"):
        processes.run(cut, 2, {"memory_limit_bytes": limit - 1})


class Stream(IterableDataset[Any]):
    """An iterator: what was drawn is gone."""

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        return torch.ones(ROWS, 6), torch.zeros(ROWS, dtype=torch.long)


def fit_on_a_stream() -> None:
    make_trainer(CyclicStrategy("auto"), max_steps=1).fit(Net(), DataLoader(Stream(), None))


def test_data_that_can_be_read_once_only() -> None:
    with pytest.raises(RanksFailedError, match="Stream, can be read once only"):
        processes.run(fit_on_a_stream, 1)


def fit_by_name(name: str) -> tuple[str, str]:
    trainer = make_trainer(name, max_steps=1, max_epochs=-1)
    before = trainer.strategy.preset
    trainer.fit(Net())
    return before, trainer.strategy.preset


def test_the_registered_name() -> None:
    ((before, after),) = processes.run(fit_by_name, 1, "cyclic_auto")
    assert before == "auto" != after
