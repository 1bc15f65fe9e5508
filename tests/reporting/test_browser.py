"""The pages in a real browser: nothing overflows, folded or not, and the answer is the first screen.

Skipped where no Chromium is installed, or none that starts.
"""

import html
import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy
import pytest

import vivace
from vivace import pictures
from vivace.compressing.page import render as compress_page
from vivace.exporting.page import render as export_page
from vivace.live.page import page as run_page
from vivace.pictures import PICTURES, Box, Counts, Image, Piece, Text
from vivace.profiling.law import Law
from vivace.profiling.page import render as profile_page
from vivace.sweeping.page import render as sweep_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FOUND = Path(__file__).parents[1] / "scenes" / "found.py"
WIDTHS = (390, 1280)
FIRST_SCREEN, SCREENS = 900, 3
MEASURE = """<script>
const found = [];
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, root = page.documentElement;
  const place = (chosen) => Math.max(0, ...[...page.querySelectorAll(chosen)].map(
    (each) => each.getBoundingClientRect().bottom));
  const measured = {
    name: frame.dataset.name, width: frame.clientWidth, next: place(".next"), header: place("header"),
    height: root.scrollHeight, background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    title: frame.contentWindow.getComputedStyle(page.querySelector("h1")).color,
  };
  for (const details of page.querySelectorAll("details")) details.open = true;
  measured.overflow = root.scrollWidth - root.clientWidth;
  measured.outside = [...page.querySelectorAll("body *")].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.width && (box.right > root.clientWidth + 1 || box.left < -1);
  }).map((each) => each.outerHTML.slice(0, 120));
  found.push(measured);
}
document.body.innerHTML = "<pre id=found></pre>";
document.querySelector("#found").textContent = JSON.stringify(found);
</script>"""

EXAMINE = """<script>
const found = [];
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument;
  for (const details of page.querySelectorAll("details")) details.open = true;
  const script = page.createElement("script");
  script.textContent = AXE;
  page.head.append(script);
  const examined = await frame.contentWindow.axe.run(page, { resultTypes: ["violations"] });
  found.push({ name: frame.dataset.name, width: frame.clientWidth,
    violations: examined.violations.map(({ id, impact, nodes }) => (
      { id, impact, nodes: nodes.map((node) => node.html.slice(0, 200)) })) });
}
document.body.innerHTML = "<pre id=found></pre>";
document.querySelector("#found").textContent = JSON.stringify(found);
</script>"""


@pytest.fixture(scope="module", autouse=True)
def browser():
    """Skips where there is none that starts."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    try:
        looked_at({"nothing": "<h1>nothing"}, False, MEASURE)
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"Chromium does not start here: {str(error)[-300:]}")


def profile_document():
    """A step that waits for its data, and is bound by its batch beside that."""
    command = "python examples/a_long_name_of_a_script.py --epochs 30 --data some/folder/with/pictures"
    gain, rows = {"low": 1.2, "high": 1.5}, []
    for name, flops, seconds in (("convolution", 1.5e9, 0.1), ("matmul", 2.5e5, 6e-5), ("norm", 0.0, 0.04)):
        known = {"bytes": 1.5e7, "count": 16, "bound_seconds": 0.008, "share": 0.08, "bound_by": "compute"}
        rows.append({"operator": name, "flops": flops, "seconds": seconds, **known})
    evidence = "98 % of the step (109 ms) waits for data: reading (most in tiny.py:11, __getitem__)"
    module = {"name": "encoder.layers.0.self_attention.output_projection", "forward": 0.01}
    return {
        "target": command,
        "tune": f"vivace run -- {command}",
        "verdicts": [{"cause": "input", "evidence": evidence, "gain": gain, "next": "num_workers=2"}],
        "bounds": [{"name": "small_batch", "evidence": evidence, "gain": gain, "next": "a larger batch"}],
        "shares": {"data": 0.2, "forward": 0.3, "backward": 0.4, "update": 0.1},
        "steps": 40,
        "step_seconds": 0.215,
        "samples_per_second": 297.0,
        "bound_seconds": 0.011,
        "share_of_limit": 0.053,
        "bound_by": "compute",
        "roofline": rows,
        "prospects": [{"technique": "bf16_autocast", "summary": "products in bfloat16", "gain": gain}],
        "modules": [{**module, "backward": 0.02, "activation_bytes": 2**20}],
        "memory": {
            **dict.fromkeys(
                ("parameters", "gradients", "optimizer", "activations", "batch", "temporary"), 1e6
            ),
            "held_bytes": 3e6,
            "peak_bytes": 9e6,
            "curve": [[0.0, 0.0], [0.1, 6e6], [0.15, 2e6]],
            "peak_at": {"seconds": 0.1, "operator": "aten::convolution_backward", "module": module["name"]},
        },
        "timeline": [["data", 0.0, 0.04], ["forward", 0.05, 0.1], ["backward", 0.1, 0.2]],
        "timeline_seconds": 0.215,
        "traced_seconds": 0.2,
        "step_starts": [0.0, 0.1],
        "machine": {
            "device": "Intel(R) Xeon(R) Platinum 8480C Processor",
            "cores": 2,
            "ceilings": {"copy_device": 1.8e10, "matmul_fp32": 1.8e11},
        },
        "work": {"precision": "float32", "epochs": 5, "steps_per_epoch": 60},
        "missing": ["the share of matmul: faster than the measured ceilings"],
    }


def ranks_document():
    """What two ranks bring, and others would."""
    compute = {1: 0.21, 2: 0.11, 4: 0.06, 8: 0.035, 16: 0.02}
    law = Law(2, 64, compute, 0.13, 0.14, 0.02, 0.01, 102_000_000, 9, 8e-5, 1.1e9)
    expected = law.expected()
    return {
        **profile_document(),
        "target": "examples/train_a_vision_transformer.py:job",
        "ranks": 2,
        "law": law.to_dict(),
        "expected": expected,
        "shares": {phase: spent / 0.14 for phase, spent in expected[1]["seconds"].items()},
        "plan": {"ddp": {}},
        "plan_path": "runs/profile/plan-of-ranks.toml",
        "replaced": "python examples/a_long_name_of_a_script.py --epochs 30 --data some/folder",
    }


def predictions():
    """Pictures of each kind."""
    names = ["face", "animal", "a_long_name_of_a_class", "vehicle", "building"]
    counts = [[1000 if row == column else 13 * column for column in range(5)] for row in range(5)]
    pixels = numpy.linspace(0, 1, 48 * 64).reshape(48, 64)
    boxes = [Box(1, 1, 30, 30, names[2], True), Box(50, 30, 90, 60, "missed"), Box(20, 9, 63, 47, "b", False)]
    text = Text("one of three", ["before ", Piece("Ann", "PER", True), " in ", Piece("Paris", "ORG", False)])
    long = Text("", [Piece("given", "given"), " and" * 200])
    legend = {"what stands behind the person in the picture": (9, 9, 200), "other": (200, 9, 9)}
    return {
        "Confusion": [Counts("all", names, counts)],
        "Best": [Image(f"picture {number}", pixels, boxes, legend) for number in range(6)],
        "Said": [text, long],
    }


def looked_at(pages, dark, script, before="", widths=WIDTHS):
    """What a browser finds of each page at each width by `script`; one start for all."""
    frames = "".join(
        f'<iframe data-name="{name}" width="{width}" height="900" style="border:0" '
        f'srcdoc="{html.escape(page, quote=True)}"></iframe>'
        for name, page in pages.items()
        for width in widths
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "all.html"
        script = script.replace("<script>", "<script>addEventListener('load', async () => {").replace(
            "</script>", "})</script>"
        )
        text = f"<!doctype html><meta charset=utf-8><body>{frames}{before}{script}"
        path.write_text(text, encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
        options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1400,900"]
        options += ["--virtual-time-budget=600000"]  # until nothing waits any more
        command = [CHROMIUM, *options, "--dump-dom", path.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module")
def written():
    """The pages, once they are."""
    return {}


@pytest.fixture
def pages(written, ledger, tune_folder, train_folder, tmp_path):
    """Each kind of page, with the longest that each may hold; made once."""
    if not written:
        written |= made_pages(ledger, tune_folder, train_folder, tmp_path)
    return written


def made_pages(ledger, tune_folder, train_folder, tmp_path):
    found = {"tune": vivace.report(tune_folder(ledger)).read_text(encoding="utf-8")}
    ledger[-1] |= {
        "training_seconds": {"reference": 200_000.0, "plan": 90_000.0},
        "job_steps": 400,
        "metric_data": "training",
        "loading": "2 cores can load 410 samples a second, the step consumes 1,900: nothing can feed it",
        "plan": {f"a_technique_of_many_words_{i}": {"number": i} for i in range(14)},
    }
    refused = next(record for record in ledger if record.get("status") == "refused")
    refused["techniques"] = {"decoded_cache": {"file": "/" + "a_folder_of_many_words_" * 9}}
    found["long"] = vivace.report(tune_folder(ledger)).read_text(encoding="utf-8")
    for document in (ledger[-2], ledger[-1]["verdict"]):
        document |= {"kept": False, "reason": "update scale is 9.8 envelopes from strict fp32 " * 3}
    found["broken"] = vivace.report(tune_folder(ledger)).read_text(encoding="utf-8")
    (train_folder / PICTURES).write_text(json.dumps(pictures.document(predictions())))
    found["train"] = vivace.report(train_folder).read_text(encoding="utf-8")
    (tmp_path / "profile.html").write_text(profile_page(profile_document()))
    found["profile"] = (tmp_path / "profile.html").read_text(encoding="utf-8")
    (tmp_path / "ranks.html").write_text(profile_page(ranks_document()))
    found["profile of ranks"] = (tmp_path / "ranks.html").read_text(encoding="utf-8")
    vivace.advise("resnet50", target="90M", out=tmp_path / "advice")
    for name in ("a", "b"):
        facts = {
            "steps": 10,
            "stepping_seconds": 2.0,
            "samples_per_second": 320.0,
            "plan": {},
            "job": "train.py",
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(facts))
    vivace.compare(tmp_path / "a", tmp_path / "b", out=tmp_path / "compared")
    found["compare"] = (tmp_path / "compared" / "compare.html").read_text(encoding="utf-8")
    scene = runpy.run_path(str(FOUND))
    found["sweep"] = sweep_page(scene["swept"]())
    found["run"] = run_page(scene["FASTER"], scene["RECORDS"], "python train.py")
    found["long run"] = run_page(scene["LONG_RUN"], scene["RECORDS"] * 9, scene["LONG_COMMAND"])
    as_it_was = scene["LONG_RUN"] | {"outcome": "not_faster", "plan": {}, "reason": scene["SENTENCE"]}
    found["run as it was"] = run_page(as_it_was, [], scene["LONG_COMMAND"])
    found["compress"] = compress_page(scene["compressed"]())
    found["export"] = export_page(scene["exported"]())
    found["broken export"] = export_page(scene["exported"](kept=False))
    found["advise"] = (tmp_path / "advice" / "advise.html").read_text(encoding="utf-8")
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_answer_is_the_first_screen_and_nothing_overflows(pages, dark):
    found = looked_at(pages, dark, MEASURE)
    assert len(found) == len(pages) * len(WIDTHS)
    for page in found:
        where = f"{page['name']} at {page['width']}"
        assert page["overflow"] <= 0, f"{where}: {page['outside']}"
        assert page["outside"] == [], where
        if page["width"] == 1280:
            assert 0 < page["header"] <= FIRST_SCREEN, where
            assert page["height"] <= SCREENS * FIRST_SCREEN, where
        level = max(map(int, re.findall(r"\d+", page["background"])[:3]))
        assert (level < 60) is dark, where
        red, green, blue = map(int, re.findall(r"\d+", page["title"])[:3])
        assert (red > 1.5 * max(green, blue)) is page["name"].startswith("broken"), where


@pytest.fixture(scope="module")
def axe():
    """The source of axe-core, which ships in a Python package, as a script's constant."""
    package = importlib.util.find_spec("axe_core_python")
    if package is None or package.origin is None:
        pytest.skip("axe-core-python is not installed")
    source = json.dumps((Path(package.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
    return "<script>const AXE = " + source.replace("</", "<\\/") + ";</script>"


def serious(page):
    return [one for one in page["violations"] if one["impact"] in ("serious", "critical")]


@pytest.mark.parametrize(("dark", "widths"), [(False, WIDTHS), (True, WIDTHS[:1])], ids=["light", "dark"])
def test_axe_has_no_serious_finding(pages, axe, dark, widths):
    """With all details open; a page on which it must find some is among them. The dark colours are looked at
    in one width: what depends on the width is found in light.
    """
    bad = '<html lang="en"><title>a</title><img src="b.png"><p style="color:#888;background:#777">to read'
    found = looked_at({**pages, "bad": bad}, dark, EXAMINE, axe, widths)
    assert len(found) == len(widths) * (len(pages) + 1)
    assert [{one["id"] for one in serious(page)} for page in found if page["name"] == "bad"] == [
        {"image-alt", "color-contrast"}
    ] * len(widths)
    assert [(page["name"], page["width"], serious(page)) for page in found[: -len(widths)]] == [
        (name, width, []) for name in pages for width in widths
    ]
