"""Put the ruler to the test: planted defects that it must catch, correct plans that it must keep, its cost.

    scripts/bench ruler [--small] [--only TEXT] [--minutes N] [--fresh]
    scripts/bench ruler --folder FOLDER [--minutes N] [--fresh]

Every planted defect is judged on every job where it can act: alone, with the least effort that `tune` ever
spends, and the demanded ones together with bfloat16 autocast (real rounding to hide behind). Correct plans
give the rate of false alarms, short runs of `tune` the share of the search that verifying takes.

What is done is kept in runs/ruler, for each machine and its versions, and the same command goes on from
there; `--fresh` begins anew, as after a change of the ruler. It goes in five parts, each with a fifth of
every job's items. The record is records/ruler/<machine>/<date>.json, also of what is done so far: then it
says how many are left.
Demanded: at least 95 % caught, at most 2 % false alarms.

With `--folder` the ruler is examined by others: on the job files of any folder, which say what is right (the
format: docs/how-it-verifies.md). What is done is kept beside the other. benchmarks/silent_errors
holds faults that others met in their trainings; of these there is a record.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _folder
import _record
import defects
import further_defects  # noqa: F401 - registers the rest of them

import vivace
from vivace.errors import ChildFailed, InputError, Refused
from vivace.ledger import Ledger
from vivace.plan import Plan
from vivace.processes.launch import Source
from vivace.verifying.verifier import Verifier

HERE = Path(__file__).resolve().parent
KEPT = HERE.parent / "runs" / "ruler"
REAL_ERRORS = HERE / "silent_errors"
JOBS = (
    *("cnn", "transformer", "lstm", "mlp", "residual", "autoencoder"),
    *("digits", "vae", "bert", "recommender", "long"),
)
NUM_SEEDS = 3
NUM_PARTS = 5  # odd: a kind of defect comes alone and behind bfloat16 in turn
LEAST_SECONDS = 1e-3  # `tune`'s smallest effort
TUNED = {"cnn_0": 40}  # job: budget in seconds
DEMANDED_CAUGHT, DEMANDED_ALARMS = 0.95, 0.02

PRECISION: list[dict[str, Any]] = [{"bf16_autocast": {}}, {"bf16_weights": {}}, {"fp16_autocast": {}}]
OTHERS: list[dict[str, Any]] = [
    {"channels_last": {}},
    {"fused_optimizer": {}},
    {"fused_optimizer": {"kind": "foreach"}},
    {"micro_batches": {"num": 2}},
    {"micro_batches": {"num": 4}},
    {"host_allocator": {}},
    {"loader_workers": {"num_workers": 1}},
]
TOGETHER: list[dict[str, Any]] = [
    {"bf16_autocast": {}, "channels_last": {}, "fused_optimizer": {}, "host_allocator": {}},
    {"bf16_weights": {}, "channels_last": {}, "fused_optimizer": {}},
    {"bf16_autocast": {}, "fused_optimizer": {}, "micro_batches": {"num": 2}},
    {"bf16_weights": {}, "fused_optimizer": {"kind": "foreach"}, "host_allocator": {}},
    {"fp16_autocast": {}, "fused_optimizer": {}},
]
COMPILED: list[dict[str, Any]] = [
    {"compile": {}},
    {"bf16_autocast": {}, "compile": {}, "fused_optimizer": {}},
]

OUTSIDE = ("mobilenet", "convnext")  # whole architectures on which no limit was set
COMPILED_JOBS = ("cnn", "transformer", "mlp", "autoencoder")

Item = dict[str, Any]


def main() -> None:
    """Judge what is not judged yet; then write the record and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--small", action="store_true", help="four jobs, one seed, no compiling, no record")
    parser.add_argument("--only", default="", metavar="TEXT", help="only items with this in their name")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after about so many minutes")
    parser.add_argument("--fresh", action="store_true", help="forget what was judged before")
    parser.add_argument("--folder", type=Path, help="judge the cases of this folder instead")
    chosen = parser.parse_args()
    if chosen.folder is not None:
        examine_folder(chosen.folder, time.monotonic() + 60 * chosen.minutes, chosen.fresh)
        return
    if chosen.fresh:
        kept().path.unlink(missing_ok=True)
    wanted = [i for i in in_parts(items(small=chosen.small)) if chosen.only in name_of(i)]
    done = judge_all(wanted, deadline=time.monotonic() + 60 * chosen.minutes)
    record = {**summarise(done), "left": len(wanted) - len(done)}
    if record["left"]:
        print(f"{len(done)} of {len(wanted)} are done: the same command (without --fresh) goes on")
    show(record, done)
    if record["caught"] and not (chosen.small or chosen.only):
        write(record, done)


def kept(folder: str = "") -> Ledger:
    """Where the judgements of this machine are kept, of the planted defects or of a stranger's folder."""
    KEPT.mkdir(parents=True, exist_ok=True)
    return Ledger(KEPT / f"{'-'.join(filter(None, (vivace.inspect().fingerprint, folder)))}.jsonl")


def digest_of(folder: Path) -> str:
    """Of where a folder lies and of all its cases: what was judged holds for no other one."""
    digest = hashlib.sha256(str(folder.resolve()).encode())
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".toml")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def examine_folder(folder: Path, deadline: float, fresh: bool) -> None:
    """Judge a stranger's cases; ends the process with an error where one of them says nothing."""
    try:
        ledger = kept(f"{folder.resolve().name}-{digest_of(folder)}")
        record = _folder.examine(folder, ledger, deadline, fresh=fresh)
    except InputError as error:
        sys.exit(f"scripts/bench ruler: {error}")
    if record is None:
        print("not all are done: the same command (without --fresh) goes on")
        return
    _folder.show(record)
    if folder.resolve() == REAL_ERRORS:
        command = f"scripts/bench ruler --folder benchmarks/{REAL_ERRORS.name}"
        _record.write({**_record.opened(REAL_ERRORS.name, command, vivace.inspect()), **record})


def items(*, small: bool) -> Iterator[Item]:
    """Everything to be judged, job by job."""
    jobs, num_seeds = (JOBS[:4], 1) if small else (JOBS, NUM_SEEDS)
    for effort, job in itertools.product(("full", "least"), jobs):
        for plan in [*PRECISION, *OTHERS, *TOGETHER]:
            yield item("correct", f"{job}_0", effort, plan)
        for defect in [*defects.PLANTED, *defects.FURTHER]:
            yield item("defect", f"{job}_0", effort, {defect: {}})
            if effort == "full" and defect in defects.PLANTED:
                yield item("defect", f"{job}_0", effort, {"bf16_autocast": {}, defect: {}})
        for seed in range(1, num_seeds if effort == "full" else 1):
            for plan in [*PRECISION, *OTHERS, *TOGETHER]:
                yield item("correct", f"{job}_{seed}", effort, plan)
    for job, effort in [] if small else itertools.product(OUTSIDE, ("full", "least")):
        # ConvNeXt in full takes minutes a plan, and its random depth as many for micro-batches.
        others = OTHERS[:3] if (job, effort) == ("convnext", "full") else [*OTHERS[:4], *TOGETHER[:4]]
        for plan in [*PRECISION[:2], *others]:
            yield item("correct", f"{job}_0", effort, plan)
    for job, plan in [] if small else itertools.product(COMPILED_JOBS, COMPILED):
        yield item("correct", f"{job}_0", "full", plan)
    for job in [] if small else TUNED:
        yield item("tune", job, "", {})


def in_parts(found: Iterator[Item]) -> list[Item]:
    """The items in NUM_PARTS parts, of each job and effort as many in each, and of different jobs different
    ones: what is done after any part stands for all of it.
    """
    parts: list[list[Item]] = [[] for _ in range(NUM_PARTS)]
    for number, (_, group) in enumerate(itertools.groupby(found, key=lambda i: (i["job"], i["effort"]))):
        for place, entry in enumerate(group):
            parts[(place + number) % NUM_PARTS].append(entry)
    return [entry for part in parts for entry in part]


def item(kind: str, job: str, effort: str, plan: dict[str, Any]) -> Item:
    """One thing to be judged."""
    return {"kind": kind, "job": job, "effort": effort, "plan": plan}


def name_of(item: Item) -> str:
    """A name that is the item's alone."""
    plan = " + ".join(n + "".join(f"({k}={v})" for k, v in s.items()) for n, s in item["plan"].items())
    return f"{item['kind']} {item['job']} {item['effort']} {plan}"


def judge_all(wanted: list[Item], deadline: float) -> list[Item]:
    """The items with their outcomes, as far as time allows."""
    ledger = kept()
    known = {entry["name"]: entry for entry in ledger.read("judgement")}
    left = [i for i in wanted if name_of(i) not in known]
    done = len(wanted) - len(left)
    for (job, effort), group in itertools.groupby(left, key=lambda i: (i["job"], i["effort"])):
        if time.monotonic() > deadline:
            break
        for outcome in judge_group(job, effort, list(group), deadline):
            known[outcome["name"]] = outcome
            ledger.append("judgement", outcome)
            done += 1
            print(f"{done:5}/{len(wanted)} {outcome['answer']:8} {outcome['name']}", flush=True)
    return [known[name_of(i)] for i in wanted if name_of(i) in known]


def judge_group(job: str, effort: str, group: list[Item], deadline: float) -> Iterator[Item]:
    """Outcomes of one job under one effort, by one verifier; a new one where its process has died."""
    source, machine = Source(f"{HERE / 'examined.py'}:{job}"), vivace.inspect()
    if group[0]["kind"] == "tune":
        yield {**group[0], "name": name_of(group[0]), "answer": "measured", **cost(job, TUNED[job])}
        return
    verifier = None
    try:
        for entry in group:
            if time.monotonic() > deadline:
                return
            verifier = verifier or Verifier(source, machine, timeout=900)
            outcome = judge(verifier, entry["plan"], LEAST_SECONDS if effort == "least" else None)
            if outcome["answer"] == "failed":
                verifier.close()
                verifier = None
            yield {**entry, "name": name_of(entry), **outcome}
    finally:
        if verifier is not None:
            verifier.close()


def judge(verifier: Verifier, plan: dict[str, Any], seconds: float | None) -> Item:
    """The ruler's answer to one plan: kept, broken, unjudged, refused, or failed with the reason."""
    begin = time.monotonic()
    try:
        verdict = verifier.judge(Plan.from_dict(plan), seconds=seconds)
    except Refused as refused:
        return {"answer": "refused", "reason": str(refused)}
    except ChildFailed as failed:
        return {"answer": "failed", "reason": str(failed)[:200]}
    shares: dict[str, float] = {}
    for check in (c for c in verdict.checks if c["score"] is not None):
        of = f"{check['quantity']} of a layer" if check["layer"] else check["quantity"]
        share = check["score"] / check["limit"] if check["limit"] else check["score"]
        shares[of] = max(shares.get(of, 0.0), share)
    worst = max(shares.values(), default=0.0)
    return {
        "answer": {True: "kept", False: "broken", None: "unjudged"}[verdict.kept],
        "promise": verdict.promise,
        "reason": verdict.reason,
        "score": worst if math.isfinite(worst) else None,  # of the limit; None: no figure, or not finite
        "shares": {of: round(share, 4) for of, share in shares.items() if verdict.kept},
        "seconds": round(time.monotonic() - begin, 3),
    }


def cost(job: str, budget: float) -> Item:
    """The seconds of a short search, and how many of them its verdicts took."""
    with tempfile.TemporaryDirectory() as folder:
        result = _record.tuned(f"{HERE / 'examined.py'}:{job}", budget, Path(folder) / "tune")
        verdicts = Ledger(Path(folder) / "tune" / "ledger.jsonl").read("verdict")
    seconds = sum(verdict["seconds"] for verdict in verdicts)
    return {"verify_seconds": seconds, "tune_seconds": result.seconds, "num_verdicts": len(verdicts)}


def rate(entries: list[Item], answer: str) -> dict[str, Any]:
    """How many of the judged entries got this answer."""
    hits = sum(entry["answer"] == answer for entry in entries)
    return {"count": hits, "of": len(entries), "rate": hits / len(entries) if entries else None}


def summarise(done: list[Item]) -> dict[str, Any]:
    """The figures of the record. A crash is nobody's catch and counts as a miss or as a false alarm.

    What a short judgement leaves open is neither: `tune` takes no such plan, and names it as what it is.
    """
    acted = [d for d in done if d["answer"] not in ("refused", "unjudged")]
    planted = [d for d in acted if d["kind"] == "defect"]
    correct = [d for d in acted if d["kind"] == "correct" and d.get("promise") != "semantics"]
    groups = {}
    for title, names in (("planted", defects.PLANTED), ("further", defects.FURTHER)):
        for variant in ("alone", "with bf16_autocast", "least effort"):
            chosen = [d for d in planted if variant_of(d) == variant and list(d["plan"])[-1] in names]
            if chosen:
                groups[f"{title}, {variant}"] = rate(chosen, "broken")
    tuned = [d for d in done if d["kind"] == "tune" and d["num_verdicts"]]
    share = sum(t["verify_seconds"] for t in tuned) / sum(t["tune_seconds"] for t in tuned) if tuned else None
    alarms = [d for d in correct if d["answer"] != "kept"]
    return {
        "caught": groups,
        "false_alarms": {
            "count": len(alarms),
            "of": len(correct),
            "rate": len(alarms) / max(1, len(correct)),
        },
        "healthy": farthest(correct),
        "unjudged": [d["name"] for d in done if d["answer"] == "unjudged"],
        "verify_share_of_search": share,
        "missed": [d["name"].removeprefix("defect ") for d in planted if d["answer"] != "broken"],
        "alarms": [f"{d['name']}: {d['reason']}" for d in alarms],
    }


def farthest(correct: list[Item]) -> dict[str, dict[str, float]]:
    """How far correct plans that round get, of each quantity's limit: the largest share, and that which 95 of
    100 do not reach; of a layer only where it is among a plan's five worst."""
    found: dict[str, list[float]] = {}
    for entry in correct:
        if entry.get("promise") == "rounding":
            for of, share in entry.get("shares", {}).items():
                found.setdefault(of, []).append(share)
    return {
        of: {"largest": max(shares), "of 95 %": sorted(shares)[int(0.95 * len(shares))], "plans": len(shares)}
        for of, shares in sorted(found.items())
    }


def variant_of(entry: Item) -> str:
    """How a defect was planted."""
    if entry["effort"] == "least":
        return "least effort"
    return "with bf16_autocast" if len(entry["plan"]) > 1 else "alone"


def show(record: dict[str, Any], done: list[Item]) -> None:
    """Print the table: defects by jobs, then the rates."""
    jobs = list(dict.fromkeys(d["job"] for d in done if d["kind"] == "defect"))
    print(f"\n{'defect':44}" + "".join(f"{job.removesuffix('_0'):>13}" for job in jobs))
    marks = {"broken": "caught", "kept": "MISSED", "failed": "FAILED", "unjudged": "OPEN", "refused": "-"}
    for defect in [*defects.PLANTED, *defects.FURTHER]:
        cells = []
        for job in jobs:
            found = [d for d in done if d["kind"] == "defect" and d["job"] == job and defect in d["plan"]]
            cells.append("/".join(marks[d["answer"]][0] for d in found))
        print(f"{defect.removeprefix('defect_'):44}" + "".join(f"{cell:>13}" for cell in cells))
    print(
        "\nC caught, M missed, F failed, O not judged yet, - cannot act; "
        "alone, with bf16 autocast, with least effort\n"
    )
    for title, found in record["caught"].items():
        print(f"caught, {title:28} {found['count']:4} of {found['of']:4}")
    alarms = record["false_alarms"]
    print(f"false alarms {alarms['count']:28} of {alarms['of']:4}")
    if record["verify_share_of_search"] is not None:
        print(f"share of a search that verifying takes: {record['verify_share_of_search']:.1%}")
    print(f"not judged yet {len(record['unjudged']):26}")
    for line in [*record["missed"], *record["alarms"]]:
        print("  " + line)
    planted = [found for title, found in record["caught"].items() if title.startswith("planted")]
    caught = sum(f["count"] for f in planted) / max(1, sum(f["of"] for f in planted))
    enough = caught >= DEMANDED_CAUGHT and alarms["rate"] <= DEMANDED_ALARMS
    print(f"demanded: {DEMANDED_CAUGHT:.0%} caught, at most {DEMANDED_ALARMS:.0%} false alarms: {enough}")


def write(record: dict[str, Any], done: list[Item]) -> None:
    """Write the record, with every item's answer and score."""
    kept = ("name", "answer", "score", "reason", "seconds", "verify_seconds", "tune_seconds", "num_verdicts")
    judged = [{key: entry[key] for key in kept if key in entry} for entry in done]
    opened = _record.opened("ruler", "scripts/bench ruler", vivace.inspect())
    _record.write({**opened, **record, "judged": judged})


if __name__ == "__main__":
    main()
