"""A person's own loop around `vivace.attach`: nothing is inherited and nothing is taken away."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import vivace
from vivace.errors import InputError
from vivace.plan import Plan
from vivace.testing.contract import process_flags

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 6
ACTING = {
    "host_allocator": {},
    "bf16_autocast": {},
    "bf16_weights": {},
    "fp16_autocast": {"initial_scale": 128.0},
    "micro_batches": {"num": 4},
    "channels_last": {},
    "fused_optimizer": {},
}
CLOSE = {"host_allocator": 0.0, "channels_last": 1e-5, "micro_batches": 1e-5, "fused_optimizer": 1e-5}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))


def loader():
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 1, 8, 8, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(STEPS)]


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def optimizer_of(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def by_hand(model, optimizer, batches, clipping=False):
    losses = []
    for batch in batches:
        value = loss(model, batch)
        value.backward()
        if clipping:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def attached(plan, model, optimizer, batches, **more):
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=loss, **more) as session:
        return [session.step(batch).item() for batch in session.batches(batches)]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("clipping", [False, True])
def test_an_empty_plan_trains_what_the_hand_trains_bit_for_bit(clipping):
    hand, mine = network(), network()
    wanted = by_hand(hand, optimizer_of(hand), loader(), clipping)
    seen = attached(Plan(), mine, optimizer_of(mine), loader(), on_gradients=clip if clipping else None)
    assert seen == wanted
    assert same(hand.state_dict(), mine.state_dict())


@pytest.mark.parametrize("name", ACTING)
def test_a_plan_acts_and_leaves_the_persons_objects(name):
    hand, mine = network(), network()
    wanted = by_hand(hand, optimizer_of(hand), loader())
    optimizer, flags = optimizer_of(mine), process_flags()
    groups = [sorted(group) for group in optimizer.param_groups]
    parameters = list(mine.parameters())
    forward = mine.forward
    seen = attached(Plan.from_dict({name: ACTING[name]}), mine, optimizer, loader())
    assert seen == pytest.approx(wanted, rel=CLOSE.get(name, 0.05))
    assert process_flags() == flags
    assert mine.state_dict().keys() == hand.state_dict().keys()
    assert {value.dtype for value in mine.state_dict().values()} == {torch.float32}
    assert all(one is other for one, other in zip(parameters, mine.parameters(), strict=True))
    assert mine.forward == forward
    assert not any(key in vars(mine) for key in ("forward", "_compiled_call_impl"))
    assert [sorted(group) for group in optimizer.param_groups] == groups
    assert all(parameter.grad is None for parameter in parameters)


@pytest.mark.parametrize("name", ACTING)
def test_the_loop_goes_on_by_hand_afterwards(name):
    """Half of the steps attached, half by hand; the optimizer's state also loads into a fresh one."""
    hand, mine = network(), network()
    wanted = by_hand(hand, optimizer_of(hand), loader())[STEPS // 2 :]
    optimizer, batches = optimizer_of(mine), loader()
    attached(Plan.from_dict({name: ACTING[name]}), mine, optimizer, batches[: STEPS // 2])
    twin = copy.deepcopy(mine)
    again = optimizer_of(twin)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    seen = by_hand(mine, optimizer, batches[STEPS // 2 :])
    assert seen == pytest.approx(wanted, rel=CLOSE.get(name, 0.05))
    assert by_hand(twin, again, batches[STEPS // 2 :]) == seen


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"tf32": {}}, r"^tf32: it acts on cuda, and this job runs on cpu$"),
        ({"cuda_graph_step": {}}, r"^cuda_graph_step: "),
        ({"ddp": {}}, r"^ddp: only one process runs"),
        ({"host_allocator": {}, "pinned_prefetch": {}}, r"^pinned_prefetch: "),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="they may act on a GPU")
def test_what_cannot_act_is_refused_by_name(plan, reason):
    model, flags = network(), process_flags()
    with pytest.raises(vivace.Refused, match=reason):
        attached(Plan.from_dict(plan), model, optimizer_of(model), loader())
    assert process_flags() == flags


def test_a_model_in_data_parallel_is_left_to_what_does_not_touch_its_calls():
    """Its copies on other GPUs would run with the functions, and so the weights, of the first."""
    model = nn.DataParallel(network())
    given = {"model": model, "optimizer": optimizer_of(model), "loss": loss}
    vivace.attach(Plan.from_dict({"bf16_autocast": {}}), **given).close()  # on one device
    model.device_ids = [0, 1]
    for name in ("bf16_autocast", "channels_last", "checkpoint", "compile"):
        with pytest.raises(vivace.Refused, match=f"^{name}: the model is wrapped in nn.DataParallel"):
            vivace.attach(Plan.from_dict({name: {}}), **given)
    for name in ("fused_optimizer", "micro_batches", "optimizer_in_backward"):
        settings = {"num": 2} if name == "micro_batches" else {}
        vivace.attach(Plan.from_dict({name: settings}), **given).close()


def test_a_model_without_convolutions_is_refused_by_name():
    model = nn.Linear(4, 2)
    with pytest.raises(vivace.Refused, match=r"^channels_last: the model has no 2-D convolution$"):
        vivace.attach(
            Plan.from_dict({"channels_last": {}}), model=model, optimizer=optimizer_of(model), loss=loss
        )


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"micro_batches": {"num": 16}}, r"^micro_batches: the batch has 8 samples, fewer than num = 16$"),
        (
            {"loader_workers": {"num_workers": 1}},
            r"^loader_workers: the data is a list, not a torch DataLoader$",
        ),
    ],
)
def test_a_refusal_at_the_first_batch_carries_the_name_too(plan, reason):
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(vivace.Refused, match=reason):
        attached(Plan.from_dict(plan), model, optimizer_of(model), loader())
    assert same(model.state_dict(), before)


def test_an_exception_in_the_loop_restores_everything():
    model, flags = network(), process_flags()
    optimizer = optimizer_of(model)
    plan = Plan.from_dict({"bf16_autocast": {}, "cpu_threads": {"num_threads": 2}, "fused_optimizer": {}})

    def stumble():
        with vivace.attach(plan, model=model, optimizer=optimizer, loss=loss) as session:
            session.step(loader()[0])
            assert process_flags() != flags
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        stumble()
    assert process_flags() == flags
    assert not optimizer.param_groups[0].get("fused")
    by_hand(model, optimizer, loader())


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1], reduction="none"),
            r"\(8,\)",
        ),
        (lambda model, batch: None, "the loss is NoneType"),
        (lambda model, batch: loss(model, batch).item(), "the loss is float"),
    ],
)
def test_a_loss_that_is_no_scalar_is_named(value, reason):
    model = network()
    with (
        vivace.attach(Plan(), model=model, optimizer=optimizer_of(model), loss=value) as session,
        pytest.raises(InputError, match=reason),
    ):
        session.step(loader()[0])


class Adversaries:
    """A generator and a critic with their own step, which counts what it did."""

    def __init__(self):
        torch.manual_seed(0)
        self.nets = [nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, size)) for size in (2, 1)]
        self.nets[1] = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 1))
        self.optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in self.nets]
        self.random = torch.Generator().manual_seed(2)

    def step(self, real):
        (generator, critic), (update_generator, update_critic) = self.nets, self.optimizers
        fake = generator(torch.randn(len(real), 4, generator=self.random))
        gap = critic(fake.detach()).mean() - critic(real).mean()
        update_critic.zero_grad()
        gap.backward()
        update_critic.step()
        update_generator.zero_grad()
        (-critic(fake).mean()).backward()
        update_generator.step()
        return gap.detach()

    def state(self):
        return {
            f"{i}.{key}": value for i, net in enumerate(self.nets) for key, value in net.state_dict().items()
        }


REAL = [torch.randn(8, 2, generator=torch.Generator().manual_seed(i)) for i in range(4)]


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, NeedsClosure])
def test_an_optimizer_that_computes_the_loss_itself_is_named_before_the_first_step(kind):
    model = network()
    with pytest.raises(
        vivace.JobError, match=f"^{kind.__name__} computes the loss itself.*step= of your own"
    ):
        vivace.attach(Plan(), model=model, optimizer=kind(model.parameters(), lr=0.1), loss=loss)


def test_an_own_step_is_the_same_bit_for_bit():
    hand, mine = Adversaries(), Adversaries()
    wanted = [hand.step(batch) for batch in REAL]
    with vivace.attach(Plan(), step=mine.step, models=mine.nets) as session:
        seen = [session.step(batch) for batch in session.batches(REAL)]
    assert seen == wanted
    assert same(hand.state(), mine.state())


@pytest.mark.parametrize("name", ["host_allocator", "bf16_autocast", "bf16_weights"])
def test_an_own_step_under_a_plan(name):
    hand, mine = Adversaries(), Adversaries()
    wanted = [hand.step(batch).item() for batch in REAL]
    flags, forwards = process_flags(), [net.forward for net in mine.nets]
    with vivace.attach(Plan.from_dict({name: {}}), step=mine.step, models=mine.nets) as session:
        seen = [session.step(batch).item() for batch in session.batches(REAL)]
    assert seen == pytest.approx(wanted, abs=0.01)
    assert process_flags() == flags
    assert [net.forward for net in mine.nets] == forwards
    assert mine.state().keys() == hand.state().keys()
    mine.step(REAL[0])


@pytest.mark.parametrize("name", ["fp16_autocast", "micro_batches", "fused_optimizer", "ddp"])
def test_what_would_cut_an_own_step_is_refused_by_name(name):
    pair = Adversaries()
    with pytest.raises(vivace.Refused, match=f"^{name}: your own step function"):
        vivace.attach(Plan.from_dict({name: {}}), step=pair.step, models=pair.nets)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"model": nn.Linear(1, 1)},
        {"step": print},
        {"step": print, "models": []},
        {"step": print, "models": [nn.Linear(1, 1)], "loss": loss},
        {"step": print, "models": [nn.Linear(1, 1)], "on_gradients": print},
    ],
)
def test_halves_of_both_forms_are_bad_input(given):
    with pytest.raises(InputError, match="attach"):
        vivace.attach(Plan(), **given)


def test_a_plan_may_be_a_path(tmp_path):
    path = tmp_path / "plan.toml"
    Plan.from_dict({"micro_batches": {"num": 4}}).save(path)
    for plan in (path, str(path), tmp_path):
        model = network()
        with vivace.attach(plan, model=model, optimizer=optimizer_of(model), loss=loss) as session:
            assert session.plan.names == ("micro_batches",)
    with pytest.raises(vivace.PlanError, match=r"there is no plan file 'absent\.toml'"):
        vivace.attach("absent.toml", model=model, optimizer=optimizer_of(model), loss=loss)


def test_a_step_that_failed_half_way_adds_nothing_to_the_next():
    """Who catches the error, as of full memory, goes on with the next batch."""
    calls = []

    def fails(model, batch):
        calls.append(len(batch[0]))
        if len(calls) == 2:  # the second piece of the first batch
            raise RuntimeError("no more memory")
        return loss(model, batch)

    mine, wanted, (first, second, *_) = network(), network(), loader()
    by_hand(wanted, torch.optim.SGD(wanted.parameters(), lr=0.1), [second])
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    plan = Plan.from_dict({"micro_batches": {"num": 2}})
    with vivace.attach(plan, model=mine, optimizer=optimizer, loss=fails) as session:
        with pytest.raises(RuntimeError, match="no more memory"):
            session.step(first)
        assert all(parameter.grad is None for parameter in mine.parameters())
        session.step(second)
    for name, weight in wanted.state_dict().items():
        assert torch.allclose(weight, mine.state_dict()[name], atol=1e-6)


def test_gradients_that_somebody_left_are_no_part_of_a_step():
    """Such as those of the loop before, or of a metric that differentiates."""
    mine, wanted, batches = network(), network(), loader()
    by_hand(wanted, optimizer_of(wanted), batches)
    optimizer = optimizer_of(mine)
    with vivace.attach(Plan(), model=mine, optimizer=optimizer, loss=loss) as session:
        for batch in batches:
            loss(mine, batches[-1]).backward()
            session.step(batch)
    assert same(wanted.state_dict(), mine.state_dict())


def test_what_fails_while_closing_leaves_nothing_else_open():
    session = vivace.attach(Plan(), model=network(), optimizer=optimizer_of(network()), loss=loss)
    closed = []
    session.build.on_close(lambda: closed.append("first"))
    session.build.on_close(lambda: 1 / 0)
    session.build.on_close(lambda: closed.append("last"))
    with pytest.raises(ZeroDivisionError):
        session.close()
    assert closed == ["last", "first"]


def test_a_closed_session_says_so_and_trains_nothing():
    mine, (first, second, *_) = network(), loader()
    plan = Plan.from_dict({"bf16_autocast": {}})
    with vivace.attach(plan, model=mine, optimizer=optimizer_of(mine), loss=loss) as session:
        session.step(first)
    session.close()  # once more does no harm
    before = copy.deepcopy(mine.state_dict())
    used = [lambda: session.step(second), lambda: session.plain_step(second)]
    used += [lambda: session.batches([second]), lambda: session.place(second)]
    for use in used:
        with pytest.raises(InputError, match=r"^this session is closed, .* attach again$"):
            use()
    assert same(mine.state_dict(), before)
