"""What happens in a process once another machine has vanished. That it is noticed: tests/parallel/test_vanished_machine.py."""

import socket

import torch.distributed as dist

from unwall.shards.lines import cut_off, ends_of, is_silence, plain
from unwall.shards.watch import Watch


def connected(address):
    """Both ends of a connection, and the socket that listens."""
    listener = socket.create_server((address, 0))
    near = socket.create_connection(listener.getsockname(), timeout=60)
    far, _ = listener.accept()
    return near, far, listener


def test_whatever_waits_for_a_machine_that_vanished_is_woken():
    """Only connections to its address."""
    lost, kept = connected("127.77.12.34"), connected("127.0.0.1")
    try:
        assert cut_off({"127.77.12.34"}) >= 1
        assert lost[0].recv(1) == b""
        assert not is_silence(lost[0])
        kept[1].send(b"x")
        assert kept[0].recv(1) == b"x"
    finally:
        for each in (*lost, *kept):
            each.close()


def test_the_ranks_of_a_machine_that_vanished_are_named():
    store = dist.HashStore()
    store.set("who/1", "node1/boot/namespace 5 7")
    store.set("who/2", "node2/boot/namespace 5 7")
    watch = Watch(store, 0, 3)
    watch.dimension = "dimension 'dp' of the mesh"
    assert watch.dead() == []
    watch.lost("node2/boot/namespace", {"10.0.0.2"})
    assert watch.dead() == [2]
    named = "rank 2 of dimension 'dp' of the mesh has vanished: its machine (node2) does not answer any more"
    assert watch.end.startswith(named)
    watch.names = ["a", "b", "rank 2 of the mesh (dp 1, tp 0)"]
    assert "rank 2 of the mesh (dp 1, tp 0) has vanished" in watch.describe_others()


def test_addresses():
    assert ends_of(dist.PrefixStore("some", dist.HashStore())) is None
    assert (plain("::ffff:10.0.0.1"), plain("fe80::1%eth0"), plain("10.0.0.1")) == ("10.0.0.1", "fe80::1", "10.0.0.1")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    assert ends_of(dist.PrefixStore("some", store)) == ("127.0.0.1", "127.0.0.1")
