"""What the job's own metric changes of what a session holds, such as statistics that it computes anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from vivace.job import Job
from vivace.session.session import Session
from vivace.tensors import randomness
from vivace.tensors.outside import Outside, assign, attributes
from vivace.training.evaluation import Evaluation
from vivace.verifying.masks import Unlike
from vivace.verifying.states import load_state, owners_of
from vivace.watching.between import Rest, changed, digests
from vivace.watching.twin import TAKES, Twin, unheard

MOST_ASKED = 3  # times: a metric may begin late to change something


class OwnMetric:
    """Learns that by the reference's evaluation of the same weights, and leaves no trace of it."""

    def __init__(self, job: Job, seed: int) -> None:
        self._job, self._seed = job, seed
        self._changes: set[str] = set()
        self._asked = 0 if job.metric is not None else MOST_ASKED

    def unexplained(self, names: Iterable[str]) -> list[str]:
        """Those that the metric does not change, as far as it was asked."""
        return [name for name in names if name not in self._changes]

    @property
    def may_be_asked(self) -> bool:
        """Is there one, that was not asked often enough?"""
        return self._asked < MOST_ASKED

    def ask(self, session: Session, twin: Twin, rest: Rest) -> None:
        """See what it changes of what was noted at `rest`, in the twin, and in the training itself, which it
        may reach by a name of its file. Raises Unlike where that cannot be put back.
        """
        self._asked += 1
        with _as_it_is(session, twin, self._job), unheard(), twin.entered() as again:
            rest.put_back()
            load_state(again, rest.state)
            before = digests(again)
            Evaluation(self._job, again, self._seed).metric()
            self._changes.update(changed(before, digests(again)))
            self._changes.update(changed(rest.digests, digests(session)))


@contextmanager
def _as_it_is(session: Session, twin: Twin, job: Job) -> Iterator[None]:
    """Afterwards the training, and what the metric keeps in Python, are as before."""
    models, device = (*session.build.models, *twin.session.build.models), session.build.device
    outside = Outside((job.metric, job.validation), models, store="cpu")
    if outside.one_way:
        raise Unlike(TAKES.format("the metric"))
    now, streams = Rest(session, 0), randomness.capture(device)
    held = attributes(owners_of(session))
    groups = [(group, dict(group)) for one in session.optimizers for group in one.param_groups]
    try:
        yield
    finally:
        now.put_back()
        assign(owners_of(session), held)
        for group, settings in groups:
            group.update(settings)
        randomness.restore(streams, device)
        outside.put_back()
