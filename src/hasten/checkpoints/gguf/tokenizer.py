"""The tokenizer in a GGUF file's metadata: as the `tokenizers` library runs it, and such a one as metadata.

`tokenizer.ggml.model` "gpt2" is byte-level BPE whose split into words `tokenizer.ggml.pre` names; "llama" is
sentencepiece's BPE, whose merges follow from its scores; "gemma4" is the same with merges that are stated.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from hasten.checkpoints.gguf.header import GGUFFile
from hasten.checkpoints.gguf.merges import merges_of
from hasten.checkpoints.gguf.splits import SPLITS, Split
from hasten.errors import CheckpointError, ConfigError
from hasten.text.chat import ChatTemplate
from hasten.text.tokenizer import Tokenizer
from hasten.text.tokenizer_files import add_bos_eos, add_tokens, finish_backend

_Entries = Mapping[str, Any]  # of the metadata that begin with "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # `tokenizer.ggml.token_type`
# Ends of a turn that llama.cpp knows by their text, whatever the metadata say.
ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>")
HARMONY_ENDS = ("<|return|>", "<|call|>")  # where both are, <|end|> ends a message and not the answer


@dataclass(frozen=True, slots=True)
class StoredTokenizer:
    """A tokenizer's metadata, known before the library builds it (which takes a second for 262,144 tokens).

    entries: those that begin with "tokenizer.ggml.", with the defaults of its kind. kinds: one of each token.
    """

    file: GGUFFile
    entries: _Entries
    kinds: np.ndarray
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def build(self) -> Tokenizer:
        """The tokenizer. CheckpointError for one that does not fit together."""
        where, tokens, own = self.file.path, self.entries["tokens"], self.entries
        vocabulary = {token: i for i, token in enumerate(tokens)}
        if len(vocabulary) != len(tokens):
            raise CheckpointError(f"{where}: tokenizer.ggml.tokens must be a list of texts, none of them twice")
        try:
            backend = (_byte_level if own["model"] == "gpt2" else _sentencepiece)(own, vocabulary, where)
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:  # of the library, which has no kind of its own
            raise CheckpointError(f"{where}: its tokenizer does not fit together ({error!s:.200})") from None
        special = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            if (place := _id(own, f"{key}_token_id", len(tokens), where)) is not None:
                special[f"{name}_token"] = tokens[place]
        whole = np.flatnonzero(np.isin(self.kinds, (CONTROL, USER_DEFINED)))
        added = [AddedToken(tokens[i], special=bool(self.kinds[i] == CONTROL), normalized=False) for i in whole]
        add_tokens(backend, tokens=[one for one in added if one.content], special_tokens=special.values())
        finish_backend(backend)
        add_bos_eos(backend, special, own)
        template = self.file.metadata.get("tokenizer.chat_template")
        return Tokenizer(
            backend=backend,
            bos_id=self.bos_id,
            eos_ids=self.eos_ids,
            pad_id=_id(own, "padding_token_id", len(tokens), where),
            special_tokens=special,
            templates={} if template is None else {"default": ChatTemplate(template, origin=str(where))},
        )


def stored_tokenizer(file: GGUFFile) -> StoredTokenizer | None:
    """The metadata of the tokenizer, None where there is none. CheckpointError for an unknown or a damaged one."""
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    model, where = own.get("model"), file.path
    texts = ("tokenizer.ggml.model", str), ("tokenizer.chat_template", str)
    for key, kind in (*texts, ("tokenizer.ggml.add_bos_token", bool), ("tokenizer.ggml.add_eos_token", bool)):
        if not isinstance(file.metadata.get(key, kind()), kind):
            raise CheckpointError(f"{where}: {key} is {file.metadata[key]!r:.60}, and no {kind.__name__}")
    if model in (None, "no_vocab", "none"):
        return None
    if model not in ("gpt2", "llama", "gemma4"):
        raise CheckpointError(f"{where}: tokenizer.ggml.model is {model!r:.60}; gpt2, llama and gemma4 are read")
    tokens: Any = own.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{where}: tokenizer.ggml.tokens must be a list of texts, none of them twice")
    kinds = _numbers(own, "token_type", len(tokens), where, default=NORMAL)
    own = {**({"add_bos_token": _split(own, where).bos} if model == "gpt2" else _SENTENCEPIECE), **own}
    control = {tokens[i]: int(i) for i in np.flatnonzero(kinds == CONTROL)}
    ends = [_id(own, f"{name}_token_id", len(tokens), where) for name in ("eos", "eot", "eom")]
    ends += [control.get(text) for text in ENDS]
    if all(text in control for text in HARMONY_ENDS):
        ends = [*(end for end in ends if end != control.get("<|end|>")), *map(control.get, HARMONY_ENDS)]
    return StoredTokenizer(
        file=file,
        entries=own,
        kinds=kinds,
        bos_id=_id(own, "bos_token_id", len(tokens), where),
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
    )


def read_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """The tokenizer, None where there is none. CheckpointError for an unknown or a damaged one."""
    stored = stored_tokenizer(file)
    return None if stored is None else stored.build()


_SENTENCEPIECE = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True}


def _split(own: _Entries, where: Path) -> Split:
    name = own.get("pre", "default")
    split = SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise CheckpointError(f"{where}: tokenizer.ggml.pre is {name!r:.60}; known are {', '.join(SPLITS)}")
    return split


def _byte_level(own: _Entries, vocabulary: dict[str, int], where: Path) -> tokenizers.Tokenizer:
    split = _split(own, where)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, _merges(own, where), ignore_merges=split.ignore_merges))
    split.apply(backend)
    return backend


def _merges(own: _Entries, where: Path) -> list[tuple[str, str]]:
    merges = own.get("merges", [])
    pairs = [tuple(merge.split(" ")) for merge in merges] if isinstance(merges, list) else None
    if pairs is None or any(len(pair) != 2 for pair in pairs):
        raise CheckpointError(f"{where}: tokenizer.ggml.merges must be a list of two tokens each")
    return [(first, second) for first, second in pairs]


def _sentencepiece(own: _Entries, vocabulary: dict[str, int], where: Path) -> tokenizers.Tokenizer:
    scores = _numbers(own, "scores", len(vocabulary), where, default=0)
    unknown = _id(own, "unknown_token_id", len(vocabulary), where)
    named = {} if unknown is None else {"unk_token": own["tokens"][unknown]}
    merges = _merges(own, where) if own["model"] == "gemma4" else merges_of(vocabulary, scores)  # Gemma 4's are stated
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True, **named))
    # As llama.cpp: a space before a text, and after every special token.
    prefix = own.get("add_space_prefix") is not False
    spaces = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return backend


def _numbers(own: _Entries, key: str, count: int, where: Path, *, default: int) -> np.ndarray:
    """One number for each token."""
    values = own.get(key)
    if values is None:
        return np.full(count, default)
    if not isinstance(values, np.ndarray) or len(values) != count or not np.isfinite(values).all():
        raise CheckpointError(f"{where}: tokenizer.ggml.{key} must be {count:,} numbers, one for each token")
    return values


def _id(own: _Entries, key: str, count: int, where: Path) -> int | None:
    value = own.get(key)
    if value is not None and not (type(value) is int and 0 <= value < count):
        raise CheckpointError(f"{where}: tokenizer.ggml.{key} is {value!r:.40}; there are {count:,} tokens")
    return value


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
        scores = _scores(pairs, model["vocab"], len(tokens))
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


def _scores(merges: Sequence[tuple[str, ...]], vocabulary: dict[str, int], count: int) -> list[float]:
    """A score for each token, by which `merges_of` finds merges in this order, if any scores can.

    All merges that make a token have its score. So tokens whose merges alternate have equal ones.
    """
    made = [vocabulary["".join(pair)] for pair in merges]
    last = {token: place for place, token in enumerate(made)}
    scores, score, end = [0.0] * count, 0.0, -1
    for place, token in enumerate(made):
        if place > end:
            score -= 1.0
        end = max(end, last[token])
        scores[token] = score
    return scores


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
