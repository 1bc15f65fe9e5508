"""What `tune` minimises: the seconds of the person's whole training, from the command to its end."""

from __future__ import annotations

import dataclasses
import math

from vivace.ledger import Ratio

START_SECONDS = 1.0  # by which the first steps of two processes of the same job differ, on a busy machine
CHECKPOINT_SECONDS = 600.0  # between two checkpoints of `train`, as long as nobody asks for another time
WATCHED_SHARE = 0.01  # of a run under a plan: what `train` spends on repeating its steps, unless it is told
FIRST_LOOK_STEPS = 5.0  # of the reference: what watching the first step takes, on four jobs 4.1 to 6.5
ONE = Ratio(1.0, 1.0, 1.0)  # the reference against itself


@dataclasses.dataclass(frozen=True)
class Beside:
    """What a training takes beside its steps, under the reference and in seconds.

    Args:
        start: from the command until the first step: imports, the job's file, its model and its data.
        warmup: by which the first steps are slower than the later ones.
        evaluation: of the metric, once; `evaluations` are those of the whole training.
        checkpoint: to save one.
        end: to save the model once it is trained, and to end the process.
    """

    start: float = 0.0
    warmup: float = 0.0
    evaluation: float = 0.0
    evaluations: int = 0
    checkpoint: float = 0.0
    end: float = 0.0


@dataclasses.dataclass(frozen=True)
class Parts:
    """The seconds of one whole training, part by part."""

    start: float
    warmup: float
    steps: float
    evaluations: float
    checkpoints: float
    watching: float
    end: float

    @property
    def seconds(self) -> float:
        """Of all parts together."""
        beside = self.start + self.warmup + self.evaluations + self.checkpoints + self.watching + self.end
        return beside + self.steps


@dataclasses.dataclass(frozen=True)
class Length:
    """How long a training is: `steps` of `step_seconds` under the reference, and what is beside them.

    `steps` is None where the length is not known. It is done `runs` times; an epoch has `epoch_steps`.
    """

    steps: int | None
    step_seconds: float
    beside: Beside = dataclasses.field(default_factory=Beside)
    runs: int = 1
    epoch_steps: int | None = None

    def reference(self) -> Parts:
        """One training as it is; of one step where its length is not known."""
        return self._parts(1.0, self.beside.warmup, 1.0, watched=False)

    def under(self, speed: float, warmup_seconds: float, evaluating: float = 1.0) -> Parts:
        """One training under a plan with so many times as fast steps, and after such a warm-up.

        An evaluation takes `evaluating` times as long as under the reference.
        """
        return self._parts(speed, warmup_seconds, evaluating, watched=True)

    def _parts(self, speed: float, warmup_seconds: float, evaluating: float, *, watched: bool) -> Parts:
        beside, stepping = self.beside, (self.steps or 0) * self.step_seconds / speed
        evaluations = beside.evaluations * beside.evaluation * evaluating
        watching = 0.0
        if watched and self.steps:
            watching = max(WATCHED_SHARE * (stepping + evaluations), FIRST_LOOK_STEPS * self.step_seconds)
        until_saved = warmup_seconds + stepping + evaluations + watching
        saved = 1 + int(until_saved / (CHECKPOINT_SECONDS + beside.checkpoint))
        checkpoints = saved * beside.checkpoint
        return Parts(beside.start, warmup_seconds, stepping, evaluations, checkpoints, watching, beside.end)

    def seconds(self, ratio: Ratio, warmup_seconds: float, evaluating: float = 1.0) -> float:
        """Of one training under a plan; of one step where its length is not known.

        A warm-up that can hardly be told from the reference's counts as that.
        """
        if self.steps is None:
            return self.step_seconds / ratio.counts
        return self.under(ratio.counts, self._told_apart(warmup_seconds), evaluating).seconds

    def pays(self, ratio: Ratio, warmup_seconds: float, evaluating: float = 1.0) -> bool:
        """Does the training end sooner with the plan than without it?"""
        with_it = self.seconds(ratio, warmup_seconds, evaluating)
        return self.steps is None or with_it < self.reference().seconds

    def wins_from(self, later: tuple[Ratio, float], sooner: tuple[Ratio, float] | None = None) -> int | None:
        """The number of steps from which one plan ends before the other, or before the reference; None where
        it never does.

        Each is its ratio and its warm-up in seconds.
        """
        watched = (1 + WATCHED_SHARE) * self.step_seconds
        before = watched / sooner[0].counts if sooner is not None else self.step_seconds
        gained = before - watched / later[0].counts
        if gained <= 0:
            return None
        warmed = self._told_apart(later[1]) - self._told_apart(sooner[1] if sooner is not None else 0.0)
        steps = math.ceil(warmed / gained)
        if sooner is None:  # of a short run, watching takes what the first look takes
            looked = warmed + FIRST_LOOK_STEPS * self.step_seconds
            steps = max(steps, math.ceil(looked / (before - self.step_seconds / later[0].counts)))
        return max(1, steps + 1)

    def at_most_saved(self, speed: float, more: float) -> float:
        """Seconds of all runs, if steps that are so many times as fast became `more` times as fast again;
        of no use where the length is not known.
        """
        return self.runs * (self.steps or 0) * self.step_seconds / speed * (1 - 1 / max(more, 1e-9))

    def first_pass(self, speed: float) -> float:
        """What a plan loses that is so much faster from the second pass over the data on."""
        return min(self.epoch_steps or 0, self.steps or 0) * self.step_seconds * (1 - 1 / speed)

    def foretold(self, ratio: Ratio, warmup_seconds: float, evaluating: float = 1.0) -> dict[str, float]:
        """Seconds of one whole training under the ``reference`` and under the ``plan``.

        By the interval of its speed they are between ``plan_low`` and ``plan_high``, which a wide one moves
        apart: of that its lower end counts where plans are chosen, and its estimate here. Empty where the
        length of a training is not known.
        """
        if self.steps is None:
            return {}
        counted = {"plan": ratio.estimate, "plan_low": ratio.high, "plan_high": ratio.low}
        plans = {key: self.under(fast, warmup_seconds, evaluating).seconds for key, fast in counted.items()}
        return {"reference": self.reference().seconds, **plans}

    def _told_apart(self, warmup_seconds: float) -> float:
        return max(self.beside.warmup, warmup_seconds - START_SECONDS)
