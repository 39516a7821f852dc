"""A thread for each peer: order within it, none between them."""

import threading
import weakref

from push_support import wait_for

from interlock.kv_transfer.transports import lanes as lanes_module
from interlock.kv_transfer.transports.lanes import Lanes


def test_what_holds_up_one_peer_holds_up_no_other_and_order_is_kept_within_each():
    go_on, done = threading.Event(), []

    def run(task):
        if task == ("a", 0):
            go_on.wait()
        done.append(task)

    lanes = Lanes("test", run)
    for number in range(3):
        for peer in "ab":
            lanes.put(peer, (peer, number))
    wait_for(lambda: len(done) == 3)
    assert done == [("b", 0), ("b", 1), ("b", 2)]
    go_on.set()
    lanes.close()
    assert done[3:] == [("a", 0), ("a", 1), ("a", 2)]


def test_a_task_that_raises_ends_neither_its_lane_nor_another():
    done = []

    def run(task):
        if task == "bad":
            raise ValueError(task)
        done.append(task)

    lanes = Lanes("test", run)
    for task in ("bad", "good"):
        lanes.put("peer", task)
    lanes.close()
    assert done == ["good"]


def test_an_idle_thread_ends_and_the_next_task_starts_another(monkeypatch):
    monkeypatch.setattr(lanes_module, "_IDLE_SECONDS", 0.001)
    threads = []
    lanes = Lanes("test", lambda _: threads.append(threading.current_thread()))
    for count in (1, 2):
        lanes.put("peer", count)
        wait_for(lambda count=count: len(threads) == count)
        wait_for(lambda: not threads[-1].is_alive())
    assert threads[0] is not threads[1]
    lanes.close()


def test_nothing_is_run_after_the_end():
    done = []
    lanes = Lanes("test", done.append)
    lanes.close()
    lanes.put("peer", 1)
    lanes.close()
    assert done == []


def test_beyond_a_number_of_peers_some_share_a_thread(monkeypatch):
    monkeypatch.setattr(lanes_module, "_MAX_LANES", 4)
    monkeypatch.setattr(lanes_module, "_SHARED_LANES", 2)
    done, threads = [], set()

    def run(task):
        threads.add(threading.current_thread())
        done.append(task)

    lanes = Lanes("test", run)
    for number in range(50):
        lanes.put(f"peer {number}", number)
    assert len(lanes._queues) <= 4 + 2
    lanes.close()
    assert sorted(done) == list(range(50))
    assert len(threads) <= 4 + 2


def test_beyond_a_number_of_peers_order_is_kept_within_each_and_each_is_busy_by_itself(monkeypatch):
    monkeypatch.setattr(lanes_module, "_MAX_LANES", 2)
    monkeypatch.setattr(lanes_module, "_SHARED_LANES", 1)
    monkeypatch.setattr(lanes_module, "_IDLE_SECONDS", 0.001)
    go_on, done = threading.Event(), []

    def run(task):
        if task == "first":
            go_on.wait()
        done.append(task)

    lanes = Lanes("test", run)
    for peer in range(10, 12):
        lanes.put(peer, peer)
    lanes.put("peer", "first")
    wait_for(lambda: len(lanes._queues) == 1)  # those with a lane to themselves are idle: there is room for another one
    lanes.put("peer", "second")
    lanes.put("other", "other")
    wait_for(lambda: "other" in done)
    assert lanes.is_busy("peer")
    assert "second" not in done
    go_on.set()
    wait_for(lambda: not lanes.is_busy("peer"))
    lanes.close()
    assert done[-2:] == ["first", "second"]
    assert not lanes._lane_of
    assert not lanes._num_tasks
    assert not lanes._queues


def test_a_thread_that_waits_holds_nothing_of_its_last_task():
    class Task:
        pass

    lanes, task = Lanes("test", lambda task: None), Task()
    held = weakref.ref(task)
    lanes.put("peer", task)
    del task
    wait_for(lambda: held() is None)
    lanes.close()
