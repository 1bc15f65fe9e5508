"""The house rules that can be asserted: budgets, lazy imports, exports, torch-free parts, words, cards."""

from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import itertools
import pydoc
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
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
UNTYPED_SHARE = 0.03
COINED_WORDS = 12
FLOORS = 12

EXPORTS = {
    "Advice",
    "AnswerIsNo",
    "Build",
    "Card",
    "CheckpointError",
    "ChildFailed",
    "Code",
    "Compared",
    "Compressed",
    "Diverged",
    "Event",
    "EventKind",
    "Exported",
    "FolderError",
    "InputError",
    "Job",
    "JobError",
    "Machine",
    "Numerics",
    "Observation",
    "OutOfMemory",
    "Plain",
    "Plan",
    "PlanError",
    "Profile",
    "Profiled",
    "PromiseBroken",
    "Ran",
    "RankLost",
    "Refused",
    "Result",
    "Run",
    "SampleError",
    "Seam",
    "Session",
    "Stage",
    "Swept",
    "Technique",
    "TechniqueWarning",
    "TimedOut",
    "Unsteady",
    "Verdict",
    "VivaceError",
    "Way",
    "__version__",
    "advise",
    "attach",
    "compare",
    "compress",
    "export",
    "in_words",
    "inspect",
    "profile",
    "register",
    "report",
    "run",
    "run_here",
    "sweep",
    "train",
    "tune",
    "verify",
}
VERBS = (
    "advise",
    "compare",
    "compress",
    "export",
    "inspect",
    "profile",
    "report",
    "run",
    "sweep",
    "train",
    "tune",
    "verify",
)
TORCH_FREE = (
    "advising",
    "comparing",
    "errors",
    "events",
    "inspection",
    "ledger",
    "machine",
    "pages",
    "plan",
    "reporting",
    "technique",
    "words",
)

# What a number has to be told by `vivace.words` for: a share, milliseconds, or bytes in a larger unit.
NUMBERS_TOLD = re.compile(r"\{[^{}]+(:\.\d%|\* 1e3:[^{}]*\} ms|/ (2\*\*[234]0|1024)\b[^{}]*\} ?[KMGT]i?B)")
OTHER_WORDING = re.compile(r"^ ?times (as fast|faster)|^[x\u00d7] faster|^ ?% faster")
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

# Who may read a sentence, and why; everything else reads an error's class and fields.
READERS_OF_SENTENCES = {
    "errors.py": "torch says these things by a sentence alone",
    "blame.py": "it shows of what a loader's worker raised, and torch raises again, the worker's own line",
    "profiling/rules.py": "torch.compile tells why it compiles anew by a sentence alone",
}
SENTENCES = {"reason", "message", "sentence", "why"}
SENTENCES |= {f"{one}s" for one in SENTENCES}
READING = {"startswith", "endswith", "partition", "rpartition", "find", "index", "count", "split", "rsplit"}
READING |= {"removeprefix", "removesuffix", "search", "match", "fullmatch", "findall", "replace"}
OF_LINES = {"\n", "(HINT", "Explanation:"}  # to show less of it

# Where a technique's name means something else: a number format, a layout, an event, something of torch's.
WORDS_LIKE_TECHNIQUES = {
    "advising/catalogue.py": {"tf32"},
    "advising/formula.py": {"channels_last", "tf32"},
    "advising/interval.py": {"tf32"},
    "advising/predict.py": {"tf32"},
    "advising/ranking.py": {"tf32"},
    "advising/source.py": {"channels_last", "tf32"},
    "advising/way.py": {"channels_last", "tf32"},
    "command/cli.py": {"channels_last"},
    "events.py": {"checkpoint"},
    "inspection/figures.py": {"tf32"},
    "inspection/gauges.py": {"tf32"},
    # The few that may act on a loop which Vivace does not run, each leaving the script's objects alone.
    "live/candidates.py": {
        "compile",
        "batched_attention",
        "bf16_autocast",
        "channels_last",
        "depthwise_gradients",
        "flush_denormals",
        "fused_optimizer",
        "fused_recurrent",
        "host_allocator",
        "vectorized_dropout",
        "vectorized_operators",
        "winograd",
    },
    "live/loop.py": {"compile"},
    "trainers/huggingface.py": {"fsdp", "tf32"},
    "profiling/judge.py": {"channels_last", "tf32"},
    "profiling/record/experiments.py": {"channels_last", "compile"},
    "profiling/record/facts.py": {"cudnn_benchmark", "tf32"},
    "profiling/roofline.py": {"tf32"},
    "profiling/rules_precision.py": {"channels_last", "compile"},
    "reporting/content.py": {"tf32"},
    "technique/contract.py": {"tf32"},
    "tensors/precision.py": {"tf32"},
    "verifying/verification.py": {"tf32"},
    "tuning/tuner.py": {"tf32"},  # a key of the document, where the device has no such format
}
HANDS_NOTES_ON = {"measuring/worker.py", "observing/observe.py"}  # to a technique's `confirm`, all of them
FOREIGN = ("torch", "torchvision", "triton", "PIL", "numpy", "optuna")
INTERNALS = "torch_internals/"
# Private attributes of their objects, also where we call an attribute of our own the same.
PRIVATE_ATTRIBUTES = {
    "_backward_hooks",
    "_backward_pre_hooks",
    "_base",
    "_base_seed",
    "_buffers",
    "_cdata",
    "_enabled",
    "_flat_weights",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_image_files",
    "_iterator",
    "_modules",
    "_orig_mod",
    "_parameters",
    "_schedulers",
    "_schema",
    "_shutdown",
    "_shutdown_workers",
    "_version",
}
PRIVATE_PATH = re.compile(rf"({'|'.join(FOREIGN)})(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")
OF_PYTHON = {"_fields"}  # of a named tuple
BY_NAME = {"delattr", "getattr", "hasattr", "patched", "replace", "setattr"}  # take an attribute's name

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


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def names_of_our_own() -> set[str]:
    """Functions, classes and attributes that the package itself defines."""
    found = set()
    for node in itertools.chain.from_iterable(ast.walk(tree_of(path)) for path in FILES):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def imported_names(tree: ast.AST) -> dict[str, str]:
    """What a file imports: its names here, and the packages that they come from."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name).partition(".")[0]: a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: node.module.partition(".")[0] for alias in node.names}
    return found


def private_touches(tree: ast.AST, own: set[str]) -> list[str]:
    """Where a file touches what torch, torchvision, triton, Pillow or NumPy call private."""
    imported, known = imported_names(tree), OF_PYTHON | own
    templates = [part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values]

    def touches(node: ast.AST) -> bool:
        match node:
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in FOREIGN:
                return any(is_private(f"{module}.{alias.name}") for alias in node.names)
            case ast.Import():
                names = [alias.name for alias in node.names]
                return any(is_private(name) and name.partition(".")[0] in FOREIGN for name in names)
            case ast.Attribute(value=value, attr=attr) if is_private(attr):
                root: ast.AST = value
                while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
                    root = root.func if isinstance(root, ast.Call) else root.value
                if isinstance(root, ast.Name) and root.id in imported:
                    return imported[root.id] in FOREIGN
                ours = isinstance(value, ast.Name) and value.id in ("self", "cls")
                return attr not in known or (attr in PRIVATE_ATTRIBUTES and not ours)
            case ast.Constant(value=str(text)) if node not in templates:
                return text in PRIVATE_ATTRIBUTES or bool(PRIVATE_PATH.fullmatch(text))
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=given) if name in BY_NAME:
                texts = [a.value for a in given if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                return any(re.fullmatch(r"_[a-z]\w*", text) and text not in known for text in texts)
        return False

    found = {f"line {node.lineno}: {ast.unparse(node)}" for node in ast.walk(tree) if touches(node)}
    return sorted(one for one in found if not any(one != other and one in other for other in found))


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_stay_within_their_budget(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= FILE_LINES


@pytest.mark.parametrize("name", registry.own_names())
def test_techniques_stay_within_their_budget(name: str) -> None:
    """With all their files, but for kernels: these are checked by the interpreter."""
    (home,) = (path for path in SOURCE.glob(f"techniques/{name}*") if path.stem == name)
    files = [home] if home.is_file() else [p for p in home.rglob("*.py") if "kernels" not in p.parts]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= TECHNIQUE_LINES


def test_few_modules_lie_loose() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= LOOSE_MODULES


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_functions_stay_within_their_budget(path: Path) -> None:
    tree = tree_of(path)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno is not None}
    assert {name: lines for name, lines in long.items() if lines > FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", [path for path in FILES if relative(path) != OUTSIDE], ids=relative)
def test_numbers_are_told_in_one_place(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.strip() for line in lines if NUMBERS_TOLD.search(line)] == []


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_speeds_are_told_in_one_wording(path: Path) -> None:
    """``1.42x as fast``: some read 1.42x faster, or 1.42 times faster, as 2.42 times the speed."""
    nodes = ast.walk(tree_of(path))
    parts = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    told = [part.value for node in parts for part in node.values if isinstance(part, ast.Constant)]
    assert [text for text in told if OTHER_WORDING.search(str(text))] == []


def sentences_read(function: ast.AST) -> list[str]:
    """Where a function compares or searches the text of an exception, or what is called like one."""
    nodes = list(ast.walk(function))
    caught = {n.name for n in nodes if isinstance(n, ast.ExceptHandler) and n.name}
    caught |= {n.arg for n in nodes if isinstance(n, ast.arg) and n.arg in ("error", "failed", "failure")}
    told: set[str] = set(SENTENCES)

    def is_told(node: ast.AST) -> bool:
        match node:
            case ast.Name(id=name):
                return name in told
            case ast.Call(func=ast.Name(id="str"), args=[inner]):
                return is_told(inner) or (isinstance(inner, ast.Name) and inner.id in caught)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=key), *_]):
                return key in SENTENCES
            case ast.Call(func=ast.Attribute(value=inner)):  # str(error).strip().lower()
                return is_told(inner)
            case ast.Subscript(slice=ast.Constant(value=key)) if key in SENTENCES:
                return True
            case ast.Subscript(value=inner):
                return is_told(inner)
            case ast.Attribute(value=ast.Name(id=name), attr=field):
                return field in SENTENCES or (name in caught and field == "args")
            case ast.Attribute(attr=field):
                return field in SENTENCES
        return False

    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs = zip(names, values, strict=True)
            case ast.Assign(targets=[target], value=value):
                pairs = iter([(target, value)])
            case _:
                continue
        told |= {name.id for name, value in pairs if isinstance(name, ast.Name) and is_told(value)}
    found = []
    for node in nodes:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                plain = all(isinstance(o, ast.Constant) and o.value in ("", None) for o in others)
                order = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Is, ast.IsNot)
                if any(map(is_told, (left, *others))) and not isinstance(ops[0], order) and not plain:
                    found.append(ast.unparse(node))
            case ast.Call(func=ast.Attribute(value=whose, attr=verb), args=arguments) if verb in READING:
                shows = [a for a in arguments if isinstance(a, ast.Constant) and a.value in OF_LINES]
                if any(map(is_told, (whose, *arguments))) and not shows:
                    found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nothing_branches_on_a_sentence(path: Path) -> None:
    """An error's class and fields are for programs; its text may be worded anew at any time."""
    tree = tree_of(path)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = sorted({text for function in functions for text in sentences_read(function)})
    if relative(path) not in READERS_OF_SENTENCES:
        assert found == []


def test_the_core_names_no_technique() -> None:
    """Neither in a string nor by an import: what it must know of one stands on the card, a stranger's too."""
    names, found = set(registry.own_names()), dict[str, set[str]]()
    for path in FILES:
        if relative(path).startswith("techniques/"):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
                found.setdefault(relative(path), set()).add(node.value)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vivace.techniques"):
                found.setdefault(relative(path), set()).add(str(node.module))
    assert found == WORDS_LIKE_TECHNIQUES


def test_the_core_reads_no_notes() -> None:
    """They are each technique's own evidence; what others must know of a step is a typed field of `Facts`."""
    found = {
        relative(path)
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and node.attr == "notes"
        and ast.unparse(node.value).rpartition(".")[2] in ("build", "seen")
    }
    core = {name for name in found if not name.startswith(("techniques/", "mechanisms/"))}
    assert core == HANDS_NOTES_ON


def test_private_names_of_other_libraries_are_touched_in_one_place() -> None:
    """By the names that a file imports, by attributes that nothing of ours defines, and by texts."""
    own = names_of_our_own()
    trees = {relative(path): tree_of(path) for path in FILES}
    elsewhere = {name: tree for name, tree in trees.items() if not name.startswith(INTERNALS)}
    found = [f"{name}, {touch}" for name, tree in elsewhere.items() for touch in private_touches(tree, own)]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch.utils._pytree import tree_leaves",
        "from torch.utils.data import _utils",
        "import torch\ntorch._C._current_graph_task_id()",
        "from torch import nn\nnn.modules.batchnorm._BatchNorm",
        "from PIL import Image as pictures\npictures._initialized",
        "print(tensor.untyped_storage()._cdata)",
        "module._buffers['mean']",
        "getattr(module, '_never_heard_of', None)",
        "'torch._dynamo' in modules",
    ],
)
def test_a_private_touch_is_found(code: str) -> None:
    assert len(private_touches(ast.parse(code), names_of_our_own())) == 1


def test_no_method_is_found_by_a_name_that_is_put_together() -> None:
    """Neither a reader nor a search finds who calls it. Settings of torch are no methods of ours."""
    found = [
        f"{relative(path)}: {ast.unparse(node)}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "getattr"
        and ast.unparse(node.args[0]) in ("self", "cls", "type(self)")
        and isinstance(node.args[1], ast.JoinedStr | ast.BinOp)
    ]
    assert found == []


def names_for_anything(trees: Iterable[ast.AST]) -> set[str]:
    """`Any`, and what is bound to it."""
    found = {"Any"}
    for node in itertools.chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and ast.unparse(node.value) == "Any":
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def untyped_arguments(tree: ast.AST, anything: set[str]) -> list[str]:
    """Arguments that may be anything at all, by a name for it or because nothing is said."""
    return [
        f"{function.name}({argument.arg})"
        for function, argument in arguments_of(tree)
        if argument.annotation is None
        or anything & {part.strip() for part in re.split(r"[|.\"']", ast.unparse(argument.annotation))}
    ]


def arguments_of(tree: ast.AST) -> list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, ast.arg]]:
    """Every function with each of its arguments but `self` and `cls`."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        (function, argument)
        for function in functions
        for argument in ast.walk(function.args)
        if isinstance(argument, ast.arg) and argument.arg not in ("self", "cls")
    ]


def test_arguments_have_types() -> None:
    """Kernels of Triton have none: its language knows no types."""
    trees = {relative(path): tree_of(path) for path in FILES}
    trees = {name: tree for name, tree in trees.items() if "/kernels/" not in name}
    anything = names_for_anything(trees.values())
    found = {name: untyped_arguments(tree, anything) for name, tree in trees.items()}
    untyped = [f"{name}: {argument}" for name, arguments in found.items() for argument in arguments]
    every = sum(len(arguments_of(tree)) for tree in trees.values())
    assert len(untyped) < UNTYPED_SHARE * every, untyped


@pytest.mark.parametrize(
    ("code", "untyped"),
    [
        ("def f(x: Any, *y: int, **z: Any): ...", ["f(x)", "f(z)"]),
        ("Batch = Any\ndef f(x: Batch, y: Batch | None): ...", ["f(x)", "f(y)"]),
        ("def f(x: typing.Any, y: 'Any', z): ...", ["f(x)", "f(y)", "f(z)"]),
        ("def f(self, x: object, y: list[Any], z: Callable[[Any], Any]): ...", []),
    ],
)
def test_an_argument_without_a_type_is_found(code: str, untyped: list[str]) -> None:
    tree = ast.parse(code)
    assert untyped_arguments(tree, names_for_anything([tree])) == untyped


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("vivace", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as circle:
        pytest.fail(" is imported by ".join(circle.args[1]))


def test_no_chain_of_imports_goes_through_more_than_twelve_rooms() -> None:
    graph = grimp.build_graph("vivace", exclude_type_checking_imports=True, cache_dir=None)
    below: dict[str, set[str]] = {}
    for module in graph.modules:
        room = ".".join(module.split(".")[:2])
        found = {".".join(one.split(".")[:2]) for one in graph.find_modules_directly_imported_by(module)}
        below.setdefault(room, set()).update(found - {room})
    chains: dict[str, list[str]] = {}  # the longest one from each room down
    for room in graphlib.TopologicalSorter(below).static_order():
        chains[room] = [room, *max((chains[one] for one in below[room]), key=len, default=[])]
    longest = max(chains.values(), key=len)
    assert len(longest) <= FLOORS, " > ".join(longest)


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
        signature = rf"^{name}\((?:(?!->).)*\b{parameter}\b"  # which Python 3.13 folds
        assert re.search(signature, page, re.MULTILINE | re.DOTALL), page


def test_every_error_is_exported() -> None:
    own = [value for value in vars(errors).values() if isinstance(value, type)]
    raised = {cls.__name__ for cls in own if issubclass(cls, errors.VivaceError | errors.TechniqueWarning)}
    assert raised <= EXPORTS


def test_listeners_of_all_verbs_hear_the_same() -> None:
    found = {verb: inspect.signature(getattr(vivace, verb)).parameters.get("on_event") for verb in VERBS}
    heard = {parameter.annotation for parameter in found.values() if parameter is not None}
    assert heard == {"OnEvent | None"}


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


def test_few_words_are_our_own() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert 0 < len(re.findall(r"^: ", glossary, re.MULTILINE)) <= COINED_WORDS


def test_a_page_that_uses_a_coined_word_links_the_glossary() -> None:
    coined = re.compile(r"\b(envelopes?|ledger|promise|ruler|seams?|shadow runs?)\b")
    written = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)  # code
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if page.name != "glossary.md" and coined.search(written.sub("", text)):
            assert "](glossary.md)" in text, page.name


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
    outside = [
        page.name
        for page, found in links.items()
        if page.parent.name == "docs"
        for link in found
        if link.startswith("..")
    ]
    assert outside == [], "the built documentation holds no file beside docs/"
    listed = set(links[ROOT / "decisions" / "README.md"])
    assert {path.name for path in (ROOT / "decisions").glob("0*.md")} <= listed
