"""A step on a virtual clock.

[Note: the same decisions]
The engine's own executor decides what is fetched, dropped and reduced, and its own ledger counts the device's bytes. Only what
it drives differs ([Note: two backends] in schedule/backend.py): the groups and gradients here put work into the queues of a
clock instead of moving bytes.
"""
