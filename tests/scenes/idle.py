"""A job, and a technique that changes nothing."""

import dataclasses

import vivace
from vivace import Card, Numerics, Refused, Stage, Technique
from vivace.testing import jobs

job = jobs.mlp()


@vivace.register
@dataclasses.dataclass(frozen=True)
class PlantedIdle(Technique):
    name = "planted_idle"
    card = Card(Stage.MODEL, Numerics.EXACT, "changes nothing", "tests")

    def apply(self, build):
        pass

    def confirm(self, seen, reference):
        raise Refused("it changed nothing: every step is as before")
