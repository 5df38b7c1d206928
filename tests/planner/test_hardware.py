"""Machines described by files."""

import json

import pytest

from unwall.planner import hardware
from unwall.planner.hardware import Hardware, HardwareError, from_dict, load, names


def test_the_machines_of_the_package():
    assert {"8xh100", "8xh200", "dgx-2", "dgx-a100", "gh200", "pc-4090", "h100", "a100-80", "rtx-4090", "l40s"} < set(names())


@pytest.mark.parametrize("name", names())
def test_every_machine_loads_and_goes_round_through_json(name):
    machine = load(name)
    assert from_dict(json.loads(json.dumps(machine.to_dict()))) == machine
    assert machine.notes, "a file says where its numbers come from"
    for dtype in machine.matmul_flops_per_s:
        assert machine.ceilings(dtype).flops_per_s > 0


def test_dgx2_is_the_published_one():
    machine = load("DGX-2")
    ceilings = machine.ceilings("float16")
    assert (machine.devices, machine.device_bytes) == (16, 32 * 2**30)
    assert (machine.host_bytes, machine.disk_bytes) == (1.5e12, 28e12)
    assert machine.host_to_device_bytes_per_s == 12e9
    assert ceilings.host_to_device_bytes_per_s == ceilings.device_to_host_bytes_per_s == 3e9  # all 16 at once
    assert ceilings.disk_read_bytes_per_s == pytest.approx(1.6e9)
    assert ceilings.collective_bytes_per_s == 70e9
    assert ceilings.flops_per_s == 70e12


def test_a_ring_crosses_the_network_once_a_node():
    assert load("dgx-2").with_nodes(32).devices == 512
    assert load("dgx-2").with_nodes(32).ceilings("float16").collective_bytes_per_s == 70e9  # less than the network's 100
    assert load("dgx-a100").with_nodes(2).ceilings().collective_bytes_per_s == 190e9
    assert load("gh200").with_nodes(2).ceilings().collective_bytes_per_s == 47e9
    assert load("gh200").ceilings().collective_bytes_per_s == 0


def test_fewer_devices_have_more_of_the_node_each():
    alone = load("dgx-2").with_nodes(1, devices_per_node=1).ceilings("float16")
    assert alone.host_to_device_bytes_per_s == 12e9
    assert alone.disk_read_bytes_per_s == 25.6e9
    with pytest.raises(HardwareError, match="a node has 16 devices, asked for 17"):
        load("dgx-2").with_nodes(1, devices_per_node=17)


def test_both_ways_of_the_host_link():
    assert load("8xh200").ceilings().host_link_bytes_per_s == 94e9
    assert load("dgx-2").ceilings("float16").host_link_bytes_per_s == 6e9
    assert load("gh200").ceilings().host_link_bytes_per_s is None


def test_how_long_the_drives_last():
    assert load("pc-4090").disk_days(100e9, 10) == pytest.approx(1.2e15 / (10e9 * 86400))
    fields = load("pc-4090").to_dict() | {"disk_endurance_bytes": None}
    assert from_dict(fields).disk_days(100e9, 10) is None


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(load("pc-4090").to_dict() | {"name": "mine", "host_bytes": "128GiB"}))
    assert load(path).host_bytes == load(str(path)).host_bytes == 128 * 2**30


def test_unknown_machine():
    with pytest.raises(HardwareError, match=r"no machine is called 'dgx-9'; there are 8xh100.*or give a \.json file"):
        load("dgx-9")


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not JSON"), ("[]", "expected an object"), ("{}", "name, devices_per_node.* is missing")]
)
def test_a_broken_file(tmp_path, content, message):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(HardwareError, match=message):
        load(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(HardwareError, match="cannot be read: No such file"):
        load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_bytes": -1}, "device_bytes must be a whole number greater than zero, got -1"),
        ({"device_bytes": "24 parsecs"}, "device_bytes: cannot read '24 parsecs'"),
        ({"host_bytes": "-1GiB"}, "host_bytes: cannot read"),
        ({"devices_per_node": 1.5}, "devices_per_node must be a whole number"),
        ({"nodes": 0}, "nodes must be a whole number greater than zero, got 0"),
        ({"nodes": 2}, "has 2 nodes but no network_bytes_per_s"),
        ({"host_memory_bytes_per_s": "fast"}, "host_memory_bytes_per_s must be a number greater than zero, got 'fast'"),
        ({"disk_write_bytes_per_s": 0}, "has disk_bytes but no disk_read_bytes_per_s and disk_write_bytes_per_s"),
        ({"disk_read_bytes_per_s": -1}, "disk_read_bytes_per_s must be a number and not negative"),
        ({"disk_endurance_bytes": 0}, "disk_endurance_bytes must be"),
        ({"matmul_flops_per_s": {}}, "names no dtype"),
        ({"matmul_flops_per_s": 1e12}, "maps a dtype to a rate"),
        ({"matmul_flops_per_s": {"bfloat16": 0}}, r"matmul_flops_per_s\[bfloat16\] must be"),
        ({"notes": "one string"}, "notes is a list of strings"),
        ({"gpu_bytes": 1}, "unknown field gpu_bytes; the fields are name, devices_per_node"),
    ],
)
def test_wrong_fields(change, message):
    with pytest.raises(HardwareError, match=message):
        from_dict(load("pc-4090").to_dict() | change)


def test_a_dtype_the_device_lacks():
    with pytest.raises(HardwareError, match="DGX-2: has no matmul rate for bfloat16; it has float16, float32"):
        load("dgx-2").ceilings()


def test_a_machine_does_not_change():
    rates = {"bfloat16": 1e12}
    machine = Hardware(
        name="x", devices_per_node=1, device_bytes=1, host_bytes=1, host_to_device_bytes_per_s=1, device_to_host_bytes_per_s=1,
        host_memory_bytes_per_s=1, matmul_flops_per_s=rates,
    )  # fmt: skip
    rates["bfloat16"] = 0
    assert machine.flops_per_s("bfloat16") == 1e12
    assert hardware.MACHINES.is_dir()
