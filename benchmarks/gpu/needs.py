"""Is everything installed that Vivace and these benchmarks need? Asked before a GPU's minutes are spent.

python benchmarks/gpu/needs.py      # exit code 2, and what to bring, where something is missing
"""

from __future__ import annotations

import importlib
import platform
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
MACHINES = ("torch", "torchvision", "scikit-learn")  # too large to bring, or tied to the driver
OPTIONAL = {"torchao": "fp8_linear is refused"}  # and what is lost without it
NEEDED_BY = {"pydantic": ("annotated-types", "pydantic-core", "typing-inspection")}
MODULES = {"nvidia-ml-py": "pynvml"}  # of packages that are imported by another name
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
LOWEST, BEYOND = re.compile(r">=([\d.]+)"), re.compile(r"<([\d.]+)")


def missing(names: list[str]) -> list[str]:
    """Of these packages and all that they need, what is not installed; in the order of asking."""
    asked: set[str] = set()
    absent: list[str] = []
    while names:
        name = names.pop(0)
        if name in asked:
            continue
        asked.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            absent.append(name)
            names += NEEDED_BY.get(name, ())
            continue
        names += [NAME.findall(one)[0].lower().replace("_", "-") for one in needed if ";" not in one]
    return absent


def unfit(requirement: str) -> str:
    """Why what is installed under this requirement does not serve; '' where it does."""
    name = NAME.findall(requirement)[0]
    lowest, found = LOWEST.search(requirement), version(name)
    if lowest and _release(found) < _release(lowest[1]):
        return f"{found} is too old, {lowest[1]} or newer is needed"
    if (beyond := BEYOND.search(requirement)) and _release(found) >= _release(beyond[1]):
        return f"{found} is too new, one before {beyond[1]} is needed"
    if name in MACHINES or missing([name]):  # importing those of the machine takes seconds
        return ""
    try:
        importlib.import_module(MODULES.get(name, name.replace("-", "_")))
    except Exception as error:  # of a compiled module for another Python anything
        return f"it cannot be imported here: {type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def main() -> int:
    """Name what is missing; how to fetch it where there is a network."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = {NAME.findall(one)[0]: one for one in project["dependencies"]}
    large = {NAME.findall(one)[0]: one for one in extras["torch"] + extras["recipes"]}
    asked |= {name: large[name] for name in MACHINES}
    absent = missing([name for name in asked if name not in MACHINES])
    absent += [name for name in MACHINES if name in missing([name])]
    wrong = {name: why for name, one in asked.items() if name not in absent and (why := unfit(one))}
    optional = [name for name in OPTIONAL if name in missing([name])]
    if not absent and not wrong:
        for name in optional:
            lost = f"without {name}, {OPTIONAL[name]}; its wheel may come with --wheels DIR"
            print(f"gpu.sh: {lost}", file=sys.stderr)
        return 0
    python = platform.python_version()
    if absent:
        print(f"gpu.sh: Python {python} lacks {', '.join(absent)}", file=sys.stderr)
    for name, why in wrong.items():
        print(f"gpu.sh: {name}: {why}", file=sys.stderr)
    wheels = [name for name in [*absent, *wrong] if name not in MACHINES]
    wheels += [one for name in wrong for one in NEEDED_BY.get(name, ())]
    others = [name for name in [*absent, *wrong] if name in MACHINES]
    if others:
        print(f"gpu.sh: {', '.join(others)}: choose with PYTHON=... one that has them", file=sys.stderr)
    if wheels:
        print(
            "gpu.sh: fetch wheels where there is a network, bring the folder, name it with --wheels DIR:\n\n"
            "  python3 -m pip download -d DIR -c constraints.txt --no-deps --only-binary=:all: \\\n"
            f"      --python-version {python.rpartition('.')[0]} \\\n"
            f"      --platform manylinux_2_17_{platform.machine()} \\\n"
            f"      --platform manylinux_2_28_{platform.machine()} \\\n"
            f"      {' '.join([*wheels, *optional])}\n",
            file=sys.stderr,
        )
    return 2


def _release(number: str) -> list[int]:
    """A version's numbers; what follows them, as in 2.11.0+cu130, is left out."""
    return [int(part) for part in re.match(r"[\d.]*", number)[0].split(".") if part]


if __name__ == "__main__":
    sys.exit(main())
