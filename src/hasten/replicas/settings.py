"""How many replicas there are, and where. Imports no Ray, so that --help is quick."""

from dataclasses import dataclass
from typing import Annotated

from hasten.checks import ABOVE_0, AT_LEAST_0, require
from hasten.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Several engines behind one endpoint, on Ray Serve (docs/replicas.md).

    Args:
        replicas: Number of engines, each a process with its own copy of the model, or --tensor-parallel processes that
            share one; 0: one engine in this process, without Ray. The cores are divided among the replicas of this
            machine (--threads sets the number for each).
        max_replicas: Maximum number of replicas; with it the number follows the requests in flight.
        requests_each: Requests in flight for each replica, which the number of replicas follows.
        shrink_seconds: How long fewer replicas must be enough before one is stopped.
        ray_address: A Ray cluster's HOST:PORT, or auto for one that runs on this machine; by default Ray is started
            here, for this server alone. The cluster's machines need hasten, and the model at the same path.
        restart_seconds: Seconds that a replica has to finish its requests before it is replaced or stopped.
    """

    replicas: Annotated[int, AT_LEAST_0] = 0
    max_replicas: Annotated[int | None, ABOVE_0] = None
    requests_each: Annotated[float, ABOVE_0] = 8.0
    shrink_seconds: Annotated[float, ABOVE_0] = 600.0
    ray_address: str | None = None
    restart_seconds: Annotated[float, ABOVE_0] = 600.0

    def __post_init__(self) -> None:
        require(self)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas is {self.max_replicas}, below replicas, which is {self.replicas}")

    @property
    def most(self) -> int:
        return self.max_replicas or self.replicas
