from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.kv_transfer.clock import VirtualClock
from interlock.kv_transfer.leases import LeaseTable

EVENTS = st.one_of(
    st.tuples(st.sampled_from(["grant", "extend", "done"]), st.sampled_from("abc")),
    st.tuples(st.just("advance"), st.integers(1, 12)),
    st.tuples(st.just("take"), st.none()),
)


@given(st.lists(EVENTS, max_size=40))
@settings(max_examples=300, deadline=None)
def test_every_lease_ends_exactly_once(events):
    clock = VirtualClock()
    leases = LeaseTable(clock, 10.0)
    ends: dict[str, float] = {}
    early: set[str] = set()
    due: set[str] = set()
    granted: set[str] = set()

    def expire():
        for name in [name for name, end in ends.items() if end <= clock.now()]:
            del ends[name]
            due.add(name)

    for kind, value in events:
        if kind == "grant" and value not in granted:
            granted.add(value)
            leases.grant(value, "a request")
            if value in early:
                due.add(value)
            else:
                ends[value] = clock.now() + 10.0
        elif kind == "extend":
            alive = leases.extend([value])
            if ends.get(value, 0.0) > clock.now():
                ends[value] = clock.now() + 10.0
                assert alive == {value: ends[value]}
            else:
                assert alive == {}
        elif kind == "done":
            leases.done(value)
            if value in ends:
                del ends[value]
                due.add(value)
            elif value not in granted:
                early.add(value)
        elif kind == "advance":
            clock.advance(float(value))
        elif kind == "take":
            expire()
            assert leases.take_ended() == due
            due.clear()
    clock.advance(100.0)
    expire()
    assert leases.take_ended() == due
    assert leases.held == 0


def test_notices_for_unknown_requests_are_bounded_and_counted():
    leases = LeaseTable(VirtualClock(), 10.0)
    for i in range(5000):
        leases.done(f"r{i}")
    assert leases.unknown_notices == 5000 - 4096
