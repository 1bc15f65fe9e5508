"""An advice in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace import words
from vivace.advising.advice import Advice
from vivace.advising.choose import LIFTED, Hindrance, Offer, fastest_words, picks
from vivace.advising.predict import LIMITS
from vivace.advising.source import WEIGHT_BYTES
from vivace.advising.way import in_words
from vivace.pages.answer import capital

if TYPE_CHECKING:
    from rich.console import Console

    from vivace.advising.catalogue import Gpu
    from vivace.advising.reverse import Trainable
    from vivace.advising.software import SoftwareAdvice

AT_MIDDLE = "at the middle price"  # at which a budget's certainty is told: only the time is uncertain there
MOST_CHOICES = 8  # of a first screen
WIDE = 110  # columns


def choices(advice: Advice) -> list[tuple[Offer, str]]:
    """The rows of a first screen: what was picked and for what, this machine or the card that was profiled,
    and the cards that people ask about."""
    marks = marks_of(advice)
    offers = {offer.name: offer for offer in (*advice.picks.values(), *advice.asked)}
    found = [(offer, marks.get(name, "")) for name, offer in offers.items()]
    kept = advice.here or advice.profiled_on
    own = [(kept, "here" if advice.here else "profiled")] if kept else []
    return [*found[: len(marks)], *own, *found[len(marks) :]][:MOST_CHOICES]


def marks_of(advice: Advice) -> dict[str, str]:
    """For what offers were picked, by their names."""
    marks: dict[str, list[str]] = {}
    for pick, offer in advice.picks.items():
        called = fastest_words(offer, advice.allowed) if pick == "fastest" else pick
        marks.setdefault(offer.name, []).append(called)
    return {name: ", ".join(called) for name, called in marks.items()}


def marked(offer: Offer, marks: str) -> str:
    """An offer's name with what it was picked for."""
    return f"{offer.name} ({marks})" if marks else offer.name


def shown(advice: Advice) -> list[Offer]:
    """The rows of the whole table: picks, the cards that people ask about, the Pareto front, then every card
    alone."""
    first = [*advice.picks.values(), *advice.asked, *advice.pareto]
    rest = [offer for offer in advice.offers if offer.prediction.num_gpus == 1]
    return list({offer.name: offer for offer in (*first, *rest)}.values())


def surely(advice: Advice) -> str:
    """``with 80 % certainty``, with which budget and deadline are to be kept."""
    return f"with {words.percent(advice.probability)} certainty"


def none_is_good(advice: Advice) -> str:
    """Why no card is a choice, and what comes nearest to the limits that were asked for."""
    limits = {"deadline": advice.deadline_seconds, f"budget {AT_MIDDLE}": advice.budget_usd}
    asked = [f"the {name}" for name, value in limits.items() if value is not None]
    refusals = [(offer, advice.refusals[offer.name]) for offer in advice.offers]
    lifted = [offer for offer, against in refusals if against and against.hindrance in LIFTED]
    near = picks(lifted)
    if not any(offer.prediction.fits for offer in advice.offers):
        return "The job fits on none of these cards"
    if all(against and against.hindrance is Hindrance.PRECISION for _, against in refusals):
        asked_in = advice.offers[0].prediction.precision
        if asked_in == advice.subject.precision and asked_in in WEIGHT_BYTES:
            return (
                f"None of these cards computes in {asked_in}, in which the job's weights are; "
                "--precision amp predicts mixed precision"
            )
        return "None of these cards computes in the precision that was asked for"
    if not near:
        return "None of these cards is offered in such a number, or at a known price"
    told = []
    for name, limit in (("fastest", advice.deadline_seconds), ("best value", advice.budget_usd)):
        if limit is not None:
            offer = near[name]
            cost = "" if offer.usd is None else f" for {words.money(offer.usd)}"
            fed = f", limited by {LIMITS['host']}" if offer.prediction.limit == "host" else ""
            called = "cheapest" if name == "best value" else fastest_words(offer, lifted)
            told.append(f"the {called}, {offer.name}, takes {time_of(offer)}{cost}{fed}")
    return f"No card keeps {' and '.join(asked)} {surely(advice)}; {'; '.join(told)}"


def time_of(offer: Offer) -> str:
    """What the training takes, with its interval."""
    return words.durations(3600 * offer.hours, 3600 * offer.low_hours, 3600 * offer.high_hours)


def fit_of(offer: Offer) -> str:
    """What makes it fit, and what that costs."""
    p = offer.prediction
    if not p.fits:
        return f"does not fit: needs {words.size(p.needed_bytes)}"
    if p.how:
        return f"fits at {words.times(p.slowdown)} the time with {p.how}"
    return f"{words.size(p.headroom_bytes)} left"


def draw_software(advice: SoftwareAdvice, console: Console) -> None:
    """Every way to train that was measured, and every sentence that follows."""
    from rich.table import Table

    table = Table("way", "times PyTorch eager", "first step", "the accuracy", box=None)
    for option in advice.options:
        first, reached = option.seconds
        after = "not reached" if reached is None else words.duration(reached)
        table.add_row(option.name, words.ratio(option.ratio), words.duration(first), after)
    if advice.options:
        console.print(table)
    for line in (*advice.reasons, *advice.api_reasons):
        console.print(f"{capital(line)}.", markup=False)


def draw(advice: Advice, console: Console) -> None:
    """The ranked table, and the sentences that follow from it.

    A narrow terminal has no room for the intervals of the costs: they are those of the times.
    """
    from rich.table import Table

    rows = shown(advice)[:MOST_CHOICES]
    marks = marks_of(advice)
    wide = console.width >= WIDE
    cells = [
        (
            marked(offer, marks.get(offer.name, "")),
            time_of(offer),
            words.money(offer.usd, *((offer.low_usd, offer.high_usd) if wide else ())),
            advice.told_against(offer) or fit_of(offer),
            LIMITS[offer.prediction.limit],
            offer.risk,
        )
        for offer in rows
    ]
    table = Table(box=None, pad_edge=False)
    titles = ("card", "time, 80 % interval", "cost", "memory, or why not", "limited by", "risk")
    for title, *column in zip(titles, *cells, strict=True):
        longest_word = max(len(word) for text in (title, *column) for word in text.split())
        whole = title in ("time, 80 % interval", "cost")
        least = max(longest_word, len("22.8 GiB"))
        folded = not wide and title in ("memory, or why not", "limited by", "risk")
        table.add_column(title, no_wrap=whole, min_width=longest_word, max_width=least if folded else None)
    for row in cells:
        table.add_row(*row)
    console.print(table)
    for line in sentences(advice):
        console.print(line, markup=False)


def sentences(advice: Advice) -> list[str]:
    """The answer in words: picks, several GPUs, buying, errors, doubts."""
    lines = []
    if not advice.allowed:
        lines.append(f"{none_is_good(advice)}.")
    own = advice.here or advice.profiled_on
    if own is not None:
        where = f"Here ({own.name})" if advice.here else f"Profiled on {own.name}"
        lines.append(f"{where}: {time_of(own)}, limited by {LIMITS[own.prediction.limit]}; {fit_of(own)}.")
    lines += [worth_it(entry) for entry in advice.scaling]
    lines += [bought(entry) for entry in advice.buying[:MOST_CHOICES]]
    lines += error_words(advice)
    return [
        *lines,
        f"{advice.how[0].upper()}{advice.how[1:]}.",
        *(f"Note: {note}." for note in advice.notes),
        *(f"Warning: {text}." for text in advice.warnings),
    ]


def worth_it(entry: dict[str, object]) -> str:
    """Is more than one card worth it?"""
    points = entry["points"]
    assert isinstance(points, list)
    told = ", ".join(f"{p['num_gpus']}: {words.times(p['speedup'])}" for p in points[1:])
    pays = entry["pays_up_to"]
    if entry["launch_bound"]:
        return f"Several {entry['gpu']}: one is enough; a larger batch on it is as fast as more of them."
    verdict = "one is best value" if pays == 1 else f"doubling pays up to {pays}"
    return (
        f"Several {entry['gpu']}: {verdict} ({told or 'one only'}), each with the job's own batch; "
        "doubling the batch is not the same training."
    )


def bought(entry: dict[str, object]) -> str:
    """The row that compares buying a card with renting it."""
    hours, price, rent, used = (
        entry[k] for k in ("break_even_hours", "buy_usd", "rent_usd_per_hour", "used_usd")
    )
    of_used = "no source of used prices"
    if isinstance(used, float):
        after = entry["used_break_even_hours"]
        pays = f", pays after {words.number(after)} hours" if isinstance(after, float) else ""
        of_used = f"used {words.money(used)} ({entry['used_date']}{pays})"
    if not isinstance(price, float):
        return f"{entry['gpu']}: no price to buy it is known; {of_used}."
    told = f"{entry['gpu']}: {words.money(price)} new ({entry['buy_date']}), {of_used}"
    if not isinstance(rent, float):
        return f"{told}; nobody is known to rent it."
    if not isinstance(hours, float):
        return f"{told}; renting costs less than the electricity of an own one."
    trainings = words.number(entry["trainings"])
    return f"{told}; buying pays after {words.number(hours)} hours of use, {trainings} such trainings."


def error_words(advice: Advice) -> list[str]:
    """The predictor's measured errors in the cases that this advice is made of, with what simpler guesses
    err there."""
    cases = {offer.prediction.case for offer in (*advice.picks.values(), *advice.asked)}
    return [
        f"Measured error, {name}: {words.percent(entry['median_abs_error'])} median, "
        f"{words.percent(entry['median_card'])} of the median card, over {entry['n']:,} published figures; "
        f"{words.percent(entry['interval_coverage'])} inside their interval "
        f"(over all of them, by TFLOPS alone: {words.percent(entry['tflops_only'])} off)."
        for name, entry in advice.errors.items()
        if name in cases
    ]


def draw_card(
    gpu: Gpu, found: list[Trainable], largest: float, console: Console, precision: str = "amp"
) -> None:
    """What could be trained on a card, in a precision of `advise`."""
    from rich.table import Table

    table = Table(
        box=None,
        pad_edge=False,
        title=f"{gpu.name}, {words.size(gpu.memory_bytes)}: {in_words(precision)}, largest batch that fits",
        title_justify="left",
    )
    wide = console.width >= WIDE
    for column in ("model", "batch", "samples/s, 80 % interval", "one pass over", "takes"):
        if wide or column != "one pass over":
            least = len("10,317") if column != "samples/s, 80 % interval" else len("(10,177-13,018)")
            table.add_column(column, no_wrap=column in ("model", "takes"), min_width=least)
    table.add_column("limited by", min_width=len("bandwidth"))
    for entry in found:
        p = entry.prediction
        data = (entry.data,) if wide else ()
        if p is None:
            table.add_row(entry.model, "none", "does not fit as it is", *data, words.UNKNOWN, "memory size")
            continue
        low, high = (words.number(p.batch_size / seconds) for seconds in (p.high, p.low))
        speed = f"{words.number(p.samples_per_second)} ({low}{words.UNKNOWN}{high})"
        takes = words.duration(None if entry.epoch_hours is None else 3600 * entry.epoch_hours)
        table.add_row(entry.model, str(entry.batch_size), speed, *data, takes, LIMITS[p.limit])
    console.print(table)
    console.print(f"Weights, gradients and AdamW alone fill it at {largest / 1e9:.1f} billion parameters.")
