"""A Job out of a `transformers.Trainer`: the same data, loss, optimizer, schedule, clipping and metric.

Source: https://huggingface.co/docs/transformers/main_classes/trainer
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vivace.errors import JobError
from vivace.trainers.clipping import clipping
from vivace.trainers.code import computes_with, names_in, only_shows

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from transformers import Trainer

# What a plan decides: a Trainer that has decided already would be the reference of nothing.
LEFT_TO_PLANS = ("bf16", "fp16", "tf32", "torch_compile", "gradient_checkpointing")
ELSEWHERE = ("deepspeed", "fsdp", "neftune_noise_alpha", "use_liger_kernel")
COUNTED = ("global_step", "epoch")  # by a Trainer as it trains
EACH_STEP = (  # and evaluation
    "compute_loss",
    "compute_loss_func",
    "get_batch_samples",
    "_get_num_items_in_batch",
    "prediction_step",
)
ALIGNING = "align_special_tokens"  # a function, and in older versions a method of Trainer with _ before it
# They show, log and save; what Vivace's own training does itself.
SHOWING = ("transformers.trainer_callback", "transformers.integrations", "transformers.utils.notebook")


def parts_of(trainer: Any) -> dict[str, Any]:
    """The arguments of a Job, from a `transformers.Trainer` that has not trained yet.

    The metric is that of `metric_for_best_model`, or the evaluation loss, as minus the loss. Raises JobError
    where the Trainer does what a Job cannot say.
    """
    arguments = trainer.args
    _refuse(trainer)
    own = _kept(trainer)
    alone = _alone(own)
    steps = len(_loader(own, "get_train_dataloader")) * int(arguments.num_train_epochs)

    def optimizer(model: object) -> Any:
        return _afresh(own, model).create_optimizer()

    def scheduler(optimizer: Optimizer) -> Any:
        fresh = _afresh(own, own.model)
        fresh.optimizer = optimizer  # which a create_scheduler of a person's may look at
        return fresh.create_scheduler(num_training_steps=steps, optimizer=optimizer)

    def model() -> Any:
        return copy.deepcopy(own.model) if own.model_init is None else _aligned(own, own.call_model_init())

    found: dict[str, Any] = {
        "model": model,
        "data": lambda: _loader(own, "get_train_dataloader"),
        "loss": functools.partial(_loss, alone, calling=(alone.compute_loss, _loss_function(alone))),
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scheduler_every": "step",
        "epochs": int(arguments.num_train_epochs),
    }
    if arguments.max_grad_norm:
        found["on_gradients"] = clipping(arguments.max_grad_norm)
    if trainer.eval_dataset is not None:
        found |= _measured(own, alone)
    return found


def _refuse(trainer: Trainer) -> None:
    arguments = trainer.args
    for name in LEFT_TO_PLANS:
        if getattr(arguments, name, None):
            raise JobError(f"leave TrainingArguments({name}=True) out: whether it pays here is what is tried")
    for name in ELSEWHERE:
        if getattr(arguments, name, None):
            raise JobError(
                f"a Trainer with {name}={getattr(arguments, name)!r} cannot become a Job, as only Trainer's "
                "own training acts on it: leave it out"
            )
    pieces = arguments.gradient_accumulation_steps
    if pieces > 1:
        size = pieces * arguments.per_device_train_batch_size
        raise JobError(
            f"gradient_accumulation_steps={pieces} cuts a batch for memory: write "
            f"per_device_train_batch_size={size} instead, and a plan cuts it where that is needed"
        )
    if arguments.max_steps > 0 or arguments.num_train_epochs != int(arguments.num_train_epochs):
        raise JobError("a Job trains whole epochs: set num_train_epochs to a whole number, and no max_steps")
    schedule = str(getattr(arguments.lr_scheduler_type, "value", ""))
    if schedule in ("reduce_lr_on_plateau", "greedy"):
        raise JobError(f"a Job's schedule knows no metric: lr_scheduler_type='{schedule}' cannot act")
    if arguments.load_best_model_at_end:
        raise JobError("a Job ends with the weights of its last step: leave load_best_model_at_end=True out")
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise JobError(
            "the Trainer's optimizers= are built for its own model; name the optimizer by "
            "optimizer_cls_and_kwargs= and the schedule by lr_scheduler_type="
        )
    if trainer.train_dataset is None or not hasattr(trainer.train_dataset, "__len__"):
        raise JobError("the Trainer needs a train_dataset with a length")
    from transformers import Trainer

    for name in (
        "training_step",
        "train",
        "_prepare_inputs",
        "_inner_training_loop",
        "create_optimizer_and_scheduler",
        "compute_loss_context_manager",
    ):
        if getattr(type(trainer), name, None) is not getattr(Trainer, name, None):
            raise JobError(f"the Trainer's own {name} would not be called: a Job has no place for it")
    _refuse_evaluation(trainer)
    _refuse_counting(trainer)
    _refuse_other_holders(trainer)
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if not kind.__module__.startswith(SHOWING) or kind.__name__ == "EarlyStoppingCallback":
            name = kind.__name__
            raise JobError(
                f"the Trainer's callback {name} would not be called: take it off by remove_callback"
            )


def _refuse_counting(trainer: Trainer) -> None:
    """Raises JobError where what is called in each step computes with how far the Trainer has come: nobody
    counts that in a Job.
    """
    from transformers import Trainer

    own = dict(inspect.getmembers(type(trainer))) | {"compute_loss_func": _loss_function(trainer)}
    left, seen = list(EACH_STEP), {"log"}  # which is not called
    if trainer.eval_dataset is None:
        left.remove("prediction_step")
    while left:
        name = left.pop()
        member = own.get(name)
        if name in seen or member is None or member is getattr(Trainer, name, None):
            continue
        seen.add(name)
        for count in COUNTED:
            if computes_with(member, "state", count):
                raise _counting(f"the Trainer's {name}", count)
        left += names_in(member)


def _counting(who: str, count: str) -> JobError:
    return JobError(
        f"{who} uses state.{count}, which nobody counts without a Trainer: take that out of the loss, or "
        "hand the script to `vivace run -- python SCRIPT`"
    )


class _Uncounted:
    """A Trainer's state, that raises JobError where code of a person's computes with how far it has come."""

    def __init__(self, state: object) -> None:
        self.kept = state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "kept":  # as copies ask for it before it is there
            raise AttributeError(name)
        asking: Any = inspect.currentframe()
        asking = asking.f_back
        theirs = str(asking.f_globals.get("__name__")).startswith("transformers.")
        if name in COUNTED and not theirs and not only_shows(asking.f_code, name):
            raise _counting(asking.f_code.co_name, name)
        return getattr(self.kept, name)


def _refuse_other_holders(trainer: Trainer) -> None:
    """Raises JobError where a module beside the model holds its weights, as sentence_transformers' losses do:
    it would compute with those of the Trainer, and not of the Job.
    """
    import torch

    own = set() if trainer.model is None else {id(one) for one in trainer.model.parameters()}
    for name, value in vars(trainer).items():
        if name in ("model", "model_wrapped"):
            continue
        for one in value.values() if isinstance(value, Mapping) else (value,):
            if isinstance(one, torch.nn.Module) and any(id(weight) in own for weight in one.parameters()):
                raise JobError(
                    f"the Trainer's {name} ({type(one).__name__}) holds the model's weights itself and would "
                    f"not see those that a Job trains: hand the script to `vivace run -- python SCRIPT`"
                )


def _refuse_evaluation(trainer: Trainer) -> None:
    """Raises JobError where the Trainer evaluates in a way in which a Job's metric would not."""
    if trainer.eval_dataset is None:
        return
    for name in ("evaluate", "evaluation_loop"):
        if not getattr(type(trainer), name).__module__.startswith("transformers."):
            raise JobError(f"the Trainer's own {name} would not be called: a Job has no place for it")
    if isinstance(trainer.eval_dataset, dict):
        names = ", ".join(map(str, trainer.eval_dataset))
        raise JobError(f"the Trainer's eval_dataset is a dict of data sets ({names}): give it one of them")
    if trainer.compute_metrics is None:
        return
    together = {"batch_eval_metrics": False, "include_for_metrics": False, "eval_do_concat_batches": True}
    for name, usual in together.items():
        given = getattr(trainer.args, name, usual)
        if bool(given) is not usual:
            raise JobError(
                f"compute_metrics is given all predictions and labels together: leave {name}={given!r} out"
            )


def _kept(trainer: Trainer) -> Any:
    """A copy of the Trainer that the Job keeps, with a model of its own on the host: the Trainer's, which may
    fill a GPU, can go. Where `model_init` builds each model, that one has no weights.
    """
    own: Any = copy.copy(trainer)
    where = "cpu" if own.model_init is None else "meta"
    own.model = own.model_wrapped = _aligned(trainer, _copied(own.model, where))
    own.callback_handler = copy.copy(trainer.callback_handler)
    own.callback_handler.model = None
    collator = own.data_collator
    holding = [name for name, value in getattr(collator, "__dict__", {}).items() if value is trainer.model]
    if holding:  # as DataCollatorForSeq2Seq does
        own.data_collator = copy.copy(collator)
        vars(own.data_collator).update(dict.fromkeys(holding, own.model))
    return own


def _copied(model: nn.Module, where: str) -> Any:
    """A copy of a model on another device, which takes no memory on the model's own."""
    import torch
    from torch import nn

    copies = dict[int, torch.Tensor]()
    for one in (*model.parameters(), *model.buffers()):
        if type(one) in (nn.Parameter, torch.Tensor):  # other kinds know how they are copied
            there = one.detach().to(where, copy=True).requires_grad_(one.requires_grad)
            parameter = isinstance(one, nn.Parameter)
            copies[id(one)] = nn.Parameter(there, one.requires_grad) if parameter else there
    return nn.Module.to(copy.deepcopy(model, dict[int, Any](copies)), where)


def _aligned(trainer: Trainer, model: nn.Module) -> Any:
    """The model, told which tokens begin, end and pad a text, as Trainer tells it before it trains."""
    from transformers import PreTrainedTokenizerBase, ProcessorMixin, trainer_utils

    told: Any = copy.copy(trainer)
    told.model = model
    function: Any = getattr(trainer_utils, ALIGNING, None)
    method: Any = getattr(told, f"_{ALIGNING}", None)
    if function is None and method is None:  # a still older version, which does not
        return model
    given = trainer.processing_class
    if isinstance(given, (PreTrainedTokenizerBase, ProcessorMixin)) and hasattr(model, "config"):
        method() if function is None else function(model, given)
    return model


def _loss_function(trainer: Trainer) -> Any:
    """Its `compute_loss_func`, which older versions do not have."""
    return vars(trainer).get("compute_loss_func")


def _alone(trainer: Trainer) -> Any:
    """A copy of the Trainer that computes on one device, and has no model until it is asked about one: what
    it computes may look at its own model, as `generate` does, and that is not the Job's.
    """
    alone: Any = copy.copy(trainer)
    alone.model = alone.model_wrapped = None
    alone.log = _silent
    alone.state = _Uncounted(trainer.state)
    alone.args = copy.copy(trainer.args)
    alone.args._n_gpu = min(1, trainer.args.n_gpu)  # over which Trainer would spread each batch
    return alone


def _silent(*_: object, **__: object) -> None:
    """In place of `log`: nobody counts the steps that it would tell. A function, so that pickles know it."""


@contextlib.contextmanager
def _holding(alone: Any, model: nn.Module) -> Iterator[None]:
    """Inside, it has this model."""
    before = alone.model
    alone.model = alone.model_wrapped = model
    try:
        yield
    finally:
        alone.model = alone.model_wrapped = before


def _loss(alone: Trainer, model: nn.Module, batch: Mapping[str, object], calling: object = None) -> Any:
    """As Trainer's own step computes it, which counts the labels first.

    `calling` are the functions that it calls, for those who look at what a loss keeps in Python.
    """
    with _holding(alone, model):
        if alone.args.world_size > 1:  # counting is an exchange, and not all ranks may be here
            return alone.compute_loss(model, dict(batch))
        (inputs,), items = alone.get_batch_samples(iter([dict(batch)]), 1, alone.args.device)
        return alone.compute_loss(model, inputs, num_items_in_batch=items)


def _evaluated(alone: Any, model: nn.Module, batch: Mapping[str, object], only_loss: bool) -> Any:
    """Loss, predictions and labels of a batch, as Trainer's own evaluation has them."""
    with _holding(alone, model):
        arguments, how = alone.args, dict[str, Any]()
        if getattr(arguments, "predict_with_generate", False):  # as `Seq2SeqTrainer.evaluate` says it
            how = {"max_length": arguments.generation_max_length}
            how["num_beams"] = arguments.generation_num_beams
        told = {key: value for key, value in how.items() if value is not None}
        return alone.prediction_step(model, dict(batch), prediction_loss_only=only_loss, **told)


def _predicted(alone: Any, model: nn.Module, batch: Mapping[str, object]) -> tuple[Any, Any]:
    """Predictions and labels, of which a metric is computed."""
    _, logits, truth = _evaluated(alone, model, batch, only_loss=False)
    if alone.preprocess_logits_for_metrics is not None:
        with _holding(alone, model):
            logits = alone.preprocess_logits_for_metrics(logits, truth)
    return logits, truth


def _afresh(trainer: Trainer, model: object) -> Any:
    """The Trainer with another model, and no optimizer or schedule yet."""
    own: Any = copy.copy(trainer)
    own.model, own.optimizer, own.lr_scheduler = model, None, None
    return own


def _loader(trainer: Trainer, method: str) -> Any:
    """Its DataLoader as it is before Accelerate wraps it: moving batches is the session's."""
    import torch
    from transformers.trainer_utils import seed_worker

    own, accelerator = copy.copy(trainer), copy.copy(trainer.accelerator)
    accelerator.prepare = lambda loader: loader
    own.accelerator = accelerator
    loader = getattr(own, method)()
    if getattr(loader.worker_init_fn, "func", None) is seed_worker:  # as workers are seeded in any case
        loader.worker_init_fn = None
    loader.pin_memory = loader.pin_memory and torch.cuda.is_available()
    return loader


def _measured(own: Trainer, alone: Trainer) -> dict[str, Any]:
    """The Job's validation data and metric, of the Trainer's evaluation data and `compute_metrics`."""
    arguments = own.args
    name = (arguments.metric_for_best_model or "loss").removeprefix("eval_")
    if name != "loss" and own.compute_metrics is None:
        raise JobError(f"metric_for_best_model='{name}', but the Trainer has no compute_metrics")
    higher = bool(arguments.greater_is_better) and name != "loss"

    def metric(model: nn.Module, batches: Iterable[Any]) -> float:
        value = _losses(alone, model, batches) if name == "loss" else _computed(alone, model, batches, name)
        return value if higher else -value

    return {
        "metric": metric,
        "metric_name": name if higher else f"minus {name}",
        "validation": lambda: _loader(own, "get_eval_dataloader"),
    }


def _losses(alone: Trainer, model: nn.Module, batches: Iterable[Any]) -> float:
    """The mean loss over samples, as a `prediction_step` of the person's has it; else as a step has it."""
    total, samples = 0.0, 0
    own = not type(alone).prediction_step.__module__.startswith("transformers.")
    for batch in batches:
        size = len(next(iter(batch.values())))
        loss = _evaluated(alone, model, batch, alone.compute_metrics is None)[0] if own else None
        total += size * float(_loss(alone, model, batch) if loss is None else loss.mean())
        samples += size
    return total / samples


def _computed(alone: Any, model: nn.Module, batches: Iterable[Any], name: str) -> float:
    """What `compute_metrics` says of all predictions together."""
    from transformers import EvalPrediction, trainer_pt_utils

    utilities: Any = trainer_pt_utils
    predictions, labels = utilities.EvalLoopContainer(), utilities.EvalLoopContainer()
    every = alone.args.eval_accumulation_steps
    for number, batch in enumerate(batches, 1):
        for gathered, found in zip((predictions, labels), _predicted(alone, model, batch), strict=True):
            if found is not None:
                gathered.add(found)
            if every and number % every == 0:
                gathered.to_cpu_and_numpy()
    seen = EvalPrediction(predictions=predictions.get_arrays(), label_ids=labels.get_arrays())
    figures = alone.compute_metrics(seen)
    value = figures.get(name, figures.get(f"eval_{name}"))  # Trainer puts eval_ before what is without
    if value is None:
        raise JobError(f"metric_for_best_model='{name}', but compute_metrics gives {', '.join(figures)}")
    return float(value)
