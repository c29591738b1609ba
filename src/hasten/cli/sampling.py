"""From command-line options and the folder's generation_config.json to SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.cli.options import SamplingOptions
from hasten.generation.params import SamplingParams


def sampling_params(
    options: SamplingOptions, *, seed: int | None, ignore_eos: bool, folder: Mapping[str, Any]
) -> SamplingParams:
    """What was given on the command line, else what the folder recommends, else plain sampling.

    A folder that says `do_sample: false`, or says nothing, is sampled at temperature 1: to be greedy is one option
    away, and a text that loops is nobody's wish. Raises ConfigError for values that make no sense.
    """
    recommended = folder if folder.get("do_sample") else {}
    chosen: dict[str, Any] = {}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        given = getattr(options, name)
        value = recommended.get(name) if given is None else given
        if value is not None:
            chosen[name] = value
    return SamplingParams(
        **chosen,
        max_new_tokens=options.max_new_tokens,
        min_new_tokens=options.min_new_tokens,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=options.logit_bias or {},
        stop=options.stop,
        seed=seed,
        ignore_eos=ignore_eos,
    )
