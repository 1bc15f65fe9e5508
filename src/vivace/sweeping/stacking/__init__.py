"""Runs whose models have equal shapes, trained together as one, each with its own settings and random streams."""
