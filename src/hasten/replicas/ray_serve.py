"""Replicas on Ray Serve: joins or starts a cluster, deploys an engine in each replica, and makes a handle to call them.

Ray Serve restarts a replica that dies or fails its health check, replaces replicas one by one after their requests are
finished, and scales their number with the load. Of its interface of routers (alpha), `choose_replicas` ranks by our
`Board`, and reports come as routing statistics through Ray's controller. Ray's proxy is not used: the HTTP server with
its limits is this process.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hasten.errors import ConfigError, ResourceError
from hasten.replicas.engine import ReplicaDied, ReplicatedEngine
from hasten.replicas.routing import Ask, Board, publish
from hasten.replicas.settings import ReplicaSettings

try:
    import ray
    from ray import serve
except ImportError:
    raise ResourceError("Ray Serve is not installed, which --replicas needs: pip install 'hasten[ray]'") from None
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException

if TYPE_CHECKING:
    from hasten.engine.async_engine import AsyncEngine
    from hasten.engine.request import Request
    from hasten.replicas.replica import Answer
    from hasten.text.tokenizer import Tokenizer

REPORT_EVERY = 1.0  # seconds
STARTING = 900.0  # seconds for all replicas to load


class Replicas:
    """The replicas of one model, and the connection to them (`hasten.replicas.engine.Channel`).

    make: called in each replica, with the secret of the block keys, to load the model and start an engine; pickled.
    cores, gpus: what Ray reserves for each replica.
    """

    def __init__(
        self,
        make: Callable[[bytes], AsyncEngine],
        settings: ReplicaSettings,
        *,
        cores: float = 1,
        gpus: float = 0,
    ) -> None:
        """Connect to the cluster. Raises ResourceError if there is none."""
        self.settings, self.board = settings, Board()
        self._make, self._cores, self._gpus = make, cores, gpus
        self._secret = secrets.token_bytes(32)
        self._key = publish(self.board)
        self.name = f"hasten-{self._key}"  # in a cluster that others use too
        self._own = settings.ray_address is None
        connect(settings, cores=cores)

    def start(self, tokenizer: Tokenizer | None) -> ReplicatedEngine:
        """Load the model in all replicas and return the engine over them. Raises ResourceError if they do not start."""
        self._deploy()
        self._handle = serve.get_app_handle(self.name)
        facts, block_size = self._handle.facts.remote().result(timeout_s=STARTING)
        facts = replace(facts, tokenizer=tokenizer)
        return ReplicatedEngine(self, self.board, facts, block_size=block_size, secret=self._secret)

    def restart(self) -> None:
        """Replace the replicas one by one; each finishes its requests first. Returns when all are replaced.

        Raises ResourceError if the new ones do not start; the remaining old ones keep running.
        """
        self._deploy()

    def generate(self, ask: Ask, request: Request) -> AsyncGenerator[Answer]:
        return self._read(self._handle.options(stream=True).generate.remote(request, ask=ask))

    async def _read(self, stream: Any) -> AsyncGenerator[Answer]:
        try:
            with _deaths():
                async for answer in stream:
                    yield answer
        finally:
            stream.cancel()

    async def embed(self, ask: Ask, prompts: Sequence[Sequence[int]], how: dict[str, Any]) -> Any:
        with _deaths():
            return await self._handle.embed.remote(prompts, how, ask=ask)

    async def close(self) -> None:
        """Stop the replicas, and the cluster if it was started here."""
        import asyncio

        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Do what `close` does, without asyncio. May be called again."""
        with suppress(RayError, RayServeException, ConnectionError):
            if ray.is_initialized() and not self._own:
                serve.delete(self.name)
        ray.shutdown()

    def _deploy(self) -> None:
        from hasten.replicas.replica import Replica

        settings = self.settings
        number: dict[str, Any] = {"num_replicas": settings.replicas}
        if settings.most > settings.replicas:
            scaling = AutoscalingConfig(
                min_replicas=settings.replicas,
                max_replicas=settings.most,
                target_ongoing_requests=settings.requests_each,
                downscale_delay_s=settings.shrink_seconds,
            )
            number = {"autoscaling_config": scaling}
        deployment = serve.deployment(
            Replica,
            name="replica",
            ray_actor_options={"num_cpus": self._cores, "num_gpus": self._gpus},
            max_ongoing_requests=1_000_000,  # the engine's own queue says when there is no room
            graceful_shutdown_timeout_s=settings.restart_seconds,
            graceful_shutdown_wait_loop_s=0.2,
            health_check_period_s=1.0,
            max_constructor_retry_count=2,
            request_router_config=RequestRouterConfig(
                request_router_class="hasten.replicas.router.HeldBlocksRouter",
                request_router_kwargs={"board": self._key},
                request_routing_stats_period_s=REPORT_EVERY,
            ),
            **number,
        )
        try:
            serve.run(deployment.bind(self._make, self._secret), name=self.name, route_prefix=None)
        except (RayError, RuntimeError) as error:
            raise ResourceError(f"the replicas did not start: {self._why(error)}") from None

    def _why(self, error: Exception) -> str:
        """The last line of Ray's message, which is the error that was raised in the replica."""
        message = str(error)
        with suppress(Exception):
            app = serve.status().applications[self.name]
            message = next(iter(app.deployments.values())).message or message
        lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
        return lines[-1][:500] if lines else type(error).__name__


@contextmanager
def _deaths() -> Iterator[None]:
    """Convert Ray's errors for a dead or unreachable replica into ReplicaDied."""
    try:
        yield
    except RayTaskError:  # a mistake of ours in the replica
        raise
    except (RayError, RayServeException) as error:
        raise ReplicaDied(str(error).split("\n")[0]) from None


def connect(settings: ReplicaSettings, *, cores: float) -> None:
    """Join the cluster, or start one on this machine. Raises ResourceError, ConfigError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send nothing
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = settings.ray_address
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if address is None:
        # Enough for all of them: how the cores are divided was decided before.
        options |= {"num_cpus": int(2 * settings.most * max(1, cores)) + 1, "include_dashboard": False}
    elif address != "auto":
        _require_listening(address)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    for attempts_left in (1, 0):
        try:
            ray.init(address=address or "local", namespace="serve", **options)
            serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR", "enable_access_log": False})
            return
        except Exception as error:  # Ray raises what it likes, plain Exception too
            ray.shutdown()
            # Its processes have 20 s to start; on a busy machine they do when their files have been read once.
            if address is None and attempts_left:
                continue
            where = "could not be started here" if address is None else f"at {address} cannot be joined"
            raise ResourceError(f"the Ray cluster {where}: {str(error).strip().splitlines()[0]}") from None


def _require_listening(address: str) -> None:
    """Raise an error at once if nobody listens at the address; Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise ConfigError(f"--ray-address {address!r:.100} is not HOST:PORT, nor auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except (OSError, OverflowError) as error:
        raise ResourceError(f"no Ray cluster answers at {address}: {error}; start one with ray start --head") from None
