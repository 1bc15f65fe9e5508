"""The answer of `vivace advise`, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vivace.advising.choose import Against, Offer
from vivace.advising.question import Amount
from vivace.advising.source import Subject
from vivace.errors import AnswerIsNo

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Advice:
    """The answer: offers in order, the picks among those that meet budget and deadline, and what to know.

    `hints` are what a person should know before anything else, `notes` what is doubtful.
    `refusals` say by an offer's name what speaks against it, None where nothing does; `asked` are offers of
    the cards that people ask about; `probability` is that with which budget and deadline are kept; `how` says
    in what precision is predicted; `here` is this machine's own card, and `profiled_on` that of the profile
    where it is another one: neither has a price.
    """

    subject: Subject
    amount: Amount
    budget_usd: float | None
    deadline_seconds: float | None
    offers: tuple[Offer, ...]
    allowed: tuple[Offer, ...]
    refusals: Mapping[str, Against | None]
    asked: tuple[Offer, ...]
    probability: float
    how: str
    picks: dict[str, Offer]
    pareto: tuple[Offer, ...]
    scaling: tuple[dict[str, Any], ...]
    buying: tuple[dict[str, Any], ...]
    here: Offer | None
    profiled_on: Offer | None
    hints: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    errors: Mapping[str, Any]
    page_path: str | None = None

    @property
    def exit_code(self) -> int:
        """0, or 1 where no offer meets budget and deadline."""
        return 0 if self.allowed else AnswerIsNo.exit_code

    def told_against(self, offer: Offer) -> str:
        """What speaks against an offer, in words; empty where nothing does."""
        return str(self.refusals[offer.name] or "")

    def to_dict(self) -> dict[str, Any]:
        """The document that ``vivace advise --json`` prints."""
        subject = self.subject
        return {
            "format": FORMAT,
            "subject": {
                "name": subject.name,
                "counted": subject.counted,
                "batch_size": subject.batch_size,
                "num_parameters": subject.demand.num_parameters,
                "flops_per_sample": subject.demand.flops,
                "bytes_per_sample": subject.demand.bytes,
            },
            "amount": dataclasses.asdict(self.amount),
            "budget_usd": self.budget_usd,
            "deadline_seconds": self.deadline_seconds,
            "probability": self.probability,
            "how": self.how,
            "offers": [
                {**offer.to_dict(), "reason_against": self.told_against(offer) or None}
                for offer in self.offers
            ],
            "asked": [offer.name for offer in self.asked],
            "allowed": [offer.name for offer in self.allowed],
            "picks": {name: offer.name for name, offer in self.picks.items()},
            "pareto": [offer.name for offer in self.pareto],
            "scaling": list(self.scaling),
            "buy_or_rent": list(self.buying),
            "here": self.here.to_dict() if self.here else None,
            "profiled_on": self.profiled_on.to_dict() if self.profiled_on else None,
            "hints": list(self.hints),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "errors": dict(self.errors),
            "page_path": self.page_path,
        }
