"""Techniques that have never run on the device that they are for."""
