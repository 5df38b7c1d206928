"""Tensor, pipeline and 3-D parallelism: torch does the parallelism, unwall the states under it."""
