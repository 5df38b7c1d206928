"""unwall inside other trainers: ``unwall.integrations.transformers``, ``.accelerate`` and ``.lightning``.

Each is imported by its own name and needs its own library; ``import unwall`` imports none of them.
"""
