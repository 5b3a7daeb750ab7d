"""Departed: names that users may still give, and what to do in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lightning_cyclic.errors import ConfigurationError

_NO_RING: Final = (
    "parameters do not go from user to user any more: use preset='cyclic_zero', which shards "
    "weights with delays, or strategy='fsdp', which shards them synchronously"
)

_ASK: Final = (
    "nothing is chosen in a run any more: `lightning-cyclic plan MODEL --workers N --memory SIZE` "
    "prints the strategy, and --save writes it"
)

_AXIS: Final = (
    "give all four axes as the preset: preset={'schedule': ..., 'placement': ..., 'weights': ..., "
    "'sharding': ...}"
)
_WHOLE: Final = "a stage travels in one message: use more stages, or groups"
_STEADY: Final = "workers and links are simulated as steady: leave it out"

DEPARTED: Final[dict[str, str]] = {
    # an argument, or one value of an argument -> what to do instead
    "preset='xpipe'": "use preset='spectrain', or 'pipeoptim': both predict weights",
    "preset='weipipe'": _NO_RING,
    "sharding='ring'": _NO_RING,
    "schedule='cyclic_flush'": _NO_RING,
    "preset='auto'": _ASK,
    "slack='auto'": _ASK,
    "chunks": _WHOLE,
    "backward_weights": "leave it out: backwards read what the preset's paper says, the newest "
    "weights (pipeoptim) or a new guess (spectrain)",
    "horizon": "leave it out: predictions repeat the optimizer's last direction",
    "lookahead_lrs": "leave it out: predictions use the learning rate of the last update",
    "lr_annealing_steps": "give parameter groups of early stages a lower learning rate, or begin "
    "under '1f1b' and go on from its checkpoint",
    "warmup_steps": "train the first steps under '1f1b', and go on from its checkpoint; then "
    "the rule begins as at step 0",
    "schedule": _AXIS,
    "placement": _AXIS,
    "weights": _AXIS,
    "sharding": _AXIS,
    "latency": "leave it out: where stages begin hardly depends on it",
    "num_micro": "use num_microbatches",
    "width": "use replicas",
    "remat": "use activation_checkpointing",
    "wire_dtype": "use compress",
    "clip": "use clip_norm",
    "groups": "use group_size, how many workers a group has; 'host' is the default",
    "resume": "name the checkpoint to fit: trainer.fit(..., ckpt_path='last'), with "
    "ModelCheckpoint(dirpath=..., save_last=True)",
    "rank_order": "launch neighbours on one host, as srun --distribution=block and torchrun do",
    "trace": "profile with torch.profiler or Trainer(profiler='pytorch'), which show each action",
    # flags of the command line
    "--chunks": _WHOLE,
    "--jitter": _STEADY,
    "--stragglers": _STEADY,
    "--latency-jitter": _STEADY,
    "--width": "use --replicas",
    "--groups": "use --group-size, the workers of each group",
    "--num-micro": "use --num-microbatches",
    "--micro": "use --num-microbatches",
    "--remat": "use --activation-checkpointing",
    "--milp": "the doctor looks at all orders of branches that it can in a second",
}


def refuse_departed(given: Mapping[str, object]) -> None:
    """Say what to do in the place of arguments, or values of them, that there were."""
    for name, value in given.items():
        for text in (f"{name}={value!r}", name):
            if text in DEPARTED:
                raise ConfigurationError(
                    f"{name}={value!r} is no option any more; {DEPARTED[text]}"
                )
