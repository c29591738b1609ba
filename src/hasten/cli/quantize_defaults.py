"""What `hasten quantize` takes where nothing is said, so that other programs read the folder it writes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.model.transformer import Transformer
    from hasten.quantization import Scheme


def for_others(scheme: Scheme, model: Transformer, *, head: bool) -> tuple[Scheme, list[str]]:
    """The scheme with defaults for this model, and a line for each that is not the usual one.

    head: the lm_head's format was not given: one that is tied to the embedding stays as it is, since transformers and
    vLLM read no quantized embedding.
    """
    from hasten.quantization.schemes import Mixed

    notes: list[str] = []
    if isinstance(scheme, Mixed):
        return scheme, notes
    if head and model.tied and scheme.lm_head != "none":
        weight = model.head.weight
        saved = weight.numel() * (weight.element_size() - 1) / 1e6
        notes.append(
            "the lm_head stays as it is, one matrix with the embedding, so that transformers and vLLM read the folder; "
            f"--lm-head int8 makes it {saved:,.0f} MB smaller, which each token need not read then, for hasten alone"
        )
        scheme = replace(scheme, lm_head="none")
    return scheme, notes
