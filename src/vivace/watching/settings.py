"""Which weights train, and how the optimizer updates them: a plan has no reason to change that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vivace.session.session import Session
from vivace.torch_internals.tensors import version_of
from vivace.verifying.facts import Facts, difference, facts_of_session
from vivace.verifying.masks import Unlike
from vivace.watching.twin import Before, Twin
from vivace.watching.written import code_of_optimizers

BY_SCHEDULERS = ("lr", "momentum", "betas")  # what torch's own change in a group of the optimizer
OWN_OPTIMIZER = "a step sets what its optimizer does by a name of its own, and not in the one of its model"


class Settings:
    """Of the optimizers of a run, as its first watched step found them."""

    def __init__(self) -> None:
        self._first: Facts | None = None
        self._own: set[str] = set()  # what the job's own optimizer changes in a step

    def fault(self, session: Session, twin: Twin, before: Before) -> str:
        """What differs from the job's; empty where nothing does.

        What schedulers change is left out, and what the job's own optimizer changes in a step. One of a class
        that is not torch's may do so in any step, by the names in its code, and a schedule that is not
        torch's between any two.
        """
        now, repeated = facts_of_session(session), facts_of_session(twin.session)
        trained = {name: value for name, value in repeated.items() if name.startswith("requires_grad")}
        if fault := difference(now, trained, only_shared=True):
            return fault
        self._own |= {name for name, value in repeated.items() if value != before.settings.get(name)}
        if self._first is None:
            first = before.settings if before.snapshot.position else twin.settings
            left_out = (*BY_SCHEDULERS, "requires_grad") if twin.scheduler is not None else ("requires_grad",)
            written = code_of_optimizers(twin.session.optimizers).items
            self._first = {
                name: value
                for name, value in first.items()
                if not name.startswith(left_out) and name.partition(" of ")[0] not in written
            }
        if twin.schedules_freely:
            return ""
        known = {name: value for name, value in self._first.items() if name not in self._own}
        return difference(before.settings, known, only_shared=True)


@contextmanager
def untouched(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, steps are repeated on other optimizers. Raises Unlike where they write the settings of these,
    if only what is there already; these are put back.
    """
    groups = [group for one in optimizers for group in one.param_groups]
    then = [dict(group) for group in groups]
    for group in groups:  # anything that is written is another object, or a tensor of another version
        group.update({key: _another(value) for key, value in group.items()})
    marked = [_marks(group) for group in groups]
    try:
        yield
    finally:
        written = [_marks(group) for group in groups] != marked
        for group, held in zip(groups, then, strict=True):
            group.clear()
            group.update(held)
    if written:
        raise Unlike(OWN_OPTIMIZER)


def _another(value: Any) -> Any:
    """An equal one, so that it is seen if another is put in its place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is tuple:
        return (*value,)  # a new one, as `tuple(value)` is not
    return value * 1.0 if type(value) is float else value


def _marks(group: dict[str, Any]) -> list[tuple[str, int, int]]:
    versions = {key: version_of(value) for key, value in group.items() if isinstance(value, torch.Tensor)}
    return [(key, id(value), versions.get(key, 0)) for key, value in group.items()]
