"""The answer of `vivace verify`, as data."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

from vivace import words
from vivace.pages.answer import Answer
from vivace.pages.sameness import sameness
from vivace.verifying.judgement import sentence_of


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Was the plan's promise kept? None: that could not be judged, and `reason` says why.

    `loss_envelopes` and `displacement_envelopes` are the largest distances from the reference, of losses and
    of everything else, in units of what rounding alone causes; `checks` holds every figure; `curves` the loss
    curves; `first` where a broken promise shows first: ``{quantity, layer, step}``, the layer None where it
    is the whole model. `ranks`: so many processes trained together under the plan. `fed`: where a technique
    touches the batches, of the passes over ``data``, and over ``validation`` as the metric reads it, how many
    ``batches`` were compared with the job's own, and whether these were the ``whole``. `bias`: over how many
    ``pairs`` of gradients a plan that rounds was tested for bias, or why it is ``not_tested``. `details`:
    what was left out and does not bear on the answer. `seconds`: what all of it took.
    """

    kept: bool | None
    promise: str
    loss_envelopes: float
    displacement_envelopes: float
    steps: int
    seeds: int
    reason: str
    seconds: float = 0.0
    checks: tuple[dict[str, Any], ...] = ()
    num_checks: int = 0
    curves: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    metric: dict[str, Any] | None = None
    first: dict[str, Any] | None = None
    ranks: int = 1
    fed: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    bias: dict[str, Any] = dataclasses.field(default_factory=dict)
    details: tuple[str, ...] = ()

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self:
        """The verdict that a document holds, as another process gave it."""
        found = dict(document)
        for key in {"checks", "details"} & found.keys():
            found[key] = tuple(found[key])
        return cls(**found)

    @property
    def judged(self) -> bool:
        """Is there an answer? Without one the promise is neither kept nor broken."""
        return self.kept is not None

    def reason_beside(self, sentence: str) -> str:
        """The reason, without what `sentence` says already; empty where that is all of it."""
        broken = [check for check in self.checks if check["kept"] is False and check["limit"]]
        worst = max(broken, key=lambda check: check["score"] / check["limit"], default=None)
        named = sentence_of(worst) if worst and math.isfinite(worst["score"]) else ""  # as `sameness` says
        return words.unless_said(words.less(self.reason, named), sentence)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from vivace.pages.render import card  # only then: a template engine

        sentence = sameness(self.to_dict())
        told = self.reason_beside(sentence)
        answer = Answer(
            command="verify",
            subject="",
            sentence=sentence,
            tone="open" if self.kept is None else "good" if self.kept else "bad",
            notes=(told,) if told else (),
            facts=(
                ("promised", self.promise.upper()),
                ("checks", words.number(self.num_checks)),
                ("steps of each run", words.number(self.steps)),
                ("it took", words.duration(self.seconds)),
            ),
        )
        return card(answer)

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace verify --json`` prints."""
        return dataclasses.asdict(self)
