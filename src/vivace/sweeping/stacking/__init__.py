"""Runs whose models have equal shapes, trained as one, each with its own settings and random streams."""
