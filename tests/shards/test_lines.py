"""What happens in a process once another machine has vanished. That it is noticed: tests/parallel/test_vanished_machine.py."""

import socket
import weakref

import torch.distributed as dist

from unwall.shards.lines import Line, Lines, cut_off, ends_of, is_silence, plain
from unwall.shards.looking import _known
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


class Asked:
    """A store that notes what it is asked for, and may be interrupted there."""

    def __init__(self):
        self.values, self.asked, self.before = {"who/1": "node1/boot/namespace 5 7"}, [], lambda key: None

    def check(self, keys):
        self.asked += keys
        self.before(keys[0])
        return keys[0] in self.values

    def get(self, key):
        return self.values[key].encode()

    def set(self, key, text):
        self.values[key] = text


class AskedForMany(Asked):
    def check(self, keys):
        self.asked.append(keys[0])
        return all(key in self.values for key in keys)

    def multi_get(self, keys):
        self.asked.append(keys[0])
        return [self.get(key) for key in keys]


def test_where_many_ranks_run_is_asked_at_once():
    watch = Watch(store := AskedForMany(), 0, 100)
    _known.discard(watch)
    store.values |= {f"who/{rank}": f"node{rank}/boot/namespace 5 7" for rank in range(1, 99)}
    for last, expected in (("", 0), ("node99/boot/namespace 5 7", 99)):
        store.values |= {"who/99": last} if last else {}
        store.asked.clear()
        watch.look()
        assert len(store.asked) < 10
        assert len(watch._processes) == expected
    assert watch.dead() == []


def watched(store):
    """Looked at here, not by the thread."""
    watch = Watch(store, 0, 2)
    _known.discard(watch)
    assert watch.dead() == []
    return watch


def test_no_store_is_asked_when_a_machine_vanishes():
    """The one that serves it may have vanished at the same moment: the thread of the lines would wait for ever."""
    watch = watched(store := Asked())
    store.asked.clear()
    watch.lost("node1/boot/namespace", {"10.0.0.1"})
    assert store.asked == []
    assert "rank 1 has vanished" in watch.end


def test_an_end_that_is_found_while_the_store_is_asked_stays():
    watch = watched(store := Asked())
    store.before = lambda key: watch.lost("node1/boot/namespace", {"10.0.0.1"}) if key == "end" else None
    watch.look()
    assert "rank 1 has vanished" in watch.end


def test_beside_a_store_at_the_loopback_a_process_listens_at_all_addresses():
    port = (lines := Lines()).listen("127.0.0.1")
    socket.create_connection(("127.77.12.35", port), timeout=60).close()
    assert lines.listen("127.0.0.1") == port


class Told(list):
    """Who has vanished."""

    __hash__ = object.__hash__

    def lost(self, machine, addresses):
        self.append(machine)


def test_containers_with_one_address_vanish_together():
    lines, told = Lines(), [Told(), Told(), Told()]
    drawn = [Line(f"container{number}", f"127.77.12.{36 + number // 2}", socket.socket()) for number in range(3)]
    for number, (line, concerned) in enumerate(zip(drawn, told, strict=True)):
        lines._drawn[number] = line
        lines._concerned[line.machine] = weakref.WeakSet([concerned])
    lines._lost(lines._drawn.pop(0))
    assert told == [["container0"], ["container1"], []]
    for line in drawn:
        line.connection.close()
