"""Ranks on a Ray cluster: Ray finds each its place, and each trains as one that torchrun has started.

This process is to them what torchrun is elsewhere: it keeps the store in which they meet, hands on a request
to stop, and begins them again where one was lost; they go on from what those that were left have kept.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vivace import job as jobs
from vivace.errors import FolderError, InputError, RankLost, VivaceError
from vivace.events import Event, EventKind, OnEvent
from vivace.job import Job
from vivace.pages.notebook import listening
from vivace.plan import Plan
from vivace.processes.launch import Source, unpacked
from vivace.training.crew import num_ranks
from vivace.training.meeting import launch_store
from vivace.training.stopping import StopRequest
from vivace.training.training import Run
from vivace.words import count, duration

try:
    import ray
    from ray.util import get_node_ip_address, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from vivace.processes.on_ray import MOST_LOSSES, Connection, lines_of, on_node, shares_of
except ImportError:
    raise InputError("ranks on a Ray cluster need Ray: pip install 'vivace[ray]'") from None

LOOK_SECONDS = 0.5


class Rank:
    """Ray's actor for one rank: it trains in the main thread of its process."""

    def __init__(self, path: list[str]) -> None:
        sys.path += [folder for folder in path if folder not in sys.path]

    def place(self) -> tuple[str, str, int]:
        """The node's id and address, and the process's id."""
        return ray.get_runtime_context().get_node_id(), get_node_ip_address(), os.getpid()

    def train(
        self,
        environment: dict[str, str],
        threads: int,
        train: Callable[..., Run],
        source: Source,
        plan: Path | str | None,
        options: dict[str, Any],
    ) -> Run | VivaceError:
        """`vivace.train` as the rank that `environment` says, under a plan of that file or text.

        What it raises is returned, too.
        """
        os.environ.update(environment)
        os.chdir(source.folder)
        torch.set_num_threads(threads)
        try:
            job = unpacked(source.body())
            if isinstance(plan, str):
                job = jobs.load(job) if isinstance(job, str) else job  # it may bring techniques of the plan
            told = _teller(environment) if environment["RANK"] == "0" else None
            found = Plan.loads(plan) if isinstance(plan, str) else plan
            return train(job, found, on_event=told, **options)
        except VivaceError as error:
            return error


def _teller(environment: dict[str, str]) -> OnEvent:
    """Hands on what rank 0 tells, by the store."""
    store = launch_store(0, int(environment["WORLD_SIZE"]), 30.0)
    numbers = itertools.count()

    def told(event: Event) -> None:
        key = f"told/{environment['TORCHELASTIC_RESTART_COUNT']}/{next(numbers)}"
        with contextlib.suppress(RuntimeError):  # the link is gone, as the ranks notice themselves
            store.set(key, json.dumps([event.kind, event.payload]))

    return told


def _ask(process: int, name: str) -> None:
    os.kill(process, signal.Signals[name])


class Launch:
    """Ranks on a cluster, begun again where one is lost; see the module. `num`: None: one a GPU, else a node.

    Raises InputError where the cluster has not so many GPUs.
    """

    def __init__(self, connection: Connection, num: int | None, tell: OnEvent, patience: float) -> None:
        gpus = int(sum(node.get("GPU", 0) for node in connection.nodes))
        if gpus and (num or 0) > gpus:
            raise InputError(f"{num} ranks need a GPU each, and the cluster has {count(gpus, 'GPU')}")
        num = num or gpus or len(connection.nodes)
        (self.num, self.threads), self.resources = shares_of(connection.nodes, num)
        self.tell, self.patience = tell, patience
        self.stop, self.lost = StopRequest(), ""
        host = get_node_ip_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._environment = {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(self.num),
        }

    def train(self, *arguments: Any) -> Run:
        """Let ranks train with these arguments of `Rank.train`: what rank 0 returns.

        Raises what a rank raised, or RankLost where too many were lost.
        """
        with self.stop:
            for attempt in range(MOST_LOSSES + 1):
                if attempt:
                    again = f"{self.lost}; Ray begins the ranks again, {attempt} of {MOST_LOSSES}"
                    self.tell(Event(EventKind.NOTICE, {"text": again}))
                with self._placed() as ranks:
                    ended = self._attempt(ranks, attempt, arguments)
                if isinstance(ended, Run):
                    return ended
                self.lost = str(ended)
                if self.stop.signal_name:
                    raise RankLost(self.lost, interrupted_by=self.stop.signal_name)
        raise RankLost(f"{self.lost}; Ray has begun the ranks again {count(MOST_LOSSES, 'time')} in vain")

    @contextmanager
    def _placed(self) -> Iterator[list[Any]]:
        """The ranks' actors, each at its place. Raises RankLost where the cluster has no room for long."""
        group = placement_group([{key.upper(): n for key, n in self.resources.items()}] * self.num)
        actors: list[Any] = []
        try:
            ready, waited = [group.ready()], 0.0
            while not ray.wait(ready, timeout=LOOK_SECONDS)[0]:
                waited += LOOK_SECONDS
                if waited > self.patience or self.stop.signal_name:
                    raise RankLost(
                        f"the cluster has had no room for {count(self.num, 'rank')} for {duration(waited)}: "
                        "wait until others leave it, or give fewer --ranks",
                        interrupted_by=self.stop.signal_name,
                    )
            own = {f"num_{key}s": n for key, n in self.resources.items()}
            for number in range(self.num):
                there = PlacementGroupSchedulingStrategy(group, number)
                actors.append(ray.remote(Rank).options(scheduling_strategy=there, **own).remote(sys.path))
            yield actors
        finally:
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)

    def _attempt(self, actors: list[Any], attempt: int, arguments: tuple[Any, ...]) -> Run | RankLost:
        """Let them train once: what rank 0 returns, or who was lost. Raises what another rank raised."""
        try:
            places = ray.get([actor.place.remote() for actor in actors])
        except ray.exceptions.RayActorError as error:
            return RankLost(f"a rank has died as it began: {lines_of(error)[-1]}")
        in_order = sorted(zip(places, actors, strict=True), key=lambda pair: pair[0])
        on_one = Counter(node for node, _, _ in places)
        running = {}
        for rank, ((node, _, _), actor) in enumerate(in_order):
            own = {"RANK": str(rank), "LOCAL_RANK": "0"}  # each sees none but its own GPU
            own |= {"LOCAL_WORLD_SIZE": str(on_one[node]), "TORCHELASTIC_RESTART_COUNT": str(attempt)}
            running[actor.train.remote(self._environment | own, self.threads, *arguments)] = rank
        self._follow(list(running), places, attempt)
        told: list[RankLost] = []
        raised: list[VivaceError] = []
        for answer, rank in running.items():
            try:
                ended = ray.get(answer)
            except ray.exceptions.RayActorError as error:
                why = f"rank {rank} on {in_order[rank][0][1]} has died: {lines_of(error)[-1]}"
                told.append(RankLost(why))
                continue
            if rank == 0 and isinstance(ended, Run):
                return ended
            if isinstance(ended, RankLost):
                told.insert(0, ended)  # one that is left says more than what is known of one that is not
            elif isinstance(ended, VivaceError):
                raised.append(ended)
        if raised:
            for lost in told[:1]:  # it says what was kept
                self.tell(Event(EventKind.NOTICE, {"text": str(lost)}))
            raise raised[0]
        return told[0]

    def _follow(self, answers: list[Any], places: list[tuple[str, str, int]], attempt: int) -> None:
        """Hand on what is told and asked, until all have ended."""
        told, asked = 0, False
        while answers or self._store.check([f"told/{attempt}/{told}"]):
            while self._store.check([key := f"told/{attempt}/{told}"]):
                kind, payload = json.loads(self._store.get(key))
                self._store.delete_key(key)
                self.tell(Event(EventKind(kind), payload))
                told += 1
            if self.stop.signal_name and not asked:
                asked = True
                for node, _, process in places:
                    on_node(node, _ask).remote(process, self.stop.signal_name)
            answers = ray.wait(answers, num_returns=len(answers), timeout=LOOK_SECONDS)[1] if answers else []


def train(
    train_here: Callable[..., Run],
    job: Job | str,
    plan: Plan | str | os.PathLike[str] | None,
    *,
    out: str | os.PathLike[str],
    address: str,
    ranks: int | None,
    on_event: OnEvent | None,
    **options: Any,
) -> Run:
    """See `vivace.train`, which this is with ``engine="ray"``, and which is `train_here` in each rank."""
    if num_ranks() > 1:
        raise InputError(f"{num_ranks()} ranks were started, and Ray starts them itself: leave torchrun out")
    if ranks is not None and ranks < 1:
        raise InputError(f"at least 1 rank must train, not {ranks}")
    source, folder = Source(job), Path(out).absolute()
    sent = plan.dumps() if isinstance(plan, Plan) else None if plan is None else Path(plan).absolute()
    hear = listening(on_event) or (lambda event: None)
    with contextlib.closing(Connection(address)) as connection:
        connection.require_able(_made(folder))
        launch = Launch(connection, ranks, hear, options["rank_timeout_seconds"])
        return launch.train(train_here, source, sent, {"out": str(folder), **options})


def _made(folder: Path) -> Path:
    """The run folder, which is there from here on, so that the nodes can be asked whether they see it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise FolderError(f"the folder '{folder}' cannot be made: {why}") from None
    return folder
