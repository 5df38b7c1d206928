"""Checkpoints: what a training is, in files that any number of ranks under any plan can read."""
