"""Which replica serves which request, and who gets its end: exactly one for each request.

A request of a lost replica is moved if it has given nothing to its client yet, and fails otherwise.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class RoutedRequest:
    """A request that has not ended.

    Attributes:
        client: the connection that gets its end.
        replica: who serves it.
        payload: what it asks for; not looked at here.
        has_started: whether its client has a part of the answer.
    """

    client: str
    replica: int
    payload: str = ""
    has_started: bool = False


class LostRequests(NamedTuple):
    """What became of the requests of a lost replica: ids, with the new replica or the client.

    Those that were moved have their payload, too.
    """

    moved: list[tuple[str, int, str]]
    failed: list[tuple[str, str]]


class RequestRouter:
    """The requests that have not ended.

    Args:
        max_requests: most requests at once.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._requests: dict[str, RoutedRequest] = {}
        self._load: Counter[int] = Counter()  # requests by replica

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: str) -> bool:
        return request in self._requests

    @property
    def is_full(self) -> bool:
        """Whether another request has to be refused."""
        return len(self._requests) >= self._max_requests

    def add(self, request: str, client: str, replicas: Collection[int], payload: str = "") -> int:
        """Give a request to the replica with the fewest requests; return the replica."""
        replica = self._least_loaded(replicas)
        self._requests[request] = RoutedRequest(client, replica, payload)
        self._load[replica] += 1
        return replica

    def replica_of(self, request: str) -> int | None:
        """Return who serves a request; None if it is unknown or has ended."""
        found = self._requests.get(request)
        return None if found is None else found.replica

    def start(self, request: str, replica: int) -> str | None:
        """Note that a request has given something to its client, so that it is not moved.

        Returns:
            The client; None if another replica serves it now, or if it has ended.
        """
        if self.replica_of(request) != replica:
            return None
        found = self._requests[request]
        found.has_started, found.payload = True, ""
        return found.client

    def end(self, request: str, replica: int) -> str | None:
        """Forget a request that its replica has ended; return its client.

        None if another replica serves it now, or if it has ended: its end has been told.
        """
        if self.replica_of(request) != replica:
            return None
        return self._pop(request).client

    def lose_replica(self, lost_replica: int, others: Collection[int]) -> LostRequests:
        """Move the requests of a replica to `others`, or forget them."""
        lost = LostRequests([], [])
        for name, request in list(self._requests.items()):
            if request.replica != lost_replica:
                continue
            self._pop(name)
            if others and not request.has_started:
                payload = request.payload
                replica = self.add(name, request.client, others, payload)
                lost.moved.append((name, replica, payload))
            else:
                lost.failed.append((name, request.client))
        return lost

    def lose_client(self, client: str) -> list[tuple[str, int]]:
        """Forget the requests of a client that is gone; return them with their replicas."""
        gone = [
            (name, request.replica)
            for name, request in self._requests.items()
            if request.client == client
        ]
        for name, _ in gone:
            self._pop(name)
        return gone

    def _pop(self, request: str) -> RoutedRequest:
        found = self._requests.pop(request)
        self._load[found.replica] -= 1
        return found

    def _least_loaded(self, replicas: Collection[int]) -> int:
        return min(replicas, key=lambda replica: (self._load[replica], replica))
