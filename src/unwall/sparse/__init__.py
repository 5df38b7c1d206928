"""Sparse attention: which tokens attend to which, and an attention that computes nothing else.

``patterns`` says who attends to whom, ``attention`` computes it, ``use`` switches a transformers model.
"""

from unwall.sparse.attention import attention
from unwall.sparse.patterns import bigbird, dilated, fixed, from_deepspeed, local_sliding_window, longformer, variable, window
from unwall.sparse.switch import use

__all__ = [
    "attention",
    "bigbird",
    "dilated",
    "fixed",
    "from_deepspeed",
    "local_sliding_window",
    "longformer",
    "use",
    "variable",
    "window",
]
