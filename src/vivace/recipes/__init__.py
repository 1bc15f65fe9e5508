"""Ready-made Jobs on real data: each file holds one, under the name `job`. Listing them imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a recipe trains, on what, how it is judged, and the extra of `vivace` that brings its data."""

    task: str
    data: str
    metric: str
    validated: int  # held-out samples
    extra: str


RECIPES = {
    "photographs": Recipe(
        "image classification", "grey crops of 16 photographs (scikit-image)", "accuracy", 384, "demo"
    ),
    "digits": Recipe(
        "image classification",
        "1,797 handwritten digits of 8x8 pixels (scikit-learn)",
        "accuracy",
        360,
        "demo",
    ),
}


def every() -> list[dict[str, Any]]:
    """Each recipe's facts, as `vivace recipes --json` prints them."""
    return [
        {"recipe": name, **dataclasses.asdict(recipe), "needs": f"pip install 'vivace[{recipe.extra}]'"}
        for name, recipe in RECIPES.items()
    ]
