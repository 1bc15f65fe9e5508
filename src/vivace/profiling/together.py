"""What several ranks bring to a job: measured where they run, said by arithmetic for other numbers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace import words
from vivace.machine import Machine
from vivace.pages.answer import Answer
from vivace.plan import Plan
from vivace.profiling.seen import UNNAMED

if TYPE_CHECKING:
    from vivace.training.crew import Company

ENTRY = "vivace.profiling.ranks_drive:Together"
TIMEOUT_SECONDS = 900.0
SLIGHT = 1.05  # times; a smaller speed-up counts as none
SURPRISE = 0.15  # of the loop's time: where the law is further off, that is told


def measured(
    company: Company,
    plan: Plan,
    machine: Machine,
    *,
    name: str,
    folder: Path,
    strict: bool,
    seconds: float,
    replaced: str | None,
) -> dict[str, Any]:
    """The document of `vivace profile` on several ranks.

    Raises Refused where the plan cannot act, JobError where a batch cannot be shared, ChildFailed.
    """
    arguments, log = {"machine": machine.to_dict()}, folder / "job.log"
    with company.child(ENTRY, arguments, log=log, meeting=True) as crew:
        found = crew.ask("measure", TIMEOUT_SECONDS, plan=plan.to_dict(), strict=strict, seconds=4 * seconds)
    here = next(row for row in found["expected"] if row["measured"])
    total = here["step_seconds"]
    device = machine.device
    return {
        "format": 1,
        "target": name,
        "ranks": company.world_size,
        "shares": {phase: spent / total for phase, spent in here["seconds"].items()},
        "step_seconds": total,
        "samples_per_second": here["samples_per_second"],
        "bound_seconds": None,
        "share_of_limit": None,
        "verdicts": [],
        "memory": {},
        "replaced": replaced,
        "plan": plan.to_dict(),
        "machine": {"device": device.name, "cores": machine.num_cores, "versions": dict(machine.versions)},
        **found,
    }


def answer(document: dict[str, Any]) -> Answer:
    """How much faster so many ranks are, why not more, and what other numbers would bring."""
    law, rows = document["law"], document["expected"]
    here = next(row for row in rows if row["measured"])
    ratio, num = here["speedup"], here["ranks"]
    others = [row for row in rows if row["ranks"] not in (1, num)]
    best = max(rows, key=lambda row: row["speedup"])
    told = [
        (words.count(row["ranks"], "rank"), f"{words.times(row['speedup'])} as fast as one, by arithmetic")
        for row in others
    ]
    job, plan = document["target"], document.get("plan_path", "")  # which earlier profiles do not have
    words_of_it = [*f"torchrun --nproc-per-node {num} -m vivace verify".split(), job, "--plan", plan]
    launched = f"vivace.verify(job, {plan!r})" if job == UNNAMED else shlex.join(words_of_it)
    return Answer(
        command="profile",
        subject=document["target"],
        figure=words.times(ratio),
        sentence=f"as fast on {num} ranks as on one, with the same batch of {law['samples']}",
        tone="good" if ratio >= SLIGHT else "plain",
        title_of_parts="What other numbers of ranks would bring",
        parts=tuple(told),
        notes=tuple(_notes(document, best)),
        facts=(
            ("a step", words.duration(document["step_seconds"])),
            ("samples a second", words.number(document["samples_per_second"])),
            ("of the step: compute", words.percent(document["shares"]["compute"])),
            ("of the step: exchange", words.percent(document["shares"]["communication"])),
            ("of the step: waiting for data", words.percent(document["shares"]["data"])),
            ("the link", f"{words.size(law['rate'])}/s, {words.duration(law['latency'])} a hop"),
        ),
        next=(launched,) if plan and ratio >= SLIGHT else (),
        page=str(document.get("page_path") or ""),
    )


def known_from(row: dict[str, Any]) -> str:
    """Where the figures of a row come from."""
    if row["measured"]:
        return "measured whole"
    return "compute measured" + (", exchange by arithmetic" if row["ranks"] > 1 else "")


def _notes(document: dict[str, Any], best: dict[str, Any]) -> list[str]:
    law, shares = document["law"], document["shares"]
    shown = ", ".join(f"{name} {words.percent(share)}" for name, share in shares.items() if share >= 0.005)
    hidden = max(0.0, law["exchange"] - law["exposed"])
    notes = [
        f"A step takes {words.duration(document['step_seconds'])}: {shown}",
        f"{words.size(law['num_bytes'])} go round in {words.duration(law['exchange'])} at "
        f"{words.size(law['rate'])}/s, {words.duration(hidden)} of it while the step computes",
    ]
    if best["speedup"] < SLIGHT:
        notes.append("No number of ranks makes this batch faster; a larger one, or fewer bytes, might")
    off = law["predicted"] / law["looping"] - 1
    if abs(off) > SURPRISE:
        notes.append(
            f"The law says {words.percent(abs(off))} {'more' if off > 0 else 'less'} than the loop took"
        )
    if document.get("replaced"):
        notes.append(f"It took the place of an earlier profile, of {document['replaced']}")
    return notes
