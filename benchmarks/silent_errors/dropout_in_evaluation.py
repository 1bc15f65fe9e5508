# expect: different
"""Attention drops weights in evaluation mode too.

Transformers' pull request 33844 (`transformers-33844` of TrainCheck's evaluation).
"""

import dataclasses

from _words import Reader, job

edited = dataclasses.replace(job, model=lambda: Reader(dropping=lambda module: True))
