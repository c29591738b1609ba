"""Log-probabilities of tokens, with their texts, as requests ask for them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hasten.engine.request import TokenLogprob
from hasten.engine.stopping import byte_level_alphabet, decoder_steps, is_byte_level, is_byte_token, token_bytes
from hasten.text.tokenizer import Tokenizer

_SPACE = "▁"  # how sentencepiece writes a space


class TokenTexts:
    """The texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._byte_of = byte_level_alphabet() if tokenizer and is_byte_level(decoder_steps(tokenizer)) else None
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """Text and bytes of one token; the text holds U+FFFD where the bytes are no whole characters."""
        found = self._known.get(token)
        if found is None:
            raw = self._bytes(token)
            found = self._known[token] = (raw.decode("utf-8", "replace"), raw)
        return found

    def _bytes(self, token: int) -> bytes:
        own = None if self._tokenizer is None else self._tokenizer.backend.id_to_token(token)
        if own is None:
            return b""
        if self._byte_of is not None:
            return token_bytes(own, self._byte_of)
        return bytes([int(own[3:5], 16)]) if is_byte_token(own) else own.replace(_SPACE, " ").encode()


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], *, tops: Sequence[int], texts: TokenTexts
) -> list[TokenLogprob]:
    """logits (R, V) float32 and the token that followed each row -> its log-probability and the most likely ones.

    tops: how many of the most likely each row wants.
    """
    logprobs = logits.log_softmax(dim=-1)  # (R, V)
    chosen = logprobs[range(len(tokens)), list(tokens)].tolist()
    most = max(tops)
    values, ids = logprobs.topk(most, dim=-1) if most else (logprobs[:, :0], logprobs[:, :0])
    found = []
    for token, logprob, top, row, numbers in zip(tokens, chosen, tops, values.tolist(), ids.tolist(), strict=True):
        likely = tuple(TokenLogprob(int(i), *texts(int(i)), x) for i, x in zip(numbers[:top], row[:top], strict=True))
        found.append(TokenLogprob(token, *texts(token), logprob, likely))
    return found
