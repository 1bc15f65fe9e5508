"""A session that goes on from a checkpoint of another one, as a resumed `train` does.

The checkpoint is a file, written and read by the code that writes and reads those of a run: what does not
outlive that is lost here too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from vivace.errors import CheckpointError, FolderError
from vivace.session.session import Session
from vivace.tensors.outside import assign, attributes
from vivace.tensors.randomness import Streams
from vivace.training.checkpoints import Checkpoints, Found, Position
from vivace.training.resuming import load_into
from vivace.training.resuming import state_of as saved_state_of
from vivace.verifying.states import Snapshot, kept_states, optimizer_states, owners_of, restore, state_of


def resume(session: Session, opened: Callable[[], Session], own: Session | None = None) -> Session:
    """A new session, which `opened` makes, that goes on from a checkpoint of `session`.

    What the job itself does not save, such as a buffer that is not persistent, no plan can keep: that is
    handed over in memory where `own`, a session of the job without a plan, is given, and so is everything
    where that one's state cannot be stored either, where ranks hold parts of weights, or the disk is full.

    Raises CheckpointError where the state cannot be stored or does not come back.
    """
    if session.build.shards is not None:
        return _through_memory(session, opened)
    with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
        try:
            found = _saved(Path(folder), session)
        except FolderError:
            return _through_memory(session, opened)
        except CheckpointError:
            if own is None or _can_save(own):
                raise
            return _through_memory(session, opened)
        with Streams(0, session.build.device):
            again = opened()
        try:
            _load(found, again)
        except CheckpointError:
            again.close()
            if own is None or _can_save(own):
                raise
            return _through_memory(session, opened)
    if own is not None:
        _hand_over_unsaved(session, again, own)
    return again


def _saved(folder: Path, session: Session) -> Found:
    """A checkpoint of the session, as it was written and read again."""
    checkpoints = Checkpoints(folder, {})
    state = {
        "optimizer": saved_state_of(session.optimizer),
        "scheduler": None,
        "techniques": saved_state_of(session.build.kept),
        "streams": [],
    }
    checkpoints.save(Position(), saved_state_of(session.built), state)
    found = checkpoints.newest()
    assert found is not None
    return found


def _load(found: Found, session: Session) -> None:
    load_into(session.built, found.model, "the model")
    load_into(session.optimizer, found.state["optimizer"], "the optimizer")
    load_into(session.build.kept, found.state["techniques"], "the plan's techniques")


def _can_save(session: Session) -> bool:
    """Can a session's state be stored and read back?"""
    with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
        try:
            _saved(Path(folder), session)
        except (CheckpointError, FolderError):
            return False
    return True


def _hand_over_unsaved(session: Session, again: Session, own: Session) -> None:
    """Copy the buffers that no `state_dict` holds, and the attributes that are the job's `own`."""
    owners, kept = owners_of(again), attributes(owners_of(session))
    known = attributes(owners).keys() & attributes(owners_of(own)).keys()
    assign(owners, {key: value for key, value in kept.items() if key in known})
    with torch.no_grad():
        for mine, new in zip(session.build.models, again.build.models, strict=True):
            saved, buffers = mine.state_dict().keys(), dict(mine.named_buffers())
            for name, buffer in new.named_buffers():
                if name not in saved and name in buffers:
                    buffer.copy_(buffers[name])


def _through_memory(session: Session, opened: Callable[[], Session]) -> Session:
    state, optimizers = state_of(session), optimizer_states(session)
    kept = kept_states(session)
    with Streams(0, session.build.device):
        again = opened()
    restore(again, Snapshot(state, optimizers, 0, {}))
    for name, held in again.build.kept.items():
        held.load_state_dict(kept[name])
    return again
