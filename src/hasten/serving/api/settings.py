"""What the server allows. Free of every web package, so that the command line can show it at once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hasten.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits in bytes, items and seconds; each refuses with an error that names it.

    api_keys: any of them opens everything; none means that everybody may ask. /health and /ready are always open.
    allowed_hosts: names that the Host header may carry; empty allows all. A server on the loopback interface without a
        key needs them: a web page whose name was made to point at 127.0.0.1 must not reach it (DNS rebinding).
    defaults: sampling values of the model's generation_config.json, for what a request leaves out.
    header_bytes: of a request's line and headers together.
    bodies_bytes: of all request bodies held at once. body_timeout: for a body to arrive. write_timeout: a client that
        takes nothing for so long is dropped. request_timeout: a request that has not ended by then is (None: never).
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    header_bytes: int = 32 << 10
    body_bytes: int = 4 << 20
    bodies_bytes: int = 256 << 20
    requests: int = 4096  # in flight, queued ones included
    nesting: int = 64
    keys: int = 4096  # of one object in a body
    prompts: int = 256
    samples: int = 128  # n or best_of
    choices: int = 256  # prompts × best_of: sequences that one request may ask for
    stops: int = 16
    stop_characters: int = 256
    stop_tokens: int = 256
    logprobs: int = 20
    biases: int = 1024
    messages: int = 4096
    tools: int = 128
    schema_bytes: int = 64 << 10
    body_timeout: float = 30.0
    write_timeout: float = 30.0
    request_timeout: float | None = None
    grammar_timeout: float = 10.0
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; a limit of the server must be above 0 and finite")
        if any(not key or not key.isascii() or any(c.isspace() for c in key) for key in self.api_keys):
            raise ConfigError("an API key must be ASCII text without spaces, and not empty")
