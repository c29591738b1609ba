"""The prompts of code models for what is missing between two texts (fill in the middle, arXiv 2207.14255)."""

from hasten.text.tokenizer import Tokenizer

# Before the text in front of the gap, before the text behind it, and where what is missing begins.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)

# What also ends the text of a gap: the next file, the next project, and padding.
ENDS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<fim_pad>", "<repo_name>", "<file_sep>")


def infill_marks(tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    """The ids of a tokenizer's three marks, or None where it has none."""
    for marks in MARKS:
        ids = [id for id in map(tokenizer.backend.token_to_id, marks) if id is not None]
        if len(ids) == len(marks):
            return ids[0], ids[1], ids[2]
    return None


def infill_prompt(tokenizer: Tokenizer, before: list[int], behind: list[int], *, begin: bool = True) -> list[int]:
    """Token ids that ask for what is missing between two texts, which are given without special tokens.

    begin: put before them what the tokenizer puts before every text. It has `infill_marks`.
    """
    marks = infill_marks(tokenizer)
    assert marks is not None
    first = [id for id in tokenizer.encode("")[:1] if begin and id == tokenizer.bos_id]
    return [*first, marks[0], *before, marks[1], *behind, marks[2]]


def infill_ends(tokenizer: Tokenizer) -> list[int]:
    """The ids that end what is missing, beside those that end every text."""
    ids = [*(infill_marks(tokenizer) or ()), *map(tokenizer.backend.token_to_id, ENDS)]
    return [id for id in ids if id is not None]
