"""A run as its folder keeps it: opened where the newest checkpoint stands, and saved into new ones."""

from __future__ import annotations

import dataclasses
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vivace.errors import CheckpointError, FolderError
from vivace.events import EventKind, OnEvent
from vivace.job import Job
from vivace.pictures import PICTURES
from vivace.plan import Plan
from vivace.session.opening import parts_of, seed_everything
from vivace.session.session import Session
from vivace.tensors.outside import MOST_ENTRIES, MOST_NUMBERS
from vivace.tensors.randomness import capture, derive, to_plain
from vivace.training.beside import Beside, make_room
from vivace.training.checkpoints import Checkpoints, Found, Position
from vivace.training.course import Fresh, course_of, doubt_of_schedule
from vivace.training.feed import DAMAGED, Feed
from vivace.training.finite import are_finite
from vivace.training.folder import LEDGER
from vivace.training.options import Options
from vivace.training.progress import ListenerFailed, Progress
from vivace.training.ranks import Ranks, Stranded
from vivace.training.resuming import (
    compare,
    facts_of,
    load_beside,
    load_gradients,
    load_into,
    load_streams,
    measure_alike,
    require_storable,
    schedule_of,
    state_of,
    whole_state_of,
)
from vivace.training.strides import Strides
from vivace.training.unapplied import Unapplied
from vivace.training.watch import Watch

GRACE_SECONDS = 30.0  # of torchrun, between SIGTERM and SIGKILL
_RESULTS = ("run.json", "model.pt", PICTURES)
HELD = (
    f"no generators, and only plain attributes of at most {MOST_NUMBERS:,} numbers or {MOST_ENTRIES:,} parts"
)
DAMAGED_IN_VALIDATION = "damaged_validation.jsonl"


class Keeping(Strides):
    """The steps of a run that begins where its folder's newest checkpoint stands, and can be saved.

    Whoever leads it says when to save, and notes which steps went wrong (`bad_looks`, `between_steps`).
    """

    def __init__(
        self,
        job: Job,
        session: Session,
        ranks: Ranks,
        path: Path,
        options: Options,
        on_event: OnEvent | None,
        watch: Watch,
    ) -> None:
        super().__init__(session, ranks, watch)
        self.job, self.path, self.options = job, path, options
        self.device = session.build.device
        changed, seed, run = options.changed == "ok", options.seed, weakref.proxy(self)

        def tell(text: str) -> None:  # that holds no run, and with it no model, when that is over
            run.progress.notice(text)

        self.feed = Feed(job, ranks, seed, path, tell, changed=changed)
        self.damage = self.feed.damage
        self.scheduler = schedule_of(job, session.optimizer)
        if ranks.rank:
            seed_everything(derive(options.seed, "rank", ranks.rank))
        facts = facts_of(session, self.feed.own_loader, options.seed, ranks.world_size)
        facts["course"] |= course_of(job, session.optimizers or session.optimizer, self.scheduler)
        captured = any(technique.card.captures for technique in session.plan.techniques)
        alone = ranks.world_size == 1
        self.beside = Beside(session.build.models, session.optimizers, captured=captured, plain=alone)
        own = session.optimizers or session.optimizer if session.build.own_step else None
        self.unapplied = Unapplied(parts_of(own, torch.optim.Optimizer))
        self.checkpoints = Checkpoints(path / "checkpoints", facts, path / LEDGER)
        facts["metric_of"] = [job.metric_name, job.metric_data]  # which manifests of earlier versions lack
        found = None if options.restart else self.checkpoints.newest()
        notice = compare(found.manifest, facts, path, changed_ok=changed) if found is not None else ""
        self.resumed_from_step = found.position.step if found is not None else None
        self.saved, self.seconds_before = Position(), 0.0
        self.held = (found.manifest["held"], not notice) if found is not None else (None, False)
        self.lost_streams, self.begun_anew = list[int](), list[str]()  # ranks; attributes that had changed
        if found is not None:
            self.take_up(found)
        else:
            self.require_storable()
            self.damage.before = 0
        where = path if ranks.writes else None
        log_bytes, on_gpus = self.position.log_bytes, self.device.type == "cuda"
        self.progress = Progress(where, self.position.step, log_bytes, on_event, on_gpus=on_gpus)
        if found is not None:
            self.progress.tell(EventKind.RESUME, step=self.position.step)
        for reason in found.skipped if found is not None else ():
            self.progress.notice(f"skipped a checkpoint: {reason}")
        for text in filter(None, (notice, *self._lost(), doubt_of_schedule(job, self.scheduler))):
            self.progress.notice(text)
        self.begin()
        self.between_steps = True  # not in one that has changed what cannot be put back
        self.bad_looks, self.slowest_save = 0, 0.0  # looks in a row, at numbers not finite or far too large
        self.saved_at = self.started_at = time.monotonic()

    def take_folder(self) -> None:
        """What lies in the folder is this run's from here on. Called once all ranks could be built: what was
        trained before goes only now.
        """
        if not self.ranks.writes:
            return
        if self.resumed_from_step is None:
            if self.options.restart:
                self.checkpoints.clear()
            for name in (*_RESULTS, DAMAGED, DAMAGED_IN_VALIDATION):
                (self.path / name).unlink(missing_ok=True)
        self.ranks.begin(str(self.path))  # a later attempt of this launch goes on with what is there
        self.session.plan.save(self.path / "plan.toml")

    def _lost(self) -> Iterator[str]:
        """What a checkpoint did not hold, a sentence each."""
        if self.lost_streams:
            ranks = ", ".join(map(str, self.lost_streams))
            lost = f"the random streams of rank {ranks} were lost with it, and begin anew"
            yield f"resumed, not bit-exact: {lost}"
        if self.begun_anew:
            names = ", ".join(map(repr, self.begun_anew[:3]))
            more = f" and {len(self.begun_anew) - 3} more" if len(self.begun_anew) > 3 else ""
            told = f"attributes that training had changed begin anew ({names}{more})"
            yield f"resumed, not bit-exact where steps read them: {told}, as a checkpoint holds {HELD}"

    def require_storable(self) -> None:
        """Raises JobError where a checkpoint could not hold the present state, and CheckpointError where
        nothing could go on from it.
        """
        if self.session.build.shards is None:
            require_storable(self.session.built, self.session.optimizer, self.scheduler)
        self._require_fitting()

    def _require_fitting(self) -> None:
        if text := self.beside.unfit():
            kept = f"; step_{self.saved.step} stays" if self.saved.step else ""
            raise CheckpointError(
                f"no run could go on from a checkpoint of step {self.position.step}: {text}{kept}"
            )

    def is_healthy(self) -> bool:
        """Are the loss and all trained weights finite? Frozen ones may be a mask of -inf."""
        weights = [p for m in self.session.build.models for p in m.parameters() if p.requires_grad]
        return self.bad_looks == 0 and all(are_finite(weights, self.session.build.shards))

    def save(self) -> None:
        """A checkpoint of this step. All ranks call it together."""
        began = time.monotonic()
        self._keep(self.watch.aside() or self.session.plan)
        self.checkpoints.facts["held"] = self.watch.holds(self.session, self.position)
        self.ranks.at(f"the checkpoint of step {self.position.step}", self.position.step)
        streams = self.ranks.gather(to_plain(capture(self.device)))
        self.position.log_bytes, self.position.seconds = self.progress.num_bytes, round(self.seconds, 3)
        model, state = self.model_state(), self._state(streams)
        with self.ranks.together():
            if self.ranks.writes:
                path = self.checkpoints.save(self.position, model, state)
                seconds = time.monotonic() - began
                self.progress.tell(
                    EventKind.CHECKPOINT, step=self.position.step, path=str(path), seconds=seconds
                )
        self.saved = dataclasses.replace(self.position)
        self.saved_at = time.monotonic()
        seconds = self.saved_at - began
        if "TORCHELASTIC_RUN_ID" in os.environ and seconds > GRACE_SECONDS >= self.slowest_save:
            self.progress.notice(
                f"a checkpoint took {seconds:.0f} s, and torchrun kills a rank {GRACE_SECONDS:.0f} s after "
                "it was asked to stop: give the run a --deadline, or a stop costs the steps since then"
            )
        self.slowest_save = max(self.slowest_save, seconds)

    def _keep(self, plan: Plan) -> None:
        """From here on the run, if it is resumed, goes on under this plan."""
        if plan.id == self.checkpoints.facts["plan_id"]:
            return
        self.checkpoints.facts |= {"plan_id": plan.id, "plan": plan.dumps()}
        if self.ranks.writes:
            plan.save(self.path / "plan.toml")

    @property
    def seconds(self) -> float:
        """That the run has taken, in earlier processes too."""
        return self.seconds_before + time.monotonic() - self.started_at

    @property
    def plan(self) -> Plan:
        """Under which the run goes on from its newest checkpoint."""
        return Plan.loads(self.checkpoints.facts["plan"])

    def model_state(self) -> Any:
        """The state of what the Job's model() returned, whole on rank 0. All ranks call it together."""
        return whole_state_of(self.session.built, self.session.build.shards, self.ranks)

    def _state(self, streams: list[Any]) -> dict[str, Any]:
        self._require_fitting()
        return {
            "optimizer": whole_state_of(self.session.optimizer, self.session.build.shards, self.ranks),
            "scheduler": state_of(self.scheduler),
            "techniques": state_of(self.session.build.kept),
            "streams": streams,
            "data": self.feed.state(self.session, self.position),
            "beside": self.beside.state(),
            "anew": self.beside.anew(),
            "gradients": self.unapplied.state(),
        }

    def keep_what_was_trained(self) -> str:
        """Keep the steps before one of the Job's functions failed; returns where, or an empty string.

        Of several ranks where all fail alike; where one does, the others do so once their exchange breaks.
        """
        if not self.between_steps:
            return ""
        try:
            path = self.save_alone() if self.ranks.world_size == 1 else self._save_at_the_end()
        except (RuntimeError, FolderError, CheckpointError, ListenerFailed, Stranded):  # all may fail, too
            return ""
        where = f"{path.name} in '{path.parent}'" if path is not None else ""
        return f"{where} was kept: once mended, go on with --resume --changed ok" if where else ""

    def _save_at_the_end(self) -> Path | None:
        """A checkpoint of all ranks, where all of them fail at one place."""
        position = self.position
        place = f"step {position.step}, batch {position.batch} of epoch {position.epoch}"
        if not position.step or not self.ranks.all_end_at(place) or not self.is_healthy():
            return None
        if position != self.saved:
            self.save()
        return self.checkpoints.folder / f"step_{position.step}"

    def save_alone(self) -> Path | None:
        """A checkpoint without the other ranks, whose random streams this one knows where they run here."""
        position = self.position
        if self.session.build.shards is not None or not position.step or not self.is_healthy():
            return None  # the other parts of weights were lost with the ranks that held them
        if position == self.saved:
            return self.checkpoints.folder / f"step_{position.step}"
        log = self.path / "metrics.jsonl"
        position.log_bytes = log.stat().st_size if log.is_file() else 0
        position.seconds = round(self.seconds, 3)
        streams = [self.survival.board.read(rank, position.step) for rank in range(self.ranks.world_size)]
        streams[self.ranks.rank] = to_plain(capture(self.device))
        self.checkpoints.facts["held"] = self.watch.holds(self.session, position)
        return self.checkpoints.save(position, self.model_state(), self._state(streams))

    def take_up(self, found: Found) -> None:
        """Go on where a checkpoint stands."""
        state = found.state
        fresh = Fresh(self.session.optimizers or self.session.optimizer, self.scheduler)
        shards, beside = self.session.build.shards, state.get("beside", [])
        make_room(self.session.build.models, beside)
        load_into(self.session.built, found.model, "the model", shards)
        load_beside(self.beside, beside)
        load_gradients(self.unapplied, state.get("gradients", []))
        anew = load_into(self.session.optimizer, state["optimizer"], "the optimizer", shards)
        told = [*map(str, state.get("anew", [])), *(f"optimizer.{name}" for name in anew)]
        self.begun_anew = [*dict.fromkeys(told)]
        load_into(self.scheduler, state["scheduler"], "the scheduler")
        fresh.take(found.manifest["course"], self.checkpoints.facts["course"])
        load_into(self.session.build.kept, state["techniques"], "the plan's techniques")
        self.feed.place = state.get("data")
        streams = state["streams"]
        if self.ranks.rank < len(streams) and streams[self.ranks.rank] is not None:
            load_streams(streams[self.ranks.rank], self.device)
        self.lost_streams = [rank for rank, one in enumerate(streams) if one is None]
        self.position, self.seconds_before = found.position, found.position.seconds
        if not measure_alike(found.manifest, self.checkpoints.facts):
            self.position.metric, self.position.metric_step = None, -1
        self.saved = dataclasses.replace(self.position)
