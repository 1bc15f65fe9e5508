"""Are the batches that a plan feeds those of the job's own loader?"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from vivace.data.damage import Damage
from vivace.data.order import ordered
from vivace.job import Job
from vivace.session.opening import call
from vivace.session.session import Session
from vivace.tensors.trees import tensors

EPOCHS = 2
LEAST_BATCHES, MOST_BATCHES = 3, 256


def fed_otherwise(session: Session, job: Job, seconds: float) -> str:
    """How two epochs come otherwise than `train` would feed them, as far as `seconds` for each reach; else
    empty.

    What travels in another form is compared as the step gets it: both batches placed by the session.
    Nothing is read where no technique touches the batches.
    """
    for epoch in range(EPOCHS):

        def own(epoch: int = epoch) -> Any:
            return ordered(call(job, "data"), seed=0, epoch=epoch, damage=Damage(job.damaged))

        loader = own()
        fed = session.seams.batches(loader)
        if fed is loader:
            return ""
        if not _alike(session, fed, own(), time.perf_counter() + seconds):
            if not _alike(session, own(), own(), time.perf_counter() + seconds):
                return "your data come otherwise each time that they are read: their shuffle needs a seed"
            return "it feeds other batches, or in another order"
    return ""


def _alike(session: Session, fed: object, own: object, deadline: float) -> bool:
    missing = object()
    pairs = itertools.zip_longest(iter(fed), iter(own), fillvalue=missing)  # type: ignore[call-overload]
    for number, (mine, theirs) in enumerate(pairs):
        if number >= MOST_BATCHES or (number >= LEAST_BATCHES and time.perf_counter() > deadline):
            known = _length(fed), _length(own)
            return None in known or known[0] == known[1]
        if mine is missing or theirs is missing:
            return False
        if not _equal(mine, theirs) and not _equal(session.place(mine), session.place(theirs)):
            return False
    return True


def _equal(mine: object, theirs: object) -> bool:
    a, b = list(tensors(mine)), list(tensors(theirs))
    return len(a) == len(b) and all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


def _length(batches: object) -> int | None:
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None
