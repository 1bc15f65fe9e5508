from __future__ import annotations

import contextlib
import copy
import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from vivace.plan import Plan
from vivace.session.opening import attach
from vivace.technique.registry import find
from vivace.work.bins import item_bytes_of, kind_of
from vivace.work.count import KernelCounter, count_work


def on_meta(build):
    with torch.device("meta"):
        return build()


def step(model, inputs, optimizer=None):
    def run() -> None:
        output = model(inputs)
        (output[0] if isinstance(output, tuple) else output).sum().backward()
        if optimizer is not None:
            optimizer.step()

    return run


def test_a_linear_layer_does_six_operations_a_weight_and_sample():
    model, inputs = on_meta(lambda: (nn.Linear(64, 32, bias=False), torch.empty(8, 64, requires_grad=True)))
    matmul = count_work(lambda: model(inputs).square().sum().backward()).operators["matmul"]
    assert matmul.flops == 6 * 64 * 32 * 8
    assert matmul.count == 3
    assert matmul.bytes == 3 * 4 * (64 * 32 + 64 * 8 + 32 * 8)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_recurrent_layers_are_counted(device):
    model = nn.LSTM(64, 128, device=device, batch_first=True)
    work = count_work(step(model, torch.randn(4, 10, 64, device=device)))
    gates = 2 * 4 * 10 * 4 * 128 * (64 + 128)
    assert work.operators["recurrent"].flops == pytest.approx(3 * gates, rel=0.02)
    assert "matmul" not in work.operators


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_is_counted_inside_a_layer(device):
    model = nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.0, device=device)
    work = count_work(step(model, torch.randn(2, 24, 64, device=device)))
    scores_and_values = 2 * 2 * (2 * 24 * 24 * 64)
    assert work.operators["attention"].flops == int(3.5 * scores_and_values)


def test_an_lstm_and_attention_move_the_bytes_of_a_hand_count():
    """Forward reads the inputs and writes the output; backward reads both, and writes gradients."""
    model, inputs = on_meta(lambda: (nn.LSTM(64, 128), torch.empty(10, 4, 64, requires_grad=True)))
    recurrent = count_work(step(model, inputs)).operators["recurrent"]
    states, weights = 2 * 4 * 128, 4 * 128 * (64 + 128) + 2 * 4 * 128
    read, written = 10 * 4 * 64 + states + weights, 10 * 4 * 128
    assert recurrent.bytes == pytest.approx(4 * (3 * read + 3 * written), rel=0.02)
    query, key, value = on_meta(lambda: torch.empty(3, 2, 4, 24, 16, requires_grad=True))
    attended = functional.scaled_dot_product_attention
    attend = count_work(lambda: attended(query, key, value).square().sum().backward())
    assert attend.operators["attention"].bytes == 4 * (4 + 8) * (2 * 4 * 24 * 16)


def resnet50_by_hand():
    """Operations and bytes of the convolutions, and bytes of the norms, of one 224-pixel image in fp32."""
    convolutions = [(3, 64, 7, 224, 112)]
    inputs = 64
    for width, blocks, size in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(blocks):
            before = 2 * size if block == 0 and width > 64 else size
            convolutions += [(inputs, width, 1, before, before), (width, width, 3, before, size)]
            convolutions += [(width, 4 * width, 1, size, size)]
            if block == 0:
                convolutions += [(inputs, 4 * width, 1, before, size)]
            inputs = 4 * width
    flops = moved = normed = 0
    for number, (there, here, kernel, before, after) in enumerate(convolutions):
        read, weights, written = there * before**2, there * here * kernel**2, here * after**2
        gradient = number > 0  # of its input: nobody wants that of the image
        flops += (2 + gradient) * 2 * weights * after**2
        moved += 4 * (2 * written + (2 + gradient) * read + 3 * weights)
        normed += 4 * (3 + 5) * written  # forward reads twice and writes; backward reads two tensors twice
    return flops + 3 * 2 * 2048 * 1000, moved, normed


def test_resnet50_has_the_operations_and_bytes_of_a_hand_count():
    models = pytest.importorskip("torchvision").models
    model, image = on_meta(lambda: (models.resnet50(), torch.empty(1, 3, 224, 224)))
    work = count_work(step(model, image))
    flops, convolved, normed = resnet50_by_hand()
    assert flops == pytest.approx(24.30e9, rel=0.001)
    assert work.flops == pytest.approx(flops, rel=0.02)
    assert work.operators["convolution"].bytes == pytest.approx(convolved, rel=0.02)
    assert work.operators["norm"].bytes == pytest.approx(normed, rel=0.02)


def test_a_chain_of_elementwise_operators_fuses_to_one_read_and_one_write():
    inputs = on_meta(lambda: torch.empty(1000))
    work = count_work(lambda: ((inputs + 1) * 2).relu())
    assert work.bytes == 3 * 8000
    assert work.bytes_fused == 8000


def test_a_matrix_product_in_between_keeps_a_residual_apart():
    model, inputs = on_meta(lambda: (nn.Linear(50, 50, bias=False), torch.empty(20, 50)))

    def residual() -> torch.Tensor:
        with torch.no_grad():
            hidden = inputs.relu()
            return (model(hidden) + hidden).relu()

    assert count_work(residual).operators["elementwise"].bytes_fused == 4 * 1000 * (2 + 3)


def test_groups_phases_and_saved_bytes():
    model = on_meta(lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.ReLU()))
    inputs = on_meta(lambda: torch.empty(2, 8, 10, 10))
    work = count_work(step(model, inputs, torch.optim.SGD(model.parameters(), lr=0.1)))
    convolutions = [k for k in work.kernels if k.operator == "convolution"]
    assert [(k.groups, k.width) for k in convolutions] == [(8, 1), (8, 1)]
    assert [k.flops for k in convolutions] == [2 * 9 * 2 * 8 * 64] * 2  # no gradient of the input
    assert {k.phase for k in work.kernels} == {"forward", "backward", "update"}
    assert work.saved_bytes == 4 * (2 * 8 * 100 + 2 * 8 * 64)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_what_an_optimizers_closure_runs_is_no_update(kind):
    model, inputs = nn.Linear(8, 4), torch.ones(2, 8)
    optimizer = kind(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        return loss

    once = [(k.name, k.phase) for k in count_work(closure).kernels if k.operator == "matmul"]
    for run in (lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        work = count_work(run)
        found = [(k.name, k.phase) for k in work.kernels if k.operator == "matmul" and k.name != "dot"]
        assert found[:2] == once == [("addmm", "forward"), ("mm", "backward")]
        assert "update" in {k.phase for k in work.kernels}


def test_counting_leaves_no_trace():
    original = functional.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError):
        count_work(lambda: 1 / 0)
    assert functional.scaled_dot_product_attention is original


@pytest.mark.parametrize("fake", [True, False])
def test_attributes_and_views_are_no_kernels(fake):
    with FakeTensorMode() if fake else contextlib.nullcontext():
        grid = torch.ones(4, 6)

        def ask() -> None:
            assert (grid.device.type, grid.layout, grid.is_contiguous()) == ("cpu", torch.strided, True)
            assert (grid.size(0), grid.stride(), grid.numel(), grid.is_pinned()) == (4, (6, 1), 24, False)
            torch.ops.aten.is_same_size(grid, grid)
            grid.detach().t().unflatten(0, (3, 2))
            torch.ops.aten._unsafe_view(grid, [24])
            torch.ops.aten.alias(grid.expand(2, 4, 6)[0, 1:, None])
            grid.chunk(2), grid.unsafe_chunk(2), grid.unbind()

        assert [kernel.name for kernel in count_work(ask).kernels] == []
        written = [kernel.name for kernel in count_work(lambda: grid.view(-1).add_(1).clone()).kernels]
    assert written == ["add_", "clone"]


def test_views_of_parameters_are_not_saved_for_the_backward_pass():
    model, inputs = on_meta(lambda: (nn.Linear(50, 40), torch.empty(3, 50, requires_grad=True)))
    assert count_work(step(model, inputs)).saved_bytes == 4 * 3 * 50


@pytest.mark.parametrize("fake", [True, False])
def test_of_a_batch_that_is_a_slice_of_all_data_the_slice_is_kept(fake):
    with FakeTensorMode() if fake else contextlib.nullcontext():
        model, data = nn.Linear(50, 1), torch.ones(1000, 50)
        assert count_work(step(model, data[10:13])).saved_bytes == 4 * 3 * 50
        both = count_work(lambda: sum(model(part).sum() for part in data[:6].chunk(2)).backward())
        assert both.saved_bytes == 4 * 6 * 50


def test_of_several_backward_passes_the_one_that_keeps_most_counts():
    model, inputs = on_meta(lambda: (nn.Linear(50, 40), torch.empty(8, 50)))

    def accumulate() -> None:
        for part in inputs.split(2):
            model(part).sum().backward()

    def at_once() -> None:
        sum(model(part).sum() for part in inputs.split(2)).backward()

    def twice() -> None:
        loss = model(inputs).sum()
        loss.backward(retain_graph=True)
        model(torch.empty(3, 50, device="meta")).sum().backward()
        loss.backward()

    found = [count_work(each).saved_bytes for each in (accumulate, at_once, twice)]
    assert found == [4 * 2 * 50, 4 * 8 * 50, 4 * (8 + 3) * 50]


def test_dropout_is_one_kernel():
    inputs = on_meta(lambda: torch.empty(100))
    assert count_work(lambda: functional.dropout(inputs, 0.5)).count == 1


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv1d(4, 6, 3, stride=2, padding=1), (9,)),
        (nn.Conv2d(4, 8, 1), (9, 9)),
        (nn.Conv2d(4, 8, 3, groups=2, stride=2, padding=1), (9, 9)),
        (nn.Conv2d(4, 8, 3, padding="same"), (9, 9)),
        (nn.Conv3d(4, 2, 2), (5, 5, 5)),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), (9,)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (9, 9)),
    ],
)
def test_inference_mode_hands_arguments_over_without_their_defaults(layer, size):
    inputs = torch.randn(2, 4, *size)
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            (kernel,) = count_work(lambda: layer(inputs)).kernels
        found.append(dataclasses.replace(kernel, name=""))
    assert found[0] == found[1]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["embedding", "bag"])
def test_of_a_table_rows_are_read_and_its_dense_gradient_is_written_whole(kind, weighted):
    table, indices = torch.randn(1000, 8, requires_grad=True), torch.randint(1000, (4, 3))
    weights = torch.ones(4, 3, requires_grad=True) if weighted else None

    def look_up():
        if kind == "embedding":
            return functional.embedding(indices, table)
        return functional.embedding_bag(indices, table, mode="sum", per_sample_weights=weights)

    work = count_work(lambda: look_up().sum().backward())
    whole, rows = table.numel() * 4, indices.numel() * 8 * 4
    read, written = (
        {
            phase: sum(a.bytes for k in work.kernels if k.phase == phase for a in accesses(k))
            for phase in ("forward", "backward")
        }
        for accesses in (lambda k: k.reads, lambda k: k.writes)
    )
    assert rows <= read["forward"] < rows + 1000
    assert read["backward"] < whole
    assert whole <= written["backward"] < 2 * whole


@pytest.mark.parametrize(("how", "kernels", "passes"), [("foreach", 3, 8), ("fused", 1, 5)])
def test_an_update_of_all_weights_at_once_moves_the_bytes_of_a_hand_count(how, kernels, passes):
    """One after the other momentum is read and written twice, the weights once; all at once each once. The
    gradients are read."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **{how: True})
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    work = count_work(optimizer.step)
    assert {kernel.phase for kernel in work.kernels} == {"update"}
    assert (work.count, work.bytes) == (kernels, passes * 4 * (64 * 64 + 64))


def test_telling_which_stream_uses_a_tensor_is_no_kernel():
    counter = KernelCounter()
    counter.note(torch.ops.aten.record_stream.default, (torch.ones(8), None), {}, None)
    assert counter.kernels == []


def test_copies_of_many_tensors_read_what_they_copy_alone():
    into, given = ([torch.ones(10), torch.ones(20)] for _ in "ab")
    assert count_work(lambda: torch._foreach_copy_(into, given)).bytes == 2 * 4 * 30
    assert count_work(lambda: torch._foreach_zero_(into)).bytes == 4 * 30


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_matrix_is_saved_for_the_backward_pass(layout):
    edges = torch.eye(16).to_sparse(layout=layout)
    features = torch.ones(16, 4, requires_grad=True)
    places = 2 * 16 if layout == torch.sparse_coo else 17 + 16
    work = count_work(lambda: (edges @ features).sum().backward())
    assert work.saved_bytes >= 4 * 16 + 8 * places


@given(
    st.tuples(*[st.integers(1, 9)] * 4),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_an_lstm_on_a_cpu_counts_its_weights_and_not_its_states(sizes, num_layers, both_ways, bias):
    batch, steps, inputs, hidden = sizes
    layer = nn.LSTM(inputs, hidden, num_layers, batch_first=True, bidirectional=both_ways, bias=bias)
    weights = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    work = count_work(step(layer, torch.randn(batch, steps, inputs)))
    assert work.operators["recurrent"].flops == 3 * 2 * batch * steps * weights


def test_packed_sequences_on_a_gpu_count_by_their_steps_and_gates_alone_not_at_all():
    packed, hidden = torch.empty(21, 40), torch.empty(1, 4, 24)
    weights = [torch.empty(96, 40), torch.empty(96, 24), torch.empty(96), torch.empty(96)]
    lengths = [4, 3, 3, 2, 2, 2, 2, 1, 1, 1]
    rest = (2, 24, 0, 1, False, 0.0, True, False, lengths, None)
    counter = KernelCounter()
    given = (packed, weights, 4, torch.empty(6336), hidden, hidden, *rest)
    counter.note(torch.ops.aten._cudnn_rnn.default, given, {}, torch.empty(21, 24))
    assert counter.kernels[-1].flops == 2 * 21 * 96 * (40 + 24)
    gates = (torch.empty(4, 96), torch.empty(4, 96), torch.empty(4, 24))
    counter.note(torch.ops.aten._thnn_fused_lstm_cell.default, gates, {}, torch.empty(4, 24))
    assert counter.kernels[-1].flops == 0


LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr]
PRODUCTS = {
    "mm": lambda sparse, dense: sparse @ dense,
    "sparse.mm": torch.sparse.mm,
    "addmm": lambda sparse, dense: torch.addmm(torch.ones(len(sparse), dense.shape[1]), sparse, dense),
    "mv": lambda sparse, dense: torch.stack([sparse @ column for column in dense.unbind(1)], 1),
    "linear": lambda sparse, dense: functional.linear(dense.t(), sparse),
}


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR) tensor support is in beta")
@pytest.mark.filterwarnings("ignore:.*autograd kernel was not registered:UserWarning")
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from([*PRODUCTS]),
    st.tuples(*[st.integers(1, 9)] * 3),
    st.integers(0, 81),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_sparse_matrix_counts_with_the_numbers_that_it_holds(layout, name, sizes, places, trained):
    rows, columns, width = sizes
    full = torch.zeros(rows, columns)
    full.view(-1)[:places] = 1.0
    sparse = full.to_sparse(layout=layout, blocksize=(1, 1) if layout == torch.sparse_bsr else None)
    trained &= layout != torch.sparse_bsr  # which have no gradient on a CPU
    dense = torch.ones(columns, width, requires_grad=trained)

    def run():
        found = PRODUCTS[name](sparse, dense)
        if trained:
            found.sum().backward()

    work = count_work(run)
    assert work.operators["matmul"].flops == (1 + trained) * 2 * int(full.sum()) * width
    assert item_bytes_of(work.kernels) == 4


def test_sparse_products_of_further_kinds_count_with_the_numbers_that_they_hold():
    sparse, dense = torch.eye(8).to_sparse_csr(), torch.ones(8, 3, requires_grad=True)
    summed = count_work(lambda: torch.sparse.mm(sparse, dense, "sum").sum().backward())
    assert summed.flops == 2 * 2 * 8 * 3
    sampled = count_work(lambda: torch.sparse.sampled_addmm(sparse, torch.ones(8, 3), torch.ones(3, 8)))
    assert sampled.flops == 2 * 8 * 3
    assert count_work(lambda: torch.eye(8).to_sparse() @ torch.eye(8).to_sparse()).flops == 2 * 8


@given(st.tuples(*[st.integers(1, 9)] * 4))
@settings(max_examples=40, deadline=None)
def test_products_of_several_axes_count_each_of_them(sizes):
    batch, one, other, outputs = sizes
    whole = 2 * math.prod(sizes)
    left = torch.ones(batch, one, requires_grad=True)
    right = torch.ones(batch, other, requires_grad=True)
    layer = nn.Bilinear(one, other, outputs)
    assert count_work(lambda: layer(left, right).sum().backward()).flops == (1 + 3) * whole
    several = torch.ones(batch, one, other), torch.ones(batch, other, outputs)
    total = torch.zeros(one, outputs)
    assert count_work(lambda: torch.addbmm(total, *several)).flops == whole
    assert count_work(lambda: torch.bmm(*(one.cfloat() for one in several))).flops == 4 * whole
    with torch.inference_mode():
        assert count_work(lambda: functional.linear(several[0], torch.ones(outputs, other))).flops == whole
        assert count_work(lambda: several[0] @ torch.ones(other, outputs)).flops == whole
        assert count_work(lambda: layer(left, right)).flops == whole


def test_products_in_groups_count_each_row_once():
    rows, layers = torch.randn(32, 16, requires_grad=True), torch.randn(4, 16, 24, requires_grad=True)
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)

    def run():
        grouped = functional.grouped_mm(rows.bfloat16(), layers.bfloat16(), offs=ends)
        grouped.float().square().sum().backward()

    assert count_work(run).flops == 3 * 2 * 32 * 16 * 24


def test_products_of_single_numbers_count_in_inference():
    with torch.inference_mode():
        assert count_work(lambda: torch.einsum(",->", torch.tensor(2.0), torch.tensor(3.0))).flops == 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("sizes", [(7, 7), (5, 9), (9, 5), (1, 1)])
def test_of_causal_attention_the_weights_count_that_are_not_zero(sizes, device):
    num_queries, num_keys = sizes
    query, key, value = (torch.empty(2, 3, n, 8, device=device) for n in (num_queries, num_keys, num_keys))
    seen = int(torch.ones(sizes).tril().sum())
    attended = functional.scaled_dot_product_attention
    for more in ({"is_causal": True}, {}):
        pairs = seen if more else num_queries * num_keys
        inputs = [one.requires_grad_() for one in (query, key, value)]
        work = count_work(lambda inputs=inputs, more=more: attended(*inputs, **more).sum().backward())
        assert work.operators["attention"].flops == int(3.5 * 2 * 2 * 2 * 3 * pairs * 8)


@pytest.mark.parametrize(
    ("technique", "layer", "half", "ours"),
    [
        ("winograd", nn.Conv2d(32, 64, 3, padding=1), False, 3),
        ("depthwise_gradients", nn.Conv2d(32, 32, 5, padding=4, dilation=2, groups=32), False, 2),
        ("depthwise_gradients", nn.Conv2d(32, 32, 5, stride=2, groups=32), True, 2),
    ],
)
def test_a_convolution_counts_the_same_by_whichever_kernels_it_runs(technique, layer, half, ours):
    model = nn.Sequential(nn.Conv2d(32, 32, 1), layer)
    images = torch.randn(4, 32, 24, 24)

    def loss(model, batch):
        with torch.autocast("cpu", enabled=half):
            return model(batch).float().square().mean()

    found = []
    for plan in (["channels_last"], ["channels_last", technique]):
        copied = copy.deepcopy(model)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.0)
        plan = Plan([find(name)() for name in plan])
        with attach(plan, model=copied, optimizer=optimizer, loss=loss) as session:
            work = count_work(lambda session=session: session.step(images))
        found.append(work)
    plain, planned = found
    assert planned.operators["convolution"].flops == plain.operators["convolution"].flops
    kinds = [{kind_of(k) for k in one.kernels if k.operator == "convolution"} for one in found]
    assert kinds[0] == kinds[1]
    own = [k for k in planned.kernels if k.name.startswith(technique.partition("_")[0])]
    assert len(own) == ours
