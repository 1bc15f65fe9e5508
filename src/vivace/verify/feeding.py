"""Are the batches that a plan feeds those of the job's own loader?"""

from __future__ import annotations

import itertools
import time

import torch

from vivace.engine.damage import Damage
from vivace.engine.opening import call
from vivace.engine.order import ordered
from vivace.engine.session import Session
from vivace.job import Job
from vivace.surgery import tensors

EPOCHS = 2
LEAST_BATCHES, MOST_BATCHES = 3, 256


def fed_alike(session: Session, job: Job, seconds: float) -> bool:
    """Do two epochs come bit for bit as `train` would feed them, as far as `seconds` for each reach?

    What travels in another form is compared as the step gets it: both batches placed by the session.
    Nothing is read where no technique touches the batches.
    """
    for epoch in range(EPOCHS):
        damage = Damage(job.damaged)
        loader = ordered(call(job, "data"), seed=0, epoch=epoch, damage=damage)
        fed = session._batches(loader)
        if fed is loader:
            return True
        own = ordered(call(job, "data"), seed=0, epoch=epoch, damage=damage)
        if not _alike(session, fed, own, time.perf_counter() + seconds):
            return False
    return True


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
