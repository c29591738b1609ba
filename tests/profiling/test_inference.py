"""`hasten profile generate` and `serve`: the parts of a step, of readable blocks and of those of one native call."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hasten
from hasten.errors import ConfigError
from hasten.machine.limits import Limits
from hasten.ops.attention.pattern_text import parse_pattern, pattern_values
from hasten.ops.native import library
from hasten.planning.cost import forward_flops_per_token
from hasten.profiling import profile as profiles
from hasten.profiling import show
from hasten.profiling.profile import profile, storages
from hasten.profiling.steps import Answers, ServedAnswers, keys_of, least_of
from hasten.profiling.trace import covered, traced
from hasten.profiling.tree import PartTime, folded, ordered, parameters_of
from hasten.profiling.walk import parts_of
from references import make_reference
from tiny_model import tiny_llama
from traces import check_trace


@pytest.fixture(autouse=True)
def known_limits(monkeypatch):
    """Measuring the machine takes longer than all of these, and so does drawing."""
    monkeypatch.setattr(show, "draw", lambda *_: None)
    rates = {"float32": 1e11, "bfloat16": 1e11, "int8": 1e11}
    monkeypatch.setattr(profiles, "product_limits", lambda *_: Limits(1e10, rates))


PROMPT = {"batch": 1, "prompt_tokens": 192}
ANSWERS = {"generate": Answers, "serve": ServedAnswers}


def rows_of(phase):
    return {row.name: row for row in phase.rows}


EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


def check(phase, names):
    """What holds of every profile."""
    rows, leaves = rows_of(phase), [row for row in phase.rows if row.leaf]
    assert names <= rows.keys()
    assert sum(row.seconds for row in leaves) == pytest.approx(rows[""].seconds)
    assert rows[""].parameters == phase.checks["parameters: the parts' sum, the config's"][1]
    assert all(row.backward == 0 for row in leaves)
    return rows


@pytest.mark.parametrize("use", ["generate", "serve"])
def test_readable_blocks(use, tmp_path):
    model = tiny_llama()
    found = profile(model, tmp_path, use=use, batch=2, prompt_tokens=20, steps=1)
    around = {"plan", "compute", "draw", "answer"}
    inside = {"model.embedding", "model.blocks.1.attention.q", "model.blocks.1.mlp.down", "model.norm", "model.head"}
    prefill, decode = (check(phase, around | inside) for phase in found.phases)
    norms = 2 * 2 * 64  # which planning counts, with 2 FLOPs a weight
    assert prefill[""].flops == 40 * (forward_flops_per_token(model.config, 20, scored=1) - 2 * norms)
    assert decode[""].flops < prefill[""].flops
    assert all(rows["model.blocks.0.mlp"].seconds > 0 for rows in (prefill, decode))
    assert [phase.tokens for phase in found.phases] == [40, 2]
    for phase in found.phases:
        check_trace(tmp_path / f"{phase.name}.trace.json", "forward model.blocks.0.mlp.down")
        shapes, counter = phase.checks["FLOPs: from shapes, torch's FlopCounterMode"]
        attention = sum(row.flops for row in phase.rows if row.name.endswith("attention.itself"))
        assert counter == shapes - (attention if phase.name == "decode" else 0), "torch knows no reading of a cache"


@pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")
@pytest.mark.parametrize("use", ["generate", "serve"])
def test_a_native_call_tells_the_times_of_its_parts(use, tmp_path):
    readable = ANSWERS[use](tiny_llama(), batch=1, prompt_tokens=20).works()
    model = hasten.fuse(tiny_llama().to(torch.bfloat16))
    found = profile(model, tmp_path, use=use, prompt_tokens=20, steps=2)
    parts = ("qkv", "attention", "output", "inner", "down")
    for phase, plain in zip(found.phases, readable, strict=True):
        rows = check(phase, {f"model.blocks.{i}.{part}" for i in range(2) for part in parts})
        assert all(rows[f"model.blocks.{i}.{part}"].seconds > 0 for i in range(2) for part in parts)
        # The native clock and Python's are one: what they measure, one within the other, is the call's.
        inside = sum(rows[f"model.blocks.{i}"].seconds for i in range(2))
        assert rows["model.blocks"].seconds == pytest.approx(inside + rows["model.blocks.itself"].seconds)
        assert rows[""].flops == sum(flops for flops, _ in least_of(plain).values())
    assert model.stack.times is None


@pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")
def test_experts_in_one_native_call_count_what_they_read(tmp_path):
    readable = ANSWERS["generate"](tiny_llama(**EXPERTS), batch=1, prompt_tokens=20).works()
    model = hasten.fuse(tiny_llama(**EXPERTS).to(torch.bfloat16))
    assert all(block.joins_experts for block in model.blocks)
    found = profile(model, tmp_path, use="generate", prompt_tokens=20, steps=2)
    for phase, plain in zip(found.phases, readable, strict=True):
        parts = ("qkv", "attention", "output", "routing", "experts")
        rows = check(phase, {f"model.blocks.{i}.{part}" for i in range(2) for part in parts})
        assert all(rows[f"model.blocks.{i}.{part}"].seconds > 0 for i in range(2) for part in parts)
        assert rows[""].flops == sum(flops for flops, _ in least_of(plain).values())


@pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")
@pytest.mark.parametrize(("family", "attending"), [("qwen3_5_text", 3), ("lfm2", 2)])
def test_layers_with_states_in_one_native_call_count_what_readable_ones_do(family, attending, tmp_path):
    readable = Answers(hasten.load(make_reference(family)), batch=1, prompt_tokens=20).works()
    model = hasten.fuse(hasten.load(make_reference(family), dtype="bfloat16"))
    found = profile(model, tmp_path, use="generate", prompt_tokens=20, steps=2)
    names = {
        f"model.blocks.{i}.{part}"
        for i in {0, 1, 2, 3} - {attending}
        for part in ("inputs", "mixer", "output", "inner", "down")
    }
    for phase, plain in zip(found.phases, readable, strict=True):
        rows = check(phase, names | {f"model.blocks.{attending}.qkv", f"model.blocks.{attending}.attention"})
        assert all(rows[name].seconds > 0 for name in names)
        assert rows[""].flops == sum(flops for flops, _ in least_of(plain).values())


def held():
    return sum(storage.nbytes() for storage in storages(torch.device("cpu")))


def test_tensors_without_memory_are_not_counted():
    """torch.compile leaves some behind."""
    kept, wrapped = torch.empty(1 << 20), torch.empty(1 << 20)
    before = held()
    traced, view = torch._to_functional_tensor(wrapped), kept[7:]
    with pytest.raises(RuntimeError, match="invalid python storage"):
        traced.untyped_storage().data_ptr()
    assert held() == before
    del kept, view
    assert held() == before - (4 << 20)


def has_memory(one):
    """Whether an object is a storage with memory: torch.compile leaves others behind."""
    if type(one) is not torch.UntypedStorage:
        return False
    try:
        one.data_ptr()
    except RuntimeError:
        return False
    return True


def test_memory_that_a_traced_step_frees_is_kept_until_its_end(tmp_path, monkeypatch):
    """torch's profiler would warn that it does not know this memory."""
    old, seen = [torch.empty(1 << 20)], []
    pointer = old[0].data_ptr()

    def freeing(*given):
        old.clear()
        seen.append(pointer in {one.data_ptr() for one in gc.get_objects() if has_memory(one)})
        return traced(*given)

    monkeypatch.setattr(profiles, "traced", freeing)
    profile(tiny_llama(), tmp_path, use="generate", prompt_tokens=20, steps=1)
    assert seen == [True, False]  # the second phase begins without it


def test_answers_that_began_in_different_steps_are_begun_anew_together():
    answers = ServedAnswers(tiny_llama(), batch=20, prompt_tokens=30)  # more than a step of the engine reads
    _, decode = answers.works()
    begun = set()
    for _ in range(3 * answers.new):
        decode.prepare()
        decode.step()
        begun.add(answers.asked[0])
    assert len(begun) >= 3


def test_prompts_that_take_longer_to_read_than_an_answer_to_write_are_refused():
    with pytest.raises(ConfigError, match="80 prompts of 448 tokens take 70 steps to read"):
        ServedAnswers(tiny_llama(), batch=80, prompt_tokens=448)


def test_int8_layers_are_counted_as_the_numbers_they_stand_for():
    model = tiny_llama().to(torch.bfloat16)
    numbers = sum(weight.numel() for weight in model.parameters())
    hasten.quantize(model, hasten.Int8())
    assert sum(parameters_of(parts_of(model)).values()) == numbers


def test_a_packed_embedding_of_its_own_is_counted_and_multiplies_nothing(tmp_path):
    model = hasten.quantize(tiny_llama(), hasten.Int8(embedding="int8"))
    found = profile(model, tmp_path, use="generate", **PROMPT, steps=1)
    for phase in found.phases:
        rows = check(phase, {"model.embedding", "model.head"})
        assert rows["model.embedding"].parameters == rows["model.head"].parameters
        assert rows["model.embedding"].flops == 0
        assert rows["model.head"].flops > 0


def test_a_model_does_not_train_and_a_window_is_no_batch(tmp_path):
    with pytest.raises(ConfigError, match="a recipe trains"):
        profile(tiny_llama(), tmp_path, use="train")
    with pytest.raises(ConfigError, match="batch must be"):
        profile(tiny_llama(), tmp_path, batch=0)
    with pytest.raises(ConfigError, match="no room for a prompt"):
        profile(tiny_llama(max_position_embeddings=2), tmp_path)


def test_tensorboard_gets_the_times(tmp_path):
    pytest.importorskip("tensorboard", reason="the package tensorboard is not here")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = profile(tiny_llama(), tmp_path, prompt_tokens=8, steps=1, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Scalars("decode/step")[0].value == pytest.approx(found.phases[1].rows[0].seconds)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=3), st.none() | st.integers(1, 9))
def test_keys_are_those_that_queries_see(spans, window):
    seen = read = 0
    for held, new in spans:
        sets = [set(range(max(0, p + 1 - (window or p + 1)), p + 1)) for p in range(held, held + new)]
        seen, read = seen + sum(map(len, sets)), read + len(set.union(*sets))
    assert keys_of(spans, window) == (seen, read)


def test_a_sparse_pattern_counts_what_it_has():
    values = {"hasten": {"attention_pattern": pattern_values(parse_pattern("local:radius=1,block=16"))}}
    sparse, dense = (
        {work.name: sum(flops for flops, _ in least_of(work).values()) for work in Answers(model, **PROMPT).works()}
        for model in (tiny_llama(**values), tiny_llama())
    )
    configs = tiny_llama().config, tiny_llama(**values).config
    less = [192 * forward_flops_per_token(config, 192, scored=1) for config in configs]
    assert dense["prefill"] - sparse["prefill"] == pytest.approx(less[0] - less[1])
    a_key = 2 * 4 * configs[0].heads * configs[0].head_dim  # of both layers
    hidden = (dense["decode"] - sparse["decode"]) / a_key
    assert 180 < hidden < 215, "two or three blocks of 16 are seen instead of 225 keys"


@given(st.lists(st.tuples(st.integers(-5, 25), st.integers(0, 9)), max_size=9))
def test_covered_time_counts_once(spans):
    spans = sorted((begin, begin + length) for begin, length in spans)
    cells = {cell for begin, end in spans for cell in range(begin, end)}
    assert covered(spans, 0, 20) == len(cells & set(range(20)))


def test_alike_parts_are_added_up_and_the_largest_gain_comes_first():
    def part(name, seconds, limit):
        return PartTime(name=name, forward=seconds, limit=limit)

    rows = folded([part("blocks.0.mlp", 3.0, 2.9), part("blocks.1.mlp", 4.0, 3.9), part("head", 1.0, 0.5)])
    assert [(row.name, row.seconds, row.count) for row in rows] == [("blocks.*.mlp", 7.0, 2), ("head", 1.0, 1)]
    assert [row.name for row in ordered(rows, "gain")] == ["head", "blocks.*.mlp"]
    assert [row.name for row in ordered(rows, "time")] == ["blocks.*.mlp", "head"]
