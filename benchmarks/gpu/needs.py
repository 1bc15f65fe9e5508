"""Is everything installed that Vivace and these benchmarks need? Asked before a GPU's minutes are spent.

python benchmarks/gpu/needs.py      # exit code 2, and what to bring, where something is missing
"""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
MACHINES = ("torch", "torchvision", "scikit-learn")  # too large to bring, or tied to the driver
OPTIONAL = {"torchao": "fp8_linear is refused"}  # and what is lost without it
NEEDED_BY = {"pydantic": ("annotated-types", "pydantic-core", "typing-inspection")}
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


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


def main() -> int:
    """Name what is missing; how to fetch it where there is a network."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    wheels = missing([NAME.findall(one)[0] for one in project["dependencies"]])
    machines = [name for name in MACHINES if name in missing([name])]
    optional = [name for name in OPTIONAL if name in missing([name])]
    if not wheels and not machines:
        for name in optional:
            lost = f"without {name}, {OPTIONAL[name]}; its wheel may come with --wheels DIR"
            print(f"gpu.sh: {lost}", file=sys.stderr)
        return 0
    version = platform.python_version()
    print(f"gpu.sh: Python {version} lacks {', '.join([*wheels, *machines])}", file=sys.stderr)
    if machines:
        print(f"gpu.sh: {', '.join(machines)}: choose with PYTHON=... one that has them", file=sys.stderr)
    if wheels:
        print(
            "gpu.sh: fetch wheels where there is a network, bring the folder, name it with --wheels DIR:\n\n"
            "  python3 -m pip download -d DIR -c constraints.txt --no-deps --only-binary=:all: \\\n"
            f"      --python-version {version.rpartition('.')[0]} \\\n"
            f"      --platform manylinux_2_17_{platform.machine()} \\\n"
            f"      --platform manylinux_2_28_{platform.machine()} \\\n"
            f"      {' '.join([*wheels, *optional])}\n",
            file=sys.stderr,
        )
    return 2


if __name__ == "__main__":
    sys.exit(main())
