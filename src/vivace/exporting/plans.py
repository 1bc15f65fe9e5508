"""A plan in the words of plain PyTorch, or of a trainer: Python to be copied, or imported as it is."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from vivace.errors import InputError, nearest
from vivace.plan import Plan
from vivace.technique.registry import asked

if TYPE_CHECKING:
    from vivace.technique import Plain, Technique
    from vivace.technique.plain import Keywords

TARGETS = {
    "torch": "",
    "transformers": "TrainingArguments",
    "lightning": "Trainer",
    "accelerate": "Accelerator",
}
STEP = """
def step(model, optimizer, loss_of, batch):
    \"\"\"One step; `loss_of(model, batch)` is your loss.\"\"\"
    with torch.autocast(device, dtype=torch.{dtype}):
        loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
"""
SCALED_STEP = """
scaler = torch.amp.GradScaler(device{scaler})


def step(model, optimizer, loss_of, batch):
    \"\"\"One step; `loss_of(model, batch)` is your loss. Unscale before you clip.\"\"\"
    with torch.autocast(device, dtype=torch.{dtype}):
        loss = loss_of(model, batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.detach()
"""
STRICT = (
    "# Without tf32: on newer GPUs PyTorch convolves in TF32, unless torch.backends.cudnn.allow_tf32 = False"
)


def in_words(plan: Plan | str | os.PathLike[str], to: str = "torch") -> str:
    """The Python that a person writes instead of using a plan.

    Args:
        plan: a plan, or the path of its file.
        to: ``torch``, or the trainer in whose words it is told: ``transformers``, ``lightning``,
            ``accelerate``.

    Returns Python: keywords for the trainer, the optimizer and the loader, `prepare(model)` and, for
    ``torch``, `step`. What has no equivalent stands in a comment at its end. Raises InputError, PlanError.
    """
    if to not in TARGETS:
        raise InputError(
            f"a plan is told in the words of {', '.join(TARGETS)}, not '{to}'{nearest(to, TARGETS)}"
        )
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    told = {t: asked(t, "itself in plain PyTorch", t.plain, None) for t in plan.techniques}
    found = {technique: plain for technique, plain in told.items() if plain is not None}
    parts = [_head(plan, found, to)]
    parts += [_trainer(found, to)] if TARGETS[to] else []
    by_hand = {t: plain for t, plain in found.items() if not _words(plain, to)}
    parts += [_keywords(by_hand), _prepare(by_hand)]
    parts += [_step(found)] if to == "torch" else []
    parts.append(_rest(told, to))
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _words(plain: Plain, to: str) -> dict[str, object]:
    words = {"transformers": plain.transformers, "lightning": plain.lightning, "accelerate": plain.accelerate}
    return dict(words.get(to) or {})


def _head(plan: Plan, found: dict[Technique, Plain], to: str) -> str:
    where = "plain PyTorch" if to == "torch" else f"the words of {to.capitalize()}"
    lines = [f"# {' + '.join(plan.names) or 'The script as it is'}, in {where}."]
    environment = {key: value for plain in found.values() for key, value in plain.environment.items()}
    if environment:
        said = " ".join(f"{key}={value}" for key, value in environment.items())
        lines += ["# Before Python starts:", f"#     export {said}"]
    lines += ["import torch", ""]
    by_hand = [(t, line) for t, plain in found.items() if not _words(plain, to) for line in plain.start]
    lines += [f"{line}  # {technique.name}" for technique, line in by_hand]
    return "\n".join(lines)


def _trainer(found: dict[Technique, Plain], to: str) -> str:
    keywords = {key: value for plain in found.values() for key, value in _words(plain, to).items()}
    if not keywords:
        return ""
    return f"# {TARGETS[to]}(..., **TRAINER)\nTRAINER = {_dictionary(keywords)}"


def _keywords(found: dict[Technique, Plain]) -> str:
    optimizer = {key: value for plain in found.values() for key, value in plain.optimizer.items()}
    loader = {key: value for plain in found.values() for key, value in plain.loader.items()}
    lines = []
    if optimizer:
        lines += ["# your optimizer, such as AdamW(model.parameters(), lr=..., **OPTIMIZER)"]
        lines += [f"OPTIMIZER = {_dictionary(optimizer)}"]
    if loader:
        lines += ["# your DataLoader(..., **LOADER)", f"LOADER = {_dictionary(loader)}"]
    return "\n".join(lines)


def _dictionary(keywords: dict[str, object]) -> str:
    written = {
        key: json.dumps(value) if isinstance(value, str) else repr(value) for key, value in keywords.items()
    }
    return "\n".join(["{", *[f'    "{key}": {value},' for key, value in written.items()], "}"])


def _prepare(found: dict[Technique, Plain]) -> str:
    lines = [f"    {line}  # {t.name}" for t, plain in found.items() for line in plain.model]
    if not lines:
        return ""
    return "\n".join(
        [
            "",
            "",
            "def prepare(model):",
            '    """Call it once, when your model is built."""',
            *lines,
            "    return model",
            "",
        ]
    )


def _step(found: dict[Technique, Plain]) -> str:
    lowered = next((plain for plain in found.values() if plain.autocast), None)
    if lowered is None:
        return ""
    template = SCALED_STEP if lowered.autocast == "float16" else STEP
    step = template.format(dtype=lowered.autocast, scaler=_arguments(lowered.scaler))
    return f'\ndevice = "cuda" if torch.cuda.is_available() else "cpu"\n\n{step}'


def _arguments(keywords: Keywords) -> str:
    return "".join(f", {key}={value!r}" for key, value in keywords.items())


def _rest(told: dict[Technique, Plain | None], to: str) -> str:
    """What is not quite the same, and what nothing stands for."""
    lines = []
    for technique, plain in told.items():
        name, does = technique.name, technique.card.summary
        if plain is None:
            lines.append(f"# {name} needs Vivace ({does}): vivace.attach(plan, ...)")
            continue
        words = _words(plain, to)
        if plain.note and (to == "lightning" or not words):  # the others hand on outputs in fp32 themselves
            lines.append(f"# {name}: {plain.note}")
        if plain.scaler and words:
            given = _arguments(plain.scaler).removeprefix(", ")
            theirs = "a trainer's begins at 65536 and grows every 2,000 steps"
            lines.append(f"# {name}: the plan's scaler has {given}; {theirs}")
    statements = [line for plain in told.values() if plain is not None for line in plain.start]
    if not any("allow_tf32" in line for line in statements):
        lines.append(STRICT)
    return "\n".join(["", *lines]) if lines else ""
