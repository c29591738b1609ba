"""What `hasten quantize` takes where nothing is said, so that other programs read the folder it writes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.model.transformer import Transformer
    from hasten.quantization import Scheme


def for_others(scheme: Scheme, model: Transformer, *, head: bool, group: bool) -> tuple[Scheme, list[str]]:
    """The scheme with defaults for this model, and a line for each that is not the usual one.

    head: the lm_head's format is ours to choose: one that is tied to the embedding stays as it is, since transformers
    and vLLM read no quantized embedding. group: so is the group size: the largest that divides the input features of
    every layer, as compressed-tensors needs it.
    """
    from hasten.quantization.rounding import GROUP_SIZES
    from hasten.quantization.schemes import Int4, Mixed

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
    if group and isinstance(scheme, Int4):
        linears: list[Any] = [model.get_submodule(name) for name in scheme.layers(model) if name != "embedding"]
        sizes = {linear.in_features for linear in linears}
        fits = [size for size in sorted(GROUP_SIZES, reverse=True) if size and not any(k % size for k in sizes)]
        if fits and scheme.group_size not in fits:
            notes.append(f"groups of {fits[0]}: {scheme.group_size} do not divide the input features of every layer")
            scheme = replace(scheme, group_size=fits[0])
    return scheme, notes
