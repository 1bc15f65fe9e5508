"""One verb on several ranks: rank 0 decides, and what its children do, those of the other ranks do with them.

Each rank has child processes of its own, which meet in a process group. Only rank 0's own process thinks: it
tells the others' by the launch's store which child to start, what to ask it, and at last what came of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vivace.errors import RankLost, TimedOut, VivaceError
from vivace.inspection.device_choice import of_launch
from vivace.plan import Plan
from vivace.processes.launch import Child, Source, preload
from vivace.processes.waiting import crowded
from vivace.processes.zygote import die_with_parent

PATIENCE_SECONDS = 300.0
GRACE_SECONDS = 30.0  # for other ranks' answers after rank 0's, and for a rank that gives no sign of life
BEAT_SECONDS = 1.0
LAST_SECONDS = 3.0  # for the other ranks to hear that it is over
LOOK_SECONDS = 0.05  # between two looks for a command of rank 0
ALONE = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
"""What a child of one rank is told where it works for itself."""
_IN_A_CREW = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # somebody else keeps the store: only connect to it


def num_ranks() -> int:
    """How many processes were launched together, this one among them."""
    return of_launch("WORLD_SIZE", 1)


def num_ranks_here() -> int:
    """How many of them share this machine."""
    return of_launch("LOCAL_WORLD_SIZE", num_ranks())


def needed_by(num_ranks: int) -> Plan:
    """What every plan for so many ranks holds, with these or other settings; nothing for one."""
    if num_ranks == 1:
        return Plan()
    from vivace.training.ranks import for_so_many  # imports torch, which one process does without

    return for_so_many(Plan(), num_ranks)


class Company:
    """The processes of a launch, as rank 0 sees it, or one of the others (`rank`); or one process alone.

    Args:
        store: under a name that no other launch or attempt has; None for one process alone.
        launch: the launch's own store, in which children meet.
    """

    def __init__(
        self, source: Source, rank: int = 0, world_size: int = 1, store: Any = None, launch: Any = None
    ) -> None:
        self.source, self.rank, self.world_size = source, rank, world_size
        self._store, self._launch = store, launch
        self._ended = threading.Event()
        self.lost = ""  # which rank does not answer any more: nothing can be begun without it
        self._signs: dict[int, tuple[bytes, float]] = {}  # each rank's last sign of life, and since when
        self._crews, self._errands = itertools.count(), itertools.count()

    def few_threads(self, kind: str) -> int:
        """On how many threads to time and to verify: on one where one process trains on a processor beside
        others that compute, 0 for as many as there are. `kind` is the device's.
        """
        return 1 if self.world_size == 1 and kind == "cpu" and crowded() else 0

    def child(
        self,
        entry: str,
        arguments: dict[str, Any] | None = None,
        *,
        log: Path | None = None,
        environment: dict[str, str] | None = None,
        meeting: bool = False,
    ) -> Child | Crew:
        """A child of the job; of several ranks, one in each, which take every command together.

        With `meeting` the entry is also given ``meeting=``, the name under which its processes meet
        (`ranks.met_under`).
        """
        arguments = dict(arguments or {})
        if self.world_size == 1:
            return Child(entry, self.source, arguments, log=log, environment=environment)
        if meeting:
            arguments["meeting"] = f"vivace/crew/{uuid.uuid4().hex}"
        return Crew(self, next(self._crews), entry, arguments, log, environment or {})

    def tell(self, **errand: object) -> int:
        """Hand an errand to the other ranks; its number. Raises RankLost where they cannot be reached."""
        if self.lost:
            raise RankLost(self.lost)
        number = next(self._errands)
        try:
            self._store.set(f"errand/{number}", json.dumps(errand))
        except RuntimeError as error:
            raise self._cut_off(error) from None
        return number

    def failures(self, number: int, seconds: float) -> dict[int, VivaceError]:
        """How an errand failed, by rank; one that does not answer within `seconds`, or gives no sign of life
        for a while, has failed, too, and is `lost`.
        """
        found: dict[int, VivaceError] = {}
        begin = time.monotonic()
        for rank in range(1, self.world_size):
            text = self._read(f"answer/{number}/{rank}", begin + seconds, rank)
            if text is None:
                self.lost = self._silent(rank, time.monotonic() - min(begin, self._signs[rank][1]))
                found[rank] = RankLost(self.lost)
            elif text:
                found[rank] = VivaceError.from_dict(json.loads(text))
        return found

    @contextmanager
    def attended(self, child: Child) -> Iterator[None]:
        """Meanwhile `child` is killed once a rank gives no sign of life: it may wait for that one's child,
        which nobody tells what to do.
        """
        done = threading.Event()

        def attend() -> None:
            with contextlib.suppress(RuntimeError):  # cut off, which the main thread tells
                while not done.wait(BEAT_SECONDS):
                    if any(self._has_fallen_silent(rank) for rank in range(1, self.world_size)):
                        with contextlib.suppress(ProcessLookupError):  # it leads no group yet
                            os.killpg(child.pid, signal.SIGKILL)

        thread = threading.Thread(target=attend, name="vivace-attend", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _has_fallen_silent(self, rank: int) -> bool:
        """Has a rank given no sign of life for long, since its last, or since this was first asked?"""
        key = f"alive/{rank}"
        sign = self._store.get(key) if self._store.check([key]) else b""
        last, since = self._signs.get(rank, (None, 0.0))
        if sign != last:
            self._signs[rank] = (sign, since := time.monotonic())
        return time.monotonic() - since > GRACE_SECONDS

    def _beat(self) -> None:
        """Let rank 0 know each second that this process runs, whatever its main thread does."""
        store = self._store.clone()
        for number in itertools.count():
            with contextlib.suppress(RuntimeError):  # it cannot be reached, which the main thread notices
                store.set(f"alive/{self.rank}", str(number))
            if self._ended.wait(BEAT_SECONDS):
                return

    def here(self) -> None:
        """Let rank 0 know which process this rank is."""
        self._store.set(f"here/{self.rank}", json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))

    def _silent(self, rank: int, seconds: float) -> str:
        from vivace.training.verdict import state_of

        process = json.loads(self._read(f"here/{rank}", time.monotonic()) or "{}")
        if not process:
            return f"rank {rank} has given no answer for {seconds:.0f} s"
        place = f"process {process['pid']} on {process['host']}"
        return f"rank {rank} ({place}) has given no answer for {seconds:.0f} s: {state_of(process)}"

    def awaited(self, meeting: str) -> str:
        """For which rank the children of a crew, which met under this name, waited at last; see `awaited`."""
        import torch.distributed as dist

        from vivace.training.meeting import awaited

        return awaited(dist.PrefixStore(meeting, self._launch), self.world_size)  # type: ignore[attr-defined]

    def end(self, result: dict[str, Any] | None, error: BaseException | None = None) -> None:
        """Tell the other ranks what came of it."""
        if self.world_size > 1:
            self.lost = ""  # those that are left hear it
            told = error if isinstance(error, VivaceError) or error is None else RankLost("rank 0 has ended")
            with contextlib.suppress(RankLost):
                number = self.tell(do="end", result=result, error=None if told is None else told.to_dict())
                self.failures(number, LAST_SECONDS)  # the store may end with this process

    def follow(self) -> dict[str, Any]:
        """On a rank other than 0: run errands until the end. What came of it on rank 0, or its error."""
        children: dict[int, Child] = {}
        threading.Thread(target=self._beat, name="vivace-beat", daemon=True).start()
        preload([])  # what every child begins with is imported meanwhile
        try:
            for number in itertools.count():
                text = self._read(f"errand/{number}", math.inf)
                errand = json.loads(text or "{}")
                failure = self._run(errand, children) if errand["do"] != "end" else ""
                self._store.set(f"answer/{number}/{self.rank}", failure and json.dumps(failure))
                if errand["do"] == "end":
                    break
        finally:
            self._ended.set()
            for child in children.values():
                child.close()
        if errand["error"] is not None:
            raise VivaceError.from_dict(errand["error"])
        result: dict[str, Any] = errand["result"]
        return result

    def _run(self, errand: dict[str, Any], children: dict[int, Child]) -> Any:
        """Do what rank 0 asks; the error's document, or an empty text."""
        number = errand["crew"]
        try:
            if errand["do"] == "start":
                environment = errand["environment"] | _IN_A_CREW
                children[number] = Child(
                    errand["entry"], self.source, errand["arguments"], environment=environment
                )
            elif errand["do"] == "ask":
                children[number].ask(errand["command"], errand["timeout"], **errand["arguments"])
            elif number in children:
                children.pop(number).close()
        except VivaceError as error:
            return error.to_dict()
        return ""

    def _read(self, key: str, deadline: float, of: int | None = None) -> str | None:
        """What stands under a key, once it does; None where it does not in time, or the rank that it is to
        come `of` does not live.
        """
        while True:
            try:
                if self._store.check([key]):
                    return str(self._store.get(key).decode())
                silent = of is not None and self._has_fallen_silent(of)
            except RuntimeError as error:
                raise self._cut_off(error) from None
            if silent or time.monotonic() > deadline:
                return None
            time.sleep(LOOK_SECONDS)

    def _cut_off(self, error: RuntimeError) -> RankLost:
        return RankLost(f"rank {self.rank} cannot reach the launch any more ({error})")


class Crew:
    """Children of one job, one in each rank of a launch: has what `Child` has, of all of them at once."""

    def __init__(
        self,
        company: Company,
        number: int,
        entry: str,
        arguments: dict[str, Any],
        log: Path | None,
        environment: dict[str, str],
    ) -> None:
        self._company, self._number, self._closed = company, number, False
        self._failed = False
        self._meeting = str(arguments.get("meeting", ""))
        own = environment | _IN_A_CREW
        self._child = Child(entry, company.source, arguments, log=log, environment=own)
        start = {"entry": entry, "arguments": arguments, "environment": environment}
        try:
            errand = company.tell(do="start", crew=number, **start)
            self._raise_first(None, company.failures(errand, PATIENCE_SECONDS))
        except BaseException as error:
            self.close()
            company.lost = company.lost or (str(error) if isinstance(error, RankLost) else "")
            raise

    def ask(self, command: str, timeout: float, **arguments: object) -> Any:
        """Send one command to all children; the answer of rank 0's.

        Raises what `Child.ask` raises; where a child of another rank is to blame, its error, with that rank.
        Where time runs out, the error says for which rank the others waited.
        """
        asked = {"command": command, "timeout": timeout, "arguments": arguments}
        errand = self._company.tell(do="ask", crew=self._number, **asked)
        own, answer = None, None
        try:
            with self._company.attended(self._child):
                answer = self._child.ask(command, timeout, **arguments)
        except VivaceError as error:
            own = error
        others = self._company.failures(errand, GRACE_SECONDS)
        self._failed = own is not None or bool(others)
        if self._company.lost:  # whatever its child died of
            raise RankLost(self._company.lost)
        late = isinstance(own, TimedOut) or any(isinstance(error, TimedOut) for error in others.values())
        if late and self._meeting and (awaited := self._company.awaited(self._meeting)):
            raise TimedOut(f"no answer to '{command}' within {timeout:.0f} s: {awaited}")
        self._raise_first(own, others)
        return answer

    @property
    def pid(self) -> int:
        """The process id of rank 0's child, which is also that of its group."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Have all children answered so far? One that failed has left the others."""
        return self._child.alive and not self._failed

    def close(self) -> None:
        """End all children; once closed they stay so."""
        if not self._closed:
            self._closed = True
            try:
                with contextlib.suppress(RankLost):
                    self._company.tell(do="close", crew=self._number)
            finally:
                self._child.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _raise_first(own: VivaceError | None, others: dict[int, VivaceError]) -> None:
        """The error with which it began: that of a rank which has not merely lost another."""
        if own is not None and not isinstance(own, RankLost):
            raise own
        for rank, error in others.items():
            if not isinstance(error, RankLost):
                raise VivaceError.from_dict(error.to_dict() | {"text": f"on rank {rank}: {error}"})
        for error in filter(None, (own, *others.values())):
            raise error


@contextmanager
def company_of(source: Source) -> Iterator[Company]:
    """The processes that were launched together with this one, met; this one alone where there are none.

    What rank 0 raises inside, the others raise too. Raises RankLost where some do not come within
    `PATIENCE_SECONDS`.
    """
    world_size = num_ranks()
    if world_size == 1:
        yield Company(source)
        return
    import torch.distributed as dist

    from vivace.training.meeting import agreed_name, launch_store

    die_with_parent(os.getppid(), signal.SIGTERM)  # no rank outlives torchrun
    rank = of_launch("RANK")
    store = launch_store(rank, world_size, PATIENCE_SECONDS)
    name = agreed_name(store, rank, world_size, PATIENCE_SECONDS)
    own = dist.PrefixStore(f"vivace/company/{name}", store)  # type: ignore[attr-defined]
    company = Company(source, rank, world_size, own, store)
    company.here()
    try:
        yield company
    except BaseException as error:
        if not rank:
            company.end(None, error)
        raise


def lead_or_follow(company: Company, lead: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """On rank 0 `lead()`, a document that is also what the other ranks return here, who follow meanwhile."""
    if company.rank:
        return company.follow()
    result = lead()
    company.end(result)
    return result
