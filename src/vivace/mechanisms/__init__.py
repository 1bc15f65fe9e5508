"""What several techniques stand on: blocks of a model, recomputing, pictures, graphs, half precision."""
