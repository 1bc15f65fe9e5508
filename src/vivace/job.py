"""Job: what a person wants trained, as plain callables that rebuild everything from zero; and its loader."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from vivace.blame import blame
from vivace.errors import JobError, VivaceError, nearest

if TYPE_CHECKING:
    from vivace.pictures import Picture

Batch: TypeAlias = object
"""What the data yields: tensors in containers, or in objects with a ``to`` or ``pin_memory``, such as graphs.

Whatever else the loss takes is handed to it as it is. See `tensors.trees`.
"""

# `train.py:job,width=64,root=/data`: no character that any shell reads. A folder may be called `lr,a=1`, so
# that no argument stands before `.py` or a colon.
_ARGUMENTS = re.compile(r"(?P<name>[^:]+?\.py|.+?:[\w.]+|(?!.*(?::|\.py$))[^,/]+)(?P<given>(,\w+=[^,]*)+)")
_FOLDER = re.compile(r"[^:]*/(?=[^/:]+\.py:)")
# Of each file that was loaded, by its module: its path, time of its last change in ns, and bytes. Notebooks
# edit files.
_WRITTEN: dict[str, tuple[Path, int, int]] = {}
_METRIC = "metric"
_TELL_NOTHING = (
    _METRIC,
    "compute_metric",
    "eval",
    "evaluate",
    "evaluation",
    "score",
    "test",
    "valid",
    "validate",
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A training job. Every callable builds afresh: Vivace calls each as often as it needs, in child
    processes too.

    Args:
        model: ``() -> nn.Module`` (with `step`: a module, or a list, tuple or dict of modules); its `train`
            is called, which undoes an `eval` of a part.
        data: ``() -> iterable of batches``, usually a DataLoader with your batch size and order;
            `set_epoch` of its dataset or sampler is called.
        loss: ``(model, batch) -> scalar``, the mean over the batch.
        optimizer: ``(model) -> torch.optim.Optimizer`` (with `step`: anything your step function wants).
        scheduler: ``(optimizer) -> learning-rate scheduler``, stepped once per `scheduler_every`; one of your
            own has `state_dict` and `load_state_dict`.
        metric: ``(model, batches) -> float``, higher is better; called in evaluation mode without gradients.
        metric_name: what it is called wherever it is shown, such as ``accuracy``; where it is left out, as
            the function of `metric` is, unless that has a name which tells nothing.
        validation: ``() -> iterable of batches`` for `metric`; the training data where it is left out.
        on_gradients: ``(model) -> None``; sees true, unscaled gradients, for clipping.
        step: ``(model, optimizer, batch) -> scalar loss``: your own step, for training that cannot be cut
            into forward, backward and update (GANs, several optimizers). Takes the place of `loss`.
        damaged: what becomes of samples that cannot be read: ``"raise"``, ``"skip"`` (a smaller batch) or
            ``"replace"`` (by another sample of the batch); counted and listed by `train`.
        checksums: a file of ``sha256sum`` that lists the files of the data. One that has changed is damaged.
        epochs: passes over `data`.
        scheduler_every: ``"epoch"`` or ``"step"``.
        on_trained: ``(model, folder) -> None``; called by `train` when it has come to its end, with the
            trained model and the run's folder.
        pictures: ``(model, batches) -> {heading: [pictures]}``, of what `vivace.pictures` has; called as
            `metric` is, on the same data, when `train` has come to its end, and drawn on the run's page.
    """

    model: Callable[[], Any]
    data: Callable[[], Iterable[Any]]
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None
    metric: Callable[[Any, Iterable[Any]], float] | None = None
    validation: Callable[[], Iterable[Any]] | None = None
    on_gradients: Callable[[Any], Any] | None = None
    step: Callable[[Any, Any, Any], Any] | None = None
    epochs: int = 1
    scheduler_every: Literal["epoch", "step"] = "epoch"
    damaged: Literal["raise", "skip", "replace"] = "raise"
    metric_name: str = _METRIC
    on_trained: Callable[[Any, Path], None] | None = None
    pictures: Callable[[Any, Iterable[Any]], Mapping[str, Sequence[Picture]]] | None = None
    checksums: str | os.PathLike[str] | None = None

    @classmethod
    def from_keras(
        cls,
        model: object,
        x: object,
        y: object = None,
        *,
        batch_size: int = 32,
        epochs: int = 1,
        validation_data: object = None,
        sample_weight: object = None,
        shuffle: bool = True,
        callbacks: object = None,
    ) -> Job:
        """The training that ``model.fit`` with these arguments is, of a compiled Keras 3 model on torch.

        Optimizer, loss, regularization, weight constraints and learning-rate schedule are those that the
        model was compiled with, computed by Keras; its first metric is the Job's, an error times -1. `train`
        begins with the weights that the model has now, and gives the trained ones, and the optimizer's state,
        back to it; the run's folder holds ``model.keras``. Shuffled batches come in Vivace's own order.

        Args:
            model: a built or unbuilt `keras.Model`, compiled.
            x, y: arrays, or lists, tuples and dictionaries of arrays, as `fit` takes them.
            batch_size, epochs, validation_data, sample_weight, shuffle: as in `fit`.
            callbacks: none; each is refused by name, with what to do instead.

        Raises JobError where `fit` would train something that a Job cannot.
        Source: https://keras.io/api/models/model_training_apis
        """
        from vivace.trainers.keras_model import fields

        return cls(
            **fields(
                model,
                x,
                y,
                batch_size=batch_size,
                epochs=epochs,
                validation_data=validation_data,
                sample_weight=sample_weight,
                shuffle=shuffle,
                callbacks=callbacks,
            )
        )

    def __post_init__(self) -> None:
        if (self.loss is None) == (self.step is None):
            raise JobError(
                "a Job needs either loss=(model, batch) -> scalar or step=(model, optimizer, batch) -> scalar"
            )
        if self.step is None and self.optimizer is None:
            raise JobError("a Job needs optimizer=(model) -> torch.optim.Optimizer")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("epochs", "scheduler_every", "damaged", "checksums", "metric_name"):
                continue
            # A module can be called, and gives outputs.
            built = field.name == "model" and not isinstance(value, type) and hasattr(value, "state_dict")
            if value is not None and (built or not callable(value)):
                kind = type(value).__name__
                raise JobError(
                    f"Job's {field.name} must be a function that builds it, not a {kind}: write lambda: ..."
                )
        if not isinstance(self.epochs, int) or self.epochs < 1:
            raise JobError(f"Job's epochs must be a whole number of at least 1, not {self.epochs!r}")
        if self.scheduler_every not in ("epoch", "step"):
            raise JobError(f"Job's scheduler_every must be 'epoch' or 'step', not {self.scheduler_every!r}")
        if self.damaged not in ("raise", "skip", "replace"):
            raise JobError(f"Job's damaged must be 'raise', 'skip' or 'replace', not {self.damaged!r}")
        if not isinstance(self.checksums, str | os.PathLike | None):
            raise JobError(f"Job's checksums must be the path of a file, not {self.checksums!r}")
        if not isinstance(self.metric_name, str) or not self.metric_name.strip():
            raise JobError(f"Job's metric_name must be a word, such as 'accuracy', not {self.metric_name!r}")
        name = getattr(self.metric, "__name__", _METRIC).strip("_")
        if self.metric_name == _METRIC and name.isidentifier() and name not in _TELL_NOTHING:
            object.__setattr__(self, "metric_name", name.replace("_", " "))
        if self.step is not None and self.on_gradients is not None:
            raise JobError("a Job with its own step clips its gradients there: leave on_gradients out")

    @classmethod
    def from_trainer(cls, trainer: object) -> Job:
        """A Job that trains as a `transformers.Trainer` would: its data, loss, optimizer, schedule, clipping.

        The metric is that of `metric_for_best_model` on its eval_dataset, else minus the evaluation loss.
        Raises JobError, naming what the Trainer does and a Job cannot say: own callbacks, `max_steps`,
        accumulation, and precision or compilation, which a plan decides.
        """
        from vivace.trainers import huggingface

        return cls(**huggingface.parts_of(trainer))

    @classmethod
    def from_lightning(
        cls,
        module: object,
        data: object,
        *,
        epochs: int = 1,
        monitor: str = "",
        mode: Literal["max", "min"] = "max",
        gradient_clip_val: float | None = None,
    ) -> Job:
        """A Job that trains a LightningModule as Lightning's Trainer would.

        Args:
            module: a LightningModule with automatic optimization and one optimizer.
            data: a LightningDataModule, or a function that builds the training DataLoader.
            epochs: passes over the data; the Trainer's `max_epochs`.
            monitor: what `validation_step` logs by this name is the metric.
            mode: what of it is better.
            gradient_clip_val: the Trainer's, by norm.

        Raises JobError, naming what the module does and a Job cannot say, such as a hook of its own.
        """
        from vivace.trainers import lightning

        how: dict[str, Any] = {"epochs": epochs, "monitor": monitor, "mode": mode}
        return cls(**lightning.parts_of(module, data, gradient_clip_val=gradient_clip_val, **how))

    @property
    def metric_data(self) -> Literal["validation", "training"] | None:
        """What data the metric is of; None where there is no metric."""
        if self.metric is None:
            return None
        return "training" if self.validation is None else "validation"


def load(reference: str) -> Job:
    """Load ``path/to/file.py:name``, ``package.module:name`` or a recipe's name; `name` is a Job or returns
    one. ``path/to/file.py`` alone stands for its `job`. A function is called with what follows its name:
    ``digits,width=64,depth=2``, each value of the kind of that argument's default; it holds no comma.

    Raises JobError with the person's own line where their file is at fault.
    """
    given: dict[str, str] = {}
    if told := _ARGUMENTS.fullmatch(reference):
        reference = told["name"]
        for pair in told["given"][1:].split(","):
            key, value = pair.split("=", 1)
            if key in given:
                raise JobError(f"'{reference}' is given {key} twice: {given[key]} and {value}")
            given[key] = value
    place, name, found = _found(reference)
    is_built = isinstance(found, Job) or hasattr(found, "state_dict")  # a module can be called
    if callable(found) and not is_built:
        arguments = _arguments(name if ":" in reference else reference, found, given)
        with _loading(place):
            found = found(**arguments)
    elif given:
        raise JobError(f"'{name}' in '{place}' is no function: it takes no {', '.join(given)}")
    return _require_job(found, place, name)


def spelled(reference: str) -> str:
    """A reference in the one spelling that all ways to write it share: ``train.py:job,depth=2,width=64`` for
    ``./train.py,width=64,depth=2``. Nothing is loaded, and a folder stays as it is given.
    """
    told = _ARGUMENTS.fullmatch(reference)
    name, given = (told["name"], sorted(told["given"][1:].split(","))) if told else (reference, [])
    place, colon, job = name.rpartition(":")
    if not colon and name.endswith(".py"):
        place, job = name, "job"
    name = f"{os.path.normpath(place)}:{job}" if place.endswith(".py") else name
    return ",".join([name, *given])


def without_folder(reference: str) -> str:
    """The same without the folder of a job's file, which may be reached from another one."""
    return _FOLDER.sub("", spelled(reference), count=1)


class JobFunction:
    """A function of named parameters that returns a Job, such as ``def job(lr: float = 0.1) -> vivace.Job``.

    Args:
        source: the function, or a reference such as ``train.py:job``, which each process loads for itself
            when it first needs it.
    """

    def __init__(self, source: str | Callable[..., Job]) -> None:
        self.reference = source if isinstance(source, str) else ""
        self.function = None if isinstance(source, str) else source
        self._own: Callable[..., Any] | None = self.function  # what this process has loaded
        self.name = self.reference or getattr(source, "__name__", "job")

    def __getstate__(self) -> dict[str, Any]:
        """Another process loads for itself."""
        return {**vars(self), "_own": self.function}

    def __call__(self, **parameters: object) -> Job:
        """The Job of these parameters; those left out have the function's own defaults.

        Raises JobError where the function does not take them, fails, or returns something else.
        """
        known = self.parameters
        unknown = [name for name in parameters if name not in known]
        if unknown:
            hint = nearest(unknown[0], known) or f"; it has {', '.join(known) or 'none'}"
            raise JobError(f"'{self.name}' has no parameter '{unknown[0]}'{hint}")
        empty = inspect.Parameter.empty
        missing = [n for n, p in known.items() if p.default is empty and n not in parameters]
        if missing:
            raise JobError(f"'{self.name}' has no default for '{missing[0]}': give it a range or a value")
        with _loading(self.name):
            found = self._loaded()(**parameters)
        return _require_job(found, self.name, self.name)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """What may be given by name."""
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found = inspect.signature(self._loaded()).parameters
        return {name: parameter for name, parameter in found.items() if parameter.kind in named}

    def _loaded(self) -> Callable[..., Any]:
        if self._own is not None:
            return self._own
        if told := _ARGUMENTS.fullmatch(self.reference):
            raise JobError(
                f"'{self.reference}': what is fixed stands beside the ranges, as in {told['name']}"
                f"{told['given'].replace(',', ' ')}"
            )
        place, name, found = _found(self.reference)
        if isinstance(found, Job) or not callable(found):
            raise JobError(
                f"'{name}' in '{place}' is a {type(found).__name__}: a sweep needs a function with "
                f"parameters, such as def {name}(lr: float = 0.1) -> vivace.Job"
            )
        self._own = cast(Callable[..., Any], found)
        return self._own


def _found(reference: str) -> tuple[str, str, Any]:
    """File or module of a reference, the name in it, and what has that name."""
    place, colon, name = reference.rpartition(":")
    if not colon:
        place, name = _of_file(Path(reference)) if reference.endswith(".py") else _recipe(reference), "job"
    elif place.endswith(".py"):
        _require_name(Path(place), name)
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    found = getattr(module, name, None)
    if found is None:
        jobs = [key for key, value in vars(module).items() if isinstance(value, Job)]
        hint = nearest(name, vars(module)) or (f"; it has {', '.join(jobs)}" if jobs else "; it has no Job")
        raise JobError(f"'{place}' has no name '{name}'{hint}")
    return place, name, found


def require_job(given: object) -> None:
    """Raises JobError for what somebody who calls from Python has handed in for a Job and is none."""
    if not isinstance(given, (Job, str)):
        kind = type(given).__name__
        hint = ": call it, if it returns one" if inspect.isfunction(given) else ""
        raise JobError(f"give a vivace.Job, or where it stands, such as 'train.py:job', not a {kind}{hint}")


def _require_job(found: object, place: str, name: str) -> Job:
    if not isinstance(found, Job):
        raise JobError(
            f"'{name}' in '{place}' is of type {type(found).__name__}; it must be a vivace.Job or return one"
        )
    return found


def _arguments(name: str, function: Callable[..., Any], given: dict[str, str]) -> dict[str, Any]:
    """What was given, each as the kind of its argument's default. Raises JobError where that cannot be."""
    known = _signature_of(function)
    found: dict[str, Any] = {}
    for key, text in given.items():
        if key not in known:
            takes = f" ({', '.join(known)})" if known else ", which takes none"
            raise JobError(f"'{name}' has no argument '{key}'{nearest(key, known)}{takes}")
        default = known[key].default
        if isinstance(default, bool):
            raise JobError(f"'{key}' of '{name}' is yes or no, which cannot be given with its name")
        kind = type(default) if isinstance(default, (int, float)) else str
        try:
            found[key] = kind(text)
        except ValueError:
            words = {int: "a whole number", float: "a number"}[kind]
            raise JobError(f"{key} of '{name}' must be {words}, such as {default}, not '{text}'") from None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    taken = _signature_of(function, follow_wrapped=False)  # a decorator may give the rest itself
    required = (
        k for k, p in taken.items() if p.default is inspect.Parameter.empty and p.kind not in variadic
    )
    if missing := [key for key in required if key not in found]:
        raise JobError(
            f"'{name}' has no default for {' and '.join(missing)}: give it one, or write a value behind the "
            f"name, as in {name},{missing[0]}=..."
        )
    return found


def _signature_of(
    function: Callable[..., Any], *, follow_wrapped: bool = True
) -> Mapping[str, inspect.Parameter]:
    """Empty where a function does not say."""
    try:
        return inspect.signature(function, follow_wrapped=follow_wrapped).parameters
    except ValueError:
        return {}


def _recipe(name: str) -> str:
    known = sorted(importlib.import_module("vivace.recipes").RECIPES)
    if name in known:
        return f"vivace.recipes.{name}"
    if name.endswith(".ipynb"):
        raise JobError(f"'{name}' is a notebook: call vivace.tune(job) in it, or put the Job into a file")
    if os.path.isfile(f"{name}.py"):
        raise JobError(f"there is no recipe '{name}'; for the file write {name}.py:job, the name of its Job")
    if "." in name:
        raise JobError(f"there is no recipe '{name}'; for a module write {name}:job, the name of its Job")
    raise JobError(
        f"there is no recipe '{name}'{nearest(name, known)} ({', '.join(known)}; or write file.py:name)"
    )


def _of_file(path: Path) -> str:
    """The file, if a name `job` is bound in it; else JobError says what to write. It is read, not yet run."""
    if not os.path.isfile(path):
        raise JobError(f"there is no file '{path}'")
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return str(path)  # loading it says so
    if any("job" in _bound(statement) for statement in tree.body):
        return str(path)
    jobs = [name for statement in tree.body for name in _job_names(statement)]
    if jobs:
        raise JobError(f"'{path}' holds {' and '.join(jobs)}: write {path}:{jobs[-1]}")
    raise JobError(f"'{path}' is a script without a Job{_for_scripts(path)}")


def _for_scripts(path: Path) -> str:
    return (
        f": vivace run -- python {path} tries to make it faster as it is, vivace tune -- python {path} finds "
        f"a plan on its steps, vivace profile -- python {path} shows where its time goes; for all techniques "
        "write a Job (eleven lines, see the README)"
    )


def _require_name(path: Path, name: str) -> None:
    """Raises JobError where a file cannot bind a name. It is read, not run: it may be a whole training."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # loading it says so
    bound = {found for statement in tree.body for found in _bound(statement)}
    if name in bound or "*" in bound or any(_binds_unseen(node) for node in ast.walk(tree)):
        return
    jobs = [found for statement in tree.body for found in _job_names(statement)]
    hint = nearest(name, bound) or (
        f"; it has {', '.join(jobs)}" if jobs else f" and no Job{_for_scripts(path)}"
    )
    raise JobError(f"'{path}' has no name '{name}'{hint}")


def _binds_unseen(node: ast.AST) -> bool:
    """May this bind names of the module that are not written there?"""
    return isinstance(node, ast.Name) and node.id in ("globals", "exec")


def _job_names(statement: ast.stmt) -> list[str]:
    """The names that a statement binds to a Job, or to a function that returns one."""
    made = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    if isinstance(statement, ast.FunctionDef) and statement.returns is not None:
        made.append(statement.returns)
    is_job = any(ast.unparse(one).strip("'\"") in ("Job", "vivace.Job") for one in made)
    if not is_job or isinstance(statement, ast.ClassDef):
        return []
    if isinstance(statement, ast.FunctionDef):
        return [statement.name] if not statement.args.args[len(statement.args.defaults) :] else []
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement of a module binds there, as far as is seen without running it."""
    names, waiting = list[str](), list[ast.AST]([statement])
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)  # what is bound inside is its own, but for what it calls global
            names += [name for one in ast.walk(node) if isinstance(one, ast.Global) for name in one.names]
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        waiting += ast.iter_child_nodes(node)
    return names


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Python does not look for garbage inside: modules are many objects that stay.

    Looking through them again and again is a fifth of what importing torch takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _import_torch() -> None:
    """Before a person's file does: while that runs, searching for garbage is the person's affair."""
    with importing(), contextlib.suppress(ImportError):  # the file may not need it, and says so else
        importlib.import_module("torch")


def _load_file(path: Path) -> ModuleType:
    if not os.path.isfile(path):  # Path.is_file raises for a name too long
        raise JobError(f"there is no file '{path}'")
    name = "vivace_job_" + "".join(c if c.isalnum() else "_" for c in str(path.resolve()))
    written = path.resolve(), path.stat().st_mtime_ns, path.stat().st_size
    if name in sys.modules and _WRITTEN.get(name) == written:
        return sys.modules[name]
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _import_torch()
    with _loading(str(path), forget=name):
        spec.loader.exec_module(module)
    _WRITTEN[name] = written
    os.environ[name] = str(path.resolve())  # for processes that are not forked (`vivace._JobFiles`)
    return module


def _load_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    _import_torch()
    with _loading(name):
        return importlib.import_module(name)


@contextlib.contextmanager
def _loading(place: str, forget: str | None = None) -> Iterator[None]:
    """Turn whatever a person's code raises while it loads into one sentence with their own line."""
    try:
        yield
    except BaseException as error:
        if forget:
            sys.modules.pop(forget, None)
        if isinstance(error, (VivaceError, KeyboardInterrupt)):
            raise
        if isinstance(error, SyntaxError) and error.lineno:
            line = (error.text or "").strip()
            raise JobError(f"{error.filename}, line {error.lineno}: {error.msg}: {line}") from error
        raise JobError(f"'{place}' cannot be loaded: {blame(error)}") from error
