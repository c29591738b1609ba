"""Log-probabilities in the two shapes that OpenAI has: lists side by side (completions), objects (chat)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hasten.serving.request import TokenLogprob

LOWEST = -9999.0  # what stands for minus infinity, which JSON does not have (vLLM's value)


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` of a chat choice or chunk."""
    return {
        "content": [{**_entry(token), "top_logprobs": [_entry(t) for t in token.top]} for token in tokens],
        "refusal": None,
    }


def completion_logprobs(tokens: Sequence[TokenLogprob | None], *, texts: Sequence[str], offset: int) -> dict[str, Any]:
    """The `logprobs` of a completion choice or chunk. texts: of each token; offset: characters before the first.

    None, at the first token of a prompt: nothing predicts it.
    """
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": list(texts),
        "token_logprobs": [None if token is None else max(token.logprob, LOWEST) for token in tokens],
        "top_logprobs": [None if token is None else _top(token) for token in tokens],
        "text_offset": offsets,
    }


def _top(token: TokenLogprob) -> dict[str, float]:
    """The most likely tokens by text; of tokens with the same text the most likely. The taken one is always there."""
    found = {token.text: max(token.logprob, LOWEST)}
    for other in token.top:
        found[other.text] = max(found.get(other.text, LOWEST), other.logprob, LOWEST)
    return found


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LOWEST), "bytes": list(token.raw)}
