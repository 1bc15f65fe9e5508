import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import vivace
from vivace.inspection import inspect
from vivace.observing.observe import observe
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.technique import registry
from vivace.testing import TINY_JOBS, TechniqueContract
from vivace.training.training import train

LargerBatch = registry.find("larger_batch")
LossOf = torch.nn.functional.cross_entropy


@pytest.mark.usefixtures("one_thread")
class TestLargerBatch(TechniqueContract):
    technique = LargerBatch


def job(optimizer=torch.optim.SGD, batch=4, count=18, **fields):
    """Eighteen samples: five batches of four, the last one of two."""
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(count, 6), torch.randint(5, (count,)))
    return vivace.Job(
        model=lambda: torch.nn.Linear(6, 5),
        data=lambda: DataLoader(samples, batch_size=batch),
        loss=lambda model, batch: LossOf(model(batch[0]), batch[1]),
        optimizer=lambda model: optimizer(model.parameters(), lr=0.1),
        epochs=2,
        **fields,
    )


def weights_after(folder, job, *settings, **options):
    train(job, Plan(list(settings)), out=folder, seed=3, **options)
    return torch.load(folder / "model.pt", weights_only=True)["weight"]


@pytest.mark.parametrize(
    ("optimizer", "scale"), [(torch.optim.SGD, 3.0), (torch.optim.AdamW, math.sqrt(3.0))]
)
def test_it_is_the_job_with_that_batch_and_rate(tmp_path, optimizer, scale):
    def scaled(parameters, lr):
        return optimizer(parameters, lr=scale * lr)

    joined = weights_after(tmp_path / "joined", job(optimizer, count=24), LargerBatch(factor=3))
    direct = weights_after(tmp_path / "direct", job(scaled, batch=12, count=24))
    assert torch.allclose(joined, direct, rtol=1e-5)


def test_an_interrupted_run_goes_on_with_the_batch_that_is_next(tmp_path):
    whole = weights_after(tmp_path / "whole", job(), LargerBatch())
    for steps in (1, 2, 4):
        weights_after(tmp_path / "parts", job(), LargerBatch(), max_steps=steps, resume=True)
    assert torch.equal(weights_after(tmp_path / "parts", job(), LargerBatch(), resume=True), whole)


def test_a_schedule_in_steps_ends_on_the_same_sample(tmp_path):
    counted = []

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: counted.append(n) or 1.0)

    uneven = job(scheduler=scheduler, scheduler_every="step")  # an epoch of five batches: two, two and one
    weights_after(tmp_path / "run", uneven, LargerBatch())
    assert max(counted) == 10


def test_where_an_epoch_has_one_batch_nothing_is_joined():
    with start(job(batch=18), Plan([LargerBatch()]), inspect()) as session:
        seen = observe(session, list(session.batches(job(batch=18).data())))
    with pytest.raises(vivace.Refused, match="changed nothing"):
        LargerBatch().confirm(seen, seen)


def test_an_update_during_backward_uses_the_scaled_rate(tmp_path):
    during = registry.find("optimizer_in_backward")()
    together = weights_after(tmp_path / "together", job(), LargerBatch(), during)
    alone = weights_after(tmp_path / "alone", job(), LargerBatch())
    assert torch.allclose(together, alone, rtol=1e-6)


def test_the_rate_is_the_persons_between_steps():
    with start(job(), Plan([LargerBatch(learning_rate="linear")]), inspect()) as session:
        for batch in session.batches(job().data()):
            session.step(batch)
            assert session.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(("rule", "scales"), [("linear", [2.0, 2.0, 1.0]), ("root", [2**0.5, 2**0.5, 1.0])])
def test_the_last_shorter_step_is_taken_at_the_rate_of_its_own_batches(rule, scales):
    """Of five batches, two in a step, the last one is alone, with two samples."""
    rates = []

    class Noting(torch.optim.SGD):
        def step(self):
            rates.append(self.param_groups[0]["lr"])
            super().step()

    with start(job(Noting), Plan([LargerBatch(learning_rate=rule)]), inspect()) as session:
        for batch in session.batches(job().data()):
            session.step(batch)
    assert rates == pytest.approx([0.1 * scale for scale in scales])


def test_the_rule_is_that_of_the_optimizers_class():
    class Lamb(torch.optim.Adam): ...

    class Lion(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        def step(self): ...

    with start(job(Lamb), Plan([LargerBatch()]), inspect()) as session:
        assert session.build.notes["learning_rate_rule"] == "root"
    with pytest.raises(
        vivace.Refused, match="no rule is known for Lion: set learning_rate = 'linear', 'root'"
    ):
        start(job(Lion), Plan([LargerBatch()]), inspect())
    start(job(Lion), Plan([LargerBatch(learning_rate="linear")]), inspect()).close()


def test_batches_that_cannot_be_joined_are_refused():
    with start(job(), Plan([LargerBatch()]), inspect()) as session:
        ragged = [(torch.randn(4, 6), torch.zeros(4)), (torch.randn(4, 7), torch.zeros(4))]
        with pytest.raises(vivace.Refused, match="different shapes"):
            list(session.batches(ragged))


@pytest.mark.parametrize("beside", [0.5, torch.tensor(0.5), torch.tensor([0.5]), "task"])
def test_what_a_batch_holds_for_all_of_its_samples_is_no_other_ones(beside):
    """Such as the weight by which its pictures are mixed: the first batch's would count for the others."""

    def batch(value):
        return {"x": torch.randn(4, 6), "ids": ["a", "b", "c", str(value)], "beside": value}

    with start(job(), Plan([LargerBatch()]), inspect()) as session:
        (joined,) = session.batches([batch(beside), batch(beside)])
        assert (len(joined["x"]), len(joined["ids"])) == (8, 8)
        with pytest.raises(vivace.Refused, match=r"^larger_batch: batches with other numbers or texts"):
            list(session.batches([batch(beside), batch(beside + beside)]))


def test_an_own_step_is_refused():
    with pytest.raises(vivace.Refused, match="own step"):
        start(TINY_JOBS["gan"](), Plan([LargerBatch()]), inspect())


def test_its_promise_is_another_training_run():
    with start(job(), Plan([LargerBatch()]), inspect()) as session:
        assert session.promise is vivace.Numerics.SEMANTICS


def test_an_optimizer_without_a_rate_keeps_its_own():
    """Such as Adafactor's relative steps."""
    model = torch.nn.Linear(6, 5)

    class Relative(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                group["lr"] = 0.1
            super().step()
            for group in self.param_groups:
                group["lr"] = None

    optimizer = Relative(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    arguments = {"model": model, "optimizer": optimizer, "loss": lambda m, b: m(b).mean()}
    with pytest.raises(
        vivace.Refused, match="has no learning rate to scale: set learning_rate = 'unchanged'"
    ):
        vivace.attach(Plan([LargerBatch()]), **arguments)
    with vivace.attach(Plan([LargerBatch(learning_rate="unchanged")]), **arguments) as session:
        session.step(torch.ones(2, 6))
