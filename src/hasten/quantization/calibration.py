"""Calibration samples: tokens of a text, on which a method observes the inputs of each layer."""

from collections.abc import Iterable

import torch
from torch import Tensor

from hasten.checks import LARGEST_SEED, whole
from hasten.errors import ConfigError
from hasten.text.tokenizer import Tokenizer

SPREAD = 4  # the samples are drawn from this many times their number of tokens


def calibration_tokens(
    tokenizer: Tokenizer, documents: Iterable[str], *, samples: int = 128, length: int = 512, seed: int = 0
) -> Tensor:
    """Draw samples from a text: int64 (samples, length), fewer if the text is shorter; reproducible by the seed.

    Documents are joined in random order and cut into pieces of `length`, from which the samples are drawn. Each begins
    with the tokens that the tokenizer puts before every text. Raises ConfigError for a text shorter than one sample.
    """
    samples, length = whole("calibration samples", samples), whole("calibration length", length, low=2)
    generator = torch.Generator().manual_seed(whole("the calibration seed", seed, low=0, high=LARGEST_SEED))
    texts = list(documents)
    before = tokenizer.encode("")
    size = length - len(before)
    if size < 1:
        raise ConfigError(f"calibration length must be above the {len(before)} tokens before a text; found {length}")
    ids: list[int] = []
    for index in torch.randperm(len(texts), generator=generator).tolist():
        ids += tokenizer.encode(texts[index])[len(before) :]
        if len(ids) >= SPREAD * samples * size:
            break
    pieces = len(ids) // size
    if not pieces:
        raise ConfigError(
            f"the calibration text is shorter than one sample ({len(ids)} of {size} tokens); give more, or a smaller "
            "--length"
        )
    cut = torch.tensor(ids[: pieces * size], dtype=torch.int64).view(pieces, size)
    chosen = cut[torch.randperm(pieces, generator=generator)[:samples]]
    return torch.cat((torch.tensor(before, dtype=torch.int64).expand(len(chosen), -1), chosen), dim=1)


def check_calibration(tokens: Tensor | None, vocab_size: int, positions: int) -> Tensor:
    """Return the tokens (S, L). Raises ConfigError if there are none, or the model cannot take them as samples."""
    if tokens is None:
        raise ConfigError("this method looks at calibration text; give calibration= (tokens), or --calibration TEXT")
    if not isinstance(tokens, Tensor):
        raise ConfigError(f"calibration is int64 tokens (samples, length); found {type(tokens).__name__}")
    if tokens.dtype != torch.int64 or tokens.dim() != 2 or not tokens.numel():
        raise ConfigError(f"calibration is int64 tokens (samples, length); found {tokens.dtype} {tuple(tokens.shape)}")
    least, most = (int(end) for end in tokens.aminmax())
    if least < 0 or most >= vocab_size:
        raise ConfigError(f"calibration tokens are 0 to {vocab_size - 1} for this model; found {least} to {most}")
    if tokens.shape[1] > positions:
        raise ConfigError(f"this model has {positions} positions; calibration samples have {tokens.shape[1]} tokens")
    return tokens
