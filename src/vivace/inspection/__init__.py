"""`vivace.inspect`: this machine's devices, versions and limits, and what is missing. Imports no torch."""

from vivace.inspection.gather import inspect as inspect
