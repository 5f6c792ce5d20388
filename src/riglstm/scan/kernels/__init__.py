"""The kernels of the `triton` backend, in Triton's language."""
