"""Ray Serve's router, by our board. Ray pickles this module by value, so it holds no state and nothing else."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from hasten.replicas.routing import board_of


class HeldBlocksRouter(RequestRouter):
    """Chooses the replica that the board ranks first, and records the choice on the board."""

    queue_len_response_deadline_s = max_queue_len_response_deadline_s = 5.0

    def initialize_state(self, *, board: str) -> None:
        self._board = board_of(board)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._board.replace(replica.replica_id.unique_id for replica in replicas)
        for replica in replicas:
            if replica.routing_stats:
                self._board.report(replica.replica_id.unique_id, replica.routing_stats)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._board.replace(name for name in self._board.states if name != replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or "ask" not in pending_request.kwargs:
            return [candidate_replicas]
        ask, there = pending_request.kwargs["ask"], {one.replica_id.unique_id: one for one in candidate_replicas}
        names = [name for name in self._board.rank(ask) if name in there]
        if names:  # counted now: others come before the replica has accepted it
            self._board.sent(ask, names[0])
        return [[there[name]] for name in names] or [candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        if "ask" in pending_request.kwargs:
            self._board.sent(pending_request.kwargs["ask"], replica_id.unique_id)
