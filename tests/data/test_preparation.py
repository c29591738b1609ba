"""`prepare`: shards that hold what the text says, made once, whole or not at all."""

import dataclasses
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from hasten.data import Batches, prepare
from hasten.data import shards as shards_module
from hasten.errors import DataError


def files(folder) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")} if folder.exists() else set()


def documents_of(split) -> list[list[int]]:
    borders = [*split.document_starts.tolist(), len(split)]
    return [split.tokens[first:last].tolist() for first, last in pairwise(borders)]


def test_the_shards_hold_every_document_ended_by_the_separator(corpus, quick):
    data = prepare(str(corpus), **quick)
    held_out = dict(data.validation_documents())
    originals = {p.relative_to(corpus).as_posix(): p.read_bytes().decode() for p in corpus.rglob("*.*")}
    assert held_out
    assert all(originals[name] == text for name, text in held_out.items())
    training = {name: text for name, text in originals.items() if name not in held_out}
    for split, texts in ((data.train, training), (data.validation, held_out)):
        expected = [[*data.tokenizer.encode(text), 0] for _, text in sorted(texts.items())]
        assert documents_of(split) == expected
        assert split.bytes == sum(len(text.encode()) for text in texts.values())
        assert split.weights is None
    assert data.train.tokens.dtype == np.uint16
    assert isinstance(data.train.tokens[:5], np.memmap)


def test_the_manifest_counts(corpus, quick):
    data = prepare(str(corpus), **quick)
    manifest = json.loads((data.folder / "manifest.json").read_text())
    assert manifest == data.manifest
    assert manifest["source"]["name"] == str(corpus)
    assert manifest["tokenizer"]["digest"] == data.tokenizer.digest
    assert manifest["settings"]["tokenizer"] == "bpe 300"
    assert manifest["split"] == "by document"
    for name in ("train", "validation"):
        split, entry = getattr(data, name), manifest["splits"][name]
        assert (entry["tokens"], entry["documents"], entry["bytes"]) == (len(split), split.documents, split.bytes)
    assert sum(entry["documents"] for entry in manifest["splits"].values()) == 40


def test_a_second_run_reuses_the_shards_and_other_settings_do_not(corpus, quick, monkeypatch):
    first = prepare(str(corpus), **quick)
    monkeypatch.setattr("hasten.data.preparation._make", lambda *_, **__: pytest.fail("made again"))
    again = prepare(str(corpus), **quick)
    assert again.folder == first.folder
    monkeypatch.undo()
    for other in ({"vocab_size": 310}, {"seed": 1}, {"validation_fraction": 0.3}, {"limit_bytes": 2000}):
        assert prepare(str(corpus), **(quick | other)).folder != first.folder
    (corpus / "new.txt").write_text("one more\n")
    assert prepare(str(corpus), **quick).folder != first.folder


def test_the_same_text_gives_the_same_shards_anywhere(corpus, quick, tmp_path):
    first = prepare(str(corpus), **quick)
    corpus.rename(tmp_path / "moved")
    second = prepare(str(tmp_path / "moved"), **(quick | {"folder": tmp_path / "other"}))
    assert second.folder.name == first.folder.name
    for name in files(first.folder) - {"tokenizer", "manifest.json"}:
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()


def test_several_shards_are_one_sequence(corpus, quick, monkeypatch):
    whole = prepare(str(corpus), **quick)
    monkeypatch.setattr(shards_module, "SHARD_TOKENS", 100)
    parts = prepare(str(corpus), **(quick | {"folder": quick["folder"] / "parts"}))
    assert len(parts.manifest["splits"]["train"]["shards"]) > 3
    assert np.array_equal(np.asarray(parts.train.tokens), np.asarray(whole.train.tokens))
    for start in range(0, len(whole.train) - 150, 37):
        assert np.array_equal(parts.train.tokens[start : start + 150], whole.train.tokens[start : start + 150])
    assert parts.train.tokens[-1] == whole.train.tokens[-1]
    assert parts.train.tokens[3:40:5].tolist() == whole.train.tokens[3:40:5].tolist()
    with pytest.raises(IndexError):
        parts.train.tokens[len(whole.train)]


def test_a_large_vocabulary_takes_uint32(corpus, quick, tmp_path):
    data = prepare(str(corpus), **quick)
    backend = data.tokenizer.backend
    backend.add_tokens([f"<extra {number}>" for number in range(70_000)])
    (corpus / "00.txt").write_text("<extra 69999>\n")
    type(data.tokenizer).from_tokenizers(backend, eos_token="<|endoftext|>").save(tmp_path / "large")
    large = prepare(str(corpus), **quick, tokenizer=tmp_path / "large")
    assert large.train.tokens.dtype == np.uint32
    assert max(np.asarray(large.train.tokens).max(), np.asarray(large.validation.tokens).max()) > 1 << 16


def test_characters_of_one_file(tmp_path, quick):
    path = tmp_path / "play.txt"
    path.write_text("ROMEO:\nBut soft, what light?\n" * 40)
    data = prepare(str(path), **quick, tokenizer_kind="character")
    assert "inside the only document, at a line boundary" in data.manifest["split"]
    both = [data.tokenizer.decode(split.tokens[:-1]) for split in (data.train, data.validation)]
    assert "".join(both) == path.read_text()
    assert len(data.train) == len(both[0]) + 1
    assert dict(data.validation_documents()) == {"play.txt#validation": both[1]}
    assert Batches(data.train, batch_size=2, sequence_length=64, seed=0).batch(0).inputs.shape == (2, 64)


def test_long_documents_are_encoded_in_pieces(tmp_path, quick, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_text("".join(f"line number {number} says é\n" for number in range(3000)))
    whole = prepare(str(path), **quick)
    monkeypatch.setattr("hasten.data.encode.PIECE_CHARACTERS", 1000)
    monkeypatch.setattr("hasten.data.encode._BATCH_CHARACTERS", 5000)
    pieces = prepare(str(path), **quick | {"folder": tmp_path / "other"})
    assert pieces.train.documents == pieces.validation.documents == 1
    assert np.array_equal(np.asarray(whole.train.tokens), np.asarray(pieces.train.tokens))
    assert list(whole.validation_documents()) == list(pieces.validation_documents())


def test_an_existing_tokenizer_is_taken_with_its_own_bos(corpus, quick, tmp_path, chat_tokenizer):
    chat_tokenizer.save(tmp_path / "model")
    # generation_config.json adds an end token that the tokenizer's files do not know of.
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    given = type(chat_tokenizer).from_folder(tmp_path / "model")
    data = prepare(str(corpus), **quick, tokenizer=tmp_path / "model")
    assert data.tokenizer.digest == given.digest
    assert data.manifest["tokenizer"]["kind"] == "given"
    assert data.train.tokens[-1] == given.eos_ids[0]

    from tokenizers.processors import TemplateProcessing

    backend = chat_tokenizer.backend.from_str(chat_tokenizer.backend.to_str())
    backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", 0)]
    )
    with_bos = type(chat_tokenizer).from_tokenizers(backend, bos_token="<|endoftext|>", eos_token="<|im_end|>")
    with_bos.save(tmp_path / "bos")
    data = prepare(str(corpus), **quick, tokenizer=str(tmp_path / "bos"))
    assert all(document[0] == 0 and document.count(0) == 1 for document in documents_of(data.train))


def write_chats(path, count: int = 20) -> str:
    lines = [
        {"messages": [{"role": "user", "content": f"how is {n}?"}, {"role": "assistant", "content": f"fine, {n}"}]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_chats_are_learned_where_the_assistant_speaks(tmp_path, quick, chat_tokenizer):
    chat_tokenizer.save(tmp_path / "model")
    source = write_chats(tmp_path / "talk.jsonl")
    data = prepare(source, **quick, tokenizer=tmp_path / "model")
    for split in (data.train, data.validation):
        assert len(split.weights) == len(split)
        borders = [*split.document_starts.tolist(), len(split)]
        for first, last in pairwise(borders):
            ids, weights = split.tokens[first:last], split.weights[first:last].astype(bool)
            said = chat_tokenizer.decode(ids[weights], skip_special_tokens=False)
            assert said.startswith("fine, ")
            assert said.endswith("<|im_end|>")
            assert ids[-1] == chat_tokenizer.eos_ids[0]
            assert not weights[-1]  # the end token has been said already
    assert sum(data.manifest["splits"][name]["documents"] for name in ("train", "validation")) == 20
    assert data.manifest["splits"]["train"]["learned_tokens"] == int(np.asarray(data.train.weights).sum())
    batch = Batches(data.train, batch_size=1, sequence_length=30, seed=0).batch(0)
    assert 0 < (batch.targets != -100).sum() < 30
    name, text = next(data.validation_documents())
    assert name.startswith("talk.jsonl:")
    assert text.startswith("<|im_start|>user\nhow is")


def test_a_template_without_end_token_learns_to_stop_from_the_separator(tmp_path, quick, make_tokenizer):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    tokenizer = make_tokenizer(template + "{% if add_generation_prompt %}assistant: {% endif %}")
    tokenizer.save(tmp_path / "model")
    data = prepare(write_chats(tmp_path / "talk.jsonl"), **quick, tokenizer=tmp_path / "model")
    assert data.train.tokens[-1] == tokenizer.eos_ids[0]
    assert data.train.weights[-1] == 1


def test_a_chat_needs_a_tokenizer_with_a_template(tmp_path, quick, corpus):
    source = write_chats(tmp_path / "talk.jsonl")
    with pytest.raises(DataError, match=r"talk\.jsonl:\d+: a chat needs .* and one trained here has none"):
        prepare(source, **quick)
    plain = prepare(str(corpus), **quick).folder / "tokenizer"
    with pytest.raises(DataError, match="the given one has none"):
        prepare(source, **quick, tokenizer=plain)


def test_texts_among_chats_count_as_a_whole(tmp_path, quick, chat_tokenizer, monkeypatch):
    monkeypatch.setattr(shards_module, "SHARD_TOKENS", 50)
    chat_tokenizer.save(tmp_path / "model")
    (tmp_path / "mixed").mkdir()
    for name in ("a.txt", "b.txt", "c.txt", "z.txt"):
        (tmp_path / "mixed" / name).write_text("a plain text of many words, enough for a shard\n" * 5)
    write_chats(tmp_path / "mixed" / "talk.jsonl")
    data = prepare(str(tmp_path / "mixed"), **quick, tokenizer=tmp_path / "model")
    borders = [*data.train.document_starts.tolist(), len(data.train)]
    kinds = []
    for first, last in pairwise(borders):
        weights = data.train.weights[first:last]
        text = chat_tokenizer.decode(data.train.tokens[first:last], skip_special_tokens=False)
        kinds.append(text.startswith("a plain text"))
        assert weights.all() == kinds[-1]
        assert weights.any()
    assert kinds[0]
    assert not all(kinds)
    assert len(data.manifest["splits"]["train"]["shards"]) > 3
    assert data.manifest["splits"]["train"]["learned_tokens"] == int(np.asarray(data.train.weights).sum())


def test_waiting_for_another_process_is_said(corpus, quick, capsys, monkeypatch):
    from filelock import FileLock

    data = prepare(str(corpus), **quick)
    lock = FileLock(data.folder.with_name(f".{data.folder.name}.lock"))
    shutil.rmtree(data.folder)
    with lock, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(prepare, str(corpus), **(quick | {"progress": True}))
        deadline = time.monotonic() + 30
        said = ""
        while "waiting for it" not in said and time.monotonic() < deadline:
            said += capsys.readouterr().err
            time.sleep(0.05)
        lock.release()
        assert waiting.result().folder == data.folder
    assert "another process is preparing the same data" in said


def test_progress_goes_to_standard_error(corpus, quick, capsys):
    prepare(str(corpus), **(quick | {"progress": True}))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "tokenizing" in captured.err


def test_nothing_is_shown_without_progress(corpus, quick, capfd):
    prepare(str(corpus), **quick)
    assert capfd.readouterr() == ("", "")


def test_the_default_folder_is_the_cache(corpus, tmp_path, monkeypatch, quick):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "hasten"))
    data = prepare(str(corpus), **(quick | {"folder": None}))
    assert data.folder.parent == tmp_path / "hasten" / "data"


def test_the_standard_library_in_part(quick):
    data = prepare("stdlib", **quick, limit_bytes=300_000)
    assert 250_000 < data.train.bytes + data.validation.bytes <= 300_000
    assert data.manifest["source"]["skipped_files"] == 0
    ids = [token for _, text in data.validation_documents() for token in (*data.tokenizer.encode(text), 0)]
    assert ids == data.validation.tokens[:].tolist()


def test_data_is_frozen(corpus, quick):
    data = prepare(str(corpus), **quick)
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.folder = None
