"""The host's side of the `triton` backend: sizes, buffers, launches, gradients."""
