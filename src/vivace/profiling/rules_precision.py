"""Rules about numbers: mixed precision that gains nothing, overflow, misuse, and settings without effect."""

from __future__ import annotations

from vivace.operators import MATRIX_CLASSES
from vivace.profiling.seen import Seen, Verdict
from vivace.words import percent, times

MANY_SKIPPED = 0.05
MANY_TINY = 0.2
CLEAR_GAIN = 1.05
MOST_UPDATES = 0.9  # of all: a few may lie at the window's edges


def overflow(seen: Seen) -> Verdict | None:
    """Steps skipped because gradients overflow, gradients too small for float16, or a loss not finite."""
    precision = seen.precision
    if precision.get("loss_not_finite"):
        evidence = f"the loss was not a finite number in {precision['loss_not_finite']} of the watched steps"
        return Verdict(
            "overflow",
            evidence,
            1.0,
            1.0,
            "torch.autograd.set_detect_anomaly(True) names the first operation, once",
        )
    steps, skipped = precision.get("scaler_steps", 0), precision.get("skipped", 0)
    if steps and skipped / steps >= MANY_SKIPPED:
        share = skipped / steps
        evidence = f"{skipped} of {steps} steps were skipped because gradients overflowed"
        if precision.get("not_finite"):
            evidence += f" ({precision['not_finite']})"
        high = 1 / max(0.05, 1 - share)
        return Verdict(
            "overflow", evidence, 0.95, high, "bfloat16 needs no scaling; or a smaller learning rate"
        )
    half = "float16" in (precision.get("autocast_dtypes") or {}) and seen.narrows_gradients
    tiny = precision.get("tiny_gradients") or 0.0
    if half and not precision.get("scale") and tiny >= MANY_TINY:
        evidence = (
            f"float16 without a GradScaler: {percent(tiny)} of the gradients are so small that float16 "
            f"rounds them coarsely or to zero{_layer(precision)}"
        )
        low = 0.95 / (1 + seen.shares["update"])  # unscaling goes over all gradients, as the update does
        return Verdict("overflow", evidence, low, 1.05, "torch.amp.GradScaler, or bfloat16")
    return None


def amp_misuse(seen: Seen) -> Verdict | None:
    """Clipping scaled gradients, unscaling twice, a scaler that is never updated or serves nothing."""
    precision = seen.precision
    dtypes = precision.get("autocast_dtypes") or {}

    def found(evidence: str, advice: str) -> Verdict:
        # what goes over all gradients once more, or once less, takes at most as long as the update
        extra = 0.5 * seen.shares["update"]
        return Verdict("amp_misuse", evidence, 0.95 / (1 + extra), 1.05 / (1 - extra), advice)

    if (wrong := _wrong_gradients(seen)) is not None:
        return found(*wrong)
    steps = precision.get("scaler_steps", 0)
    if steps and not precision.get("scaler_updates"):
        return found("scaler.step is called without scaler.update", "call scaler.update() after each step")
    updates = (seen.record.get("updates") or 1.0) * (precision.get("steps") or 1)
    if precision.get("scale") and not steps and precision.get("unscale", 0) < MOST_UPDATES * updates:
        return found(
            "the loss is scaled, but the optimizer steps without the scaler: its gradients are too large",
            "scaler.step(optimizer) in place of optimizer.step()",
        )
    skipped = precision.get("skipped", 0)
    if skipped and precision.get("scheduled", 0) >= steps:
        return found(
            f"the scheduler stepped in {skipped} steps that the scaler had skipped",
            "step the scheduler only where scaler.get_scale() did not fall",
        )
    if precision.get("scale") and dtypes and "float16" not in dtypes:
        return found(
            f"losses are scaled, but autocast computes in {', '.join(dtypes)}, which needs no scaling",
            "leave the GradScaler out",
        )
    half = "float16" in dtypes and seen.narrows_gradients
    if half and not precision.get("scale") and overflow(seen) is None:
        return found(
            "float16 autocast without a GradScaler: small gradients are lost",
            "torch.amp.GradScaler, or bfloat16",
        )
    if precision.get("scale") and not dtypes and "float16" not in (seen.record.get("parameter_dtypes") or []):
        return found("the loss is scaled, but nothing computes in float16", "leave the GradScaler out")
    return None


def _wrong_gradients(seen: Seen) -> tuple[str, str] | None:
    """What is done to gradients before `GradScaler.step` divides them by the scale: evidence and advice."""
    precision = seen.precision
    sites = precision.get("sites") or {}
    if precision.get("clip_scaled"):
        where = seen.short(sites["clip_scaled"])
        return (
            f"{where} clips gradients that are still multiplied by the scale",
            "call scaler.unscale_(optimizer) before clipping",
        )
    if precision.get("unscaled_by_hand"):
        return (
            "gradients are divided by the scale in the loop, and once more by scaler.step",
            "call scaler.unscale_(optimizer) in place of the division",
        )
    if precision.get("unscaled_loss"):
        where = seen.short(sites["unscaled_loss"])
        return (
            f"{where} goes backward from a loss that was not scaled, beside one that was: scaler.step "
            "divides the gradients of both by the scale",
            "scaler.scale(loss).backward() for every loss",
        )
    if precision.get("changed_scaled"):
        where = seen.short(sites["changed_scaled"])
        return (
            f"gradients are changed between the backward pass and scaler.step ({where}), by another factor "
            "in each step, while they are still multiplied by the scale",
            "call scaler.unscale_(optimizer) before clipping by hand",
        )
    return None


def no_gain(seen: Seen) -> Verdict | None:
    """Autocast is on and the step is not faster for it: tried on a copy, with and without."""
    precision = seen.precision
    if precision.get("autocast", 0) < MOST_UPDATES * (precision.get("steps") or 1):  # else for validation
        return None
    narrow = seen.record.get("narrow_phases")
    sizes = {int(name.partition(":")[2]) for name in seen.record.get("item_bytes") or {}}
    if sizes and min(sizes) >= 4 and not narrow:
        evidence = "autocast is entered, but every matrix operation still computes in 32 bits"
        advice = "put the model's call and the loss inside of autocast, for the device that they run on"
        reached = seen.experiment("autocast_reached") or (1.0, 1.0, 1.0)
        if reached[1] > CLEAR_GAIN:
            evidence += f"; where it reaches them, a copy of the step ran {times(reached[1])} as fast"
        return Verdict("precision_no_gain", evidence, reached[0] * 0.93, reached[2] * 1.07, advice)
    found = seen.experiment("autocast") if seen.narrows_gradients else None
    if found is None or found[1] < 0.98 or found[0] < 0.93:
        return None
    low, middle, high = found
    evidence = f"a copy of the step ran {times(middle)} as fast without autocast: {_why_no_gain(seen)}"
    advice = "leave autocast out"
    if precision.get("scale"):  # and the scaler with it, whose unscaling is a part of the update
        advice, high = "leave autocast and the GradScaler out", high / (1 - 0.7 * seen.shares["update"])
    return Verdict("precision_no_gain", evidence, low * 0.97, high * 1.03, advice)


def no_effect(seen: Seen) -> Verdict | None:
    """A setting that did nothing, or that costs time here."""
    asked = seen.record.get("asked") or {}
    for name, words, advice in (
        ("anomaly", "anomaly detection is on", "torch.autograd.set_detect_anomaly(False)"),
        ("onednn", "oneDNN is turned off", "torch.backends.mkldnn.enabled = True"),
        ("double", "the weights are float64", "float32 weights, unless the job needs 16 digits"),
        ("deterministic", "deterministic algorithms are demanded", "leave them off, or pay knowingly"),
        ("channels_last", "the model is in channels-last", "leave channels-last out"),
    ):
        found = seen.experiment(name)
        if found is not None and found[0] >= CLEAR_GAIN:
            evidence = f"{words}; without that a copy of the step ran {times(found[1])} as fast"
            return Verdict("no_effect", evidence, found[0] * 0.9, found[2] * 1.15, advice)
    # Unknown where the run ended before.
    thrown_away = seen.record.get("compiled_alive") is False
    if "compile" in asked and not seen.record.get("dynamo") and thrown_away:
        where = seen.short(asked["compile"])
        evidence = (
            f"torch.compile is called in {where}, but nothing was compiled: its result is not what runs"
        )
        return Verdict("no_effect", evidence, 0.9, 1.5, "model = torch.compile(model), and call that")
    convolves = (seen.record.get("work") or {}).get("convolution")
    if "channels_last" in asked and seen.record.get("work") and not convolves:
        where = seen.short(asked["channels_last"])
        evidence = f"{where} asks for channels-last, but the step has no convolution"
        return Verdict("no_effect", evidence, 0.98, 1.05, "leave it out")
    if seen.loader.get("pin_memory") and seen.device == "cpu" and seen.machine.device.kind != "cpu":
        evidence = "the loader pins memory, but the model is on the CPU"  # where there is no GPU, it does not
        return Verdict("no_effect", evidence, 0.98, 1.05, "pin_memory=False")
    return None


def _why_no_gain(seen: Seen) -> str:
    features = seen.machine.device.features
    if seen.device == "cpu" and not {"amx_bf16", "avx512_bf16", "bf16"} & set(features):
        return "this processor has no 16-bit arithmetic"
    work = seen.record.get("work") or {}
    operators = seen.operator_seconds
    matrix = sum(operators.get(kind, 0.0) for kind in MATRIX_CLASSES)
    share = matrix / max(sum(operators.values()), 1e-12)
    casts = (work.get("memory") or {}).get("count", 0)
    small = f"only {percent(share)} of the operators' time is matrix work" if share < 0.4 else ""
    return f"{small or 'the matrices are too small to gain'}; {casts} copies and casts come on top"


def _layer(precision: dict[str, object]) -> str:
    return f" (most in {precision['tiny_layer']})" if precision.get("tiny_layer") else ""
