"""What the server allows. Free of every web package, so that the command line can show it at once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tyro.conf import Suppress

from hasten.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits in bytes, items and seconds; each refuses with an error that names it.

    Args:
        api_keys: Any of them opens everything; none means that everybody may ask. /health and /ready are always open.
        allowed_hosts: Names that the Host header may carry; empty allows all. A server on the loopback interface
            without a key needs them: a web page whose name was made to point at 127.0.0.1 must not reach it (DNS
            rebinding).
        defaults: Sampling values of the model's generation_config.json, for what a request leaves out.
        header_bytes: Of a request's line and headers together.
        body_bytes: Of one request body.
        bodies_bytes: Of all request bodies held at once.
        requests: In flight, queued ones included.
        nesting: Levels of arrays and objects in a body.
        keys: Of one object in a body.
        prompts: Of one request.
        samples: n or best_of.
        choices: prompts × best_of: sequences that one request may ask for.
        stops: Stop strings.
        stop_characters: Of one stop string.
        stop_tokens: Token ids that end an answer.
        logprobs: Alternatives of each token.
        biases: Token ids in logit_bias.
        messages: Of one conversation.
        tools: Of one conversation.
        schema_bytes: Of a JSON schema.
        body_timeout: Seconds for a body to arrive.
        write_timeout: Seconds after which a client that takes nothing is dropped.
        request_timeout: Seconds after which a request is given up; never by default.
        grammar_timeout: Seconds for a JSON schema to be compiled.
        drain_timeout: Seconds that requests in flight have to end after SIGTERM.
    """

    api_keys: Suppress[tuple[str, ...]] = field(default=(), repr=False)
    allowed_hosts: Suppress[tuple[str, ...]] = ()
    defaults: Suppress[Mapping[str, Any]] = field(default_factory=dict)
    header_bytes: int = 32 << 10
    body_bytes: Suppress[int] = 4 << 20  # --max-body-mib on the command line
    bodies_bytes: int = 256 << 20
    requests: int = 4096
    nesting: int = 64
    keys: int = 4096
    prompts: int = 256
    samples: int = 128
    choices: int = 256
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
