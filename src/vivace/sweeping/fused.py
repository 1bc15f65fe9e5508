"""The parent's side of trials that are trained as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vivace.errors import VivaceError
from vivace.sweeping.study import Asked

if TYPE_CHECKING:
    from vivace.sweeping.runs import Runs

Shape = tuple[tuple[str, Any], ...]  # the parameters that decide who may share a stack, by name


class Fused:
    """Trials of one stack, as the child tells of them; `further` ones may follow in their places, and as many
    again where the search comes to this shape next. None: any number.
    """

    def __init__(
        self, owner: Runs, together: Sequence[Asked], shape: Shape, further: int | None = None
    ) -> None:
        self.owner, self.shape = owner, shape
        self._members: dict[int, Asked] = {}
        self._curves: dict[int, dict[int, float]] = {}
        self._seconds: dict[int, float] = {}
        self._most: dict[int, int] = {}
        self._enter(together)
        self._left = self._further = further
        self._places = 0  # in the stack, when it has begun; whoever is refused leaves none
        self._drawn: list[Asked] = []  # that follow next
        self._joined = 0  # as many, the last time

    def told(self, asked: Asked) -> dict[str, Any]:
        """A trial as the child takes it."""
        out = self.owner.folder.trial(asked.number)
        seed = self.owner.study.setting.seed
        return {"number": asked.number, "parameters": asked.parameters, "out": str(out), "seed": seed}

    def heard(self, question: dict[str, Any]) -> dict[str, Any]:
        """What an epoch brought; returns which trials are pruned, and which ones take free places."""
        self.owner.decided(question["decision"], self.shape)
        self._places = self._places - len(question["refused"]) if self._places else question["fused"]
        pruned = []
        for one in question["rows"]:
            number = one["number"]
            self._seconds[number] += question["seconds"]
            self._most[number] = max(self._most[number], question["fused"])
            if one["error"] is not None:
                self._fail(number, VivaceError.from_dict(one["error"]))
                continue
            self._curves[number][one["epoch"]] = one["metric"]
            stop = self.owner.study.report(number, one["epoch"], one["metric"]) and not one["ended"]
            if stop or one["ended"]:
                self._end(number, one, question["decision"], pruned=stop)
            pruned += [number] if stop else []
        self._apart(question)
        join = [self.told(asked) for asked in self._following()]
        return {"prune": pruned, "join": join, "best": self.owner.best_metric}

    def end(self, answer: dict[str, Any]) -> None:
        """The child has come to its end; whoever has not is run alone."""
        self.owner.decided(answer["decision"], self.shape)
        self._apart(answer)
        self._give_back()

    def broken(self, error: VivaceError) -> None:
        """The process of the stack died: that is no fault of any one trial, and all are run alone."""
        reason = f"its process failed: {error}"
        self.owner.decided({"fused": False, "reason": reason, "rows": len(self._members)}, self.shape)
        self._give_back()

    def _give_back(self) -> None:
        self.owner.run_alone(list(self._members.values()))
        self.owner.wait(self._drawn)

    def draw(self) -> None:
        """Draw what is to follow next, while the child trains: else it would wait for that."""
        wanted = self._joined if self._left is None else min(self._joined, self._left)
        self._drawn += self.owner.alike(self.shape, max(0, wanted - len(self._drawn)))

    def _following(self) -> list[Asked]:
        """Those that take the places that are free, also the ones that stood empty for a while."""
        free = self._places - len(self._members)
        if self._left is not None:
            if free > self._left and self.owner.goes_on(self.shape):
                self._left += self._further or 0
            free = min(free, self._left)
            self._left -= free
        joining, self._drawn = self._drawn[:free], self._drawn[free:]
        joining += self.owner.alike(self.shape, free - len(joining))
        self._joined = len(joining)
        self._enter(joining)
        return joining

    def _enter(self, some: Sequence[Asked]) -> None:
        for asked in some:
            self._members[asked.number] = asked
            self._curves[asked.number] = self.owner.study.curve(asked.number)
            self._seconds[asked.number], self._most[asked.number] = 0.0, 1

    def _apart(self, found: dict[str, Any]) -> None:
        """Those that cannot be part of the stack are run alone; those that cannot be built have failed."""
        for number, error in found["failed"].items():
            self._fail(int(number), VivaceError.from_dict(error))
        self.owner.run_alone([self._members.pop(int(number)) for number in found["refused"]])

    def _fail(self, number: int, error: VivaceError) -> None:
        asked = self._members.pop(number)
        self.owner.failed(asked, error, self._curves[number], self._seconds[number])

    def _end(self, number: int, one: dict[str, Any], decision: dict[str, Any], *, pruned: bool) -> None:
        facts = {"fused": self._most[number], "sameness": decision["sameness"]}
        answer = {"pruned": pruned, "metric": one["metric"], "epoch": one["epoch"], "facts": facts}
        answer |= {"step_seconds": decision["alone_step_seconds"], "num_parameters": one["num_parameters"]}
        answer |= {"of_epochs": one["of_epochs"]}
        asked = self._members.pop(number)
        self.owner.ended(asked, answer, self._curves[number], self._seconds[number])
