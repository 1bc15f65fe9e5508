from __future__ import annotations

import pytest
import torch

import vivace
from vivace.ledger import Observation
from vivace.techniques.micro_batches import MicroBatches


@pytest.mark.parametrize("num", [2, 3, 8])
def test_it_trains_the_same_model_up_to_rounding(tiny, num):
    of_losses, of_weights = tiny("text").errors({"micro_batches": {"num": num}})
    assert of_losses < 1e-5
    assert of_weights < 1e-4


def test_a_first_batch_that_is_too_small_is_refused_and_a_last_one_is_not(tiny):
    job = tiny("mlp")
    small = tuple(tensor[:3] for tensor in job.batches[0])
    with job.open({"micro_batches": {"num": 4}}) as session, pytest.raises(vivace.Refused, match="3 samples"):
        session.step(small)
    with job.open({"micro_batches": {"num": 4}}) as session, job.open({}) as reference:
        for batch in (job.batches[0], small):
            assert float(session.step(batch)) == pytest.approx(float(reference.step(batch)), rel=1e-5)


def test_batch_norm_raises_the_promise(tiny):
    assert tiny("cnn").open({"micro_batches": {}}).promise is vivace.Numerics.SEMANTICS
    assert tiny("mlp").open({"micro_batches": {}}).promise is vivace.Numerics.ROUNDING


@pytest.mark.parametrize(("tracked", "promise"), [(True, "SEMANTICS"), (False, "ROUNDING")])
def test_means_that_move_once_a_piece_raise_the_promise(tracked, promise):
    model = torch.nn.Sequential(
        torch.nn.Conv1d(1, 2, 1), torch.nn.InstanceNorm1d(2, track_running_stats=tracked)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict({"micro_batches": {}})
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, b: m(b).mean()) as session:
        assert session.promise == vivace.Numerics[promise]


class Keeping(torch.nn.Module):
    """Moves a buffer or a count each time, by what its kind says."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = torch.nn.Linear(2, 1), kind
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("table", None)
        if kind == "by a kernel":
            self.register_buffer("mean", torch.zeros(1))
            self.register_buffer("variance", torch.ones(1))
        self.calls, self.latest = 0, 0.0

    def forward(self, x):
        if self.kind == "in place":
            self.steps += 1
        elif self.kind == "anew":
            self.steps = self.steps + 1
        elif self.kind == "once" and self.table is None:
            self.table = torch.ones(2)
        elif self.kind == "by a kernel":  # which does not raise the buffer's version
            torch.nn.functional.batch_norm(x[:, :1], self.mean, self.variance, training=True)
        elif self.kind == "a count":  # by which a temperature falls
            self.calls += 1
        self.latest = float(x.mean()) + self.latest
        return self.linear(x)


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        ("in place", "SEMANTICS"),
        ("anew", "SEMANTICS"),
        ("by a kernel", "SEMANTICS"),
        ("a count", "SEMANTICS"),
        ("once", "ROUNDING"),
        ("never", "ROUNDING"),
    ],
)
def test_buffers_and_counts_that_the_model_moves_raise_the_promise(kind, promise):
    model = Keeping(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict({"micro_batches": {"num": 2}, "optimizer_in_backward": {}})
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, b: m(b).mean()) as session:
        session.step(torch.ones(4, 2))
        assert session.promise == vivace.Numerics[promise]
        moved = {"by a kernel": "mean", "a count": "calls"}.get(kind, "steps")
        told = [f"micro_batches: the model moves '{moved}' once a piece, not once a batch"]
        assert session.build.declared == told * (promise == "SEMANTICS")


def test_spectral_norm_moves_its_vectors_once_a_piece():
    model = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict({"micro_batches": {}})
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, b: m(b).mean()) as session:
        session.step(torch.ones(4, 4))
        assert session.promise == vivace.Numerics.SEMANTICS


def test_all_pieces_but_the_last_accumulate(tiny):
    job = tiny("mlp")
    entered = []
    session = job.open({"micro_batches": {"num": 4}})
    session.build.seams.accumulating = lambda: entered.append(1) or torch.no_grad().__class__()
    with pytest.raises(RuntimeError, match="does not require grad"):
        session.step(job.batches[0])
    assert entered == [1]


def test_confirmation_names_pieces_and_memory():
    seen = Observation({}, {}, 2**20, 0.0, facts={"pieces": 2})
    assert MicroBatches().confirm(seen, Observation({}, {}, 3 * 2**20, 0.0)) == (
        "2 pieces, peak memory 2.00 MiB lower"
    )
    with pytest.raises(vivace.Refused, match="changed nothing"):
        MicroBatches().confirm(Observation({}, {}, 0, 0.0), seen)


def test_texts_are_cut_with_their_tensors():
    """Else the second half of the samples would meet the texts of the first."""
    seen = []

    def loss(model, batch):
        seen.append((batch[0][:, 0].tolist(), batch[1]))
        return model(batch[0]).mean()

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict({"micro_batches": {"num": 2}})
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=loss) as session:
        session.step((torch.arange(4.0)[:, None], ["0", "1", "2", "3"]))
    assert seen == [([0.0, 1.0], ["0", "1"]), ([2.0, 3.0], ["2", "3"])]


def test_a_loss_that_fails_on_pieces_alone_is_no_fault_of_its_own_line():
    """Weights of as many classes as there are samples are cut with them."""
    model = torch.nn.Linear(4, 8)
    batch = {"x": torch.randn(8, 4), "y": torch.arange(8), "weights": torch.rand(8)}

    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], weight=batch["weights"])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict({"micro_batches": {}})
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=loss) as session:
        with pytest.raises(
            vivace.Refused, match=r"^micro_batches: the loss fails on a piece of a batch, and"
        ):
            session.step(batch)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # the whole fails as well
            session.step({**batch, "x": torch.randn(8, 5)})


@pytest.mark.parametrize("later", [False, True])
def test_hooks_that_look_at_gradients_once_a_piece_raise_the_promise(later):
    """As those that clip each weight's gradient."""
    model = torch.nn.Linear(2, 1)
    if later:
        model.bias.register_post_accumulate_grad_hook(lambda weight: weight.grad.clamp_(-0.1, 0.1))
    else:
        model.bias.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = vivace.Plan.from_dict({"micro_batches": {"num": 2}, "optimizer_in_backward": {}})
    with vivace.attach(plan, model=model, optimizer=optimizer, loss=lambda m, b: m(b).mean()) as session:
        assert session.promise == vivace.Numerics.SEMANTICS
        assert session.build.declared == [
            "micro_batches: a hook looks at the gradient of 'bias' once a piece"
        ]
