"""Both READMEs have one order: what it is, how to get it, the code, the symptoms, then what was measured."""

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
CHAPTERS = {
    ENGLISH: [
        "Install, and two commands",
        "Eleven lines, and three commands",
        "From the symptom to the command",
        "Measured",
    ],
    CHINESE: ["安装和两条命令", "十一行代码和三条命令", "从问题到命令", "实测结果"],
}
BEGINS_ANEW = re.compile(r"[#|!<]|- |```")


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CHAPTERS)
def test_the_order_is_that_in_which_a_newcomer_asks(name):
    head, *_ = text_of(name).partition("\n## ")
    _, sentence, picture, _ = re.split(r"\n\n", head, maxsplit=3)
    assert "\n" not in sentence
    assert picture.startswith("![")
    assert re.findall(r"^## (.*)$", text_of(name), re.MULTILINE)[:4] == CHAPTERS[name]
    install = text_of(name).partition(f"## {CHAPTERS[name][0]}\n")[2].partition("\n## ")[0]
    for command in ("pip install .", "scripts/setup torch", "scripts/demo", "scripts/test"):
        assert f"$ {command}" in install
    lines = text_of(name).partition(f"## {CHAPTERS[name][1]}\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\$ vivace (\w+) train.py:job", lines, re.MULTILINE) == ["profile", "tune", "train"]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        (ENGLISH, r"(\d+) public scripts, .*?: (\d+) faster .*?, (\d+) slower"),
        (CHINESE, r"(\d+) 个未经修改的公开脚本.*?更快 (\d+) 个.更慢 (\d+) 个"),
    ],
)
def test_what_is_said_first_of_public_scripts_is_what_was_measured(name, counts):
    head, _, rest = text_of(name).partition("\n## ")
    table = rest.partition("<!-- scripts -->")[2]
    said = next(line for line in head.split("\n") if "`vivace run -- python train.py`" in line)
    scripts, faster, slower = re.search(counts, table).groups()
    best = re.search(r"\| (\d\.\d\dx) \(", table)[1]
    assert re.findall(r"\d[\d.]*x?", said) == [scripts, faster, best, slower]


@pytest.mark.parametrize("name", CHAPTERS)
def test_what_is_said_first_of_one_liners_is_what_was_measured(name):
    head, _, rest = text_of(name).partition("\n## ")
    said = next(line for line in head.split("\n") if "`pytorch-autotune`" in line)
    row = next(line for line in rest.split("\n") if "Fabric" in line and "/peer/" in line)
    jobs = [float(ratio) for ratio in re.findall(r"`\w+` (\d\.\d\d)\b", row)]
    mean = re.search(r"(\d\.\d\d)x \(", row)[1]
    assert sorted(re.findall(r"\d\.\d\d", said)) == sorted([mean, f"{min(jobs):.2f}", f"{max(jobs):.2f}"])
    assert re.search(rf"\b{len(jobs)} (jobs|个任务)", said)


@pytest.mark.parametrize("name", CHAPTERS)
def test_what_is_said_first_of_own_kernels_is_what_was_measured(name):
    head, _, rest = text_of(name).partition("\n## ")
    said = next(line for line in head.split("\n") if "ConvNeXt" in line)
    rows = [line for line in rest.split("\n") if "/own_kernels/" in line and "depthwise" in line]
    measured = {}
    for row in rows:
        ratios = [float(ratio) for ratio in re.findall(r"(\d\.\d\d)x \(", row)]
        measured["AMD" if "AMD" in row else "Intel"] = [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]
    told = {kind: re.findall(r"\d\.\d\d", said.partition(kind)[2])[:2] for kind in ("AMD", "Intel")}
    assert told == measured


def test_the_code_has_as_many_lines_as_is_said():
    for name, said in ((ENGLISH, "these eleven lines"), (CHINESE, "这十一行")):
        code = re.findall(
            r"^```python\n(import torch, vivace\n.*?)^```", text_of(name), re.MULTILINE | re.DOTALL
        )
        assert [len(list(filter(None, lines.split("\n")))) for lines in code] == [11]
        assert said in text_of(name)


def test_both_have_the_same_code_and_the_same_commands():
    blocks = {name: re.findall(r"^```(\w+)\n", text_of(name), re.MULTILINE) for name in CHAPTERS}
    assert blocks[ENGLISH] == blocks[CHINESE]
    rows = {name: set(re.findall(r"`(vivace [^`]+)`", text_of(name))) for name in CHAPTERS}
    assert rows[ENGLISH] == rows[CHINESE]


def test_a_paragraph_in_chinese_is_one_line():
    """A line's end would be a space between two characters."""
    lines, code, broken = text_of(CHINESE).split("\n"), False, []
    for before, line in itertools.pairwise(lines):
        code ^= before.startswith("```")
        if not code and before and line and not BEGINS_ANEW.match(line) and not BEGINS_ANEW.match(before[:3]):
            broken.append(line)
    assert broken == []
