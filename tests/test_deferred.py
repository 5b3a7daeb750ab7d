"""Modules that are made within the strategy: each rank makes its own stages, and no others."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import Callback, LightningModule, callbacks, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_cyclic.errors import ConfigurationError, PeerError, StepError
from lightning_cyclic.runtime.absent import is_absent
from lightning_cyclic.runtime.deferred import DeferredTensor
from tests import processes
from tests.capped import capped, is_possible
from tests.conformance.harness import Batches, same
from tests.conformance.modules import CLASSES, SIZE, Plain, vectors
from tests.corpus import assert_same, make_trainer, weights_of
from tests.rows import chosen, more

pytestmark = pytest.mark.multi
NUM_STEPS = 4


class Late(Plain):
    """Makes its layers in configure_model, and notes which parameters are here at its calls."""

    def make_net(self) -> Any:
        return None

    def configure_model(self) -> None:
        if self.net is None:
            layers = [nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE)]
            self.net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(SIZE, CLASSES))
            nn.init.orthogonal_(self.net[2].weight)
            for m in self.net:
                m.register_forward_hook(self.look)

    def look(self, *_: Any) -> None:
        HERE.append({n.split(".")[1] for n, p in self.named_parameters() if not is_absent(p)})


ALL = {"0", "1", "2", "4"}
HERE: list[set[str]] = []  # layers whose parameters were here, at each call of a layer


def fit(strategy: Any, within: bool, validates: bool) -> dict[str, Any]:
    trainer = make_trainer(strategy, max_epochs=2)
    module = Late()
    data = DataLoader(Batches(vectors, [[2 * t, 2 * t + 1] for t in range(4)]), batch_size=None)
    seed_everything(4, verbose=False)
    if not within:  # as one device would have it
        module.configure_model()
    trainer.fit(module, data, data if validates else None)
    weights = weights_of(module)
    torch.distributed.barrier()  # a process that ends so gives nothing to others
    return {"weights": weights, "here": HERE}


class Trained(Late):
    """Has optimizer state, and a callback that is given the whole state dict."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        KEYS.append(len(checkpoint["state_dict"]))


KEYS: list[int] = []
LEAST = 4 * SIZE * SIZE * 2  # bytes: less than the parameters have together
CUT = {"stages": ["net.2"], "num_microbatches": 2, "memory_limit_bytes": 1 << 30}
PIPELINES = [
    {"preset": "1f1b", **CUT},
    {"preset": "gpipe", **CUT, "stages": 2},
    {"preset": "pipedream_2bw", **CUT},
    {"preset": "cyclic_mp", **CUT},
]


@pytest.mark.parametrize("validates", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize(
    "strategy",
    chosen(PIPELINES, [x for x in PIPELINES if x["preset"] != "gpipe"]),
    ids=lambda s: s["preset"],
)
def test_a_module_that_ranks_make_by_stages_trains_as_one_that_all_make_whole(
    strategy: dict[str, Any], validates: bool
) -> None:
    whole = processes.run(fit, 2, strategy, False, validates)
    apart = processes.run(fit, 2, strategy, True, validates)
    for rank in apart:
        assert_same(rank["weights"], whole[0]["weights"])
    for rank, own in zip(apart, ({"2", "4"}, {"0", "1"}), strict=True):
        here = rank["here"]
        begin = here.index(
            own
        )  # before it whole steps run, layer by layer: surveys, sanity checks
        assert all(len(layers) <= 1 for layers in here[:begin])
        assert all(layers == own for layers in here[begin:])
    whole_steps = 1 + 3 * validates  # of two batches in sanity checks the first is looked at, too
    assert apart[0]["here"].index({"2", "4"}) == 5 * whole_steps


@pytest.mark.parametrize(
    ("preset", "num_ranks", "stages"),
    [
        ("cyclic_zero", 2, ["net.2"]), more("cyclic_zero", 4, "auto"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("cyclic_zero", 2, "auto"), ("cyclic_zero", 3, "auto"),
            ]
        ),
    ],
    ids=str,
)  # fmt: skip
def test_sharded_weights_that_no_rank_ever_has_all_of(
    preset: str, num_ranks: int, stages: Any
) -> None:
    strategy = {"preset": preset, "stages": stages, "memory_limit_bytes": LEAST}
    plain = {"preset": "cyclic_dp", "stages": stages}
    whole = processes.run(fit, num_ranks, plain, False, True)
    for rank in processes.run(fit, num_ranks, strategy, True, True):
        assert_same(rank["weights"], whole[0]["weights"])
        numbers = [len(layers) for layers in rank["here"]]
        begin = 5 * (2 + 1)  # calls of layers in the sanity check, and to find the stages
        assert max(numbers[:begin]) == 1  # their own
        # the own stage and the one in use; of 4 layers, 2 stages have all
        assert max(numbers[begin:]) == {2: 4, 3: 3, 4: 2}[num_ranks if stages == "auto" else 2]


class Dropping(Trained):
    """Draws random numbers in its steps."""

    def configure_model(self) -> None:
        if self.net is None:
            super().configure_model()
            self.net.insert(3, nn.Dropout(0.3))


class Freezes(Callback):
    """Does not train the first layer in the second epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(trainer.current_epoch != 1)


def fit_three(strategy: Any, within: bool) -> Any:
    trainer = make_trainer(strategy, max_epochs=3, callbacks=[Freezes()], val_check_interval=2)
    module = Dropping()
    seed_everything(4, verbose=False)
    if not within:
        module.configure_model()
    data = DataLoader(Batches(vectors, [[2 * t, 2 * t + 1] for t in range(4)]), batch_size=None)
    trainer.fit(module, data, data)
    return read(module), {name: float(x) for name, x in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("preset", "limit"),
    [("cyclic_zero", LEAST), more("cyclic_zero", 1 << 30)],
)
def test_sharded_weights_that_are_read_and_frozen_between_steps(preset: str, limit: int) -> None:
    whole = processes.run(fit_three, 2, {"preset": "cyclic_dp", "stages": "auto"}, False)
    strategy = {"preset": preset, "stages": "auto", "memory_limit_bytes": limit}
    assert processes.run(fit_three, 2, strategy, True) == whole


def test_replicas_of_a_pipeline() -> None:
    strategy = {"preset": "1f1b", **CUT, "replicas": 2}
    whole = processes.run(fit, 4, strategy, False, True)
    for rank, one in zip(processes.run(fit, 4, strategy, True, True), whole, strict=True):
        assert_same(rank["weights"], one["weights"])


class Unseeded(Plain):
    """Draws what comes next."""

    def __init__(self) -> None:
        super(Plain, self).__init__()
        self.net = self.make_net()


def fit_outside(within: bool, seeds: Sequence[int]) -> dict[str, Any]:
    trainer = make_trainer(PIPELINES[0], max_epochs=1)
    seed_everything(seeds[processes.here().rank], verbose=False)
    with trainer.init_module() if within else nullcontext():
        module = Unseeded()
    absent = sum(isinstance(p, DeferredTensor) for p in module.parameters())
    data = DataLoader(Batches(vectors, [[2 * t, 2 * t + 1] for t in range(4)]), batch_size=None)
    trainer.fit(module, data)
    return {"weights": weights_of(module), "absent": absent}


def test_a_module_made_within_init_module() -> None:
    whole = processes.run(fit_outside, 2, False, [5, 5])
    apart = processes.run(fit_outside, 2, True, [5, 5])
    for rank in apart:
        assert rank["absent"] == 6
        assert_same(rank["weights"], whole[0]["weights"])


class OnMeta(Plain):
    def make_net(self) -> nn.Module:
        with torch.device("meta"):
            return super().make_net()


class Zeroed(Late):
    def configure_model(self) -> None:
        super().configure_model()
        if processes.here().rank == 1:
            nn.init.zeros_(self.net[0].weight)


class Pickled(Late):
    def configure_model(self) -> None:
        super().configure_model()
        torch.save(self.net[0].weight, BytesIO())


class Written(Late):
    def configure_model(self) -> None:
        super().configure_model()
        values = self.net[0].weight.detach().numpy()
        assert values.shape == (SIZE, SIZE)  # it can be read
        values[:] = 0.5


def attempt(what: str) -> str:
    run = partial(fit_outside, True, [5, 6])
    kinds = {x.__name__: x for x in (Zeroed, Pickled, Written)}
    if what in kinds:
        with pytest.raises((ConfigurationError, ValueError)) as caught:
            make_trainer(PIPELINES[0], max_epochs=1).fit(kinds[what](), DataLoader([]))
        return str(caught.value)
    if what != "other random states":
        data = DataLoader(Batches(vectors, [[0, 1]]), batch_size=None)
        run = partial(make_trainer({"preset": what}, max_epochs=1).fit, OnMeta(), data)
    with pytest.raises(ConfigurationError) as caught:
        run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("other random states", "by different code, or from different random states or files"),
        ("Zeroed", "by different code, or from different random states or files"),
        ("Pickled", "layers could not be made without memory: RuntimeError: "),
        ("Written", "assignment destination is read-only"),
        ("1f1b", "parameter 'net.0.weight' is on the meta device, and nothing says"),
        ("cyclic_dp", "parameter 'net.0.weight' is on the meta device, and nothing says"),
    ],
)
def test_what_would_have_other_values_is_refused_on_every_rank(what: str, said: str) -> None:
    for text in processes.run(attempt, 2, what):
        assert said in text


def evaluate(within: bool) -> Any:
    trainer = make_trainer(PIPELINES[0], max_epochs=1)
    module = Late()
    data = DataLoader(Batches(vectors, [[2 * t, 2 * t + 1] for t in range(4)]), batch_size=None)
    seed_everything(4, verbose=False)
    if not within:
        module.configure_model()
    return trainer.validate(module, data, verbose=False)


def test_evaluation_alone() -> None:
    whole = processes.run(evaluate, 2, False)
    assert processes.run(evaluate, 2, True) == whole


# ---------------------------------------------------------------------- larger than memory


def save(strategy: Any, folder: str, epochs: int, file: str | None, within: bool) -> Any:
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = make_trainer(
        strategy, max_epochs=epochs, callbacks=[saver], enable_checkpointing=True,
        default_root_dir=folder,
    )  # fmt: skip
    module = Trained()
    seed_everything(4, verbose=False)
    if not within:
        module.configure_model()
    data = DataLoader(Batches(vectors, [[2 * t, 2 * t + 1] for t in range(4)]), batch_size=None)
    trainer.fit(module, data, ckpt_path=file)
    return [sum(not is_absent(p) for p in module.parameters()), KEYS]


def contents(folder: Path, epoch: int) -> Any:
    return torch.load(folder / f"epoch={epoch}.ckpt", weights_only=True)


def staged(preset: str, stages: Any = ("net.2",)) -> dict[str, Any]:
    cut = {"preset": preset, "stages": stages if isinstance(stages, int) else list(stages)}
    return cut if preset == "cyclic_zero" else cut | {"num_microbatches": 2}


@pytest.mark.parametrize("preset", ["1f1b", "cyclic_zero"])
def test_a_file_of_what_no_rank_may_have_is_refused(preset: str, tmp_path: Path) -> None:
    strategy = staged(preset) | {"memory_limit_bytes": LEAST}
    told = r"a checkpoint of one file was asked for.*use save_distributed_checkpoint=True"
    with pytest.raises(processes.RanksFailedError, match=told):
        processes.run(save, 2, strategy, str(tmp_path), 2, None, True)


@pytest.mark.parametrize("within", [False, True])
def test_behind_a_fit_a_module_is_whole_unless_no_rank_ever_had_it(
    within: bool, tmp_path: Path
) -> None:
    strategy = {"preset": "1f1b", **CUT, "memory_limit_bytes": LEAST}
    strategy["save_distributed_checkpoint"] = True
    ranks = processes.run(save, 2, strategy, str(tmp_path), 1, None, within)
    assert [here for here, _ in ranks] == ([4, 4] if within else [8, 8])


def go_on(strategy: Any, folder: str, how: str, within: bool) -> Any:
    """Train, and do something with the same module and Trainer behind it."""
    module = Trained()
    seed_everything(4, verbose=False)
    if not within:
        module.configure_model()
    saver = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer = make_trainer(
        strategy, max_epochs=2, callbacks=[saver], enable_checkpointing=True,
        default_root_dir=folder,
    )  # fmt: skip
    data = DataLoader(Batches(vectors, [[2 * t, 2 * t + 1] for t in range(4)]), batch_size=None)
    trainer.fit(module, data, data)
    early = f"{folder}/epoch=0.ckpt"
    if how == "tests":
        return trainer.test(module, data, verbose=False), read(module)
    if how == "tests a checkpoint":
        return trainer.test(module, data, ckpt_path=early, verbose=False), read(module)
    if how == "goes back":
        trainer.fit(module, data, data, ckpt_path=early)
    elif how == "goes on":
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, data, data)
    elif how == "is used elsewhere":
        # with another strategy, which cuts it otherwise
        other = make_trainer(strategy | {"stages": ["net.4"]}, logger=False)
        return other.validate(module, data, verbose=False), read(module)
    return read(module)


def read(module: LightningModule) -> list[list[float]]:
    values = [p.detach().flatten().tolist() for p in module.parameters()]
    torch.distributed.barrier()  # a process that ends so gives nothing to others
    return values


BEHIND = ["reads", "tests", "tests a checkpoint", "goes back", "goes on", "is used elsewhere"]


@pytest.mark.parametrize(
    ("how", "preset"),
    [
        pytest.param(how, preset, marks=[] if (j + k) % 2 else [pytest.mark.exhaustive])
        for j, how in enumerate(BEHIND)
        for k, preset in enumerate(("1f1b", "cyclic_zero"))
    ],
)
def test_behind_a_fit_beyond_memory_a_module_goes_on(
    how: str, preset: str, tmp_path: Path
) -> None:
    strategy = staged(preset)
    lean = strategy | {"memory_limit_bytes": LEAST}
    whole = processes.run(go_on, 2, strategy, str(tmp_path / "whole"), how, False)
    assert processes.run(go_on, 2, lean, str(tmp_path / "lean"), how, True) == whole


def run_with_gradients(strategy: Any, folder: str) -> str:
    module = Trained()
    seed_everything(4, verbose=False)
    data = DataLoader(Batches(vectors, [[2 * t, 2 * t + 1] for t in range(4)]), batch_size=None)
    make_trainer(strategy, max_epochs=1, default_root_dir=folder).fit(module, data)
    with pytest.raises(StepError) as caught:
        module.eval()(torch.zeros(2, SIZE))  # whose gradient somebody might use
    with torch.no_grad():
        assert module(torch.zeros(2, SIZE)).isfinite().all()
    torch.distributed.barrier()
    return str(caught.value)


@pytest.mark.parametrize("preset", ["1f1b", "cyclic_zero"])
def test_behind_a_fit_beyond_memory_what_is_lent_is_not_trained(
    preset: str, tmp_path: Path
) -> None:
    strategy = staged(preset) | {"memory_limit_bytes": LEAST}
    for said in processes.run(run_with_gradients, 2, strategy, str(tmp_path)):
        assert "for a gradient, but a fit is over that no rank can hold" in said


class Attacked(Trained):
    """Validates on batches that it has moved along its own gradient."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (g,) = torch.autograd.grad(F.cross_entropy(self(x), y), x)
        self.log("val_loss", F.cross_entropy(self(x + 0.5 * g.sign()), y))


class Exchanges(Trained):
    """Has other weights in validation, which does not go as training does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_validation_start(self) -> None:
        self.change(2.0)

    def on_validation_end(self) -> None:
        self.change(0.5)

    def change(self, by: float) -> None:
        if self.trainer.sanity_checking:
            return
        for p in self.parameters():
            if self.how == "data":
                p.data.mul_(by)
            else:
                with torch.no_grad():
                    p.mul_(by)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for layer in reversed(self.net[:3]):
            x = layer(x)
        self.log("val_loss", F.cross_entropy(self.net[3:](x), y))


def validate(make: Any, strategy: Any, within: bool, **flags: Any) -> Any:
    """Return what the last validation of a fit logs; or how it was refused."""
    module = make()
    seed_everything(4, verbose=False)
    trainer = make_trainer(strategy, max_epochs=2, inference_mode=False, **flags)
    with trainer.init_module() if within else nullcontext():
        module.configure_model()
    data = DataLoader(Batches(vectors, [[2 * t, 2 * t + 1] for t in range(4)]), batch_size=None)
    try:
        trainer.fit(module, data, data)
    except (ConfigurationError, StepError, PeerError) as error:  # the other rank's, too
        return str(error)
    torch.distributed.barrier()
    return float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("preset", ["1f1b", "cyclic_zero"])
def test_validation_beyond_memory_that_takes_gradients(preset: str) -> None:
    strategy = staged(preset)
    lean = strategy | {"memory_limit_bytes": 3 * LEAST // 2}  # they keep what they read
    whole = processes.run(validate, 2, Attacked, strategy, False)
    assert processes.run(validate, 2, Attacked, lean, True) == whole
    assert whole[0] == whole[1]


@pytest.mark.parametrize(
    ("preset", "how", "limit"),
    chosen(
        product(("1f1b", "cyclic_zero"), ("data", "in place"), (LEAST, 1 << 30)),
        [("1f1b", "data", 1 << 30), ("1f1b", "in place", LEAST), ("cyclic_zero", "data", LEAST)],
    ),
)
def test_weights_that_are_exchanged_where_ranks_fetch_them(
    preset: str, how: str, limit: int
) -> None:
    strategy = staged(preset) | {"memory_limit_bytes": limit}
    for said in processes.run(validate, 2, partial(Exchanges, how), strategy, True):
        assert "was changed between steps by a hook or a callback, while ranks" in said


def train_refused(make: Any, strategy: Any) -> str:
    module = make()
    seed_everything(4, verbose=False)
    data = DataLoader(Batches(vectors, [[2 * t, 2 * t + 1] for t in range(4)]), batch_size=None)
    with pytest.raises((ConfigurationError, StepError)) as caught:
        make_trainer(strategy, max_epochs=1).fit(module, data)
    return str(caught.value)


class ExchangesByStages(Exchanges):
    """Has other weights in validation, which passes through the stages."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))


def test_weights_that_are_exchanged_where_each_rank_runs_its_own() -> None:
    # there is no survey of validation from before the first step
    make, run = partial(ExchangesByStages, "in place"), partial(validate, num_sanity_val_steps=0)
    whole = processes.run(run, 2, make, staged("1f1b"), False)
    apart = processes.run(run, 2, make, staged("1f1b") | {"memory_limit_bytes": 1 << 30}, True)
    assert apart == whole
    assert isinstance(whole[0], float)


@pytest.mark.parametrize(
    ("make", "limit", "said"),
    [
        (Plain, LEAST, "every rank has parameters of "),
        (Trained, SIZE, "is to keep parameters of "),
    ],
    ids=["made whole", "share too large"],
)
def test_a_module_that_exceeds_what_ranks_may_have(make: Any, limit: int, said: str) -> None:
    strategy = staged("cyclic_zero") | {"memory_limit_bytes": limit}
    for refusal in processes.run(train_refused, 2, make, strategy):
        assert said in refusal
        assert f"memory_limit_bytes={limit}" in refusal


AVERAGES = ["StochasticWeightAveraging"]
AVERAGES += [name for name in ("WeightAveraging",) if hasattr(callbacks, name)]  # from 2.6 on


@pytest.mark.parametrize("average", AVERAGES)
def test_averages_of_weights_that_no_rank_ever_has(average: str) -> None:
    strategy = staged("cyclic_zero") | {"memory_limit_bytes": LEAST}
    for said in processes.run(validate_averaged, 2, average, strategy, True):
        assert f"{average} copies the whole module, of which no rank" in said
    folders = {"preset": "cyclic_dp", "save_distributed_checkpoint": True}
    for said in processes.run(validate_averaged, 2, average, folders, False):
        assert f"{average} copies the whole module, but only rank 0" in said


def validate_averaged(average: str, strategy: Any, within: bool) -> Any:
    warnings.filterwarnings("ignore", "You're using the WeightAveraging callback")
    kind = getattr(callbacks, average)
    each = kind(0.01) if average.startswith("Stochastic") else kind()
    return validate(Trained, strategy, within, callbacks=[each])


WIDTH = 512


class Large(LightningModule):
    """A GPT, made late."""

    num_blocks, width = 48, WIDTH
    batches = [(4, 17)] * 8

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            blocks = [
                nn.TransformerEncoderLayer(
                    self.width, 8, 4 * self.width, dropout=0, batch_first=True, norm_first=True
                )
                for _ in range(self.num_blocks)
            ]
            first, last = nn.Embedding(256, self.width), nn.Linear(self.width, 256)
            self.net = nn.Sequential(first, *blocks, last)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Stateful(Large):
    """Smaller, with as much again of optimizer state, twice."""

    num_blocks = 24

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Sharded(Large):
    """So large that what Python and torch take is little beside; few tokens, for the time."""

    num_blocks, width = 96, 832
    batches = [(1, 9)] * 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


CAP = 520 << 20


def fit_large(
    strategy: Any, cap: int | None, folder: str, epochs: int, file: str | None, within: bool,
    kind: type[Large] = Large,
) -> int:  # fmt: skip
    with nullcontext() if cap is None else capped(cap):
        seed_everything(1, verbose=False)
        module, g = kind(), torch.Generator().manual_seed(0)
        if not within:
            module.configure_model()
        data = [torch.randint(0, 256, size, generator=g) for size in kind.batches]
        trainer = make_trainer(
            strategy, max_epochs=epochs, enable_checkpointing=True, default_root_dir=folder,
            callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=file)
        return sum(p.numel() * p.element_size() for p in module.parameters())


class Pretrained(Large):
    """Is read from a folder of Hugging Face's."""

    batches = [(4, 17)] * 2

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        if self.net is None:
            self.net = transformers.AutoModelForCausalLM.from_pretrained(self.folder)

    def on_fit_start(self) -> None:
        KEYS.append(sum(map(is_absent, self.parameters())))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(input_ids=batch[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class ShardedPretrained(Pretrained):
    """Is so large that what Python and torch take is little beside."""

    num_blocks, width = Sharded.num_blocks, Sharded.width
    batches = Sharded.batches

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def gpt2(folder: str, width: int, layers: int) -> None:
    """Write a folder of Hugging Face's, in several files."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=8, vocab_size=256, bos_token_id=0, eos_token_id=1,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(folder, max_shard_size=f"{max(width * layers // 100, 1) * 100}KB")


def fit_pretrained(
    strategy: Any, cap: int | None, source: str, folder: str, within: bool,
    epochs: int = 1, file: str | None = None, kind: type[Pretrained] = Pretrained,
) -> tuple[list[int], int]:  # fmt: skip
    with nullcontext() if cap is None else capped(cap):
        module, g = kind(source), torch.Generator().manual_seed(0)
        if not within:
            module.configure_model()
        data = [torch.randint(0, 256, size, generator=g) for size in kind.batches]
        trainer = make_trainer(
            strategy, max_epochs=epochs, enable_checkpointing=True, default_root_dir=folder,
            callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        )  # fmt: skip
        trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=file)
        return KEYS, sum(p.numel() * p.element_size() for p in module.parameters())


def test_a_folder_of_hugging_faces_is_read_by_stages(tmp_path: Path) -> None:
    source, apart, one = (str(tmp_path / name) for name in ("source", "apart", "one"))
    gpt2(source, 32, 3)
    assert len(list(Path(source).glob("*.safetensors"))) > 1
    strategy = {"preset": "1f1b", **CUT, "stages": 2}
    processes.run(fit_pretrained, 2, strategy, None, source, one, False)
    for absent, _ in processes.run(fit_pretrained, 2, strategy, None, source, apart, True):
        assert absent == [3 * 12 + 4]
    assert same(contents(Path(apart), 0)["state_dict"], contents(Path(one), 0)["state_dict"])


@pytest.mark.exhaustive
@pytest.mark.skipif(not is_possible(), reason="no control group of memory may be made here")
def test_a_folder_that_exceeds_the_memory_of_each_rank(tmp_path: Path) -> None:
    source, apart, one = (str(tmp_path / name) for name in ("source", "apart", "one"))
    gpt2(source, WIDTH, Large.num_blocks)
    strategy = {"preset": "1f1b", "stages": 4, "num_microbatches": 4, "memory_limit_bytes": CAP}
    ranks = processes.run(fit_pretrained, 4, strategy, CAP, source, apart, True)
    assert ranks[0][1] > CAP
    alone = {"preset": "1f1b", "stages": 1, "num_microbatches": 4}
    processes.run(fit_pretrained, 1, alone, None, source, one, False)
    assert same(contents(Path(apart), 0)["state_dict"], contents(Path(one), 0)["state_dict"])


@pytest.mark.exhaustive
@pytest.mark.skipif(not is_possible(), reason="no control group of memory may be made here")
def test_a_gpt_whose_bare_weights_exceed_the_memory_of_each_rank(tmp_path: Path) -> None:
    strategy = {"preset": "1f1b", "stages": 4, "num_microbatches": 4, "memory_limit_bytes": CAP}
    apart, one = str(tmp_path / "apart"), str(tmp_path / "one")
    with pytest.raises(processes.RanksFailedError, match="died without a word"):
        processes.run(fit_large, 4, strategy, CAP, apart, 1, None, False)
    sizes = processes.run(fit_large, 4, strategy, CAP, apart, 1, None, True)
    assert sizes[0] > CAP
    file = str(Path(apart, "epoch=0.ckpt"))
    processes.run(fit_large, 4, strategy, CAP, apart, 2, file, True)
    alone = {"preset": "1f1b", "stages": 1, "num_microbatches": 4}
    processes.run(fit_large, 1, alone, None, one, 2, None, True)
    weights = [contents(Path(folder), 1)["state_dict"] for folder in (apart, one)]
    assert same(*weights)


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.skipif(not is_possible(), reason="no control group of memory may be made here")
def test_a_gpt_whose_states_exceed_the_memory_of_each_rank(tmp_path: Path) -> None:
    whole, sharded = ({"preset": p, "stages": 16} for p in ("cyclic_dp", "cyclic_zero"))
    apart, one, cap = str(tmp_path / "apart"), str(tmp_path / "one"), 1100 << 20
    with pytest.raises(processes.RanksFailedError, match="died without a word"):
        processes.run(fit_large, 4, whole, cap, apart, 1, None, False, Stateful)
    lean = sharded | {"memory_limit_bytes": cap}
    sizes = processes.run(fit_large, 4, lean, cap, apart, 1, None, True, Stateful)
    assert sizes[0] < cap < 4 * sizes[0]  # weights, gradients, and twice as much of AdamW's
    file = str(Path(apart, "epoch=0.ckpt"))
    processes.run(fit_large, 4, lean, cap, apart, 2, file, True, Stateful)
    processes.run(fit_large, 4, whole, None, one, 2, None, False, Stateful)
    weights = [contents(Path(folder), 1)["state_dict"] for folder in (apart, one)]
    assert same(*weights)


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not is_possible(), reason="no control group of memory may be made here")
def test_a_gpt_whose_bare_weights_exceed_the_memory_of_each_rank_of_sharded_ones(
    tmp_path: Path,
) -> None:
    cap = 3000 << 20
    strategy = {"preset": "cyclic_zero", "stages": 98, "memory_limit_bytes": cap}
    run = partial(processes.run, fit_large, 4, strategy, time_limit_s=600)
    with TemporaryDirectory(dir=tmp_path) as folder:  # 26 GB, which nobody is to keep
        apart, one = (str(Path(folder, name)) for name in ("apart", "one"))
        sizes = run(cap, apart, 1, None, True, Sharded)
        assert sizes[0] > cap
        run(cap, apart, 2, str(Path(apart, "epoch=0.ckpt")), True, Sharded)
        run(None, one, 2, None, True, Sharded)
        files = (Path(each, "epoch=1.ckpt") for each in (apart, one))
        saved = (torch.load(file, weights_only=True, mmap=True) for file in files)
        assert same(*(each["state_dict"] for each in saved))


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not is_possible(), reason="no control group of memory may be made here")
def test_a_folder_that_exceeds_the_memory_of_each_rank_of_sharded_weights(tmp_path: Path) -> None:
    cap = 3000 << 20
    strategy = {"preset": "cyclic_zero", "stages": 98, "memory_limit_bytes": cap}
    with TemporaryDirectory(dir=tmp_path) as folder:  # 29 GB, which nobody is to keep
        source, apart, one = (str(Path(folder, name)) for name in ("source", "apart", "one"))
        gpt2(source, Sharded.width, Sharded.num_blocks)

        def run(limit: int | None, target: str, epochs: int, file: str | None) -> Any:
            return processes.run(
                fit_pretrained, 4, strategy, limit, source, target, True, epochs, file,
                ShardedPretrained, time_limit_s=600,
            )  # fmt: skip

        assert run(cap, apart, 1, None)[0][1] > cap
        run(cap, apart, 2, str(Path(apart, "epoch=0.ckpt")))
        run(None, one, 2, None)
        files = (Path(each, "epoch=1.ckpt") for each in (apart, one))
        saved = (torch.load(file, weights_only=True, mmap=True) for file in files)
        assert same(*(each["state_dict"] for each in saved))
