"""Trees of tensors, data loaders, modules, optimizers and random streams, for everybody."""
