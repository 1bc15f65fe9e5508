"""The child's side of `scripts/bench peer`: what a person of another library would write, as techniques.

Each takes the place of the whole step by that library's own calls, on the job's own model, loss, optimizer
and gradient clipping, so that `vivace.measuring` times it and `vivace.verify` judges it like any plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import vivace
from vivace.technique import UNIT_ROUNDOFF, Build, Card, Numerics, Seam, Stage, Technique

Step = Callable[[Any], Any]  # (placed batch) -> detached loss
PEER = "pytorch_autotune"
OVERRUN = 1.5  # times the budget, after which the peer's search is interrupted
FABRICS = ("lightning_fabric", "lightning.fabric")


def importable(module: str) -> bool:
    """Can this interpreter import `module`?"""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@dataclasses.dataclass(frozen=True)
class OtherStep(Technique):
    """A library's own training step, around the job's own loss and clipping as the session has them."""

    label: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]

    def stepper(self, build: Build) -> Step:
        """Set the library up on the build's model and optimizer; return its step."""
        raise NotImplementedError

    def apply(self, build: Build) -> None:
        """Replace the step. Refused where the library is not installed."""
        build.require(any(map(importable, self.modules)), f"{self.label} is not installed")
        build.replace(Seam.STEP, self.stepper(build))


class StandIn:
    """The person's model, but called as a library wants it called."""

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        self.model, self.call = model, call

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def described(summary: str, source: str, unit_roundoff: float = 0.0) -> Card:
    """A card; the stage lets the ruler give compiled code the random numbers of eager code."""
    return Card(
        stage=Stage.COMPILE,
        numerics=Numerics.ROUNDING,
        summary=summary,
        source=source,
        unit_roundoff=unit_roundoff,
    )


@vivace.register
@dataclasses.dataclass(frozen=True)
class PeerResult(OtherStep):
    """The result of an earlier search of pytorch-autotune, restored from its own cache by its own function.

    Its own step runs, or, where the job clips gradients, the loop that its README offers for that. The flags
    that it leaves set stay set for as long as the session is open.
    """

    card = described("what pytorch-autotune found", "https://github.com/JonSnow1807/pytorch-autotune")
    name = "peer_result"
    label = "pytorch-autotune"
    modules = (PEER,)
    job: str = ""  # a reference such as ``package.module:name``, for an example of its batches

    def stepper(self, build: Build) -> Step:
        """The result's step. Raises RuntimeError where the cache does not hold one."""
        import torch

        from vivace.job import load
        from vivace.session.opening import call, first_batches
        from vivace.tensors.optimizers import switch_optimizer

        _give_back_flags(build)
        optimizer, function = build.optimizer, build.loss
        assert optimizer is not None
        assert function is not None
        batches = [tuple(first_batches(call(load(self.job), "data"), 1)[0])]  # the example, then the present

        def loss(outputs: Any, targets: Any) -> Any:
            return function(StandIn(build.models[0], lambda *_: outputs), (batches[-1][0], targets))

        result = autotuned(
            build.models[0], batches[0], loss, lambda _: optimizer, build.device, budget=0, cache=True
        )
        if result.config.fused_opt and own_word(optimizer) is not None:
            build.on_close(switch_optimizer(optimizer, {"fused": True, "foreach": False}))
        exact = UNIT_ROUNDOFF["tf32" if build.device.type == "cuda" else "float32"]
        coarse = {"amp_bf16": UNIT_ROUNDOFF["bfloat16"], "amp_fp16": UNIT_ROUNDOFF["float16"]}
        build.unit_roundoff = coarse.get(result.config.precision, exact)
        scaler = result.scaler or torch.amp.GradScaler(build.device.type, enabled=False)

        def own_step(batch: Any) -> Any:
            batches[:] = [tuple(batch)]
            return result.step(*batch).detach()

        def step(batch: Any) -> Any:
            result.optimizer.zero_grad(set_to_none=True)
            with result.autocast():
                found = function(StandIn(build.models[0], result.model), batch)
            scaler.scale(found).backward()
            scaler.unscale_(result.optimizer)
            build.on_gradients(build.models[0])  # type: ignore[misc]
            scaler.step(result.optimizer)
            scaler.update()
            return found.detach()

        return own_step if build.on_gradients is None else step


@vivace.register
@dataclasses.dataclass(frozen=True)
class FabricBf16(OtherStep):
    """Lightning Fabric with ``precision="bf16-mixed"``."""

    card = described(
        "Fabric(precision='bf16-mixed')",
        "https://lightning.ai/docs/fabric/stable/fundamentals/precision.html",
        UNIT_ROUNDOFF["bfloat16"],
    )
    name = "fabric_bf16_mixed"
    label = "Lightning Fabric"
    modules = FABRICS

    def stepper(self, build: Build) -> Step:
        """Model and optimizer as Fabric sets them up, in the loop of its documentation."""
        fabrics: Any = importlib.import_module(next(filter(importable, FABRICS)))
        fabric = fabrics.Fabric(accelerator=build.device.type, devices=1, precision="bf16-mixed")
        model, optimizer = fabric.setup(build.models[0], build.optimizer)
        return _loop(build, model, optimizer, fabric.backward)


@vivace.register
@dataclasses.dataclass(frozen=True)
class AccelerateBf16(OtherStep):
    """Hugging Face Accelerate with ``mixed_precision="bf16"``."""

    card = described(
        "Accelerator(mixed_precision='bf16')",
        "https://huggingface.co/docs/accelerate/basic_tutorials/migration",
        UNIT_ROUNDOFF["bfloat16"],
    )
    name = "accelerate_bf16"
    label = "Accelerate"
    modules = ("accelerate",)

    def stepper(self, build: Build) -> Step:
        """Model and optimizer as Accelerate prepares them, in the loop of its documentation."""
        accelerate: Any = importlib.import_module("accelerate")
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=build.device.type == "cpu")
        model, optimizer = accelerator.prepare(build.models[0], build.optimizer)
        return _loop(build, model, optimizer, accelerator.backward)


class PeerSearch:
    """Serves `vivace.processes.launch.Child`: lets the peer search as its README shows."""

    def __init__(self, job: vivace.Job) -> None:
        self.job = job

    def run(self, seconds: float) -> dict[str, Any]:
        """Search for `seconds`; the result goes to the peer's cache. Returns its own report.

        One trial may take longer than the whole budget; it is then interrupted as by Ctrl-C, upon which the
        peer keeps the best so far.
        """
        from vivace.inspection import inspect
        from vivace.session.opening import call, first_batches, seed_everything, training_device

        seed_everything(0)
        model = call(self.job, "model")
        word = own_word(call(self.job, "optimizer", model))
        given: Any = {"optimizer": lambda _: call(self.job, "optimizer", model)}
        batch = tuple(first_batches(call(self.job, "data"), 1)[0])

        def loss(outputs: Any, targets: Any) -> Any:
            return self.job.loss(lambda _: outputs, (batch[0], targets))  # type: ignore[misc]

        begin = time.perf_counter()
        with interrupted_after(OVERRUN * seconds):
            result = autotuned(
                model,
                batch,
                loss,
                device=training_device(inspect()),
                budget=seconds,
                cache="refresh",
                **(word or given),
            )
        report = result.report.to_dict()
        return {
            "configuration": result.config.to_dict(),
            "optimizer": f"by name: {word}" if word else "the job's own, as a function",
            "baseline_milliseconds": report["baseline_ms"],
            "trials": report["trials"],
            "interrupted": report["interrupted"],
            "tuner_seconds": time.perf_counter() - begin,
        }


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block if it takes longer."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def autotuned(
    model: Any, batch: tuple[Any, ...], loss: Any, optimizer: Any, device: Any, **options: Any
) -> Any:
    """The peer's public function on a job whose batches are (inputs, targets) pairs."""
    import pytorch_autotune

    return pytorch_autotune.autotune(
        model, batch, loss_fn=loss, optimizer=optimizer, device=str(device), verbose=False, **options
    )


def own_word(optimizer: Any) -> dict[str, Any] | None:
    """The peer's own words for this very optimizer, of which it tries fused forms too; None: it has none."""
    import torch

    rate = optimizer.defaults["lr"]
    parameters = [torch.zeros(1, requires_grad=True)]
    words = {
        "adamw": torch.optim.AdamW(parameters, lr=rate),
        "adam": torch.optim.Adam(parameters, lr=rate),
        "sgd": torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    }
    for word, built in words.items():
        alike = type(built) is type(optimizer) and built.defaults == optimizer.defaults
        if alike and len(optimizer.param_groups) == 1:
            return {"optimizer": word, "lr": rate}
    return None


def _loop(build: Build, model: Any, optimizer: Any, backward: Callable[[Any], None]) -> Step:
    called, function = StandIn(build.models[0], model), build.loss
    assert function is not None

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = function(called, batch)
        backward(loss)
        if build.on_gradients is not None:
            build.on_gradients(build.models[0])
        optimizer.step()
        return loss.detach()

    return step


def _give_back_flags(build: Build) -> None:
    """Put the flags that the peer sets back on close.

    The old TF32 names go off first: torch refuses to read them while the new ones disagree.
    """
    import torch

    backends: Any = torch.backends
    for owner in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        build.set_flag(owner, "fp32_precision", owner.fp32_precision)
    build.set_flag(backends.cudnn, "benchmark", backends.cudnn.benchmark)

    def old_names_off() -> None:
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = False

    build.on_close(old_names_off)
