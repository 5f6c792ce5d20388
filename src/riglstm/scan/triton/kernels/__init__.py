"""Everything of the `triton` backend that is written in the language of Triton."""
