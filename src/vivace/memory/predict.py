"""The peak of a job under a plan, from fake tensors: nothing is computed, and no device is needed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from vivace.blame import blame
from vivace.data.order import share_of
from vivace.errors import InputError, JobError, Refused, VivaceError
from vivace.inspection import inspect
from vivace.job import Batch, Job
from vivace.machine import Machine
from vivace.memory.caching import simulate
from vivace.memory.divided import divide, gather
from vivace.memory.forgetting import empty_caches, warn_of_others
from vivace.memory.on_gpus import as_on_gpus
from vivace.memory.watching import WORKSPACE, Watch, require_known_size
from vivace.memory.workspace import GpuWorkspaces
from vivace.plan import Plan
from vivace.session.opening import call, first_batches, models_of, optimizer_of, readable
from vivace.session.session import Session
from vivace.technique import Build, Stage
from vivace.tensors.modules import modules_of
from vivace.tensors.trees import map_tensors, tensors
from vivace.torch_internals.modules import own_tensors
from vivace.torch_internals.tensors import (
    DataDependentOutputException,
    FakeBuildMode,
    FakeCopyMode,
    FakeTensorMode,
    Operator,
    OperatorMode,
)
from vivace.work.as_one import RecurrentAsOneKernel
from vivace.work.sparse import SparseCopies

PARTS = ("parameters", "gradients", "optimizer", "batch", "activations", "temporary")
STEPS = 2  # the second one finds the optimizer's state
SHARES = (0.0, *(2.0**power for power in range(-6, 4)))  # of the batch, for which `lines` are exact


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes at the peak of a training step.

    `parts` sums up to `peak_bytes`: what tensors ask for. `reserved_bytes` is what the caching allocator of a
    GPU makes of it, without the CUDA context.

    Of another batch a step reserves about the most of ``fixed + share * growing`` over the pairs of bytes in
    `lines`, where it has so large a share of this one's samples. `spared_bytes` is what of the peak would be
    gone if activations were computed again, less the largest, which the gradient at the peak is of.
    """

    peak_bytes: int
    parts: dict[str, int]
    reserved_bytes: int
    lines: tuple[tuple[float, float], ...]
    spared_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return dataclasses.asdict(self)


def predict(
    job: Job,
    plan: Plan | None = None,
    *,
    batch: Batch = None,
    device: str = "cpu",
    ranks: int = 1,
) -> Prediction:
    """Predict the peak of a training step of `job` under `plan` on `device` without computing anything.

    Args:
        batch: one batch of the job, on the CPU; the largest is the one that matters. The first of its data
            where it is left out.
        device: ``cpu`` or ``cuda``. Where there is no GPU, a step on ``cuda`` is followed on the CPU's
            operators, with the optimizer, dropout and attention in the forms that they take on a GPU, and an
            H100's workspaces. Techniques for GPUs are counted by their cards there (`Card.step_memory`), and
            refused where these do not tell. Of a recurrent layer that counts which its gradients need;
            cuDNN may keep more.
        ranks: of how many processes this is the step of one, with its share of the batch, under a plan that
            divides the weights among them (see `vivace.memory.divided`).

    Raises InputError for another device, and Refused where the plan declines, where the job looks at numbers
    while it runs or has an own step, for batches that are sparse, and for recurrent layers on a CPU. Warns
    where the job keeps tensors of the step for later ones, which this process must not take for its own.
    """
    if device not in ("cpu", "cuda"):
        raise InputError(f"a step is predicted for 'cpu' or 'cuda', not for '{device}'")
    plan = plan or Plan()
    batch = batch if batch is not None else first_batches(readable(call(job, "data"), job), 1)[0]
    if ranks > 1:
        plan, batch = _of_one_rank(plan), share_of(batch, 0, ranks)
    plan, more = _of_a_gpu(plan) if device == "cuda" else (plan, 0)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    asked = _Asked(job, plan, device, inspect(), batch, more, ranks, mode)
    try:
        found = _predicted(asked)
    finally:
        empty_caches(mode)
    warn_of_others(mode)
    return found


def _predicted(asked: _Asked) -> Prediction:
    """The prediction, by a model of fake tensors, or by a copy of a real one where none can be built."""
    try:
        return _followed(asked, None)
    except JobError:  # perhaps the model looks at its weights while it draws them, which fake ones have not
        empty_caches(asked.mode)
        with torch.random.fork_rng(devices=[]):
            built = call(asked.job, "model")
        models_of(asked.job, built)  # lazy layers have no shapes to follow
        return _followed(asked, built)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What a prediction is asked for; `more` batches wait on the device. Its tensors are those of `mode`."""

    job: Job
    plan: Plan
    device: str
    machine: Machine
    batch: Batch
    more: int
    ranks: int
    mode: FakeTensorMode

    @property
    def there(self) -> torch.device:
        """Whose operators are followed."""
        return torch.device(self.device if torch.cuda.is_available() else "cpu")


def _followed(asked: _Asked, built: object) -> Prediction:
    """The prediction, from two steps on fake tensors; `built` is the model, or None to build a fake one."""
    there, parts, updates = asked.there, dict[int, str](), list[int]()
    gpu = GpuWorkspaces.of_torch() if asked.device == "cuda" else None
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(asked.mode)
        watch = stack.enter_context(Watch(gpu))
        stack.enter_context(SparseCopies())  # type: ignore[no-untyped-call]
        if built is not None:
            with FakeCopyMode(fake):
                built = copy.deepcopy(built)
        if asked.device != there.type:
            stack.enter_context(as_on_gpus())
        if asked.device == "cuda":
            stack.enter_context(RecurrentAsOneKernel(lambda *_: None))
        session = _open(asked, watch, built)
        if asked.device != there.type:
            _use_foreach(session)
        stack.enter_context(session)
        batch = map_tensors(asked.batch, lambda t: fake.from_tensor(t).to(there))
        if session.build.facts.skipped_steps is not None:
            stack.enter_context(_NoOverflow(watch))
        with _phases(session, watch, parts, updates):
            for given in _fed(asked, session, watch, batch):
                start = len(watch.moves)
                _step(session, given)
                del given  # before the next one is there
        _name_parts(watch, session, parts)
        if asked.ranks > 1:
            divide(watch, parts, asked.ranks)
            gather(watch, session.build.models, start, updates[-1])
        return _at_peak(watch, parts, start)


class _NoOverflow(OperatorMode):  # type: ignore[no-untyped-call]
    """Loss scaling asks before an update whether a gradient overflowed: none did, so no step is skipped."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def run_operator(self, function: Operator, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run the operator; 0 for a number that a fake tensor has not, while the weights are updated."""
        try:
            return function(*arguments, **keywords)
        except DataDependentOutputException:
            if self.watch.phase != "update":
                raise
            return 0.0


def _fed(asked: _Asked, session: Session, watch: Watch, batch: Batch) -> Iterator[Batch]:
    """The batch of each step on the device: a new one on a GPU, copied ahead where `more` are asked for."""
    if asked.device == "cpu":
        yield from [_noted(watch, batch)] * STEPS
        return
    ahead: list[Batch] = []
    for _ in range(STEPS + asked.more):
        ahead.append(_noted(watch, map_tensors(batch, torch.clone), aside=True) if asked.more else batch)
        if len(ahead) > asked.more:
            held = ahead.pop(0)  # by a loop over batches, until it has the next one
            yield _noted(watch, session.place(held if asked.more else map_tensors(held, torch.clone)))


def _noted(watch: Watch, batch: Batch, *, aside: bool = False) -> Batch:
    """The batch, counted as one; `aside` where a stream of its own has made it."""
    for tensor in tensors([batch]):
        require_known_size(tensor)
    keys = {watch.note(tensor) for tensor in tensors([batch])}
    watch.made_in.update(dict.fromkeys(keys, "batch"))
    watch.aside.update(keys if aside else ())
    return batch


def _of_one_rank(plan: Plan) -> Plan:
    """The plan less what divides the weights, and all that acts on several ranks with it."""
    if not any(technique.card.shards_weights for technique in plan.techniques):
        raise Refused("the memory of one of several ranks is predicted for a plan that divides the weights")
    return Plan(technique for technique in plan.techniques if technique.card.stage != Stage.PARALLEL)


def _of_a_gpu(plan: Plan) -> tuple[Plan, int]:
    """The plan less what its cards tell of a step's memory, and how many more batches that is."""
    told = [technique.card.step_memory for technique in plan.techniques]
    left = Plan(technique for technique in plan.techniques if not technique.card.step_memory)
    for technique in () if torch.cuda.is_available() else left.techniques:
        if technique.card.devices == ("cuda",):
            reason = "what it leaves in memory can be predicted only where there is a GPU"
            raise Refused(reason).by(technique.name)
    return left, told.count("batch")


def _open(asked: _Asked, watch: Watch, built: object) -> Session:
    job, plan, device = asked.job, asked.plan, asked.there
    if job.step is not None:
        raise Refused(
            "a job with an own step cannot be predicted: it cannot be cut into forward and backward"
        )
    if built is None:
        with torch.device(device), FakeBuildMode():
            built = call(job, "model")
    models = models_of(job, built)
    if asked.device == "cpu" and any(modules_of(model, nn.RNNBase) for model in models):
        raise Refused("a recurrent layer keeps what its library chooses to, which cannot be predicted")
    _move(models, device)
    for model in models:
        model.train()
        for tensor in (*model.parameters(), *model.buffers()):
            watch.made_in[watch.note(tensor)] = "parameters"
    optimizer = optimizer_of(job, built)
    build = Build(models=models, optimizer=optimizer, machine=asked.machine, device=device, own_step=False)
    return Session(
        plan, build, loss=job.loss, step=None, on_gradients=job.on_gradients, optimizers=[optimizer]
    )


def _use_foreach(session: Session) -> None:
    for group in (group for optimizer in session.optimizers for group in optimizer.param_groups):
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _move(models: list[nn.Module], device: torch.device) -> None:
    """Put what was built elsewhere on `device`; tied tensors stay tied. `Module.to` swaps what is watched."""
    moved: dict[int, Any] = {}
    for module in (inner for model in models for inner in model.modules()):
        for named in own_tensors(module):
            for name, tensor in named.items():
                if tensor is None or tensor.device.type == device.type:
                    continue
                if id(tensor) not in moved:
                    there = tensor.detach().to(device)
                    parameter = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if parameter else there
                named[name] = moved[id(tensor)]


def _step(session: Session, batch: Batch) -> None:
    try:
        session.step(batch)
    except VivaceError:
        raise
    except Exception as error:
        raise Refused(
            f"the step looks at numbers, which a prediction does not have: {blame(error)}"
        ) from error


def _phases(
    session: Session, watch: Watch, parts: dict[int, str], updates: list[int]
) -> AbstractContextManager[None]:
    """Tell the watch which seam runs, and note the gradients before the update, and at which move that is."""

    def phased(name: str, following: Callable[..., Any], *arguments: object) -> Any:
        before, watch.phase = watch.phase, name
        try:
            return following(*arguments)
        finally:
            watch.phase = before

    def finish(following: Callable[[], None]) -> None:
        following()
        updates.append(len(watch.moves))
        for model in session.build.models:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parts[watch.note(parameter.grad)] = "gradients"

    phases = {name: partial(phased, name) for name in ("forward", "backward", "update")}
    return session.seams.observed(finish=finish, **phases)


def _name_parts(watch: Watch, session: Session, parts: dict[int, str]) -> None:
    """Note what belongs to the optimizer, the weights and the batch, by the keys of the watch."""
    for optimizer in session.optimizers:
        for tensor in tensors([dict(state) for state in optimizer.state.values()]):
            parts[watch.note(tensor)] = "optimizer"
    for key, phase in watch.made_in.items():
        if phase in ("parameters", "batch"):
            parts[key] = phase


def _at_peak(watch: Watch, parts: dict[int, str], start: int) -> Prediction:
    """The largest sum of live bytes from move `start` on, and what it consists of."""
    at, highest = _highest(watch, start)
    at_peak: set[int] = set()
    for key, num_bytes in watch.moves[: at + 1]:
        (at_peak.add if num_bytes >= 0 else at_peak.discard)(key)
    found: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
    largest = 0
    for key in at_peak:
        kind = parts.get(key, "activations" if watch.made_in[key] == "forward" else "temporary")
        found[kind] += watch.sizes[key]
        largest = max(largest, watch.sizes[key] if kind == "activations" else 0)
    reserved = simulate(watch.moves, watch.aside)
    more = reserved / max(1, highest)
    lines = tuple((fixed * more, growing * more) for fixed, growing in _lines(watch, parts, start))
    return Prediction(highest, dict(found), reserved, lines, found["activations"] - largest)


def _lines(watch: Watch, parts: dict[int, str], start: int) -> list[tuple[int, int]]:
    """What is live from move `start` on: bytes whatever the batch, and those that grow with it, where their
    sum is the largest for one of the `SHARES` of the batch.
    """
    fixed = {key for key, phase in watch.made_in.items() if phase in ("update", WORKSPACE)} | watch.copies
    fixed |= {key for key, part in parts.items() if part != "batch"}
    live = [0, 0]
    seen = set()
    for number, (key, num_bytes) in enumerate(watch.moves):
        live[key not in fixed] += num_bytes if num_bytes >= 0 else -watch.sizes[key]
        if number >= start:
            seen.add((live[0], live[1]))
    found = [max(seen, key=lambda line: line[0] + share * line[1]) for share in SHARES]
    return sorted(set(found))


def _highest(watch: Watch, start: int) -> tuple[int, int]:
    """Where from move `start` on the most bytes live, and how many."""
    total = highest = at = 0
    for number, (key, num_bytes) in enumerate(watch.moves):
        total += num_bytes if num_bytes >= 0 else -watch.sizes[key]
        if number >= start and total > highest:
            highest, at = total, number
    return at, highest
