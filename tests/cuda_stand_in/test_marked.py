"""The tests that are marked `gpu`, wherever they stand, pass on a stand-in that computes."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MARKED = sorted(p for p in TESTS.rglob("test_*.py") if "pytest.mark.gpu" in p.read_text())
PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.parametrize("file", [str(p.relative_to(TESTS)) for p in MARKED if p != Path(__file__)])
def test_those_of_a_file(stand_in, file):
    words = ("-q", "-m", "gpu", "-p", "no:cacheprovider", TESTS / file)
    done = stand_in.run(PYTEST, *words, computes=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout
