"""When bytes move: trace, residency (pure decisions) and the executor that acts on them."""
