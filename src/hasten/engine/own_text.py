"""Calibration text that the model writes itself: it needs no file, and is in the languages and forms the model knows.

Sampled at temperature 1 from the first token on, as for LLM-QAT (arXiv 2305.17888); quantization by such text was
compared with real text in arXiv 2410.17170.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hasten.checks import LARGEST_SEED, whole
from hasten.engine.generate import generate
from hasten.engine.params import SamplingParams
from hasten.errors import ConfigError
from hasten.model.config import ModelConfig
from hasten.model.transformer import Transformer

BATCH = 32  # sequences that are sampled together


def check_wanted(config: ModelConfig, *, samples: int = 128, length: int = 512, seed: int = 0) -> None:
    """Raise ConfigError for numbers that `own_text` cannot take, before a model is loaded for it."""
    whole("calibration samples", samples)
    whole("the calibration seed", seed, low=0, high=LARGEST_SEED)
    if whole("calibration length", length, low=2) > config.max_positions:
        raise ConfigError(f"this model has {config.max_positions} positions; found a calibration length of {length}")


def own_text(
    model: Transformer,
    *,
    samples: int = 128,
    length: int = 512,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Samples of what the model writes, int64 (samples, length), for `quantize(calibration=)`.

    Each begins with the tokens that the tokenizer puts before every text; where there are none, with a token drawn from
    the whole vocabulary. A text that ends is followed by the next, as in training. The model is fused, as in
    `generate`. progress: called with the samples done, and all. The same seed gives the same text on the same kernels.
    """
    check_wanted(model.config, samples=samples, length=length, seed=seed)
    if model.tokenizer is None:
        raise ConfigError("calibration text needs a tokenizer, which this model's folder lacks")
    before = model.tokenizer.encode("")
    if length <= len(before):
        raise ConfigError(f"calibration length must be above the {len(before)} tokens before a text; found {length}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(model.tokenizer.vocab_size, (samples, 1), generator=generator).tolist()
    seeds = torch.randint(LARGEST_SEED, (samples,), generator=generator).tolist()
    prompts = [before or first for first in drawn]
    rows: list[list[int]] = []
    for start in range(0, samples, BATCH):
        part = prompts[start : start + BATCH]
        new = length - len(part[0])
        params = [SamplingParams(seed=own, max_new_tokens=new, ignore_eos=True) for own in seeds[start : start + BATCH]]
        rows += [prompt + output.tokens for prompt, output in zip(part, generate(model, part, params), strict=True)]
        progress(len(rows), samples)
    return torch.tensor(rows, dtype=torch.int64)
