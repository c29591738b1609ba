"""Log-likelihoods of given continuations, as multiple-choice tests need them."""

from collections.abc import Callable, Sequence

import torch

from hasten.engine.prompts import check_ids
from hasten.errors import ConfigError
from hasten.evaluation.perplexity import BATCH_TOKENS
from hasten.model.context import training_context
from hasten.model.transformer import Transformer
from hasten.ops.draw import likeliest

ROWS = 256  # of which the logits are in memory


@torch.inference_mode()
def log_likelihoods(
    model: Transformer,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[float, bool]]:
    """Score (context, continuation) pairs of token ids: the log-probability of each continuation in nats, and whether
    greedy decoding would give it (each of its tokens is the most likely one).

    Pairs that process the same tokens, such as one-token answers to the same question, are computed once. progress
    is called with the number of tokens processed so far and the total. Raises ConfigError for an empty context, ids
    outside the vocabulary, and pairs longer than the model's positions.
    """
    sharing: dict[tuple[int, ...], list[int]] = {}  # what is read -> the pairs that read it
    for index, (context, continuation) in enumerate(pairs):
        read = (*context, *continuation[:-1])
        if not context or len(read) > model.config.max_positions:
            raise ConfigError(
                f"a context has at least one token, and what is read is at most {model.config.max_positions}; found "
                f"{len(context)} and {len(read)}"
            )
        check_ids(model, [*read, *continuation[-1:]])
        if continuation:
            sharing.setdefault(read, []).append(index)
    sums = torch.zeros(len(pairs), dtype=torch.float64, device=model.device)
    misses = torch.zeros(len(pairs), dtype=torch.int64, device=model.device)
    reads = sorted(sharing, key=len, reverse=True)  # by length, so that little is padding
    start, done, total = 0, 0, sum(map(len, reads))
    while start < len(reads):
        longest = len(reads[start])
        batch = reads[start : start + max(1, BATCH_TOKENS // longest)]
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        asked = []  # (row of the flattened tokens, the token that follows it, its pair)
        for number, read in enumerate(batch):
            tokens[number, : len(read)] = torch.tensor(read)
            for pair in sharing[read]:
                context, continuation = pairs[pair]
                first = number * longest + len(context) - 1
                asked += [(first + place, token, pair) for place, token in enumerate(continuation)]
        positions = torch.arange(longest, device=model.device).expand(len(batch), -1)
        states = model.states(tokens.to(model.device), positions, training_context(model, longest)).flatten(0, -2)
        for part in torch.tensor(asked, device=model.device).reshape(-1, 3).split(ROWS):
            rows, targets, pair_of_row = part.unbind(1)
            found = model.scores(states[rows]).log_softmax(dim=-1)
            sums.index_add_(0, pair_of_row, found.gather(1, targets[:, None])[:, 0].double())
            misses.index_add_(0, pair_of_row, (likeliest(found) != targets).long())
        start, done = start + len(batch), done + sum(map(len, batch))
        progress(done, total)
    return list(zip(sums.tolist(), (misses == 0).tolist(), strict=True))
