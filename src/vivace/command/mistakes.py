"""What a person meant whose command line cannot be read, in one sentence."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

TAKE_SCRIPTS = ("run", "tune", "profile")


def meant(error: Exception) -> str:
    """Of a usage error: the number that was wanted, the command for a script or where its options stand.

    Empty for all other mistakes.
    """
    return _not_a_number(error) or _no_command(sys.argv[1:]) or _of_a_script(error, sys.argv[1:])


def _not_a_number(error: Exception) -> str:
    """Which option was given what, where a number was wanted."""
    from pydantic import ValidationError

    names = [name for name in getattr(getattr(error, "param", None), "opts", ()) if name.startswith("-")]
    if not names or not isinstance(error.__cause__, ValidationError):
        return ""
    wrong = error.__cause__.errors()[0]
    kind = {"int_parsing": "a whole number", "float_parsing": "a number"}.get(wrong["type"])
    return f"{max(names, key=len)} is '{wrong['input']}'; it must be {kind}" if kind else ""


def _no_command(words: list[str]) -> str:
    """That a file stands where a command should."""
    file = words[0].partition(":")[0]
    if not file.endswith(".py") or not os.path.isfile(file):  # a Path raises where it may not look
        return ""
    script = shlex.join(["vivace", "run", "--", "python", file])
    return f"'{words[0]}' is no command: {script} for a script, vivace tune {shlex.quote(words[0])} for a Job"


def _of_a_script(error: Exception, words: list[str]) -> str:
    """That an option which Vivace does not have may be the script's, and where those stand."""
    option = getattr(error, "option_name", None)
    if option is None or words[0] not in TAKE_SCRIPTS or "--" in words:
        return ""
    place = next((at for at, word in enumerate(words) if at and _begins_a_script(word)), None)
    if place is None:
        return ""
    own, script = words[:place], words[place:]
    script = script if _is_python(script[0]) else ["python", *script]
    command = shlex.join(["vivace", *own, "--", *script])
    return f"vivace {words[0]} has no option {option}; what is a script's stands behind --: {command}"


def _begins_a_script(word: str) -> bool:
    return word.endswith(".py") or _is_python(word)


def _is_python(word: str) -> bool:
    return Path(word).name.startswith("python")
