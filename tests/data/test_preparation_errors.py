"""What cannot be prepared, is damaged, interrupted or done twice at once: one clear error, and nothing left behind."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from full_disk import full_disk
from hasten.data import TokenData, preparation, prepare
from hasten.data import shards as shards_module
from hasten.errors import CheckpointError, ConfigError, DataError, ResourceError


def files(folder) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")} if folder.exists() else set()


@pytest.mark.parametrize(
    "wrong",
    [{"tokenizer_kind": "words"}, {"validation_fraction": 1}, {"validation_fraction": -0.1}, {"limit_bytes": 0}],
)
def test_settings_that_cannot_work(corpus, quick, wrong):
    with pytest.raises(ConfigError):
        prepare(str(corpus), **(quick | wrong))


def test_a_folder_without_tokenizer_is_named(corpus, quick):
    with pytest.raises(DataError, match="has no tokenizer"):
        prepare(str(corpus), **quick, tokenizer=corpus)


@pytest.mark.parametrize("content", ["", "\ufeff"])
def test_an_empty_file_has_too_little_text(tmp_path, quick, content):
    (tmp_path / "empty.txt").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"there is no text in it|too few"):
        prepare(str(tmp_path / "empty.txt"), **quick)
    assert files(quick["folder"]) == set()


def test_a_bad_line_leaves_nothing_behind(tmp_path, quick):
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(f'{{"text": "good {n}"}}\n' for n in range(200)) + "{bad\n")
    with pytest.raises(DataError, match="line 201"):
        prepare(str(path), **quick)
    assert files(quick["folder"]) == set()


def test_a_shard_that_was_cut_off_is_found_by_its_size(corpus, quick):
    data = prepare(str(corpus), **quick)
    shard = data.folder / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    for again in (lambda: TokenData.load(data.folder), lambda: prepare(str(corpus), **quick)):
        with pytest.raises(DataError, match=r"train-00000\.bin: has [\d,]+ bytes, the manifest says .*delete"):
            again()
    shard.unlink()
    with pytest.raises(DataError, match=r"train-00000\.bin: cannot be read.*delete"):
        TokenData.load(data.folder)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 99}', '{"version": 1}', "{"])
def test_a_damaged_manifest(corpus, quick, text):
    data = prepare(str(corpus), **quick)
    (data.folder / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json"):
        TokenData.load(data.folder)


def test_a_manifest_that_lacks_something(corpus, quick):
    data = prepare(str(corpus), **quick)
    del data.manifest["splits"]["train"]["shards"]
    (data.folder / "manifest.json").write_text(json.dumps(data.manifest))
    with pytest.raises(DataError, match=r"manifest\.json: is damaged"):
        TokenData.load(data.folder)


def test_another_tokenizer_in_the_folder_is_noticed(corpus, quick, chat_tokenizer):
    data = prepare(str(corpus), **quick)
    chat_tokenizer.save(data.folder / "tokenizer")
    with pytest.raises(DataError, match="not the tokenizer that the tokens were made with"):
        TokenData.load(data.folder)


def test_a_folder_that_is_no_data_is_named(tmp_path):
    with pytest.raises(DataError, match="is not prepared data"):
        TokenData.load(tmp_path)


def test_damaged_held_out_text(corpus, quick):
    data = prepare(str(corpus), **quick)
    (data.folder / "validation.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"validation\.jsonl"):
        list(data.validation_documents())


def test_a_source_that_changes_meanwhile_is_noticed(corpus, quick, monkeypatch):
    from hasten.data.encode import Encoder

    run = Encoder.run

    def run_and_change(self, source):
        run(self, source)
        (corpus / "02.md").write_text("other")

    monkeypatch.setattr(Encoder, "run", run_and_change)
    with pytest.raises(DataError, match="changed while it was being read"):
        prepare(str(corpus), **quick)
    assert files(quick["folder"]) == set()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_an_interruption_or_a_full_disk_leaves_nothing(corpus, quick, monkeypatch, error):
    add = shards_module.ShardWriter.add
    calls = []

    def fail_later(self, ids, **options):
        calls.append(1)
        if len(calls) > 5:
            raise error
        add(self, ids, **options)

    monkeypatch.setattr(shards_module.ShardWriter, "add", fail_later)
    expected = ResourceError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        prepare(str(corpus), **quick)
    assert files(quick["folder"]) == set()
    if expected is ResourceError:
        assert "No space left" in str(caught.value)
    monkeypatch.undo()
    assert prepare(str(corpus), **quick).train.documents > 0


def test_a_limit_on_file_sizes_is_a_clear_error(tmp_path, cache):
    """The operating system itself refuses to write, wherever that happens to be."""
    path = tmp_path / "long.txt"
    path.write_text("".join(f"{number * 7919 % 10007} words\n" for number in range(30_000)))
    with full_disk(100_000), pytest.raises(ResourceError, match="File too large"):
        prepare(str(path), folder=cache, vocab_size=300, progress=False)
    assert files(cache) == set()


def test_a_cache_folder_that_cannot_be_made(corpus, quick, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResourceError, match="use another folder"):
        prepare(str(corpus), **(quick | {"folder": tmp_path / "file" / "cache"}))


def test_a_tokenizer_that_cannot_be_saved_leaves_nothing(corpus, quick, monkeypatch):
    from hasten.text.tokenizer import Tokenizer

    def refuse(self, folder):
        raise CheckpointError(f"{folder}: cannot be written")

    monkeypatch.setattr(Tokenizer, "save", refuse)
    with pytest.raises(CheckpointError):
        prepare(str(corpus), **quick)
    assert files(quick["folder"]) == set()


PREPARE = (
    "import sys; from pathlib import Path; from hasten.data import prepare\n"
    "print(prepare(sys.argv[1], folder=Path(sys.argv[2]), vocab_size=300, progress=False).folder, flush=True)\n"
)


def test_two_processes_at_once_do_not_collide(corpus, cache):
    arguments = [sys.executable, "-c", PREPARE, str(corpus), str(cache)]
    running = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(answers) == len(files(cache)) == 1
    assert TokenData.load(answers.pop()).train.documents > 0


def test_a_killed_process_leaves_nothing_that_is_taken_for_data(corpus, cache, quick):
    slow = (
        "import time; from hasten.data.shards import ShardWriter; add = ShardWriter.add\n"
        "def slowly(self, *a, **k): add(self, *a, **k); print('writing', flush=True); time.sleep(60)\n"
        "ShardWriter.add = slowly\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow + PREPARE, str(corpus), str(cache)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = files(cache)
    assert left.endswith(".partial")
    settings = quick | {"validation_fraction": 0.05}
    data = prepare(str(corpus), **settings)
    assert files(cache) == {data.folder.name}  # and what was left is gone


def test_the_loser_of_a_race_without_locks_takes_the_winners(corpus, quick, monkeypatch):
    import filelock

    def unsupported(self, **_):
        raise NotImplementedError

    monkeypatch.setattr(filelock.FileLock, "acquire", unsupported)
    make = preparation._make

    def make_while_another_does(work, *arguments, **options):
        monkeypatch.setattr(preparation, "_make", make)
        winner = prepare(str(corpus), **quick)
        assert winner.folder.exists()
        make(work, *arguments, **options)

    monkeypatch.setattr(preparation, "_make", make_while_another_does)
    data = prepare(str(corpus), **quick)
    assert files(quick["folder"]) == {data.folder.name}
