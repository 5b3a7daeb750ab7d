"""PlannedStrategy: Lightning's hooks, each handed on to the training that is under way.

setup      strategy_setup.py makes the training
hooks      the training answers, given what Lightning itself would do (hooks.py, training.py)

Checkpoints are in strategy_checkpoints.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from typing_extensions import TypedDict, override

from lightning_cyclic.compat import Accelerator, CheckpointIO, ClusterEnvironment, Precision
from lightning_cyclic.errors import ConfigurationError
from lightning_cyclic.plan import LocalSteps, Plan
from lightning_cyclic.plugin import torn_weights
from lightning_cyclic.plugin.checkpoint_file import none_on_exception
from lightning_cyclic.plugin.checkpoint_folder import CheckpointFolder
from lightning_cyclic.plugin.departed import refuse_departed
from lightning_cyclic.plugin.hooks import Hooks
from lightning_cyclic.plugin.option_values import CHECKS, check_values
from lightning_cyclic.plugin.options import Options, chosen_preset, network_of
from lightning_cyclic.plugin.reductions import HeldReductions
from lightning_cyclic.plugin.strategy_setup import Setup
from lightning_cyclic.plugin.training import AbstractTraining
from lightning_cyclic.runtime.assembly import Assembly
from lightning_cyclic.runtime.failure_words import words_of
from lightning_cyclic.runtime.meta import MetaWeights
from lightning_cyclic.simulate import Memory

_START = "before training began"


class Inherited(TypedDict, total=False):
    """Name the arguments of DDPStrategy that ours have, too."""

    accelerator: Accelerator | None
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    checkpoint_io: CheckpointIO | None
    precision_plugin: Precision | None
    process_group_backend: str | None
    timeout: timedelta | None
    start_method: Literal["popen", "spawn", "fork", "forkserver"]


class PlannedStrategy(Setup):
    """Be what CyclicStrategy and PipelineStrategy have in common: training by a plan.

    Lightning asks whether a strategy is a DDPStrategy before it lets modules be compiled, gives
    each rank batches of its own, searches for the largest batch, and tells `Trainer.device_ids`.

    Args:
        preset: a name, a mapping axis -> value, or the numbers of local steps.
        own: options of the strategy.
        **inherited: arguments of DDPStrategy.

    Raises:
        PlanError: impossible numbers, or a plan that cannot be run yet.
        ConfigurationError: an option that is not one, or that does not fit.
    """

    presets: ClassVar[tuple[str, ...]]
    placements: ClassVar[tuple[str, ...]]
    other: ClassVar[str]

    def __init__(
        self,
        preset: str | Mapping[str, str | LocalSteps] | LocalSteps,
        own: Mapping[str, Any],
        **inherited: Any,
    ) -> None:
        self._refuse_unknown(preset, own, inherited)
        name, axes = chosen_preset(preset, self.presets, self.placements, self.other)
        check_values(own)
        timeout = inherited.pop("timeout", None)
        timeout = default_pg_timeout if timeout is None else timeout
        if not (isinstance(timeout, timedelta) and timeout > timedelta()):
            raise ConfigurationError(
                f"timeout={timeout!r}; allowed: a datetime.timedelta above 0; use "
                "timeout=timedelta(minutes=5)"
            )
        super().__init__(timeout=timeout, **inherited)
        self._workers_per_host = 1  # until ranks have met
        chosen = dict(own)
        network = network_of(chosen.pop("bandwidth", None))
        self._chosen = Options(preset=name, axes=axes, network=network, **chosen)
        self._options.check()
        self._plan: Plan | None = None
        self._training: Hooks = Hooks()  # Lightning itself answers
        self._fitted: AbstractTraining | None = None
        self._reductions = HeldReductions()
        self.assembly = Assembly()  # until the process group is made
        self._saved: Mapping[str, Any] | None = None
        self._folder: CheckpointFolder | None = None  # from which a run goes on
        self._unmade: MetaWeights | None = None  # until setup
        self._undo = ExitStack()  # what setup has changed of the Trainer, until teardown

    def _refuse_unknown(
        self, preset: object, own: Mapping[str, Any], given: Mapping[str, Any]
    ) -> None:
        refuse_departed({"preset": preset, **own, **given})
        unknown = given.keys() - Inherited.__annotations__.keys()
        if unknown:
            named = ", ".join(map(repr, sorted(unknown)))
            elsewhere = sorted(unknown & CHECKS.keys())
            of_other = f"; {', '.join(map(repr, elsewhere))} is an option of {self.other}"
            raise ConfigurationError(
                f"{type(self).__name__} does not know {named}; allowed: preset, {', '.join(own)}, "
                f"{', '.join(Inherited.__annotations__)}{of_other if elsewhere else ''}; remove "
                "it (unused parameters need no flag here)"
            )

    @property
    def _accelerator(self) -> Accelerator | None:
        """Return what a Trainer that is being made asks for first, of a strategy it was given."""
        if self._launcher is not None:  # made by the Trainer before
            raise ConfigurationError(
                f"one {type(self).__name__} was given to two Trainers, whose devices, precision "
                "and training it would hold both; allowed: one of its own for each Trainer; use "
                f"Trainer(strategy={type(self).__name__}(...)) with another one, or a name, "
                f"strategy={self.preset!r}"
            )
        return self._own_accelerator

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        self._own_accelerator = accelerator

    @property
    def accelerator(self) -> Accelerator | None:
        """Return what a rank computes on."""
        return self._own_accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        self._own_accelerator = accelerator

    @property
    @override
    def _options(self) -> Options:
        """Return what the user chose, with the number of workers as soon as it is known."""
        known = self.parallel_devices is not None
        return replace(
            self._chosen,
            num_workers=self.world_size if known else None,
            workers_per_host=self._workers_per_host,
        )

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Run the body with the whole module on every rank; all ranks must call it.

        In hooks of validation, at the end of epochs and behind the fit each rank has it anyway.

        Raises:
            StepError: the body reads what does not fit (memory_limit_bytes).
        """
        with self._training.whole():
            yield

    # ------------------------------------------------------------------ what users ask

    @property
    @override
    def preset(self) -> str:
        """Return the name of the plan."""
        return self._chosen.preset

    @property
    def slack(self) -> int:
        """Return how many slots messages are given to travel."""
        return self._chosen.slack

    @property
    def plan(self) -> Plan:
        """Return the plan; after the first training step it has the stages that were found."""
        plan = self._training.plan or self._plan
        if plan is None:
            raise ConfigurationError(
                "strategy.plan was read before setup; allowed: after Trainer.fit has set up; "
                "read it in a callback's on_fit_start or later"
            )
        return plan

    @property
    def stage_of(self) -> dict[str, int]:
        """Return parameter name -> stage; known from the first training step on."""
        found = self._training.stage_of
        if found is not None:
            return found
        if self.lightning_module is not None and self._options.trains_plainly:
            return {n: 0 for n, _ in self.lightning_module.named_parameters()}
        raise ConfigurationError(
            "strategy.stage_of was read before the first training step found the stages; "
            "allowed: after it; read it in on_train_batch_end or later"
        )

    @property
    def own_stages(self) -> tuple[int, ...]:
        """Return the stages whose parameters this rank has; of replicated workers all."""
        own = self._training.own_stages
        return tuple(sorted(set(self.stage_of.values()))) if own is None else own

    @property
    def updated_parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters whose gradients on_before_optimizer_step sees whole, on this rank.

        Replicated workers, and pipelines without a flush, call it for each of their stages.
        """
        updated = self._training.updated_parameters
        if updated is None:
            return list(self.model.parameters()) if self.model is not None else []
        return updated

    def report(self) -> str:
        """Return the profile of a pipelined module, where stages could begin and where they do.

        The last lines name the stages, to paste, and how batches are cut; of replicated workers
        there is no more.
        """
        report = self._training.report()
        if report is None:
            raise ConfigurationError(
                "strategy.report() was asked for where no module has been looked at; allowed: "
                "from the first step on, of a pipeline on rank 0; or run `lightning-cyclic doctor "
                "PATH:CLASS` without training"
            )
        return report

    def planned_memory(self, batch_bytes: int) -> Memory | None:
        """Return what this rank keeps at most by the plan; all ranks must call it, between steps.

        Args:
            batch_bytes: of the batch that its replica is given for a step.

        Returns:
            None where stages are not known. Activations are 0 where no module has been looked at:
            of replicated workers, and of a single stage.
        """
        return self._training.planned_memory(batch_bytes)

    @property
    def steps_compared(self) -> int:
        """Return how many steps of this fit have been found equal to the plain ones."""
        return self._training.steps_compared

    @property
    def not_compared(self) -> tuple[str, ...]:
        """Return why steps of this fit were not compared, or not found equal: a text for each."""
        return tuple(self._training.not_compared)

    @property
    def route(self) -> str:
        """Return how messages travel: "named", "edges" or "host_staged"; "" where none do."""
        transport = self._training.transport
        return transport.route if transport else ""

    @property
    def messages_sent(self) -> int:
        """Return how many point-to-point messages this worker has sent in training."""
        transport = self._training.transport
        return sum(transport.messages.values()) if transport else 0

    @property
    def bytes_sent(self) -> int:
        """Return how many bytes this worker has sent in training, point-to-point."""
        transport = self._training.transport
        return sum(transport.num_bytes.values()) if transport else 0

    # ------------------------------------------------------------------ what a training answers

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._training.training_step(super().training_step, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._training.validation_step(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._training.test_step(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._training.predict_step(super().predict_step, *args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self._training.pre_backward(super().pre_backward, closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        self._training.post_backward(super().post_backward, closure_loss)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._training.optimizer_step(super().optimizer_step, *args, **kwargs)

    @override
    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        return self._training.reduce(super().reduce, *args, **kwargs)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self._training.reduce_boolean_decision(
            super().reduce_boolean_decision, decision, all
        )

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self._training.accumulating(super().block_backward_sync):
            yield

    # ------------------------------------------------------------------ all workers together

    @override
    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        self._reductions.check_meeting("all_gather")
        with self.assembly.waiting("to gather"):
            return super().all_gather(*args, **kwargs)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._reductions.check_meeting("barrier")
        with self.assembly.waiting("to meet"):
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._reductions.check_meeting("broadcast")
        with self.assembly.waiting("to learn what one of them has"):
            return super().broadcast(obj, src)

    @property
    @override
    def _when(self) -> str:
        training = self._get_training()
        return _START if training is None else training.when

    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends."""
        training = self._get_training()
        if training is not None:
            training.fail(error)
            assert self.lightning_module is not None
            self._undo.enter_context(none_on_exception(self.lightning_module.trainer))
        elif (crew := self.assembly.crew) is not None:
            crew.tell(words_of(error, crew.names, _START))

    # ------------------------------------------------------------------ between steps

    def flush(self) -> None:
        """Finish updates in flight, so that the module holds the newest weights."""
        self._training.flush()

    # ------------------------------------------------------------------ the end

    @override
    def teardown(self) -> None:
        """Take everything off the module again."""
        self._training.close()
        self.assembly.close()
        self._undo.close()
        module = self.lightning_module
        is_bounded = self._chosen.memory_limit_bytes is not None
        if module is not None and not (is_bounded and self._chosen.makes_stages_apart):
            torn_weights.make_writable(module)
        if module is not None and any(p.is_meta for p in module.parameters()):
            self._lightning_module = None  # it was refused; Lightning would move it, and fail
        super().teardown()
