"""Limits of the server. Imports no web package, so that --help is quick."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Suppress, arg

from hasten.errors import ConfigError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+", re.IGNORECASE)  # also of extensions and desktop shells


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits in bytes, items and seconds; an error names the limit that was exceeded.

    Args:
        api_keys: Keys, any of which gives access; without keys all have access. /health and /ready are always open.
        allowed_hosts: Names that the Host header may carry; empty allows all. A server on the loopback interface
            without a key needs them against DNS rebinding: a web page whose name resolves to 127.0.0.1.
        defaults: Sampling values for fields that a request leaves out, from the model's generation_config.json; other
            fields of that file are ignored.
        chat_template_kwargs: Variables that the chat template gets with every conversation, unless a request gives
            its own.
        adapter_folder: Clients may load and unload LoRA adapters that are below this folder; not at all by default.
        allowed_origins: Origins (https://example.com) whose pages may use the server from a browser; "*" allows all.
            None by default.
        page: Serve the page at / to browsers.
        strict_fields: Refuse unknown request fields with a 400 instead of ignoring them.
        strict_length: Refuse a max_tokens that does not fit behind the prompt with a 400 instead of lowering it.
        stored_responses: Maximum number of answers of /v1/responses that later requests may refer to; 0 keeps none.
        header_bytes: Maximum bytes of a request's line and headers together.
        body_bytes: Maximum bytes of one request body.
        bodies_bytes: Maximum bytes of all request bodies held at once.
        requests: Maximum number of requests in flight, queued ones included.
        samples: Maximum samples of one prompt (n or best_of).
        choices: Maximum sequences of one request: prompts × best_of.
        logprobs: Maximum alternatives reported for each token.
        schema_bytes: Maximum bytes of a JSON schema.
        body_timeout: Seconds for a body to arrive.
        write_timeout: Seconds after which a client that does not read is dropped.
        request_timeout: Seconds after which a request is aborted; never by default.
        grammar_timeout: Seconds to compile a JSON schema.
        drain_timeout: Seconds that requests in flight have to finish after SIGTERM.
    """

    api_keys: Suppress[tuple[str, ...]] = field(default=(), repr=False)
    allowed_hosts: Suppress[tuple[str, ...]] = ()
    defaults: Suppress[Mapping[str, Any]] = field(default_factory=dict)
    chat_template_kwargs: Suppress[Mapping[str, Any]] = field(default_factory=dict)
    allowed_origins: tuple[str, ...] = ()
    adapter_folder: Path | None = None
    page: bool = True
    strict_fields: bool = False
    strict_length: bool = False
    # --max-… on the command line, where the bare names read like switches (--logprobs).
    stored_responses: Annotated[int, arg(name="max-stored-responses")] = 1000
    header_bytes: Annotated[int, arg(name="max-header-bytes")] = 32 << 10
    body_bytes: Suppress[int] = 4 << 20  # --max-body-mib on the command line
    bodies_bytes: Annotated[int, arg(name="max-bodies-bytes")] = 256 << 20
    requests: Annotated[int, arg(name="max-requests")] = 4096
    samples: Annotated[int, arg(name="max-samples")] = 128
    choices: Annotated[int, arg(name="max-choices")] = 256
    logprobs: Annotated[int, arg(name="max-logprobs")] = 20
    schema_bytes: Annotated[int, arg(name="max-schema-bytes")] = 64 << 10
    body_timeout: float = 30.0
    write_timeout: float = 30.0
    request_timeout: float | None = None
    grammar_timeout: float = 10.0
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name == "stored_responses" and value == 0:
                continue
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; a limit of the server must be above 0 and finite")
        if any(not key or not key.isascii() or any(c.isspace() for c in key) for key in self.api_keys):
            raise ConfigError("an API key must be ASCII text without spaces, and not empty")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origins {origin}: an origin is a scheme and a host, with the port where there is one "
                    "and no slash at its end, such as https://example.com or http://localhost:3000"
                )
