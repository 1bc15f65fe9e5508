"""A step that overflows: does a plan that scales the loss really leave everything as it was?

No loss of a short verification need overflow, and a skipped step is no step to compare. So one is made.
"""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch

from vivace.job import Batch
from vivace.session.session import Session
from vivace.tensors.trees import same_numbers
from vivace.verifying.displacement import different_states
from vivace.verifying.rehearsal import DictatedLoss
from vivace.verifying.states import Snapshot, clone, optimizer_states, restore, state_of
from vivace.verifying.tap import Tap

ARRAYS = (torch.Tensor, numpy.ndarray)
SIMPLE = (bool, int, float, str, bytes, type(None), *ARRAYS)


def num_skipped(session: Session) -> int:
    """How many steps a session has skipped so far."""
    return int(session.build.facts.skipped_steps or 0)


def overflow_fault(session: Session, tap: Tap, start: Snapshot, batch: Batch, dictate: DictatedLoss) -> str:
    """What is wrong with how a session takes a step whose gradients are infinite, after one that are not.

    Of a session that skips steps; empty for any other one. Buffers may change: the forward pass has run.
    """
    if session.build.facts.skipped_steps is None or not dictate.slopes:
        return ""
    restore(session, start)
    tap.dictated, dictate.shards = dictate, session.build.shards
    session.forget()  # what was captured holds the job's own loss
    try:
        dictate.begin(0)
        session.step(clone(batch))
        weights, states, before = state_of(session), optimizer_states(session), num_skipped(session)
        dictate.phase.fill_(math.inf)
        tap.overflows = True
        session.step(clone(batch))
    finally:
        tap.dictated, tap.overflows, tap.pieces = None, False, []
        session.forget()
    if num_skipped(session) != before + 1:
        return "it scales the loss, and does not skip a step whose gradients overflow"
    now = state_of(session)
    now.buffers = weights.buffers
    if changed := different_states(now, weights):
        return f"a step that it skips changes {changed[0]}"
    if not same_values(optimizer_states(session), states):
        return "a step that it skips changes the optimizer's state"
    return ""


def same_values(mine: Any, theirs: Any) -> bool:
    """Are two states equal, in numbers, tensors, words, and what mappings and sequences hold of them?"""
    if isinstance(mine, ARRAYS) and isinstance(theirs, ARRAYS):
        return same_numbers(torch.as_tensor(mine).cpu(), torch.as_tensor(theirs).cpu())
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(same_values(mine[key], theirs[key]) for key in theirs)
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(mine) == len(theirs) and all(map(same_values, mine, theirs))
    simple = isinstance(mine, SIMPLE) or isinstance(theirs, SIMPLE)  # another object may not know its equal
    return not simple or mine == theirs or (mine != mine and theirs != theirs)
