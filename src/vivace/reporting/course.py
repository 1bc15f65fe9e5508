"""The metric of a training over the minutes in which a person waited for it."""

from __future__ import annotations

import dataclasses

from vivace import words
from vivace.reporting import phrases
from vivace.reporting.content import Content


@dataclasses.dataclass(frozen=True)
class Course:
    """What a training is called, and its metric at times: `seconds` since it began, higher is better."""

    name: str
    seconds: tuple[float, ...] = ()
    metrics: tuple[float, ...] = ()

    @property
    def points(self) -> list[tuple[float, float]]:
        """Minutes and metrics."""
        return [(seconds / 60, metric) for seconds, metric in zip(self.seconds, self.metrics, strict=True)]

    def reached(self, metric: float) -> float | None:
        """The seconds after which the metric was first as high; None where it never was."""
        pairs = zip(self.seconds, self.metrics, strict=True)
        return next((seconds for seconds, found in pairs if found >= metric), None)

    def against(self, other: Course, metric: str) -> str:
        """When this training and when the other first had a metric that both reach: the lower of the last."""
        target = min(self.metrics[-1], other.metrics[-1])
        mine, its = self.reached(target), other.reached(target)
        assert mine is not None  # its own last metric is as high
        assert its is not None
        return (
            f"{metric} {words.number(target)} after {words.duration(mine)}; the other training took "
            f"{words.duration(its)}"
        )


def course(content: Content) -> Course:
    """The course of a run, whose lines count the seconds of all its processes; empty where they say none, as
    older runs' do.
    """
    told = [(words.real(line.get("seconds")), words.real(line.get("metric"))) for line in content.metrics]
    known = [(at, metric) for at, metric in told if at is not None and metric is not None]
    plan = content.training.get("plan")
    named = phrases.plan_name(plan) if isinstance(plan, dict) else content.folder.name
    return Course(named, tuple(at for at, _ in known), tuple(metric for _, metric in known))
