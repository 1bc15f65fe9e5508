"""What goes wrong at an evaluation, an epoch's end, another shape, late in the data, or after a resume."""

import copy
import dataclasses
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import vivace
from vivace import Numerics, Seam, Stage
from vivace.plan import Plan
from vivace.session.opening import start
from vivace.tensors.trees import batch_size
from vivace.testing import jobs
from vivace.verifying import feeding, life
from vivace.verifying.digests import compared, read, read_epochs
from vivace.verifying.feeding import Loaders, Reach, fed_otherwise
from vivace.verifying.ruler import Ruler

MACHINE = vivace.inspect().to_dict()
SAMPLES, BATCH = 72, 16  # the last batch has 8


def pictures(samples=SAMPLES, shuffle=True):
    numbers = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 3, 8, 8, generator=numbers)
    labels = torch.randint(4, (samples,), generator=numbers)
    return DataLoader(TensorDataset(inputs, labels), batch_size=BATCH, shuffle=shuffle)


def accuracy(model, batches):
    hits = [(model(inputs).argmax(1) == labels).float() for inputs, labels in batches]
    return torch.cat(hits).mean().item()


def job(samples=SAMPLES):
    return dataclasses.replace(
        jobs.cnn(),
        data=lambda: pictures(samples),
        validation=lambda: pictures(40, shuffle=False),
        metric=accuracy,
        epochs=3,
    )


def stream(batches):
    """As many batches without an index, or without an end (None)."""
    numbers = torch.Generator().manual_seed(1)
    for _ in itertools.count() if batches is None else range(batches):
        yield (
            torch.randn(BATCH, 3, 8, 8, generator=numbers),
            torch.randint(4, (BATCH,), generator=numbers),
        )


def streaming(batches):
    return dataclasses.replace(job(), data=lambda: stream(batches))


def of_norm(build):
    return [m for m in build.model.modules() if isinstance(m, nn.BatchNorm2d)]


def norm_frozen_after_an_evaluation(build):
    def validation(following, loader):
        for norm in of_norm(build):
            norm.momentum = 0.0
        return iter(following(loader))

    build.wrap(Seam.VALIDATION, validation)


def evaluated_from_a_stale_copy(build):
    plain, held = type(build.model).forward, []

    def forward(inputs):
        if build.model.training:
            return plain(build.model, inputs)
        if not held:
            held.append(copy.deepcopy([*build.model]))
        for module in held[0]:
            inputs = module.eval()(inputs)
        return inputs

    build.model.forward = forward
    build.on_close(lambda: build.model.__dict__.pop("forward"))


def momentum_reset_each_epoch(build):
    def batches(following, loader):
        build.optimizer.state.clear()
        yield from following(loader)

    build.wrap(Seam.BATCHES, batches)


def momentum_reset_behind_each_epoch(build):
    def batches(following, loader):
        yield from following(loader)
        build.optimizer.state.clear()

    build.wrap(Seam.BATCHES, batches)


def momentum_reset_behind_each_evaluation(build):
    def validation(following, loader):
        yield from following(loader)
        build.optimizer.state.clear()

    build.wrap(Seam.VALIDATION, validation)


def padded_to_a_static_shape(build):
    plain = type(build.model).forward

    def forward(inputs):
        missing = max(0, BATCH - len(inputs))
        padded = functional.pad(inputs, (0, 0) * 3 + (0, missing))
        return plain(build.model, padded)[: len(inputs)]

    build.model.forward = forward
    build.on_close(lambda: build.model.__dict__.pop("forward"))


def small_batches_in_evaluation_mode(build):
    def forward(following, batch):
        if batch_size(batch) == BATCH:
            return following(batch)
        for norm in of_norm(build):
            norm.training = False
        try:
            return following(batch)
        finally:
            for norm in of_norm(build):
                norm.training = True

    build.wrap(Seam.FORWARD, forward)


class Counting:
    """A count that a technique keeps, or forgets to."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def warmed_up_anew_after_a_resume(build, kept=False):
    """The first steps of every process are taken in fp64; the next ones scaled by what they counted."""
    counting = Counting()
    if kept:
        build.keep(counting)

    def update(following):
        counting.steps += 1
        early = counting.steps <= 2 and build.notes["opened"] > 1
        if early:
            for parameter in build.model.parameters():
                parameter.grad.mul_(0.5)
        following()

    OPENED.append(build)
    build.notes["opened"] = len(OPENED)
    build.wrap(Seam.UPDATE, update)


OPENED: list = []


def replayed_from_the_third_epoch(build):
    recorded = []

    def batches(following, loader):
        found = list(following(loader)) if len(recorded) < 2 else recorded[0]
        recorded.append(found)
        return iter(found)

    build.wrap(Seam.BATCHES, batches)


def late_batches_twice(build):
    def batches(following, loader):
        before = None
        for number, batch in enumerate(following(loader)):
            yield before if number > 256 and number % 2 else batch
            before = batch

    build.wrap(Seam.BATCHES, batches)


def last_batch_lost(build):
    def batches(following, loader):
        held = None
        for batch in following(loader):
            if held is not None:
                yield held
            held = batch

    build.wrap(Seam.BATCHES, batches)


def evaluated_on_the_training_data(build):
    read = []

    def batches(following, loader):
        for batch in following(loader):
            read.append(batch)
            yield batch

    build.wrap(Seam.BATCHES, batches)
    build.wrap(Seam.VALIDATION, lambda following, loader: iter(read[:3] or following(loader)))


def evaluation_cut(build):
    build.wrap(Seam.VALIDATION, lambda following, loader: iter(list(following(loader))[:-1]))


def fed_from_a_list(build):
    build.wrap(Seam.BATCHES, lambda following, loader: iter(list(following(loader))))
    build.wrap(Seam.VALIDATION, lambda following, loader: iter(list(following(loader))))


@pytest.fixture
def judge(ruler_of, planted):
    def judge(function, samples=SAMPLES, numerics=Numerics.ROUNDING, further=None):
        plan = planted(function, Stage.DATA, numerics) | (further or {})
        return ruler_of(job, samples).judge(plan)

    return judge


@pytest.mark.parametrize(
    ("defect", "words"),
    [
        (norm_frozen_after_an_evaluation, "momentum of 1 (BatchNorm2d) is 0.0"),
        (evaluated_from_a_stale_copy, "evaluation under the plan"),
        (momentum_reset_each_epoch, "over evaluations and epochs"),
        (momentum_reset_behind_each_epoch, "over evaluations and epochs"),
        (momentum_reset_behind_each_evaluation, "over evaluations and epochs"),
        (padded_to_a_static_shape, "over evaluations and epochs"),
        (small_batches_in_evaluation_mode, "over evaluations and epochs"),
        (replayed_from_the_third_epoch, "in epoch 3"),
        (last_batch_lost, "other batches"),
        (evaluated_on_the_training_data, "first evaluation gets other batches than the job's validation"),
        (evaluation_cut, "evaluation gets other batches"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_defect_of_a_trainings_life_is_caught(defect, words, judge):
    verdict = judge(defect)
    assert verdict["kept"] is False
    told = [verdict["reason"], *(check["name"] for check in verdict["checks"] if check["kept"] is False)]
    assert any(words in text for text in told), told


def test_an_exact_plan_must_be_exact_over_its_life(judge):
    verdict = judge(momentum_reset_each_epoch, numerics=Numerics.EXACT)
    assert verdict["kept"] is False
    assert "over evaluations and epochs" in verdict["reason"]
    assert judge(momentum_reset_behind_each_evaluation, numerics=Numerics.EXACT)["kept"] is False
    assert judge(fed_from_a_list, numerics=Numerics.EXACT)["kept"]


def test_data_beyond_256_batches_are_compared(judge):
    verdict = judge(late_batches_twice, samples=300 * BATCH + 8, numerics=Numerics.EXACT)
    assert verdict["kept"] is False
    assert "other batches" in verdict["reason"]


def test_the_last_batches_are_compared_where_there_is_no_time_for_all(ruler_of, judge):
    ruler = ruler_of(job, SAMPLES)
    before, ruler.feeding_seconds = ruler.feeding_seconds, 0.0
    try:
        verdict = judge(last_batch_lost)
    finally:
        ruler.feeding_seconds = before
    assert verdict["kept"] is False
    assert "other batches" in verdict["reason"]


@pytest.fixture(scope="module")
def stream_ruler(ruler_of):
    """Of 300 batches without an index, with no time for each pass but for all together."""
    ruler = ruler_of(streaming, 300)
    ruler.feeding_seconds = 0.0
    return ruler


@pytest.mark.parametrize(
    ("defect", "words"),
    [
        (late_batches_twice, "in epoch 1, from batch 258 on"),
        (last_batch_lost, "in epoch 1, from batch 300 on"),
    ],
)
def test_a_stream_is_compared_to_its_end(defect, words, stream_ruler, planted):
    verdict = stream_ruler.judge(planted(defect, Stage.DATA, Numerics.EXACT))
    assert verdict["kept"] is False
    assert words in verdict["reason"]


def fed_as_it_is(build):
    build.wrap(Seam.BATCHES, lambda following, loader: (batch for batch in following(loader)))


def test_how_much_of_a_stream_was_compared_is_told(stream_ruler, planted):
    verdict = stream_ruler.judge(planted(fed_as_it_is, Stage.DATA, Numerics.EXACT))
    assert verdict["kept"], verdict["reason"]
    assert verdict["fed"] == {"data": [{"batches": 300, "whole": True}] * 3}
    assert verdict["reason"] == ""


def test_what_follows_the_last_batch_of_a_stream_runs_in_the_life_too(stream_ruler, planted):
    verdict = stream_ruler.judge(planted(momentum_reset_behind_each_epoch, Stage.DATA, Numerics.EXACT))
    assert verdict["kept"] is False
    assert "over evaluations and epochs" in verdict["reason"]


def test_a_plan_that_feeds_an_evaluation_without_end_does_not_stop_its_life(planted, monkeypatch):
    def endless(build):
        build.wrap(Seam.VALIDATION, lambda following, loader: itertools.cycle(list(following(loader))))

    monkeypatch.setattr(life, "VALIDATING_SECONDS", 0.05)
    plan = Plan.from_dict(planted(endless, Stage.DATA, Numerics.EXACT))
    with start(job(), plan, vivace.inspect()) as session:
        life.validate(session, job())


def test_a_stream_without_an_end_is_compared_for_a_time(planted, monkeypatch):
    looks = itertools.count()
    monkeypatch.setattr(feeding.time, "perf_counter", lambda: 0.01 * next(looks))
    endless = streaming(None)
    plan = Plan.from_dict(planted(fed_as_it_is, Stage.DATA, Numerics.EXACT))
    with start(endless, plan, vivace.inspect()) as session:
        fault, note, passes, ends = fed_otherwise(session, endless, Reach(0.1, 0.6))
    assert not fault
    assert [one.whole for one in passes] == [False] * 3
    assert [*ends] == [[]] * 3
    assert passes[0].batches > passes[1].batches >= 3, "what the later epochs can spare goes to the first"
    assert f"({passes[0].batches:,} of epoch 1, " in note
    assert "a stream, whose end was not reached" in note


def odd_at_the_end():
    """A stream of 40 batches and a smaller one."""
    *whole, (inputs, labels) = stream(41)
    yield from whole
    yield inputs[:5], labels[:5]


def shapes_of(batches):
    return [len(batch[1]) for batch in batches]


def test_a_life_goes_through_the_true_last_batches_of_a_stream():
    loaders = Loaders(dataclasses.replace(job(), data=odd_at_the_end))
    course = life.course_of(loaders, [], 60.0)
    assert [shapes_of(end) for end in course.ends] == [[BATCH, 5]] * 3
    assert course.shaped == []
    assert course.reached == [True] * 3
    assert life.unseen(course) == life.Unseen()


def test_data_that_come_once_only_are_no_data_of_three_epochs():
    once = iter([*jobs.mlp().data()] * 20)
    ruler = Ruler(dataclasses.replace(jobs.mlp(), data=lambda: once), MACHINE)
    with pytest.raises(vivace.JobError, match="no batch when it was read again: let it make its batches"):
        ruler.prepare(seconds=2.0)


def test_what_the_time_was_too_short_for_is_told():
    loaders = Loaders(dataclasses.replace(job(), data=odd_at_the_end))
    course = life.course_of(loaders, [], 0.0)
    assert [shapes_of(end) for end in course.ends] == [[BATCH, BATCH]] * 3
    (told,), (figures,) = life.unseen(course)
    assert "looked for in what came in 1 s (2 of epoch 1, 2 of epoch 2, 2 of epoch 3)" in figures
    assert told.startswith("the end of epoch 1, 2, 3 was not reached")


@pytest.mark.parametrize("known", [[], [(torch.zeros(3, 3, 8, 8), torch.zeros(3))]], ids=["alike", "varied"])
def test_that_not_every_shape_was_looked_for_is_told_where_shapes_vary(known):
    indexed = life.course_of(Loaders(job()), known, 0.0)
    assert [shapes_of(end) for end in indexed.ends] == [[BATCH, SAMPLES % BATCH]] * 3
    told, (figures,) = life.unseen(indexed)
    assert figures.endswith("(2 of epoch 1, 2 of epoch 2)")
    assert told == (("shapes that come later than 1 s of reading were not tried",) if known else ())


def test_the_ends_of_a_stream_count_on_all_ranks_or_on_none():
    loaders = Loaders(dataclasses.replace(job(), data=odd_at_the_end))
    course = life.course_of(loaders, [], 60.0, agreed=lambda reached: False)
    assert [shapes_of(end) for end in course.ends] == [[BATCH, BATCH]] * 3
    assert shapes_of(course.shaped) == [5]


def test_what_feeding_saw_of_a_streams_end_is_lived_through(planted):
    def small_batches_wrong_and_fed(build):
        small_batches_in_evaluation_mode(build)
        fed_as_it_is(build)

    ruler = Ruler(dataclasses.replace(streaming(0), data=odd_at_the_end), MACHINE)
    ruler.feeding_seconds = 0.0
    ruler.prepare()
    assert ruler.lives.reached == [False] * 3
    right, wrong, unfed = (
        planted(function, Stage.DATA)
        for function in (fed_as_it_is, small_batches_wrong_and_fed, small_batches_in_evaluation_mode)
    )
    assert "was not reached" in ruler.judge(unfed)["reason"]
    assert ruler.judge(right)["kept"]
    assert [shapes_of(end) for end in ruler.lives.ends] == [[BATCH, 5]] * 3
    for plan in (wrong, unfed):
        verdict = ruler.judge(plan)
        assert verdict["kept"] is False
        assert "over evaluations and epochs" in verdict["reason"]
        assert "was not reached" not in verdict["reason"]
    assert ruler.judge(right)["kept"]


class Unsized:
    """Lists of indices, nobody knows how many."""

    def __iter__(self):
        return iter([[*range(start, start + 8)] for start in range(0, 40, 8)])


def test_data_with_an_index_and_without_a_length_are_fed_from_their_beginning(planted):
    unsized = DataLoader(pictures().dataset, batch_sampler=Unsized())
    ruler = Ruler(dataclasses.replace(job(), data=lambda: unsized), MACHINE)
    ruler.prepare(seconds=2.0)
    verdict = ruler.judge(planted(fed_as_it_is, Stage.DATA, Numerics.EXACT))
    assert verdict["kept"], verdict["reason"]
    assert "its first batches stood for its last" in verdict["reason"]


class Noisy(Dataset):
    """Draws from a generator of its own, which begins anew with the data, or by chance."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index + self.rng.random()])


@pytest.mark.parametrize(
    ("seed", "fault"),
    [(0, "it feeds other batches, or in another order"), (None, "your data come otherwise")],
)
def test_whose_the_fault_is_shows_in_data_read_afresh(seed, fault):
    """A loader that was read before goes on with its generator, and says nothing of how the data come."""
    made = dataclasses.replace(job(), data=lambda: DataLoader(Noisy(seed), batch_size=2))
    seams = SimpleNamespace(batches=lambda loader: reversed([*loader]))
    fed = fed_otherwise(SimpleNamespace(seams=seams, place=lambda batch: batch), made, Reach(9.0, 9.0))
    assert fault in fed.fault


def test_an_edits_stream_is_read_to_its_end_as_well():
    first, second = read_epochs(streaming(300), "data", 2, Reach(0.0, 60.0))
    assert [len(first.batches), len(second.batches)] == [300, 300]
    assert first.whole
    assert compared([first, second], [first, read(stream(300), 0.0, least=8)]) == [(300, True), (8, False)]


def test_an_iterable_dataset_that_knows_its_length_is_still_read_to_its_end():
    class Counted(IterableDataset):
        def __len__(self):
            return 4 * BATCH

        def __iter__(self):
            return iter(range(4 * BATCH))

    loaders = Loaders(dataclasses.replace(job(), data=lambda: DataLoader(Counted(), batch_size=BATCH)))
    assert len(list(loaders.epoch(0))) == 4
    assert not loaders.has_index


def test_what_a_technique_holds_must_outlive_a_resume(planted):
    """With all of the effort at once: judged again, it would be opened anew, and break sooner."""
    ruler = Ruler(job(), MACHINE)
    ruler.prepare()
    OPENED.clear()
    verdict = ruler.judge(planted(warmed_up_anew_after_a_resume, Stage.DATA))
    assert verdict["kept"] is False
    assert "over evaluations and epochs" in verdict["reason"]


def test_what_it_keeps_does(judge):
    def kept(build):
        warmed_up_anew_after_a_resume(build, kept=True)

    OPENED.clear()
    verdict = judge(kept)
    assert verdict["kept"], verdict["reason"]


@pytest.mark.parametrize(
    "plan", [{"bf16_autocast": {}}, {"bf16_weights": {}}, {"fp16_autocast": {}}], ids=str
)
def test_correct_plans_outlive_it(plan, judge):
    verdict = judge(fed_from_a_list, further=plan)
    assert verdict["kept"], verdict["reason"]


class Scale:
    """A loss scale as techniques keep one; `forgets` says that it begins anew where it is loaded."""

    def __init__(self, forgets=False):
        self.scale, self.forgets = 2.0**16, forgets

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = 2.0**16 if self.forgets else state["scale"]


def scaled(build, *, forgets=False, moves="", again=False):
    """Skip steps whose gradients are not finite, and the first after a resume: once, or `again` each time."""
    scale, optimizer = Scale(forgets), build.optimizer
    build.keep(scale)
    build.facts.skipped_steps = 0
    OPENED.append(build)
    resumed = len(OPENED) > 1 if again else len(OPENED) == 2
    begun = []

    def update(following):
        finite = all(bool(p.grad.isfinite().all()) for p in build.model.parameters() if p.grad is not None)
        too_large = resumed and not begun
        begun.append(True)
        if finite and not too_large:
            return following()
        build.facts.skipped_steps += 1
        scale.scale /= 2
        with torch.no_grad():
            if moves == "weights":
                for parameter in build.model.parameters():
                    parameter.mul_(1 - 1e-4)
            for state in optimizer.state.values() if moves == "momentum" else ():
                state["momentum_buffer"].mul_(0.9)
        return None

    build.wrap(Seam.UPDATE, update)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"moves": "weights"}, "a step that it skips changes 0."),
        ({"moves": "momentum"}, "a step that it skips changes the optimizer's state"),
        ({"forgets": True}, "loses what 'planted_one' kept"),
        ({"again": True}, "after each resume it skips steps"),
    ],
    ids=str,
)
def test_a_skipped_step_changes_nothing_and_its_scale_outlives_a_resume(wrong, words, judge):
    def one(build):
        scaled(build, **wrong)

    OPENED.clear()
    verdict = judge(one)
    assert verdict["kept"] is False
    assert words in verdict["reason"]


def test_a_plan_that_skips_a_step_rightly_is_kept(judge):
    OPENED.clear()
    verdict = judge(scaled)
    assert verdict["kept"], verdict["reason"]


class Asked(nn.Module):
    """Counts how often it is called, in evaluation as well, and computes with that."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs):
        self.calls += 1
        return self.layer(inputs) * (1 + 0.1 * self.calls)


@pytest.mark.parametrize("plan", [{}, {"fused_optimizer": {}}])
def test_a_model_that_counts_its_evaluations_is_the_same_as_itself(plan):
    inputs = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
    batches = [(part, part[:, :4].argmax(1)) for part in inputs.split(16)]
    job = vivace.Job(
        model=Asked,
        data=lambda: batches,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        epochs=3,
    )
    verdict = (
        vivace.verify(job, vivace.Plan.from_dict(plan), budget=20)
        if plan
        else vivace.verify(job, against=job)
    )
    assert verdict.kept, verdict.reason
