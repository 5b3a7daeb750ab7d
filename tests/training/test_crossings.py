"""Codecs of activations: what crosses between stages is coded both ways, whoever runs them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_cyclic import TopK
from lightning_cyclic.plan.actions import Payload
from tests.harness import processes
from tests.harness.rows import more
from tests.harness.runs import Result, run, saving, trained
from tests.harness.trainers import assert_same, make_trainer
from tests.modules.late import here_of
from tests.references.crossings import cut

pytestmark = pytest.mark.multi

NUM_STEPS, NUM_MICRO, ROWS, WIDTH = 5, 4, 6, 48
TOP = TopK(density=0.25)
STAGES = ["layers.2", "layers.4", "layers.6"]


class Net(LightningModule):
    """Has a tensor that crosses all boundaries, is used on both sides, and is changed behind one.

    Args:
        density: of boundaries of its own, with which it is the reference of a run in stages.
    """

    def __init__(self, density: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])
        self.drop = nn.Dropout(dropout)
        self.density = density

    def cut(self, k: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        if not self.density or f"layers.{k}" not in STAGES:
            return tensors
        return tuple(cut(x, self.density) for x in tensors)

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        h = first.tanh()
        for k in range(1, 8):
            first, h = self.cut(k, first, h)
            y = self.layers[k](h + first) if k % 2 else self.layers[k](h) + first
            if k == 2:
                first.mul_(0.9)  # behind a boundary
            h = self.drop(y).tanh()
        return h + 0.1 * first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self(x).sub(y).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batches(apart: bool = False) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, NUM_STEPS, NUM_MICRO, ROWS, WIDTH, generator=g)
    pairs = [[x[t, i], y[t, i]] for t in range(NUM_STEPS) for i in range(NUM_MICRO)]
    joined = [[x[t].flatten(0, 1), y[t].flatten(0, 1)] for t in range(NUM_STEPS)]
    return DataLoader(pairs if apart else joined, batch_size=None)  # type: ignore[arg-type]


def fit(
    preset: str, num_ranks: int, codec: Any = TOP, *, make: Any = Net, stages: Any = None,
    options: Any = None, **flags: Any,
) -> list[Result]:  # fmt: skip
    strategy = {
        "preset": preset, "num_microbatches": NUM_MICRO, "stages": stages or STAGES,
        "compress": codec and {"activations": codec},
    }  # fmt: skip
    return trained(
        make, strategy | (options or {}), num_ranks, data=flags.pop("data", batches), **flags
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_bits_are_those_of_a_module_with_boundaries_of_its_own(num_ranks: int) -> None:
    data = partial(batches, apart=True)
    make = partial(Net, TOP.density)
    (plain,) = trained(make, "auto", 1, data=data, accumulate_grad_batches=NUM_MICRO)
    preset = "1f1b" if num_ranks == 4 else "gpipe" if num_ranks == 1 else "interleaved_1f1b"
    for rank in fit(preset, num_ranks):
        assert_same(rank.weights, plain.weights)


@pytest.mark.parametrize(
    ("preset", "num_ranks", "codec", "options"),
    [
        ("zb_h1", 2, TOP, {}),
        ("cyclic_pipeline", 4, TOP, {}),
        ("pipedream_2bw", 2, "int8", {}),
        ("cyclic_mp", 2, TOP, {"stages": 2, "num_microbatches": 2}),
        ("1f1b", 2, "bf16", {}),
        ("gpipe", 4, TOP, {"activation_checkpointing": "always"}),
        more("zb_h1", 4, TOP, {}),
    ],
)
def test_processes_have_the_bits_of_one(
    preset: str, num_ranks: int, codec: Any, options: dict[str, Any]
) -> None:
    (one,) = fit(preset, 1, codec, options=options)
    for rank in fit(preset, num_ranks, codec, options=options):
        assert_same(rank.weights, one.weights)


class Tied(Net):
    """Has a weight that the first and the last stage share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[7].weight = self.layers[0].weight


class Compiled(Net):
    """Has a compiled block on each side of a boundary."""

    def __init__(self) -> None:
        super().__init__()
        for k in (3, 4):
            self.layers[k].compile(backend="aot_eager")


@pytest.mark.parametrize(
    ("preset", "num_ranks", "make", "more_options", "flags"),
    [
        ("zb_h1", 2, Tied, {}, {}),
        ("1f1b", 2, partial(Net, dropout=0.2), {"activation_checkpointing": "except_last"},
         {"precision": "bf16-mixed"}),
        ("interleaved_1f1b", 2, Net,
         {"activation_checkpointing": "optimal", "memory_limit_bytes": 10**6}, {}),
        more("1f1b", 2, Compiled, {}, {}),
        more("pipedream_2bw", 4, Tied, {}, {}),
        more("spectrain", 2, partial(Net, dropout=0.2), {"num_microbatches": 1},
         {"data": partial(batches, apart=True)}),
        more("gpipe", 2, Net, {"replicas": 1, "activation_checkpointing": "always"}, {}),
    ],
)  # fmt: skip
def test_whatever_else_stages_do(
    preset: str, num_ranks: int, make: Any, more_options: dict[str, Any], flags: dict[str, Any]
) -> None:
    (one,) = fit(preset, 1, make=make, options=more_options, **flags)
    for rank in fit(preset, num_ranks, make=make, options=more_options, **flags):
        assert_same(rank.weights, one.weights)


def test_what_is_run_again_and_what_lies_in_files_meets_the_same_inputs(tmp_path: Any) -> None:
    (never,) = fit("1f1b", 1)
    always = {"activation_checkpointing": "always"}
    offload = {"activation_checkpointing": "offload", "disk": str(tmp_path)}
    for num_ranks, options in ((1, always), (2, offload)):
        for rank in fit("1f1b", num_ranks, options=options):
            assert_same(rank.weights, never.weights)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_at_density_1_bits_are_those_without_a_codec(num_ranks: int) -> None:
    plain, coded, empty = (
        fit("gpipe", num_ranks, codec, options=options)
        for codec, options in ((None, {}), (TopK(density=1), {}), (None, {"compress": {}}))
    )
    for one, *others in zip(plain, coded, empty, strict=True):
        for other in others:
            assert_same(other.weights, one.weights)


# ---------------------------------------------------------------------- beside training


def steps_compared(trainer: Any, module: Any) -> int:
    steps: int = trainer.strategy.steps_compared
    return steps


@pytest.mark.parametrize(("num_ranks", "codec"), [(1, "int8"), (2, TOP)])
def test_first_steps_are_compared_with_plain_ones_of_the_same_rule(
    num_ranks: int, codec: Any
) -> None:
    options = {"verify": 3}
    for rank in fit("1f1b", num_ranks, codec, options=options, look=steps_compared):
        assert rank.found == 3


class Evaluated(Net):
    """Keeps what it is validated as."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("valid", self(batch[0]).square().mean())


def evaluated(trainer: Any, module: Any) -> float:
    x, _ = next(iter(batches()))
    with torch.no_grad():
        return float(module.eval()(x).square().mean())


def test_evaluation_sees_activations_as_they_are() -> None:
    flags = {"valid": batches, "limit_val_batches": 1, "look": evaluated}
    for rank in fit("1f1b", 2, make=Evaluated, **flags):
        assert rank.metrics["valid"] == rank.found


class Late(Evaluated):
    """Makes its layers on the meta device, so that no rank need have all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.layers is None:
            with torch.device("meta"):
                self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])


def validated(options: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    """Train and validate on this rank; return what it has, and the metric."""
    strategy = {"preset": "1f1b", "num_microbatches": NUM_MICRO, "stages": STAGES[1:2]}
    codec = {"compress": {"activations": TOP}}
    trainer = make_trainer(strategy | codec | options, max_epochs=1, limit_val_batches=1)
    seed_everything(4, verbose=False)
    module = Late()
    trainer.fit(module, batches(), batches())
    return here_of(module), float(trainer.callback_metrics["valid"])


def test_nor_does_an_evaluation_stage_by_stage_encode() -> None:
    num_bytes = 8 * 4 * WIDTH * (WIDTH + 1)
    lean = {"memory_limit_bytes": num_bytes - 4, "save_distributed_checkpoint": True}
    whole, apart = (processes.run(validated, 2, options) for options in ({}, lean))
    for (every, metric), (own, other) in zip(whole, apart, strict=True):
        assert other == metric
        assert 0 < len(own) < len(every)
        assert_same(own, {n: every[n] for n in own})


@pytest.mark.parametrize(("preset", "num_ranks"), [("cyclic_pipeline", 2), more("1f1b", 1)])
def test_stop_and_go_on_with_the_same_bits(preset: str, num_ranks: int, tmp_path: Any) -> None:
    run = fit(preset, num_ranks, max_epochs=2, **saving(tmp_path))
    for step in (2, NUM_STEPS + 1):
        file = tmp_path / f"step={step}.ckpt"
        again = fit(preset, num_ranks, max_epochs=2, ckpt_path=file)
        for rank, expected in zip(again, run, strict=True):
            assert_same(rank.weights, expected.weights, f"from step {step}")


class OneBroken(nn.Linear):
    """Gives one element that is not a number."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        one = torch.zeros_like(y)
        one[0, 7] = torch.nan
        return y + one


class Broken(Net):
    """Has an activation with one element that is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = OneBroken(WIDTH, WIDTH)


@pytest.mark.parametrize("codec", [TOP, more("int8")], ids=str)
def test_what_is_not_a_number_arrives_at_the_loss(codec: Any) -> None:
    strategy = {"preset": "gpipe", "stages": STAGES, "compress": {"activations": codec}}
    for end in run(Broken, strategy | {"num_microbatches": NUM_MICRO}, 2, data=batches):
        assert "is nan in step 0" in end.text


# ---------------------------------------------------------------------- bytes


class Gpt(LightningModule):
    """Is a small decoder: 64 tokens of 128 numbers are a sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.tokens, self.places = nn.Embedding(50, 128), nn.Parameter(torch.randn(64, 128))
        self.blocks = nn.Sequential(*(
            nn.TransformerEncoderLayer(128, 2, 256, 0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        ))  # fmt: skip
        self.head = nn.Linear(128, 50)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.tokens(batch) + self.places
        mask = torch.full((64, 64), -torch.inf).triu(1)
        for block in self.blocks:
            h = block(h, src_mask=mask)
        guessed = self.head(h[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(guessed, batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def texts() -> DataLoader[Any]:
    g = torch.Generator().manual_seed(1)
    return DataLoader(list(torch.randint(50, (5, 16, 64), generator=g)), batch_size=None)  # type: ignore[arg-type]


class Bytes(Callback):
    """Notes the bytes of activations and of their gradients that were sent until a step ended."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        num_bytes = trainer.strategy._training.transport.num_bytes
        self.sent.append((num_bytes[Payload.A], num_bytes[Payload.G]))


def sent(trainer: Any, module: Any) -> list[tuple[int, int]]:
    (noted,) = (c for c in trainer.callbacks if isinstance(c, Bytes))
    return noted.sent


def bytes_per_step(codec: Any) -> tuple[int, int]:
    """Return the bytes that two workers send of activations and of gradients, in the last step."""
    ranks = fit(
        "1f1b", 2, codec, make=Gpt, stages=["blocks.2"], data=texts, look=sent,
        callbacks=[Bytes()], options={"num_microbatches": 2},
    )  # fmt: skip
    before, after = (
        [sum(each) for each in zip(*(r.found[t] for r in ranks), strict=True)] for t in (-2, -1)
    )
    return after[0] - before[0], after[1] - before[1]


def test_a_density_of_one_in_forty_sends_a_twentieth() -> None:
    plain, coded = (bytes_per_step(codec) for codec in (None, TopK(density=0.025)))
    num_micro, rows, head = 2, 8, 512
    kept = 205  # of 8192 elements of a sample
    assert plain == (num_micro * (head + rows * 8192 * 4),) * 2
    values, positions = (-(-rows * kept * size // 512) * 512 for size in (4, 2))
    assert coded == (num_micro * (head + values + positions), num_micro * (head + values))
    assert sum(plain) > 20 * sum(coded)
