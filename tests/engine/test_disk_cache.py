"""The prefix cache on disk: the text is bit for bit the one without it, whatever happens to the files."""

import gc
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

import hasten
from hasten.checkpoints.adapter_files import save_adapter
from hasten.engine import block_threads, cache_shapes, disk_cache
from hasten.engine import cache as cache_module
from hasten.engine.block_files import HEADER_BYTES, BlockFiles
from hasten.engine.cache import KVCache, row_format
from hasten.engine.cache_shapes import LayerShape
from hasten.engine.rank_disk import LeadingDisk
from hasten.engine.rank_messages import DROP, SEEK, TAKE
from hasten.engine.runner import ModelRunner
from hasten.errors import ConfigError, ResourceError
from hasten.model.fused import is_fused
from hasten.model.lora import new_adapter
from instruction_sets import NATIVE
from references import make_reference, tiny_llama
from serving_cases import make_engine, request, run, tokens_of

SIZE = 4
PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(61)]  # 15 full blocks of 4
FULL = (len(PROMPT) - 1) // SIZE * SIZE


def fused(**changes):
    if not NATIVE:
        pytest.skip("no native kernels here: no C++ compiler, or HASTEN_ISA=none")
    return hasten.fuse(tiny_llama(**changes).to(torch.bfloat16))


@pytest.fixture(scope="module")
def model():
    return fused()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def answer(model, prompt=PROMPT, *, engine=None, **settings):
    """Tokens with the bits of their log-probabilities; tokens found in the cache; tokens read from the disk."""
    own = engine or make_engine(model, **settings)
    pieces = run(own, [request("a", prompt, max_new_tokens=9, logprobs=0)])["a"]
    found = [(one.token, one.logprob.hex()) for piece in pieces for one in piece.logprobs]
    hits = own.stats().disk_hits
    if engine is None:
        own.close()
    return found, pieces[0].cached_tokens, hits


def kept(folder):
    return sorted(folder.glob("??/*.kv"))


def read_always(monkeypatch):
    monkeypatch.setattr(disk_cache.DiskCache, "_pays", lambda self: True)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4", "int8-plain", "int4-plain"])
def test_the_text_after_a_restart_is_bit_for_bit_that_without(model, folder, kv_cache_dtype):
    assert is_fused(model)
    settings = {"kv_cache_dtype": kv_cache_dtype}
    wanted, cached, _ = answer(model, **settings)
    assert cached == 0
    assert answer(model, prefix_cache=folder, **settings) == (wanted, 0, 0)
    assert answer(model, prefix_cache=str(folder), **settings) == (wanted, FULL, FULL)
    assert answer(model, **settings)[0] == wanted


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "qwen3", "gpt2"])
def test_families_and_windows(name, folder):
    """mistral looks back 6 keys in every layer, so that blocks before them are neither read nor needed."""
    own = hasten.load(make_reference(name), dtype="float32")
    prompt = [token % 90 for token in PROMPT[:50]]
    alone = hasten.generate(own, prompt, temperature=0, max_new_tokens=9, ignore_eos=True)[0].tokens
    hits = []
    for _ in range(2):
        engine = make_engine(own, prefix_cache=folder)
        pieces = run(engine, [request("a", prompt, max_new_tokens=9)])["a"]
        assert tokens_of(pieces) == alone
        hits.append((pieces[0].cached_tokens, engine.stats().disk_hits))
        engine.close()
    reach = own.config.reach
    assert hits == [(0, 0), (48, 48 if reach is None else 8)]


def test_a_conversation_goes_on_after_a_restart(model, folder):
    first = make_engine(model, prefix_cache=folder)
    said = tokens_of(run(first, [request("a", PROMPT, max_new_tokens=20)])["a"])
    first.close()
    longer = [*PROMPT, *said, 5, 6, 7]
    wanted = answer(model, longer)[0]
    assert answer(model, longer, prefix_cache=folder) == (wanted, 80, 80)  # all but the last token was computed
    assert first.stats().disk_written_blocks == 20


def test_only_what_memory_lacks_is_read(model, folder):
    answer(model, prefix_cache=folder)
    engine = make_engine(model, prefix_cache=folder)
    run(engine, [request("a", PROMPT[:33], max_new_tokens=1)])
    assert engine.stats().disk_hits == 32
    found, cached, hits = answer(model, engine=engine)
    assert (found, cached, hits) == (answer(model)[0], FULL, FULL)
    assert answer(model, engine=engine) == (found, FULL, FULL)  # now all of it is in memory
    engine.close()


def test_equal_prompts_of_one_step_leave_whole_blocks(model, folder):
    """The second one is planned on blocks that the step has yet to fill: these are not copied before."""
    engine = make_engine(model, prefix_cache=folder, token_budget=160)
    run(engine, [request("a", PROMPT, max_new_tokens=2), request("b", PROMPT, max_new_tokens=2)])
    engine.close()
    assert answer(model, prefix_cache=folder) == (answer(model)[0], FULL, FULL)


@pytest.mark.parametrize("change", ["weight", "config", "kv_cache_dtype", "block_size", "tenant", "quantized"])
def test_blocks_of_another_model_format_or_tenant_are_not_found(model, folder, change):
    answer(model, prefix_cache=folder)
    there = len(kept(folder))
    other, settings, more = model, {}, {}
    if change == "weight":
        other = fused()
        other.norm.weight.data[5] += 0.5
    elif change == "config":
        other = fused(rope_theta=20000.0)
    elif change == "quantized":
        other = hasten.fuse(hasten.quantize(tiny_llama().to(torch.bfloat16), hasten.Int8()))
    elif change == "tenant":
        more = {"salt": "another"}
    else:
        settings = {change: {"kv_cache_dtype": "int8", "block_size": 8}[change]}
    engine = make_engine(other, prefix_cache=folder, **settings)
    pieces = run(engine, [request("a", PROMPT, max_new_tokens=9, **more)])["a"]
    assert (pieces[0].cached_tokens, engine.stats().disk_hits) == (0, 0)
    engine.close()
    assert len(kept(folder)) > there  # those of the other beside them
    assert answer(model, prefix_cache=folder)[1] == FULL


def test_tenants_find_their_own(model, folder):
    for salt in ("one", "two"):
        engine = make_engine(model, prefix_cache=folder)
        run(engine, [request("a", PROMPT, max_new_tokens=1, salt=salt)])
        engine.close()
    for salt, found in (("one", FULL), ("two", FULL), ("three", 0), ("", 0)):
        engine = make_engine(model, prefix_cache=folder)
        pieces = run(engine, [request("a", PROMPT, max_new_tokens=1, salt=salt)])["a"]
        assert (pieces[0].cached_tokens, engine.stats().disk_hits) == (found, found)
        engine.close()


@pytest.mark.parametrize("make", [fused, tiny_llama], ids=["fused", "readable"])
def test_adapters_find_their_own(make, folder, tmp_path):
    """By name, weights and scale: names that are swapped find nothing, and neither does another scale."""
    config = tiny_llama().config
    for number, alpha in enumerate((8, 8, 16)):
        adapter = new_adapter(config, rank=4, alpha=alpha, targets=["all-linear"], seed=number % 2)
        for index, own in enumerate(adapter.values()):
            own.b.data.normal_(std=0.1, generator=torch.Generator().manual_seed(100 * (number % 2) + index))
        save_adapter(tmp_path / str(number), adapter, config)

    def cached(adapters, name):
        paths = {key: tmp_path / str(number) for key, number in adapters.items()}
        llm = hasten.LLM(make(), adapters=paths, block_size=SIZE, max_sequences=2, prefix_cache=folder)
        (found,) = llm.generate([PROMPT], temperature=0, max_new_tokens=4, adapter=name)
        llm.close()
        return found.cached_tokens, found.tokens

    before = cached({"a": 0, "b": 1}, "a")
    assert cached({"a": 0, "b": 1}, "a") == (FULL, before[1])
    assert before[0] == cached({"a": 0, "b": 1}, "b")[0] == cached({"a": 1, "b": 0}, "a")[0] == 0
    assert cached({"a": 2, "b": 1}, "a")[0] == 0
    assert cached({"b": 0, "a": 1}, "b")[0] == cached({"b": 0, "a": 1}, "")[0] == 0


def test_scored_prompts_are_shared_with_nobody_and_not_written(model, folder):
    engine = make_engine(model, prefix_cache=folder)
    run(engine, [request("a", PROMPT, max_new_tokens=1, prompt_logprobs=0)])
    engine.close()
    assert kept(folder) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap", "gone", "folder"])
def test_damaged_files_are_computed_again(model, folder, damage, caplog):
    wanted = answer(model, prefix_cache=folder)[0]
    chance = random.Random(damage)
    files = kept(folder)
    for path in chance.sample(files, 5):
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif damage == "cut":
            del data[chance.randrange(len(data)) :]
        elif damage == "empty":
            data.clear()
        elif damage == "swap":
            data = chance.choice([other for other in files if other != path and other.is_file()]).read_bytes()
        path.unlink()
        if damage == "folder":
            path.mkdir()
        elif damage != "gone":
            path.write_bytes(data)
    with caplog.at_level(logging.WARNING, logger="hasten.engine"):
        found, cached, hits = answer(model, prefix_cache=folder)
    assert found == wanted
    assert cached == hits < FULL
    assert len(caplog.records) == (damage not in ("gone",))
    if damage != "folder":  # written again, in the place of the damaged ones, as far as they were met
        for _ in range(5):
            found, cached, _ = answer(model, prefix_cache=folder)
            assert found == wanted
        assert cached == FULL


def test_the_limit_of_bytes(model, folder):
    block = make_engine(model).runner.cache.block_bytes + HEADER_BYTES
    wanted = answer(model)[0]
    for prompt in (PROMPT[::-1], PROMPT):
        assert answer(model, prompt, prefix_cache=folder, prefix_cache_bytes=20 * block)[2] == 0
        assert sum(path.stat().st_size for path in kept(folder)) <= 20 * block
    assert answer(model, prefix_cache=folder, prefix_cache_bytes=20 * block) == (wanted, FULL, FULL)
    with pytest.raises(
        ConfigError, match=f"prefix_cache_bytes is {block - 1:,}; one block of 4 tokens takes {block:,}"
    ):
        make_engine(model, prefix_cache=folder, prefix_cache_bytes=block - 1)


def test_a_full_disk_is_one_warning_and_serving_goes_on(model, folder, monkeypatch, caplog):
    wanted, write, budget = answer(model)[0], BlockFiles.write, [3]

    def full(self, key, block):
        budget[0] -= 1
        if budget[0] < 0:
            raise OSError(28, "No space left on device")
        return write(self, key, block)

    monkeypatch.setattr(BlockFiles, "write", full)
    engine = make_engine(model, prefix_cache=folder)
    with caplog.at_level(logging.WARNING, logger="hasten.engine"):
        for prompt in (PROMPT, PROMPT[::-1], PROMPT):
            found = answer(model, prompt, engine=engine)[0]
            engine.disk.flush()
            assert found == wanted or prompt != PROMPT
    assert len(caplog.records) == 1
    assert f"{folder} cannot be written (No space left on device); no blocks are added" in caplog.text
    assert engine.stats().disk_written_blocks == 3
    assert engine.stats().disk_dropped_blocks >= 24
    monkeypatch.undo()
    engine.disk._paused_until = 0.0  # a minute later: what memory still has is written
    answer(model, engine=engine)
    engine.close()
    assert answer(model, prefix_cache=folder) == (wanted, FULL, FULL)


def test_blocks_whose_files_were_removed_are_written_again(model, folder, monkeypatch):
    """When they are computed again, or used from memory a minute later. What is there is not counted as written."""
    engine, writes = make_engine(model, prefix_cache=folder), []

    def answered():
        found = answer(model, engine=engine)[0]
        engine.disk.flush()
        writes.append(engine.stats().disk_written_blocks)
        return found

    wanted, there = answered(), kept(folder)
    with monkeypatch.context() as patched:
        patched.setattr(disk_cache.DiskCache, "_pays", lambda self: False)
        engine.blocks.forget()
        assert answered() == wanted
    for path in there:
        path.unlink()
    engine.blocks.forget()
    assert answered() == wanted
    assert kept(folder) == there
    for path in there:
        path.unlink()
    for _ in range(2):  # the first time it is found out
        engine.disk._known = dict.fromkeys(engine.disk._known, -100.0)
        assert answered() == wanted
    assert len(kept(folder)) == FULL // SIZE
    assert writes == [17, 17, 34, 34, 34 + FULL // SIZE]
    engine.close()


@pytest.mark.parametrize("name", ["read", "write"])
def test_a_thread_goes_on_after_any_error(model, folder, name, monkeypatch, caplog):
    wanted = answer(model, **({"prefix_cache": folder} if name == "read" else {}))[0]

    def broken(*own):
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(BlockFiles, name, broken)
    engine = make_engine(model, prefix_cache=folder)
    with caplog.at_level(logging.WARNING, logger="hasten.engine"):
        assert answer(model, engine=engine) == (wanted, 0, 0)
        engine.disk.flush()
    assert len(caplog.records) == 1
    assert "a mistake of ours" in caplog.text
    monkeypatch.undo()
    engine.disk._paused_until = 0.0
    engine.blocks.forget()
    found = FULL if name == "read" else 0
    assert answer(model, engine=engine) == (wanted, found, found)
    engine.close()
    assert len(kept(folder)) == 17


def test_copies_of_blocks_are_let_go(model, folder, monkeypatch):
    """Of those that were read, and of those that wait to be written: neither thread holds the last ones."""
    take, read_blocks, copies = disk_cache.DiskCache._take, KVCache.read_blocks, []

    def taken(self, load, found):
        copies.append(weakref.ref(load.contents))
        take(self, load, found)

    def copied(self, blocks):
        contents = read_blocks(self, blocks)
        copies.append(weakref.ref(contents))
        return contents

    answer(model, prefix_cache=folder)
    monkeypatch.setattr(disk_cache.DiskCache, "_take", taken)
    monkeypatch.setattr(KVCache, "read_blocks", copied)
    engine = make_engine(model, prefix_cache=folder)
    assert answer(model, engine=engine)[2] == FULL
    engine.disk.flush()
    deadline = time.monotonic() + 10
    while any(copy() is not None for copy in copies) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(copies) > 1
    assert not any(copy() is not None for copy in copies)
    engine.close()


def test_a_thread_of_the_cache_may_end_it(model, folder):
    """The collector of a forgotten engine runs in any thread."""
    engine = make_engine(model, prefix_cache=folder)
    disk = engine.disk
    disk._write = lambda keys, contents: disk.close()
    disk.keep([(bytes(16), 0)])
    for thread in disk._threads:
        thread.join(10)
        assert not thread.is_alive()
    engine.close()


def test_a_queue_that_is_full_holds_nobody_up(model, folder, monkeypatch):
    """The writer hangs; steps go on, and what does not fit is not written."""
    wanted, hangs, write = answer(model)[0], threading.Event(), BlockFiles.write
    block = make_engine(model).runner.cache.block_bytes
    monkeypatch.setattr(block_threads, "_QUEUE_BYTES", 5 * block)
    monkeypatch.setattr(BlockFiles, "write", lambda *own: hangs.wait(30) and write(*own))
    engine = make_engine(model, prefix_cache=folder)
    assert answer(model, engine=engine)[0] == wanted
    assert engine.stats().disk_written_blocks == 0
    assert engine.stats().disk_dropped_blocks == 17 - 5
    assert engine.disk._waiting_bytes <= 5 * block
    hangs.set()
    engine.close()
    assert answer(model, prefix_cache=folder) == (wanted, 5 * SIZE, 5 * SIZE)


@pytest.fixture
def slow_disk(monkeypatch):
    """Reading waits until the event is set."""
    read, ready = BlockFiles.read, threading.Event()
    monkeypatch.setattr(BlockFiles, "read", lambda *own: ready.wait(30) and read(*own))
    yield ready
    ready.set()


def test_others_go_on_while_blocks_are_read(model, folder, slow_disk):
    wanted = answer(model, prefix_cache=folder)[0]
    engine = make_engine(model, prefix_cache=folder)
    engine.add(request("running", [1, 2, 3], max_new_tokens=30))
    engine.step()
    engine.add(request("reads", PROMPT, max_new_tokens=9, logprobs=0))
    pieces = {"running": [], "reads": []}
    for _ in range(12):
        for piece in engine.step():
            pieces[piece.request_id].append(piece)
        engine.check()
    assert len(pieces["running"]) == 12
    assert pieces["reads"] == []
    slow_disk.set()
    for name, more in run(engine).items():
        pieces[name] += more
    assert tokens_of(pieces["running"]) == tokens_of(run(engine, [request("b", [1, 2, 3], max_new_tokens=30)])["b"])[1:]
    assert [(one.token, one.logprob.hex()) for piece in pieces["reads"] for one in piece.logprobs] == wanted
    assert pieces["reads"][0].cached_tokens == FULL
    engine.close()


def test_a_request_may_be_given_up_or_overtaken_while_its_blocks_are_read(model, folder, slow_disk):
    wanted = answer(model, prefix_cache=folder)[0]
    engine = make_engine(model, prefix_cache=folder)
    for name, priority in (("given up", 2), ("overtaken", 1), ("first", 0)):
        engine.add(request(name, PROMPT, max_new_tokens=9, priority=priority))
        engine.step()
        engine.check()
    engine.abort("given up")
    slow_disk.set()
    found = run(engine)
    assert found["given up"][-1].finish_reason == "abort"
    for name in ("first", "overtaken"):
        assert tokens_of(found[name]) == [token for token, _ in wanted]
    engine.close()


def test_reading_stops_when_its_request_is_given_up(model, folder, slow_disk):
    """Nothing is read, and no memory held, for a client that went away, until somebody else comes."""
    wanted = answer(model, prefix_cache=folder)[0]
    engine = make_engine(model, prefix_cache=folder)
    engine.add(request("reads", PROMPT, max_new_tokens=9))
    engine.step()
    load = engine.disk._load
    engine.abort("reads")
    assert engine.disk._load is None
    slow_disk.set()
    assert load.done.wait(10)
    assert len(load.found) <= 1
    run(engine)
    assert answer(model, engine=engine) == (wanted, FULL, FULL)
    engine.close()


class FirstRank:
    """Records what the first of two ranks sends about reading; if `done`, the other one has read the same blocks."""

    size = 2

    def __init__(self):
        self.sent, self.done = [], False

    def of_first(self, numbers):
        self.sent += {numbers[0]} & {SEEK, TAKE, DROP}

    def sum(self, x):
        return x * 2 if self.done else x


def test_other_ranks_are_not_waited_for_and_release_what_is_not_taken(model, folder, monkeypatch):
    wanted, group = answer(model, prefix_cache=folder)[0], FirstRank()
    monkeypatch.setattr(
        ModelRunner, "disk_cache", lambda own, *given: LeadingDisk(given[0], own.cache, given[1], group=group)
    )
    engine = make_engine(model, prefix_cache=folder)
    engine.add(request("running", [1, 2, 3], max_new_tokens=40))
    engine.step()

    def ask():
        """Ask for PROMPT while the other text runs; what was sent in 12 steps."""
        del group.sent[:]
        engine.add(request("reads", PROMPT, max_new_tokens=9, logprobs=0))
        pieces = []
        for _ in range(12):
            if engine.disk._load is not None:
                assert engine.disk._load.done.wait(10)
            pieces += engine.step()
        return pieces

    assert {piece.request_id for piece in ask()} == {"running"}
    assert group.sent[:2] == [SEEK, TAKE]
    assert set(group.sent[2:]) == {TAKE}, "it is asked again"
    engine.abort("reads")
    assert group.sent[-1] == DROP
    with monkeypatch.context() as patched:
        patched.setattr(BlockFiles, "read", lambda *own: False)
        assert {piece.request_id for piece in ask()} == {"running", "reads"}
        assert group.sent[:2] == [SEEK, DROP], "this rank has not read what the others may have"
    run(engine)
    engine.blocks.forget()
    engine.disk.reading.seconds, engine.disk.prefill.seconds = 1.0, 1e-9
    engine.add(request("computed", PROMPT, max_new_tokens=9))
    del group.sent[:]
    run(engine)
    assert SEEK not in group.sent, "others would read what is computed"
    engine.blocks.forget()
    group.done, engine.disk.reading.seconds = True, None
    assert answer(model, engine=engine)[:2] == (wanted, FULL)
    engine.close()


def test_an_engine_that_is_closed_while_blocks_are_read_ends(model, folder, slow_disk):
    answer(model, prefix_cache=folder)
    engine = make_engine(model, prefix_cache=folder)
    engine.add(request("reads", PROMPT, max_new_tokens=9))
    engine.step()
    threading.Timer(0.1, slow_disk.set).start()
    engine.close()
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hasten-disk")]


def test_what_is_slower_than_computing_is_not_read_but_tried_again(model, folder):
    answer(model, prefix_cache=folder)
    engine = make_engine(model, prefix_cache=folder)
    disk, block = engine.disk, engine.runner.cache.block_bytes
    disk.prefill.seconds, disk.reading.seconds = 1e-3, 1e-3 * SIZE / block * 1.04
    wanted = answer(model)[0]
    assert answer(model, engine=engine)[0] == wanted
    assert engine.stats().disk_hits == 0
    engine.blocks.forget()
    disk.prefill.seconds = 1e-3
    assert answer(model, engine=engine) == (wanted, FULL, FULL)
    assert disk.reading.seconds < 1e-3
    assert disk.prefill.seconds == 1e-3  # nothing was computed that says more: single tokens
    engine.close()


def test_rates_follow_the_latest_measurements():
    rate = disk_cache.Rate()
    rate.measured(10, 1.0)
    assert rate.seconds == pytest.approx(0.1)
    for _ in range(30):
        rate.measured(10, 5.0)
    assert rate.seconds == pytest.approx(0.5, rel=0.01)


WRITER = """
import sys, time
from pathlib import Path
from hasten.engine import block_files
from hasten.engine.block_files import HEADER_BYTES, BlockFiles

def in_pieces(file, data):  # so that a kill in the middle of a file is likely
    for start in range(0, len(data), 4096):
        file.write(data[start : start + 4096])
        time.sleep(0.0001)

block_files._write_all = in_pieces
source, target = (BlockFiles(Path(name), limit=1 << 30) for name in sys.argv[1:])
paths = sorted(source.folder.glob("??/*.kv"), key=lambda path: path.stat().st_mtime_ns)
blocks = {bytes.fromhex(path.stem): path.read_bytes()[HEADER_BYTES:] for path in paths}
print("writing", flush=True)
while True:
    for key, block in blocks.items():
        target.write(key, memoryview(block))
    for key in reversed(blocks):
        target.path(key).unlink()
"""


def test_a_server_answers_right_after_a_writer_was_killed_at_any_place(tmp_path):
    """kill -9 at 15 random places of a real process that writes blocks of 64 KiB all the time."""
    own = fused(num_hidden_layers=8, num_key_value_heads=4, head_dim=128)
    source, target = tmp_path / "source", tmp_path / "target"
    wanted = answer(own, prefix_cache=source)[0]
    target.mkdir()
    shutil.copy(source / "secret", target)
    command = [sys.executable, "-c", WRITER, str(source), str(target)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    cached, half, chance = [], 0, random.Random(3)
    for _ in range(15):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
            assert child.stdout.readline() == b"writing\n"
            time.sleep(chance.uniform(0, 0.06))
            child.kill()
        half += len(list(target.glob("??/.*.partial")))
        there = {path: path.read_bytes() for path in kept(target)}
        assert all(data == (source / path.relative_to(target)).read_bytes() for path, data in there.items())
        found, tokens, _ = answer(own, prefix_cache=target)
        assert found == wanted
        cached.append(tokens)
        for path in target.glob("??/*"):
            path.unlink()
    assert len(set(cached)) > 2, "every kill came at the same place"
    assert half, "no write was interrupted"


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_crowds_over_restarts(name, folder, monkeypatch):
    """Random arrivals in a cache so small that they preempt each other; the books agree after every step."""
    read_always(monkeypatch)
    own, chance, hits = hasten.load(make_reference(name), dtype="float32"), random.Random(5), 0
    common = [chance.randrange(90) for _ in range(40)]
    prompts = [
        common[: chance.choice((10, 25, 40))] + [chance.randrange(90)] * chance.randrange(1, 9) for _ in range(6)
    ]
    alone = [hasten.generate(own, one, temperature=0, max_new_tokens=8, ignore_eos=True)[0].tokens for one in prompts]
    for _ in range(4):
        engine = make_engine(own, prefix_cache=folder, blocks=24, max_sequences=4, token_budget=12)
        order = chance.choices(range(len(prompts)), k=8)
        found = run(engine, [request(f"{place}", prompts[i], max_new_tokens=8) for place, i in enumerate(order)])
        for place, i in enumerate(order):
            assert tokens_of(found[f"{place}"]) == alone[i]
        hits += engine.stats().disk_hits
        engine.close()
    assert hits > 50


def test_blocks_of_layers_of_different_shapes_are_read_and_written_whole(monkeypatch):
    config = tiny_llama().config
    shapes = [LayerShape(1 + i % 2, 16 << i % 3) for i in range(len(config.layers))]
    for module in (cache_module, cache_shapes):
        monkeypatch.setattr(module, "layer_shapes", lambda config: shapes)
    for kv_cache_dtype in ("auto", "int8", "int4"):
        rows = {"dtype": torch.bfloat16, "device": "cpu", "row_format": row_format(kv_cache_dtype)}
        one, other = (KVCache(config, blocks=7, block_size=4, **rows) for _ in range(2))
        for tensor in (*one.k, *one.v):
            tensor.view(torch.uint8).random_(0, 100)
        contents = one.read_blocks([5, 0, 3])
        assert (
            contents.shape == (3, one.block_bytes) == (3, KVCache.bytes_per_block(config, block_size=4, **_but(rows)))
        )
        other.write_blocks([1, 6, 2], contents)
        for mine, theirs in zip((*one.k, *one.v), (*other.k, *other.v), strict=True):
            mine, theirs = (tensor[:-1].unflatten(0, (7, 4)).view(torch.uint8) for tensor in (mine, theirs))
            assert torch.equal(mine[[5, 0, 3]], theirs[[1, 6, 2]])
            assert not theirs[[0, 3, 4, 5]].any()


def _but(rows):
    return {name: value for name, value in rows.items() if name != "device"}


def test_engines_that_cannot_keep_blocks_on_disk_say_why(model, tmp_path):
    with pytest.raises(ConfigError, match="several engines share the keys"):
        disk_cache.block_files(tmp_path, 1 << 20, model, secret=b"x")
    on_gpu = tiny_llama().to("meta")
    with pytest.raises(ConfigError, match="the model is on meta; blocks are kept for models on a CPU only"):
        disk_cache.block_files(tmp_path, 1 << 20, on_gpu, secret=None)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match=r"file, cannot be written: .*; name another one"):
        make_engine(model, prefix_cache=tmp_path / "file")
    with pytest.raises(ConfigError, match="prefix_cache is 3; it must be True or False or text or a Path"):
        make_engine(model, prefix_cache=3)


def test_llm_takes_the_folder(model, folder):
    texts, times = [], {"max_sequences": 2, "token_budget": 32, "max_length": 128}
    for options in ({}, {"prefix_cache": folder}, {"prefix_cache": folder}):
        llm = hasten.LLM(model, block_size=4, **times, **options)
        (answered,) = llm.generate([PROMPT], temperature=0, max_new_tokens=9)
        texts.append((answered.tokens, answered.cached_tokens))
        cache = weakref.ref(llm.engine.runner.cache)
        llm.close()
        gc.collect()
        assert cache() is None
    assert texts == [(texts[0][0], 0), (texts[0][0], 0), (texts[0][0], FULL)]
