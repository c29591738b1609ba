"""Log-probabilities of prompts, gathered while the prompts are read in chunks."""

from __future__ import annotations

from torch import Tensor

from hasten.serving.groups import SequenceGroup
from hasten.serving.logprobs import TokenTexts, token_logprobs
from hasten.serving.sequences import Scheduled


def scored_rows(group: SequenceGroup, entry: Scheduled) -> int:
    """How many rows of the entry predict a token of a prompt whose log-probabilities are wanted."""
    if group.prompt_logprobs is None or group.trunk is not entry.sequence:
        return 0
    return max(0, min(entry.end, len(group.request.prompt) - 1) - entry.start)


def note(group: SequenceGroup, entry: Scheduled, rows: Tensor, texts: TokenTexts) -> None:
    """Keep what an entry says of its prompt. rows (`scored_rows`, V) float32 logits."""
    count = len(rows)
    if count:
        assert group.prompt_logprobs is not None
        following = slice(entry.start + 1, entry.start + 1 + count)
        tops = [group.request.prompt_logprobs or 0] * count
        group.prompt_logprobs[following] = token_logprobs(rows, group.request.prompt[following], tops=tops, texts=texts)
