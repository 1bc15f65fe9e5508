"""A Job out of a LightningModule and its data: the same loss, optimizer, schedule, clipping and metric.

Source: https://lightning.ai/docs/pytorch/stable/common/lightning_module.html
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vivace import words
from vivace.errors import JobError
from vivace.trainers.clipping import clipping
from vivace.trainers.code import names_in

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule
    from torch import nn

LIBRARIES = ("lightning.pytorch", "pytorch_lightning")  # one library under two names, with classes of each
# What a Job would not call.
HOOKS = (
    "prepare_data",
    "setup",
    "configure_model",
    "on_fit_start",
    "on_train_start",
    "on_train_end",
    "on_fit_end",
    "teardown",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_callbacks",
    "backward",
    "lr_scheduler_step",
    "configure_gradient_clipping",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "on_validation_model_eval",
    "on_validation_model_train",
)
COUNTED = ("current_epoch", "global_step")  # by a Trainer; they stay 0 where there is none
BESIDE_TRAINING = ("validation_", "test_", "predict_", "on_")
OF_BATCHES = ("transfer_batch_to_device", "on_after_batch_transfer", "on_before_batch_transfer")


def parts_of(
    module: Any, data: Any, *, epochs: int, monitor: str, mode: str, gradient_clip_val: float | None
) -> dict[str, Any]:
    """The arguments of a Job, from a LightningModule that has not trained yet and a LightningDataModule, or
    the function that builds a DataLoader.

    `monitor` is what `validation_step` logs by this name, of which ``max`` or ``min`` is better. Raises
    JobError where the module does what a Job cannot say.
    """
    _refuse(module)
    _refuse_data(data)
    _warn_of_evaluation(module)
    if mode not in ("max", "min"):
        raise JobError(f"mode says what is better, 'max' or 'min', not {mode!r}")
    set_up = _set_up(data)

    def optimizer(model: Any) -> Any:
        optimizer, schedule, _ = _configured(model)
        optimizer.vivace_schedule = schedule  # made with it, and asked for after it
        model.vivace_trained = _names_of(model, optimizer)
        return optimizer

    def loss(model: Any, batch: Any) -> Any:
        step = model.training_step
        with _alone(model, "training_step"):
            output = step(batch, 0) if _takes_index(step) else step(batch)
        return output["loss"] if isinstance(output, dict) else output

    _, schedule, interval = _configured(copy.deepcopy(module))
    found: dict[str, Any] = {
        "model": lambda: _as_given(module),
        "data": (lambda: _one_loader(set_up(), "train_dataloader")) if set_up else data,
        "loss": loss,
        "optimizer": optimizer,
        "epochs": epochs,
    }
    if schedule is not None:
        found |= {"scheduler": lambda optimizer: optimizer.vivace_schedule, "scheduler_every": interval}
    if gradient_clip_val:
        found["on_gradients"] = clipping(gradient_clip_val, _trained)
    if monitor:
        if not set_up:
            raise JobError("monitor needs validation data: hand over a LightningDataModule")
        found |= {
            "metric": _monitored(monitor, mode, _base(module, "LightningModule")),
            "metric_name": monitor if mode == "max" else f"minus {monitor}",
            "validation": lambda: _one_loader(set_up(), "val_dataloader"),
        }
    return found


def _base(given: object, kind: str) -> Any:
    """The class of Lightning's, of this name, that something is of; None where it is of none."""
    libraries = filter(None, map(sys.modules.get, LIBRARIES))  # whose class was not imported, it is not of
    return next((base for one in libraries if isinstance(given, base := getattr(one, kind))), None)


def _refuse(module: LightningModule) -> None:
    base = _base(module, "LightningModule")
    if base is None:
        raise JobError(f"a LightningModule is needed, not a {type(module).__name__}")
    if not module.automatic_optimization:
        raise JobError("a module with manual optimization cannot become a Job; write Job(step=...)")
    for name in (*HOOKS, *OF_BATCHES):
        if getattr(type(module), name) is not getattr(base, name):
            raise JobError(f"the module's {name} would not be called: a Job has no place for it")
    for name, member in inspect.getmembers(type(module)):
        own = getattr(base, name, None) is not member and not name.startswith(BESIDE_TRAINING)
        found = [count for count in COUNTED if own and count in names_in(member)]
        if found:
            raise JobError(f"the module's {name} uses {found[0]}, which is 0 without a Trainer")
    if not _takes_index(module.training_step):
        return
    index = list(inspect.signature(module.training_step).parameters)[1]
    step = inspect.unwrap(type(module).training_step)
    if any(each.argval == index for each in dis.get_instructions(step)):
        raise JobError(f"training_step uses {index}, which a Job's loss does not know")


def _refuse_data(data: object) -> None:
    base = _base(data, "LightningDataModule")
    for name in OF_BATCHES if base else ():
        if getattr(type(data), name) is not getattr(base, name):
            raise JobError(
                f"the data module's {name} would not be called: do it in the dataset or in training_step"
            )


def _warn_of_evaluation(module: LightningModule) -> None:
    still = sum(not part.training for part in module.modules())
    if still:
        warnings.warn(
            f"{words.count(still, 'module')} of {type(module).__name__} in evaluation mode will stay in it "
            "while the Job trains: call train() first where that is not meant",
            stacklevel=4,
        )


def _takes_index(step: Callable[..., Any]) -> bool:
    return len(inspect.signature(step).parameters) > 1


def _set_up(data: Any) -> Callable[[], Any] | None:
    """The data module, prepared when it is first asked; None where `data` is the function itself."""
    if not hasattr(data, "train_dataloader"):
        if not callable(data):
            raise JobError(f"data must be a LightningDataModule or a function, not a {type(data).__name__}")
        return None
    done = list[bool]()

    def set_up() -> Any:
        if not done:
            data.prepare_data()
            data.setup("fit")
            done.append(True)
        return data

    return set_up


def _one_loader(data: LightningDataModule, name: str) -> Any:
    """What a data module's function returns. Several loaders, of which Lightning makes one, are refused, and
    of a list of one for validation that one is taken.
    """
    found = getattr(data, name)()
    loaders = getattr(found, "flattened", found)  # of a CombinedLoader
    if isinstance(found, Mapping):
        loaders = list(found.values())
    if not isinstance(loaders, (list, tuple)):
        return found
    if name == "val_dataloader" and len(loaders) == 1:
        return loaders[0]
    raise JobError(
        f"the data module's {name} returns a collection of {words.count(len(loaders), 'loader')}, which a "
        "Job would take for batches: let it return one DataLoader"
    )


def _as_given(module: LightningModule) -> Any:
    """A copy whose `train` leaves in evaluation mode what is in it here, such as a frozen backbone, as
    Lightning does.
    """
    found = _unattached(copy.deepcopy(module))
    still = frozenset(name for name, part in found.named_modules() if not part.training)
    if still:
        found.train = functools.partial(_train, found, still)
    return found


def _train(module: nn.Module, still: frozenset[str], mode: bool = True) -> Any:
    """In place of `train`; of the module, so that copies and pickles have their own."""
    type(module).train(module, mode)
    for name, part in module.named_modules():
        if name in still:
            part.training = False
    return module


def _unattached(module: Any) -> Any:
    """A module whose `log` says nothing, as there is no Trainer to say it to."""
    module.log = _silent
    module.log_dict = _silent
    return module


def _silent(*logged: object, **named: object) -> None:
    """In place of `log` and `log_dict`; a function of its own, so that copies and pickles know it.

    A metric of torchmetrics keeps what it has seen until the end of an epoch, which nobody tells it here.
    """
    one: Any
    for value in (*logged, *named.values()):
        for one in value.values() if isinstance(value, Mapping) else [value]:
            if _counts(one):
                one.reset()


def _counts(value: object) -> bool:
    """Is it a metric of torchmetrics, which adds up by itself?"""
    return hasattr(value, "compute") and hasattr(value, "reset")


class _Asked(JobError, RuntimeError):
    """Also what a module without a Trainer raises, for those that do without."""


class _NoTrainer:
    """In place of the Trainer that a module asks: raises JobError where it asks for what a Job has not."""

    logger, loggers, global_rank, local_rank = None, (), 0, 0  # as a module without a Trainer says

    def __init__(self, function: str) -> None:
        self.function = function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _Asked(
            f"the module's {self.function} asks the Trainer for {name}, and a Job has no Trainer: give it to "
            "the module's __init__, or do without"
        )


@contextlib.contextmanager
def _alone(module: LightningModule, function: str) -> Iterator[None]:
    """Inside, a function of a module, and what it calls, may not ask the Trainer: its counts would be 0."""
    nobody: Any = _NoTrainer(function)
    module.trainer = nobody
    try:
        yield
    finally:
        module.trainer = None


def _names_of(model: Any, optimizer: Any) -> frozenset[str]:
    """Of the parameters of a model that an optimizer has."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in own)


def _trained(model: Any) -> list[Any]:
    """The parameters that the optimizer has, whose gradients Lightning clips."""
    return [one for name, one in model.named_parameters() if name in model.vivace_trained]


def _configured(module: LightningModule) -> tuple[Any, Any, str]:
    """Optimizer, schedule or None, and after what the schedule steps."""
    with _alone(module, "configure_optimizers"):
        found: Any = module.configure_optimizers()
    schedule: Any = None
    if isinstance(found, (list, tuple)) and len(found) == 1 and isinstance(found[0], dict):
        (found,) = found
    if isinstance(found, dict):
        found, schedule = found["optimizer"], found.get("lr_scheduler")
    elif isinstance(found, (list, tuple)):
        lists = len(found) == 2 and all(isinstance(each, (list, tuple)) for each in found)
        optimizers, schedules = found if lists else (found, [])
        if len(optimizers) != 1 or len(schedules) > 1:
            found = f"{len(optimizers)} and {len(schedules)}"
            raise JobError(f"a Job has one optimizer and one schedule; the module has {found}")
        found, schedule = optimizers[0], (schedules or [None])[0]
    interval = "epoch"
    if isinstance(schedule, dict):
        if schedule.get("frequency", 1) != 1 or schedule.get("reduce_on_plateau"):
            raise JobError("a Job's schedule steps after every step or every epoch, and knows no metric")
        schedule, interval = schedule["scheduler"], schedule.get("interval", "epoch")
    if type(schedule).__name__ == "ReduceLROnPlateau":
        raise JobError("a Job's schedule knows no metric: ReduceLROnPlateau cannot act")
    if found is None:
        raise JobError("the module's configure_optimizers returns no optimizer")
    return found, schedule, interval


def _monitored(monitor: str, mode: str, base: type) -> Callable[[Any, Iterable[Any]], float]:
    """What `validation_step` logs by this name, over all batches by their sizes, as Lightning does."""
    library = base.__module__.partition(".core")[0]

    def metric(model: Any, batches: Iterable[Any]) -> float:
        import torch

        extract_batch_size = importlib.import_module(f"{library}.utilities.data").extract_batch_size
        total, samples = 0.0, 0
        seen: dict[str, Any] = {}
        counting: dict[int, Any] = {}  # metrics of torchmetrics, which add up by themselves
        counted: Any = None

        def log(name: str, value: object, *_: object, batch_size: int | None = None, **more: object) -> None:
            reduced = more.get("reduce_fx", "mean")
            if name == monitor and reduced not in ("mean", torch.mean) and not _counts(value):
                raise JobError(f"'{monitor}' is logged with reduce_fx={reduced!r}, and a Job takes the mean")
            seen[name] = value, batch_size
            counting.update({id(value): value} if _counts(value) else {})

        def log_dict(values: Mapping[str, object], *_: object, **more: Any) -> None:
            for name, value in values.items():
                log(name, value, **more)

        model.log, model.log_dict = log, log_dict
        try:
            for index, batch in enumerate(batches):
                seen.clear()
                step = model.validation_step
                step(batch, index) if _takes_index(step) else step(batch)
                if monitor not in seen:
                    raise JobError(f"validation_step logs {', '.join(seen) or 'nothing'}, not '{monitor}'")
                value, size = seen[monitor]
                if _counts(value):
                    counted = value
                    continue
                size = size or extract_batch_size(batch)
                total, samples = total + size * float(value), samples + size
            if counted is not None:
                total, samples = float(counted.compute()), 1
        finally:
            for one in counting.values():
                one.reset()
            _unattached(model)
        return (total if mode == "max" else -total) / samples

    return metric
