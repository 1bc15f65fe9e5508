"""What Debian's packages are for: their one-line descriptions by section, where `apt` has the lists."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess

from vivace.errors import InputError

SECTIONS = ("admin", "fonts", "games", "graphics", "math", "net", "science", "sound", "text", "web")
ASIDE = re.compile(r"\s*\([^)]*\)")  # such as "(data files)"
FACT = re.compile(r"^(Package|Source|Section|Description)(?:-en)?: (.*)", re.MULTILINE)


@functools.cache
def descriptions() -> tuple[tuple[str, int], ...]:
    """Each description and its section's number. Of a source one package alone, since they are described
    alike, and of texts that differ by what stands in brackets one.

    Raises InputError where apt is not there or has no lists.
    """
    if shutil.which("apt-cache") is None:
        raise InputError("Debian's descriptions are read from apt-cache, which is not here: a Debian has it")
    told = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, check=False).stdout
    found = described(told.decode("utf-8", errors="replace"))
    if not found:
        raise InputError("apt has no lists of packages: run apt update")
    return found


def described(text: str) -> tuple[tuple[str, int], ...]:
    """The descriptions of what `apt-cache dumpavail` prints."""
    sources, found = set[str](), dict[str, tuple[str, int]]()
    for stanza in text.split("\n\n"):
        facts: dict[str, str] = dict(FACT.findall(stanza))
        section = facts.get("Section", "").rpartition("/")[2]
        source = facts.get("Source", facts.get("Package", "")).partition(" ")[0]
        if section in SECTIONS and facts.get("Description") and source not in sources:
            sources.add(source)
            key = ASIDE.sub("", facts["Description"]).lower()
            found.setdefault(key, (facts["Description"], SECTIONS.index(section)))
    return tuple(found.values())
