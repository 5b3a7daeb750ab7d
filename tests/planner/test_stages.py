from lightning_cyclic.planner import Stages, Tie

from .profiles import profile_of, unit


def profile(*forward_s, ties=()):
    units = (
        unit(f"u{k}", forward_s=s, backward_s=2 * s, param_bytes=10, activation_bytes=100 + k,
             crossing_bytes=k)
        for k, s in enumerate(forward_s)
    )  # fmt: skip
    return profile_of(units, ties=ties)


def test_a_stage_is_the_sum_of_its_units():
    stages = Stages.of(profile(1, 2, 3, 4), [0, 1, 3])
    assert stages.names == ("u0", "u1", "u3")
    assert stages.forward_s == (1, 5, 4)
    assert stages.backward_s == (2, 10, 8)
    assert stages.param_bytes == (10, 20, 10)
    assert stages.activation_bytes == (100, 203, 103)
    assert stages.input_bytes == (0, 1, 3)  # of its first unit
    assert (stages.tied, stages.tied_bytes) == ((), (0, 0, 0))


def test_rematerialisation_adds_a_forward():
    stages = Stages.of(profile(1, 2), [0, 1])
    assert stages.costs().backward_s == (2, 4)
    assert stages.running_again(stages.forward_s).costs().backward_s == (3, 6)
    assert stages.running_again(stages.forward_s).costs().forward_s == (1, 2)


def test_shared_parameters_count_once_in_a_stage_and_tie_stages():
    ties = (Tie(units=(0, 1, 3), bytes=4), Tie(units=(1, 2), bytes=3))
    stages = Stages.of(profile(1, 1, 1, 1, ties=ties), [0, 2, 3])
    assert stages.param_bytes == (20 - 4, 10, 10)
    assert stages.tied == ((0, 1), (0, 2))
    assert stages.tied_bytes == (7, 0, 0)
    whole = Stages.of(profile(1, 1, 1, 1, ties=ties), [0])
    assert (whole.param_bytes, whole.tied) == ((40 - 8 - 3,), ())


def test_what_a_worker_shares_with_itself_is_kept_once():
    ties = (Tie(units=(0, 1, 3), bytes=4),)
    stages = Stages.of(profile(1, 1, 1, 1, ties=ties), [0, 2, 3], together=True)
    assert stages.param_bytes == (20 - 4, 10, 10 - 4)
    assert (stages.tied, stages.tied_bytes) == ((), (0, 0, 0))


def test_even_stages():
    assert Stages.even(profile(5, 1, 1, 1, 4, 2), 3).names == ("u0", "u1", "u4")
    assert Stages.even(profile(1e-4, 1e-4, 2e-4), 2).names == ("u0", "u2")
