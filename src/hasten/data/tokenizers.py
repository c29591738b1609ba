"""Training a tokenizer on a corpus: byte-level BPE, or one token a character."""

from collections.abc import Iterable

from hasten.errors import ConfigError, DataError
from hasten.text.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"
_BYTES = 256  # the initial alphabet of byte-level BPE
_UNKNOWN = "\ufffd"  # Unicode's replacement character: an unknown character decodes to what readers know as one


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Byte-level BPE (Radford et al. 2019, GPT-2) with GPT-2's pre-tokenizer, learned from `texts`.

    vocab_size: at most this many ids: 256 bytes, `<|endoftext|>` (id 0; begins, ends and separates texts), and merges;
    a small corpus may have fewer pairs to merge.
    The same texts give the same tokenizer. Raises ConfigError for a vocabulary without room for the bytes.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < _BYTES + 1:
        raise ConfigError(
            f"vocab_size {vocab_size} is too small: the bytes and {END_OF_TEXT} alone take {_BYTES + 1}; give more, or "
            "use tokenizer_kind 'character'"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    # No prefix space: a text begins with its first character, and pieces of a text encode as the whole.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    backend.train_from_iterator(iter(texts), trainer=trainer)
    return Tokenizer.from_tokenizers(backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def train_characters(texts: Iterable[str]) -> Tokenizer:
    """One token a character (Unicode code point) that occurs in `texts`, in code-point order after the special ones.

    Id 0 is `<|endoftext|>` (begins, ends and separates texts), id 1 is every unknown character and decodes to U+FFFD.
    Decoding joins the characters with nothing between them. Raises DataError where there is no text.
    """
    import tokenizers
    from tokenizers import decoders, models

    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    if not characters:
        raise DataError("there is no text to take the characters from")
    ordered = [END_OF_TEXT, _UNKNOWN, *sorted(characters - {_UNKNOWN})]
    # BPE without merges: a vocabulary lookup for every character, in a tenth of the memory of splitting into words.
    vocabulary = {token: number for number, token in enumerate(ordered)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=_UNKNOWN, fuse_unk=False))
    backend.decoder = decoders.Fuse()
    return Tokenizer.from_tokenizers(backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
