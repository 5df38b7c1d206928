"""Seeded search for silent defects: random models, plans and training loops, and what must hold for all of them.

A tool for developers, not part of the tests: ``make fuzz``, or one of

- ``fuzz.ranks``: any training loop over several ranks, with one plan and another, and with plain PyTorch;
- ``fuzz.resume``: one process saves, loads and trains on, under budgets: the bits of the run that did not stop;
- ``fuzz.elastic``: the same over ranks, and loaded by another number of them at another stage;
- ``fuzz.moves``: moved, thawed and grown models keep to the budgets that the refusals name;
- ``fuzz.planned``: what ``unwall.plan`` gives is accepted by ``unwall.shard`` and stays within its budgets;
- ``fuzz.trained``: ``unwall train``, stopped and started again, comes to the same losses and weights.

A seed draws the same case in every process.
"""
