"""Private names of Optuna, whose TPE and Hyperband work out of all trials once what they need for many short
ones. Importing this needs Optuna.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy
import optuna
from optuna.distributions import BaseDistribution
from optuna.pruners import HyperbandPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from vivace.torch_internals import TOUCHES, attribute, named

REPEATS = "repeats"  # the code of a trial that was drawn and not run, because another has its parameters

_SLOWER = "a sweep of thousands of trials takes longer to say what is tried next"
_split = named("optuna.samplers._tpe.sampler._split_trials", lost=_SLOWER)
_num_good = named("optuna.samplers._tpe.sampler.default_gamma", lost=_SLOWER)
_trials_of = attribute(optuna.Study, "_get_trials", lost=_SLOWER)
for _name in (
    "_sample",
    "_build_parzen_estimator",
    "_compare",
    "_compute_acquisition_func",
    "_get_params",
    "_n_ei_candidates",
    "_parzen_estimator_cls",
    "_parzen_estimator_parameters",
    "_random_sampler",
    "_rng",
):
    attribute(TPESampler, _name, lost=_SLOWER)
attribute(RandomSampler, "_rng", lost=_SLOWER)
_brackets = attribute(HyperbandPruner, "_pruners", lost=_SLOWER)
attribute(HyperbandPruner, "_get_bracket_id", lost=_SLOWER)
attribute(HyperbandPruner, "_create_bracket_study", lost=_SLOWER)
_can_share = all(touch.is_there() for touch in TOUCHES if touch.lost == _SLOWER)
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
MOST_OTHERS = 1000  # trials that are not among the good ones: of more, as many draw their density well enough
GROWN = 1.01  # times as many ended trials, of more than `MOST_OTHERS`, are told apart anew

Space = Mapping[str, BaseDistribution]
_Values = tuple[list[int], dict[str, Any]]  # numbers of trials, and arrays of their parameters


class Sampler(TPESampler):
    """TPE of Optuna 5, told what is searched: else each new one looks through all trials for it.

    It draws what Optuna's own draws, as long as no more than `MOST_OTHERS` trials have ended: see
    `TPESampler._sample`, which this is but for that, and for what it keeps: of so many ended trials the
    density of the good ones and the values of the others, and by number the values of each trial that has
    all parameters.
    """

    def __init__(self, space: Space) -> None:
        super().__init__(seed=0)
        self._told = dict(sorted(space.items()))
        self._num_ended = 0
        self._good: Any = None
        self._others: _Values = ([], {})
        self._by_number: dict[int, list[float]] = {}

    def begun(self, seed: int) -> TPESampler:
        """This one, drawing from here on what a new one of this seed draws, which takes longer to make."""
        if not _can_share:
            return TPESampler(seed=seed)
        for own in (self, self._random_sampler):
            own._rng.rng.seed(seed)
        return self

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """What Optuna calls to know what it draws together: of one objective, all."""
        return self._told if len(study.directions) == 1 else super().infer_relative_search_space(study, trial)

    def _sample(self, study: optuna.Study, trial: FrozenTrial, search_space: Any) -> dict[str, Any]:
        if len(study.directions) > 1 or search_space != self._told:  # one parameter by itself
            return super()._sample(study, trial, search_space)
        trials = _trials_of(study)(deepcopy=False)
        ended = [one for one in trials if one.state in _ENDED]
        known = self._num_ended * (GROWN if self._num_ended > MOST_OTHERS else 1.0)
        if self._good is None or len(ended) > known:
            good, others = _split(study, ended, _num_good(len(ended)))
            self._good = self._build_parzen_estimator(study, search_space, good, handle_below=True)
            self._num_ended, self._others = len(ended), self._values(study, thinned(others))
        running = [one for one in trials if one.state == TrialState.RUNNING and one.number != trial.number]
        values = _merged(self._others, self._values(study, running))
        others_density = self._parzen_estimator_cls(values, search_space, self._parzen_estimator_parameters)
        drawn = self._good.sample(self._rng.rng, self._n_ei_candidates)
        best = self._compare(drawn, self._compute_acquisition_func(drawn, self._good, others_density))
        return {name: one.to_external_repr(best[name]) for name, one in search_space.items()}

    def _values(self, study: optuna.Study, trials: Sequence[FrozenTrial]) -> _Values:
        """Those of the trials that have all parameters."""
        known, numbers = self._by_number, [one.number for one in trials]
        for number, one in zip(numbers, trials, strict=True):
            if number not in known and self._told.keys() <= (params := self._get_params(one, study)).keys():
                known[number] = [space.to_internal_repr(params[name]) for name, space in self._told.items()]
        numbers = [number for number in numbers if number in known]
        table = numpy.array([known[number] for number in numbers]).reshape(-1, len(self._told))
        return numbers, dict(zip(self._told, numpy.ascontiguousarray(table.T), strict=True))


def thinned(trials: Sequence[FrozenTrial]) -> Sequence[FrozenTrial]:
    """`MOST_OTHERS` of them at most, evenly spread from the first to the last."""
    if len(trials) <= MOST_OTHERS:
        return trials
    return [trials[round(place)] for place in numpy.linspace(0, len(trials) - 1, MOST_OTHERS)]


def _merged(some: _Values, more: _Values) -> dict[str, Any]:
    """The parameters of both in the order of trials, in which older ones weigh less."""
    order = numpy.argsort(some[0] + more[0])
    return {name: numpy.concatenate([some[1][name], more[1][name]])[order] for name in some[1]}


class Pruner(HyperbandPruner):
    """Hyperband of Optuna 5, which remembers the brackets of trials: else it asks for all each time."""

    def __init__(self, epochs: int, reduction: int) -> None:
        super().__init__(1, epochs, reduction)
        self._bracket_of: dict[int, int] = {}

    def _get_bracket_id(self, study: optuna.Study, trial: FrozenTrial) -> int:
        if not (_can_share and _brackets(self)):  # it has not begun to tell brackets apart
            return super()._get_bracket_id(study, trial)
        number = trial.number
        if number not in self._bracket_of:
            self._bracket_of[number] = super()._get_bracket_id(study, trial)
        return self._bracket_of[number]

    def _create_bracket_study(self, study: optuna.Study, bracket_id: int) -> Any:
        if not _can_share:
            return super()._create_bracket_study(study, bracket_id)
        bracket_of = self._get_bracket_id

        def of_bracket() -> list[FrozenTrial]:
            every = (one for one in study.get_trials(deepcopy=False) if one.user_attrs.get("code") != REPEATS)
            return [one for one in every if bracket_of(study, one) == bracket_id]

        return Among(study, of_bracket)


class Among:
    """A study, of which those who ask for its trials see some alone."""

    def __init__(self, study: optuna.Study, trials: Callable[[], list[FrozenTrial]]) -> None:
        self._study, self._trials = study, trials

    def get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Those of these states; never copies, as nobody here changes them."""
        return [one for one in self._trials() if states is None or one.state in states]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._study, name)
