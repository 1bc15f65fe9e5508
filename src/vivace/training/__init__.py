"""Training a job to its end: the loop, checkpoints, resuming, ranks, and surviving faults."""
