"""Which plans are fast on copies of a script's step, before any of them may act on the step itself."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from vivace.errors import Refused
from vivace.live.kept import CannotKeep, failed
from vivace.live.proof import Proof, under_it
from vivace.plan import Plan
from vivace.profiling.record.signals import raised_by_handler

UNDISTURBED = 0.9  # of the processor's largest share: steps with less are taken once more


def times_on_copies(
    proof: Proof, plans: Iterable[Plan], rounds: int
) -> Generator[None, None, tuple[dict[Plan, float], dict[Plan, str]]]:
    """How many times as fast copies of the step are under each plan that can act, and why others cannot.

    Before each plan it yields: then the script may go on for a while. The same copies make all of these
    steps, what they compute is not looked at. Each plan's are one after the other: oneDNN keeps 1,024
    kernels, and plans that take turns on a deep network would make theirs anew.
    """
    things = proof.kept.copies()
    times: dict[Plan, list[tuple[float, float]]] = {}
    refused: dict[Plan, str] = {}

    def timed(plan: Plan) -> tuple[float, float]:
        nonlocal things
        try:
            return proof.times(plan, things)
        except (Refused, CannotKeep):
            raise
        except Exception as error:  # some models make a second step only once the script has reset them
            if raised_by_handler(error):
                raise
            things = proof.kept.copies()
            return proof.times(plan, things)

    def take(plan: Plan) -> None:
        nonlocal things
        try:
            times[plan] = times.get(plan, []) + [timed(plan) for _ in range(rounds)]
        except Refused as error:
            refused[plan] = str(error)
        except CannotKeep:
            raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            if not plan.techniques:
                raise failed(f"a copy of its model fails: {type(error).__name__}", error) from None
            refused[plan] = under_it(error)
            times.pop(plan, None)
            things = proof.kept.copies()

    for plan in (*plans, Plan()):
        if not plan.techniques and not times:
            return {}, refused
        yield
        take(plan)
    for plan in _disturbed(times) if proof.kept.device.type == "cpu" else []:
        yield
        take(plan)
    wall = {plan: min(own[0] for own in each) for plan, each in times.items()}
    cpu = {plan: max(1e-9, min(own[1] for own in each)) for plan, each in times.items()}
    reference = wall.pop(Plan()), cpu.pop(Plan())
    found = {plan: reference[0] / seconds for plan, seconds in wall.items()}
    if proof.kept.device.type == "cpu":  # whom others disturb is not slow
        found = {plan: max(ratio, reference[1] / cpu[plan]) for plan, ratio in found.items()}
    return found, refused


def _disturbed(times: dict[Plan, list[tuple[float, float]]]) -> list[Plan]:
    """The plans of which each step, by wall's and processor's seconds, got less of the processor than others
    did: something else, as the script's loaders, was at work meanwhile.
    """
    shares = {plan: max(cpu / max(wall, 1e-9) for wall, cpu in each) for plan, each in times.items()}
    return [plan for plan, share in shares.items() if share < UNDISTURBED * max(shares.values())]
