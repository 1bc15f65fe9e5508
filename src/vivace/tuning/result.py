"""What a tune run returns and writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vivace.errors import AnswerIsNo
from vivace.ledger import Outcome, Ratio, Trial
from vivace.plan import Plan
from vivace.tuning.ranks import chosen, joined
from vivace.verifying import Verdict


@dataclasses.dataclass(frozen=True)
class LongPlan:
    """A plan whose steps are faster than the chosen one's, and whose warm-up this training is too short for.

    `from_steps` is the number of steps from which a training ends sooner with it, all compiled anew;
    `verified` says whether its promise was judged, and kept.
    """

    plan: Plan
    plan_path: str
    speedup: Ratio
    warmup_seconds: float
    from_steps: int
    verified: bool

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {**vars(self), "plan": self.plan.to_dict(), "speedup": dataclasses.asdict(self.speedup)}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> LongPlan:
        """Rebuild it from `to_dict`'s document."""
        rebuilt = {"plan": Plan.from_dict(document["plan"]), "speedup": Ratio(**document["speedup"])}
        return cls(**(document | rebuilt))


@dataclasses.dataclass(frozen=True)
class Result:
    """The plan, how much faster than strict fp32 it is, and whether it trains the same model.

    `baselines` are samples a second; None where the device has no such mode. `waterfall` is the cumulative
    ratio as each technique of the plan is added, in the order of their stages. `outcome` says how the search
    ended, and `reason` why the plan is the reference, where it is. `input_pipeline` is the ratio that one
    cached batch instead of the loader would bring to the ``reference`` and to the ``plan``.

    `job_steps` are those of a whole training, where its length is known; `training_seconds` is what that
    takes from the command to its end under the ``reference`` and under the ``plan``, from ``plan_low`` to
    ``plan_high`` by the interval of its speed, and `training_parts` tells of which parts (see `Parts`) it is
    the sum. `warmup_seconds` is the warm-up that `train` meets next on this machine,
    `cold_warmup_seconds` the one where nothing is compiled yet; `break_even_steps` counts the steps after
    which the former has paid for itself. `long_plan` wins where the training is longer.

    `reference` is the empty plan, unless the job runs out of memory under that. `loading` says whether the
    machine can feed the step, and what helped it; it is empty where that was no limit. `has_metric` says
    whether the job can be verified by its metric, `metric_data` whether that is of ``validation`` or
    ``training`` data. Of several `ranks` the figures are of all together, `reference` holds what makes them
    train one model, and under it they are `over_one_rank` times as fast as one. `memory_bytes` is the
    largest peak that was allowed, if there was a limit. `more_time` is the budget, such as ``5m``, that says
    more, where the given one ended before what is likely to help was tried. `crowded`: did others compute on
    the processor, so that plans were timed and verified on one thread?
    """

    plan: Plan
    plan_path: str
    speedup: Ratio
    baselines: dict[str, float | None]
    baseline_notes: dict[str, str]
    verdict: Verdict | None
    break_even_steps: int | None
    input_pipeline: dict[str, Ratio]
    waterfall: list[dict[str, Any]]
    trials: list[Trial]
    report_path: str
    seconds: float
    outcome: Outcome
    interrupted: bool = False
    reason: str = ""
    reference: Plan = dataclasses.field(default_factory=Plan)
    job_steps: int | None = None
    loading: str = ""
    has_metric: bool = False
    metric_data: str | None = None
    warmup_seconds: float | None = None
    cold_warmup_seconds: float | None = None
    training_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    training_parts: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    long_plan: LongPlan | None = None
    ranks: int = 1
    over_one_rank: float | None = None
    memory_bytes: int | None = None
    more_time: str = ""
    crowded: bool = False

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Result:
        """Rebuild a result from `to_dict`'s document."""
        verdict, longer = document["verdict"], document["long_plan"]
        derived = ("does", "promise")
        rebuilt = {
            "plan": Plan.from_dict(document["plan"]),
            "speedup": Ratio(**document["speedup"]),
            "verdict": verdict and Verdict.of(verdict),
            "input_pipeline": {key: Ratio(**ratio) for key, ratio in document["input_pipeline"].items()},
            "trials": [Trial.from_dict(trial) for trial in document["trials"]],
            "outcome": Outcome(document["outcome"]),
            "reference": Plan.from_dict(document["reference"]),
            "long_plan": longer and LongPlan.from_dict(longer),
        }
        return cls(**{key: value for key, value in (document | rebuilt).items() if key not in derived})

    @property
    def exit_code(self) -> int:
        """What a command ends with: 130 interrupted, 1 where nothing could be said of the job, else 0."""
        return 130 if self.interrupted else 0 if self.outcome.answered else AnswerIsNo.exit_code

    @property
    def promise(self) -> str:
        """The largest change of numbers that the plan admits: exact, rounding or semantics."""
        return self.verdict.promise if self.verdict is not None else self.plan.promise.name.lower()

    def _repr_html_(self) -> str:
        """What a notebook shows: the answer of its page."""
        from vivace.pages.render import card  # only then: a template engine
        from vivace.reporting.answering import answer
        from vivace.reporting.content import Content

        content = Content(
            folder=Path(self.report_path).parent,
            trials=tuple(self.trials),
            run={"command": "vivace.tune(job)"},
            profile={},
            result=self.to_dict(),
            verdict=self.verdict.to_dict() if self.verdict is not None else {},
            metrics=(),
            training={},
        )
        return card(answer(content))

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace tune --json`` prints."""
        return {
            "plan": self.plan.to_dict(),
            "does": self.plan.does,
            "plan_path": self.plan_path,
            "speedup": dataclasses.asdict(self.speedup),
            "baselines": self.baselines,
            "baseline_notes": self.baseline_notes,
            "promise": self.promise,
            "verdict": self.verdict.to_dict() if self.verdict is not None else None,
            "break_even_steps": self.break_even_steps,
            "input_pipeline": {key: dataclasses.asdict(ratio) for key, ratio in self.input_pipeline.items()},
            "waterfall": self.waterfall,
            "trials": [trial.to_dict() for trial in self.trials],
            "report_path": self.report_path,
            "seconds": self.seconds,
            "outcome": self.outcome,
            "interrupted": self.interrupted,
            "reason": self.reason,
            "reference": self.reference.to_dict(),
            "job_steps": self.job_steps,
            "loading": self.loading,
            "crowded": self.crowded,
            "has_metric": self.has_metric,
            "metric_data": self.metric_data,
            "warmup_seconds": self.warmup_seconds,
            "cold_warmup_seconds": self.cold_warmup_seconds,
            "training_seconds": self.training_seconds,
            "training_parts": self.training_parts,
            "long_plan": self.long_plan.to_dict() if self.long_plan is not None else None,
            "ranks": self.ranks,
            "over_one_rank": self.over_one_rank,
            "memory_bytes": self.memory_bytes,
            "more_time": self.more_time,
        }


def waterfall(
    plan: Plan, confirmed: Ratio, measured: Mapping[str, Trial], needed: Plan
) -> list[dict[str, Any]]:
    """The ratio as one technique of `plan` after the other is added to what is `needed`, in the order of
    their stages.

    Techniques between two measured plans share a step; the last step is the plan's `confirmed` ratio.
    """
    steps, waiting = [], list[str]()
    for prefix, name in zip(prefixes(plan, needed), [one.name for one in chosen(plan, needed)], strict=True):
        waiting.append(name)
        trial = measured.get(prefix.id)
        ratio = confirmed if prefix == plan else trial.ratio if trial is not None else None
        if ratio is not None:
            steps.append({"step": " + ".join(waiting), "ratio": dataclasses.asdict(ratio)})
            waiting = []
    return steps


def prefixes(plan: Plan, needed: Plan) -> list[Plan]:
    """What is needed with the first technique that is not, with the first two, and so on up to the plan."""
    added = chosen(plan, needed)
    return [joined(needed, Plan(added[: count + 1])) for count in range(len(added))]
