"""What operators compute and move, against numbers counted by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import flop_registry

from lightning_cyclic.runtime.stages import clocks as counting
from lightning_cyclic.runtime.stages.clocks import FlopCounter, moved_bytes

B, S, D, H = 2, 16, 24, 4  # batch, sequence, features, heads


def flops_of(call, grad_mode=torch.no_grad):
    with grad_mode(), FlopCounter() as counter:
        call()
    return counter.flops


def test_a_product_counts_two_flops_for_each_pair_of_factors():
    layer, x = nn.Linear(D, 7), torch.ones(B, S, D)
    assert flops_of(lambda: layer(x)) == 2 * B * S * D * 7
    assert flops_of(lambda: layer(x), torch.inference_mode) == 2 * B * S * D * 7


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution(groups):
    layer = nn.Conv2d(4, 6, (3, 5), stride=2, padding=(1, 2), groups=groups)
    assert flops_of(lambda: layer(torch.ones(B, 4, 8, 10))) == (
        2 * B * (4 * 5) * 6 * (4 // groups) * (3 * 5)
    )


PAIRS = 2 * (2 * B * H * S * S * (D // H))  # queries with keys, weights with values


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}], ids=str)
def test_attention_counts_alike_by_whichever_kernel(options, grad_mode):
    q = torch.ones(B, H, S, D // H)

    def attend():
        F.scaled_dot_product_attention(q, q, q, **options)

    assert flops_of(attend, grad_mode) == PAIRS


def test_attention_with_its_projections():
    layer, x = nn.MultiheadAttention(D, H, batch_first=True), torch.ones(B, S, D)
    projections = 4 * (2 * B * S * D * D)
    assert flops_of(lambda: layer(x, x, x, need_weights=False)) == projections + PAIRS
    assert flops_of(lambda: layer(x, x, x)) == projections + PAIRS


@pytest.mark.parametrize(
    ("kind", "gates", "layers", "both_ways"),
    [(nn.LSTM, 4, 1, False), (nn.LSTM, 4, 2, True), (nn.GRU, 3, 2, False), (nn.RNN, 1, 1, True)],
)
def test_recurrent_networks_count_alike_fused_or_not(kind, gates, layers, both_ways):
    net = kind(D, 8, layers, batch_first=True, bidirectional=both_ways)
    ways = 2 if both_ways else 1
    widths = [D] + [8 * ways] * (layers - 1)
    products = sum(ways * 2 * B * S * gates * 8 * (width + 8) for width in widths)
    assert flops_of(lambda: net(torch.ones(B, S, D))) == products


def test_tensors_that_are_made_of_others_count_as_these():
    rows = torch.nested.nested_tensor([torch.ones(3, D), torch.ones(5, D)], layout=torch.jagged)
    layer = nn.Linear(D, 7)
    assert flops_of(lambda: layer(rows)) == 2 * (3 + 5) * D * 7


def test_kernels_that_torch_has_formulas_for_are_counted_by_them():
    assert not {*counting._FURTHER} & {torch.ops.aten.mm, torch.ops.aten.convolution}
    called = []
    packet = torch.ops.aten.mm
    known = flop_registry[packet]

    def formula(*args, **kwargs):
        called.append(kwargs["out_val"].shape)
        return 5

    flop_registry[packet] = formula
    try:
        assert flops_of(lambda: torch.ones(2, 3) @ torch.ones(3, 4)) == 5
    finally:
        flop_registry[packet] = known
    assert called == [(2, 4)]


def test_a_formula_that_fails_leaves_the_bytes():
    packet = torch.ops.aten.mm
    known = flop_registry[packet]

    def formula(*args, **kwargs):
        raise AssertionError("shapes that it does not know")

    flop_registry[packet] = formula
    try:
        assert flops_of(lambda: torch.ones(2, 3) @ torch.ones(3, 4)) == 0
    finally:
        flop_registry[packet] = known


# ---------------------------------------------------------------------- bytes


X = torch.ones(8, 4)  # 128 bytes


def test_reading_and_writing_count():
    assert moved_bytes("add", [X, X[:2]], [], [X + 1]) == 128 + 32 + 128
    assert moved_bytes("sum", [X], [], [X.sum()]) == 128 + 4
    assert moved_bytes("zeros", [], [], [torch.zeros(3)]) == 12


def test_views_and_what_is_returned_as_it_was_move_nothing():
    assert moved_bytes("transpose", [X], [], [X.T]) == 0
    assert moved_bytes("__getitem__", [X], [], [X[1:3]]) == 0
    assert moved_bytes("contiguous", [X], [], [X.contiguous()]) == 0
    assert moved_bytes("reshape", [X.T], [], [X.T.reshape(-1)]) == 256


def test_changes_in_place_are_written():
    assert moved_bytes("relu_", [X], [X], [X]) == 256
    assert moved_bytes("add_", [X, X[:2]], [X], [X]) == 288


def test_of_a_table_no_more_is_read_than_is_looked_up():
    table, rows = torch.ones(1000, 4), torch.tensor([1, 5])
    assert moved_bytes("embedding", [rows, table], [], [table[rows]]) == 16 + 32 + 32
    assert moved_bytes("embedding", [table, rows], [], [table[rows]]) == 16 + 32 + 32
    few = torch.ones(1, 4)
    assert moved_bytes("embedding", [few, rows * 0], [], [few[rows * 0]]) == 16 + 16 + 32


def test_of_a_buffer_no_more_is_written_than_is_filled_in():
    cache, new = torch.zeros(1000, 4), torch.ones(2, 4)
    assert moved_bytes("__setitem__", [cache, new], [cache], []) == 32 + 32 + 32
    assert moved_bytes("index_copy_", [cache, new], [cache], [cache]) == 32 + 32 + 32


def test_tensors_without_a_storage_count_by_their_shape():
    sparse = torch.eye(4).to_sparse()
    assert moved_bytes("mul", [sparse], [], [sparse * 2]) == 128
