"""`hasten serve`: run an OpenAI-compatible server."""

from __future__ import annotations

import math
import os
import re
import sys
import time
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro

from hasten.cli.options import DeviceOptions, DraftOptions, EngineOptions, LoadOptions, with_chat_template
from hasten.distributed import launched
from hasten.effects import Holds, Needs
from hasten.engine.params import recommended
from hasten.errors import CheckpointError, ConfigError, HastenError, HastenWarning
from hasten.replicas.settings import ReplicaSettings
from hasten.server.settings import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from hasten.checkpoints.source import ModelSource
    from hasten.engine.async_engine import AsyncEngine
    from hasten.model.transformer import Transformer
    from hasten.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Serve(EngineOptions, DraftOptions, DeviceOptions, LoadOptions):
    """Serve a model over HTTP, as OpenAI's API does. SIGTERM or Ctrl-C drains; a second one ends at once."""

    host: str = "127.0.0.1"
    """Address to listen on: the default for this machine only, 0.0.0.0 for every interface."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: tuple[str, ...] = ()
    """Keys, one of which a client must give; also read from HASTEN_API_KEY, which process lists do not show."""
    allowed_host: Annotated[
        tuple[str, ...], Holds("checks_hosts", "with an API key, or on an address that is not loopback")
    ] = ()
    """Further names allowed in the Host header; "*" allows all. Checked only without keys and on loopback."""
    served_model_name: str | None = None
    """The model's name in requests; by default the hub id, or the name of the folder or file."""
    adapter: tuple[str, ...] = ()
    """LoRA adapters as NAME=FOLDER, several at once: requests choose one by its name in `model`."""
    chat_template: Path | None = None
    """A file with a chat template (Jinja), instead of the folder's own."""
    chat_template_kwargs: str | None = None
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'; requests override them."""
    fleet: tyro.conf.OmitArgPrefixes[ReplicaSettings] = field(default_factory=ReplicaSettings)
    server: tyro.conf.OmitArgPrefixes[ServerSettings] = field(default_factory=ServerSettings)
    max_body_mib: float = 4.0
    """Largest request body in MiB."""
    log: Literal["debug", "info", "warning", "error"] = "info"
    """Level of the log, JSON lines on standard error: info has one for each request."""

    EFFECTS: ClassVar = {
        **dict.fromkeys(("max_replicas", "ray_address", "restart_seconds"), Needs("replicas")),
        **dict.fromkeys(("requests_each", "shrink_seconds"), (Needs("replicas"), Needs("max_replicas"))),
    }

    @property
    def starts_ranks(self) -> bool:
        """Whether this command itself starts the ranks of --tensor-parallel: each replica starts its own."""
        return self.fleet.replicas > 0

    @property
    def checks_hosts(self) -> bool:
        """Whether the Host header is checked: without keys and on loopback."""
        from hasten.server.server import is_loopback

        return not (self.api_key or os.environ.get("HASTEN_API_KEY")) and is_loopback(self.host)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix_cache is not None and self.fleet.replicas:
            raise ConfigError("--prefix-cache does not go with --replicas: its blocks are those of one engine")
        if self.server.adapter_folder is not None:
            self._check_adapter_folder()
        if self.fleet.replicas and self.devices == "auto":
            raise ConfigError("--replicas and --devices auto do not go together: the plan says how many, or you do")

    def _check_adapter_folder(self) -> None:
        """Refuse --adapter-folder where adapters cannot change while the model is served."""
        if self.fleet.replicas or self.device.startswith("cuda"):
            raise ConfigError(
                "--adapter-folder does not go with --replicas or a GPU, where the model keeps the adapters that it "
                "began with; name them with --adapter NAME=FOLDER"
            )
        if re.fullmatch("self:.*-layers|mtp", str(self.draft)):
            raise ConfigError(
                f"--adapter-folder does not go with --draft {self.draft}: its layers would have adapters; take suffix"
            )

    def check_inputs(self) -> None:
        """Check the options before anything is measured, started or loaded."""
        from hasten.checkpoints.adapter_files import adapter_config
        from hasten.engine.block_files import BlockFiles
        from hasten.server import require_packages

        require_packages()
        from hasten.server.server import bind

        self._settings()
        for folder in self.adapters().values():
            adapter_config(folder.expanduser())
        if self.prefix_cache is not None:
            BlockFiles(self.prefix_cache.expanduser(), limit=self.engine.prefix_cache_bytes)
        if (root := self.server.adapter_folder) is not None and not root.expanduser().is_dir():
            raise ConfigError(f"--adapter-folder {root} is no folder; name the one that adapters are loaded from")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError("--served-model-name is empty; leave it out for the folder's own name, or give one")
        if not launched():
            bind(self.host, self.port).close()

    def run(self) -> None:
        start = time.perf_counter()
        from hasten.distributed.tensor_parallel import current_group
        from hasten.server.server import Server, bind, curl_line, url_of

        settings = self._settings()
        group = current_group()
        if group is not None and self.fleet.replicas:
            raise ConfigError("--replicas and torchrun do not go together: give --tensor-parallel for their ranks")
        if group is not None and group.rank:
            self._follow()
            return
        sock = bind(self.host, self.port)  # before the model is loaded: a taken port is reported at once
        try:
            self._warn_of_strangers(settings)
            app = self._replicated(settings) if self.fleet.replicas else self._app(self.load(), settings)
        except BaseException:
            sock.close()
            raise
        name, url = app.state.service.model_name, url_of(sock, self.host)

        def listening() -> None:
            has_tokenizer = app.state.service.has_tokenizer
            line = curl_line(url, name, key=bool(settings.api_keys), has_tokenizer=has_tokenizer)
            page = f", a page at {url}/" if settings.page else ""
            seconds = time.perf_counter() - start
            print(f"{name} is served at {url}/v1 after {seconds:.1f} s{page}; try:\n  {line}", flush=True)

        Server(app, settings, listening=listening).run_on(sock)
        print("drained and closed", file=sys.stderr)

    def _follow(self) -> None:
        """Run as a rank other than the first: compute what that one serves, until it has drained."""
        from hasten.engine.following import follow
        from hasten.model.sharded import ShardedTransformer

        model = self.load()
        assert isinstance(model, ShardedTransformer)
        follow(model, self.engine_settings(), adapters=self.adapters(), **self.drafting(model))

    def name(self) -> str:
        """The name under which the model is served, never a path."""
        return self.served_model_name or (Path(self.model).resolve().name if Path(self.model).exists() else self.model)

    def adapters(self) -> dict[str, Path]:
        """The folders of --adapter by their names. Raises ConfigError for an invalid name, or one given twice."""
        found: dict[str, Path] = {}
        for text in self.adapter:
            name, _, folder = text.partition("=")
            if not name.isprintable() or not name.strip() or not folder or name in (*found, self.name()):
                raise ConfigError(f"--adapter {text!r:.200}: give NAME=FOLDER, with a name that nothing else here has")
            found[name] = Path(folder)
        return found

    def _app(self, model: Transformer, settings: ServerSettings) -> FastAPI:
        from hasten.engine.admission import room
        from hasten.server.app import make_app
        from hasten.server.logs import configure_logs
        from hasten.server.service import Service

        tokenizer = self._tokenizer(model)
        configure_logs(self.log)
        engine = self.start_engine(model, tokenizer, adapters=self.adapters())
        blocks, longest = engine.engine.blocks.blocks, engine.engine.max_length
        print(room(model, engine.engine.settings, blocks=blocks, max_length=longest), file=sys.stderr)
        settings = replace(settings, defaults=recommended(model.generation))
        return make_app(Service(engine, model_name=self.name(), settings=settings))

    def _replicated(self, settings: ServerSettings) -> FastAPI:
        """Build the app in front of replicas, which load the model themselves."""
        import signal
        import threading

        from hasten.checkpoints.load import open_checkpoint, shares_of
        from hasten.server.app import make_app
        from hasten.server.logs import configure_logs
        from hasten.server.service import Service

        checkpoint = open_checkpoint(self.model)  # errors of the folder are raised before anything is started
        shares_of(checkpoint, self.tensor_parallel)
        from hasten.replicas.ray_serve import Replicas

        tokenizer = self._tokenizer(checkpoint)
        configure_logs(self.log)
        one, gpus = self._one_replica(), float(self.tensor_parallel * self.device.startswith("cuda"))
        replicas = Replicas(one.replica_engine, self.fleet, cores=1 if gpus else int(one.threads), gpus=gpus)
        try:
            engine = replicas.start(tokenizer)
        except BaseException:
            replicas.stop()
            raise

        def restart() -> None:
            try:
                replicas.restart()
            except HastenError as error:
                print(f"error: {error}", file=sys.stderr)

        signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=restart, daemon=True).start())
        settings = replace(settings, defaults=recommended(checkpoint.generation))
        return make_app(Service(engine, model_name=self.name(), settings=settings))

    def _one_replica(self) -> Serve:
        """The command that a replica runs: absolute paths, its share of the cores and the memory."""
        from hasten.machine.processor import available_cores

        threads, engine = self.threads, self.engine
        if self.fleet.ray_address is None:
            if threads == "auto":
                threads = max(1, available_cores().physical // self.fleet.most)
            engine = replace(engine, cache_share=engine.cache_share / self.fleet.most)
        elif threads == "auto":
            if not self.device.startswith("cuda"):
                raise ConfigError("--ray-address needs --threads: how many cores of the cluster a replica takes")
            threads = 1
        template = None if self.chat_template is None else self.chat_template.resolve()
        return replace(
            self,
            model=str(Path(self.model).resolve()) if Path(self.model).exists() else self.model,
            draft=str(Path(self.draft).resolve()) if Path(self.draft).is_dir() else self.draft,
            adapter=tuple(f"{name}={folder.resolve()}" for name, folder in self.adapters().items()),
            chat_template=template,
            served_model_name=self.name(),
            api_key=(),
            threads=threads,
            engine=engine,
        )

    def replica_engine(self, secret: bytes) -> AsyncEngine:
        """Start the engine of a replica, and its other ranks. secret: the key of all replicas' block hashes."""
        if (ranks := self.tensor_parallel) == 1:
            return self._start_replica(secret)
        from hasten.checkpoints.load import open_checkpoint
        from hasten.cli.room import require_room
        from hasten.machine import resolve_device
        from hasten.replicas.ranks import lead

        require_room(self, open_checkpoint(self.model), str(resolve_device(self.device)), ranks=ranks)
        one = self if self.threads == "auto" else replace(self, threads=max(1, self.threads // ranks))
        return lead(partial(one._start_replica, secret), follow=one._follow, ranks=ranks)

    def _start_replica(self, secret: bytes) -> AsyncEngine:
        model = self.load()
        return self.start_engine(model, self._tokenizer(model), adapters=self.adapters(), secret=secret)

    def _tokenizer(self, model: Transformer | ModelSource) -> Tokenizer | None:
        """The model's tokenizer, with the chat template of --chat-template."""
        tokenizer, path = model.tokenizer, self.chat_template
        if path is not None:
            if tokenizer is None:
                raise ConfigError(f"--chat-template {path}: the model's folder has no tokenizer, so there are no chats")
            tokenizer = with_chat_template(tokenizer, path, option="--chat-template")
        template = None if tokenizer is None else tokenizer.templates.get("default")
        try:
            if template is not None:
                template.check()
        except CheckpointError as error:
            if path is not None:
                raise
            warnings.warn(f"/v1/chat/completions will refuse everything: {error}", HastenWarning, stacklevel=2)
        return tokenizer

    def _warn_of_strangers(self, settings: ServerSettings) -> None:
        from hasten.server.server import is_loopback

        if not settings.api_keys and not is_loopback(self.host):
            warnings.warn(
                f"anybody who reaches {self.host} may use this server: it listens beyond this machine and has no "
                "--api-key (or HASTEN_API_KEY)",
                HastenWarning,
                stacklevel=2,
            )
        if not settings.api_keys and "*" in settings.allowed_origins:
            warnings.warn(
                'any page that is open in a browser here may use this server: --allowed-origins is "*" and there is no '
                "--api-key; name the origins, or give a key",
                HastenWarning,
                stacklevel=2,
            )

    def _settings(self) -> ServerSettings:
        from hasten.server.server import LOOPBACK
        from hasten.text.chat import parse_template_kwargs

        keys = self.api_key
        if (key := os.environ.get("HASTEN_API_KEY")) is not None:
            keys = (*keys, key)
        if not all(keys):  # probably a variable that was not set: never serve without a key then
            raise ConfigError("an API key is empty (--api-key, or HASTEN_API_KEY); leave it out to serve without keys")
        if not 0 < self.max_body_mib < math.inf:
            raise ConfigError(f"--max-body-mib is {self.max_body_mib}; it must be above 0 and finite")
        hosts: tuple[str, ...] = ()
        if self.checks_hosts:
            hosts = (*LOOPBACK, self.host.lower(), *(host.lower() for host in self.allowed_host))
        return replace(
            self.server,
            api_keys=keys,
            allowed_hosts=hosts,
            body_bytes=int(self.max_body_mib * 2**20),
            chat_template_kwargs=parse_template_kwargs(self.chat_template_kwargs, option="--chat-template-kwargs"),
        )
