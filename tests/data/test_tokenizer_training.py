"""Training tokenizers: lossless, deterministic, and the same through transformers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data import train_bpe, train_characters
from hasten.data.documents import cut_text
from hasten.errors import ConfigError, DataError

TEXT = "def answer(question):\n    return 42  # naïve 漢字\n\n\nclass Thing:\n    pass\n" * 30
BPE = train_bpe([TEXT], vocab_size=400)
CHARACTERS = train_characters([TEXT])


@given(st.text())
def test_bpe_gives_any_text_back(text):
    assert BPE.decode(BPE.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_bpe_keeps_to_the_vocabulary_size_and_merges():
    assert BPE.vocab_size <= 400
    assert len(BPE.encode(TEXT)) < len(TEXT) / 2
    assert BPE.eos_ids == (0,)
    assert BPE.bos_id == 0


def test_the_same_text_gives_the_same_tokenizer():
    assert train_bpe([TEXT], vocab_size=400).digest == BPE.digest
    assert train_bpe([TEXT], vocab_size=300).digest != BPE.digest
    assert train_characters(iter(["".join(reversed(TEXT))])).digest == CHARACTERS.digest


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ConfigError, match="257"):
        train_bpe([TEXT], vocab_size=256)
    assert train_bpe([TEXT], vocab_size=257).vocab_size == 257


def test_an_error_in_the_texts_comes_out_as_it_was():
    def texts():
        yield TEXT
        raise DataError("line 3 is broken")

    with pytest.raises(DataError, match="line 3 is broken"):
        train_bpe(texts(), vocab_size=300)


@given(st.text(alphabet=sorted(set(TEXT))))
def test_characters_are_one_token_each_and_join_without_spaces(text):
    ids = CHARACTERS.encode(text)
    assert len(ids) == len(text)
    assert CHARACTERS.decode(ids) == text


def test_an_unknown_character_is_one_token_and_decodes_to_the_replacement_character():
    ids = CHARACTERS.encode("return ΩΩ\n")
    assert len(ids) == len("return ΩΩ\n")
    assert CHARACTERS.decode(ids) == "return \ufffd\ufffd\n"


def test_characters_of_no_text_are_refused():
    with pytest.raises(DataError, match="no text"):
        train_characters([""])


@pytest.mark.parametrize("tokenizer", [BPE, CHARACTERS], ids=["bpe", "character"])
def test_transformers_reads_the_saved_tokenizer_and_agrees(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, "x  =  1\n\n\n", " return", "Ω?", "a<|endoftext|>b"):
        ids = tokenizer.encode(text)
        assert other(text)["input_ids"] == ids
        assert other.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
    assert other.eos_token_id == 0


words = st.sampled_from(["\n", " ", "a", "bc", "\n\n", "é", "漢", ";", "  x", "\r\n", "\t"])


@settings(max_examples=200)
@given(st.lists(words, max_size=60).map("".join), st.integers(1, 20), st.integers(1, 7))
def test_cutting_loses_nothing_and_keeps_the_limit(text, limit, step):
    blocks = [text[at : at + step] for at in range(0, len(text), step)]
    pieces = list(cut_text(blocks, characters=limit))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= limit for piece in pieces)


@settings(max_examples=200)
@given(st.lists(st.text(st.sampled_from("ab(){} .:#é漢1\t"), max_size=12), min_size=1, max_size=30))
def test_pieces_encode_as_the_whole_text_where_there_are_plain_line_ends(lines):
    # Every 14 characters or less a line end stands between two characters that are not white space.
    text = "\n".join(f"x{line}x" for line in lines)
    pieces = list(cut_text([text], characters=32))
    assert [i for ids in BPE.encode_batch(pieces) for i in ids] == BPE.encode(text)
