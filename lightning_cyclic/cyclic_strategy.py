"""CyclicStrategy: the door to plans whose workers each run whole micro-batches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar, Literal, final

from typing_extensions import Unpack

from lightning_cyclic.plan.presets import presets_of
from lightning_cyclic.plan.weights import LocalSteps
from lightning_cyclic.plugin.option_values import Clipping, Compress
from lightning_cyclic.plugin.strategy import Inherited, PlannedStrategy
from lightning_cyclic.runtime.transport.choice import Route


@final
class CyclicStrategy(PlannedStrategy):
    """Train an unmodified LightningModule on workers that each run whole micro-batches.

    Any module trains so, as with DDP. One device with ``num_microbatches`` cuts its batches, and
    runs them as that many workers would, with the same bits.

    Args:
        preset: "cyclic_dp" (CDP-v2) or "cyclic_dp_v1": workers are staggered, sums of gradients
            go from one to the next; "cyclic_zero" shards the weights, too; "lockstep_dp" is plain
            data parallelism; under "diloco" and "streaming_diloco" each worker trains alone, and
            they exchange weights every so many steps, of which LocalSteps(every=...) has the
            numbers. Or a mapping with a value for each axis: schedule, placement, weights,
            sharding.
        stages: in which updates and messages go: "auto", a number, or the module paths that begin
            stages 1, 2, ...
        num_microbatches: of one device, per update. [as many as workers]
        slack: slots that messages are given to travel before a version counts as fresh.
        group_size: how many neighbours, on one host, run side by side as under DDP, while groups
            are staggered as single workers would be. A sum visits as many places as there are
            groups, and crosses hosts as often; weights are as late as with so many workers.
            "host": where there are several hosts, those of each are a group; a number; or 1.
        clip_norm: what gradient_clip_val (norm) looks at: "stage", "global", or None: "stage" for
            freshest weights (said once), "global" otherwise.
        relay_buffers: "auto" relays the buffers that the first step changed (BatchNorm
            statistics) from worker to worker, "all" relays every buffer.
        memory_limit_bytes: of "cyclic_zero": most bytes of parameters, and of one micro-batch's
            activations of a stage, that a worker may keep. Else, and with disk: most bytes of all
            that training keeps, as the plan counts them; optimizer state that has no room comes
            for its update, and of one worker weights for their use, of a GPU from the host's
            memory. [any number]
        disk: a folder, where it lies in a file for workers on CPUs. [none]
        error_feedback: turn each update u_t into 2 * u_t - u_(t-1), for one more buffer of the
            size of the weights. Experimental.
        compress: what workers send of gradients. "fp32", "bf16" or "fp16": in which sums of them
            travel; each is rounded where it is sent, and the next gradient added in the wider of
            both dtypes. A codec sends less of each worker's own, straight to its owner:
            "int8", :class:`TopK`, :class:`Dct`, :class:`PowerSgd`, or one of your own
            (docs/compression.md). [sums in the dtype of the gradients, and "fp32" where they have
            a lower precision: docs/options.md]
        transport: how messages travel: "auto" (on CPUs by name over gloo; on GPUs over NCCL,
            channel by channel; with process_group_backend="gloo" through the host's memory), or
            "named", "edges", "host_staged".
        save_distributed_checkpoint: whether a checkpoint is a folder, into which each rank writes
            the weights and optimizer state that it has, as under ModelParallelStrategy; else a
            file, for which rank 0 puts them together.
        verify: how many of the first steps are compared with training_step on the whole module,
            where one device runs it in stages: "first_step", a number, or False.
        **inherited: arguments of DDPStrategy: accelerator, parallel_devices,
            cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            start_method, and timeout, the limit of every wait for another rank. [30 minutes, as
            torch has it]

    Raises:
        PlanError: impossible numbers, or a plan that cannot be run yet.
        ConfigurationError: an option, Trainer flag, module or optimizer that does not fit.

    Source: Fournier and Oyallon, "Cyclic Data Parallelism for Efficient Parallelism of Deep
        Neural Networks", arXiv 2403.08837 (CDP-v1, CDP-v2, CDP in ZeRO-DP).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> Trainer(strategy=CyclicStrategy("cyclic_dp", slack=2), devices=1, accelerator="cpu",
        ...         logger=False, enable_checkpointing=False).strategy.slack
        2
    """

    presets: ClassVar = presets_of("replicated")
    placements: ClassVar = ("replicated", "single")
    other: ClassVar = "PipelineStrategy"

    def __init__(  # noqa: PLR0913  (an argument per option is the public face)
        self,
        preset: str | Mapping[str, str | LocalSteps] | LocalSteps = "cyclic_dp",
        *,
        stages: int | str | list[str] = "auto",
        num_microbatches: int | None = None,
        slack: int = 0,
        group_size: Literal["host"] | int = "host",
        clip_norm: Clipping | None = None,
        relay_buffers: Literal["auto", "all"] = "auto",
        memory_limit_bytes: int | None = None,
        disk: str | os.PathLike[str] | None = None,
        error_feedback: bool = False,
        compress: Compress | None = None,
        transport: Route = "auto",
        save_distributed_checkpoint: bool = False,
        verify: Literal["first_step"] | int = "first_step",
        **inherited: Unpack[Inherited],
    ) -> None:
        super().__init__(
            preset,
            {
                "stages": stages,
                "num_microbatches": num_microbatches,
                "slack": slack,
                "group_size": group_size,
                "clip_norm": clip_norm,
                "relay_buffers": relay_buffers,
                "memory_limit_bytes": memory_limit_bytes,
                "disk": disk,
                "error_feedback": error_feedback,
                "compress": compress,
                "transport": transport,
                "save_distributed_checkpoint": save_distributed_checkpoint,
                "verify": verify,
            },
            **inherited,
        )
