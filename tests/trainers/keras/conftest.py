"""Keras chooses its backend when it is imported."""

import os

os.environ["KERAS_BACKEND"] = "torch"
