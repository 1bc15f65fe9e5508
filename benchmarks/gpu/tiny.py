"""The tiny jobs that Vivace ships for tests, by name."""

from vivace.testing import TINY_JOBS

globals().update(TINY_JOBS)
