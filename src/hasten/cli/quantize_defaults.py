"""Defaults of `hasten quantize` that keep the folder readable for other programs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.model.transformer import Transformer
    from hasten.quantization import Scheme


def for_others(scheme: Scheme, model: Transformer, *, head: bool) -> tuple[Scheme, list[str]]:
    """The scheme with defaults for this model, and a line about each unusual one.

    head: whether the lm_head's format is left to us. If it is tied to the embedding it stays as it is, because
    transformers and vLLM do not read quantized embeddings.
    """
    from hasten.quantization.schemes import Mixed

    notes: list[str] = []
    if isinstance(scheme, Mixed):
        return scheme, notes
    if head and model.tied and scheme.lm_head != "none":
        weight = model.head.weight
        saved = weight.numel() * (weight.element_size() - 1) / 1e6
        notes.append(
            "the lm_head, one matrix with the embedding, is not quantized, so that transformers and vLLM can read the "
            f"folder; --lm-head int8 makes it {saved:,.0f} MB smaller and faster, for hasten alone"
        )
        scheme = replace(scheme, lm_head="none")
    return scheme, notes
