"""Tests for techniques, shipped to those who write them: tiny jobs, and the contract of every technique.

In the test file of your own technique, once it is registered or installed as an entry point:

    from vivace.testing import TechniqueContract

    class TestMyTechnique(TechniqueContract):
        technique = MyTechnique

Add ``jobs = {"mine": my_job}`` where the tiny jobs do not suit it; `my_job` is a function that returns a Job.
"""

from vivace.testing.contract import TechniqueContract as TechniqueContract
from vivace.testing.contract import check as check
from vivace.testing.contract import plain_profile as plain_profile
from vivace.testing.contract import variants as variants
from vivace.testing.jobs import TINY_JOBS as TINY_JOBS
