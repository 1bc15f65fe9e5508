"""The study: Optuna's, kept in a journal of which no half-written line is ever read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import json_to_distribution
from optuna.pruners import BasePruner, NopPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from vivace.errors import FolderError, InputError
from vivace.job import without_folder
from vivace.sweeping.folder import RESULT, TRIALS
from vivace.sweeping.space import Parameters, Space, combinations, range_told, size_of
from vivace.tensors.randomness import derive
from vivace.torch_internals.sampling import REPEATS, Among, Pruner, Sampler

NAME = "sweep"  # of the study; Hyperband shares trials out by it
DISK_SECONDS = 1.0
REDUCTION = 3
MOST_REPEATS = 5  # combinations in a row that were tried already

PRUNED_AT = "pruned_at"  # the epoch at which a trial was found worse than others, before it is told
REPEATED = "repeated"  # metrics under other seeds, by "trial seed"
SOURCES = "sources"  # digests of the job's

optuna.logging.set_verbosity(optuna.logging.ERROR)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What makes two sweeps the same; all of it stands in the journal."""

    job: str
    space: dict[str, Any]
    fixed: Parameters
    seed: int
    epochs: int
    objectives: tuple[str, ...] = ("metric",)
    transfer: str = ""
    plan: str = "none"  # its techniques with their settings

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {**dataclasses.asdict(self), "objectives": list(self.objectives)}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A trial to run: its number, and all parameters of the job."""

    number: int
    parameters: Parameters


class Journal(JournalFileBackend):
    """Optuna's journal with one writer, which waits for the disk when a trial ends, once a second at most.

    A line is with the system at once, so that a killed process loses none.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._waited_at = -math.inf

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """What Optuna calls to keep its log: lines are added to the file in one write."""
        lines = [json.dumps(log, separators=(",", ":")) + "\n" for log in logs]
        with self._path.open("ab", buffering=0) as file:
            end, data = file.tell(), "".join(lines).encode()
            try:
                while data:
                    data = data[file.write(data) or 0 :]
            except OSError:
                file.truncate(end)  # what another thread writes next must not join half a line
                raise

    def sync(self) -> None:
        """What was written is on the disk, but for what came within a second of the last time."""
        if time.monotonic() - self._waited_at < DISK_SECONDS:
            return
        with self._path.open("rb+") as file:
            os.fsync(file.fileno())
        self._waited_at = time.monotonic()


class Study:
    """Asks for trials and is told of them, from any thread. One object for a journal at a time.

    The sampler draws for trial n from a seed of n, so that a resumed sweep does not draw again what it drew
    at its beginning.

    Args:
        path: the journal's file.
        setting: of this sweep; where the journal holds another one's, InputError says what differs.
        space: what is searched.
    """

    def __init__(self, path: Path, setting: Setting, space: Space) -> None:
        self.setting, self.space = setting, space
        self.prunes = setting.epochs >= REDUCTION and len(setting.objectives) == 1
        self._lock = threading.RLock()
        self._trials: dict[int, optuna.trial.Trial] = {}
        self._sampler = Sampler(space)
        self.path = path
        with writing(path):
            mend(path)
            self._journal = Journal(path)
            self._storage = JournalStorage(self._journal)
            best, least = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE
            directions = [best if name == "metric" else least for name in setting.objectives]
            self._study = optuna.create_study(
                study_name=NAME,
                storage=self._storage,
                directions=directions,
                sampler=self._sampler.begun(0),
                pruner=self._pruner(),
                load_if_exists=True,
            )
            self._require_same()
        begun = [
            t for t in self.trials() if t.user_attrs.get("code") != REPEATS and t.state != TrialState.WAITING
        ]
        self.num_begun = len(begun)  # that are open or count
        self._tried = {key_of({**setting.fixed, **t.params}) for t in begun if set(t.params) == set(space)}

    @property
    def sampler_name(self) -> str:
        """For the record: ``TPE (Optuna 5.0.0), seed 0``."""
        return f"TPE (Optuna {optuna.__version__}), seed {self.setting.seed}"

    @property
    def pruner_name(self) -> str:
        """What stops trials early, in words for the record."""
        if not self.prunes:
            return "none"
        return f"Hyperband over {self.setting.epochs} epochs, reduction {REDUCTION}"

    @property
    def costs(self) -> tuple[str, ...]:
        """The objectives beside the metric, of which less is better."""
        return self.setting.objectives[1:]

    @property
    def sources(self) -> dict[str, str]:
        """Digests of the job's source in the session before this one, as `sources_of` has them."""
        return dict(self._study.user_attrs.get(SOURCES, {}))

    def keep_sources(self, sources: dict[str, str]) -> None:
        """Those of this session."""
        with self._lock, writing(self.path):
            self._study.set_user_attr(SOURCES, sources)

    def front(self) -> list[int]:
        """The numbers of the trials that no other beats in every objective."""
        with self._lock:
            return [trial.number for trial in self._study.best_trials]

    def left_over(self) -> list[Asked]:
        """Trials that a killed sweep had begun and not ended: they are run under their own numbers."""
        with self._lock, writing(self.path):
            found, known = list[Asked](), {key_of({**self.setting.fixed, **t.params}) for t in self.counted()}
            for frozen in self.trials():
                drawn = frozen.state == TrialState.WAITING  # with values of another, and not begun yet
                if not drawn and (frozen.state != TrialState.RUNNING or frozen.number in self._trials):
                    continue
                self._begin(frozen.number)
                if drawn:
                    self.num_begun += 1
                    trial = self._study.ask()
                else:
                    trial = self._open_again(frozen.number)
                asked = Asked(frozen.number, self._suggested(trial))
                if (key := key_of(asked.parameters)) in known:  # the kill came before `ask` saw that
                    self._leave(trial)
                    self.num_begun -= 1
                    continue
                known.add(key)
                self._tried.add(key)
                self._trials[frozen.number] = trial
                found.append(asked)
            return found

    def begin_anew(self) -> None:
        """What open trials have reported is another job's: others with their parameters take their places. So
        is what was reached under other seeds, which is forgotten.
        """
        with self._lock, writing(self.path):
            self._study.set_user_attr(REPEATED, {})
            for frozen in self.open():
                if frozen.intermediate_values:
                    self._begin(len(self.trials()))
                    self._study.enqueue_trial(frozen.params)
                    self._suggested(self._study.ask())
                    self._leave(self._open_again(frozen.number))

    def ask(self, like: Parameters | None = None) -> Asked | None:
        """A new trial, `like` with these values; None where every combination has been tried.

        Where the sampler draws again and again what has been tried, the first combination that has not.
        """
        with self._lock, writing(self.path):
            for drawn in range(MOST_REPEATS + 1):
                untried = self._untried(like or {})
                if untried is None:
                    return None
                self._begin(len(self.trials()))
                if values := like if drawn < MOST_REPEATS else untried:
                    self._study.enqueue_trial(values)
                trial = self._study.ask()
                found = Asked(trial.number, self._suggested(trial))
                if (key := key_of(found.parameters)) not in self._tried:
                    self._tried.add(key)
                    self._trials[trial.number] = trial
                    self.num_begun += 1
                    return found
                self._leave(trial)
            return None

    @property
    def exhausted(self) -> bool:
        """Have all combinations been begun?"""
        return len(self._tried) >= size_of(self.space)

    def _untried(self, like: Parameters) -> Parameters | None:
        """The first combination with the values of `like` that has not been begun, None where none is left;
        `like` alone where there is no end of them.
        """
        space = {name: one for name, one in self.space.items() if name not in like}
        if math.isinf(size_of(space)):
            return like
        for values in combinations(space):
            if key_of({**self.setting.fixed, **like, **values}) not in self._tried:
                return {**like, **values}
        return None

    def report(self, number: int, epoch: int, metric: float) -> bool:
        """What a trial reached after an epoch, counted from 1; returns whether it is pruned here."""
        if self.costs:  # Optuna takes no epochs of several objectives
            return False
        with self._lock, writing(self.path):
            trial, before = self._trials[number], self.trial(number)
            if epoch in before.intermediate_values:  # a resumed trial tells it a second time
                return bool(before.user_attrs.get(PRUNED_AT) == epoch)
            trial.report(metric, epoch)
            if pruned := trial.should_prune():
                trial.set_user_attr(PRUNED_AT, epoch)
            return pruned

    def curve(self, number: int) -> dict[int, float]:
        """What a trial has reported so far, in earlier sessions too."""
        return dict(self.trial(number).intermediate_values)

    def complete(self, number: int, values: Iterable[float], **facts: object) -> None:
        """A trial came to its end."""
        self._end(number, facts, values=list(values))

    def prune(self, number: int, **facts: object) -> None:
        """A trial was stopped because others are better at its epoch."""
        self._end(number, facts, state=TrialState.PRUNED)

    def fail(self, number: int, **facts: object) -> None:
        """A trial has no result; `facts` say why."""
        self._end(number, facts, state=TrialState.FAIL)

    def note(self, number: int, **facts: object) -> None:
        """Keep facts of a running trial in the journal, as JSON types."""
        with self._lock, writing(self.path):
            for name, value in facts.items():
                self._trials[number].set_user_attr(name, value)

    def repeat(self, number: int, seed: int, metric: float) -> None:
        """What the configuration of a trial reached under another seed."""
        with self._lock, writing(self.path):
            self._study.set_user_attr(REPEATED, {**self._repeated, f"{number} {seed}": metric})
            self._journal.sync()

    def repeated(self) -> dict[tuple[int, int], float]:
        """By trial and seed what has been noted with `repeat`, in earlier sessions too."""
        pairs = ((key.split(), metric) for key, metric in self._repeated.items())
        return {(int(number), int(seed)): metric for (number, seed), metric in pairs}

    @property
    def _repeated(self) -> dict[str, float]:
        return dict(self._study.user_attrs.get(REPEATED, {}))

    def trials(self) -> list[FrozenTrial]:
        """All of them, as they are now."""
        with self._lock:
            return self._study.get_trials(deepcopy=False)

    def trial(self, number: int) -> FrozenTrial:
        """The trial of this number, finished or not."""
        with self._lock:
            found = self._storage.get_trial(number)  # of a journal's one study the id is the number
        assert found.number == number
        return found

    def counted(self) -> list[FrozenTrial]:
        """Those that count: ended with a result, pruned, or failed for a reason of their own."""
        done = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        return [t for t in self.trials() if t.state in done and t.user_attrs.get("code") != REPEATS]

    def open(self) -> list[FrozenTrial]:
        """Those that are being run, or were when a sweep was killed."""
        return [t for t in self.trials() if t.state == TrialState.RUNNING]

    def importances(self, trials: list[FrozenTrial]) -> dict[str, float]:
        """The share of each parameter in what sets the best tenth of `trials` apart from all (PED-ANOVA)."""
        among: Any = Among(self._study, lambda: trials)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Optuna takes the lowest values of a target for the best.
            return dict(optuna.importance.get_param_importances(among, target=lambda t: -t.values[0]))

    def _end(self, number: int, facts: dict[str, Any], **told: Any) -> None:
        with self._lock, writing(self.path):
            self.note(number, **facts)  # first: what is told is told whole
            self._study.tell(number, **told)
            self._journal.sync()
            self._trials.pop(number, None)

    def _leave(self, trial: optuna.trial.Trial) -> None:
        """Another trial has its parameters: it does not count."""
        trial.set_user_attr("code", REPEATS)
        self._study.tell(trial, state=TrialState.FAIL)

    def _open_again(self, number: int) -> optuna.trial.Trial:
        """A trial that an earlier session has begun."""
        study_id = self._storage.get_study_id_from_name(NAME)
        own = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
        return optuna.trial.Trial(self._study, own)

    def _suggested(self, trial: optuna.trial.Trial) -> Parameters:
        found = {name: _suggest(trial, name, one) for name, one in self.space.items()}
        return {**self.setting.fixed, **found}

    def _begin(self, number: int) -> None:
        """What is drawn next is for the trial of this number."""
        self._study.sampler = self._sampler.begun(derive(self.setting.seed, "trial", number) % 2**32)

    def _pruner(self) -> BasePruner:
        if not self.prunes:
            return NopPruner()
        return Pruner(self.setting.epochs, REDUCTION)

    def _require_same(self) -> None:
        before, mine = self._study.user_attrs.get("setting"), self.setting.to_dict()
        if before is None:
            self._study.set_user_attr("setting", mine)
            return
        was, now = _by_words(before), _by_words(mine)
        for name in {**was, **now}:
            one, other = was.get(name, "not given"), now.get(name, "not given")
            if one != other:
                raise InputError(
                    f"the sweep in '{self.path.parent}' cannot go on: {name} was {range_told(one)}, now "
                    f"{range_told(other)}; give the same, or choose a new folder with --out"
                )


def _by_words(setting: Mapping[str, Any]) -> dict[str, object]:
    """What makes a sweep the one that it is, by what a person calls it: a job's file by its name alone, as
    the folder from which a command reaches it may be another, and its source is compared.
    """
    return {
        "its job": without_folder(setting["job"]),
        **setting["fixed"],
        **{name: json_to_distribution(found) for name, found in setting["space"].items()},
        "its seed": setting["seed"],
        "its number of epochs": setting["epochs"],
        "what the metric is weighed against": ", ".join(setting["objectives"][1:]) or "nothing",
        "--transfer": setting["transfer"] or "not given",
        "its plan": setting.get("plan", "none"),
    }


def _suggest(trial: optuna.trial.Trial, name: str, found: Any) -> Any:
    if isinstance(found, optuna.distributions.CategoricalDistribution):
        return trial.suggest_categorical(name, found.choices)
    if isinstance(found, optuna.distributions.IntDistribution):
        return trial.suggest_int(name, found.low, found.high, step=found.step, log=found.log)
    return trial.suggest_float(name, found.low, found.high, step=found.step, log=found.log)


def key_of(parameters: Parameters) -> str:
    """A text that is the same for equal parameters, in whatever order they stand."""
    return repr(sorted(parameters.items()))


def mend(path: Path) -> None:
    """Cut what a killed process had half written, and let go of its lock. The caller holds the folder's.

    Raises FolderError where something else than the end is damaged, or trials lie beside it of which it says
    nothing.
    """
    path.with_name(path.name + ".lock").unlink(missing_ok=True)
    data, end = b"", 0
    if path.exists():
        with path.open("rb+") as file:
            data = file.read()
            end = data.rfind(b"\n") + 1
            if end < len(data):
                file.truncate(end)
    if not end and any(path.with_name(name).exists() for name in (TRIALS, RESULT)):
        raise FolderError(
            f"the trials in '{path.parent}' have lost their '{path.name}': put back an intact copy, or name "
            "another folder with --out"
        )
    for number, line in enumerate(data[:end].splitlines(), 1):
        try:
            log = json.loads(line)
        except ValueError:
            log = None
        if not isinstance(log, dict) or type(log.get("op_code")) is not int:
            raise FolderError(
                f"line {number} of '{path}' is damaged: put back an intact copy, or name another folder "
                "with --out"
            )


@contextlib.contextmanager
def writing(path: Path) -> Any:
    """Raises FolderError where the journal cannot be written."""
    try:
        yield
    except OSError as error:
        raise FolderError(f"'{path}' cannot be written: {error.strerror}") from None
