"""Running out of memory in a step, survived: what the step had touched is put back, and a smaller plan named.

What changes no bit comes first: fewer activations are kept. Where that does not act, or is not enough, the
smaller plan halves the micro-batches and keeps the batch. A batch whose pieces would train another loss, or
over which BatchNorm takes its statistics, is not cut.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vivace.errors import Diverged, JobError, OutOfMemory, Refused, is_broken_exchange, ran_out_of_memory
from vivace.job import Batch
from vivace.mechanisms.blocks import blocks_of
from vivace.plan import Plan
from vivace.session.session import Session
from vivace.technique import Numerics, registry
from vivace.tensors.modules import has_batch_norm
from vivace.tensors.trees import batch_size
from vivace.training.finite import Careful, NotFinite, first_bad_module
from vivace.training.pace import Own
from vivace.training.pieces import Unknown, why_not_cut
from vivace.training.ranks import Ranks, Stranded
from vivace.training.snapshot import Snapshot
from vivace.training.streams import StreamBoard


class Smaller(Exception):
    """The step must be taken again under `plan`; the message is the decision in one sentence.

    `refusal` is why no rank may go on so, where this one alone knows it.
    """

    def __init__(self, plan: Plan, text: str, refusal: str = "") -> None:
        super().__init__(text)
        self.plan, self.refusal = plan, refusal


class Survival:
    """Takes the steps of a run so that one that fails for lack of memory leaves no trace."""

    def __init__(self, session: Session, ranks: Ranks) -> None:
        self.ranks = ranks
        self.inexact = ""
        self.savers: list[str] = []  # that a lack of memory has brought into the plan, one after another
        self.careful: Careful | None = None
        self.own = Own()
        self.board = StreamBoard(ranks)
        self._observing = contextlib.ExitStack()
        self._watch(session)

    def step(self, batch: Batch) -> Any:
        """One step of the session. Raises Smaller on all ranks where it must be taken again under another
        plan, OutOfMemory where nothing smaller is left, and Stranded where another rank is gone.

        `inexact` then says why what the step had changed could not be put back; empty where it was.
        """
        try:
            return self.attempt(batch)
        except NotFinite as error:
            self._free()
            self._before.put_back()
            where = first_bad_module(self.session, batch)
            raise Diverged(f"{error}: {where}") from None
        except Refused as refused:
            added = next((name for name in self.savers if name in self.session.plan.names), "")
            if not added or refused.technique not in ("", added) or self._changed():
                raise
            self._free()
            self.inexact = self._before.put_back()
            text = f"{refused}: from here on without {added}"
            raise Smaller(self.session.plan.without(added), text) from None
        except Exception as error:
            own = ran_out_of_memory(error)
            stranded = not own and not self.ranks.heard()
            if stranded and (self.ranks.world_size == 1 or not is_broken_exchange(error)):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold tensors, whoever keeps the error
            if own and not self._updating:
                self.ranks.cry()
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if own else ""
        self._free()
        self.inexact = self._before.put_back()  # while the plan is open: closing one may replace buffers
        if stranded:
            self.inexact = self.inexact or self._changed() or self._queued()
            raise Stranded
        raise self._smaller(batch, reason)

    def attempt(self, batch: Batch) -> Any:
        """One step, with all that a step of a run costs; what fails in it is raised as it is."""
        self._updating = False
        self._updates = self.session.build.facts.updates_in_backward
        self._before.take()
        return self.session.step(batch)

    def undo(self) -> str:
        """Put back what a step that failed has changed; returns what could not be, else an empty string."""
        own = "a step of your own may have updated weights" if self.session.build.own_step else ""
        try:
            self._free()
            return own or self._changed() or self._before.put_back()
        except RuntimeError as error:  # as after an assertion that failed on the device
            return f"the device does nothing any more ({type(error).__name__})"

    def _changed(self) -> str:
        """What a step that failed has changed for good; empty where it can be taken again."""
        updated = self._updating or self.session.build.facts.updates_in_backward != self._updates
        return "the weights were being updated" if updated else ""

    def _queued(self) -> str:
        """What may follow on the device after an exchange that broke."""
        waits = self.session.build.device.type == "cpu"
        return "" if waits else "the update may have run after the exchange on the device"

    def note(self, step: int) -> None:
        """Let the other ranks of this machine know the random streams after `step` steps."""
        if self.ranks.watch is not None:
            self.board.write(step, self._before.streams.now())

    def take_care(self) -> None:
        """From here on look at every step's numbers before they reach the weights."""
        self.careful = Careful(self.session)

    def keep_streams(self) -> None:
        """Note the random streams as they are now: `resume` goes on with them."""
        self._before.streams.take(whole=True)

    def resume(self, session: Session) -> None:
        """Go on with `session`, whose opening may have drawn random numbers."""
        self._before.streams.restore()
        self._watch(session)

    def _watch(self, session: Session) -> None:
        careful = self.careful
        if careful is not None:
            careful.close()
        self.session = session
        self._updating = False
        self._observing.close()
        observers: dict[str, Callable[..., Any]] = {"update": self._update}
        if self.ranks.world_size > 1:
            observers["forward"] = self.own.in_forward
        self._observing.enter_context(session.seams.observed(**observers))
        self._before = Snapshot(session)
        if careful is not None:
            self.take_care()

    def close(self) -> None:
        """No step follows: the session's seams hold this no more, nor this what they hold."""
        self._observing.close()

    def _update(self, following: Callable[[], None]) -> None:
        self._updating = True
        if self.ranks.watch is not None:
            self.board.foresee(self._before.streams.now())
        following()

    def _free(self) -> None:
        for model in self.session.build.models:
            for parameter in model.parameters():
                parameter.grad = None
        gc.collect()
        if self.session.build.device.type == "cuda":
            torch.cuda.empty_cache()

    def _smaller(self, batch: Batch, reason: str) -> Exception:
        """What to do about it, as an exception to raise; the `reason` is empty where another rank ran out."""
        session, build = self.session, self.session.build
        where = f"the step ran out of memory ({reason or 'another rank did'})"
        if build.own_step:
            return JobError(f"{where}; your own step cannot be cut into pieces: give it a smaller batch")
        if build.shards is not None:
            return OutOfMemory(
                f"{where}, and where each rank holds a part of the weights it cannot be taken again, though "
                f"the last checkpoint stands: {_would_fit(session)}"
            )
        if self._updating or build.facts.updates_in_backward != self._updates:
            return OutOfMemory(
                f"{where} while the weights were being updated, which smaller pieces of a batch cannot help: "
                f"{_would_fit(session)}"
            )
        return self._exactly(where) or self._in_pieces(batch, where, lacks=bool(reason))

    def _exactly(self, where: str) -> Smaller | None:
        """Fewer activations kept, which changes no number; None where nothing of the kind is left to try."""
        plan, build = self.session.plan, self.session.build
        exact = registry.savers(build.device.type, Numerics.EXACT)
        savers = [cls for cls in exact if cls.card.saves_memory == "activations" and registry.rescues(cls)]
        if any(cls.name in plan.names for cls in savers):  # one alone decides on a block
            return None
        for cls in savers:
            if cls.name not in self.savers and (not cls.card.by_block or blocks_of(build)):
                self.savers.append(cls.name)
                text = f"from here on fewer activations are kept ({cls.name}), which changes no number"
                return Smaller(plan.adding(registry.rescues(cls)[0]), f"{where}: {text}")
        return None

    def _in_pieces(self, batch: Batch, where: str, *, lacks: bool) -> Exception:
        """The batch in twice as many pieces, where these train the same loss; `lacks`: it is this rank that
        lacks memory, and so looks whether they do.
        """
        session, samples = self.session, batch_size(batch)
        plan, build = session.plan, session.build
        pieces = max((technique.pieces for technique in plan.techniques), default=1)
        cutting = registry.cutting_batches(build.device.type)
        if pieces >= samples or not cutting:
            return OutOfMemory(f"{where} with one sample at a time: {_would_fit(session)}")
        under = doubt = why = refusal = ""
        if tried := [name for name in self.savers if name in plan.names]:
            under = f" under {' and '.join(tried)}"
        others_wait = False
        if has_batch_norm(build.models[0]) and session.promise < Numerics.SEMANTICS:
            why = "pieces of a batch would change BatchNorm's statistics"
        elif lacks and (pieces == 1 or session.promise < Numerics.SEMANTICS):
            others_wait = self.ranks.world_size > 1  # to meet this one
            try:
                why = why_not_cut(session, batch, pieces, alone=not others_wait)
            except Exception as error:  # of the person's own code, which has not failed in the step itself
                reason = str(error) if isinstance(error, Unknown) else f"{type(error).__name__}: {error}"
                doubt = f"; whether pieces give the batch's own loss could not be told, for {reason}"
            self._free()
            self.inexact = self.inexact or self._before.put_back()
        if why:
            refusal = f"{where}{under}, and {why}, so it is not cut: {_would_fit(session)}"
            if not others_wait:
                return OutOfMemory(refusal)
        num = min(2 * pieces, samples)
        cls = next((cls for cls in cutting if cls.name in plan.names), cutting[0])
        text = f"{where}{doubt}: from here on each batch of {samples} runs in {num} pieces ({cls.name})"
        return Smaller(plan.adding(cls.in_pieces(num)), text, refusal)


@contextlib.contextmanager
def naming_memory() -> Iterator[None]:
    """Where memory ends outside of a step, OutOfMemory says so in place of torch's error."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        raise OutOfMemory(
            f"the training does not fit into the device's memory ({reason}): free what others hold there, or "
            "use a smaller model or a device with more memory"
        ) from error


def _would_fit(session: Session) -> str:
    savers = registry.savers(session.build.device.type, Numerics.EXACT)
    if session.build.shards is not None:
        savers = [cls for cls in savers if cls.card.acts_on_shards]
    lacking = [cls.name for cls in savers if cls.name not in session.plan.names]
    wanted = f"a plan with {' or '.join(lacking[:2])}, " if lacking else ""
    return f"what may fit is {wanted}a smaller batch, or a device with more memory"
