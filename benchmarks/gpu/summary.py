"""results.md from the cases of all parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from book import Case, read

RESNET50_BYTES = 367e6  # of one image in bf16, NHWC, with BatchNorm, ReLU and additions fused
HEAD = """# GPU: {device}

{date}, driver {driver}, torch {torch}, Python {python}, Vivace {vivace}{power}.
Written by `benchmarks/gpu.sh`.
"""


def write(folder: Path) -> None:
    """Write it anew; a part without results has no section."""
    facts, found = read(folder)
    cases = {part: found[part] for part in SECTIONS if part in found}
    power = f", power limit {facts['power_limit_watts']:.0f} W" if "power_limit_watts" in facts else ""
    defaults = dict.fromkeys(("device", "date", "driver", "torch", "python", "vivace"), "unknown")
    text = [HEAD.format(**{**defaults, **facts}, power=power)]
    text += ["A dry run with tiny shapes: no figure here means anything.\n"] if facts.get("dry") else []
    rates = _rates(cases.get("ceilings", {}))
    for part, those in cases.items():
        try:
            lines = SECTIONS[part](those, rates)
        except Exception as error:  # the other parts' tables must be written, and their cases run
            why = f"{type(error).__name__}: {error}"
            lines = [f"These figures are in cases.jsonl alone: no table could be made of them ({why})."]
        text += [f"## {part.capitalize()}\n", *lines, *_problems(those), ""]
    new = folder / "results.new"
    new.write_text("\n".join(text), encoding="utf-8")
    new.replace(folder / "results.md")


def _rates(cases: dict[str, Case]) -> dict[str, float]:
    return {key: value for case in cases.values() for key, value in (case.get("rates") or {}).items()}


def _ceilings(cases: dict[str, Case], rates: dict[str, float]) -> list[str]:
    def show(key: str, value: float) -> str:
        if key.endswith("_seconds"):
            return f"{value * 1e6:.2f} us"
        if key.startswith("jpeg"):
            return f"{value:.0f} images/s"
        if key.startswith(("matmul", "convolution")):
            return f"{value / 1e12:.1f} {'TOP/s' if 'int8' in key else 'TFLOP/s'}"
        return f"{value / 1e9:.1f} GB/s"

    clocks = max((case.get("clock_mhz", 0) for case in cases.values()), default=0)
    after = [f"\nHighest clock seen after a case: {clocks} MHz."] if clocks else []
    return [*_grid(("ceiling", "measured"), [(f"`{k}`", show(k, v)) for k, v in rates.items()]), *after]


def _correctness(cases: dict[str, Case], rates: dict[str, float]) -> list[str]:
    rows = []
    for kind in ("scene", "contract", "ruler"):
        those = [case["status"] for name, case in cases.items() if name.startswith(kind)]
        counts = [str(those.count(s)) for s in ("ok", "refused", "broken", "failed")]
        rows.append((kind, str(len(those)), *counts))
    judged = [
        (name.removeprefix("ruler "), c["promise"], _worst(c), c["status"])
        for name, c in cases.items()
        if name.startswith("ruler") and "promise" in c
    ]
    return [
        *_grid(("kind", "cases", "kept", "refused", "broken", "failed"), rows),
        "",
        *_grid(("plan, job", "promise", "worst, envelopes of 8", "verdict"), judged),
    ]


def _worst(case: Case) -> str:
    return f"{max(case['loss_envelopes'], case['displacement_envelopes']):.2f}"


def _speed(cases: dict[str, Case], rates: dict[str, float]) -> list[str]:
    rows = []
    for name, case in cases.items():
        workload, _, label = name.partition(" | ")
        if case["status"] != "ok":
            continue
        ratio = case.get("ratio")
        shown = f"{ratio['estimate']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else "1"
        strict = cases[f"{workload} | strict fp32"]
        share = _share(workload, case, strict, rates)
        peak = f"{case['peak_bytes'] / 2**30:.2f}"
        warm = f"{case.get('warmup_seconds', 0.0):.0f}"
        best = label == _best(workload, cases)
        cells = (workload, f"**{label}**" if best else label, f"{case['samples_per_second']:,.0f}", shown)
        rows.append((*cells, peak, warm, share))
    columns = (
        "job",
        "plan",
        "samples/s",
        "against strict fp32, 95 %",
        "peak GiB",
        "warm-up s",
        "of the roofline",
    )
    return _grid(columns, rows)


def _best(workload: str, cases: dict[str, Case]) -> str:
    own = {n.partition(" | ")[2]: c for n, c in cases.items() if n.startswith(f"{workload} | ")}
    timed = {label: c["ratio"]["estimate"] for label, c in own.items() if "ratio" in c}
    return max(timed, key=timed.__getitem__) if timed else ""


def _share(workload: str, case: Case, strict: Case, rates: dict[str, float]) -> str:
    """The larger of the two bounds' times over the measured time: operations, and for ResNet-50 bytes."""
    plan = case.get("plan")
    if plan is None or not plan:
        dtype = "float32"
    else:
        dtype = "tf32" if "tf32" in plan else "bfloat16" if any("bf16" in n for n in plan) else "float32"
    peak, copy = rates.get(f"matmul_{dtype}"), rates.get("copy_device")
    if not peak or not copy:
        return "no ceiling"
    seconds = {"operations": strict["flops_per_sample"] / peak}
    if workload.startswith("resnet50"):
        seconds["bytes"] = RESNET50_BYTES * (1 if dtype == "bfloat16" else 2) / copy
    kind = max(seconds, key=seconds.__getitem__)
    return f"{seconds[kind] * case['samples_per_second']:.0%} ({kind})"


def _tune(cases: dict[str, Case], rates: dict[str, float]) -> list[str]:
    lines: list[str] = []
    for name, case in cases.items():
        if "tuned" not in case:
            continue
        tuned = case["tuned"]
        ratio, verdict = tuned["speedup"], tuned["verdict"]
        plan = " + ".join(tuned["plan"]) or f"the reference ({tuned['reason']})"
        lines.append(
            f"`{name}`: {plan}, {ratio['estimate']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f}) times "
            f"strict fp32 in {tuned['seconds']:.0f} s; promise {verdict['promise']}, "
            f"kept: {verdict['kept']}, {verdict['loss_envelopes']} and "
            f"{verdict['displacement_envelopes']} envelopes; baselines {tuned['baselines']} samples/s; "
            f"break-even after {tuned['break_even_steps']} steps.\n"
        )
        rows = [(step["step"], f"{step['ratio']['estimate']:.2f}") for step in tuned["waterfall"]]
        lines += [*_grid(("added", "times strict fp32"), rows), ""] if rows else []
        trials = [
            (
                " + ".join(t["techniques"]) or "reference",
                t["status"],
                f"{t['ratio']['estimate']:.2f}" if t["ratio"] else t["reason"],
            )
            for t in tuned["trials"]
        ]
        lines += [*_grid(("trial", "status", "ratio or reason"), trials), ""]
    return lines


def _peer(cases: dict[str, Case], rates: dict[str, float]) -> list[str]:
    printed = [case["printed"] for case in cases.values() if "printed" in case]
    return [line for lines in printed for line in ["```", *lines, "```"]]


def _memory(cases: dict[str, Case], rates: dict[str, float]) -> list[str]:
    """Errors of the predicted peaks, then what each budget costs."""
    errors = [
        (row["job"], row["plan"], f"{row['measured_bytes'] / 2**20:,.0f}", f"{row['error_percent']:+.2f} %")
        for case in cases.values()
        for row in case.get("predicted", ())
        if "error_percent" in row
    ]
    costs = [
        (name.partition(" | ")[0], row["allow"], f"{row['percent']} %", *_cost(row))
        for name, case in cases.items()
        for row in case.get("chosen", {}).get("rows", ())
    ]
    costs += [
        (name.partition(" | ")[0], peer, f"{row['percent']} %", f"{row['percent']} %", _interval(row))
        for name, case in cases.items()
        for peer, row in case.get("chosen", {}).get("peers", {}).items()
    ]
    return [
        *_grid(("job", "plan", "peak MiB", "error of the prediction"), errors),
        "",
        *_grid(("job", "by", "activations wanted", "measured", "more time a step, 95 %"), costs),
    ]


def _cost(row: dict[str, Any]) -> tuple[str, str]:
    if "slowdown_percent" not in row:
        return "-", row["reason"]
    return f"{row['percent_measured']} %", _interval(row)


def _interval(row: dict[str, Any]) -> str:
    more = row["slowdown_percent"]
    return f"{more['estimate']:+.1f} % ({more['low']:+.1f} to {more['high']:+.1f})"


def _verdicts(cases: dict[str, Case], rates: dict[str, float]) -> list[str]:
    rows = [case["row"] for case in cases.values() if "row" in case]
    return _grid(
        ("script", "planted", "said", "gain predicted", "measured", "evidence"),
        [
            (
                row["script"],
                row["cause"],
                ", ".join(row["said"]),
                f"{row['low']:.2f} to {row['high']:.2f}",
                f"{row['measured']:.2f}" if row["measured"] else "-",
                row["evidence"],
            )
            for row in rows
        ],
    )


def _feed(cases: dict[str, Case], rates: dict[str, float]) -> list[str]:
    found = [(name, case["found"]) for name, case in cases.items() if "found" in case]
    return _grid(
        ("case", "figure", "value"),
        [
            (name, key, f"{1000 * value:.3f} ms" if key.endswith("_seconds") else f"{value:.0%}")
            for name, figures in found
            for key, value in figures.items()
        ],
    )


def _cnn(cases: dict[str, Case], rates: dict[str, float]) -> list[str]:
    found = {name: case["found"] for name, case in cases.items() if "found" in case}
    copy = found.get("ceiling copy", {}).get("copy_device", 0.0)
    exact = [
        (name, f"{max(those['worst'].values()):.1e}", f"{those['allowed']:.0e}")
        for name, those in found.items()
        if "worst" in those
    ]
    kernels = [
        (name.removeprefix("kernels at "), kernel, f"{one['seconds'] * 1e6:.0f}", _against(one, copy))
        for name, those in found.items()
        for kernel, one in those.get("kernels", {}).items()
        if one["bytes_per_second"]
    ]
    whole = [
        (
            name.removeprefix("kernels at "),
            "convolution, same norm" if "statistics_mm" in those["kernels"] else "BatchNorm",
            f"{those['pytorch_seconds'] / those['seconds']:.2f}",
        )
        for name, those in found.items()
        if "kernels" in those
    ]
    counted = [
        (name.removeprefix("counters at "), kernel, f"{value / 1e6:,.0f}")
        for name, case in cases.items()
        for kernel, value in case.get("moved", {}).items()
    ]
    return [
        *_grid(("kernels", "worst error against fp64", "allowed"), exact),
        "",
        *_grid(_WATERFALL, [_stage(name, case, cases) for name, case in cases.items() if _is_stage(name)]),
        "",
        *_grid(("feature map", "kernel", "us", "GB/s (of the copy's)"), kernels),
        "",
        *_grid(("feature map", "beside PyTorch's", "times as fast"), whole),
        "",
        *_grid(("feature map", "kernel", "MB by the GPU's counters"), counted),
    ]


_WATERFALL = ("job", "step", "images/s", "against strict fp32, 95 %", "MB an image, at least", "of the bound")


def _is_stage(name: str) -> bool:
    return " | " in name and not name.endswith(" | bytes")


def _against(kernel: Case, copy: float) -> str:
    share = f" ({kernel['bytes_per_second'] / copy:.0%})" if copy else ""
    return f"{kernel['bytes_per_second'] / 1e9:,.0f}{share}"


def _stage(name: str, case: Case, cases: dict[str, Case]) -> tuple[str, ...]:
    """One line of the waterfall: speed beside the bytes and the bound that were counted for such a plan."""
    job, _, label = name.partition(" | ")
    if case["status"] != "ok" or "samples_per_second" not in case:
        return (job, label, case["status"], "", "", "")
    plan = case.get("plan") or {}
    dtype = "bfloat16" if any("bf16" in key for key in plan) else "float32"
    counted = cases.get(f"{job} | bytes", {}).get("found", {})
    norm = plan.get("fused_batchnorm")
    way = "" if norm is None else " products" if norm.get("products") else " fused"
    bound = counted.get(f"{dtype}{way}")
    ratio = case.get("ratio")
    shown = f"{ratio['estimate']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else "1"
    of_bound = f"{case['samples_per_second'] / bound['bound']:.0%}" if bound and "tf32" not in plan else ""
    megabytes = f"{bound['bytes'] / 1e6:.0f}" if bound else ""
    return (job, label, f"{case['samples_per_second']:,.0f}", shown, megabytes, of_bound)


def _problems(cases: dict[str, Case]) -> list[str]:
    """What was refused, broken, unsteady or failed, with its reason; equal reasons in one line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, case in cases.items():
        if case["status"] != "ok":
            reasons.setdefault((case["status"], case.get("reason", "")), []).append(name)
    rows = [(status, str(len(names)), names[0], reason) for (status, reason), names in reasons.items()]
    return ["", *_grid(("", "cases", "first", "reason"), sorted(rows))] if rows else []


def _grid(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

    return [line(columns), "|" + "---|" * len(columns), *map(line, rows)]


SECTIONS: dict[str, Any] = {
    "ceilings": _ceilings,
    "correctness": _correctness,
    "speed": _speed,
    "tune": _tune,
    "peer": _peer,
    "memory": _memory,
    "verdicts": _verdicts,
    "cnn": _cnn,
    "feed": _feed,
}
