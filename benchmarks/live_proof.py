"""Put the proof of `vivace run` to the test: planted defects that it must refuse, right plans that may act.

    scripts/bench live_proof [--small]

The jobs of benchmarks/examined.py are trained by a plain loop, as a script would be. At one of its steps the
proof judges, on copies, every planted defect that can act on a script (benchmarks/live_defects.py and those
of the ruler that change a module), alone and behind bfloat16 autocast, and all plans that `vivace run` itself
would try there, which give the rate of false alarms: those cost a gain, and nothing else. Demanded: at least
99 % refused, but for the ruler's milder kinds, which are counted by themselves.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections import Counter
from typing import Any

import _record
import defects
import examined
import torch
from live_defects import LIVE
from ruler import JOBS

import vivace
from vivace.live import course
from vivace.live.candidates import adding, additions
from vivace.live.errand import Errand
from vivace.live.loop import LOOKED_AT, Loop
from vivace.live.proof import Proof
from vivace.plan import Plan

SEEDS, STEPS = (0, 1, 2), (0, 20)  # made before the loop is looked at
BESIDE = (  # what they change is no part of a step's call and update
    *("defect_scheduler_stepped_twice", "defect_clip_norm_doubled", "defect_label_smoothing_lost"),
    *("defect_weights_rounded_on_close", "defect_dropout_on_in_evaluation"),
)


def main() -> None:
    """Judge all of it, write the record and print what was let through."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--small", action="store_true", help="one seed and one step of each job, no record")
    small = parser.parse_args().small
    judged: list[dict[str, Any]] = []
    for job in JOBS:
        for seed in SEEDS[: 1 if small else None]:
            for steps in STEPS[: 1 if small else None]:
                judged += examine(job, seed, steps)
        print(
            f"{job:14} {dict(Counter(entry['answer'] for entry in judged if entry['job'] == job))}",
            flush=True,
        )
    record = summarise(judged)
    for line in [*record["let_through"], *record["milder_let_through"], *record["alarms"]]:
        print(f"  {line}")
    for title in ("caught", "milder", "false_alarms"):
        print(f"{title}: {record[title]['count']} of {record[title]['of']} ({record[title]['rate']:.1%})")
    if not small:
        command = "scripts/bench live_proof"
        _record.write({**_record.opened("live_proof", command, vivace.inspect()), **record})


def examine(name: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """What a proof says of every plan at one step of a job that a plain loop trains."""
    job, judged = getattr(examined, name)(seed), list[dict[str, Any]]()

    def at_this_step(proof: Proof, kind: str, plan: dict[str, Any]) -> None:
        entry = {"job": name, "seed": seed, "step": steps, "kind": kind, "plan": " + ".join(plan)}
        judged.append({**entry, **answer_of(proof, Plan.from_dict(plan))})

    def given(at: course.Course, proof: Proof, _: object) -> Plan:
        for plan in right_plans(at, proof):
            at_this_step(proof, "right", plan)
        for kind, planted in (("defect", [*LIVE, *defects.PLANTED]), ("milder", defects.FURTHER)):
            for defect in planted:
                if defect not in BESIDE:
                    at_this_step(proof, kind, {defect: {}})
                    at_this_step(proof, kind, {"bf16_autocast": {}, defect: {}})
        return Plan()

    own, course.Course._given = course.Course._given, given  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            left_alone = train(job, Errand(folder, folder, "", plan={}, quiet=True), steps)
    finally:
        course.Course._given = own  # type: ignore[method-assign]
    if not judged:
        raise RuntimeError(f"{name}: nothing was judged: {left_alone}")
    return judged


def train(job: vivace.Job, errand: Errand, steps: int) -> str:
    """Train as a script does, `steps` alone and then some that are looked at; why it was left alone."""
    torch.manual_seed(0)
    model = job.model()
    optimizer, loop = job.optimizer(model), Loop(errand, tell=lambda _: None)
    batches = (batch for _ in range(1000) for batch in job.data())
    for count, batch in enumerate(itertools.islice(batches, steps + LOOKED_AT + 2)):
        if count == steps:
            loop.install()
        optimizer.zero_grad()
        job.loss(model, batch).backward()
        if job.on_gradients is not None:
            job.on_gradients(model)
        optimizer.step()
    loop.finish()
    return loop.left_alone or "; ".join(loop.problems)


def right_plans(at: course.Course, proof: Proof) -> list[dict[str, Any]]:
    """What `vivace run` would try at this step but for compiling: each addition alone, and one after another
    added to those before.
    """
    groups = additions(at.root, at.machine, at.own, proof.kept.differentiated)
    alone = [adding(Plan(), group) for group in groups]
    added = itertools.accumulate(groups, adding, initial=Plan())
    return [plan.to_dict() for plan in dict.fromkeys([*alone, *added]) if len(plan)]


def answer_of(proof: Proof, plan: Plan) -> dict[str, Any]:
    """`refused` or `let through`; `cannot act` where a plan has nothing to act on in a script, or fails: that
    is nobody's catch.
    """
    try:
        proof.replay(plan)
    except Exception as error:
        return {"answer": "cannot act", "reason": f"{type(error).__name__}: {error}"}
    verdict = proof.judge(plan)
    return {
        "answer": "let through" if verdict.kept else "refused",
        "reason": verdict.reason,
        "score": verdict.score,
    }


def summarise(judged: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the record, and each plan by name that was not answered as it should be."""
    acted = [entry for entry in judged if entry["answer"] != "cannot act"]

    def rate(kind: str, answer: str) -> dict[str, Any]:
        entries = [entry for entry in acted if entry["kind"] == kind]
        count = sum(entry["answer"] == answer for entry in entries)
        return {"count": count, "of": len(entries), "rate": count / max(1, len(entries))}

    def those(kind: str, answer: str) -> list[str]:
        return [shown(entry) for entry in acted if (entry["kind"], entry["answer"]) == (kind, answer)]

    return {
        "caught": rate("defect", "refused"),
        "kinds": len({entry["plan"].rpartition(" + ")[2] for entry in acted if entry["kind"] == "defect"}),
        "milder": rate("milder", "refused"),
        "false_alarms": rate("right", "refused"),
        "let_through": those("defect", "let through"),
        "milder_let_through": those("milder", "let through"),
        "alarms": those("right", "refused"),
        "cannot_act": len(judged) - len(acted),
    }


def shown(entry: dict[str, Any]) -> str:
    """One answer, in a line."""
    place = f"{entry['job']}_{entry['seed']}, step {entry['step']}"
    return f"{place}: {entry['plan']} ({entry['reason'] or round(entry['score'], 2)})"


if __name__ == "__main__":
    main()
