"""A job opened under a plan: an object with `step(batch)`."""
