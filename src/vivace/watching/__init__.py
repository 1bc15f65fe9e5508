"""A training whose steps are watched while it runs."""
