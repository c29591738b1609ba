"""Options shared by the commands that run a model."""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from hasten.effects import ON_CPU, ON_CUDA, Needs, Unless
from hasten.engine.params import KVCacheDtype, SamplingParams, draft_name, recommended
from hasten.engine.settings import EngineSettings
from hasten.errors import CheckpointError, ConfigError, HastenWarning
from hasten.machine import configure, resolve_device
from hasten.machine.files import require_writable, write_json
from hasten.machine.threads import Threads
from hasten.planning.choices import Wanted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hasten.engine.async_engine import AsyncEngine
    from hasten.model.transformer import Transformer
    from hasten.text.tokenizer import Tokenizer


def same_fields(options: Any, kind: type) -> dict[str, Any]:
    """Arguments for a dataclass: the options that have the name of one of its fields and are not None."""
    values = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """Where the result is written for programs. A file that cannot be written is refused before any work."""

    json: str | None = None
    """Write the result as JSON to this file; "-": to standard output, and nothing else there."""

    def __post_init__(self) -> None:
        require_writable(self.json)

    def write(self, result: object) -> bool:
        """Write the result as JSON if asked; returns whether standard output is free for text."""
        write_json(self.json, result)
        return self.json != "-"


def with_chat_template(tokenizer: Tokenizer, path: Path, *, option: str) -> Tokenizer:
    """The tokenizer with the chat template (Jinja) of a file. Raises CheckpointError that names the option."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{option} {path} cannot be read: {error}") from None
    return tokenizer.with_chat_template(text, origin=str(path))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable the search for cycles: importing torch and loading a model create a million objects that stay."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The model, and how it is run."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A Hugging Face folder, a GGUF file, a hub id such as owner/name, or a short name: smollm2-135m, gemma3-270m,
    qwen2.5-coder-0.5b, qwen2.5-coder-1.5b."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype of weights that are not quantized. auto: the checkpoint's own, but bfloat16 for one in float32 if the
    fused kernels run it or bfloat16 products are fast; float32 keeps such a checkpoint as it is, slower."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:INDEX."""
    threads: Threads = "auto"
    """CPU threads; auto is one for each physical core that this process may use."""
    pin: bool = False
    """Pin each thread to its own core (docs/kernels.md says when that helps)."""
    quantize: Literal["none", "int8", "int4"] = "none"
    """Round the weights after loading; `hasten quantize` does it once, has more settings and keeps the result."""
    fuse: bool = True
    """Run the fused kernels where they support the model: in 16 bits or quantized."""
    verbose: bool = False
    """Print more: the dtype of products and why, and the speed of each answer of a chat."""

    def load(self) -> Transformer:
        """Load the model onto the device, set threads and seed, quantize and fuse as asked."""
        with _uncollected():
            return self._load()

    def _load(self) -> Transformer:
        configure(threads=self.threads, seed=getattr(self, "seed", None))  # a rank has its cores already
        found: Sequence[warnings.WarningMessage] = ()
        try:
            with warnings.catch_warnings(record=True) as found:
                model = self.read_model(str(resolve_device(self.device)))
        except BaseException:
            self._pass_on(found)  # they may say why
            raise
        if self.quantize != "none":
            from hasten.quantization import Int4, Int8, quantize

            quantize(model, Int8() if self.quantize == "int8" else Int4())
        from hasten.model.fused import fuse_where_it_fits, path_of

        model.auto_fuse = self.fuse
        with warnings.catch_warnings(record=True) as reasons:
            fuse_where_it_fits(model)
        print(f"{self.title()}: {path_of(model)}", file=sys.stderr)
        self._pass_on(found)
        for reason in reasons:  # why it is slower than it could be
            warnings.warn(reason.message, stacklevel=2)
        if self.verbose:
            from hasten.model.wide import precision_of

            print(f"matrix products in {precision_of(model)}", file=sys.stderr)
        return model

    def _pass_on(self, found: Sequence[warnings.WarningMessage]) -> None:
        """Repeat the warnings of loading, with the option instead of the call that a program would make."""
        from hasten.checkpoints.fill_quantized import NO_KERNEL, ROUND

        for one in found:
            text = str(one.message)
            if not text.startswith(NO_KERNEL):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
            elif self.quantize == "none":
                warnings.warn(text.replace(ROUND, "--quantize int8"), HastenWarning, stacklevel=2)

    def title(self) -> str:
        """The model's name in the first line."""
        from hasten.bench.models import folder_name

        return folder_name(str(self.model))

    def in_int4(self, model: Transformer) -> Transformer:
        """Load the same weights in int4, to draft for the model. Raises ConfigError if the model is in int4 itself."""
        if any(layer.weight.bits < 8 for layer in (model.quantization or {}).values()):
            raise ConfigError("--draft self:int4 is for a model of more bits; this one is in int4 itself")
        if model.quantization is not None and self.quantize == "none":
            raise ConfigError(
                "--draft self:int4 rounds plain weights, and this folder has them in int8 already; give the folder "
                "of an int4 model of the same checkpoint instead"
            )
        small = replace(self, quantize="int4").load()
        held = sum(tensor.nbytes for tensor in small.state_dict().values())
        print(f"the draft in int4 takes {held / 1e9:.2f} GB beside the model", file=sys.stderr)
        return small

    def read_model(self, device: str) -> Transformer:
        """Read the model. Raises ResourceError before loading it if it will not fit."""
        from hasten.checkpoints.load import load, open_checkpoint
        from hasten.cli.room import require_room
        from hasten.distributed.tensor_parallel import current_group

        group, source = current_group(), open_checkpoint(self.model)
        if group is None:  # ranks were checked together before they were started
            require_room(self, source, device)
        return load(source, dtype=self.dtype, device=device, group=group)


DraftName = Annotated[
    str,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="STR",
        instance_from_str=lambda words: draft_name(words[0]),
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    ),
]


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Speculative decoding: the same text, faster."""

    draft: DraftName = "auto"
    """What proposes tokens for the model to verify: suffix (what followed the same words before), mtp (the multi-token
    head of its checkpoint), a FOLDER with a smaller model of the same vocabulary, self:N-layers (its own first layers),
    self:int4, or none. auto is suffix where the text stays the same, bit for bit or in float32: on a CPU."""
    speculate: Annotated[int | None, Unless("draft", "none")] = None
    """Maximum draft length (default 16); the actual length adapts."""
    accept: Annotated[Literal["exact", "distribution"], Unless("draft", "none", "auto", "suffix")] = "exact"
    """exact accepts the tokens that the model would have drawn: the same text. distribution, for drafts by a model,
    accepts with probability min(1, p/q): another text of the same distribution, faster at high temperatures."""

    def drafting(self, model: Transformer) -> dict[str, Any]:
        """The options as keyword arguments of the library's functions."""
        from hasten.distributed.tensor_parallel import current_group, without_group
        from hasten.engine.speculation.build import automatic, refuse_states

        draft: str | Transformer = self.draft
        if draft == "auto" and self.speculate is not None and automatic(model) == "none":
            raise ConfigError(
                "--speculate has no effect with --draft auto, which drafts nothing for this model here; give --draft "
                "suffix, or leave --speculate out"
            )
        group = current_group()
        if draft == "self:int4" and (group is None or group.rank == 0):  # of several ranks the first one drafts
            assert isinstance(self, LoadOptions)
            refuse_states(model.config, model)
            with without_group():
                draft = self.in_int4(model)
        return {"draft": draft, "speculate": self.speculate, "accept": self.accept}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of a server's engine."""

    engine: tyro.conf.OmitArgPrefixes[EngineSettings] = field(default_factory=EngineSettings)
    cache_gib: float | None = None
    """Memory of the cache in GiB; by default half of the free memory, and never more than can be used."""
    prefix_cache: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Keep the blocks of the prefix cache in this folder too, where they survive a restart."""
    no_prefix_cache: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Do not share the blocks of prompts that begin alike."""

    EFFECTS: ClassVar[dict[str, Any]] = {
        "cache_share": (Unless("cache_gib"), Unless("fit")),
        "capture_sizes": (ON_CUDA, Needs("capture")),
        "prefix_cache": (Unless("no_prefix_cache"), ON_CPU),
        "prefix_cache_bytes": Needs("prefix_cache"),
    }

    def __post_init__(self) -> None:
        if self.cache_gib is not None and not 0 < self.cache_gib < math.inf:
            raise ConfigError(f"--cache-gib is {self.cache_gib}; it must be above 0 and finite")

    def engine_settings(self) -> EngineSettings:
        """The settings of the engine, with those that are options of their own."""
        from hasten.engine.batch import SIZES

        settings = self.engine
        if self.cache_gib is not None:
            settings = replace(settings, cache_bytes=int(self.cache_gib * 2**30))
        if self.prefix_cache is not None or self.no_prefix_cache:
            settings = replace(settings, prefix_cache=self.prefix_cache or False)
        return settings if settings.capture_sizes is not None else replace(settings, capture_sizes=SIZES)

    def start_engine(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        *,
        adapters: Mapping[str, Path] | None = None,
        secret: bytes | None = None,
    ) -> AsyncEngine:
        """Start the engine of a loaded model, with its cache and its thread.

        adapters: folders by their names. secret: the key of its blocks' hashes.
        """
        from hasten.engine.async_engine import AsyncEngine
        from hasten.engine.llm import make_engine

        drafting: dict[str, Any] = self.drafting(model) if isinstance(self, DraftOptions) else {}
        drafting |= {"adapters": adapters, "secret": secret}
        return AsyncEngine(make_engine(model, tokenizer, self.engine_settings(), **drafting))


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(LoadOptions):
    """The LoRA adapter of a model."""

    adapter: Path | None = None
    """A LoRA adapter of the model: a folder in peft's format, as `hasten train --lora.rank` writes it."""

    def check_inputs(self) -> None:
        """Check the options before anything is measured, started or loaded."""
        if self.adapter is not None:
            from hasten.checkpoints.adapter_files import adapter_config

            adapter_config(self.adapter.expanduser())

    def load(self) -> Transformer:
        """Load the model, and its adapter."""
        model = super().load()
        if self.adapter is not None:
            from hasten.checkpoints.adapters import load_adapters

            load_adapters(model, [self.adapter])
        return model


@dataclass(frozen=True, kw_only=True)
class ModelOptions(AdapterOptions):
    """The seed, and the end of a text."""

    seed: int | None = None
    """Makes sampling reproducible."""
    ignore_eos: bool = False
    """Continue after the end-of-text token (to measure)."""


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """One model split over several processes (`hasten.cli.ranks`)."""

    tensor_parallel: int = 1
    """Split the model over N processes on this machine, which share its cores (as torchrun … -m hasten does)."""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Wanted, RankOptions):
    """Processes and precision chosen by a plan (`hasten.cli.planned`)."""

    devices: Literal["given", "auto"] = "given"
    """auto: a plan chooses the ranks and the precision for this machine by --goal (default latency), and says why;
    --tensor-parallel and --quantize are kept if given."""
    price: tyro.conf.Suppress[float | None] = None  # an option of `hasten plan` alone

    EFFECTS: ClassVar[dict[str, Any]] = {
        "goal": Needs("devices", "auto"),
        "token_ms": Needs("devices", "auto"),
    }


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How keys and values are cached."""

    kv_cache_dtype: KVCacheDtype = "auto"
    """Cache keys and values in the model's dtype, or in int8 or int4 after a rotation; -plain: not rotated."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen."""

    max_new_tokens: int = 256
    """Maximum tokens of an answer."""
    temperature: float | None = None
    """0 takes the most likely token. By default what the folder's generation_config.json says, else 1."""
    top_k: int | None = None
    """Draw from the k most likely tokens only; 0: from all. At temperature 0 nothing is drawn."""
    top_p: float | None = None
    """Draw from the most likely tokens whose probabilities add up to this (1: from all)."""
    min_p: float | None = None
    """Exclude tokens below this share of the most likely one's probability (0: none)."""
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    """Token ids and what is added to their scores: --logit-bias 50256 -100."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer and are not shown."""
    min_new_tokens: int = 0
    """Do not end before this many tokens."""

    def params(self, folder: Mapping[str, Any]) -> SamplingParams:
        """The options given, else what generation_config.json recommends, else plain sampling.

        Raises ConfigError for invalid values.
        """
        return SamplingParams(**recommended(folder) | same_fields(self, SamplingParams))
