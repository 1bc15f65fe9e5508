"""`best.py`: the best configuration as a job file, which `tune`, `train` and `verify` take."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from vivace.files import replace_text
from vivace.job import JobFunction
from vivace.sweeping.space import Parameters, told
from vivace.sweeping.transfer import Transferred

_FROM_FILE = '''"""{title}"""

from pathlib import Path

{imported}

SOURCE = Path(__file__).parent / {path!r}
job = {maker}(f"{{SOURCE}}:{name}"{further})({arguments})
'''
_FOUND = """
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / {path!r}))
"""
_FROM_MODULE = '''"""{title}"""
{found}
{imported}

job = {maker}({reference!r}{further})({arguments})
'''


def write_best(path: Path, function: JobFunction, parameters: Parameters, title: str) -> str:
    """Write the file; returns the reference of its job, or an empty text where the function has no file."""
    reference = function.reference or _reference_of(function)
    if not reference:
        return ""
    arguments = ", ".join(f"{name}={_written(value)}" for name, value in parameters.items())
    place, colon, name = reference.rpartition(":")
    made = {"imported": "from vivace.job import JobFunction", "maker": "JobFunction", "further": ""}
    if isinstance(function, Transferred):
        made = {"imported": "from vivace.sweeping.transfer import Transferred", "maker": "Transferred"}
        made["further"] = f", width={function.width!r}, base={function.base!r}"
    title = title.replace("\\", "/").replace('"""', "'''")
    if not colon and reference.endswith(".py"):
        place, name = reference, "job"
    if place.endswith(".py"):
        nearby = _from(path, Path(place))
        text = _FROM_FILE.format(title=title, path=nearby, name=name, arguments=arguments, **made)
    else:
        root = _root_of(place)
        made["found"] = _FOUND.format(path=_from(path, root)) if root is not None else ""
        text = _FROM_MODULE.format(title=title, reference=reference, arguments=arguments, **made)
    replace_text(path, text)
    return f"{path}:job"


def _written(value: object) -> str:
    """A value as Python reads it."""
    return repr(value) if not isinstance(value, float) or math.isfinite(value) else f"float('{value}')"


def title_of(trials: int, function: str, parameters: Parameters) -> str:
    """The first line of the file that holds the best job: of which trials it is the best."""
    return f"The best of {trials} trials of {function}: {told(parameters)}."


def _from(path: Path, other: Path) -> str:
    """The way to `other` from the folder in which `path` stands."""
    return os.path.relpath(other.resolve(), path.parent.resolve())


def _root_of(name: str) -> Path | None:
    """The folder in which Python looks for a module of the person's; None where it is installed."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or "site-packages" in Path(file).parts:
        return None
    return Path(file).absolute().parents[name.count(".") + (Path(file).stem == "__init__")]


def _reference_of(function: JobFunction) -> str:
    """Where a function that was handed in itself stands: a name in a module, which may be a file alone."""
    found = function.function
    module = sys.modules.get(getattr(found, "__module__", "") or "")
    file, name = getattr(module, "__file__", None), getattr(found, "__name__", "")
    if (
        module is None
        or file is None
        or module.__name__ == "__main__"
        or getattr(module, name, None) is not found
    ):
        return ""
    return f"{module.__name__ if module.__package__ else file}:{name}"
