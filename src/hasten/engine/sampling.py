"""From logits to the next token: penalties, temperature, truncation, and the draw.

Everything is a function of tensors, row by row on a batch (B, V), each row with its own settings. Nothing waits for the
device and nothing depends on values, so it can be compiled or captured with the model's step. The steps and their order
are Hugging Face's (`transformers.generation.logits_process`):

    logit bias -> banned tokens -> repetition -> presence, frequency -> temperature -> top-k -> top-p -> min-p -> draw

(vLLM has the same penalties and applies min-p before top-k and top-p.) The draw, and where its noise comes from:
`hasten.ops.draw`.
"""

import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hasten.engine.params import SamplingParams
from hasten.errors import ConfigError
from hasten.ops.draw import draw, draw_at_once, largest, least_kept, likeliest


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """The settings of a batch of B rows as tensors. A setting that is off in every row is None and costs nothing.

    vocab_size: tokens the tokenizer has; logits beyond (padding of the embedding) are never looked at.
    seeds: (B,) int64. all_greedy: no row draws. max_top_k: the largest k of any row, where every row has one (else V).
    """

    vocab_size: int
    seeds: Tensor  # (B,) int64
    all_greedy: bool
    greedy: Tensor | None  # (B,) bool
    temperature: Tensor | None  # (B, 1) float32, 1 for greedy rows
    top_k: Tensor | None  # (B, 1) int64, V where off
    max_top_k: int
    every_row_top_k: bool
    top_p: Tensor | None  # (B, 1) float32
    log_min_p: Tensor | None  # (B, 1) float32, -inf where off
    repetition: Tensor | None  # (B, 1) float32
    presence: Tensor | None  # (B, 1) float32
    frequency: Tensor | None  # (B, 1) float32
    bias: Tensor | None  # (B, V) float32

    @classmethod
    def stack(
        cls, params: Sequence[SamplingParams], *, vocab_size: int, device: torch.device | str = "cpu"
    ) -> "RowParams":
        """Settings of each row, in order. A row without a seed gets a random one.

        Raises ConfigError for a logit_bias on an id that is not in the vocabulary, and for one that forbids all of it.
        """

        def column(values: list[float], off: float) -> Tensor | None:
            if all(value == off for value in values):
                return None
            return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

        bias = None
        if any(p.logit_bias for p in params):
            bias = torch.zeros(len(params), vocab_size)
            for row, p in enumerate(params):
                for token, value in p.logit_bias.items():
                    if token >= vocab_size:
                        raise ConfigError(f"logit_bias names token {token}; the vocabulary has {vocab_size} tokens")
                    bias[row, token] = value
                if bias[row].isneginf().all():
                    raise ConfigError(
                        f"logit_bias forbids (-inf) all {vocab_size} tokens of the vocabulary; leave one that may come"
                    )
            bias = bias.to(device)
        ks = [min(p.top_k or vocab_size, vocab_size) for p in params]
        limited = [k for k in ks if k < vocab_size]
        greedy = [p.greedy for p in params]
        seeds = [secrets.randbits(63) if p.seed is None else p.seed for p in params]
        return cls(
            vocab_size=vocab_size,
            seeds=torch.tensor(seeds, dtype=torch.int64, device=device),
            all_greedy=all(greedy),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            temperature=column([1.0 if p.greedy else p.temperature for p in params], 1.0),
            top_k=torch.tensor(ks, device=device).unsqueeze(1) if limited else None,
            max_top_k=max(limited, default=vocab_size),
            every_row_top_k=0 < len(limited) == len(ks),
            top_p=column([p.top_p for p in params], 1.0),
            log_min_p=column([math.log(p.min_p) if p.min_p else -math.inf for p in params], -math.inf),
            repetition=column([p.repetition_penalty for p in params], 1.0),
            presence=column([p.presence_penalty for p in params], 0.0),
            frequency=column([p.frequency_penalty for p in params], 0.0),
            bias=bias,
        )

    @property
    def largest_only(self) -> bool:
        """Whether each row takes the largest of its logits as they are."""
        return self.all_greedy and self.bias is None and not self.needs_history

    @property
    def needs_history(self) -> bool:
        return any(setting is not None for setting in (self.repetition, self.presence, self.frequency))

    def select(self, rows: Sequence[int]) -> "RowParams":
        """The settings of these rows, in this order; one may be there several times."""
        at = torch.tensor(rows, device=self.seeds.device)
        own = {name: getattr(self, name) for name in self.__slots__}
        chosen: dict[str, Any] = {name: value[at] for name, value in own.items() if isinstance(value, Tensor)}
        return replace(self, **chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What each row has said. counts: (B, V) int32, of the output. seen: (B, V) bool, of prompt and output."""

    counts: Tensor
    seen: Tensor

    @classmethod
    def of_prompts(
        cls,
        prompts: Sequence[Sequence[int]],
        *,
        outputs: Sequence[Sequence[int]] = (),
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> "History":
        """The history of rows that have said nothing after their prompts, or `outputs`."""
        counts = torch.zeros(len(prompts), vocab_size, dtype=torch.int32)
        for row, output in enumerate(outputs):
            counts[row] = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab_size)
        seen = counts > 0
        for row, prompt in enumerate(prompts):
            seen[row, torch.tensor(prompt, dtype=torch.int64)] = True
        return cls(counts=counts.to(device), seen=seen.to(device))

    def observe(self, tokens: Tensor, *, rows: Sequence[int] | None = None) -> None:
        """Count the tokens int64 that were just taken, one of each of the rows (all B), in place: the addresses stay,
        for captured graphs.
        """
        at = torch.arange(len(tokens), device=tokens.device)
        if rows is not None:
            at = torch.tensor(rows, device=tokens.device)
        self.counts.index_put_((at, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
        self.seen[at, tokens] = True

    def select(self, rows: Sequence[int]) -> "History":
        """A copy of these rows."""
        at = torch.tensor(rows, device=self.counts.device)
        return History(counts=self.counts[at], seen=self.seen[at])


def banned_ends(
    params: Sequence[SamplingParams],
    *,
    steps: Sequence[int],
    end_ids: Sequence[Collection[int]],
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> Tensor | None:
    """(B, V) bool: in rows before their `min_new_tokens` (steps: tokens generated so far), the ids that would end them.

    None where all rows are past it. Ids outside the vocabulary never come anyway.
    """
    early = [step < row.min_new_tokens for row, step in zip(params, steps, strict=True)]
    if not any(early):
        return None
    rows = torch.zeros(len(early), vocab_size, dtype=torch.bool)
    for row, tokens in enumerate(end_ids):
        rows[row, [token for token in tokens if early[row] and token < vocab_size]] = True
    return rows.to(device)


def process(logits: Tensor, rows: RowParams, *, history: History | None = None, banned: Tensor | None = None) -> Tensor:
    """Logits (B, V or more, any float dtype) -> the logits to draw from (B, V) float32; removed tokens are -inf.

    history: needed where a penalty is on. banned: bool, (B, V) or (V,), tokens that must not come now (the end-of-text
    ids before `min_new_tokens`, for example). A row of which everything is removed stays a row of -inf: there is no
    NaN, and `sample` gives its token 0. Greedy rows are penalized, never truncated in effect (their best token stays).
    """
    return _truncated(adjust(logits, rows, history=history, banned=banned), rows)


def adjust(logits: Tensor, rows: RowParams, *, history: History | None = None, banned: Tensor | None = None) -> Tensor:
    """Logits (B, V or more) -> (B, V) after bias, banned tokens and penalties; without any, a view in their dtype."""
    x = logits[:, : rows.vocab_size]
    if rows.bias is not None:
        x = x.float() + rows.bias
    if banned is not None:
        x = x.masked_fill(banned, -math.inf)
    if rows.needs_history:
        if history is None:
            raise ConfigError("a repetition, presence or frequency penalty needs the history of the rows")
        x = penalize(x.float(), rows, history)
    return x


def penalize(x: Tensor, rows: RowParams, history: History) -> Tensor:
    """Repetition (CTRL, Keskar et al. 2019, arXiv 1909.05858) on prompt and output; presence and frequency (OpenAI's
    API reference) on the output only. x: (B, V) float32.
    """
    if rows.repetition is not None:
        x = torch.where(history.seen, torch.where(x < 0, x * rows.repetition, x / rows.repetition), x)
    if rows.presence is not None:
        x = x - rows.presence * (history.counts > 0)
    if rows.frequency is not None:
        x = x - rows.frequency * history.counts
    return x


def _truncated(x: Tensor, rows: RowParams) -> Tensor:
    """Adjusted logits -> scores float32: temperature, then top-k, top-p and min-p, which remove tokens."""
    x = x.float()
    if rows.temperature is not None:
        # The row's maximum is taken out first: logits over a tiny temperature would overflow to inf, and inf - inf is
        # NaN. The distribution does not change.
        top = x.amax(dim=-1, keepdim=True)  # (B, 1)
        x = (x - torch.where(top.isfinite(), top, 0.0)) / rows.temperature
    if rows.top_k is not None or rows.top_p is not None:
        x = keep_most_likely(x, rows)
    if rows.log_min_p is not None:
        # Min-p (Nguyen et al. 2024, arXiv 2407.01082): p_i >= min_p * max p, in logarithms.
        x = x.masked_fill(x < x.amax(dim=-1, keepdim=True) + rows.log_min_p, -math.inf)
    return x


def keep_most_likely(x: Tensor, rows: RowParams) -> Tensor:
    """Top-k (Fan et al. 2018), then top-p on what is left (nucleus, Holtzman et al. 2020, arXiv 1904.09751).

    Both keep every token that is at least as likely as the last one kept, so equal logits share one fate. (Hugging Face
    does so for top-k; its top-p takes equal ones in the order its sort leaves them.) x: (B, V) float32.
    """
    if (least := least_kept(x, rows.top_k, rows.top_p)) is not None:
        return x.masked_fill(x < least, -math.inf)
    few = rows.top_p is None or rows.every_row_top_k
    ordered = largest(x, rows.max_top_k) if few else _most_likely(x, rows)  # (B, K or V), descending
    if rows.top_k is not None:
        last = ordered.gather(1, rows.top_k.clamp(max=ordered.shape[1]) - 1)  # (B, 1)
        last = torch.where(rows.top_k < rows.vocab_size, last, -math.inf)
        x = x.masked_fill(x < last, -math.inf)
        ordered = ordered.masked_fill(ordered < last, -math.inf)
    if rows.top_p is not None:
        p = (ordered - x.logsumexp(dim=-1, keepdim=True)).exp()  # (B, K)
        before = p.cumsum(dim=-1) - p  # probability of the more likely tokens
        kept = (before < rows.top_p).sum(dim=-1, keepdim=True).clamp(min=1)  # (B, 1)
        last = torch.where(rows.top_p < 1, ordered.gather(1, kept - 1), -math.inf)
        x = x.masked_fill(x < last, -math.inf)
    return x


def _most_likely(x: Tensor, rows: RowParams) -> Tensor:
    """The part of x (B, V), sorted, that top-p may keep. Sorting all of a large vocabulary is the last resort.

    Where it can be looked at without waiting for a device: the first few hundred usually have the probability.
    """
    assert rows.top_p is not None
    if x.device.type == "cpu" and x.shape[1] > 4 * _FEW and not torch.compiler.is_compiling():
        ordered = largest(x, _FEW)
        mass = (ordered - x.logsumexp(dim=-1, keepdim=True)).exp().sum(dim=-1, keepdim=True)
        enough = (mass * 0.999 > rows.top_p) | (rows.top_p >= 1)  # with room for the sums' rounding
        short = enough if rows.top_k is None else enough & ((rows.top_k <= _FEW) | (rows.top_k == rows.vocab_size))
        if bool(short.all()):
            return ordered
    return x.sort(dim=-1, descending=True).values


def sample(scores: Tensor, rows: RowParams, *, steps: Tensor | None = None) -> Tensor:
    """Processed logits (B, V) -> tokens (B,) int64.

    Greedy rows take the largest, the lowest id among equals. The others need `steps` (B,) int64, tokens generated so
    far: the noise is that of seed and step. A row of -inf gives token 0.
    """
    if rows.all_greedy:
        return likeliest(scores)
    if steps is None:
        raise ConfigError("rows with a temperature above 0 need their steps, for the noise to draw with")
    drawn = draw(scores, rows.seeds, steps)
    return drawn if rows.greedy is None else torch.where(rows.greedy, likeliest(scores), drawn)


def next_tokens(
    logits: Tensor, rows: RowParams, *, steps: Tensor, history: History | None = None, banned: Tensor | None = None
) -> Tensor:
    """Logits of the last position (B, V or more) -> tokens (B,) int64. steps: (B,) int64, tokens generated so far."""
    x = adjust(logits, rows, history=history, banned=banned)
    tokens = draw_at_once(
        x,
        rows.seeds,
        steps,
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        log_min_p=rows.log_min_p,
        greedy=rows.greedy,
        drawn=not rows.all_greedy,
    )
    return sample(_truncated(x, rows), rows, steps=steps) if tokens is None else tokens


_FEW = 512  # tokens that top-p is looked for in before all are sorted
