from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

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
