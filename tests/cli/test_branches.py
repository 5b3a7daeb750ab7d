"""Graphs of real modules that branch, and what another order of their calls would gain."""

from itertools import pairwise, permutations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_cyclic.cli import branches
from lightning_cyclic.cli.branches import StepPieces, faster_order
from lightning_cyclic.plan import make_plan
from lightning_cyclic.planner import CostGraph, GraphSplit, split_ideals
from lightning_cyclic.planner.ideals import ideals
from lightning_cyclic.runtime.stages.best_places import best_places, most_stages
from lightning_cyclic.runtime.stages.cuts import choose_cuts
from lightning_cyclic.runtime.stages.demands import Demands
from lightning_cyclic.runtime.stages.places import CutPoints
from lightning_cyclic.runtime.stages.survey import survey
from lightning_cyclic.simulate import Network
from tests.runtime.stages.scripts import Writer
from tests.runtime.stages.test_best_places import judged, scripts
from tests.runtime.stages.test_cuts import UNet

FORWARD = Demands.of_forward(1)


def drawn(pieces):
    """Draw a graph: who waits for whom, and who hands how many bytes to whom."""
    graph = pieces.graph(FORWARD)
    names = [pieces.name(v) for v in range(graph.num_nodes)]
    lines = [
        f"{names[x.maker]} -{x.num_bytes}-> {' '.join(names[v] for v in x.users)}"
        for x in graph.tensors
    ]
    return lines + [f"{names[u]} ---> {names[v]}" for u, v in graph.keeps]


# ---------------------------------------------------------------------- real modules


class Towers(nn.Module):
    """Two towers of their own weights, one behind the other, and a skip from the stem."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.left = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))
        self.join = nn.Linear(16, 8)

    def forward(self, x):
        h = self.stem(x)
        left = self.left(h)
        right = self.right(h)
        return (self.join(torch.cat([left, right], 1)) + h).sum()


class Siamese(nn.Module):
    """One tower, called twice: its layers keep their turns."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        a, b = self.tower(x[:, :4]), self.tower(x[:, 4:])
        return self.out((a - b).abs()).sum()


class InPlace(nn.Module):
    """Branches of which one changes what the other reads."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))
        self.more, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.stem(x)
        left = self.more(self.left(h))
        h += 1
        right = self.right(h)
        return (self.out(right) + left).sum()


MODULES = {
    "u-net": (UNet, (1, 3, 8, 8)), "towers": (Towers, (1, 4)), "siamese": (Siamese, (1, 8)),
    "in place": (InPlace, (1, 4)),
}  # fmt: skip


def surveyed(name):
    make, size = MODULES[name]
    model = make()
    return survey(model, lambda: model(torch.ones(size)))


def pieces_of(name):
    return StepPieces(CutPoints(surveyed(name)))


def test_a_u_net_has_skips_and_one_order():
    assert drawn(pieces_of("u-net")) == [
        "d1 -1024-> u2",  # the skip, and for the next one what is pooled behind the call
        "d1 -256-> d2",
        "d2 -256-> mid",
        "d2 -64-> mid",
        "mid -512-> u2",
        "u2 -2048-> u1",
    ]
    assert pieces_of("u-net").graph(FORWARD).is_chain


def test_towers_wait_for_the_stem_alone():
    assert drawn(pieces_of("towers")) == [
        "stem -32-> left right join",
        "left -64-> left.2",
        "left.2 -32-> right.2",  # which joins them
        "right -16-> right.2",
        "right.2 -64-> join",
    ]
    assert len(ideals(pieces_of("towers").graph(FORWARD))) > 7


def test_layers_that_are_called_again_keep_their_turns():
    assert not pieces_of("siamese").graph(FORWARD).keeps
    points = CutPoints(surveyed("siamese"))
    apart = StepPieces(points, ["tower.2"])  # within both calls
    assert drawn(apart)[-1] == "tower.0 ---> tower.2"


def test_what_is_changed_in_place_is_used_in_turn():
    assert drawn(pieces_of("in place")) == [
        "stem -16-> left more right",
        "left -16-> more",
        "more -16-> out",
        "right -16-> out",
        "stem ---> left",
        "left ---> more",
        "more ---> right",  # behind which the input of right is changed
    ]


# ---------------------------------------------------------------------- against all orders


def planned(stages, bandwidth):
    plan = make_plan("1f1b", num_stages=stages, num_workers=stages, num_microbatches=stages)
    network = Network(bandwidth_bytes_per_s=bandwidth)
    return Demands.of(plan, again=False, network=network, state_per_param=2.0)


S, MS = 10**9, 10**6  # in ns; with whole seconds and bytes per second floats are exact
bandwidths = st.sampled_from([0.25, 1, 1024])


@settings(max_examples=100, deadline=None)
@given(scripts, st.integers(2, 4), bandwidths)
def test_in_the_order_of_calls_the_graph_is_cut_as_the_places_are(script, stages, bandwidth):
    points = CutPoints(Writer([("layer", 1, 1, 1), *script], S).survey())
    assume(not points.clash(points.possible) and most_stages(points) >= stages)
    demands = planned(stages, bandwidth)
    places = best_places(points, stages, None, demands)
    starts = [place.path for place in places]
    pieces = StepPieces(points, starts)
    graph = pieces.graph(demands)
    chain = CostGraph(
        seconds=graph.seconds,
        tensors=graph.tensors,
        keeps=tuple(pairwise(range(graph.num_nodes))),
        network=graph.network,
    )
    expected = judged(points, places, demands)[0]
    assert split_ideals(chain, stages).slowest_s == expected
    assert graph.slowest_s(pieces.ends(starts)) == expected


@st.composite
def calls(draw):
    """Draw calls by path, each with the paths of those before whose outputs it uses."""
    found = []
    for k in range(draw(st.integers(2, 5))):
        inputs = draw(st.sets(st.integers(0, k - 1), max_size=2)) if k else ()
        costs = draw(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 5)))
        found.append(("call", str(k), *costs, tuple(map(str, sorted(inputs)))))
    return found


def orders(given_calls):
    """Yield the calls in all orders in which they can be made."""
    for order in permutations(given_calls):
        done = [call[1] for call in order]
        if all(set(call[-1]) <= set(done[:k]) for k, call in enumerate(order)):
            yield order


@settings(max_examples=60, deadline=None)
@given(calls(), st.integers(2, 3), bandwidths)
def test_the_bound_is_what_the_best_of_all_orders_gives(script, stages, bandwidth):
    assume(len(script) >= stages)
    demands = planned(stages, bandwidth)
    found = []
    for order in orders(script):
        points = CutPoints(Writer(order, S).survey())
        found.append(judged(points, best_places(points, stages, None, demands), demands)[0])
    pieces = StepPieces(CutPoints(Writer(script, S).survey()))
    graph = pieces.graph(demands)
    assert split_ideals(graph, stages).slowest_s == min(found)


# ---------------------------------------------------------------------- what is said

TWO_BRANCHES = [
    ("call", "stem", 5 * MS, 1, 8, ()),
    ("call", "left", 5 * MS, 1, 8, ("stem",)),
    ("call", "left2", 2 * MS, 1, 8, ("left",)),
    ("call", "right", 3 * MS, 1, 8, ("stem",)),
    ("call", "right2", 2 * MS, 1, 8, ("right",)),
    ("call", "join", 5 * MS, 1, 8, ("left2", "right2")),
]
SEEN = Writer(TWO_BRANCHES).survey()
SAID = """\
if branches were called in another order, the slowest stage could take 8 ms instead of 10 ms
(forward of one micro-batch): call 'right' before 'left'"""


def said(seen, stages):
    return faster_order(seen, choose_cuts(seen, stages))


def test_what_another_order_would_gain():
    assert said(SEEN, 3) == SAID
    script = [TWO_BRANCHES[k] for k in (0, 3, 1, 2, 4, 5)]
    followed = Writer(script).survey()
    assert choose_cuts(followed, 3).starts == ("left", "right2")
    assert said(followed, 3) is None


def test_where_there_is_nothing_to_say():
    row = Writer([("call", str(k), MS, 1, 8, (str(k - 1),) if k else ()) for k in range(5)])
    assert said(row.survey(), 2) is None  # one order
    assert said(SEEN, 1) is None
    assert said(SEEN, 6) is None  # each call is a stage in whatever order
    timeless = [(*call[:2], 0, *call[3:]) for call in TWO_BRANCHES]
    assert said(Writer(timeless).survey(), 3) is None
    hardly = [(*call[:2], call[2] + 40 * MS, *call[3:]) for call in TWO_BRANCHES]
    assert said(Writer(hardly).survey(), 3) is None  # less than a twentieth


def test_stages_that_a_user_named_inside_of_a_place_are_not_judged():
    seen = Writer([("layer", 1, 1, 1), ("box", [("layer", 1, 1, 1)]), ("layer", 9, 1, 1)]).survey()
    assert faster_order(seen, choose_cuts(seen, ["1.0"])) is None


def test_many_hints_are_counted():
    pieces = StepPieces(CutPoints(Writer([("layer", 1, 1, 1)] * 8).survey()))
    split = GraphSplit(stages=tuple((v,) for v in (1, 0, 3, 2, 5, 4, 7, 6)), slowest_s=1)
    hints = "'1' before '0', '3' before '2', '5' before '4' and 1 more"
    assert branches._hints(pieces, split) == hints


def test_of_too_many_orders_nothing_is_said():
    script = [("call", f"c{k}", (10 if k == 7 else 1) * MS, 1, 8, ()) for k in range(15)]
    assert said(Writer(script).survey(), 2) is None  # 2 ** 15 ideals
