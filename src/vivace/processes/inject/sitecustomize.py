"""Found by Python at start-up in a profiled or faster script's process: hooks torch once it was imported.

It stands before any other `sitecustomize`, and runs that one first. Whatever goes wrong here is reported on
standard error and leaves the script alone. The script's Python need not be Vivace's: this file runs on any
Python 3, and what it loads of Vivace needs nothing but torch.
"""

import atexit
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path

_HERE = os.path.dirname(os.path.abspath(__file__))
_FOLDER = os.environ.get("VIVACE_PROFILE")
_RUNS = "VIVACE_RUN" in os.environ
_OLDEST_PYTHON = (3, 11)


def _run_the_other() -> None:
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _AfterTorch:
    """Finds torch as the other finders do, with a loader that hooks it after it has run.

    It stays until torch has run: `importlib.util.find_spec("torch")` searches without importing.
    """

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """As the import system asks; None for everything but torch."""
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        original = spec.loader.exec_module

        def execute(module):  # type: ignore[no-untyped-def]
            collects = gc.isenabled()
            gc.disable()  # to look for garbage among what stays is a fifth of what this takes
            try:
                original(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _hook(module)
            finally:
                if collects:
                    gc.enable()

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _hook(torch) -> None:  # type: ignore[no-untyped-def]
    try:
        if sys.version_info[:2] < _OLDEST_PYTHON:
            _refuse("its Python is older than " + ".".join(map(str, _OLDEST_PYTHON)))
            return
        if "vivace" not in sys.modules:
            _find_vivace()
        if _RUNS:
            importlib.import_module("vivace.live.here").begin()
            return
        from vivace.profiling.record.late import LatePeak
        from vivace.profiling.record.recorder import Recorder

        rank = os.environ.get("RANK", "0")
        folder = Path(str(_FOLDER))
        seconds = float(os.environ.get("VIVACE_PROFILE_SECONDS", "4"))
        recorder = Recorder(folder if rank == "0" else folder / f"rank-{rank}", seconds)
        LatePeak(recorder).install()
        recorder.install()
    except Exception as error:
        version = getattr(torch, "__version__", "of an unknown version")
        _refuse(f"hooks cannot attach to its torch {version} ({type(error).__name__}: {error})")


def _tell_of_others() -> None:
    """What this process starts may train, and its output is for this one to read: where it is the one that
    the person started, it says at its end what came of that, and nobody else does.
    """
    errand, pid = json.loads(os.environ["VIVACE_RUN"]), os.getpid()
    is_first = errand.get("launcher") == (pid if errand.get("became") else os.getppid())
    if not is_first or os.environ.get("RANK", "0") != "0" or sys.version_info[:2] < _OLDEST_PYTHON:
        return
    os.environ["VIVACE_RUN"] = text = json.dumps({**errand, "first_tells": True})

    def tell():  # type: ignore[no-untyped-def]
        try:
            path = Path(errand["folder"], "run.json")
            document = json.loads(path.read_text(encoding="utf-8"))
            is_earlier = path.stat().st_mtime_ns == errand["earlier"].get(path.name)
            if os.getpid() == pid != document["process"] and not is_earlier:
                if "vivace" not in sys.modules:
                    _find_vivace()
                importlib.import_module("vivace.live.here").tell_of_others(text, document)
        except FileNotFoundError:
            pass  # nothing trained
        except Exception as error:
            print(f"vivace: what came of this run cannot be told: {error}", file=sys.stderr)

    atexit.register(tell)


def _refuse(reason: str) -> None:
    """Say here and to the process that waits for the record why there is none."""
    python = ".".join(map(str, sys.version_info[:3]))
    text = f"{reason}; it runs on Python {python}, {sys.executable}"
    if _RUNS:
        print(f"vivace: this run is left as it is, as {text}", file=sys.stderr)
        return
    print(f"vivace: this run is not profiled, as {text}", file=sys.stderr)
    record = Path(str(_FOLDER)) / "record.json"
    try:
        if not record.exists():
            record.write_text(json.dumps({"state": "refused", "refused": text}), encoding="utf-8")
    except OSError:
        pass  # it was said on standard error


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
if _RUNS:
    _tell_of_others()
if _FOLDER or _RUNS:
    sys.meta_path.insert(0, _AfterTorch())
