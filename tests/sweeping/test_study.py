"""The study in its journal: what is asked, what is resumed, and that nothing counts twice."""

import dataclasses
import errno
import inspect
import math
import os
import resource
from functools import partial
from statistics import median, stdev

import pytest
from optuna.distributions import FloatDistribution
from optuna.pruners import HyperbandPruner
from optuna.samplers import TPESampler
from optuna.trial import TrialState

from vivace.errors import FolderError, InputError
from vivace.sweeping import study as study_module
from vivace.sweeping.folder import SweepFolder
from vivace.sweeping.importance import importances_of
from vivace.sweeping.record import Finalist, is_winner, ranked, record_of, spread_of, within_share
from vivace.sweeping.space import space_of, to_dict
from vivace.sweeping.study import Setting, Study
from vivace.torch_internals import sampling


def job(lr: float = 0.1, width: int = 8, depth: int = 1, momentum: float = 0.9):
    """The parameters of a job's function."""


def study_in(path, *ranges, seed=0, epochs=9, **setting):
    space, fixed = space_of(ranges or ["lr=1e-3..1:log", "width=4,8"], inspect.signature(job).parameters)
    return Study(
        path / "study.journal", Setting("train.py:job", to_dict(space), fixed, seed, epochs, **setting), space
    )


def run(study, count):
    """Trials whose metric is best in the middle of the range."""
    found = []
    for _ in range(count):
        asked = study.ask()
        metric = -abs(asked.parameters["lr"] - 0.03)
        study.complete(asked.number, [metric], metric=metric, curve={1: metric})
        found.append(asked)
    return found


def test_equal_seeds_ask_equal_trials_and_others_do_not(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    first, again, other = (run(study_in(f, seed=s), 14) for f, s in zip(folders, (0, 0, 1), strict=True))
    assert first == again
    assert first != other


class OptunasOwn:
    """A new sampler for each seed, which is noted."""

    def __init__(self, seeds):
        self.seeds = seeds

    def begun(self, seed):
        self.seeds.append(seed)
        return TPESampler(seed=seed)


def test_what_is_asked_is_what_optunas_own_sampler_asks(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).mkdir()
    mine = run(study_in(tmp_path / "a"), 16)
    seeds = []
    monkeypatch.setattr(study_module, "Sampler", lambda _: OptunasOwn(seeds))
    assert run(study_in(tmp_path / "b"), 16) == mine
    assert len(seeds) >= 16


def test_trials_asked_for_together_are_drawn_from_densities_worked_out_once(tmp_path, monkeypatch):
    """And are those that Optuna's own sampler draws, of pruned trials and of complete ones."""

    def asked_together(study):
        for number in range(60):
            asked = study.ask()
            stop = study.report(asked.number, 1, math.sin(number))
            end = study.prune if stop else partial(study.complete, values=[math.sin(number)])
            end(asked.number)
        del splits[:]
        found = [study.ask() for _ in range(9)]
        study.prune(found[0].number)
        return [*found, *(study.ask() for _ in range(9))]

    split, splits = sampling._split, []
    monkeypatch.setattr(sampling, "_split", lambda *known: splits.append(known) or split(*known))
    for name in "abc":
        (tmp_path / name).mkdir()
    mine = asked_together(study_in(tmp_path / "a"))
    assert 0 < len(splits) < 9
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "_can_share", False)  # as where a name of Optuna's is gone
        assert asked_together(study_in(tmp_path / "c")) == mine
    assert not splits
    monkeypatch.setattr(study_module, "Sampler", lambda _: OptunasOwn([]))
    monkeypatch.setattr(study_module, "Pruner", partial(HyperbandPruner, 1))
    assert asked_together(study_in(tmp_path / "b")) == mine


def test_of_very_many_trials_some_draw_the_density_of_those_that_are_not_good(tmp_path, monkeypatch):
    assert sampling.thinned(list(range(1000))) == list(range(1000))
    some = sampling.thinned(list(range(4321)))
    assert (len(some), some[0], some[-1], some == sorted(set(some))) == (1000, 0, 4320, True)
    monkeypatch.setattr(sampling, "MOST_OTHERS", 20)
    monkeypatch.setattr(sampling, "GROWN", 1.2)
    study = study_in(tmp_path)
    away = [abs(math.log(asked.parameters["lr"] / 0.03)) for asked in run(study, 120)]
    assert len(study._sampler._others[0]) == 20
    assert 119 / 1.2 - 1 <= study._sampler._num_ended < 119
    assert median(away[-40:]) < 0.5 * median(away[:20])


def test_one_parameter_of_several_objectives_is_drawn_by_optunas_own_sampler(tmp_path, monkeypatch):
    """Which counts more good trials there than of one objective."""
    study = study_in(tmp_path, "lr=1e-3..1:log", objectives=("metric", "parameters"))
    for number in range(12):
        study.complete(study.ask().number, [math.sin(number), number])
    monkeypatch.setattr(sampling, "_split", lambda *_: pytest.fail("the shared densities were asked"))
    assert study.ask() is not None


def test_a_resumed_study_asks_what_an_unbroken_one_asks(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    whole = run(study_in(tmp_path / "a"), 16)
    parts = run(study_in(tmp_path / "b"), 7) + run(study_in(tmp_path / "b"), 9)
    assert parts == whole


@pytest.mark.fault(37)
def test_a_journal_cut_anywhere_is_resumed_with_no_trial_twice(tmp_path):
    """As a kill leaves it: every prefix of the file, with a lock that nobody holds."""
    (tmp_path / "whole").mkdir()
    study = study_in(tmp_path / "whole", epochs=1)
    run(study, 4)
    study.ask({"width": 8})
    data = study.path.read_bytes()
    lines = data.splitlines(keepends=True)
    for count in range(1, len(lines) + 1):
        folder = tmp_path / f"cut{count}"
        folder.mkdir()
        (folder / "study.journal").write_bytes(b"".join(lines[:count]) + b'{"op_code":5,"wor')
        os.symlink("study.journal", folder / "study.journal.lock")
        again = study_in(folder, epochs=1)
        assert again.num_begun == len(again.counted()) + len(again.open())
        left = again.left_over()
        assert not [t for t in again.trials() if t.state == TrialState.WAITING]  # for whom nobody asked again
        for asked in left:
            assert set(asked.parameters) == {"lr", "width"}
            again.complete(asked.number, [0.0], metric=0.0)
        while len(again.counted()) < 5:
            run(again, 1)
        numbers = [t.number for t in again.counted()]
        assert numbers == [0, 1, 2, 3, 4]
        told = [sorted({**t.params}.items()) for t in again.trials()]
        assert len({str(one) for one in told}) == 5


@pytest.mark.fault(37)
def test_a_small_space_cut_anywhere_is_tried_once_each(tmp_path):
    """Also where the kill came before it was noted that the sampler had drawn what was tried already."""
    ranges = ("width=4,8,16", "lr=0.5")

    def finished(study):
        for asked in study.left_over():
            study.complete(asked.number, [float(asked.parameters["width"])])
        while (asked := study.ask()) is not None:
            study.complete(asked.number, [float(asked.parameters["width"])])
        return sorted(trial.params["width"] for trial in study.counted())

    (tmp_path / "whole").mkdir()
    study = study_in(tmp_path / "whole", *ranges, epochs=1)
    assert finished(study) == [4, 8, 16]
    lines = study.path.read_bytes().splitlines(keepends=True)
    for count in range(1, len(lines) + 1):
        folder = tmp_path / f"cut{count}"
        folder.mkdir()
        (folder / "study.journal").write_bytes(b"".join(lines[:count]))
        assert finished(study_in(folder, *ranges, epochs=1)) == [4, 8, 16], count


def test_a_trial_that_was_begun_goes_on_under_its_number_with_its_reports(tmp_path):
    study = study_in(tmp_path)
    asked = study.ask()
    study.report(asked.number, 1, 0.5)
    again = study_in(tmp_path)
    (left,) = again.left_over()
    assert left == asked
    again.report(left.number, 1, 0.5)
    again.report(left.number, 2, 0.6)
    again.complete(left.number, [0.6], metric=0.6)
    assert again.trial(0).intermediate_values == {1: 0.5, 2: 0.6}
    assert again.left_over() == []


def test_a_trial_that_was_found_worse_before_a_kill_is_pruned_after_it(tmp_path):
    def first_found_worse(study):
        """Of trials of which every second is bad: its epoch, too."""
        for number in range(30):
            asked = study.ask()
            for epoch in range(1, 9):
                if study.report(asked.number, epoch, 0.1 * epoch if number % 2 else 0.9 * epoch):
                    return asked, epoch
            study.complete(asked.number, [0.1 if number % 2 else 0.9])
        return None

    asked, epoch = first_found_worse(study_in(tmp_path))
    again = study_in(tmp_path)
    assert again.left_over() == [asked]
    values = again.curve(asked.number)
    assert [again.report(asked.number, *one) for one in values.items()] == [*[False] * (epoch - 1), True]
    assert again.curve(asked.number) == values


def test_what_open_trials_have_reported_is_forgotten_where_they_begin_anew(tmp_path):
    study = study_in(tmp_path)
    reported, silent = study.ask(), study.ask()
    study.report(reported.number, 1, 0.5)
    again = study_in(tmp_path)
    again.begin_anew()
    assert len(again.open()) == again.num_begun == 2
    left = again.left_over()
    assert [one.parameters for one in left] == [silent.parameters, reported.parameters]
    assert [again.curve(one.number) for one in left] == [{}, {}]
    assert again.counted() == []
    for one in left:
        again.report(one.number, 1, 0.6)
        again.complete(one.number, [0.6])
    assert study_in(tmp_path).left_over() == []


def test_what_another_job_reached_under_other_seeds_is_forgotten(tmp_path):
    study = study_in(tmp_path)
    (asked,) = run(study, 1)
    study.repeat(asked.number, 1, 0.5)
    assert study.repeated() == {(asked.number, 1): 0.5}
    again = study_in(tmp_path)
    again.begin_anew()
    again.repeat(asked.number, 2, -99.5)
    assert study_in(tmp_path).repeated() == {(asked.number, 2): -99.5}


def test_no_combination_is_tried_twice_and_a_small_space_ends(tmp_path):
    """Not before all have been tried, although the sampler would rather draw the best again."""
    study = study_in(tmp_path, "width=4,8,16", "depth=1..4", "lr=0.5")
    seen = []
    while (asked := study.ask()) is not None:
        seen.append(tuple(asked.parameters.items()))
        metric = -abs(asked.parameters["width"] - 8)
        study.complete(asked.number, [metric], metric=metric)
    assert len(seen) == len(set(seen)) == 12
    assert len(study.counted()) == len(seen)
    assert study.exhausted


def test_a_range_in_steps_is_tried_once_each_up_to_its_end(tmp_path):
    space = {"lr": FloatDistribution(0, 0.3, step=0.1)}  # of which 3 * 0.1 is above the end
    study = Study(tmp_path / "study.journal", Setting("train.py:job", to_dict(space), {}, 0, 1), space)
    seen = []
    while (asked := study.ask()) is not None:
        seen.append(asked.parameters["lr"])
        study.complete(asked.number, [0.0])
    assert sorted(seen) == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_a_shape_whose_combinations_have_been_tried_gives_no_other(tmp_path):
    study = study_in(tmp_path, "width=4,8", "depth=1..4")
    found = [study.ask({"width": 8}) for _ in range(4)]
    assert {(one.parameters["width"], one.parameters["depth"]) for one in found} == {
        (8, depth) for depth in (1, 2, 3, 4)
    }
    drawn = len(study.trials())
    assert study.ask({"width": 8}) is None
    assert len(study.trials()) == drawn
    assert study.ask().parameters["width"] == 4


def test_a_trial_like_another_keeps_those_values(tmp_path):
    study = study_in(tmp_path)
    run(study, 12)
    assert {study.ask({"width": 8}).parameters["width"] for _ in range(6)} == {8}


def test_bad_trials_are_pruned_and_good_ones_are_not(tmp_path):
    study = study_in(tmp_path, epochs=9)
    ended = {True: 0, False: 0}
    for number in range(30):
        asked, good = study.ask(), number % 2 == 0
        pruned = any(
            study.report(asked.number, epoch, (0.9 if good else 0.1) * epoch) for epoch in range(1, 9)
        )
        ended[good] += pruned
        study.prune(asked.number) if pruned else study.complete(asked.number, [0.9 if good else 0.1])
    assert ended[False] >= 10
    assert ended[True] < ended[False] / 2


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"seed": 1}, "its seed was 0, now 1"),
        ({"epochs": 4}, "its number of epochs was 9, now 4"),
        ({"ranges": ["lr=0..1", "width=4,8"]}, "lr was 0.001..1.0:log, now 0.0..1.0; give the same"),
        ({"ranges": ["lr=1e-3..1:log", "width=4"]}, "width was 4,8, now 4"),
        ({"ranges": ["lr=1e-3..1:log"]}, "width was 4,8, now not given"),
        ({"ranges": ["lr=1e-3..1:log", "width=4,8", "depth=2..6"]}, "depth was not given, now 2..6"),
        (
            {"objectives": ("metric", "seconds")},
            "what the metric is weighed against was nothing",
        ),
        ({"plan": "channels_last"}, "its plan was none, now channels_last"),
    ],
)
def test_another_sweep_does_not_go_on_in_this_journal(tmp_path, changed, sentence):
    study_in(tmp_path)
    ranges = changed.pop("ranges", [])
    with pytest.raises(InputError, match=f"the sweep in '{tmp_path}' cannot go on: {sentence}"):
        study_in(tmp_path, *ranges, **changed)


def test_a_sweep_goes_on_however_the_same_job_is_spelled(tmp_path):
    study = study_in(tmp_path)
    run(study, 1)
    for job in ("./train.py:job", str(tmp_path / "train.py:job"), "train.py"):
        setting = dataclasses.replace(study.setting, job=job)
        assert len(Study(study.path, setting, study.space).counted()) == 1
    for job in ("train.py:other", "trained.py:job", "train:job"):
        with pytest.raises(InputError, match=f"its job was train.py:job, now {job}"):
            Study(study.path, dataclasses.replace(study.setting, job=job), study.space)


@pytest.mark.fault(29)
def test_a_full_disk_ends_the_sweep_and_it_goes_on_later(tmp_path):
    study = study_in(tmp_path, epochs=1)
    run(study, 2)
    size = study.path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, before[1]))
    try:
        with pytest.raises(FolderError, match=rf"cannot be written: {os.strerror(errno.EFBIG)}"):
            run(study, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert study.path.read_bytes().endswith(b"\n")  # no half a line, which another trial's would join
    run(study, 1)
    again = study_in(tmp_path, epochs=1)
    for asked in again.left_over():
        again.complete(asked.number, [0.0], metric=0.0)
    run(again, 5 - len(again.counted()))
    assert [t.number for t in again.counted()] == [0, 1, 2, 3, 4]


@pytest.mark.fault(29)
def test_a_journal_that_is_damaged_in_its_middle_is_one_sentence(tmp_path):
    study = study_in(tmp_path)
    run(study, 2)
    lines = study.path.read_bytes().splitlines(keepends=True)
    for wrong in (b"\0" * 20, b"null", b'{"a":1}', b'{"op_code":"5"}'):
        study.path.write_bytes(b"".join([*lines[:4], wrong + b"\n", *lines[5:]]))
        with pytest.raises(FolderError, match=r"line 5 of '.*study.journal' is damaged: put back an intact"):
            study_in(tmp_path)


@pytest.mark.fault(29)
@pytest.mark.parametrize("left", [None, b"", b'{"op_code":0,"wor'])
def test_trials_without_their_journal_are_not_begun_over(tmp_path, left):
    with SweepFolder(tmp_path, resume=False) as folder:
        folder.trial(0).mkdir()
    if left is not None:
        folder.journal.write_bytes(left)
    with pytest.raises(
        FolderError, match=f"trials in '{tmp_path}' have lost their 'study.journal': put back"
    ):
        study_in(tmp_path)


@pytest.mark.fault(29)
def test_a_journal_that_cannot_be_opened_is_one_sentence(tmp_path):
    (tmp_path / "study.journal").mkdir()
    with pytest.raises(FolderError, match=rf"study.journal' cannot be written: {os.strerror(errno.EISDIR)}"):
        study_in(tmp_path)


@pytest.mark.fault(37)
def test_failed_trials_keep_their_reason(tmp_path):
    study = study_in(tmp_path)
    asked = study.ask()
    study.fail(asked.number, reason="seven", code="killed", kind="ChildFailed", curve={})
    record = record_of(study.trial(asked.number), {"depth": 1})
    assert (record.state, record.reason, record.code) == ("failed", "seven", "killed")
    assert record.parameters == {"depth": 1, **asked.parameters}


@pytest.mark.fault(35)
def test_two_sweeps_in_one_folder_are_refused(tmp_path):
    with SweepFolder(tmp_path / "out", resume=False) as folder:
        with pytest.raises(FolderError, match="another sweep is running"):
            SweepFolder(tmp_path / "out", resume=True)
        folder.journal.write_text("")
    with pytest.raises(FolderError, match="already holds a sweep"):
        SweepFolder(tmp_path / "out", resume=False)
    SweepFolder(tmp_path / "out", resume=True).close()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(FolderError, match=r"not empty \(thesis.tex\)"):
        SweepFolder(tmp_path / "out", resume=True)


def test_a_persons_own_files_stay_whatever_they_are_called(tmp_path):
    theirs = tmp_path / "trials" / "trial_0000" / "results.csv"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    with pytest.raises(FolderError, match=r"is not empty \(trials\): name another with --out"):
        SweepFolder(tmp_path, resume=True)
    assert theirs.exists()


def test_importances_come_with_intervals_and_only_of_enough_trials(tmp_path):
    study = study_in(tmp_path)
    run(study, 9)
    assert importances_of(study.trials(), study.importances, 0) == {}
    run(study, 16)
    found = importances_of(study.trials(), study.importances, 0)
    assert set(found) == {"lr", "width"}
    assert all(0 <= one["low"] <= one["estimate"] <= one["high"] <= 1 for one in found.values())
    assert found["lr"]["estimate"] > found["width"]["estimate"]


def test_what_matters_is_what_decides_the_best_trials_and_not_the_worst(tmp_path):
    """A high learning rate spoils a run; among the others the momentum alone decides."""
    study = study_in(tmp_path, "lr=0.0..1.0", "momentum=0.0..1.0")
    for _ in range(60):
        asked = study.ask()
        lr, momentum = asked.parameters["lr"], asked.parameters["momentum"]
        metric = 0.1 + lr / 1000 if lr > 0.6 else 0.8 + 0.1 * momentum
        study.complete(asked.number, [metric], metric=metric)
    found = importances_of(study.trials(), study.importances, 0)
    assert found["momentum"]["low"] > 0.5 > found["lr"]["high"]


def finalist(number, *values):
    spread = spread_of(dict(enumerate(values, 1))) if values else None
    return Finalist(number, {}, 0.5, spread)


def test_the_winner_is_only_called_so_beyond_the_interval():
    clear = ranked([finalist(0, 0.5, 0.51, 0.52), finalist(1, 0.9, 0.92, 0.92)])
    assert [one.number for one in clear] == [1, 0]
    assert is_winner(clear)
    assert 0.38 < clear[1].behind.low < clear[1].behind.mean < clear[1].behind.high < 0.43
    assert is_winner(ranked([finalist(0, 0.9, 0.7, 0.8), finalist(1, 0.8, 0.75, 0.82)])) is False
    assert is_winner([finalist(0)]) is None
    assert is_winner(ranked([finalist(0), finalist(1)])) is None


def test_what_failed_under_a_seed_stands_behind_what_did_not():
    """Whatever it reached in the search, and under the seeds that it survived."""
    failed, shaky = Finalist(0, {}, 0.99, None), Finalist(1, {}, 0.98, spread_of({2: 0.97, 3: 0.98}))
    found = ranked([failed, shaky, finalist(2, 0.5, 0.52, 0.51), finalist(3, 0.8, 0.81, 0.82)])
    assert [one.number for one in found] == [3, 2, 1, 0]
    assert is_winner([found[0], found[1], found[3]])
    assert not is_winner(found)


def test_the_interval_is_students():
    found = spread_of({1: 1.0, 2: 2.0, 3: 3.0})
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2.0 - 2.484, 2.0 + 2.484), abs=1e-3)
    many = spread_of(dict(enumerate([0.0, 1.0] * 6)))
    assert many.high - many.mean == pytest.approx(2.201 * stdev(many.values.values()) / 12**0.5, rel=0.02)
    assert spread_of({1: 1.0}).low is None
    assert spread_of({1: 0.9, 2: 0.9}).low is None


@pytest.mark.parametrize(
    ("name", "values", "ends"),
    [
        ("accuracy", (0.99, 0.95), (0.716, 1.0)),
        ("entity F1", (0.05, 0.01), (0.0, 0.284)),
        ("accuracy", (99.0, 95.0), (71.6, 122.4)),  # in percent: nothing is known of it
        ("minus perplexity", (-0.1, -0.2), (-0.785, 0.485)),
        ("minimum margin", (0.99, 0.95), (0.716, 1.224)),
    ],
)
def test_an_interval_of_a_share_ends_where_a_share_does(name, values, ends):
    found = within_share([finalist(0, *values)], name)[0].spread
    assert (found.low, found.high) == pytest.approx(ends, rel=0.001, abs=0.001)
    assert found.cut == (0.0 in ends or 1.0 in ends)
    assert found.values == dict(enumerate(values, 1))


def test_a_gap_of_shares_is_one_at_most():
    first, second = within_share(ranked([finalist(0, 0.9, 0.2), finalist(1, 0.1, 0.1001)]), "accuracy")
    assert (second.behind.low, second.behind.high) == (-1.0, 1.0)
    assert (first.spread.low, first.spread.high) == (0.0, 1.0)


def test_equal_differences_of_a_coarse_metric_make_no_winner():
    found = ranked([finalist(0, 0.9, 0.8), finalist(1, 0.8, 0.7)])
    assert found[1].behind.mean == pytest.approx(0.1)
    assert not is_winner(found)


def test_open_trials_are_not_counted(tmp_path):
    study = study_in(tmp_path)
    run(study, 2)
    study.ask()
    assert len(study.counted()) == 2
    assert [t.state for t in study.open()] == [TrialState.RUNNING]
