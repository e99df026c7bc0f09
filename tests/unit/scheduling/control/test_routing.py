"""Tests of megatron.scheduling.control.routing."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from megatron.scheduling.control.routing import RequestRouter
from tests.support.examples import examples


def test_a_request_goes_to_the_replica_with_the_fewest() -> None:
    router = RequestRouter(9)
    assert [router.add(name, "a", {1, 0, 2}) for name in "uvwx"] == [0, 1, 2, 0]
    assert router.end("v", 1) == "a"
    assert router.add("y", "a", {0, 1, 2}) == 1


def test_a_request_ends_once_and_only_where_it_is_served() -> None:
    router = RequestRouter(9)
    router.add("u", "a", {0})
    assert router.end("u", 1) is None
    assert router.end("u", 0) == "a"
    assert router.end("u", 0) is None
    assert "u" not in router


def test_a_request_that_has_given_nothing_is_moved_and_others_fail() -> None:
    router = RequestRouter(9)
    for name in ("u", "v", "w"):
        router.add(name, f"client of {name}", {0}, f"text of {name}")
    assert router.start("v", 0) == "client of v"
    assert router.start("w", 1) is None  # a replica that does not serve it
    lost = router.lose_replica(0, {1, 2})
    assert lost.moved == [("u", 1, "text of u"), ("w", 2, "text of w")]
    assert lost.failed == [("v", "client of v")]
    assert router.lose_replica(2, ()).failed == [("w", "client of w")]
    assert router.replica_of("u") == 1


def test_the_requests_of_a_client_that_is_gone_are_forgotten() -> None:
    router = RequestRouter(2)
    router.add("u", "a", {0})
    router.add("v", "b", {1})
    assert router.is_full
    assert router.lose_client("b") == [("v", 1)]
    assert not router.is_full
    assert len(router) == 1


class Requests(RuleBasedStateMachine):
    """A router beside a set of the requests that have no end yet."""

    names = st.sampled_from("uvwx")
    replicas = st.integers(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.router = RequestRouter(99)
        self.open: dict[str, str] = {}

    @rule(name=names, client=st.sampled_from("ab"))
    def add(self, name: str, client: str) -> None:
        if name not in self.open:
            self.router.add(name, client, {0, 1, 2})
            self.open[name] = client

    @rule(name=names, replica=replicas)
    def start(self, name: str, replica: int) -> None:
        self.router.start(name, replica)

    @rule(name=names, replica=replicas)
    def end(self, name: str, replica: int) -> None:
        is_served = self.router.replica_of(name) == replica
        client = self.router.end(name, replica)
        assert client == (self.open.pop(name) if is_served else None)

    @rule(replica=replicas, others=st.sets(replicas))
    def lose_replica(self, replica: int, others: set[int]) -> None:
        lost = self.router.lose_replica(replica, others - {replica})
        for name, client in lost.failed:
            assert self.open.pop(name) == client
        for name, other, _ in lost.moved:
            assert self.router.replica_of(name) == other != replica

    @rule(client=st.sampled_from("ab"))
    def lose_client(self, client: str) -> None:
        for name, _ in self.router.lose_client(client):
            assert self.open.pop(name) == client
        assert client not in self.open.values()

    @invariant()
    def every_request_without_an_end_is_served(self) -> None:
        assert len(self.router) == len(self.open)
        assert all(name in self.router for name in self.open)


TestRequests = Requests.TestCase
TestRequests.settings = examples(60)
