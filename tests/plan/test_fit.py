"""fit refuses widths and ties by name; what else does not fit is in ``test_plan.py``."""

import pytest

from lightning_cyclic.errors import PlanError
from lightning_cyclic.plan import make_plan


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"replicas": 0}, r"replicas=0; allowed: whole numbers from 1 on"),
        ({"replicas": True}, r"replicas=True"),
        ({"num_workers": 5}, r"num_workers=5 with replicas=2; .*use num_workers=6"),
        ({"num_workers": 1}, r"num_workers=1 with replicas=2; .*use num_workers=2"),
        ({"num_microbatches": 3}, r"num_microbatches=3 with replicas=2; .*use num_microbatches=4"),
        (
            {"num_workers": 6},
            r"num_workers=6 with num_stages=2 and replicas=2; .* at most one worker per stage of "
            r"each replica; use num_stages=3 or num_workers=4",
        ),
        (
            {"preset": "cyclic_dp"},
            r"replicas=2 does not fit placement 'replicated' with schedule 'cyclic'; allowed with "
            r"them: 1; use replicas=1, or placement 'pipelined' with schedule '1f1b' or 'cyclic' "
            r"or 'dualpipe_v' or 'gpipe'",
        ),
        ({"placement": "single", "num_workers": 1}, r"replicas=2 does not fit placement 'single'"),
    ],
)
def test_a_width_that_does_not_fit_is_refused(change, text):
    numbers = {"preset": "1f1b", "num_stages": 2, "num_workers": 4, "replicas": 2}
    with pytest.raises(PlanError, match=text):
        make_plan(**(numbers | change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tied": ((3, 0),)}, r"tied=\(\(3, 0\),\); allowed: .* ascending, .*use tied=\(\)"),
        ({"tied": ((0, 4),)}, r"stages 0 to 3"),
        ({"tied": ((0,),)}, r"groups of two or more"),
        ({"tied": ((0, 0),)}, r"groups of two or more"),
        (
            {"preset": "pipeoptim"},
            r"weights 'predicted' do not fit tied=\(\(0, 3\),\), as .*; allowed: sync, delayed, "
            r"freshest, stashed; use one of these, or stages that keep shared parameters in one",
        ),
        (
            {"preset": "cyclic_mp"},
            r"placement 'shared' does not fit tied=\(\(0, 3\),\); allowed: parameters that belong "
            r"to one stage; use another placement",
        ),
    ],
)
def test_ties_that_do_not_fit_are_refused(change, text):
    numbers = {"preset": "gpipe", "num_stages": 4, "num_workers": 4, "tied": ((0, 3),)}
    with pytest.raises(PlanError, match=text):
        make_plan(**(numbers | change))


@pytest.mark.parametrize(
    "change",
    [
        {"preset": "cyclic_mp"},
        {"preset": "cyclic_mp", "weights": "stashed"},
        {"preset": "cyclic_dp_v1"},
        {"preset": "pipedream_2bw", "placement": "single", "num_workers": 1},
    ],
)
def test_late_updates_are_refused_where_new_versions_are_read_at_once(change):
    numbers = {"num_stages": 3, "num_workers": 3, "late_updates": True}
    with pytest.raises(PlanError, match=r"late_updates=True with .*allowed: weights 'delayed' wi"):
        make_plan(**(numbers | change))


@pytest.mark.parametrize("preset", ["cyclic_mp", "cyclic_pipeline"])
def test_a_norm_over_all_stages_is_refused_where_each_is_updated_at_once(preset):
    with pytest.raises(PlanError, match=r"norms='owners' with weights 'freshest' .*'shared' and "):
        make_plan(preset, num_stages=3, num_workers=3, norms="owners")


@pytest.mark.parametrize("norms", ["owners", "all"])
def test_norms_with_slack_are_refused(norms):
    with pytest.raises(PlanError, match=r"slack=2 would mix gradients of two steps.*use slack=0"):
        make_plan("cyclic_dp", num_stages=4, num_workers=4, slack=2, norms=norms)
