"""PipelineStrategy: the door to plans whose workers each have some stages of the module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar, Literal, final

from typing_extensions import Unpack

from lightning_cyclic.plan.presets import presets_of
from lightning_cyclic.plugin.option_values import Checkpointing, Clipping, Compress
from lightning_cyclic.plugin.strategy import Inherited, PlannedStrategy
from lightning_cyclic.runtime.transport.choice import Route


@final
class PipelineStrategy(PlannedStrategy):
    """Train an unmodified LightningModule on workers that each have some of its stages.

    Which preset is fastest for a model, with which numbers, `lightning-cyclic plan` predicts.

    Args:
        preset: "1f1b" or "gpipe"; "interleaved_1f1b", whose workers have several stages each;
            "zb_h1", "zb_v" or "dualpipe_v", which put off the gradients of weights (all of these
            with a flush between steps: the same numbers as on one device); "cyclic_pipeline",
            "pipedream", "pipedream_2bw", "pipeoptim" or "spectrain" (none); "cyclic_mp", whose
            workers take turns with the stages. Or a mapping with a value for each axis: schedule,
            placement, weights, sharding.
        stages: "auto", cut by FLOPs and bytes, counted, so that stages are the same in every
            run, one for each worker of a replica, or two ("interleaved_1f1b", "zb_v",
            "dualpipe_v"); "measured", cut by times, which rank 0 takes in the first step; a
            number; or the module paths that begin stages 1, 2, ...
        num_microbatches: into which each replica cuts a batch. [1 where each is an update by
            itself, else one per stage]
        replicas: of the pipeline.
        activation_checkpointing: run a stage again for its backward instead of keeping what its
            forward saved: "never", "always", or for each but the last micro-batch ("except_last");
            "optimal" runs again only those units of a stage that memory_limit_bytes leaves no room
            for, by the schedule with the least recomputation; "offload" puts what a forward has
            saved away until its backward, if enough is computed between them.
        memory_limit_bytes: most bytes that a worker may keep, as the planner counts them: weights
            of all versions, gradients, optimizer state, and activations of all micro-batches
            under way; stages are cut so. Where none can, and there is a disk, or the memory of a
            GPU's host, optimizer state comes for the update of its stage. [any number]
        disk: a folder, where that lies, or what "offload" puts away, in files, of workers on CPUs.
            [of GPUs it is the host's memory]
        clip_norm: what gradient_clip_val (norm) looks at: "stage", "global", or None: "stage" for
            freshest weights (said once), "global" otherwise.
        error_feedback: where gradients are old, turn each update u_t into 2 * u_t - u_(t-1), for
            one more buffer of the size of the weights. Experimental.
        compress: in which dtype sums of gradients travel between replicas: "fp32", "bf16" or
            "fp16". [that of the gradients, and "fp32" where they have a lower precision] Or a
            mapping: {"gradients": ..., "activations": ...}, where activations and their gradients
            cross from stage to stage as "bf16", "fp16", "int8", :class:`TopK` of each sample, or
            by a codec of your own (docs/compression.md). [as they are]
        bandwidth: of each worker, like "10Gbit/s" or bytes per second; stages are cut by it.
            [10Gbit/s]
        transport: how messages travel: "auto" (on CPUs by name over gloo; on GPUs over NCCL,
            channel by channel; with process_group_backend="gloo" through the host's memory), or
            "named", "edges", "host_staged".
        save_distributed_checkpoint: whether a checkpoint is a folder, into which each rank writes
            the weights and optimizer state that it has, as under ModelParallelStrategy; else a
            file, for which rank 0 puts them together.
        verify: whether the first step of a fit is compared, bit by bit, with training_step on the
            whole module, which rank 0 runs before it; a number compares as many steps, where one
            version of the weights is read; False compares none (docs/is_it_right.md).
        **inherited: arguments of DDPStrategy: accelerator, parallel_devices,
            cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            start_method, and timeout, the limit of every wait for another rank, as in
            CyclicStrategy.

    Raises:
        PlanError: impossible numbers, or a plan that cannot be run yet.
        ConfigurationError: an option, Trainer flag, module or optimizer that does not fit.

    Source: GPipe, arXiv 1811.06965; PipeDream, SOSP 2019; PipeDream-2BW and PipeDream-Flush
        (1F1B), arXiv 2006.09503; SpecTrain, arXiv 1809.02839; PipeOptim, arXiv 2312.00839; CDP
        as a pipeline and with model parallelism, arXiv 2403.08837.

    Example:
        >>> PipelineStrategy("1f1b", stages=["blocks.4"], num_microbatches=8).preset
        '1f1b'
    """

    presets: ClassVar = presets_of("pipelined", "shared")
    placements: ClassVar = ("pipelined", "shared", "single")
    other: ClassVar = "CyclicStrategy"

    def __init__(  # noqa: PLR0913  (an argument per option is the public face)
        self,
        preset: str | Mapping[str, str] = "1f1b",
        *,
        stages: int | str | list[str] = "auto",
        num_microbatches: int | None = None,
        replicas: int = 1,
        activation_checkpointing: Checkpointing = "never",
        memory_limit_bytes: int | None = None,
        disk: str | os.PathLike[str] | None = None,
        clip_norm: Clipping | None = None,
        error_feedback: bool = False,
        compress: Compress | None = None,
        bandwidth: str | float | None = None,
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
                "replicas": replicas,
                "activation_checkpointing": activation_checkpointing,
                "memory_limit_bytes": memory_limit_bytes,
                "disk": disk,
                "clip_norm": clip_norm,
                "error_feedback": error_feedback,
                "compress": compress,
                "bandwidth": bandwidth,
                "transport": transport,
                "save_distributed_checkpoint": save_distributed_checkpoint,
                "verify": verify,
            },
            **inherited,
        )
