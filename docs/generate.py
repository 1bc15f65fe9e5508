"""Write docs/generated: techniques from their cards and the records, names from docstrings, GPUs from the
catalogue.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import frameworks_guide
import gpu_guide
import measured_gains

import vivace
from vivace.technique import Technique, registry

OUT = Path(__file__).resolve().parent / "generated"
PROMISES = {
    "exact": "exact (bit-identical)",
    "rounding": "rounding",
    "semantics": "semantics (opt-in)",
}

BOUNDS = {"ge": "at least", "le": "at most", "gt": "above", "lt": "below"}


def techniques_page() -> str:
    """One section a technique, in the order in which a plan applies them."""
    classes = [registry.find(name) for name in registry.own_names()]
    classes.sort(key=lambda cls: (cls.card.stage, cls.name))
    overview = [
        f"| [`{cls.name}`](#{anchor(cls.name)}) | {cls.card.stage.name.lower()} | "
        f"{cls.card.numerics.name.lower()} | {cls.card.summary} |"
        for cls in classes
    ]
    head = [
        "# Techniques\n",
        "In the order in which a plan applies them. Two techniques of one slot exclude each other.\n",
        "| name | stage | promise | what it does |",
        "|---|---|---|---|",
        *overview,
    ]
    return "\n".join(head) + "\n\n" + "\n".join(technique_section(cls) for cls in classes)


def technique_section(cls: type[Technique]) -> str:
    """The card and the settings of one technique."""
    card = cls.card
    rows = {
        "stage": card.stage.name.lower(),
        "promise": PROMISES[card.numerics.name.lower()],
        "slot": f"`{card.slot}`" if card.slot else "none",
        "devices": ", ".join(card.devices),
        "measured on": ", ".join(card.measured_on) or "nothing yet",
        "source": card.source,
    }
    lines = [f"## {cls.name}\n", f"{inspect.cleandoc(cls.__doc__ or card.summary)}\n", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in rows.items()]
    if "cuda" in card.devices and "cuda" not in card.measured_on:
        lines.append("\n**Not tested on a GPU yet**: written for one, tested on CPU only.")
    return "\n".join([*lines, "", settings_table(cls), measured_gains.table(cls.name)])


def settings_table(cls: type[Technique]) -> str:
    """The settings with their types and defaults, and the lines that a plan file needs."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    if not fields:
        return f"No settings. In a plan: `[techniques.{cls.name}]`\n"
    rows = [f"| `{f.name}` | {type_text(str(f.type))} | `{escaped(repr(f.default))}` |" for f in fields]
    intro = f"In a plan: `[techniques.{cls.name}]` with\n\n| setting | type | default |\n|---|---|---|\n"
    return intro + "\n".join(rows) + "\n"


def type_text(annotation: str) -> str:
    """A type as code, with the bounds of ``Annotated[int, Field(ge=1)]`` in words."""
    found = re.fullmatch(r"Annotated\[(\w+), Field\((.*)\)\]", annotation)
    if not found:
        return f"`{escaped(annotation)}`"
    bounds = re.findall(r"\b(ge|le|gt|lt)=([\w.]+)", found[2])
    return ", ".join([f"`{found[1]}`", *(f"{BOUNDS[key]} {value}" for key, value in bounds)])


def escaped(text: str) -> str:
    """Text that may stand in a cell of a table."""
    return text.replace("|", "\\|")


def anchor(name: str) -> str:
    """The anchor that MyST gives to a heading."""
    return name.lower()


def api_page() -> str:
    """Signature and docstring of every public name, verbs first."""
    objects = {name: unwrapped(getattr(vivace, name)) for name in vivace.__all__ if name != "__version__"}
    functions = {name: value for name, value in objects.items() if not isinstance(value, type)}
    classes = {name: value for name, value in objects.items() if isinstance(value, type)}
    parts = [
        "# Python\n",
        "Every name below is `vivace.NAME`; importing `vivace` imports no torch.\n",
        "## Functions\n",
    ]
    parts += [entry(name, value, "###") for name, value in sorted(functions.items())]
    parts.append("## Classes\n")
    parts += [class_entry(name, value) for name, value in sorted(classes.items())]
    return "\n".join(parts)


def unwrapped(value: Any) -> Any:
    """The function behind a verb, which is a callable package."""
    return value.__dict__["__wrapped__"] if inspect.ismodule(value) else value


def class_entry(name: str, cls: type) -> str:
    """A class with its public methods and properties, or an enumeration with its members."""
    if issubclass(cls, enum.Enum):
        members = ", ".join(f"`{member.name}`" for member in cls)
        return f"### {name}\n\n{docstring(cls)}\n\nMembers: {members}\n"
    parts = [entry(name, cls, "###")]
    for member, value in vars(cls).items():
        plain = getattr(value, "__func__", value)
        if member.startswith("_") or not getattr(plain, "__doc__", None):
            continue
        if isinstance(value, property):
            parts.append(f"#### {name}.{member}\n\n*property* - {docstring(value)}\n")
        elif inspect.isfunction(plain):
            parts.append(entry(f"{name}.{member}", plain, "####"))
    return "\n".join(parts)


def entry(name: str, value: Any, heading: str) -> str:
    """Heading, signature and docstring of something that can be called."""
    label = name if isinstance(value, type) or "." in name else f"vivace.{name}"
    return f"{heading} {name}\n\n```python\n{label}{signature(value)}\n```\n\n{docstring(value)}\n"


def signature(value: Any) -> str:
    """The signature without the receiver; one parameter a line where it is long."""
    if isinstance(value, type) and issubclass(value, Exception):
        return "(message)"
    found = inspect.signature(value)
    receiver = {"self", "cls"} if "." in value.__qualname__ else set()
    found = found.replace(parameters=[p for name, p in found.parameters.items() if name not in receiver])
    if isinstance(value, type):
        found = found.replace(return_annotation=inspect.Signature.empty)
    text = re.sub(r"""(: |-> )(['"])(.*?)\2""", r"\1\3", str(found))
    if len(text) <= 80:
        return text
    inside, closing, returns = text.partition(") -> ") if ") -> " in text else (text[:-1], ")", "")
    parameters = re.split(r", (?=\*|\w+: )", inside[1:])
    return "(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + closing + returns


def docstring(value: Any) -> str:
    """The docstring as Markdown: the arguments become a list, indented examples stay code."""
    text = inspect.getdoc(value) or ""
    head, found, arguments = text.partition("Args:\n")
    if not found:
        return text
    block, _, rest = textwrap.dedent(arguments).partition("\n\n")
    items = re.sub(r"^(\w+): ", r"- `\1`: ", block, flags=re.MULTILINE)
    return f"{head}{items}\n\n{textwrap.dedent(rest)}".strip()


def main() -> None:
    """Write all pages and tables."""
    OUT.mkdir(exist_ok=True)
    (OUT / "techniques.md").write_text(techniques_page(), encoding="utf-8")
    (OUT / "api.md").write_text(api_page(), encoding="utf-8")
    gpu_guide.main()
    frameworks_guide.main()


if __name__ == "__main__":
    main()
