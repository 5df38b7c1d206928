"""The plan of a case of ``fuzz.ranks``: with the smallest budgets that are accepted, times what the case says."""

from fuzz.blocks import build
from unwall.plans import Plan, PlanError
from unwall.shards.arrange import arrange
from unwall.shards.build import Room

FIELDS = ("device_bytes", "host_bytes", "disk_bytes")
"""In the order in which a refusal counts the tiers."""


def plan_of(case, folder):
    fields = plain_fields(case, folder)
    if not case.places.is_tight:
        return Plan(**fields)
    fields["passes"] = passes_to_announce(case)
    shares = {"device_bytes": case.places.device_share, "host_bytes": case.places.host_share}
    shares = {name: share for name, share in shares.items() if share is not None}
    least = smallest_budgets(case, fields, dict.fromkeys(shares, 1))
    return Plan(**fields, **{name: int(least_bytes * shares.get(name, 1.0)) for name, least_bytes in least.items()})


def plain_fields(case, folder):
    """Without budgets."""
    fields = dict(case.places.tiers, stage=case.places.stage, activations=case.places.activations, tiles=case.tiles)
    fields |= {"compute_dtype": case.dtype, "reduce_dtype": case.reduce_dtype, "reduce_op": case.reduce_op}
    if "disk" in fields.values() or case.places.host_share is not None:
        fields["disk"] = folder
    return fields


def passes_to_announce(case):
    """How many backward calls may add up: a graph may be gone through twice, and a step may leave its gradients to the next."""
    most = 1 if case.most_passes == 1 else 2 * case.most_passes
    adds_up = any(step.action == "carry" or step.mode == "retained" for step in case.script)
    return max(most, 8) if adds_up else most


def smallest_budgets(case, fields, budgets):
    """Budgets of one byte, each raised to what the refusal names, until the plan is accepted."""
    for _ in range(8):
        try:
            room = Room(budgets.get("device_bytes"), budgets.get("host_bytes"))
            arrange(build(case.shape, case.seed), Plan(**fields, **budgets), case.world, room)
        except PlanError as refusal:
            tier, needed_bytes = refusal.lack
            if needed_bytes <= budgets.get(FIELDS[tier], needed_bytes):
                raise
            budgets[FIELDS[tier]] = needed_bytes
        else:
            return budgets
    raise AssertionError(f"refused again and again: {budgets}")
