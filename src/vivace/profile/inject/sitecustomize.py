"""Found by Python at start-up in a profiled script's process: hooks torch once the script has imported it.

It stands before any other `sitecustomize`, and runs that one first. Whatever goes wrong here is reported on
standard error and leaves the script alone.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_HERE = os.path.dirname(os.path.abspath(__file__))
_FOLDER = os.environ.get("VIVACE_PROFILE")


def _run_the_other() -> None:
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _AfterTorch:
    """Finds torch once, with a loader that hooks it after it has run."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """As the import system asks; None for everything but torch."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        original = spec.loader.exec_module

        def execute(module):  # type: ignore[no-untyped-def]
            original(module)
            _hook()

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _hook() -> None:
    try:
        if "vivace" not in sys.modules:
            _find_vivace()
        from vivace.profile.record.late import LatePeak
        from vivace.profile.record.recorder import Recorder

        rank = os.environ.get("RANK", "0")
        folder = Path(str(_FOLDER))
        seconds = float(os.environ.get("VIVACE_PROFILE_SECONDS", "4"))
        recorder = Recorder(folder if rank == "0" else folder / f"rank-{rank}", seconds)
        LatePeak(recorder).install()
        recorder.install()
    except Exception as error:
        print(f"vivace: this run is not profiled: {type(error).__name__}: {error}", file=sys.stderr)


def _find_vivace() -> None:
    """Make the `vivace` that was started importable, and nothing else from where it is installed."""
    package = Path(_HERE).parents[1]
    spec = importlib.util.spec_from_file_location(
        "vivace", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vivace"] = module
    spec.loader.exec_module(module)


try:
    _run_the_other()
except Exception as error:
    print(f"vivace: the script's own sitecustomize failed: {error}", file=sys.stderr)
if _FOLDER:
    sys.meta_path.insert(0, _AfterTorch())
