"""Torch in place of the kernels that need a GPU, one module per subject."""
