"""What less activation memory costs: the planner's choice at 75, 50 and 33 % of the reference's activations.

    scripts/bench memory_budgets JOB ...

The slowdowns asked for are 5, 15 and 30 %. Decisions for blocks alone come first, then whatever changes no
bit, then what may round. Beside them stand checkpointing of every block by this project and by
`torch.utils.checkpoint`, and the best of 200 random plans that fit: all of them by the planner's own costs of
the blocks, the best one on the clock. Everything is timed in turns, in one process; a job takes a few minutes
and writes its own record.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
from functools import partial
from typing import Any

import _record
import jobs
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vivace
from vivace.measuring.statistics import speed_ratio
from vivace.mechanisms.blocks import find_blocks
from vivace.memory.choosing import Chooser, Chosen, TooLittle, cheapest, choosers
from vivace.memory.planner import Decision
from vivace.memory.predict import predict
from vivace.observing.observe import observe
from vivace.session.opening import first_batches, start
from vivace.technique import Numerics
from vivace.tensors.trees import batch_size, split

COMPILED = ("gpt",)  # where torch.compile takes a minute and not ten; the model has no dropout
SAMPLES = {"gpt": 8, "bert": 8, "unet": 4, "resnet50_128": 4}
DEMANDED = {75: 5.0, 50: 15.0, 33: 30.0}  # per cent of the activations: per cent of slowdown
NUM_RANDOM, MOST_DRAWS, NUM_TIMED = 200, 20_000, 1
ROUNDS, WARM_UP = 16, 2
PUBLISHED = {  # what others report, on their own models and machines
    "DTR (Kirisame et al., 2021)": {
        "percent": 33,
        "slowdown_percent": 20.0,
        "source": "https://marisa.moe/dtr.html",
    }
}


def main() -> None:
    """Choose, time and record the named jobs, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(SAMPLES))
    chosen = parser.parse_args()
    for name in _record.named_jobs(parser, chosen.jobs, SAMPLES):
        found = measured(name, made(name))
        command = f"scripts/bench memory_budgets {name}"
        opened = _record.opened("memory_budgets", command, vivace.inspect(), f"memory_budgets_{name}")
        _record.write({**opened, "threads": torch.get_num_threads(), **found})


def made(name: str) -> vivace.Job:
    """The job on two batches of its size here."""
    job = bert() if name == "bert" else getattr(jobs, name)
    batches = [split(batch, SAMPLES[name])[0] for batch in first_batches(job.data(), 2)]
    return vivace.Job(**{**vars(job), "data": lambda: batches})


def bert() -> vivace.Job:
    """A BERT encoder of six layers with its dropout, predicting every character of the text it reads."""
    import transformers

    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
    config = transformers.BertConfig(vocab_size=jobs.NUM_CHARACTERS, max_position_embeddings=128, **sizes)
    return vivace.Job(
        model=lambda: transformers.BertForMaskedLM(config),
        data=lambda: jobs.loader(jobs.text(256, length=128), batch_size=SAMPLES["bert"]),
        loss=lambda model, batch: model(input_ids=batch[0], labels=batch[0]).loss,
        optimizer=jobs.adamw(1e-3),
    )


def measured(title: str, job: vivace.Job) -> dict[str, Any]:
    """Everything that a record says of a job."""
    machine, batches = vivace.inspect(), job.data()
    activations = predict(job, batch=batches[0]).parts["activations"]
    contestants: dict[str, tuple[vivace.Job, vivace.Plan]] = {
        "every block": (job, vivace.Plan.from_dict({"checkpoint": {}})),
        "by hand": (vivace.Job(**{**vars(job), "model": lambda: by_hand(job.model())}), vivace.Plan()),
    }
    if title in COMPILED:
        contestants["compile, budget 0.5"] = compiled(job, 0.5), vivace.Plan()
    peers, rows = list(contestants), list[dict[str, Any]]()
    exact = list(choosers(job, machine, batches, Numerics.EXACT, vivace.Plan()))
    kept = exact[0].kept_bytes
    rounding = list(choosers(job, machine, batches, Numerics.ROUNDING, vivace.Plan()))
    for allow, known in {"blocks": exact[:1], "exact": exact, "rounding": rounding}.items():
        for percent, demanded in DEMANDED.items():
            name, budget = f"{allow} {percent}", kept - activations * (100 - percent) // 100
            row: dict[str, Any] = {"allow": allow, "percent": percent, "budget_bytes": budget}
            try:
                found = cheapest(known, budget)
            except TooLittle as no:
                lowest = 100 * (1 - (kept - no.smallest_bytes) / activations)
                rows.append({**row, "reason": str(no), "smallest_percent": round(lowest, 1)})
                continue
            contestants[name] = job, found.plan
            row |= {"demanded_percent": demanded, "name": name, "plan": found.plan.to_dict()}
            if allow == "blocks":
                row["random"] = against_random(known[0], found, budget, name, contestants)
            rows.append(row)
            print(json.dumps(row), flush=True)
    peaks, times = timed(job, contestants)
    for name, peak in peaks.items():
        percent = 100 * (1 - (kept - peak) / activations)
        print(f"{name:24} {percent:6.1f} % {slowdown(times['reference'], times[name])}", flush=True)
    return {
        "samples": batch_size(batches[0]),
        "kept_bytes": kept,
        "activation_bytes": activations,
        "rounds": ROUNDS,
        "rows": [completed(row, kept, activations, peaks, times) for row in rows],
        "peers": {
            name: {
                "percent": round(100 * (1 - (kept - peaks[name]) / activations), 1),
                "slowdown_percent": slowdown(times["reference"], times[name]),
            }
            for name in peers
        },
        "published": PUBLISHED,
    }


def compiled(job: vivace.Job, share: float) -> vivace.Job:
    """The job under `torch.compile`, with torch's own budget for what is saved for the backward pass.

    One budget in a process: the compiler does not compile again because another one is asked for.
    """
    compiled_loss = torch.compile(job.loss)

    def loss(model: nn.Module, batch: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=share):
            return compiled_loss(model, batch)

    return vivace.Job(**{**vars(job), "loss": loss})


def by_hand(model: nn.Module) -> nn.Module:
    """The model with `torch.utils.checkpoint` around every block, as its documentation has it."""
    for block in find_blocks([model]):
        for module in block.modules:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def against_random(
    chooser: Chooser,
    found: Chosen,
    budget: int,
    name: str,
    contestants: dict[str, tuple[vivace.Job, vivace.Plan]],
) -> dict[str, Any]:
    """Random decisions that fit, priced by the planner's costs; the cheapest is to be timed as well."""
    generator, fitting = random.Random(0), dict[tuple[str, ...], Decision]()
    for _ in range(MOST_DRAWS):
        share = generator.random()  # of blocks that are kept
        picked = [
            options[0] if generator.random() < share else generator.choice(options)
            for options in chooser.options
        ]
        held = peak = 0
        for option in picked:
            peak = max(peak, held + option.working_bytes)
            held += option.held_bytes
        names = tuple(option.name for option in picked)
        if chooser.rest + peak <= budget and names != found.decision.names:
            fitting[names] = Decision(names, peak, sum(option.seconds for option in picked))
        if len(fitting) == NUM_RANDOM:
            break
    ordered = sorted(fitting.values(), key=lambda decision: decision.seconds)
    rivals = []
    for decision in ordered[: 5 * NUM_TIMED]:
        if len(rivals) < NUM_TIMED and chooser.peak_bytes(decision) <= budget:
            rivals.append(f"{name}, random {len(rivals) + 1}")
            contestants[rivals[-1]] = chooser.job, chooser.plan(decision)
    expected = ordered[0].seconds if ordered else None
    costs = {"chosen": found.decision.seconds, "best": expected, "step": chooser.step_seconds}
    return {"feasible": len(fitting), "seconds": costs, "rivals": rivals}


def timed(
    job: vivace.Job, contestants: dict[str, tuple[vivace.Job, vivace.Plan]]
) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Peaks in bytes, and the seconds of a step of everyone in turns; the reference's too."""
    machine, batches = vivace.inspect(), job.data()
    everyone = {"reference": (job, vivace.Plan()), **contestants}
    alike: dict[tuple[int, str], str] = {}  # one name for all contestants that do the same
    stands = {n: alike.setdefault((id(own), plan.id), n) for n, (own, plan) in everyone.items()}
    peaks: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in alike.values()}
    with contextlib.ExitStack() as stack:
        sessions = {}
        for name in times:
            own, plan = everyone[name]
            others = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
            sessions[name] = stack.enter_context(start(own, plan, machine))
            peaks[name] = observe(sessions[name], batches).peak_bytes - others
        for number in range(WARM_UP + ROUNDS):
            for name in list(sessions) if number % 2 else list(sessions)[::-1]:
                begin = time.perf_counter()
                sessions[name].step(batches[0])
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - begin)
    return {n: peaks[one] for n, one in stands.items()}, {
        n: times[one][WARM_UP:] for n, one in stands.items()
    }


def slowdown(reference: list[float], own: list[float]) -> dict[str, float]:
    """Per cent more time than the reference, with the 95 % interval of the paired rounds."""
    ratio = speed_ratio(list(zip(reference, own, strict=True)))
    named = {"estimate": ratio.estimate, "low": ratio.high, "high": ratio.low}
    return {key: round(100 * (1 / value - 1), 1) for key, value in named.items()}


def completed(
    row: dict[str, Any], kept: int, activations: int, peaks: dict[str, int], times: dict[str, list[float]]
) -> dict[str, Any]:
    """A row with its measured peak and slowdown, and how it stands against random plans."""
    if "name" not in row:
        return row
    name, random = row.pop("name"), row.get("random")
    row["percent_measured"] = round(100 * (1 - (kept - peaks[name]) / activations), 1)
    row["slowdown_percent"] = slowdown(times["reference"], times[name])
    if random:
        row["random"]["behind_percent"] = [slowdown(times[r], times[name]) for r in random.pop("rivals")]
    return row


if __name__ == "__main__":
    main()
