"""What `Job.from_keras` is given, and the functions of the Job that are made of it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from vivace.errors import JobError
from vivace.trainers.keras_adapter import (
    KerasModule,
    KerasOptimizer,
    copy_of,
    frozen,
    named_variables,
    optimizer_of,
    take_over,
    thawed,
)

MODEL_FILE = "model.keras"
RATES = 100  # so many times, at most, a schedule is looked at
INSTEAD = {
    "EarlyStopping": "give the epochs that you want",
    "ModelCheckpoint": "vivace.train keeps checkpoints itself",
    "BackupAndRestore": "vivace.train(..., resume=True) goes on where a run stopped",
    "LearningRateScheduler": "compile the model with a keras.optimizers.schedules schedule",
    "ReduceLROnPlateau": "compile the model with a keras.optimizers.schedules schedule",
    "TensorBoard": "metrics.jsonl in the run folder holds loss and metric",
    "CSVLogger": "metrics.jsonl in the run folder holds loss and metric",
    "TerminateOnNaN": "vivace.train stops by itself where the loss is not finite",
}


class Arrays(Dataset[Any]):
    """Samples of nested arrays, ``(x, y)`` or ``(x, y, sample weights)``, as `fit` takes them."""

    def __init__(self, arrays: object) -> None:
        self.arrays = arrays
        self.length = int(_leaves(arrays)[0].shape[0])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return _mapped(lambda array: array[index], self.arrays)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """A whole batch at once, which is several times as fast as sample by sample."""
        return [_mapped(lambda array: array[torch.as_tensor(indices)], self.arrays), len(indices)]


def collated(batch: list[Any]) -> Any:
    """The batch that `Arrays.__getitems__` gave, or a batch of samples."""
    if len(batch) == 2 and isinstance(batch[1], int):
        return batch[0]
    return _stacked(batch)


@dataclasses.dataclass
class KerasSource:
    """A compiled model, frozen as it was given, with its data; its methods are the Job's functions."""

    original: Any  # the person's own; it is not taken along into child processes
    frozen: bytes
    values: dict[str, torch.Tensor]  # of all variables, seeds included, which Keras does not save
    arrays: Any
    validation_arrays: Any
    batch_size: int
    shuffle: bool

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "original": None}

    def model(self) -> KerasModule:
        """The model as it was given, anew."""
        keras_model = thawed(self.frozen)
        with torch.no_grad():
            for variable, value in zip(keras_model.variables, self.values.values(), strict=True):
                variable.value.copy_(value)
        return KerasModule(keras_model, tuple(self.values))

    def data(self) -> DataLoader[Any]:
        """The training data in batches."""
        return self._loader(self.arrays, self.shuffle)

    def validation(self) -> DataLoader[Any]:
        """The validation data in batches, in order."""
        return self._loader(self.validation_arrays, False)

    def trained(self, module: KerasModule, folder: Path) -> None:
        """Give the person's model the trained weights and optimizer, and save it into the run's folder."""
        trained = module.keras_model
        trained.save(folder / MODEL_FILE)
        if self.original is not None:
            take_over(self.original, trained)

    def _loader(self, arrays: object, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(Arrays(arrays), self.batch_size, shuffle=shuffle, collate_fn=collated)


def loss(module: KerasModule, batch: object) -> torch.Tensor:
    """The loss that the model was compiled with, regularization and added losses included."""
    x, y, weights = _unpacked(batch)
    found: torch.Tensor = module.keras_model.compute_loss(x=x, y=y, y_pred=module(x), sample_weight=weights)
    return found


def optimizer(module: KerasModule) -> KerasOptimizer:
    """The optimizer that the model was compiled with."""
    return optimizer_of(module)


@dataclasses.dataclass(frozen=True)
class FirstMetric:
    """The first metric that the model was compiled with, as `evaluate` computes it; an error times -1."""

    name: str
    sign: float

    def __call__(self, module: KerasModule, batches: Iterable[Any]) -> float:
        """The metric over all batches."""
        keras_model = module.keras_model
        keras_model.reset_metrics()
        found: dict[str, Any] = {}
        for batch in batches:
            x, y, weights = _unpacked(batch)
            found = keras_model.compute_metrics(x, y, module(x), sample_weight=weights)
        return self.sign * float(found[self.name])


def fields(
    model: Any,
    x: Any,
    y: Any,
    *,
    batch_size: int,
    epochs: int,
    validation_data: Any,
    sample_weight: Any,
    shuffle: bool,
    callbacks: Any,
) -> dict[str, Any]:
    """The fields of a Job that trains what ``model.fit`` with these arguments does.

    Raises JobError where the model is not compiled, or something of it has no place in a Job.
    """
    keras = _keras()
    _require(model, keras, callbacks)
    arrays = _tensors((x, y) if sample_weight is None else (x, y, sample_weight), "x, y and sample_weight")
    given = _tensors(tuple(validation_data), "validation_data") if validation_data is not None else None
    if not isinstance(batch_size, int) or batch_size < 1:
        raise JobError(f"batch_size must be a whole number of at least 1, not {batch_size!r}")
    first = _mapped(lambda array: array[:batch_size], arrays)
    steps = -(-_leaves(arrays)[0].shape[0] // batch_size) * (epochs if isinstance(epochs, int) else 1)
    fresh = _built(model, first, steps)
    metric = _metric(fresh, first, keras)
    source = KerasSource(
        original=model,
        frozen=frozen(model),
        values={name: v.value.detach().to("cpu", copy=True) for name, v in named_variables(model.variables)},
        arrays=arrays,
        validation_arrays=given,
        batch_size=batch_size,
        shuffle=shuffle,
    )
    found = {
        "model": source.model,
        "data": source.data,
        "loss": loss,
        "optimizer": optimizer,
        "epochs": epochs,
        "on_trained": source.trained,
    }
    if metric is not None:
        found |= {"metric": metric, "metric_name": f"minus {metric.name}" if metric.sign < 0 else metric.name}
        found |= {"validation": source.validation} if given is not None else {}
    return found


def _keras() -> Any:
    try:
        import keras
    except ImportError as error:
        raise JobError(f"Keras cannot be imported ({error}): pip install 'vivace[keras]'") from error
    if keras.backend.backend() != "torch":
        raise JobError(
            f"Keras runs on its {keras.backend.backend()} backend, and Vivace trains with torch: set "
            "KERAS_BACKEND=torch before keras is imported"
        )
    return keras


def _require(model: Any, keras: Any, callbacks: Any) -> None:
    """Raise JobError where a Job would train something else than `fit` does."""
    if not isinstance(model, keras.Model):
        raise JobError(f"from_keras takes a keras.Model, not a {type(model).__name__}")
    if not model.compiled or model.optimizer is None:
        raise JobError(f"the model '{model.name}' is not compiled: call model.compile(optimizer, loss) first")
    given = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
    for callback in given:
        name = type(callback).__name__
        instead = INSTEAD.get(name, "leave it out, and do it after the training or in vivace.attach's loop")
        raise JobError(f"the callback {name} of fit has no place in a Job: {instead}")
    for method in ("train_step", "make_train_function"):
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise JobError(
                f"{type(model).__name__} has a {method} of its own, which a Job would pass over: give "
                "vivace.Job(step=...) what it does"
            )
    if model.jit_compile:
        raise JobError(
            "the model is compiled with jit_compile=True: leave it out, tune tries compiling itself"
        )
    _require_plain(model.optimizer, keras)
    mixed = [layer for layer in [model, *model.layers] if layer.dtype_policy.name.startswith("mixed_")]
    if mixed:
        raise JobError(
            f"the layer '{mixed[0].name}' has the dtype policy {mixed[0].dtype_policy.name}: build the model "
            "in float32, tune tries lower precision itself and proves it"
        )


def _require_plain(optimizer: Any, keras: Any) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor:
        raise JobError(
            f"the optimizer {name} scales the loss: leave it out, tune's techniques do it themselves"
        )
    if optimizer.use_ema:
        raise JobError(
            f"the optimizer {name} averages the weights (use_ema), which only fit ends: leave it out"
        )
    if optimizer.gradient_accumulation_steps:
        raise JobError(
            f"the optimizer {name} accumulates gradients over {optimizer.gradient_accumulation_steps} steps, "
            "so that a step is not an update: give that batch size to from_keras"
        )


def _built(model: Any, first: object, steps: int) -> Any:
    """A copy of the model; model and optimizer are built first, as `fit` builds them.

    Raises JobError where the copy would not train alike.
    """
    x, _, _ = _unpacked(first)
    if not model.built:
        with torch.no_grad():
            model(x)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    try:
        copied = copy_of(model)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise JobError(
            f"the model '{model.name}' cannot be copied by Keras ({reason}): mark its classes and functions "
            "with keras.saving.register_keras_serializable(), and let get_config return what __init__ takes"
        ) from error
    mine = _computed(model, first, steps)
    differs = _differing(mine, _computed(copied, first, steps))
    if differs and (differs := differs - _differing(mine, _computed(model, first, steps))):
        names = " and ".join(sorted({name for name, _ in differs}))
        raise JobError(
            f"Keras' copy of the model '{model.name}' has another {names}: what a "
            "get_config leaves out is not saved, nor what is set after __init__; let __init__ take it and "
            "get_config return it"
        )
    return copied


def _computed(model: Any, batch: object, steps: int) -> dict[str, list[Any]]:
    """What a copy has in common with its model. The variables are left as they were."""
    module = KerasModule(model, [name for name, _ in named_variables(model.variables)])
    variables = [*model.variables, *model.optimizer.variables]
    before = [variable.value.detach().clone() for variable in variables]
    begun = int(model.optimizer.iterations.value)
    found: dict[str, list[Any]] = {"output": [], "loss": [], "learning rate": []}
    gpus = {variable.value.get_device() for variable in variables if variable.value.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(gpus):
        try:
            for training in (False, True):
                torch.manual_seed(0)
                found["output"] += _leaves(module.train(training)(_unpacked(batch)[0]))
                torch.manual_seed(0)
                found["loss"].append(loss(module, batch))
            for done in range(0, steps, -(-steps // RATES) or 1):
                model.optimizer.iterations.assign(begun + done)
                found["learning rate"].append(torch.tensor(float(model.optimizer.learning_rate)))
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.value.copy_(value)
    return found


def _differing(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> set[tuple[str, int]]:
    """What differs by more than rounding, by name and number."""
    return {
        (name, number)
        for name, values in one.items()
        for number, (mine, theirs) in enumerate(zip(values, other[name], strict=True))
        if mine.shape != theirs.shape or not torch.allclose(mine.double(), theirs.double(), equal_nan=True)
    }


def _metric(model: Any, first: object, keras: Any) -> FirstMetric | None:
    """The first compiled metric; a copy of the model tells it, since Keras builds metrics by a batch."""
    x, y, weights = _unpacked(first)
    with torch.no_grad():
        model.compute_metrics(x, y, model(x), sample_weight=weights)
    compiled = next((each for each in model.metrics if getattr(each, "metrics", None)), None)
    if compiled is None:
        return None
    first, name = compiled.metrics[0], next(iter(compiled.result()))  # of several outputs, with the output's
    kinds = keras.metrics
    errors = (
        kinds.MeanSquaredError,
        kinds.RootMeanSquaredError,
        kinds.MeanAbsoluteError,
        kinds.MeanAbsolutePercentageError,
        kinds.MeanSquaredLogarithmicError,
        kinds.LogCoshError,
        kinds.KLDivergence,
        kinds.Poisson,
        kinds.BinaryCrossentropy,
        kinds.CategoricalCrossentropy,
        kinds.SparseCategoricalCrossentropy,
        kinds.Hinge,
        kinds.SquaredHinge,
        kinds.CategoricalHinge,
        kinds.FalsePositives,
        kinds.FalseNegatives,
    )
    is_error = isinstance(first, errors) or _is_loss(first, keras)
    return FirstMetric(name, -1.0 if is_error else 1.0)


def _is_loss(metric: Any, keras: Any) -> bool:
    """Is a metric the mean of one of Keras' losses, which was given as a function or an object?"""
    if type(metric) is not keras.metrics.MeanMetricWrapper:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it could not save
        told = metric.get_config()["fn"]
    name = told["config"] if told["class_name"] == "function" else told["class_name"]
    return isinstance(name, str) and hasattr(keras.losses, name)


def _unpacked(batch: Any) -> tuple[Any, Any, Any]:
    x, y, *weights = batch
    return x, y, weights[0] if weights else None


def _tensors(arrays: object, what: str) -> Any:
    """Arrays as tensors on the host, floating-point ones as Keras takes them.

    Raises JobError where there are other things than arrays, or their lengths differ.
    """
    import keras

    floating = getattr(torch, keras.config.floatx())

    def tensor(array: object) -> torch.Tensor:
        if not hasattr(array, "shape") or not len(array.shape):
            raise JobError(
                f"{what} must be arrays, or lists, tuples and dictionaries of arrays, not a "
                f"{type(array).__name__}: give vivace.Job(data=...) a loader instead"
            )
        found = torch.as_tensor(array).cpu()
        return found.to(floating) if found.is_floating_point() else found

    found = _mapped(tensor, arrays)
    lengths = sorted({int(leaf.shape[0]) for leaf in _leaves(found)})
    if len(lengths) != 1 or not lengths[0]:
        raise JobError(
            f"{what} must have one length of at least 1, not {', '.join(map(str, lengths)) or '0'}"
        )
    return found


def _mapped(function: Any, tree: Any) -> Any:
    """`tree` with `function` applied to each leaf of its tuples, lists and dictionaries; None stays."""
    if isinstance(tree, (tuple, list)):
        return type(tree)(_mapped(function, item) for item in tree)
    if isinstance(tree, dict):
        return {key: _mapped(function, value) for key, value in tree.items()}
    return None if tree is None else function(tree)


def _stacked(samples: list[Any]) -> Any:
    first = samples[0]
    if isinstance(first, (tuple, list)):
        return type(first)(_stacked(list(column)) for column in zip(*samples, strict=True))
    if isinstance(first, dict):
        return {key: _stacked([sample[key] for sample in samples]) for key in first}
    return None if first is None else torch.stack(samples)


def _leaves(tree: object) -> list[Any]:
    if isinstance(tree, (tuple, list)):
        return [leaf for item in tree for leaf in _leaves(item)]
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _leaves(value)]
    return [] if tree is None else [tree]
