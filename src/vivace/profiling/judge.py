"""From a record and its trace to the document: shares, roofline, memory, verdicts, what `advise` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace import words
from vivace.inspection.quiet import TOLERATED_SHARE
from vivace.ledger import NO_KERNELS
from vivace.machine import NOT_YET, Machine
from vivace.operators import MATRIX_CLASSES
from vivace.profiling import roofline, rules
from vivace.profiling.bounds import bounds as bounds_of
from vivace.profiling.bounds import to_dict
from vivace.profiling.prospects import prospects
from vivace.profiling.seen import Seen, Verdict
from vivace.profiling.trace import read_trace

FORMAT = 1
DTYPE_NAMES = {16: "complex128", 8: "float64", 4: "float32", 2: "bfloat16", 1: "int8"}
DTYPE_SIZES = {"complex128": 16, "complex64": 8, "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def judge(
    record: dict[str, Any], trace: Path, machine: Machine, target: str, epochs: int | None
) -> dict[str, Any]:
    """The whole document of a profile, without the paths."""
    facts = _traced(record, trace)
    seen = Seen(record, facts, machine, target if epochs is not None else None, target)
    rows = roofline.roofline(
        record.get("work") or {},
        seen.operator_seconds,
        record.get("item_bytes") or {},
        machine.ceilings,
        "fp16" if seen.computes_in_float16 else "bf16",
        # A flag, which changes nothing on a GPU without TF32: there it has no ceilings.
        seen.flags.get("tf32") or () if any("tf32" in name for name in machine.ceilings) else (),
    )
    bound = roofline.bound_of(rows) if record.get("work") else None
    beyond = sum(row.bound_seconds or 0.0 for row in rows) > seen.step_seconds  # `missing` says why
    share = None if bound is None or beyond else bound / seen.step_seconds
    launch_seconds = sum(row.count for row in rows) * machine.ceilings.get("launch_seconds", 0.0)
    launching = launch_seconds / bound if bound else 0.0
    bounds = bounds_of(seen, sum(row.count for row in rows))
    verdicts = _verdicts(seen, rows, share, bound)
    return {
        "format": FORMAT,
        "target": target,
        "shares": seen.shares,
        "step_seconds": seen.step_seconds,
        "each_step_seconds": record.get("clean_walls") or [],
        "samples_per_second": seen.samples_per_second,
        "samples_per_second_in_all": seen.samples_per_second_in_all,
        "steps": record["clean_steps"],
        **_others(record.get("foreign_share")),
        "bound_seconds": bound,
        "share_of_limit": share,
        "bound_by": _bound_by(rows, bound, launching),
        "launch_share": launch_seconds / seen.step_seconds if bound else None,
        "prospects": prospects(seen),
        "tune": seen.faster,
        "idle_gpu": seen.machine.idle_gpu if seen.device == "cpu" and epochs is None else "",
        "missing": _passed_over(seen, epochs)
        + _missing(record, facts, bound, _precision(seen)[0])
        + _beyond(rows, bound is not None and beyond),
        "verdicts": [verdict.to_dict() for verdict in verdicts],
        "bounds": [to_dict(bound) for bound in bounds],
        "roofline": [roofline.to_dict(row) for row in rows],
        "modules": _modules(record, facts),
        "slowest": facts.get("slowest", []),
        "memory": _memory(record, facts),
        "timeline": facts.get("phases", []),
        "timeline_seconds": facts.get("timeline_seconds"),
        "step_starts": facts.get("step_starts", []),
        "traced_seconds": facts.get("step_seconds"),
        "busy_share": None if facts.get("busy_seconds") is None else seen.busy_share,
        **_experiments(record),
        "work": _work(seen, rows, epochs),
        "loader": record.get("loader"),
        "flags": record.get("flags"),
        "problems": record.get("problems") or [],
        "machine": _machine(seen),
    }


def _traced(record: dict[str, Any], trace: Path) -> dict[str, Any]:
    usual = record.get("traced_usual") or ()
    return read_trace(trace, str(record["device"]), usual) if trace.is_file() else {}


def _machine(seen: Seen) -> dict[str, Any]:
    """What it ran on; the script's torch may be another than Vivace's."""
    machine, record = seen.machine, seen.record
    return {
        "fingerprint": machine.fingerprint,
        "device": record.get("device_name") if seen.device != "cpu" else _cpu_name(machine),
        "cores": seen.cores,
        "versions": {**machine.versions, "torch": record.get("torch")},
        "ceilings": machine.ceilings,
    }


def _others(share: float | None) -> dict[str, Any]:
    """What other processes used of the processor in the timed window, and whether that disturbed it."""
    return {"foreign_share": share, "disturbed": (share or 0.0) > TOLERATED_SHARE}


def _experiments(record: dict[str, Any]) -> dict[str, Any]:
    """What they found, and how long the script waited for them."""
    waited = record.get("paused_seconds", 0.0)
    return {"experiments": record.get("experiments") or {}, "paused_seconds": waited}


def _cpu_name(machine: Machine) -> str:
    return next((d.name for d in machine.devices if d.kind == "cpu"), "cpu")


def _ended(exit_code: int) -> Verdict:
    ended = f"the script was ended from outside (exit code {exit_code})"
    if exit_code == 130:
        evidence, advice = "the script was interrupted (exit code 130)", "let it run for longer"
    elif exit_code in (129, 143):  # SIGHUP, SIGTERM
        evidence, advice = ended, "let it run for longer"
    elif exit_code == 137:  # SIGKILL
        evidence, advice = ended, "see whether the memory was full, else let it run for longer"
    else:
        evidence, advice = f"the script ended with exit code {exit_code}", "mend what ended it"
    evidence += "; what stands here was recorded until then"
    return Verdict("ended", evidence, 1.0, 1.0, f"{advice}, and profile it again")


def _verdicts(
    seen: Seen, rows: list[roofline.Roof], share: float | None, bound: float | None
) -> list[Verdict]:
    """What the rules say; a script that did not end well is never healthy."""
    found = rules.judge_all(seen)
    if seen.record.get("exit_code"):
        return [_ended(seen.record["exit_code"]), *found]
    return found or [_healthy(seen, rows, share, bound)]


def _healthy(seen: Seen, rows: list[roofline.Roof], share: float | None, bound: float | None) -> Verdict:
    if share is not None:
        limit = f"it runs at {words.percent(share)} of the limit of its operators on this machine"
    elif bound is not None:
        limit = "it runs faster than this machine was measured to be (vivace inspect --measure does so again)"
    else:
        limit = "the distance to the limit is not known"
    largest = next((row for row in rows if row.seconds), None)
    most = f"; most of its time goes to {largest.operator} operators" if largest else ""
    advice = f"{seen.faster} measures what goes faster"
    state, found = seen.record["state"], "nothing is wrong"
    if state != "finished":
        found = f"nothing wrong was seen until the run ended, while '{state}' was measured"
        advice = "let it run for more steps, so that the rest is measured too"
    return Verdict("healthy", f"{found}: {limit}{most}", 1.0, 1.0, advice)


def _bound_by(rows: list[roofline.Roof], bound: float | None, launching: float) -> str | None:
    """What most of the least time goes to: ``compute`` or ``memory``; ``launch`` where handing the operators
    to the device takes longer than the device needs for them.
    """
    if bound is None:
        return None
    if launching > 1:
        return "launch"
    sums: dict[str, float] = {}
    for row in rows:
        sums[row.bound_by] = sums.get(row.bound_by, 0.0) + (row.least_seconds or 0.0)
    return max(sums, key=lambda name: sums[name])


def _passed_over(seen: Seen, epochs: int | None) -> list[str]:
    """Why a job ran on the processor although there is a GPU; a script chooses its device itself."""
    if seen.device in NOT_YET:
        return [f"times of the device: {NOT_YET[seen.device]}, so these are when the processor gave it work"]
    told = seen.machine.passed_over if seen.device == "cpu" and epochs is not None else ""
    return [told] if told else []


def _missing(record: dict[str, Any], facts: dict[str, Any], bound: float | None, precision: str) -> list[str]:
    """What this profile does not hold, each with its reason."""
    found = []
    state = record["state"]
    ours = record.get("problems")
    ended = "Vivace's own fault ended the recording" if ours else "the run ended"
    ended += f" while '{state}' was measured"
    if state == "finished":
        ended = "Vivace's own fault left them out" if ours else "they could not be recorded"
    if on_a_thread := record.get("on_a_thread"):
        found.append(
            "operators, modules, operations and bytes: it trains on a thread, which may end meanwhile"
        )
    if not facts and not on_a_thread:
        found.append(f"operators, modules, memory over time: {ended}")
    if facts and facts["busy_seconds"] is None:
        found.append(f"times of operators and modules on the GPU: {NO_KERNELS}")
    if record.get("updates") and not (record["seconds"]["backward"] or record.get("replays")):
        found.append("forward and backward apart: no backward pass was seen, so both are shown as forward")
    if record.get("replays"):
        found.append("forward, backward and update apart: a CUDA graph replays them as one, shown as forward")
    if not record.get("work") and not on_a_thread:
        found.append(f"operations and bytes: {ended}")
    elif bound is None and not on_a_thread:
        wide = any(name.endswith((":8", ":16")) for name in record.get("item_bytes") or {})
        ceilings = f"no ceiling is measured for {precision}"
        if not wide:
            ceilings = "this machine's ceilings were not measured (vivace inspect --measure)"
        found.append(f"the limit: {ceilings}")
    if why := record.get("untried"):
        found.append(f"what settings bring: {why}")
    if record.get("silent_modules"):
        found.append("times by module, and operations of compiled parts: the model is compiled")
    if not record.get("samples_known", True):
        found.append(
            "samples a second: neither a loader nor a module's input shows them; a step counts as one"
        )
    return found


def _beyond(rows: list[roofline.Roof], whole: bool) -> list[str]:
    """Why a share of the limit is left out: what is faster than a ceiling is not limited by it."""
    why = (
        "faster than the measured ceilings: the data stay in the processor's caches, or the machine was busy"
    )
    why += " when its ceilings were measured (vivace inspect --measure)"
    names = [
        row.operator for row in rows if row.seconds and row.bound_seconds and row.seconds < row.bound_seconds
    ]
    found = [f"the share of the limit: the step is {why}"] if whole else []
    return found or ([f"the share of {', '.join(names)}: {why}"] if names else [])


def _modules(record: dict[str, Any], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Modules with seconds forward and backward, and the bytes that they keep for the backward pass."""
    kept = dict(record.get("activations") or [])
    rows = {
        row["name"]: {**row, "activation_bytes": kept.get(row["name"], 0)} for row in facts.get("modules", [])
    }
    for name, size in kept.items():
        rows.setdefault(name, {"name": name, "forward": 0.0, "backward": 0.0, "activation_bytes": size})
    return list(rows.values())


def _memory(record: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Bytes of one step by kind; what is left of the peak (workspaces, passing gradients) is temporary."""
    held, rise = record.get("held_bytes", 0), facts.get("rise_bytes", 0)
    cuda = record.get("cuda") or {}
    known = {
        "parameters": record.get("parameter_bytes", 0) + record.get("frozen_bytes", 0),
        "gradients": record.get("gradient_bytes", 0),
        "optimizer": record.get("optimizer_bytes", 0),
        "activations": record.get("activation_bytes", 0),
        "batch": record.get("batch_bytes", 0),
    }
    peak = held + rise
    return {
        **known,
        "peak_bytes": peak if facts else None,
        "rise_bytes": rise,
        "held_bytes": held,
        "temporary": max(0, peak - known["parameters"] - known["optimizer"] - known["activations"]),
        "peak_at": facts.get("peak_at"),
        "curve": facts.get("memory_curve", []),
        "activations_by_module": record.get("activations") or [],
        "resident": record.get("resident") or [],
        "reserved_bytes": cuda.get("peak_reserved"),
        "fragmented_bytes": cuda.get("inactive_split_peak"),
    }


def _work(seen: Seen, rows: list[roofline.Roof], epochs: int | None) -> dict[str, Any]:
    """What `advise` reads from a saved profile."""
    record = seen.record
    precision, size = _precision(seen)
    length, fetches = seen.loader.get("batches"), record["fetches"] / max(1.0, record.get("sources") or 1.0)
    work, samples = record.get("work") or {}, max(1.0, record["samples"])
    return {
        "format": FORMAT,
        "precision": precision,
        "batch_size": record["samples"],
        "batches_at_once": seen.batches_at_once,
        "steps_per_epoch": length / max(1.0, round(fetches)) if length else None,
        "epochs": epochs,
        "step_seconds": seen.step_seconds,
        "operators": {
            row.operator: {
                "flops": row.flops,
                "bytes": row.bytes,
                "bytes_fused": (work.get(row.operator) or {}).get("bytes_fused", row.bytes),
                "count": row.count,
                "seconds": row.seconds,
            }
            for row in rows
        },
        "num_parameters": record["num_parameters"],
        "num_tensors": _num_tensors(record),
        "parameter_bytes": record["parameter_bytes"],
        "frozen_bytes": record.get("frozen_bytes", 0),
        "optimizer_bytes": record["optimizer_bytes"],
        "activation_bytes": record.get("activation_bytes"),
        "peak_bytes": record.get("held_bytes", 0) + seen.trace.get("rise_bytes", 0) or None,
        "host_seconds_per_sample": seen.loading_seconds / samples,
        "waits_for_workers": seen.waits_for_workers,
        "waiting_seconds_per_sample": seen.shares["data"] * seen.step_seconds / samples,
        "communication_seconds": seen.shares["communication"] * seen.step_seconds,
        "channels_last": "channels_last" in (record.get("asked") or {}),
        "device": record.get("device_name"),
        **({"demand": _demand(record, samples, size)} if record.get("bins") else {}),
    }


def _precision(seen: Seen) -> tuple[str, int]:
    """In what the step's matrix operators ran, and the bytes of a number."""
    sizes = {n.partition(":")[0]: int(n.partition(":")[2]) for n in seen.record.get("item_bytes") or {}}
    matrix = {kind: size for kind, size in sizes.items() if kind in MATRIX_CLASSES}
    size = min(matrix.values(), default=4)
    if size == 2 and (autocast := seen.precision.get("autocast_dtypes")):
        return next(iter(autocast)), size
    work = seen.record.get("work") or {}
    largest = max(matrix, key=lambda kind: (work.get(kind) or {}).get("flops", 0), default="")
    dtypes = seen.record.get("parameter_dtypes") or []
    if size == DTYPE_SIZES["complex64"] and "float64" not in dtypes:
        return "complex64", size
    tf32 = size == 4 and largest in (seen.flags.get("tf32") or ())
    weights = (name for name in dtypes if DTYPE_SIZES.get(name) == size)
    return "tf32" if tf32 else next(weights, DTYPE_NAMES[size]), size


def _num_tensors(record: dict[str, Any]) -> int:
    return sum(int(settings.get("tensors") or 0) for settings in record.get("settings") or [])


def _demand(record: dict[str, Any], samples: float, item_bytes: int) -> dict[str, Any]:
    """The step's forward and backward pass by kinds of kernels, a sample's share of each, as in fp32."""
    names = ("kind", "count", "flops", "bytes", "constant_bytes")
    bins = [(kind, n, flops / samples, moved / samples, 0.0) for kind, n, flops, moved, _ in record["bins"]]
    return {
        "bins": [dict(zip(names, found, strict=True)) for found in bins],
        "num_parameters": record["num_parameters"],
        "num_tensors": _num_tensors(record),
        "saved_bytes": (record.get("activation_bytes") or 0.0) / samples * 4 / item_bytes,
    }
