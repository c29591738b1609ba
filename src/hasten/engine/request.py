"""What is asked of the engine and what it answers. Free of torch, so that a server can be described at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

from hasten.checks import ABOVE_0, AT_LEAST_0, Must
from hasten.engine.params import SamplingParams
from hasten.errors import HastenError

if TYPE_CHECKING:
    from torch import Tensor

PENALTY = Must("from -10 to 10", lambda n: -10 <= n <= 10)  # length ** penalty must stay a float
SECONDS = Must("a number of seconds above 0, or None", lambda n: n > 0)
FinishReason = Literal["stop", "length", "abort", "error"]


class RequestRefused(HastenError):
    """A request that can never be served here (too long, or settings that exclude each other); the text says why.

    field: of the request, where it is one that asks for too much.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> Any:  # it may come from another process
        return partial(RequestRefused, field=self.field), self.args


class QueueFull(HastenError):
    """Too many requests wait. retry_after: seconds after which one may try again."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> Any:
        return partial(QueueFull, retry_after=self.retry_after), self.args


class EngineFailed(HastenError):
    """A step of the engine raised; every request in flight ended, and no new one is taken."""


class DeadlineExceeded(HastenError):
    """The request's `timeout` passed before its answer was complete."""


class SlowReader(HastenError):
    """More outputs than the limit lay unread; the request was aborted."""


@runtime_checkable
class Constraint(Protocol):
    """What may be said next, decided token by token (structured output). One object belongs to one sample."""

    @property
    def done(self) -> bool:
        """Whether nothing more may come: the sample ends with reason "stop"."""

    def mask(self, row: Tensor) -> None:
        """Set the logits (V,) float32 of tokens that may not come to -inf, in place."""

    def advance(self, token: int) -> None:
        """Take the token that was drawn."""

    def fork(self) -> Constraint:
        """An independent copy in the same state: for another sample, or another beam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how it is to be continued.

    prompt: token ids. n: samples to give back; best_of (at least n): samples to draw, of which the n with the largest
    mean log-probability are given back, all at the end. A seed gives sample i the seed plus i.
    beam_width: above 0, beam search with this many beams; the n best are given back at the end, ranked by sum of
    log-probabilities / length ** length_penalty; early_stopping: end as soon as `beam_width` texts are complete.
    logprobs: alternatives wanted for each output token, 0 for the taken one's value alone; they are those of the
    model, before bias, penalties and temperature. prompt_logprobs: the same of the prompt (which is then computed
    whole, and shared with nobody).
    priority: smaller is served first. salt: prompts share cached blocks only under the same salt. adapter: the name of
    one of the engine's, which also shares no blocks with others; "" is the model itself.
    timeout: seconds from arrival after which the request is given up.
    whole: nobody sees an output before all are there, so another replica may answer in the place of one that died.
    gathered: each text is given out as one output, at its end.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    n: Annotated[int, ABOVE_0] = 1
    best_of: Annotated[int | None, ABOVE_0] = None
    beam_width: Annotated[int, AT_LEAST_0] = 0
    length_penalty: Annotated[float, PENALTY] = 1.0
    early_stopping: bool = False
    logprobs: Annotated[int | None, AT_LEAST_0] = None
    prompt_logprobs: Annotated[int | None, AT_LEAST_0] = None
    priority: int = 0
    salt: str = ""
    adapter: str = ""
    timeout: Annotated[float | None, SECONDS] = None
    constraint: Constraint | None = None
    skip_special_tokens: bool = True
    whole: bool = False
    gathered: bool = False

    @property
    def sharing(self) -> str | None:
        """Prompts share cached blocks with those of the same text only; None: with no other."""
        return None if self.prompt_logprobs is not None else f"{self.adapter}\0{self.salt}\0"

    @property
    def samples(self) -> int:
        """How many texts are computed: n, best_of, or the beams."""
        return self.beam_width or self.best_of or self.n


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability; with one that was taken, or stood in the prompt, the most likely ones.

    text may hold U+FFFD where raw does not hold whole characters.
    """

    token: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True, kw_only=True)  # not frozen, which takes longer to make: there is one for each token
class RequestOutput:
    """What one step added to one of the samples of a request.

    index: which sample, below `n`. text: often empty (a character, or a stop string, is not complete yet). tokens:
    usually one; several where a text is given at its end. stop_reason: the stop string or the id of
    `stop_token_ids` that ended it, "timeout" after a deadline, or the error's text. finished: whether it is the
    request's last. cached_tokens: of the prompt, found in the prefix cache. prompt_logprobs: with the request's first
    output; None at the first position, which nothing predicts.
    """

    request_id: str
    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    finished: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
