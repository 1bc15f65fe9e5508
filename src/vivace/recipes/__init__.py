"""Ready-made Jobs on real data: each file holds one, under the name `job`."""
