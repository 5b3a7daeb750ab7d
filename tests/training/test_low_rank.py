"""Gradients of a low rank: backwards make factors, workers send them; the bits of one process."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic import LowRankGradients, PowerSgd
from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.runtime.codecs.factored import FactoredGradient
from tests.harness.processes import here
from tests.harness.rows import more
from tests.harness.runs import Result, own_part, run, saving, trained
from tests.harness.trainers import assert_same
from tests.references import sbpca
from tests.references.scaled import precision

pytestmark = pytest.mark.multi

NUM_STEPS = 5
ROWS = 5
RANK, BLOCK = 2, 2  # a block that does not divide the rows
STAGES = ["net.2", "net.5", "net.7"]
FACTORED = ["net.0.weight", "net.3.weight", "net.5.weight"]  # the last has too few elements


class Net(LightningModule):
    """Has a convolution, what writes to its output, and linear layers, of which one is small."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(),
            nn.Linear(16 * 16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4),
        )  # fmt: skip
        self.optimizer = optimizer

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x).sub(y).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def micro_batches(n: int, num_steps: int = NUM_STEPS) -> list[list[list[Tensor]]]:
    """Return, by step and worker, what it trains on."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(num_steps, n, ROWS, 3, 4, 4, generator=g)
    y = torch.rand(num_steps, n, ROWS, 4, generator=g)
    return [[[x[t, i], y[t, i]] for i in range(n)] for t in range(num_steps)]


def own_batches(n: int, num_steps: int = NUM_STEPS) -> DataLoader[Any]:
    """Return this worker's batches; of one process those of all workers, joined."""
    return own_part(micro_batches(n, num_steps))


def fit(
    preset: str, n: int, num_ranks: int | None = None, make: Any = Net, **more: Any
) -> list[Result]:
    """Train as n workers do, with as many processes or with one."""
    num_ranks = num_ranks or n
    options = {"preset": preset, "stages": STAGES}
    if num_ranks < n:
        options["num_microbatches"] = n
    options |= more.pop("options", {})
    data = more.pop("data", partial(own_batches, n))
    low_rank = more.pop("low_rank", LowRankGradients(RANK, BLOCK))
    more["callbacks"] = [*([low_rank] if low_rank else []), *more.pop("callbacks", ())]
    return trained(make, options, num_ranks, data=data, **more)


def plainly(make: Any = Net, strategy: Any = "auto", **more: Any) -> Result:
    """Train on one device as Lightning itself does."""
    data = more.pop("data", partial(own_batches, 1))
    low_rank = more.pop("low_rank", LowRankGradients(RANK, BLOCK))
    more["callbacks"] = [low_rank, *more.pop("callbacks", ())]
    (one,) = trained(make, strategy, 1, data=data, **more)
    return one


# ---------------------------------------------------------------------- the rule, by itself


def by_rule(n: int, rounds: int = 1, optimizer: str = "adamw") -> dict[str, Tensor]:
    """Train by the rule of lockstep_dp, with streams of each worker and layer."""
    module = Net(optimizer)
    update, streams = module.configure_optimizers(), dict[Any, sbpca.Stream]()
    steps = micro_batches(n, NUM_STEPS * rounds)
    named = dict(module.named_parameters())
    for t in range(NUM_STEPS):
        sums: dict[str, Tensor] = {}
        for i in range(n):
            update.zero_grad()
            seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in FACTORED}
            for step in steps[t * rounds : (t + 1) * rounds]:
                with sbpca.looking(module, seen):
                    loss = module.loss(*step[i])
                    torch.autograd.backward(loss, torch.ones_like(loss) / n / rounds)
            for name, p in named.items():
                assert p.grad is not None
                grad = p.grad.clone()
                if name in seen:
                    stream = streams.setdefault((i, name), sbpca.Stream(RANK))
                    blocks = [b for x, d in seen[name] for b in sbpca.blocks(x, d, BLOCK, p)]
                    grad = stream.gradient(blocks).view(p.shape)
                sums[name] = sums[name] + grad if name in sums else grad
        for name, p in named.items():
            p.grad = sums[name]
        update.step()
    return {name: p.detach() for name, p in named.items()}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, x in one.items():
        torch.testing.assert_close(x, other[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("n", [2, more(3)])
def test_workers_follow_the_rule_each_with_streams_of_its_own(n: int) -> None:
    expected = by_rule(n, optimizer="sgd")
    plain = fit("lockstep_dp", n, make=partial(Net, "sgd"), low_rank=None)[0].weights
    for rank in fit("lockstep_dp", n, make=partial(Net, "sgd")):
        assert_close(rank.weights, expected)
        assert any((rank.weights[name] - plain[name]).abs().max() > 1e-2 for name in FACTORED)


def test_one_device_follows_the_rule() -> None:
    one = plainly(partial(Net, "sgd"))
    assert_close(one.weights, by_rule(1, optimizer="sgd"))


def test_batches_that_are_added_up_are_blocks_of_one_step() -> None:
    expected = by_rule(1, rounds=2, optimizer="sgd")
    data = partial(own_batches, 1, 2 * NUM_STEPS)
    one = plainly(partial(Net, "sgd"), data=data, accumulate_grad_batches=2)
    assert_close(one.weights, expected)


@pytest.mark.parametrize("preset", ["lockstep_dp", "cyclic_zero"])
def test_workers_that_add_batches_up_send_one_gradient(preset: str) -> None:
    data = partial(own_batches, 2, 2 * NUM_STEPS)
    make, flags = partial(Net, "sgd"), {"accumulate_grad_batches": 2}
    found = fit(preset, 2, make=make, data=data, **flags)
    if preset == "lockstep_dp":
        assert_close(found[0].weights, by_rule(2, rounds=2, optimizer="sgd"))
    else:
        assert_same(
            found[0].weights, fit("cyclic_dp", 2, make=make, data=data, **flags)[0].weights
        )


# ---------------------------------------------------------------------- the bits of one process


@pytest.mark.parametrize(
    ("preset", "n"),
    [
        ("cyclic_dp", 2),
        ("cyclic_dp", 4),
        ("lockstep_dp", 2),
        ("cyclic_dp_v1", 2),
        more("cyclic_dp_v1", 4),
        more("lockstep_dp", 4),
    ],
)
def test_processes_have_the_bits_of_one(preset: str, n: int) -> None:
    (one,) = fit(preset, n, 1)
    for rank in fit(preset, n):
        assert_same(rank.weights, one.weights)


@pytest.mark.parametrize("strategy", ["lockstep_dp", "cyclic_dp"])
def test_one_worker_has_the_bits_of_lightning(strategy: str) -> None:
    assert_same(plainly(strategy=strategy).weights, plainly().weights)


def test_one_worker_of_old_weights_has_streams_too() -> None:
    old, new = plainly(strategy="cyclic_dp_v1"), plainly(strategy="cyclic_dp")
    assert all(x.isfinite().all() for x in old.weights.values())
    assert any(not torch.equal(x, new.weights[name]) for name, x in old.weights.items())


@pytest.mark.parametrize("n", [2, more(4)])
def test_sharded_weights_have_the_bits_of_whole_ones(n: int) -> None:
    whole, sharded = (fit(preset, n) for preset in ("cyclic_dp", "cyclic_zero"))
    for one, other in zip(whole, sharded, strict=True):
        assert_same(other.weights, one.weights)


@pytest.mark.parametrize("kind", ["bf16-mixed", "bf16-true", more("64-true")])
def test_other_precisions_have_the_bits_of_one_process(kind: Any) -> None:
    (one,) = fit("cyclic_dp", 2, 1, precision=kind)
    for rank in fit("cyclic_dp", 2, precision=kind):
        assert_same(rank.weights, one.weights)


class Twice(Net):
    """Calls a layer in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(48, 32), nn.Linear(32, 32)
        self.between, self.last = nn.Linear(32, 32), nn.Linear(32, 4)
        del self.net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.again(self.first(x.flatten(1)).tanh()).tanh()
        x = self.again(self.between(x).tanh()).tanh()
        return self.last(x).sub(y).square().mean()


@pytest.mark.parametrize("stages", [["between"], 1], ids=str)
def test_a_layer_that_is_called_in_two_stages_has_one_stream(stages: Any) -> None:
    """The backward of the earlier stage goes on with what that of the later one has made."""
    options = {"stages": stages, "verify": 2}
    (one,) = fit("lockstep_dp", 2, 1, make=Twice, options=options, look=compared)
    assert one.found == 2
    for rank in fit("lockstep_dp", 2, make=Twice, options={"stages": ["between"]}):
        assert_same(rank.weights, one.weights)


def compared(trainer: Any, module: Any) -> int:
    steps: int = trainer.strategy.steps_compared
    return steps


def test_steps_of_one_device_are_compared_with_plain_ones() -> None:
    """The second begins with what the first has left."""
    (one,) = fit("lockstep_dp", 2, 1, look=compared, options={"verify": 2})
    assert one.found == 2


@pytest.mark.parametrize("preset", ["lockstep_dp", more("cyclic_dp_v1")])
def test_clipped_gradients_have_the_bits_of_one_process(preset: str) -> None:
    flags: dict[str, Any] = {"gradient_clip_val": 0.05}
    (one,) = fit(preset, 2, 1, **flags)
    free = fit(preset, 2)
    for rank, other in zip(fit(preset, 2, **flags), free, strict=True):
        assert_same(rank.weights, one.weights)
        assert any(not torch.equal(x, other.weights[k]) for k, x in rank.weights.items())


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("preset", "n", "num_ranks"),
    [("cyclic_dp", 2, 2), ("cyclic_dp", 2, 1), more("cyclic_dp", 4, 4)],
)
def test_stop_anywhere_and_go_on_with_the_same_bits(
    preset: str, n: int, num_ranks: int, tmp_path: Path
) -> None:
    ended = fit(preset, n, num_ranks, max_epochs=2, **saving(tmp_path))
    for step in (1, 3, NUM_STEPS + 1):
        file = tmp_path / f"step={step}.ckpt"
        again = fit(preset, n, num_ranks, ckpt_path=file, max_epochs=2)
        for rank, expected in zip(again, ended, strict=True):
            assert_same(rank.weights, expected.weights, f"from step {step}")


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        ("auto", [NUM_STEPS]),  # Lightning by itself begins an epoch's data again
        ("cyclic_dp_v1", [2, NUM_STEPS + 1]),
    ],
)
def test_one_device_goes_on_with_the_same_bits(
    strategy: str, steps: list[int], tmp_path: Path
) -> None:
    ended = plainly(strategy=strategy, max_epochs=2, **saving(tmp_path))
    for step in steps:
        file = tmp_path / f"step={step}.ckpt"
        again = plainly(strategy=strategy, max_epochs=2, ckpt_path=file)
        assert_same(again.weights, ended.weights, f"from step {step}")


def test_a_file_has_the_streams_of_each_worker(tmp_path: Path) -> None:
    fit("lockstep_dp", 2, **saving(tmp_path))
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["lightning_cyclic"]["codec"]
    assert saved["name"] == "LowRankGradients(rank=2, block=2)"
    assert saved["workers"].keys() == {"0", "1"}
    for streams in saved["workers"].values():
        assert sorted(streams) == FACTORED
        for stream in streams.values():
            assert stream.keys() == {"u", "sigma", "v"}


def test_streams_of_another_number_of_workers_are_dropped_and_said(tmp_path: Path) -> None:
    fit("lockstep_dp", 2, **saving(tmp_path, every=3))
    expects = ["The checkpoint ", "Be aware that when using"]
    ranks = fit(
        "lockstep_dp", 3, ckpt_path=tmp_path / "step=3.ckpt", max_epochs=2, expects=expects
    )
    (text,) = [text for text in ranks[0].warned if "left behind" in text]
    assert "compress=LowRankGradients(rank=2, block=2) of 2 workers" in text


# ---------------------------------------------------------------------- what is not finite


class Broken(Net):
    """Has rows that are not finite behind a layer, of one worker, in one step."""

    def __init__(self, at: int) -> None:
        super().__init__("sgd")
        self.at = at

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net[:4](x)
        if self.trainer.global_step == self.at and here().rank == here().num_ranks - 1:
            z.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), torch.nan))
        return self.net[4:](z).sub(y).square().mean()


def test_a_gradient_that_is_not_finite_arrives() -> None:
    for rank in fit("lockstep_dp", 2, make=partial(Broken, NUM_STEPS - 1)):
        assert rank.weights["net.3.weight"].isnan().all()
        assert rank.weights["net.5.weight"].isfinite().all()
    assert plainly(partial(Broken, NUM_STEPS - 1)).weights["net.3.weight"].isnan().all()


# ---------------------------------------------------------------------- bytes


def gradient_bytes(trainer: Any, module: Any) -> int:
    sent = trainer.strategy._training.transport.num_bytes
    return sum(sent[p] for p in (Payload.S, Payload.T, Payload.H))


def test_factors_are_sent() -> None:
    plain, coded = (
        sum(rank.found for rank in fit("lockstep_dp", 2, look=gradient_bytes, low_rank=low_rank))
        for low_rank in (None, LowRankGradients(RANK, BLOCK))
    )
    named = dict(Net().named_parameters())
    whole = sum(p.numel() for p in named.values())
    factors = whole
    for name in FACTORED:
        n, m = len(named[name]), named[name][0].numel()
        factors += RANK * (n + m + 1) - n * m
    assert plain - coded > 0.9 * 4 * NUM_STEPS * (whole - factors)


# ---------------------------------------------------------------------- memory


class Behind(Callback):
    """Notes the bytes of gradients behind each backward, and what reads them then."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []
        self.norms: list[float] = []

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        grads = [p.grad for p in module.parameters()]
        held = [g.held() if isinstance(g, FactoredGradient) else [g] for g in grads]
        self.num_bytes.append(sum(x.nbytes for xs in held for x in xs))
        if len(self.num_bytes) == NUM_STEPS:
            self.norms = [float(g.norm()) for g in grads]

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        grads = [p.grad for p in module.parameters()]
        assert {type(g) for g in grads} == {Tensor}  # whatever an optimizer does with them
        if self.norms:
            assert self.norms == [float(g.norm()) for g in grads]
            self.norms = []


def behind(trainer: Any, module: Any) -> list[int]:
    (found,) = (c.num_bytes for c in trainer.callbacks if isinstance(c, Behind))
    assert found
    return list(found)


def test_behind_a_backward_there_are_factors_and_whoever_reads_them_finds_gradients() -> None:
    named = dict(Net().named_parameters())
    expected = 0
    for name, p in named.items():
        is_factored = name in FACTORED
        expected += 4 * (RANK * (len(p) + p[0].numel() + 1) if is_factored else p.numel())
    found = plainly(callbacks=[Behind()], look=behind).found
    assert found == [expected] * NUM_STEPS
    assert expected < 2 * sum(p.numel() for p in named.values())  # of 4 bytes for each


# ---------------------------------------------------------------------- what does not go with it


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[3].weight.requires_grad_(False)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Net):
    """Has a weight whose gradient a hook changes, once training is under way."""

    def on_train_start(self) -> None:
        self.net[3].weight.register_hook(lambda grad: grad * 2)


class Glued(Net):
    """Uses the weight of a layer outside of it, too."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + self.net[5].weight.square().sum()


def named(*modules: str, rank: int = RANK) -> dict[str, Any]:
    return {"low_rank": LowRankGradients(rank, BLOCK, modules)}


@pytest.mark.parametrize(
    ("make", "num_ranks", "strategy", "says", "flags"),
    [
        (Net, 2, "lockstep_dp", "with precision='16-mixed', whose loss scale",
         {"plugins": [precision()]}),
        (Net, 1, "auto", "with precision='16-mixed', whose loss scale",
         {"plugins": [precision()]}),
        (Net, 2, {"compress": PowerSgd(rank=2)}, r"compress=PowerSgd\(rank=2\) with the callback",
         {}),
        (Net, 2, "gpipe", r"compress=LowRankGradients\(.*\) with preset 'gpipe'", {}),
        (Net, 2, "diloco", r"compress=LowRankGradients\(.*\) with preset 'diloco'", {}),
        (Net, 2, "ddp", "with DDPStrategy, which sends whole gradients", {}),
        (Manual, 1, "auto", "with automatic_optimization=False", {}),
        (Net, 1, {"num_microbatches": 2}, "num_microbatches and accumulate_grad_batches",
         {"accumulate_grad_batches": 2}),
        (Hooked, 2, "lockstep_dp", "a hook of the tensor has changed it", {}),
        (Glued, 2, "lockstep_dp", "is added to a dense one", {}),
        (Glued, 1, "auto", "is added to a dense one", {}),
        (Frozen, 1, "auto", "'net.3' has a weight that is frozen", named("net.3")),
        (Net, 1, "auto", r"'net.7' has a weight of 4 x 32, whose rank is at most 4; .* lower the",
         named("net.7", rank=5)),
        (Net, 1, "auto", "has no nn.Linear or nn.Conv2d of this name .*: net.0, net.3, net.5",
         named("net.3", "net.9")),
        (Net, 1, "auto", "of whose layers it takes none: 'net.0' has a weight of 16 x 27",
         {"low_rank": LowRankGradients(100)}),
    ],
    ids=lambda x: x if isinstance(x, str) and len(x) < 30 else None,
)  # fmt: skip
def test_what_does_not_go_with_it(
    make: Any, num_ranks: int, strategy: Any, says: str, flags: dict[str, Any]
) -> None:
    flags = dict(flags)
    low_rank = flags.pop("low_rank", LowRankGradients(RANK, BLOCK))
    flags["callbacks"] = [low_rank, *flags.pop("callbacks", ())]
    data = partial(own_batches, 2)
    for end in run(make, strategy, num_ranks, data=data, **flags):
        assert re.search(says, end.text), end.text
