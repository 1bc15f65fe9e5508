"""The house rules that can be asserted: budgets, lazy imports, exports, torch-free parts, words, cards."""

from __future__ import annotations

import ast
import graphlib
import inspect
import pydoc
import re
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import vivace
from vivace import errors
from vivace.technique import registry

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "vivace"
FILES = sorted(SOURCE.rglob("*.py"))

FILE_LINES = 600
FUNCTION_LINES = 60
TECHNIQUE_LINES = 400
LOOSE_MODULES = 13

EXPORTS = {
    "Advice",
    "AnswerIsNo",
    "Build",
    "Card",
    "CheckpointError",
    "ChildFailed",
    "Diverged",
    "FolderError",
    "InputError",
    "Job",
    "JobError",
    "Machine",
    "Numerics",
    "Observation",
    "OutOfMemory",
    "Plan",
    "PlanError",
    "Profile",
    "Profiled",
    "Ran",
    "Refused",
    "Result",
    "Run",
    "SampleError",
    "Seam",
    "Session",
    "Stage",
    "Technique",
    "TechniqueWarning",
    "TimedOut",
    "Unsteady",
    "Verdict",
    "VivaceError",
    "__version__",
    "advise",
    "attach",
    "inspect",
    "profile",
    "register",
    "report",
    "run",
    "run_here",
    "train",
    "tune",
    "verify",
}
VERBS = ("advise", "inspect", "profile", "report", "run", "train", "tune", "verify")
TORCH_FREE = (
    "advising",
    "errors",
    "inspection",
    "ledger",
    "machine",
    "plan",
    "reporting",
    "technique",
    "words",
)

# What a number has to be told by `vivace.words` for: a share, milliseconds, or bytes in a larger unit.
NUMBERS_TOLD = re.compile(r"\{[^{}]+(:\.\d%|\* 1e3:[^{}]*\} ms|/ (2\*\*[234]0|1024)\b[^{}]*\} ?[KMGT]i?B)")
OUTSIDE = "inspection/probe.py"  # runs as a script, and imports nothing of the package

# Cut in two, so that this file does not hold what it forbids.
MACHINE_PATHS = ("/wo" + "rk/", "/roo" + "t/", "/opt/py" + "pi")
REGISTRIES = (
    "py" + "pi.org",
    "python" + "hosted.org",
    "anaconda" + ".org",
    "download.py" + "torch.org",
    "npm" + "js.org",
)
FORBIDDEN = re.compile(
    "|".join(
        [rf"(?<![\w.-]){re.escape(path)}" for path in MACHINE_PATHS] + [re.escape(r) for r in REGISTRIES]
    )
)

WITHOUT_TORCH = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "triton"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
"""


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_stay_within_their_budget(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= FILE_LINES


@pytest.mark.parametrize("name", registry.own_names())
def test_techniques_stay_within_their_budget(name: str) -> None:
    """With all their files, but for kernels: these are checked by the interpreter."""
    (home,) = {
        path
        for folder in ("", "untried/")
        for path in SOURCE.glob(f"techniques/{folder}{name}*")
        if path.stem == name
    }
    files = [home] if home.is_file() else [p for p in home.rglob("*.py") if "kernels" not in p.parts]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= TECHNIQUE_LINES


def test_what_has_never_run_where_it_is_for_stands_apart() -> None:
    untried = {path.stem for path in (SOURCE / "techniques" / "untried").iterdir() if path.stem[0] != "_"}
    assert untried == {name for name in registry.own_names() if not registry.find(name).card.measured_on}


def test_few_modules_lie_loose() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= LOOSE_MODULES


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_functions_stay_within_their_budget(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno is not None}
    assert {name: lines for name, lines in long.items() if lines > FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", [path for path in FILES if relative(path) != OUTSIDE], ids=relative)
def test_numbers_are_told_in_one_place(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.strip() for line in lines if NUMBERS_TOLD.search(line)] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("vivace", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as circle:
        pytest.fail(" is imported by ".join(circle.args[1]))


def test_importing_the_package_loads_nothing_else() -> None:
    run_python(
        "import sys, vivace\n"
        "heavy = [m for m in sys.modules if m.partition('.')[0] in ('torch', 'numpy', 'pydantic', 'rich')]\n"
        "assert not heavy, heavy\n"
        "parts = [m for m in sys.modules if m.startswith('vivace.')]\n"
        "assert not parts, parts\n"
    )


def test_exports_are_the_written_list() -> None:
    assert set(vivace.__all__) == EXPORTS
    assert len(vivace.__all__) == len(EXPORTS)


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_every_export_resolves(name: str) -> None:
    assert getattr(vivace, name) is not None


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_is_callable_and_documented(name: str) -> None:
    verb = getattr(vivace, name)
    assert callable(verb)
    assert verb.__doc__


@pytest.mark.parametrize("name", [*VERBS, "attach", "register"])
def test_help_shows_the_signature(name: str) -> None:
    verb = getattr(vivace, name)
    page = pydoc.render_doc(verb, renderer=pydoc.plaintext)
    for parameter in inspect.signature(verb).parameters:
        assert re.search(rf"^{name}\(.*\b{parameter}\b", page, re.MULTILINE), page


def test_every_error_is_exported() -> None:
    own = [value for value in vars(errors).values() if isinstance(value, type)]
    raised = {cls.__name__ for cls in own if issubclass(cls, errors.VivaceError | errors.TechniqueWarning)}
    assert raised <= EXPORTS


def test_results_of_the_verbs_are_exported() -> None:
    results = {verb: inspect.signature(getattr(vivace, verb)).return_annotation for verb in VERBS}
    own = {verb: name for verb, name in results.items() if name not in ("Path", "None")}
    assert set(own.values()) <= EXPORTS, own


def test_the_package_folder_hides_nothing_of_pythons() -> None:
    """In it as working directory: a folder called like a module of Python's would be imported instead."""
    done = subprocess.run(
        [sys.executable, "-c", "import dataclasses, inspect, profile"],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parts = {path.stem for path in SOURCE.iterdir()}
    assert parts & set(sys.stdlib_module_names) == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'accelerate'"):
        _ = vivace.accelerate


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_free_parts_import_without_torch(module: str) -> None:
    run_python(f"{WITHOUT_TORCH}\nimport vivace.{module}\n")


def test_a_plan_of_every_technique_reads_without_torch() -> None:
    run_python(
        f"{WITHOUT_TORCH}\n"
        "from vivace.technique import registry\n"
        "from vivace.plan import Plan\n"
        "assert registry.own_names()\n"
        "for cls in registry.everything():\n"
        "    plan = Plan([cls()])\n"
        "    assert Plan.loads(plan.dumps()) == plan, cls.name\n"
    )


@pytest.mark.parametrize("name", registry.own_names())
def test_every_technique_has_a_card_and_a_test(name: str) -> None:
    card = registry.find(name).card
    assert card.summary.strip()
    assert "\n" not in card.summary
    assert card.source.strip()
    assert set(card.measured_on) <= set(card.devices)
    assert (ROOT / "tests" / "techniques" / f"test_{name}.py").is_file()


def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", errors="ignore")
        found += [
            f"{name}, line {number}: {line.strip()}"
            for number, line in enumerate(text.splitlines(), 1)
            if FORBIDDEN.search(line)
        ]
    assert found == []


def test_links_lead_somewhere_and_every_decision_is_listed() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "decisions").glob("*.md")]
    pages += (ROOT / "records").glob("*.md")
    links = {page: re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")) for page in pages}
    dead = [
        f"{page.name}: {link}"
        for page, found in links.items()
        for link in found
        if "://" not in link and not link.startswith("generated/") and not (page.parent / link).exists()
    ]
    assert dead == []
    listed = set(links[ROOT / "decisions" / "README.md"])
    assert {path.name for path in (ROOT / "decisions").glob("0*.md")} <= listed
