"""What a caller may ask of generation. Free of torch, so that the command line can show it at once."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hasten.checks import LARGEST_SEED, real, whole
from hasten.errors import ConfigError

# How a cache keeps keys and values (hasten.engine.cache.ROW_FORMATS); -plain: not rotated.
KVCacheDtype = Literal["auto", "int8", "int4", "int8-plain", "int4-plain"]
# What `make_speculator` knows by a word; anything else is the folder or hub id of a model.
_DRAFT_WORDS = re.compile("auto|none|suffix|mtp|self:.*", re.IGNORECASE)


def draft_name(draft: str) -> str:
    """A draft by its name: words such as "MTP" in lower case, the folder or hub id of a model as it is."""
    return draft.lower() if _DRAFT_WORDS.fullmatch(draft) else draft


_RANGES: dict[tuple[str, str], tuple[float, float]] = {
    ("temperature", "repetition_penalty"): (0, math.inf),
    ("top_p", "min_p"): (0, 1),
    ("presence_penalty", "frequency_penalty"): (-2, 2),
}
LEAST_TEMPERATURE = 1e-30  # below, the most likely token wins whatever the noise; and float32 ends soon
LARGEST_BIAS = 1e30  # far above any logit, and within float32


class LogitBias(Mapping[int, float]):
    """An immutable, hashable mapping from token id to what is added to its logit (finite, or -inf to forbid it)."""

    __slots__ = ("_items",)

    def __init__(self, values: Mapping[int, float] | None = None) -> None:
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(f"logit_bias must map token ids to numbers, found {type(values).__name__}")
        items = {}
        for token, bias in (values or {}).items():
            number = real(f"logit_bias[{token!r}]", bias, finite=False)
            if math.isnan(number) or number > LARGEST_BIAS or -math.inf < number < -LARGEST_BIAS:
                raise ConfigError(
                    f"logit_bias[{token!r}] is {bias}: it must be from -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}, or -inf "
                    "to forbid the token"
                )
            items[whole("a token id in logit_bias", token, low=0)] = number
        self._items = dict(sorted(items.items()))

    def __getitem__(self, token: int) -> float:
        return self._items[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return f"LogitBias({self._items})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one text is generated. Every field is checked; a bad value raises ConfigError naming it.

    temperature: divides the logits; 0 (or less than 1e-30) takes the most likely token (greedy) and needs no seed.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the most likely tokens that together have this probability (nucleus); 1 keeps all.
    min_p: keep tokens with at least this fraction of the most likely token's probability; 0 keeps all.
    repetition_penalty: above 1 makes every token of the prompt and the output less likely; 1 is off.
    presence_penalty, frequency_penalty: subtracted from the logit of every token of the output, once, or once for
        each time it occurred (-2 to 2, as in OpenAI's API).
    logit_bias: token id to what is added to its logit.
    seed: the same seed gives the same text, alone or in any batch; None draws one.
    max_new_tokens, min_new_tokens: bounds on the output; before the minimum no token that ends the text is taken.
    stop: texts that end the output and are not part of it. stop_token_ids: further ids that do, beside the model's own.
    ignore_eos: go on after the model's own end-of-text tokens (for measuring speed).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=LogitBias)
    seed: int | None = None
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def keep(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for names, (low, high) in _RANGES.items():
            for name in names:
                keep(name, real(name, getattr(self, name), low=low, high=high))
        for name, least in (("top_k", 0), ("max_new_tokens", 1), ("min_new_tokens", 0)):
            keep(name, whole(name, getattr(self, name), low=least))
        if self.top_p == 0:
            raise ConfigError("top_p is 0, which keeps no token; use temperature=0 for the most likely one")
        if self.repetition_penalty == 0:
            raise ConfigError("repetition_penalty is 0; it divides: 1 is off, 1.1 is mild")
        if not isinstance(self.logit_bias, LogitBias):
            keep("logit_bias", LogitBias(self.logit_bias))
        if self.seed is not None:
            keep("seed", whole("seed", self.seed, low=0, high=LARGEST_SEED))
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(f"min_new_tokens is {self.min_new_tokens}, above max_new_tokens ({self.max_new_tokens})")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) and text for text in stop):
            raise ConfigError(f"stop must be texts that are not empty, found {self.stop!r:.80}")
        keep("stop", tuple(stop))
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise ConfigError(f"stop_token_ids must be a list of token ids, found {self.stop_token_ids!r:.80}")
        keep("stop_token_ids", tuple(whole("an id in stop_token_ids", i, low=0) for i in self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos must be true or false, found {self.ignore_eos!r}")

    def with_seed(self, seed: int) -> "SamplingParams":
        """The same with another seed, which is not checked."""
        copy = object.__new__(SamplingParams)
        for name in self.__slots__:
            object.__setattr__(copy, name, getattr(self, name))
        object.__setattr__(copy, "seed", seed)
        return copy

    @property
    def greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def needs_history(self) -> bool:
        """Whether a penalty is on, so that what was said so far must be counted."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


# What a model's generation_config.json may say of sampling.
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def recommended(folder: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling values of a generation_config.json, for what nobody asked for.

    A folder that says `do_sample: false`, or says nothing, is sampled at temperature 1: to be greedy is one option
    away, and a text that loops is nobody's wish.
    """
    names = RECOMMENDED if folder.get("do_sample") else ()
    return {name: folder[name] for name in names if folder.get(name) is not None}
