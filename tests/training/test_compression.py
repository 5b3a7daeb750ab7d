"""Codecs of gradients: the bits of one process by the same rule, and far fewer bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic import AbstractCodec, Dct, PowerSgd, TopK
from lightning_cyclic.plan.actions import Payload
from lightning_cyclic.runtime.codecs.choice import codec_of
from tests.harness.processes import here
from tests.harness.rows import more
from tests.harness.runs import Result, own_part, run, saving, trained
from tests.harness.trainers import assert_same
from tests.references.scaled import precision

pytestmark = pytest.mark.multi

NUM_STEPS = 6
ROWS = 5
DCT = Dct(density=0.05, threshold_every=2)
TOP = TopK(density=0.1)
POWER = PowerSgd(rank=2)


class Signs(AbstractCodec):
    """Sends signs, as a codec of a user's may."""

    has_memory: ClassVar[bool] = True

    def sent(self, like: Tensor) -> Sequence[Tensor]:
        return [like.new_empty(like.shape, dtype=torch.int8), like.new_empty((), dtype=like.dtype)]

    def encode(self, gradient: Tensor, state: Any) -> Sequence[Tensor]:
        w = gradient + state.get("left", torch.zeros_like(gradient))
        size = w.abs().mean()
        state["left"] = w - size * w.sign()
        return [w.sign().to(torch.int8), size]

    def decode(self, sent: Sequence[Tensor], like: Tensor) -> Tensor:
        return sent[0] * sent[1]


class Net(LightningModule):
    """Has matrices that are encoded, and vectors and a matrix that are too small."""

    def __init__(self, width: int = 32, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        sizes = [32, width, width, 32, 4]
        layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
        self.net = nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))
        self.optimizer = optimizer

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x).sub(y).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


STAGES = ["net.2", "net.4", "net.6"]


def micro_batches(n: int, num_steps: int = NUM_STEPS) -> list[list[list[Tensor]]]:
    """Return, by step and worker, what it trains on."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(num_steps, n, ROWS, 32, generator=g)
    y = torch.rand(num_steps, n, ROWS, 4, generator=g)
    return [[[x[t, i], y[t, i]] for i in range(n)] for t in range(num_steps)]


def own_batches(n: int, num_steps: int = NUM_STEPS) -> DataLoader[Any]:
    """Return this worker's batches; of one process those of all workers, joined."""
    return own_part(micro_batches(n, num_steps))


def fit(
    preset: str, n: int, codec: Any, num_ranks: int | None = None, make: Any = Net, **more: Any
) -> list[Result]:
    """Train as n workers do, with as many processes or with one."""
    num_ranks = num_ranks or n
    options = {"preset": preset, "compress": codec, "stages": STAGES}
    if num_ranks < n:
        options["num_microbatches"] = n
    options |= more.pop("options", {})
    data = more.pop("data", partial(own_batches, n))
    return trained(make, options, num_ranks, data=data, **more)


def by_rule(n: int, codec: Any, rounds: int = 1) -> dict[str, Tensor]:
    """Train by the rule of lockstep_dp, with a memory for each worker and tensor."""
    module, states = Net(), dict[Any, Any]()
    codec, optimizer = codec_of(codec), module.configure_optimizers()
    steps = micro_batches(n, NUM_STEPS * rounds)
    for t in range(NUM_STEPS):
        sums: dict[str, Tensor] = {}
        for i in range(n):
            optimizer.zero_grad()
            for step in steps[t * rounds : (t + 1) * rounds]:
                loss = module.loss(*step[i])
                torch.autograd.backward(loss, torch.ones_like(loss) / n / rounds)
            for name, p in module.named_parameters():
                assert p.grad is not None
                grad = p.grad.clone()
                if codec.takes(grad):
                    sent = codec.encode(grad, states.setdefault((i, name), {}))
                    grad = codec.decode(sent, torch.empty_like(p, device="meta"))
                sums[name] = sums[name] + grad if name in sums else grad
        for name, p in module.named_parameters():
            p.grad = sums[name]
        optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(x, other[name]) for name, x in one.items())


# ---------------------------------------------------------------------- the bits of one process


@pytest.mark.parametrize(
    ("n", "codec"),
    [(2, TOP), (4, DCT), (2, Signs()), (2, "int8"), (3, POWER), more(2, DCT), more(4, TOP)],
    ids=str,
)
def test_each_worker_encodes_its_own_and_owners_add_in_order(n: int, codec: Any) -> None:
    expected = by_rule(n, codec)
    for rank in fit("lockstep_dp", n, codec):
        assert_same(rank.weights, expected)
    assert differ(fit("lockstep_dp", n, None)[0].weights, expected)


@pytest.mark.parametrize(
    ("preset", "n", "codec"),
    [
        ("cyclic_dp", 2, DCT),
        ("cyclic_dp", 4, TOP),
        ("lockstep_dp", 2, DCT),
        more("lockstep_dp", 4, TOP),
        ("cyclic_dp_v1", 2, TOP),
        ("cyclic_dp", 4, POWER),
        ("cyclic_dp", 2, "int8"),
        ("lockstep_dp", 2, POWER),
        more("lockstep_dp", 4, "int8"),
        more("cyclic_dp", 4, DCT),
        more("cyclic_dp", 2, Signs()),
    ],
    ids=str,
)
def test_processes_have_the_bits_of_one(preset: str, n: int, codec: Any) -> None:
    (one,) = fit(preset, n, codec, 1)
    for rank in fit(preset, n, codec):
        assert_same(rank.weights, one.weights)


@pytest.mark.parametrize(
    ("precision", "codec"), [("bf16-true", TOP), ("64-true", POWER), more("bf16-mixed", DCT)]
)
def test_gradients_of_other_dtypes_are_encoded_in_float32_or_wider(
    precision: Any, codec: Any
) -> None:
    (one,) = fit("cyclic_dp", 2, codec, 1, precision=precision)
    for rank in fit("cyclic_dp", 2, codec, precision=precision):
        assert_same(rank.weights, one.weights)


@pytest.mark.parametrize(
    ("n", "codec"), [(2, TOP), (4, DCT), (2, POWER), more(4, POWER), more(2, "int8")], ids=str
)
def test_sharded_weights_have_the_bits_of_whole_ones(n: int, codec: Any) -> None:
    whole, sharded = (fit(preset, n, codec) for preset in ("cyclic_dp", "cyclic_zero"))
    for one, other in zip(whole, sharded, strict=True):
        assert_same(other.weights, one.weights)


def test_groups_send_theirs_straight_to_owners() -> None:
    groups = {"group_size": 2}  # weights are as late as with two workers
    whole, sharded = (fit(x, 4, TOP, options=groups) for x in ("cyclic_dp", "cyclic_zero"))
    for one, other in zip(whole, sharded, strict=True):
        assert_same(other.weights, one.weights)


@pytest.mark.parametrize("codec", [TopK(density=1), Dct(density=1)], ids=str)
@pytest.mark.parametrize("preset", ["cyclic_dp", more("lockstep_dp"), "cyclic_zero"])
def test_at_density_1_bits_are_those_of_sums_that_travel(preset: str, codec: Any) -> None:
    plain, coded = fit(preset, 2, None), fit(preset, 2, codec)
    for one, other in zip(plain, coded, strict=True):
        assert_same(other.weights, one.weights)


def test_batches_that_are_added_up_are_encoded_once() -> None:
    expected = by_rule(2, TOP, rounds=2)
    data = partial(own_batches, 2, 2 * NUM_STEPS)
    for rank in fit("lockstep_dp", 2, TOP, data=data, accumulate_grad_batches=2):
        assert_same(rank.weights, expected)


def test_one_worker_that_is_alone_encodes_nothing() -> None:
    """Under a rule that reads old weights, too, which makes it a worker like others."""
    for preset in ("cyclic_dp", "cyclic_dp_v1"):
        (plain,), (coded,) = (fit(preset, 1, codec) for codec in (None, TOP))
        assert_same(coded.weights, plain.weights)


def compared(trainer: Any, module: Any) -> int:
    steps: int = trainer.strategy.steps_compared
    return steps


def test_steps_of_one_device_are_compared_with_plain_ones_that_are_encoded() -> None:
    """The second begins with what the first has left."""
    (one,) = fit("lockstep_dp", 2, TOP, 1, look=compared, options={"verify": 2})
    assert one.found == 2


# ---------------------------------------------------------------------- checkpoints


def behind(n: int, num_ranks: int, codec: Any, file: Path, **flags: Any) -> list[Result]:
    return fit("cyclic_dp", n, codec, num_ranks, ckpt_path=file, max_epochs=2, **flags)


@pytest.mark.parametrize(
    ("n", "num_ranks", "codec"),
    [(2, 2, DCT), (2, 1, TOP), (2, 2, POWER), more(4, 4, TOP), more(2, 2, Signs())],
    ids=str,
)
def test_stop_anywhere_and_go_on_with_the_same_bits(
    n: int, num_ranks: int, codec: Any, tmp_path: Path
) -> None:
    run = fit("cyclic_dp", n, codec, num_ranks, max_epochs=2, **saving(tmp_path))
    assert len(list(tmp_path.glob("*.ckpt"))) == 2 * NUM_STEPS
    for step in (1, 3, NUM_STEPS + 1):
        again = behind(n, num_ranks, codec, tmp_path / f"step={step}.ckpt")
        for rank, expected in zip(again, run, strict=True):
            assert_same(rank.weights, expected.weights, f"from step {step}")


def test_a_folder_has_what_each_worker_keeps(tmp_path: Path) -> None:
    folders = {"save_distributed_checkpoint": True}
    run = fit("cyclic_dp", 2, DCT, max_epochs=2, options=folders, **saving(tmp_path))
    again = behind(2, 2, DCT, tmp_path / "step=3.ckpt", options=folders)
    for rank, expected in zip(again, run, strict=True):
        assert_same(rank.weights, expected.weights)


def test_a_file_has_what_gradients_left_behind(tmp_path: Path) -> None:
    fit("lockstep_dp", 2, DCT, **saving(tmp_path))
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["lightning_cyclic"]["codec"]
    assert saved["name"] == "Dct(density=0.05, threshold_every=2)"
    assert saved["workers"].keys() == {"0", "1"}
    for states in saved["workers"].values():
        assert states.keys() == {"net.0.weight", "net.2.weight", "net.4.weight"}
        for state in states.values():
            assert state.keys() == {"left", "threshold", "age"}
            assert state["age"] == 3
            assert state["left"].any()


@pytest.mark.parametrize(
    ("n", "codec", "now"),
    [(3, TOP, r"TopK\(.*\) of 3"), (2, DCT, r"Dct\(.*\) of 2"), (2, None, "none")],
    ids=["workers", "codec", "no codec"],
)
def test_what_does_not_fit_is_dropped_and_said(
    n: int, codec: Any, now: str, tmp_path: Path
) -> None:
    fit("lockstep_dp", 2, TOP, **saving(tmp_path, every=3))
    file, expects = tmp_path / "step=3.ckpt", ["The checkpoint ", "Be aware that when using"]
    ranks = fit("lockstep_dp", n, codec, ckpt_path=file, max_epochs=2, expects=expects)
    assert all(rank.global_step == 2 * NUM_STEPS for rank in ranks)
    (text,) = [text for text in ranks[0].warned if "left behind" in text]
    assert re.search(rf"under compress=TopK\(density=0.1\) of 2 workers, .* run has {now}: ", text)


# ---------------------------------------------------------------------- what is not finite


class Broken(Net):
    """Has a gradient with one element that is not finite, of one worker, in one step."""

    def __init__(self, at: int | None) -> None:
        super().__init__(optimizer="sgd")
        self.at = at
        self.net[2].weight.register_hook(self.changed)

    def changed(self, grad: Tensor) -> Tensor:
        if self.trainer.global_step != self.at or here().rank != 1:
            return grad
        grad = grad.clone()
        grad[7, 7] = torch.nan
        return grad


@pytest.mark.parametrize("codec", [TOP, DCT, POWER], ids=str)
def test_a_gradient_that_is_not_finite_arrives(codec: Any) -> None:
    for rank in fit("lockstep_dp", 2, codec, make=partial(Broken, NUM_STEPS - 1)):
        assert rank.weights["net.2.weight"][7, 7].isnan()
    for rank in fit("lockstep_dp", 2, codec, make=partial(Broken, None)):
        assert rank.weights["net.2.weight"].isfinite().all()


def test_a_loss_scale_sees_it_in_what_has_no_memory() -> None:
    """The step is left out, on all workers alike."""
    flags: dict[str, Any] = {"plugins": [precision(2.0**10)]}
    broken, whole = (
        fit("lockstep_dp", 2, "int8", make=partial(Broken, at), **flags) for at in (3, None)
    )
    for rank, other in zip(broken, whole, strict=True):
        assert_same(rank.weights, broken[0].weights)
        assert all(x.isfinite().all() for x in rank.weights.values())
        assert differ(rank.weights, other.weights)


# ---------------------------------------------------------------------- bytes


class Bytes(Callback):
    """Notes how many bytes were sent by the ends of steps."""

    def __init__(self) -> None:
        self.sent: list[Counter[Payload]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.sent.append(Counter(trainer.strategy._training.transport.num_bytes))


def gradient_bytes(trainer: Any, module: Any) -> list[int]:
    (noted,) = (c for c in trainer.callbacks if isinstance(c, Bytes))
    return [sum(x[p] for p in (Payload.S, Payload.T, Payload.H)) for x in noted.sent]


def bytes_per_step(preset: str, codec: Any, width: int, num_steps: int = 12) -> float:
    """Return the bytes of gradients that two workers send in a step, in the middle of a fit."""
    ranks = fit(
        preset, 2, codec, make=partial(Net, width), data=partial(own_batches, 2, num_steps),
        look=gradient_bytes, callbacks=[Bytes()],
    )  # fmt: skip
    first, last = (sum(rank.found[t] for rank in ranks) for t in (3, num_steps - 2))
    return (last - first) / (num_steps - 5)


def test_a_density_of_one_in_two_hundred_sends_a_fiftieth() -> None:
    width = 512  # 296,100 parameters
    codec = Dct(density=0.005, threshold_every=3)
    plain, coded = (bytes_per_step("lockstep_dp", x, width) for x in (None, codec))
    assert plain > 4 * 296_100
    assert plain > 50 * coded
    expected = 0
    for p in Net(width).parameters():
        expected += codec.num_bytes(p.numel())
    heads = 2 * len(STAGES) * 1024
    assert expected <= coded <= expected + heads


# ---------------------------------------------------------------------- what does not go with it


class Tiny(Net):
    """Has nothing that is worth a codec."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(32, 4), *(nn.Linear(4, 4) for _ in range(6))))


class Rows(Net):
    """Has a table whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.table = nn.Embedding(100, 32, sparse=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + self.table(y[:, 0].long()), y)


@pytest.mark.parametrize(
    ("make", "num_ranks", "options", "says", "flags"),
    [
        (Net, 2, {}, r"with precision='16-mixed', whose loss scale .* use compress='bf16'",
         {"plugins": [precision()]}),
        (Net, 1, {"num_microbatches": 2}, "num_microbatches and accumulate_grad_batches",
         {"accumulate_grad_batches": 2}),
        (Tiny, 2, {"stages": 2}, r"with Tiny, .* takes none: .* float32 and shape \[4, 32\]; "
         "allowed: .* 256", {}),
        (Net, 2, {"compress": PowerSgd(rank=16)}, r"shape \[32, 32\]; .* \(of a lower rank\)", {}),
        (Rows, 2, {}, "'table' makes sparse gradients, .* allowed: dense ones", {}),
    ],
    ids=["scale", "accumulate", "nothing to encode", "rank", "sparse"],
)  # fmt: skip
def test_what_does_not_go_with_a_codec(
    make: Any, num_ranks: int, options: dict[str, Any], says: str, flags: dict[str, Any]
) -> None:
    strategy = {"preset": "lockstep_dp", "compress": DCT, "stages": STAGES} | options
    for end in run(make, strategy, num_ranks, data=partial(own_batches, 2), **flags):
        assert re.search(says, end.text), end.text
