"""`vivace sweep` on the command line."""

import json
from pathlib import Path

import pytest

from vivace.pages.answer import in_letters

JOBS = Path(__file__).parent / "jobs.py"


@pytest.fixture
def command(begin_command):
    """``(arguments...) -> (exit code, standard output, standard error)``."""

    def run(*arguments):
        code, output, errors = begin_command(*arguments).end(200)
        assert code is not None, "the command hangs"
        return code, output, errors

    return run


def test_a_sweep_ends_with_a_document_and_twelve_lines(command):
    arguments = ["sweep", f"{JOBS}:job", "lr=0.01..1:log", "epochs=1", "--trials", "3", "--seeds", "0"]
    code, output, errors = command(*arguments, "--json", "--against", "parameters")
    assert code == 0, errors
    document = json.loads(output)
    assert len(document["trials"]) == 3
    assert in_letters(document["packing"]["sentence"]) in " ".join(errors.split())
    assert document["objectives"] == ["metric", "parameters"]
    assert document["front"]
    assert "No other trial beats these in both: trial" in errors
    assert '<td data-label="parameters">83 parameters</td>' in Path(document["page_path"]).read_text()
    assert all(trial["costs"]["parameters"] == 83 for trial in document["trials"])
    shown = errors[errors.index("in the search") :].splitlines()
    assert len(shown) <= 12
    assert any("best.py:job" in line and "vivace train" in line for line in shown)
    code, output, errors = command(*arguments, "--json")
    assert code == 2
    assert "already holds a sweep" in json.loads(output)["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["lr=0..1", "--against", "money"], "against seconds or parameters, not 'money'"),
        (["lr=5"], "nothing is searched"),
        (["lr=0..1", "--transfer", "wide"], "no parameter 'wide'; did you mean 'width'?"),
        (["lr=0..1", "--plan", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(command, arguments, sentence):
    code, output, errors = command("sweep", f"{JOBS}:job", *arguments)
    assert code == 2
    assert output == ""
    told = [line for line in errors.splitlines() if line.startswith("vivace: ")]
    assert len(told) == 1
    assert sentence in told[0]
    assert "Traceback" not in errors
