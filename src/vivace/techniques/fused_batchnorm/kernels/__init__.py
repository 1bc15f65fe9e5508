"""Triton kernels, each beside the plain-PyTorch reference that says what it computes."""
