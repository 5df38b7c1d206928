"""The rank processes that serve all seeds of a tool."""

from ranks import RankPool

POOLS = {}


def pool_of(world):
    """One rank has a process of its own as well: one that hangs is ended."""
    if world not in POOLS:
        POOLS[world] = RankPool(world, backend="gloo" if world > 1 else None)
    return POOLS[world]


def close():
    for pool in POOLS.values():
        pool.close()
