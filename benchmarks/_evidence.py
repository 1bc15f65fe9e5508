"""Rows of the evidence tables: what each benchmark other than `cpu` asked, and what its record answers."""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
from collections.abc import Callable, Iterator

import _gpus
from _evidence_words import TITLES, WORDS
from faults import counts as told_counts
from faults import figures as told_figures

from vivace.advising.software import chosen, options_of
from vivace.inspection.table import API_KEYS, ceiling_in_words
from vivace.measuring.statistics import speed_ratio
from vivace.recipes import RECIPES

Row = tuple[str, str]  # what was asked, what was found


def ruler(record: dict, file: str) -> Iterator[Row]:
    """How many defects are caught, how many correct plans are rejected, and the cost."""
    words, titles = WORDS[file], TITLES[file]
    (first, known), *others = [(title, found) for title, found in record["caught"].items() if found["of"]]
    told = words["met"].format(caught=known, false_alarms=record["false_alarms"])
    told += words["left"].format(**record) if record.get("left") else ""
    yield words["ours"].format(title=titles[first]), told
    for title, found in others:
        yield words["caught"].format(title=titles[title]), words["of"].format(**found)
    if record["unjudged"]:
        left = [sum(name.startswith(kind) for name in record["unjudged"]) for kind in ("defect", "correct")]
        yield words["undecided"], ", ".join(map(str, left))
    if record["verify_share_of_search"]:
        yield words["share"], f"{record['verify_share_of_search']:.0%}"


def silent_errors(record: dict, file: str) -> Iterator[Row]:
    """How many of the errors that others met are caught, and how many correct edits are rejected."""
    words, missed = WORDS[file], [f"`{name}`" for name in record["missed"]]
    told = words["missed"].format(names=", ".join(missed)) if missed else ""
    yield words["others"], words["met"].format(**record) + told


def live_proof(record: dict, file: str) -> Iterator[Row]:
    """How many defects the proof of a script's step refuses, and how many correct plans."""
    words = WORDS[file]
    told = words["met"].format(**record) + words["milder"].format(**record["milder"])
    yield words["live"].format(**record), told


def peer(record: dict, file: str) -> Iterator[Row]:
    """The geometric mean of the ratios, and whose results the ruler rejects."""
    words, jobs = WORDS[file], record["jobs"].values()
    known = {
        name: job["vivace_against_best"]["estimate"]
        for name, job in record["jobs"].items()
        if job["vivace_against_best"]
    }
    if known:
        version, cores = record["versions"]["pytorch-autotune"], record["machine"]["cores"]
        each = ", ".join(
            f"`{name}` {ratio:.2f}" for name, ratio in sorted(known.items(), key=lambda o: -o[1])
        )
        yield (
            words["best"].format(version=version, count=len(known), cores=cores),
            f"{_interval(record['vivace_against_best'])}; {each}{_without(record, words)}",
        )
    if record["vivace_against_peer"]:
        counted = sum(job["vivace_against_peer"] is not None for job in jobs)
        asked = words["peer"].format(version=record["versions"]["pytorch-autotune"], count=counted)
        flatters = words["flatters"] if record["note"] else ""
        yield asked, _interval(record["vivace_against_peer"]) + flatters
    if not jobs:  # of the usual budget there are none yet
        return
    ratios = {name: job["vivace_against_best"] for name, job in record["jobs"].items()}
    behind = [f"`{name}`" for name, ratio in ratios.items() if ratio and ratio["high"] < 1]
    yield words["behind"], ", ".join(behind) or words["none"]
    broken = []
    for name in ("vivace", "peer"):
        verdicts = [job["contestants"][name].get("verdict") or {} for job in jobs]
        judged = [verdict["kept"] for verdict in verdicts if verdict.get("kept") is not None]
        broken.append(f"{judged.count(False)} / {len(judged)}")
    yield words["broken"], ", ".join(broken)
    for budget, entries in record.get("longer", {}).items():
        for name, entry in entries.items():
            if entry["vivace_against_best"]:
                yield words["longer"].format(job=name, budget=budget), _interval(entry["vivace_against_best"])


def _without(record: dict, words: dict) -> str:
    """The jobs of which there is no ratio."""
    names = [f"`{name}`" for name, job in record["jobs"].items() if not job["vivace_against_best"]]
    return words["not_timed"].format(names=", ".join(names)) if names else ""


def search(record: dict, file: str) -> Iterator[Row]:
    """How near the budgets come to the best of all plans."""
    for budget, found in record["tuned"].items():
        asked = WORDS[file]["search"].format(job=record["job"], count=record["num_measured"], budget=budget)
        share = found["share_of_best"]
        interval = f"{share['estimate']:.1%} ({share['low']:.1%}-{share['high']:.1%})"
        yield asked, f"{interval}, {found['share_of_time']:.0%}"


def memory(record: dict, file: str) -> Iterator[Row]:
    """How far the predicted peaks are from the measured ones."""
    found = f"{record['median_percent']:.2f} %, {record['worst_percent']:.2f} %"
    yield WORDS[file]["memory"].format(pairs=record["pairs"], refused=_refused(record)), found


def gpu_memory(record: dict, file: str) -> Iterator[Row]:
    """How many predictions are as near to torch's CUDA allocator as is demanded."""
    found = f"{record['within_peak']}, {record['within_reserved']}"
    yield WORDS[file]["gpu_memory"].format(pairs=record["pairs"], refused=_refused(record)), found


def _refused(record: dict) -> int:
    return sum("refused" in row for row in record["rows"])


def memory_budgets(record: dict, file: str) -> Iterator[Row]:
    """What less activation memory costs, and how the choice stands against random ones."""
    words, job = WORDS[file], record["job"].removeprefix("memory_budgets_")
    for allow in ("blocks", "exact", "rounding"):
        rows = [row for row in record["rows"] if row["allow"] == allow]
        found = [
            _percent(row["slowdown_percent"]) if "slowdown_percent" in row else words["floor"].format(**row)
            for row in rows
        ]
        shares = ", ".join(str(row["percent"]) for row in rows)
        if rows:
            yield words[allow].format(job=job, shares=shares), "; ".join(found)
    random = [row["random"] for row in record["rows"] if row.get("random", {}).get("behind_percent")]
    worst = [max(each["behind_percent"], key=lambda behind: behind["estimate"]) for each in random]
    if worst:
        asked = words["random"].format(job=job, count=", ".join(str(each["feasible"]) for each in random))
        yield asked, "; ".join(map(_percent, worst))


def verdicts(record: dict, file: str) -> Iterator[Row]:
    """How often the planted cause comes first, healthy scripts have none, and gains are held."""
    words, cores = WORDS[file], record["machine"]["cores"]
    for folder, scores in record["scores"].items():
        for name, found in scores.items():
            told = words["verdicts_words"][name].format(spread=record["spread"])
            asked = words["verdicts"].format(cores=cores, words=told)
            rate = found["count"] / found["of"]
            yield asked + words["folders"][folder], words["of"].format(**found, rate=rate)


def profile_cost(record: dict, file: str) -> Iterator[Row]:
    """What the recorder costs an unmodified script, and what the whole command does."""
    words = WORDS[file]
    seconds = statistics.median(each["alone"][0] for each in record["rounds"])
    for way, clock in (("recorded", "wall"), ("recorded", "processor"), ("whole", "wall")):
        found = record[way][clock]
        shares = {"middle": found["estimate"] - 1, "low": found["low"] - 1, "high": found["high"] - 1}
        shown = words["added" if way == "recorded" else "whole"]
        asked = words["profile_cost"][way].format(seconds=seconds, clock=words[clock])
        yield asked, shown.format(**shares, extra=found["extra_seconds"])


def real_loops(record: dict, file: str) -> Iterator[Row]:
    """What is said of loops that people use."""
    words = WORDS[file]
    for row in record["rows"]:
        share = row["share_of_limit"]
        limit = words["at_limit"].format(share=share) if share else ""
        mark = words["marks"][row["right"]]
        said = words["said"].format(mark=mark, said=row["said"][0], limit=limit)
        yield words["loop"].format(**row), said


def advise(record: dict, file: str) -> Iterator[Row]:
    """How far predicted throughput is from published figures that the fit has not seen."""
    for name in sorted(record["splits"], key=list(TITLES[file]).index):
        split = record["splits"][name]
        card, error = split["worst_card"]
        told = {"median": split["median_card"], "card": card, "worst": error}
        told |= {"inside": split["coverage_on_the_other_half"]}  # whose errors did not make the interval
        told |= {"tflops": split["simple_median_card"]["TFLOPS only"]}
        asked = WORDS[file]["advise"].format(n=split["n"], split=TITLES[file][name])
        yield asked, WORDS[file]["errs"].format(**told)


def cnn_models(record: dict, file: str) -> Iterator[Row]:
    """How many networks are matched and keep their promise, and which are refused."""
    words, found = WORDS[file], record["models"]
    judged = {name: one for name, one in found.items() if one["status"] != "refused"}
    kept = [name for name, one in judged.items() if one["status"] == "kept"]
    refused = ", ".join(f"`{name}`" for name in found if name not in judged)
    counts = {"count": len(kept), "of": len(judged), "rate": len(kept) / len(judged)}
    asked = words["cnn_models"].format(steps=min(one["steps"] for one in judged.values()))
    yield asked, words["of"].format(**counts) + words["without"].format(names=refused)
    if followed := [one["float64"] for one in judged.values() if "float64" in one]:
        worst = (max(one[key] for one in followed) for key in ("loss", "displacement"))
        yield words["float64"], ", ".join(f"{value:.0e}" for value in worst)


def fold_eval(record: dict, file: str) -> Iterator[Row]:
    """How much faster networks are evaluated."""
    for name, found in record["models"].items():
        yield WORDS[file]["fold_eval"].format(name=name), _interval(found["ratio"])


def conv_gemm(record: dict, file: str) -> Iterator[Row]:
    """How much faster a step is with convolutions as products."""
    for name, ratio in record["steps"].items():
        yield WORDS[file]["conv_gemm"].format(name=name, **record["conditions"]), _interval(ratio)


def nhwc_norm(record: dict, file: str) -> Iterator[Row]:
    """How exactly BatchNorm sums, and how fast."""
    words, maps = WORDS[file], record["maps"]
    for name in ("variance", "gradient_of_weights"):
        found = ", ".join(f"{errors[name]:.0e}" for errors in maps[0]["errors"].values())
        yield words[f"norm_{name}"].format(**maps[0]), found
    for name, errors in record["networks"].items():
        yield words["norm_network"].format(name=name), ", ".join(f"{one:.0e}" for one in errors.values())
    told = [
        f"{m['images']}x{m['channels']}x{m['pixels']}x{m['pixels']} {_interval(m['ratio'])}" for m in maps
    ]
    yield words["norm_speed"], ", ".join(told)


def own_kernels(record: dict, file: str) -> Iterator[Row]:
    """How much faster a step is with C code of our own, network by network."""
    words = WORDS[file]
    for technique in (
        "depthwise_gradients",
        "winograd",
        "vectorized_dropout",
        "vectorized_operators",
        "fused_recurrent",
        "batched_attention",
    ):
        if found := record.get(technique):
            told = ", ".join(f"`{name}` {_interval(one['ratio'])}" for name, one in found.items())
            if unsteady := record.get("unsteady", {}).get(technique):
                told += words["unsteady"].format(names=", ".join(f"`{name}`" for name in unsteady))
            yield words[technique].format(device=record["machine"]["device"]), told


def compress(record: dict, file: str) -> Iterator[Row]:
    """How far the chosen form is ahead of what one writes by hand, and behind the fastest of all."""
    words, name = WORDS[file], record["job"].removeprefix("compress_")
    by_hand = ", ".join(f"`{baseline}`" for baseline in record["baselines"])
    asked = {"name": name, "form": record["every"]["chosen"], "by_hand": by_hand}
    ahead = ", ".join(map(_ratio_or_reason, record["baselines"].values()))
    yield words["compress_by_hand"].format(**asked), ahead
    asked = {"name": name, "form": record["ordered"]["chosen"], "share": record["share_of_time"]}
    yield words["compress"].format(**asked), _ratio_or_reason(record["ordered_beside_every"])


def kernels(record: dict, file: str) -> Iterator[Row]:
    """What the kernels take of each kind of chip, without one."""
    for target, found in record["kernels"].items():
        built = [one for one in found.values() if not one.get("error")]
        registers = max((one["registers"] for one in built), default=0)
        spilled = sum(one["spilled_bytes"] for one in built)
        yield WORDS[file]["kernels"].format(target=target), f"{registers}, {spilled}"


def gpu(record: dict, file: str) -> Iterator[Row]:
    """How much faster ResNet-50 trains on a GPU, which plans keep their promise, and each kernel's speed."""
    words, device = WORDS[file], record["machine"]["device"]
    for plan, case in _gpus.steps(record):
        found = words["images"].format(rate=case["samples_per_second"])
        yield words["gpu"].format(device=device, plan=plan), f"{_interval(case['ratio'])}, {found}"
    cases = record["parts"].get("correctness", {})
    for kind in ("ruler", "scene"):
        statuses = [case["status"] for name, case in cases.items() if name.startswith(kind)]
        counts = {"of": len(statuses), **{one: statuses.count(one) for one in ("ok", "refused")}}
        yield words["gpu_kinds"][kind].format(device=device), words["gpu_counts"].format(**counts)
    for kind, ratios in _gpus.kernels(record):
        shown = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
        yield words["gpu_kernels"][kind].format(device=device), shown


def foretold(record: dict, file: str) -> Iterator[Row]:
    """How far what was predicted without a GPU lies from what one measured."""
    words, rows, device = WORDS[file], record["rows"], record["machine"]["device"]
    memory = [100 * (row["foretold_peak_bytes"] / row["peak_bytes"] - 1) for row in rows]
    for row in rows:
        speed = row["foretold_samples_per_second"]
        plan = " + ".join(row["plan"]) or words["strict"]
        found = words["foretold_found"].format(measured=row["samples_per_second"], **speed)
        yield words["foretold"].format(device=device, plan=plan), found
    yield words["foretold_memory"].format(device=device), f"{min(memory):+.1f} % – {max(memory):+.1f} %"


def feed(record: dict, file: str) -> Iterator[Row]:
    """How much faster a folder of pictures is read and trained on, in the first epoch and later."""
    words = WORDS[file]
    for part, title in words["feed_parts"].items():
        rows = (record[part]["rows"][name] for name in ("tuned", "tuned, data alone"))
        found = [", ".join(_interval(row[key]) for key in ("over_naive", "over_by_hand")) for row in rows]
        yield words["feed"].format(images=record["images"], part=title), words["fed"].format(*found)


def totals(record: dict, file: str) -> Iterator[Row]:
    """Whether plans shorten whole trainings, and how well their length was predicted."""
    words = WORDS[file]
    planned = {name: job for name, job in record["jobs"].items() if "saved_seconds" in job}
    longer = [f"`{name}`" for name, job in planned.items() if job["saved_seconds"] < 0]
    told = ", ".join(longer) or words["none"]
    for kind, join in (("error", "; "), ("reference_error", ", ")):
        if errors := [abs(job[kind]) for job in planned.values() if kind in job]:
            told += f"{join}{max(errors):.1%}"
    yield words["totals"].format(count=len(record["jobs"])), told
    for name, job in planned.items():
        strict, plan = (statistics.median(job["totals"][way]) for way in ("strict", "plan"))
        yield words["total"].format(job=name), f"{strict:.1f} s, {plan:.1f} s"


def busy(record: dict, file: str) -> Iterator[Row]:
    """Plans that were found while others used the machine, held against those found alone."""
    words, count = WORDS[file], record["of"]
    names = ", ".join(f"`{name}`" for name, job in record["jobs"].items() if not job["right"])
    told = words["right"].format(right=record["right"], count=count)
    told += words["wrong"].format(names=names) if names else ""
    yield words["beside"].format(count=count, load=record["load"]), told


def accuracy(record: dict, file: str) -> Iterator[Row]:
    """Whole trainings under the plan against strict fp32 and PyTorch as it comes: time, and whether the
    metric is the same.
    """
    words = WORDS[file]
    done = {name: found for name, found in record["recipes"].items() if "speed" in found}
    if not done:
        return
    counts: dict[str, float] = {"count": len(done), "equal": sum(one["equal"] for one in done.values())}
    for way in ("strict", "defaults"):
        each = (found["speed"][way]["estimate"] for found in done.values())
        counts[f"over_{way}"] = statistics.geometric_mean(each)
    failed = ", ".join(f"`{name}`" for name, found in record["recipes"].items() if "failed" in found)
    told = words["equals"].format(**counts) + (words["failed"].format(names=failed) if failed else "")
    yield words["accuracy"].format(**counts), told
    for name, found in done.items():
        finals = {way: found["ways"][way]["metric"]["estimate"] for way in ("strict", "plan")}
        over = {f"over_{way}": _interval(speed) for way, speed in found["speed"].items()}
        over["mark"] = words["same"][found["equal"]]
        yield (
            words["trained"].format(name=name, metric=RECIPES[name].metric),
            words["finals"].format(**finals, **over),
        )


def faults(record: dict, file: str) -> Iterator[Row]:
    """What befalls a training, and what comes of it."""
    text = WORDS[file]["faults"].format(count=len(record["rows"]))
    yield text, f"{told_counts(record['rows'])}; {told_figures(record['total'])}"


def script(record: dict, file: str) -> Iterator[Row]:
    """One public script, alone and under `vivace run`."""
    words = WORDS[file]
    found = _interval(record["ratio"]) if record["ratio"] else words["broken_run"].format(**record)
    yield words["script"].format(name=record["job"].removeprefix("script_"), **record["script"]), found


def sweep(record: dict, file: str) -> Iterator[Row]:
    """How often stacking is faster, and what it brings, run by run; or trials an hour over other engines'."""
    words, cells = WORDS[file], record["cells"]
    if record["job"] == "sweep_stacks":
        faster = [sum(cell[part]["low"] > 1 for cell in cells.values()) for part in ("loaded", "steps")]
        told = ", ".join(words["right"].format(right=number, count=len(cells)) for number in faster)
        yield words["stacks"].format(count=len(cells)), told
        for name, cell in cells.items():
            steps, loaded, by_hand = (_interval(cell[part]) for part in ("steps", "loaded", "over_by_hand"))
            yield words["stack"].format(name=name), f"{steps}, {loaded}; {by_hand}"
        return
    jobs = dict.fromkeys(name.partition(",")[0] for name in cells)
    heats = sorted({name.rpartition(" ")[2] for name in cells})
    for engine, title in words["engine"].items():
        rows, done = [], set()
        for job in jobs:
            pairs = [
                [cells.get(f"{job}, {one}, heat {heat}") for one in ("vivace", engine)] for heat in heats
            ]
            pairs = [pair for pair in pairs if None not in pair]
            if pairs:
                rows.append(f"`{job}` {_trials(pairs)}")
                done.add(len(pairs))
        minutes = round(statistics.median(cell["seconds"] for cell in cells.values()) / 60)
        turns = "-".join(map(str, sorted({min(done, default=0), max(done, default=0)})))
        yield words["engines"].format(engine=title, heats=turns, minutes=minutes), "; ".join(rows)


def _trials(pairs: list[list[dict]]) -> str:
    """The ratio of trials an hour, with an interval where there are heats enough, and both best metrics."""
    rates = [(one["trials_an_hour"], other["trials_an_hour"]) for one, other in pairs]
    told = f"{statistics.geometric_mean(one / other for one, other in rates):.2f}x"
    if len(rates) >= 3:
        told = _interval(dataclasses.asdict(speed_ratio(rates)))
    best = [statistics.median(one["best"] for one in side) for side in zip(*pairs, strict=True)]
    return f"{told} ({best[0]:.4g}, {best[1]:.4g})"


def frameworks(record: dict, file: str) -> Iterator[Row]:
    """Whether another framework is faster than PyTorch at its fastest, network by network."""
    words, faster, each = WORDS[file], [], []
    for job in record["work"]:
        rows = [row for row in record["rows"] if row["job"] == job]
        answer, best, over, _ = chosen(options_of({**record, "rows": rows}))
        if over is not None:
            each.append((words["elsewhere"].format(job=job), _interval(dataclasses.asdict(over))))
        if answer == "move" and best is not None:
            faster.append(f"`{job}`: {best.name}")
    yield words["frameworks"].format(count=len(record["work"])), ", ".join(faster) or words["none"]
    yield from each


def apis(record: dict, file: str) -> Iterator[Row]:
    """What each compute API reaches."""
    for name, facts in record["apis"].items():
        rates = [ceiling_in_words(key, facts[key]["value"]) for key in API_KEYS[:2] if key in facts]
        yield WORDS[file]["apis"].format(name=name), ", ".join(rates)


KINDS: dict[str, Callable[[dict, str], Iterator[Row]]] = {
    "ruler": ruler,
    "silent_errors": silent_errors,
    "live_proof": live_proof,
    "peer": peer,
    "search": search,
    "memory": memory,
    "gpu_memory": gpu_memory,
    "memory_budgets": memory_budgets,
    "verdicts": verdicts,
    "profile_cost": profile_cost,
    "real_loops": real_loops,
    "advise": advise,
    "cnn_models": cnn_models,
    "kernels": kernels,
    "gpu": gpu,
    "foretold": foretold,
    "feed": feed,
    "fold_eval": fold_eval,
    "conv_gemm": conv_gemm,
    "nhwc_norm": nhwc_norm,
    "own_kernels": own_kernels,
    "compress": compress,
    "totals": totals,
    "busy": busy,
    "accuracy": accuracy,
    "faults": faults,
    "scripts": script,
    "sweep": sweep,
    "frameworks": frameworks,
    "apis": apis,
}

# Commands that records name without what they were given.
AS_TYPED = {
    "scripts/bench advise --fit": "scripts/bench advise --data FILE.csv --fit",
    "scripts/bench profile_cost": "scripts/bench profile_cost --record",
    "scripts/bench real_loops": "scripts/bench real_loops FOLDER --record",
    "scripts/bench real_loops FOLDER": "scripts/bench real_loops FOLDER --record",
    "scripts/bench sweep engines": "scripts/bench sweep engines --minutes 1 --heats 1",
    "scripts/bench totals": "scripts/bench totals --budget fast",
    "scripts/bench verdicts": "scripts/bench verdicts --record",
}

# In records/README.md only.
DETAILS = (
    "gpu_memory",
    "memory_budgets",
    "cnn_models",
    "kernels",
    "gpu",
    "foretold",
    "real_loops",
    "fold_eval",
    "conv_gemm",
    "nhwc_norm",
    "faults",
    "scripts",
    "apis",
)


def rows(records: list[dict], file: str, prefix: str, most: int | None) -> Iterator[tuple[str, ...]]:
    """Cells of the table in the words of a README, from the newest record of each benchmark and machine: its
    first `most` rows.
    """
    for record in records:
        place = f"{prefix}{record['job']}/{record['machine']['fingerprint']}/{record['date']}.json"
        for asked, found in itertools.islice(KINDS[record["benchmark"]](record, file), most):
            yield asked, found, f"[{record['date']}]({place})", f"`{as_typed(record['command'])}`"


def as_typed(command: str) -> str:
    """The command as a person types it today, from nothing."""
    from_nothing = re.sub(r"^python benchmarks/(\w+)\.py", r"scripts/bench \1", command)
    return AS_TYPED.get(from_nothing, from_nothing)


def _interval(ratio: dict) -> str:
    return f"{ratio['estimate']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})"


def _ratio_or_reason(found: dict) -> str:
    return _interval(found["ratio"]) if found.get("ratio") else str(found["reason"])


def _percent(change: dict) -> str:
    return f"{change['estimate']:+.1f} % ({change['low']:+.1f} to {change['high']:+.1f})"
