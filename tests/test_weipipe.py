"""weipipe: one device's bits, by workers that hand weights on to their neighbours."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan
from lightning_cyclic.plugin.checks import check_plan
from lightning_cyclic.runtime.buffers import Buffer
from lightning_cyclic.runtime.whole_step.versions import VersionStore
from tests import processes
from tests.corpus import Classifier, assert_same, fit, make_trainer, train_data, valid_data
from tests.rows import more

pytestmark = pytest.mark.multi
NUM_STEPS = 7


@pytest.mark.parametrize(
    ("n", "net", "optimizer", "stages"),
    [
        (1, "mlp", "sgd", 2),
        (2, "resnet", "adamw", 4),  # BatchNorm
        (2, "gpt2", "adamw", 2),  # a tied weight, dropout
        more(3, "batchnorm_mlp", "sgd", 3),
        more(3, "mlp", "adamw", 5),
        more(4, "gpt2", "sgd", 8),
        (4, "batchnorm_mlp", "adamw", 4),
        (4, "resnet", "sgd", 3),  # a worker that owns nothing
    ],
)
def test_weights_are_those_of_a_single_device_that_accumulates(
    n: int, net: str, optimizer: str, stages: int
) -> None:
    module = partial(Classifier, net, optimizer)
    strategy = {"preset": "weipipe", "stages": stages}
    ranks = processes.run(fit, n, module, strategy, NUM_STEPS, {"val_check_interval": 5})
    accumulating = {"accumulate_grad_batches": n}
    (single,) = processes.run(fit, 1, module, "auto", NUM_STEPS * n, accumulating)
    assert single["global_step"] == NUM_STEPS
    for i, rank in enumerate(ranks):
        assert rank["losses"] == single["losses"][i::n]
        assert_same(rank["weights"], single["weights"], f"worker {i}")


class Depths(Callback):
    """Note how many versions of each own stage this worker has ever had at once."""

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        engine = trainer.strategy._training._session.engine
        self.most = {j: engine.stores[j].depth for j in engine.owned}
        self.previous = dict(engine.state().previous)


def fit_noting(strategy: dict[str, Any]) -> tuple[dict[int, int], list[str]]:
    noted, module = Depths(), Classifier("mlp", "adamw")
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[noted])
    trainer.fit(module, train_data(module, NUM_STEPS), valid_data(module))
    return noted.most, list(noted.previous)


def test_owners_change_their_one_version_in_place() -> None:
    """Nobody reads an older one, as all have made their gradients when a stage is updated."""
    ranks = processes.run(fit_noting, 3, {"preset": "weipipe", "stages": 6})
    assert ranks == [({4: 1, 5: 1}, []), ({2: 1, 3: 1}, []), ({0: 1, 1: 1}, [])]


class Copies(Callback):
    """Count the copies of others' stages that lie here, wherever a module begins, or its grad."""

    def __init__(self) -> None:
        self.made: list[tuple[VersionStore, weakref.ref[Tensor]]] = []
        self.counts: set[int] = set()

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        for m in pl_module.modules():
            if next(m.parameters(recurse=False), None) is not None:
                m.register_forward_pre_hook(lambda *_: self.look(trainer))
        for p in pl_module.parameters():
            p.register_hook(lambda grad: self.look(trainer))  # type: ignore[no-untyped-call]

    def look(self, trainer: Any) -> None:
        if trainer.global_step > 0 and trainer.training:  # the first step finds the stages
            engine = trainer.strategy._training._session.engine
            others = [s for j, s in enumerate(engine.stores) if j not in engine.owned]
            self.counts.add(sum(x() is not None for s, x in self.made if s in others))


def fit_counting(stages: int) -> set[int]:
    copies, put = Copies(), VersionStore.put

    def noted(self: VersionStore, v: int, buffer: Buffer, word: int = 0) -> None:
        copies.made.append((self, weakref.ref(buffer.data)))
        put(self, v, buffer, word)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VersionStore, "put", noted)
        module, strategy = Classifier("mlp", "adamw"), {"preset": "weipipe", "stages": stages}
        trainer = make_trainer(strategy, max_epochs=1, callbacks=[copies])
        trainer.fit(module, train_data(module, NUM_STEPS), valid_data(module))
    return copies.counts


@pytest.mark.parametrize(("n", "stages"), [more(2, 6), more(3, 3), (4, 8)])
def test_a_worker_has_one_stage_of_others_even_while_it_is_handed_on(n: int, stages: int) -> None:
    assert processes.run(fit_counting, n, stages) == [{0, 1}] * n


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sharding": "full"}, r"'full' does not fit schedule 'cyclic_flush' .*allowed: 'ring'"),
        ({"sharding": "optimizer"}, r"sharding 'optimizer' .*allowed: 'ring'"),
        ({"weights": "freshest"}, r"'ring' does not fit weights 'freshest'"),
        ({"schedule": "cyclic"}, r"weights 'sync' on schedule 'cyclic' read version 1 of stage 0"),
        ({"weights": "delayed", "sharding": "none"}, r"weights 'delayed' with schedule 'cyclic_f"),
        (
            {"schedule": "lockstep"},
            r"sharding 'ring' .* has no runtime yet .*allowed: 'optimizer'",
        ),
        ({"num_micro": 2}, r"num_micro=2 with num_workers=3"),
        ({"slack": -1}, r"slack=-1; allowed: whole numbers from 0 on"),
    ],
)
def test_axes_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_plan(make_plan("weipipe", num_stages=3, num_workers=3, **changes))
