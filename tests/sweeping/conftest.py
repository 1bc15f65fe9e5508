import importlib.util
import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).parent / "jobs.py"


@pytest.fixture(scope="session")
def jobs():
    """The module of jobs, as a person's file would be loaded."""
    name = "sweeping_jobs"
    spec = importlib.util.spec_from_file_location(name, JOBS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
