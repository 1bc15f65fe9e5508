"""A person's command, as it is started with hooks of ours in it."""

import pytest

from vivace.errors import InputError
from vivace.processes.scripts import resolved


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["-I", "train.py"], "-I"),
        (["-u", "-W", "ignore", "-OE", "train.py"], "-E"),
        (["-X", "dev", "-Sc", "pass"], "-S"),
    ],
)
def test_a_python_that_passes_over_our_hooks_is_refused(words, option):
    with pytest.raises(InputError, match=f"leave {option} out"):
        resolved(["python", *words])


@pytest.mark.parametrize(
    "words",
    [
        ["python", "-sBu", "train.py", "-I"],
        ["python", "-Werror::SyntaxWarning", "-XE", "train.py"],
        ["python", "-W", "-I", "train.py"],
        ["python", "-mtrain.EIS", "-I"],
        ["python", "-c", "pass", "-S"],
        ["python", "-", "-E"],
        ["echo", "-E"],
    ],
)
def test_options_of_a_script_are_its_own(words):
    assert resolved(words)[1:] == words[1:]
