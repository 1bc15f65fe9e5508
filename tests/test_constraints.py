"""The pins admit one another on every Python that is supported, also where these tests do not run."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSIONS = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if " :: Python :: 3." in name]


def environment(version):
    """That of this machine under another Python."""
    return {
        **default_environment(),
        "python_version": version,
        "python_full_version": f"{version}.5",
        "extra": "",
    }


def pins(version):
    """Each pinned package with its version."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(one.name): str(one.specifier).removeprefix("==")
        for one in found
        if one.marker is None or one.marker.evaluate(environment(version))
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_no_pin_contradicts_what_an_installed_package_asks_for(version):
    wanted, contradictions = pins(version), []
    for one in importlib.metadata.distributions():
        name = canonicalize_name(one.metadata["Name"])
        if wanted.get(name) != one.version:
            continue  # another version, of other needs
        for requirement in map(Requirement, one.requires or []):
            acts = requirement.marker is None or requirement.marker.evaluate(environment(version))
            pinned = wanted.get(canonicalize_name(requirement.name))
            if acts and pinned and not requirement.specifier.contains(pinned, prereleases=True):
                contradictions.append(f"{name} asks for {requirement}, and {pinned} is pinned")
    assert contradictions == []


@pytest.mark.parametrize("version", VERSIONS)
def test_no_pin_contradicts_the_project(version):
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    asked = [Requirement(text) for group in groups for text in group]
    wanted = pins(version)
    known = [(one, wanted.get(canonicalize_name(one.name))) for one in asked]
    assert [
        f"{one}: {pin}" for one, pin in known if pin and not one.specifier.contains(pin, prereleases=True)
    ] == []
