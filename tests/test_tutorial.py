"""The tutorial's two files train the same model, and do what the page says."""

import re
from pathlib import Path

import pytest
import torch

import vivace
from vivace.job import load

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, CHINESE = ((DOCS / name).read_text(encoding="utf-8") for name in ("tutorial.md", "tutorial.zh-CN.md"))
BLOCK = re.compile(r"```\w+\n.*?```", re.DOTALL)
PLAIN, JOB = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def test_the_chinese_tutorial_has_the_same_code_and_headings():
    assert BLOCK.findall(CHINESE) == BLOCK.findall(PAGE)
    headings = [re.findall(r"^(#+ (?:\d\.)?)", BLOCK.sub("", page), re.MULTILINE) for page in (PAGE, CHINESE)]
    assert headings[0] == headings[1]
    assert "(tutorial.md)" in CHINESE
    assert "(tutorial.zh-CN.md)" in PAGE


def test_the_job_is_the_script(folder):
    """Same data, network, loss and optimizer, part by part."""
    script: dict = {}
    exec(PLAIN.replace("range(10)", "range(0)").replace("print(", "bool("), script)
    job = load(f"{folder / 'job.py'}:job")
    assert job.epochs == int(re.search(r"range\((\d+)\)", PLAIN)[1])
    model = job.model()
    assert str(model) == str(script["model"])
    ours, theirs = job.optimizer(model), script["optimizer"]
    assert (type(ours), ours.defaults) == (type(theirs), theirs.defaults)
    mine, own = job.data(), script["loader"]
    assert all(map(torch.equal, mine.dataset.tensors, own.dataset.tensors))
    assert (mine.batch_size, type(mine.sampler)) == (own.batch_size, type(own.sampler))
    model.load_state_dict(script["model"].state_dict())
    batch, target = next(iter(own))
    expected = torch.nn.functional.cross_entropy(script["model"](batch), target)
    assert torch.equal(job.loss(model, (batch, target)), expected)
    held_out = job.metric(model, job.validation())
    right = script["model"](script["images"][1500:]).argmax(1) == script["labels"][1500:]
    assert held_out == pytest.approx(float(right.float().mean()))


def test_the_job_trains_and_its_weights_are_plain(folder):
    run = vivace.train(f"{folder / 'job.py'}:job", out=folder / "run", max_steps=24)
    assert (run.steps, run.metric_data) == (24, "validation")
    weights = torch.load(folder / "run" / "model.pt", weights_only=True)
    load(f"{folder / 'job.py'}:job").model().load_state_dict(weights)


def test_the_diff_shows_lines_of_both():
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    for line in diff.splitlines():
        text = line[1:].strip()
        if not text or "..." in text:
            continue
        where = PLAIN if line.startswith("-") else JOB
        assert text in where


def test_a_file_alone_stands_for_its_job(folder):
    assert load(str(folder / "job.py")).epochs == 10
    with pytest.raises(vivace.InputError, match="is a script without a Job"):
        load(str(folder / "plain.py"))
