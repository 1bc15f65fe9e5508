"""What a rehearsal takes of a job's schedules and of what its optimizers keep."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch

from vivace.verifying import schedules
from vivace.verifying.rehearsal import DictatedLoss
from vivace.verifying.schedules import Schedule, WholeSchedule, first_other
from vivace.verifying.states import averages_of


def test_a_job_may_leave_an_optimizer_without_a_schedule():
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    for built in (None, [None, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]):
        job = SimpleNamespace(scheduler=lambda _, built=built: built)
        Schedule(job, SimpleNamespace(optimizer=optimizer)).step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_two_schedules_are_the_same_whatever_their_groups_and_last_bits():
    """What has fallen to nothing beside what it was may be any nothing."""
    mine = WholeSchedule([{"lr": 1.0}], [(3, 0, "lr", 0.5), (9, 0, "lr", 1e-17)], {"w": 0, "b": 0}, 10)
    apart = [(3, 0, "lr", 0.5), (3, 1, "lr", 0.5), (9, 0, "lr", 0.0), (9, 1, "lr", 0.0)]
    theirs = WholeSchedule([{"lr": 1.0}, {"lr": 1.0}], apart, {"w": 1, "b": 0}, 10)
    assert first_other(mine, theirs, "the original") == ("", 0)
    theirs.changes[1] = (4, 1, "lr", 0.5)
    text = "after 3 steps of its schedule lr is 0.5, and 1 in the original"
    assert first_other(mine, theirs, "the original") == (text, 3)
    theirs.begin[0]["lr"] = 2.0
    assert first_other(mine, theirs, "the original")[1] == 0


def test_a_schedule_that_waits_for_a_plateau_is_compared_by_when_it_acts():
    def whole(**settings):
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        make = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, **settings)
        job = SimpleNamespace(scheduler=make, scheduler_every="epoch", epochs=3)
        build = SimpleNamespace(models=[])
        session = SimpleNamespace(optimizer=optimizer, optimizers=[optimizer], build=build)
        with patch.object(
            schedules, "parameter_names", lambda _: {id(p): str(i) for i, p in enumerate(weights(optimizer))}
        ):
            return schedules.whole_schedule(job, session, 5, 10.0)

    def weights(optimizer):
        return optimizer.param_groups[0]["params"]

    assert first_other(whole(mode="max"), whole(mode="max"), "the original") == ("", 0)
    for settings in ({"mode": "min"}, {"threshold": 0.5}, {"patience": 3}, {"cooldown": 1}, {"min_lr": 0.01}):
        text, _ = first_other(whole(**{"mode": "max", **settings}), whole(mode="max"), "the original")
        assert "of ReduceLROnPlateau is" in text, settings


def test_counts_that_an_optimizer_keeps_of_each_number_are_no_averages():
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.weight.detach()
    optimizer.state[model.weight] = {"average": weight, "visits": torch.ones_like(weight, dtype=torch.int64)}
    session = SimpleNamespace(build=SimpleNamespace(models=[model]), optimizers=[optimizer])
    assert list(averages_of(session)) == ["average of weight"]


def test_gaps_and_masks_in_a_batch_leave_the_dictated_loss_finite():
    model = torch.nn.Linear(2, 1, bias=False)
    loss = DictatedLoss({"weight": torch.ones(1, 2)}, torch.device("cpu"))
    batch = torch.tensor([[1.0, torch.nan], [-torch.inf, 2.0]])
    found = [loss(model, one).item() for one in (batch, batch.nan_to_num(0.0, 0.0, 0.0), batch.flip(0, 1))]
    assert 0.5 <= found[0] == found[1] != found[2]
    waves = torch.tensor([[1.0 + 1.0j]]), torch.tensor([[1.0 - 1.0j]])
    assert loss(model, waves[0]).item() != loss(model, waves[1]).item()
