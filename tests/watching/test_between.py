"""What a session holds between two steps: what a plan changes there is found, what a job changes is not."""

import json

import pytest
import torch
from torch import nn

import vivace
from vivace import Seam
from vivace.errors import PromiseBroken
from vivace.session.opening import start
from vivace.testing.jobs import TINY_JOBS
from vivace.watching.between import Rest, changed, digests, sums_of

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = vivace.Plan.from_dict({"bf16_autocast": {}})


def momentum_ends_with_an_epoch(build, count):
    """After an epoch's last batch."""

    def batches(following, loader):
        yield from following(loader)
        for state in build.optimizer.state.values():
            state.clear()

    build.wrap(Seam.BATCHES, batches)


def momentum_is_small_in_a_new_epoch(build, count):
    """Before an epoch's first batch."""

    def batches(following, loader):
        for state in build.optimizer.state.values():
            state["momentum_buffer"].mul_(0.5)
        return following(loader)

    build.wrap(Seam.BATCHES, batches)


def evaluation_moves_a_buffer(build, count):
    def validation(following, loader):
        yield from following(loader)
        build.model[1].running_mean.zero_()

    build.wrap(Seam.VALIDATION, validation)


def evaluation_moves_a_weight(build, count):
    def validation(following, loader):
        with torch.no_grad():
            build.model[0].weight[0, 0] *= 1.001
        return following(loader)

    build.wrap(Seam.VALIDATION, validation)


def loading_loses_momentum(build, count):
    hook = build.optimizer.register_load_state_dict_post_hook(lambda optimizer: optimizer.state.clear())
    build.on_close(hook.remove)


def data_again_lose_momentum(build, count):
    """In a process whose first step is not the run's first."""

    def batches(following, loader):
        if count.steps and not taken:
            for state in build.optimizer.state.values():
                state.clear()
        taken.append(True)
        return following(loader)

    taken = []
    build.wrap(Seam.BATCHES, batches)


BETWEEN = [
    (momentum_ends_with_an_epoch, "the momentum_buffer of 0.weight in the optimizer is gone"),
    (momentum_is_small_in_a_new_epoch, "the momentum_buffer of 0.weight in the optimizer is not what it was"),
    (evaluation_moves_a_buffer, "the buffer 1.running_mean is not what it was"),
    (evaluation_moves_a_weight, "the weight 0.weight is not what it was"),
]


@pytest.mark.parametrize(("defect", "sentence"), BETWEEN)
def test_what_a_plan_changes_between_steps_stops_the_run(
    plant, watched, dropping, lines, digest, tmp_path, defect, sentence
):
    job, plan = dropping(epochs=5), plant(defect)
    with pytest.raises(PromiseBroken) as stopped:
        watched(job, plan)
    assert f"what step 4 left was changed before the next: {sentence}" in str(stopped.value)
    assert "the last watched step that trained the same model is 4" in str(stopped.value)
    assert "step_4 in" in str(stopped.value)
    assert lines(tmp_path / "run")[-1]["watch_kept"] is False
    vivace.train(job, out=tmp_path / "wanted", max_steps=4)
    states = [tmp_path / name / "checkpoints" / "step_4" for name in ("run", "wanted")]
    assert digest(states[0] / "model.pt") == digest(states[1] / "model.pt")
    mine, theirs = (torch.load(path / "state.pt", weights_only=True)["optimizer"]["state"] for path in states)
    assert torch.equal(mine[0]["momentum_buffer"], theirs[0]["momentum_buffer"])


@pytest.mark.parametrize(("defect", "sentence"), BETWEEN)
def test_fallback_goes_on_from_what_the_step_left(
    plant, watched, dropping, digest, tmp_path, defect, sentence
):
    job = dropping(epochs=3)
    vivace.train(job, out=tmp_path / "wanted")
    run = watched(job, plant(defect), on_broken="fallback")
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "wanted" / "model.pt")
    assert run.watched["broken_steps"] == [4]
    assert sentence in run.notices[-1]


def test_who_asks_for_it_goes_on_with_what_was_changed(plant, watched, dropping, digest, tmp_path):
    job, plan = dropping(epochs=3), plant(momentum_ends_with_an_epoch)
    run = watched(job, plan, on_broken="ignore")
    vivace.train(job, plan, out=tmp_path / "unwatched", watch=0)
    assert run.watched["broken_steps"] == [4, 8, 12]
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "unwatched" / "model.pt")


def test_the_last_evaluation_is_looked_at_too(plant, watched, dropping):
    with pytest.raises(PromiseBroken, match=r"what step 3 left .* buffer 1.running_mean"):
        watched(dropping(epochs=1), plant(evaluation_moves_a_buffer), max_steps=3)


@pytest.mark.parametrize(
    ("defect", "sentence"),
    [
        (loading_loses_momentum, "the resumed run does not begin with what step 6 left: the momentum_buffer"),
        (data_again_lose_momentum, "what step 6 left was changed before the next: the momentum_buffer"),
    ],
)
def test_what_a_resumed_run_loses(plant, watched, dropping, digest, tmp_path, defect, sentence):
    job, plan = dropping(epochs=4), plant(defect)
    vivace.train(job, out=tmp_path / "wanted")
    assert watched(job, plan, max_steps=6).watched["kept"]
    before = digest(tmp_path / "run" / "checkpoints" / "step_6" / "state.pt", "optimizer")
    with pytest.raises(PromiseBroken) as stopped:
        watched(job, plan, resume=True)
    assert sentence in str(stopped.value)
    assert digest(tmp_path / "run" / "checkpoints" / "step_6" / "state.pt", "optimizer") == before
    run = watched(job, plan, resume=True, on_broken="fallback")
    assert digest(tmp_path / "run" / "model.pt") == digest(tmp_path / "wanted" / "model.pt")
    assert run.watched["kept"] is False


def test_a_checkpoint_without_digests_is_taken_up(plant, watched, dropping, tmp_path):
    """As earlier versions and unwatched runs leave them."""
    watched(dropping(epochs=4), PLAN, watch=0, max_steps=6)
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step_6" / "MANIFEST.json").read_text())
    assert manifest["held"] == {}
    run = watched(dropping(epochs=4), PLAN, resume=True)
    assert run.watched["kept"] is True


class Restarting:
    """A schedule of the person's own that forgets momentum."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.state.clear()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def recalibrated(model, batches):
    """A metric that lets BatchNorm see the data again."""
    model.train()
    return -sum(float(nn.functional.cross_entropy(model(x), y)) for x, y in batches)


SCHEDULES = torch.optim.lr_scheduler
HEALTHY = {
    "each epoch": {"scheduler": lambda optimizer: SCHEDULES.StepLR(optimizer, 1, 0.5)},
    "each step": {
        "scheduler": lambda optimizer: SCHEDULES.OneCycleLR(optimizer, 0.1, total_steps=20),
        "scheduler_every": "step",
    },
    "at a plateau": {"scheduler": lambda optimizer: SCHEDULES.ReduceLROnPlateau(optimizer, "max")},
    "own, each epoch": {"scheduler": Restarting},
    "own, each step": {"scheduler": Restarting, "scheduler_every": "step"},
    "no metric": {"metric": None},
    "a metric that trains": {"metric": recalibrated},
    "adam": {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)},
    "clipped": {"on_gradients": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5)},
}


@pytest.mark.parametrize("case", HEALTHY)
def test_no_false_alarm(watched, dropping, case):
    job = dropping(epochs=4, **HEALTHY[case])
    first = watched(job, PLAN, max_steps=9)
    run = watched(job, PLAN, resume=True)
    for one in (first, run):
        assert one.watched["kept"] is True, one.watched["sentence"]
        assert one.watched["not_watched"] == ""
        assert one.watched["between_steps"] >= 7


def test_an_average_of_the_weights_is_no_alarm(plant, watched, dropping):
    """It is kept up inside of the step, and an evaluation only reads it."""

    def averaging(build, count):
        averages = {}

        def update(following):
            following()
            for name, weight in build.model.named_parameters():
                averages.setdefault(name, weight.detach().clone()).lerp_(weight.detach(), 0.1)

        build.wrap(Seam.UPDATE, update)

    run = watched(dropping(epochs=4), plant(averaging))
    assert run.watched["kept"] is True, run.watched["sentence"]


@pytest.fixture
def session():
    with start(TINY_JOBS["cnn"](), vivace.Plan(), vivace.inspect(), seed=0) as opened:
        yield opened


def test_one_bit_changes_a_digest(session):
    before = digests(session)
    assert changed(before, digests(session)) == []
    for name, parameter in session.build.model.named_parameters():
        bits = parameter.detach().view(torch.int32)
        place = tuple(size // 2 for size in bits.shape)
        bits[place] ^= 1
        assert changed(before, digests(session)) == [f"weight {name}"]
        bits[place] ^= 1
    assert changed(before, digests(session)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (7, 5), (300, 200)])
def test_numbers_of_any_kind_and_size_have_a_digest(session, dtype, shape):
    model = session.build.model
    values = torch.arange(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].reshape(shape) % 2
    model.register_buffer("more", values.to(dtype))
    before = digests(session)
    assert changed(before, digests(session)) == []
    if values.numel():
        model.more.view(-1)[-1] = 1 - int(model.more.view(-1)[-1])
        assert changed(before, digests(session)) == ["buffer more"]
    if values.dim() == 2:
        model.more.view(-1)[-1] = 1 - int(model.more.view(-1)[-1])
        model.more[[0, 1]] = model.more[[1, 0]]
        assert (changed(before, digests(session)) == []) is bool((values[0] == values[1]).all())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sums_of_a_sparse_tensor_take_no_more_than_it_stores(layout):
    """Made dense, this one would be larger than any memory."""
    size = 2**20
    places = torch.stack([torch.arange(3), torch.tensor([5, 1, 7])])
    of = torch.sparse_coo_tensor(places, torch.ones(3), (size, size), check_invariants=True)
    other = torch.sparse_coo_tensor(places.flip(1), torch.ones(3), (size, size), check_invariants=True)
    moved = torch.sparse_coo_tensor(places + 1, torch.ones(3), (size, size), check_invariants=True)
    sums = [sums_of(tensor.to_sparse(layout=layout)).tolist() for tensor in (of, other, moved, 2 * of)]
    assert sums[0] == sums[1], "the order of the places is no change"
    assert len(set(map(tuple, sums))) == 3


def test_the_order_in_memory_is_no_change(session):
    before = digests(session)
    session.build.model.to(memory_format=torch.channels_last)
    assert changed(before, digests(session)) == []


def test_all_is_put_back(session, dropping):
    batch = next(iter(TINY_JOBS["cnn"]().data()))
    session.step(batch)
    rest, before = Rest(session, 1), digests(session)
    session.step(batch)
    for state in list(session.optimizer.state.values())[:2]:
        state.clear()
    assert changed(before, digests(session))
    rest.put_back()
    assert changed(before, digests(session)) == []
