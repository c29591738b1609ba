"""The vocabulary: whether two models share one, and padding its rows.

Matrix products are faster if the number of the head's rows is a multiple of the tile (nanoGPT: 50,257 -> 50,304). The
padded rows are zero, never looked up and cut off the logits, so the results are the same; `hasten.save` removes them.
"""

import torch
from torch import Tensor, nn

from hasten.checks import whole
from hasten.errors import ConfigError
from hasten.model.transformer import Transformer
from hasten.text.tokenizer import Tokenizer

LARGEST_MULTIPLE = 1 << 16  # far above any tile of a product


def pad_vocabulary(model: Transformer, multiple: int = 64) -> Transformer:
    """Round the rows of embedding and head up to a multiple, in place; returns the same model.

    Rows past `model.config.vocab_size` are zero; multiple=1 takes padding off. Both matrices become new parameters
    (one, where they are tied), so call it before making an optimizer and before compiling. Logits keep their shape
    (..., vocab_size); a matrix product of another size may sum in another order, so that they agree to the last few
    bits. Raises ConfigError for a multiple below 1.
    """
    config = model.config.padded_to(whole("the multiple of the vocabulary's rows", multiple, high=LARGEST_MULTIPLE))
    if config.padded_vocab_size == model.config.padded_vocab_size:
        return model
    tied = model.head.weight is model.embedding.weight
    model.embedding.weight = _resized(model.embedding.weight, config.vocab_size, config.padded_vocab_size)
    model.embedding.num_embeddings = config.padded_vocab_size
    head = model.embedding.weight if tied else _resized(model.head.weight, config.vocab_size, config.padded_vocab_size)
    model.head.weight = head
    model.head.out_features = config.padded_vocab_size
    model.config = config
    return model


def _resized(old: Tensor, keep: int, rows: int) -> nn.Parameter:
    with torch.no_grad():
        new = torch.zeros(rows, *old.shape[1:], dtype=old.dtype, device=old.device)
        new[:keep] = old[:keep]
    return nn.Parameter(new, requires_grad=old.requires_grad)


def check_vocabulary(other: Transformer, model: Transformer, *, name: str, larger: bool = False) -> None:
    """Raise ConfigError unless both models have the same tokens under the same ids.

    name: of the other model. larger: it may have more rows than the model.
    """
    ours, theirs = model.config.vocab_size, other.config.vocab_size
    if theirs < ours or (theirs > ours and not larger):
        raise ConfigError(f"{name} has {theirs:,} tokens, the model {ours:,}; it needs the same vocabulary")
    if model.tokenizer is None or other.tokenizer is None:
        return
    known, found = _tokens_of(model.tokenizer), _tokens_of(other.tokenizer)
    for token in range(ours):
        if known.get(token) != found.get(token):
            raise ConfigError(
                f"{name} has another vocabulary: token {token} is {found.get(token)!r:.40} there and "
                f"{known.get(token)!r:.40} in the model; take one that was trained with the same tokenizer"
            )


def _tokens_of(tokenizer: Tokenizer) -> dict[int, str]:
    return {number: token for token, number in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
