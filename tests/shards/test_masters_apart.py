"""Masters on the host where the rest of their groups' state is on disk: [Note: masters] in shards/placement.py."""

from dataclasses import replace

from offload import Setup, build, differing, few_chunks, outcome, over_budget, smallest, step

import unwall
from unwall.plans import Plan
from unwall.shards import working
from unwall.shards.arrange import arrange
from unwall.shards.build import Room
from unwall.shards.home import HOST, MASTER_KEPT, SPILLED, Sizes, disk_bytes_of, host_bytes_of
from unwall.shards.placement import place
from unwall.shards.working import host_working_bytes

NUMEL = 1 << 20
SETUP, WIDTH = Setup(clip=0.5, blocks=3), 256


def group(numel: int, master: int = 2, trainable: bool = True) -> Sizes:
    """A group with AdamW's states, and a master of so many bytes per element."""
    return Sizes(
        shard_bytes=2 * numel,
        flat_bytes=2 * numel,
        state_bytes=(master + 8 * trainable) * numel,
        grad_bytes=2 * numel * trainable,
        grad_flat_bytes=2 * numel * trainable,
        grad_part_bytes=0,
        widening_bytes=2 * numel * trainable,
        whole=True,
        trainable=trainable,
        own_numel=numel,
        master_bytes=master * numel,
    )


def needed(sizes, homes):
    return sum(map(host_bytes_of, sizes, homes)) + host_working_bytes(sizes, homes)


def spare_for(sizes, homes):
    elements = working.chunk_elements(sizes, homes)
    return working.CHUNKS_IN_FLIGHT * max(map(working.chunk_bytes, sizes, homes, [elements] * len(sizes)))


def test_what_is_left_of_the_host_goes_to_masters():
    sizes, plan = [group(NUMEL)] * 4, Plan(disk="/fast")
    spilled = [SPILLED] * 4
    least = needed(sizes, spilled) + spare_for(sizes, spilled)
    for count in range(3):  # with more there is room for a whole group
        budget = least + count * 2 * NUMEL
        assert place(sizes, plan, 0, budget) == [MASTER_KEPT] * count + [SPILLED] * (4 - count)
        assert place(sizes, plan, 0, budget + 2 * NUMEL - 1) == [MASTER_KEPT] * count + [SPILLED] * (4 - count)
    homes = place(sizes, plan, 0, needed(sizes, [HOST, *spilled[1:]]) + spare_for(sizes, spilled) + 2 * NUMEL)
    assert homes == [HOST, MASTER_KEPT, SPILLED, SPILLED]  # whole groups first
    assert place(sizes, plan, 0, needed(sizes, [HOST] * 4)) == [HOST] * 4


def test_a_master_stays_with_its_state_where_the_plan_says_so_and_where_there_is_none():
    sizes = [group(NUMEL)] * 4
    budget = needed(sizes, [SPILLED] * 4) + spare_for(sizes, [SPILLED] * 4) + 3 * NUMEL
    assert place(sizes, Plan(disk="/fast"), 0, budget)[0] == MASTER_KEPT
    assert place(sizes, Plan(params="host", optimizer="disk", disk="/fast"), 0, budget) == [SPILLED] * 4
    fp32 = [group(NUMEL, master=0)] * 4
    assert place(fp32, Plan(disk="/fast"), 0, budget) == [SPILLED] * 4
    frozen = [group(NUMEL, trainable=False)] * 2
    assert MASTER_KEPT not in place(frozen, Plan(disk="/fast"), 0, needed(frozen, [SPILLED] * 2) + 5 * NUMEL // 2)


def test_every_byte_of_a_master_is_counted_once():
    size = group(NUMEL)
    states = size.shard_bytes + size.state_bytes + size.grad_bytes
    assert host_bytes_of(size, MASTER_KEPT) + disk_bytes_of(size, MASTER_KEPT) == states
    assert disk_bytes_of(size, SPILLED) - disk_bytes_of(size, MASTER_KEPT) == size.master_bytes
    assert MASTER_KEPT.on_disk
    assert MASTER_KEPT.tier == "host"


def fields_with_masters(folder):
    """Budgets that keep masters of some groups on the host while others have theirs on disk; and what each group takes then."""
    fields = {"compute_dtype": SETUP.dtype, "disk": folder}
    fields["device_bytes"] = smallest(model_of(), "device_bytes", **fields)
    _, sizes, _ = arrange(model_of(), Plan(**fields), 1, Room(fields["device_bytes"]))
    least = needed(sizes, [SPILLED] * len(sizes))
    for budget in range(least, 2 * least, 1 << 14):
        if {MASTER_KEPT, SPILLED} <= set(place(sizes, Plan(**fields), fields["device_bytes"], budget)):
            return {**fields, "host_bytes": budget}, sizes
    raise AssertionError("no budget keeps masters alone")


def model_of():
    return build(blocks=SETUP.blocks, width=WIDTH)


def started(fields):
    model = model_of()
    unwall.shard(model, Plan(**fields))
    return model, unwall.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=SETUP.clip)


def test_the_same_bits_through_steps_moves_and_a_checkpoint(tmp_path):
    with few_chunks():
        fields, sizes = fields_with_masters(tmp_path)
        elsewhere = {**fields, "params": "host", "optimizer": "host", "host_bytes": None}  # the same groups and tiles
        expected, other = started(elsewhere)
        model, optimizer = started(fields)
        engine = unwall.api.engine(model)
        homes = [each.home for each in engine.groups]
        assert {MASTER_KEPT, SPILLED} <= set(homes)
        assert unwall.stats(model).tiers["disk"].live_bytes == sum(map(disk_bytes_of, sizes, homes))
        for number in range(2):
            step(expected, other, SETUP, number, WIDTH)
            step(model, optimizer, SETUP, number, WIDTH)
        assert over_budget(model) == []
        assert differing(outcome(expected, other), outcome(model, optimizer)) == []

        plan = engine.plan
        unwall.move(model, replace(plan, params="disk", optimizer="disk"))
        step(expected, other, SETUP, 2, WIDTH)
        step(model, optimizer, SETUP, 2, WIDTH)
        unwall.move(model, plan)
        assert [each.home for each in engine.groups] == homes
        for each in engine.groups:
            tiers = {store.tier for key, store in each.states.items() if key.owner == 0}
            assert tiers == {each.home.master}
        unwall.save(tmp_path / "saved", model, optimizer)
        wanted = outcome(model, optimizer)
        assert differing(outcome(expected, other), wanted) == []

        step(model, optimizer, SETUP, 3, WIDTH)
        unwall.load(tmp_path / "saved", model, optimizer)
        assert differing(wanted, outcome(model, optimizer)) == []
