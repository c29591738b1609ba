"""A tokenizer as the metadata of a GGUF file."""

import json
from typing import Any

import tokenizers
from tokenizers import models

from hasten.errors import ConfigError
from hasten.model.gguf.tokenizer import BYTE, CONTROL, NORMAL, SPLITS, UNKNOWN, UNUSED, USER_DEFINED, merges_of
from hasten.model.tokenizer import Tokenizer


def tokenizer_entries(tokenizer: Tokenizer | None, rows: int) -> dict[str, Any]:
    """The metadata. rows: of the embedding; llama.cpp wants a token for each. ConfigError for what it does not have."""
    if tokenizer is None:
        return {"tokenizer.ggml.model": "no_vocab"}
    backend = tokenizer.backend
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if tokenizer.vocab_size > rows:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size:,} tokens and the embedding {rows:,} rows")
    added = backend.get_added_tokens_decoder()
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    for text, i in vocabulary.items():
        token = added.get(i)
        tokens[i], kinds[i] = text, NORMAL if token is None else CONTROL if token.special else USER_DEFINED
    own: dict[str, Any] = {"tokens": tokens, "token_type": kinds} | _model(backend, tokens, kinds)
    around = tokenizer.encode("")
    own["add_bos_token"] = around[:1] == [tokenizer.bos_id]
    own["add_eos_token"] = bool(around[own["add_bos_token"] :])
    ends = zip(("eos", "eot", "eom"), tokenizer.eos_ids, strict=False)
    special = {"bos": tokenizer.bos_id, "padding": tokenizer.pad_id} | dict(ends)
    own |= {f"{name}_token_id": value for name, value in special.items() if value is not None}
    entries = {f"tokenizer.ggml.{key}": value for key, value in own.items() if value != []}
    template = tokenizer.chat_template
    return entries | ({} if template is None else {"tokenizer.chat_template": template})


def _model(backend: tokenizers.Tokenizer, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """What turns words into tokens, and text into words; marks the tokens of single bytes among the kinds."""
    spec = json.loads(backend.to_str())
    model = spec["model"]
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model.get("merges", ())]
    for name, split in SPLITS.items():
        scratch = tokenizers.Tokenizer(models.BPE())
        split.apply(scratch)
        wanted = json.loads(scratch.to_str())
        same = all(_steps(spec[part]) == _steps(wanted[part]) for part in ("normalizer", "pre_tokenizer"))
        if same and split.ignore_merges == model.get("ignore_merges"):
            return {"model": "gpt2", "pre": name, "merges": [" ".join(pair) for pair in pairs]}
    spaces = _spaces(spec)
    if model["type"] == "BPE" and model.get("byte_fallback") and spaces is not None:
        scores = [0.0] * len(tokens)
        for place, (left, right) in reversed(list(enumerate(pairs))):
            scores[model["vocab"][left + right]] = -float(place)
        if merges_of(model["vocab"], scores) == pairs:
            for i, token in enumerate(tokens):
                if len(token) == 6 and token.startswith("<0x"):
                    kinds[i] = BYTE
            entries = {"model": "llama", "scores": scores, "add_space_prefix": spaces}
            unknown = model["vocab"].get(model.get("unk_token"))
            if unknown is None:
                return entries
            kinds[unknown] = UNKNOWN
            return entries | {"unknown_token_id": unknown}
    raise ConfigError(
        "llama.cpp has no tokenizer that splits text as this one does: it has sentencepiece's BPE, and byte-level BPE "
        f"as in {', '.join(SPLITS)}. Write a folder instead (hasten export)"
    )


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, without what changes no token."""
    steps = [] if part is None else part.get("pretokenizers", part.get("normalizers", [part]))
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]


def _spaces(spec: dict[str, Any]) -> bool | None:
    """Whether sentencepiece's spaces begin a text with one; None where it is split otherwise."""
    before, words = _steps(spec["normalizer"]), _steps(spec["pre_tokenizer"])
    if not before and len(words) == 1 and words[0]["type"] == "Metaspace" and not words[0]["split"]:
        return words[0]["prepend_scheme"] != "never"
    kinds = [step["type"] for step in before]
    whole = all(step["type"] == "Split" for step in words)  # at spaces, of which none is left
    if kinds in (["Prepend", "Replace"], ["Replace"]) and before[-1]["content"] == "▁" and whole:
        return len(kinds) == 2
    return None
