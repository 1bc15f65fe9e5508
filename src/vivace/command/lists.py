"""Commands that list what there is: recipes and techniques."""

from __future__ import annotations

import dataclasses
import inspect as inspect_module
from typing import Annotated, Any

import typer

from vivace.command.options import AsJson, Debug, Quiet, app, cell, draw_rows
from vivace.command.screen import screen


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="one recipe, in full")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """List the built-in jobs, or show one.

    Each name stands wherever a JOB does.
    """
    with screen(as_json, quiet, debug) as out:
        from vivace.recipes import every, one

        if name is not None:
            found = one(name)
            out.document(found)
            out.show(lambda console: draw_rows((), [[key, cell(found[key])] for key in found], console))
            return
        listed = every()
        out.document({"recipes": listed})
        columns = ("recipe", "task", "metric", "minutes")
        rows = [[cell(row[column]) for column in columns] for row in listed]
        out.show(lambda console: draw_rows(columns, rows, console))


@app.command()
def techniques(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="one technique, in full")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """List the techniques that a plan can hold, or show one."""
    with screen(as_json, quiet, debug) as out:
        from vivace.technique import registry

        if name is not None:
            card = _card(registry.find(name), with_settings=True)
            out.document(card)
            out.show(lambda console: draw_rows((), [[key, cell(card[key])] for key in card], console))
            return
        cards = [_card(cls) for cls in registry.everything()]
        out.document({"techniques": cards})
        out.show(lambda console: _draw_cards(cards, console))


def _card(cls: Any, *, with_settings: bool = False) -> dict[str, Any]:
    card = {
        "name": cls.name,
        "stage": cls.card.stage.name,
        "promise": cls.card.numerics.name.lower(),
        "devices": list(cls.card.devices),
        "measured_on": list(cls.card.measured_on),
        "summary": cls.card.summary,
        "source": cls.card.source,
    }
    if not with_settings:
        return card
    settings = [f"{f.name} = {f.default}" for f in dataclasses.fields(cls)]
    return {**card, "what it does": inspect_module.getdoc(cls) or "", "settings": settings}


def _draw_cards(cards: list[dict[str, Any]], console: object) -> None:
    rows = [
        [
            card["name"],
            card["stage"],
            card["promise"],
            " ".join(d if d in card["measured_on"] else f"{d}?" for d in card["devices"]),
            card["summary"],
        ]
        for card in cards
    ]
    columns = ("technique", "stage", "promise", "devices", "summary")
    draw_rows(columns, rows, console, caption="? never measured there")
