import copy

import pytest
import torch
from torch import nn

from vivace.errors import Refused
from vivace.inspection import inspect
from vivace.observing.observe import observe
from vivace.plan import Plan
from vivace.session.opening import attach, start
from vivace.technique import registry
from vivace.tensors.optimizers import align_state
from vivace.testing import TINY_JOBS, TechniqueContract

ChannelsLast = registry.find("channels_last")


@pytest.mark.usefixtures("one_thread")
class TestChannelsLast(TechniqueContract):
    technique = ChannelsLast


def test_weights_and_batches_are_reordered_and_weights_are_set_back():
    job = TINY_JOBS["cnn"]()
    with start(job, Plan([ChannelsLast()]), inspect()) as session:
        weight = session.model[0].weight
        inputs, labels = session.place(next(iter(job.data())))
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert inputs.is_contiguous(memory_format=torch.channels_last)
        assert labels.dim() == 1
    assert weight.is_contiguous()


@pytest.mark.parametrize(("channels", "pixels"), [(1, 8), (3, 8)])
def test_all_maps_and_their_gradients_lie_in_one_order(channels, pixels):
    """Also those of grey images, whose memory is in either order: a layer that gets both is slow."""
    images, labels = torch.randn(4, channels, pixels, pixels), torch.zeros(4, dtype=torch.int64)
    blocks = [
        nn.Sequential(nn.Conv2d(of, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for of in (channels, 8)
    ]
    model = nn.Sequential(*blocks, nn.Upsample(scale_factor=4), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    norms = [block[1] for block in blocks]
    found = []

    def note(module, arguments, result):
        found.append(result)
        result.register_hook(found.append)

    for norm in norms:
        norm.register_forward_hook(note)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = [p.stride() for p in model.parameters()]

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with attach(Plan([ChannelsLast()]), model=model, optimizer=optimizer, loss=loss) as session:
        session.step((images, labels))
    like = torch.empty(4, 8, pixels, pixels).to(memory_format=torch.channels_last)
    assert [map.stride() for map in found] == [like.stride()] * 4
    assert [p.stride() for p in model.parameters()] == before


def test_refuses_a_model_without_images():
    with pytest.raises(Refused, match="channels_last: the model has no 2-D convolution"):
        start(TINY_JOBS["lstm"](), Plan([ChannelsLast()]), inspect())


def test_fused_optimizer_states_follow_the_memory_order_of_the_weights():
    """A fused optimizer walks through memory: its states must lie as the weights do, afterwards too."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 4, 3, 8, 8, generator=generator)
    batches = list(zip(inputs, torch.randn(6, 4, 8, generator=generator), strict=True))

    def loss(model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]).mean((2, 3)), batch[1])

    def make():
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 8, 3)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    def by_hand(model, optimizer, batch):
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    hand, hand_optimizer = make()
    for batch in batches:
        by_hand(hand, hand_optimizer, batch)
    model, optimizer = make()
    for batch in batches[:2]:
        by_hand(model, optimizer, batch)
    plan = Plan([ChannelsLast()])
    with attach(plan, model=model, optimizer=optimizer, loss=loss) as session:
        for batch in batches[2:4]:
            session.step(batch)
    for batch in batches[4:]:
        by_hand(model, optimizer, batch)
    torch.testing.assert_close(model.weight, hand.weight, rtol=1e-5, atol=1e-6)


def test_states_of_one_by_one_kernels_stay_where_they_are():
    """Their memory order is the same either way, whatever their strides say."""
    weight = torch.nn.Parameter(torch.randn(8, 4, 1, 1))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.randn(8, 4, 1, 1).to(memory_format=torch.channels_last)
    optimizer.step()
    buffer = optimizer.state[weight]["momentum_buffer"] = torch.randn(8, 1, 1, 4).permute(0, 3, 1, 2)
    assert buffer.stride() != weight.stride()
    align_state([optimizer])
    assert optimizer.state[weight]["momentum_buffer"] is buffer


@pytest.mark.parametrize("channels", [1, 3])
def test_without_weights_nothing_that_a_script_holds_changes(channels):
    """Convolutions run in this order, with the results that they have in the other one."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, channels, 8, 8, generator=generator)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(channels, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3))
    expected = model(images).detach()
    seen = []
    handle = model[2].register_forward_hook(lambda module, arguments, result: seen.append(result))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(model, batch):
        model[0](batch[0])  # one picture alone
        return model(batch).square().mean()

    weights = [(p.data_ptr(), p.stride()) for p in model.parameters()]
    with attach(Plan([ChannelsLast(weights=False)]), model=model, optimizer=optimizer, loss=loss) as session:
        assert float(session.step(images)) == pytest.approx(float(expected.square().mean()), rel=1e-5)
        assert [(p.data_ptr(), p.stride()) for p in model.parameters()] == weights
        assert model[0](images).is_contiguous()  # parts that are called between steps are as they were
        assert all("forward" not in vars(module) for module in model)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert not seen[0].is_contiguous()
    assert all("forward" not in vars(module) for module in model)
    handle.remove()
    torch.testing.assert_close(model(images), expected)


def fused(clear):
    """A convolution, and a step of a person's own that trains it."""
    torch.manual_seed(0)
    model, images = torch.nn.Conv2d(3, 8, 3), torch.randn(4, 3, 6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    def step(_):
        clear(optimizer)
        loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


@pytest.mark.parametrize(
    "clear",
    [
        lambda optimizer: optimizer.zero_grad(),
        lambda optimizer: optimizer.zero_grad(set_to_none=False),  # gradients in the order that they had
        lambda optimizer: optimizer.load_state_dict(copy.deepcopy(PLAIN)) if PLAIN else None,
    ],
    ids=["states", "gradients", "loaded"],
)
def test_optimizers_that_nobody_has_named_follow_too(clear):
    """Those of an own step: they walk through memory as well."""
    weights = []
    for plan in (Plan(), Plan([ChannelsLast()])):
        model, optimizer, step = fused(clear)
        PLAIN.clear()
        for _ in range(2):
            step(None)
        PLAIN.update(copy.deepcopy(optimizer.state_dict()))
        with attach(plan, step=step, models=[model]) as session:
            for _ in range(2):
                session.step(None)
        PLAIN.clear()
        for _ in range(2):
            step(None)
        weights.append(model.weight.detach().clone())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)


PLAIN = {}  # the state of the optimizer before the session


def test_a_model_that_has_this_order_keeps_it():
    model = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    before = model.weight.stride()
    attach(Plan([ChannelsLast()]), step=lambda batch: None, models=[model]).close()
    assert model.weight.stride() == before


def test_a_weight_that_is_computed_is_not_computed_once_more():
    """Reading one that is normalised moves the estimate of its norm."""
    model = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Conv2d(3, 8, 3))
    before = copy.deepcopy(model.state_dict())
    with attach(Plan([ChannelsLast()]), step=lambda batch: None, models=[model]):
        assert model.parametrizations.weight.original.is_contiguous(memory_format=torch.channels_last)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.stride() == before[name].stride()


def trained_with(plan, model, batch, loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(Plan.from_dict(plan), model=model, optimizer=optimizer, loss=loss) as session:
        return float(session.step(batch))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("settings", [{}, {"weights": False}])
def test_batches_that_have_no_memory_order_stay_as_they_are(settings):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    images = torch.randn(2, 1, 5, 5).relu()
    nested = torch.nested.nested_tensor([images[0], images[1, :, :4]])

    def loss(model, batch):
        ragged = sum(model(image[None]).square().mean() for image in batch[1].unbind())
        return model(batch[0].to_dense()).square().mean() + ragged

    wanted = float(loss(model, (images, nested)).detach())
    found = trained_with({"channels_last": settings}, model, (images.to_sparse(), nested), loss)
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("shared", ["with another weight", "with processes"])
def test_weights_in_memory_that_others_hold_are_refused(shared):
    """In an order of its own a weight has other memory: what holds the old one would see no update."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Conv2d(3, 4, 3))
    if shared == "with processes":
        model.share_memory()
    else:
        whole = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(whole, model.parameters())  # each weight is a view of it
    before = model[1].weight.data_ptr()
    with pytest.raises(Refused, match=r"^channels_last: the weight '1.weight' .* set weights = false"):
        trained_with({"channels_last": {}}, model, None, lambda m, b: m(b))
    assert model[1].weight.data_ptr() == before
    trained_with(
        {"channels_last": {"weights": False}}, model[1], torch.randn(1, 3, 5, 5), lambda m, b: m(b).mean()
    )
    assert model[1].weight.data_ptr() == before


@pytest.mark.parametrize("beside", ["conv_gemm", "padded_stem"])
def test_without_weights_what_other_techniques_put_in_place_runs(beside):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten())
    images, wanted = torch.randn(2, 3, 8, 8), [copy.deepcopy(model) for _ in range(2)]
    plan = {"channels_last": {"weights": False}, beside: {}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def mean(model, batch):
        return model(batch).square().mean()

    with attach(Plan.from_dict(plan), model=model, optimizer=optimizer, loss=mean) as session:
        seen = observe(session, [images]).operators
    plain = trained_with({beside: {}}, wanted[0], images, mean)
    assert plain == pytest.approx(trained_with({}, wanted[1], images, mean), rel=1e-5)
    name = {"conv_gemm": "aten::addmm", "padded_stem": "aten::constant_pad_nd"}[beside]
    assert seen.get(name, 0) > 0


@pytest.mark.parametrize("beside", [{}, {"bf16_autocast": {}}])
@pytest.mark.parametrize("settings", [{}, {"weights": False}])
@pytest.mark.parametrize("wrap", [nn.Sequential, lambda *layers: layers[0]], ids=["model", "convolution"])
def test_what_the_models_of_an_own_step_return_can_be_viewed(wrap, settings, beside):
    torch.manual_seed(0)
    model = wrap(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).view(len(batch), -1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    images = torch.randn(4, 3, 8, 8)
    wanted = [float(step(images)) for _ in range(2)]
    plan = Plan.from_dict({"channels_last": settings, **beside})
    with attach(plan, step=step, models=[model]) as session:
        found = [float(session.step(images)) for _ in range(2)]
    assert found == pytest.approx(wanted, rel=1e-2)
    assert (found == pytest.approx(wanted, rel=1e-6)) != bool(beside)  # that acts as well
    assert "forward" not in vars(model)


def test_without_weights_a_loss_may_view_the_batch():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Flatten())

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch), batch.view(len(batch), -1))

    images = torch.randn(2, 3, 8, 8)
    wanted = float(loss(model, images).detach())
    assert trained_with({"channels_last": {"weights": False}}, model, images, loss) == pytest.approx(wanted)


@pytest.mark.parametrize("settings", [{}, {"weights": False}])
def test_a_convolution_may_call_its_input_by_another_name(settings):
    class Named(nn.Conv2d):
        def forward(self, image):
            return super().forward(image)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Named(3, 4, 3)

        def forward(self, x):
            return self.inner(image=x).mean()

    trained_with({"channels_last": settings}, Model(), torch.randn(2, 3, 5, 5), lambda m, b: m(b))


def test_a_model_of_complex_convolutions_is_refused():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, dtype=torch.complex64))
    with pytest.raises(Refused, match="convolutions are of complex numbers"):
        trained_with({"channels_last": {}}, model, None, lambda m, b: m(b))
