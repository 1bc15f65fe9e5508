"""Paired, interleaved timing in child processes."""
