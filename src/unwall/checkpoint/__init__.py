"""Weights and states in and out of files."""
