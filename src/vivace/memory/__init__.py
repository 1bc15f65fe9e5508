"""Memory as an input: the peak of a job under a plan, predicted without running, and the plan that fits."""
