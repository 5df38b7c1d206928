"""Operators that need less memory than the plain ones. They know nothing of sharding and work without it, too."""

from unwall.nn.linear_cross_entropy import linear_cross_entropy
from unwall.nn.switch import use_linear_cross_entropy

__all__ = ["linear_cross_entropy", "use_linear_cross_entropy"]
