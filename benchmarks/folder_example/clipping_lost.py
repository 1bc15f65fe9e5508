# expect: different
"""The edit forgets to clip the gradients."""

import dataclasses

from _table import job

edited = dataclasses.replace(job, on_gradients=None)
