"""Profiles and candidates of numbers."""

from lightning_cyclic.planner import Candidate, ModelProfile, UnitProfile


def unit(name="h", **costs):
    zero = dict.fromkeys(
        ("forward_s", "backward_s", "param_bytes", "activation_bytes", "crossing_bytes"), 0
    )
    return UnitProfile(name=name, **zero | costs)


def profile_of(units, *, micro_size=1, ties=()):
    return ModelProfile(name="net", micro_size=micro_size, units=tuple(units), ties=ties)


def candidate(preset, *, num_stages=3, num_microbatches=4, remat=False, replicas=1):
    return Candidate(
        preset=preset, replicas=replicas, num_stages=num_stages,
        num_microbatches=num_microbatches, micro_size=1,
        checkpointing="always" if remat else "never",
    )  # fmt: skip
