"""Streaming text equals decoding at once, and stop strings cut as searching the whole text does."""

import itertools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from hasten.engine.params import SamplingParams
from hasten.engine.stopping import OutputText, StopStrings, TextStream, stop_ids
from hasten.text.tokenizer import Tokenizer

LINES = ["the cat sat on the mat", "naïve café — 東京 🙂 done", "  indented   text\n\n\tdef f(x):", "the theatre then"]


def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    backend.train_from_iterator(LINES * 4, trainer)
    backend.add_tokens([AddedToken("a tool", normalized=False), AddedToken("東 x", normalized=False)])
    return Tokenizer.from_tokenizers(backend, eos_token="<|end|>")


def byte_fallback(*, metaspace: bool) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "a", "c", "d", "e", "h", "n", "s", "t", "▁t", "▁c", "he", "▁the", "at", "▁cat", "é", "▁▁"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *words])}
    merges = [("▁", "t"), ("▁", "c"), ("h", "e"), ("▁t", "he"), ("a", "t"), ("▁c", "at"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:  # as Gemma: spaces replaced, none added
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer.from_tokenizers(backend, bos_token="<s>", eos_token="</s>")


def plain_metaspace() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), *((c, -2.0) for c in "abct▁at")], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<end>"])
    return Tokenizer.from_tokenizers(backend, eos_token="<end>")


TOKENIZERS = {
    "byte-level": byte_level(),
    "llama": byte_fallback(metaspace=True),
    "gemma": byte_fallback(metaspace=False),
    "metaspace": plain_metaspace(),
}
kinds = pytest.mark.parametrize("kind", sorted(TOKENIZERS))


def stream(tokenizer: Tokenizer, ids: list[int], **options: object) -> list[str]:
    text = TextStream(tokenizer, **options)  # type: ignore[arg-type]
    return [*(text.push(i) for i in ids), text.flush()]


@kinds
@settings(max_examples=200)
@given(data=st.data(), skip=st.booleans())
def test_random_ids_stream_to_the_decoded_text(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    pieces = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@kinds
@settings(max_examples=200)
@given(text=st.text(max_size=40) | st.lists(st.sampled_from(["🙂", "é", " the", " ", "東", "x"])).map("".join))
def test_text_streams_to_the_decoded_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if kind == "byte-level":
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces if "\ufffd" not in text)


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
def test_a_character_is_given_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("é🦊 the", add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert len(ids) > 4
    assert any("🦊" in piece for piece in pieces)
    assert "\ufffd" not in "".join(pieces)
    cut = stream(tokenizer, tokenizer.encode("🦊", add_special_tokens=False)[:-1])
    assert "\ufffd" in cut[-1]  # only the end makes it certain
    assert not any("\ufffd" in piece for piece in cut[:-1])


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_after_a_prompt_the_leading_space_stays(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt, answer = tokenizer.encode("at", add_special_tokens=False), tokenizer.encode("cat", add_special_tokens=False)
    assert "".join(stream(tokenizer, answer)) == "cat"
    assert "".join(stream(tokenizer, answer, context=prompt)) == " cat"


def test_cost_per_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["llama"]
    decoded: list[int] = []
    original = Tokenizer.decode

    def counting(self: Tokenizer, ids: list[int], **options: bool) -> str:
        decoded.append(len(ids))
        return original(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    byte = tokenizer.backend.token_to_id("<0xFF>")
    word = tokenizer.backend.token_to_id("▁cat")
    stream(tokenizer, [word] * 500 + [byte] * 500 + [word])
    assert sum(decoded) < 12 * 1001


def naive_cut(text: str, stop: list[str]) -> str:
    matches = []
    for target in stop:
        start = text.find(target)
        if start >= 0:
            matches.append((start + len(target), start))
    return text if not matches else text[: min(matches)[1]]


@settings(max_examples=500)
@given(
    text=st.text("ab\n#", max_size=40),
    stop=st.lists(st.text("ab\n#", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_stop_strings_cut_where_a_search_does(text: str, stop: list[str], cuts: list[int]) -> None:
    strings = StopStrings(stop)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown, stopped = "", False
    for start, end in itertools.pairwise(edges):
        piece, stopped = strings.push(text[start:end])
        shown += piece
        assert naive_cut(text, stop).startswith(shown)
        if not stopped:
            assert end - len(shown) < max(map(len, stop), default=1)  # what is held back is bounded
    shown += strings.flush()
    assert shown == naive_cut(text, stop)
    assert stopped == any(target in text for target in stop)
    if stopped:
        assert strings.push("more") == ("", True)


def test_the_match_that_completes_first_wins_and_of_two_the_longer() -> None:
    assert StopStrings(["abcdef", "cd"]).push("xabcdef") == ("xab", True)
    assert StopStrings(["cd", "bcd"]).push("xabcdef") == ("xa", True)


def output(ids: list[int], **options: object) -> tuple[str, str | None, int]:
    tokenizer = TOKENIZERS["byte-level"]
    out = OutputText(SamplingParams(**options), tokenizer=tokenizer, eos_ids=tokenizer.eos_ids)  # type: ignore[arg-type]
    text = ""
    for token in ids:
        text += out.push(token)
        if out.finish_reason is not None:
            break
    return text, out.finish_reason, out.count


def test_why_an_output_ends() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    (eos,) = tokenizer.eos_ids
    ids = tokenizer.encode("the cat sat")
    n = len(ids)
    assert output([*ids, eos, *ids]) == ("the cat sat", "stop", n + 1)
    assert output([*ids, eos, *ids], ignore_eos=True, max_new_tokens=2 * n + 1)[1:] == ("length", 2 * n + 1)
    assert output([eos, *ids, eos], min_new_tokens=2) == ("the cat sat", "stop", n + 2)
    assert output(ids, max_new_tokens=n) == ("the cat sat", "length", n)
    assert output(ids, stop=("at s",))[:2] == ("the c", "stop")
    assert output(ids, stop=("sat!",), max_new_tokens=n) == ("the cat sat", "length", n)  # held text comes out
    assert output(ids, stop_token_ids=(ids[1],))[1:] == ("stop", 2)
    fox = tokenizer.encode("🦊")
    assert output(fox[:-1], max_new_tokens=len(fox) - 1) == ("\ufffd", "length", len(fox) - 1)


def test_a_stop_string_completed_by_the_flush_counts() -> None:
    fox = TOKENIZERS["byte-level"].encode("🦊")[:-1]
    assert output(fox, max_new_tokens=len(fox), stop=("\ufffd",)) == ("", "stop", len(fox))


def test_without_a_tokenizer_ids_still_end_an_output() -> None:
    out = OutputText(SamplingParams(max_new_tokens=9), tokenizer=None, eos_ids=(7,))
    assert (out.push(3), out.finish_reason) == ("", None)
    assert (out.push(7), out.finish_reason, out.count) == ("", "stop", 2)


def test_stop_ids() -> None:
    assert stop_ids(SamplingParams(stop_token_ids=(3,)), eos_ids=(1, 2)) == {1, 2, 3}
    assert stop_ids(SamplingParams(stop_token_ids=(3,), ignore_eos=True), eos_ids=(1, 2)) == {3}
