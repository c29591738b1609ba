"""Sampling against transformers' processors, the drawn distribution, and a row alone against a row in a batch."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from hasten.engine.params import LogitBias, SamplingParams
from hasten.engine.sampler import Sampler
from hasten.engine.sampling import (
    History,
    RowParams,
    banned_ends,
    next_tokens,
    process,
    sample,
)
from hasten.errors import ConfigError
from hasten.ops.draw import exponential_noise

transformers = pytest.importorskip("transformers")

INF = math.inf
seeds = st.integers(0, 2**31)


def random_logits(seed: int, *, rows: int = 3, vocab: int = 50) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def ours(logits: torch.Tensor, *params: SamplingParams, **options: object) -> torch.Tensor:
    rows = RowParams.stack(params * (len(logits) if len(params) == 1 else 1), vocab_size=logits.shape[1])
    return process(logits, rows, **options)  # type: ignore[arg-type]


def assert_same(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """The same tokens are left, with the same probabilities."""
    assert torch.equal(mine.isinf(), theirs.isinf())
    torch.testing.assert_close(mine.softmax(-1), theirs.softmax(-1), atol=1e-6, rtol=1e-5)


@settings(max_examples=50)
@given(seed=seeds, k=st.integers(1, 60))
def test_top_k(seed: int, k: int) -> None:
    logits = random_logits(seed)
    assert_same(ours(logits, SamplingParams(top_k=k)), transformers.TopKLogitsWarper(k)(None, logits.clone()))


def test_top_k_keeps_equal_logits_as_transformers_does() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    kept = ours(logits, SamplingParams(top_k=2))
    assert_same(kept, transformers.TopKLogitsWarper(2)(None, logits.clone()))
    assert kept.isfinite().sum() == 4
    assert ours(logits, SamplingParams(top_k=2, top_p=0.99)).isfinite().sum() == 4


def test_a_row_without_top_k_keeps_all_tokens_beside_one_that_has_it() -> None:
    logits = random_logits(0, rows=2)
    kept = ours(logits, SamplingParams(top_k=3), SamplingParams()).isfinite().sum(-1)
    assert kept.tolist() == [3, 50]


@settings(max_examples=100)
@given(seed=seeds, p=st.floats(0.01, 1.0), k=st.sampled_from([0, 1, 7, 60]), temperature=st.floats(0.2, 3))
def test_temperature_then_top_k_then_top_p(seed: int, p: float, k: int, temperature: float) -> None:
    logits = random_logits(seed)
    theirs = transformers.TemperatureLogitsWarper(temperature)(None, logits.clone())
    theirs = theirs if k == 0 else transformers.TopKLogitsWarper(k)(None, theirs)
    ordered = theirs.double().softmax(-1).sort(descending=True).values.cumsum(-1)
    if ((ordered - p).abs() < 1e-5).any():
        return  # the sums differ by rounding just at the border: both answers are right
    params = SamplingParams(temperature=temperature, top_k=k, top_p=p)
    assert_same(ours(logits, params), transformers.TopPLogitsWarper(p)(None, theirs))


@settings(max_examples=50)
@given(seed=seeds, p=st.floats(0.0001, 0.9999))
def test_min_p(seed: int, p: float) -> None:
    logits = random_logits(seed)
    odds = logits.softmax(-1) / logits.softmax(-1).amax(-1, keepdim=True)
    if ((odds / p - 1).abs() < 1e-4).any():
        return
    assert_same(ours(logits, SamplingParams(min_p=p)), transformers.MinPLogitsWarper(p)(None, logits.clone()))


@settings(max_examples=50)
@given(seed=seeds, penalty=st.floats(0.5, 2.0), said=st.lists(st.integers(0, 49), min_size=1, max_size=20))
def test_repetition_penalty(seed: int, penalty: float, said: list[int]) -> None:
    logits, prompt, output = random_logits(seed, rows=1), said[: len(said) // 2], said[len(said) // 2 :]
    history = History.of_prompts([prompt], vocab_size=50)
    for token in output:
        history.observe(torch.tensor([token]))
    mine = ours(logits, SamplingParams(repetition_penalty=penalty), history=history)
    theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([said]), logits.clone())
    torch.testing.assert_close(mine, theirs)


def test_presence_and_frequency_count_the_output_only() -> None:
    history = History.of_prompts([[0, 1], []], vocab_size=5)
    for tokens in ([1, 4], [1, 4], [2, 4]):
        history.observe(torch.tensor(tokens))
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    mine = ours(torch.zeros(2, 5), params, history=history)
    # OpenAI's definition: logit - count * frequency - (count > 0) * presence
    torch.testing.assert_close(mine, -torch.tensor([[0, 1.0, 0.75, 0, 0], [0, 0, 0, 0, 1.25]]))
    with pytest.raises(ConfigError, match="history"):
        ours(torch.zeros(2, 5), params)


def test_bias_ban_and_padding() -> None:
    logits = torch.zeros(2, 8)
    logits[:, 6:] = 100.0  # the embedding's padding: never looked at
    rows = RowParams.stack([SamplingParams(logit_bias={1: 5.0, 0: -INF}), SamplingParams()], vocab_size=6)
    x = process(logits, rows, banned=torch.tensor([False, False, True, False, False, False]))
    assert x.tolist() == [[-INF, 5.0, -INF, 0, 0, 0], [0, 0, -INF, 0, 0, 0]]
    steps = torch.zeros(2, dtype=torch.int64)
    for step in range(50):
        assert next_tokens(logits, rows, steps=steps + step).max() < 6
    with pytest.raises(ConfigError, match="names token 6; the vocabulary has 6"):
        RowParams.stack([SamplingParams(logit_bias={6: 1.0})], vocab_size=6)
    some = SamplingParams(logit_bias=dict.fromkeys(range(5), -INF), temperature=0)
    rows = RowParams.stack([some], vocab_size=6)
    assert next_tokens(torch.randn(1, 6), rows, steps=torch.zeros(1, dtype=torch.int64)).tolist() == [5]
    with pytest.raises(ConfigError, match=r"forbids .* all 5 tokens"):
        RowParams.stack([SamplingParams(), some], vocab_size=5)


def test_ends_are_banned_in_rows_before_their_fewest_tokens() -> None:
    params = [SamplingParams(min_new_tokens=3), SamplingParams(min_new_tokens=1), SamplingParams(min_new_tokens=2)]
    ends = [{1, 4}, {2}, {0, 9}]  # 9 is not in the vocabulary

    def banned(*steps: int) -> list[list[int]] | None:
        found = banned_ends(params, steps=steps, end_ids=ends, vocab_size=5)
        return None if found is None else [row.nonzero().flatten().tolist() for row in found]

    assert banned(0, 0, 0) == [[1, 4], [2], [0]]
    assert banned(2, 1, 1) == [[1, 4], [], [0]]
    assert banned(3, 0, 2) == [[], [2], []]
    assert banned(3, 1, 2) is None


everything = SamplingParams(
    temperature=1e-30, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.2, presence_penalty=1, frequency_penalty=1
)


@pytest.mark.parametrize(
    "params", [SamplingParams(), everything, SamplingParams(temperature=0), SamplingParams(top_p=0.5)]
)
def test_a_row_without_any_token_left_gives_token_0_and_no_nan(params: SamplingParams) -> None:
    logits = torch.stack([torch.full((9,), -INF), torch.arange(9.0)])
    history = History.of_prompts([[1], [2]], vocab_size=9)
    rows = RowParams.stack([params, params], vocab_size=9)
    assert not process(logits, rows, history=history).isnan().any()
    tokens = next_tokens(logits, rows, steps=torch.zeros(2, dtype=torch.int64), history=history)
    assert tokens[0] == 0
    assert 0 <= tokens[1] < 9


def test_a_temperature_that_float32_does_not_hold_is_greedy() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    rows = RowParams.stack([SamplingParams(temperature=1e-50, seed=1)], vocab_size=50)
    assert next_tokens(logits, rows, steps=torch.tensor([0])).tolist() == logits.argmax(-1).tolist()


def test_greedy_takes_the_lowest_of_equals_beside_rows_that_draw() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]]).repeat(2, 1)
    alone = RowParams.stack([SamplingParams(temperature=0, top_k=2)], vocab_size=4)
    assert sample(process(logits[:1], alone), alone).tolist() == [1]
    rows = RowParams.stack([SamplingParams(temperature=0), SamplingParams(seed=1)], vocab_size=4)
    drawn = [next_tokens(logits, rows, steps=torch.full((2,), step)).tolist() for step in range(40)]
    assert {row[0] for row in drawn} == {1}
    assert len({row[1] for row in drawn}) > 1
    with pytest.raises(ConfigError, match="steps"):
        sample(logits, rows)


def test_drawn_frequencies_follow_the_probabilities() -> None:
    p = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.02, 0.01])
    n = 40_000
    rows = RowParams.stack([SamplingParams(seed=5)], vocab_size=6)
    noise = exponential_noise(rows.seeds.expand(n), torch.arange(n), vocab_size=6)
    tokens = (p.log() - noise.log()).argmax(-1)
    expected = p * n
    chi_square = ((tokens.bincount(minlength=6) - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 99.9% of chi-square with 5 degrees of freedom; the seed is fixed
    by_seed = exponential_noise(torch.arange(n), torch.zeros(n, dtype=torch.int64), vocab_size=6)
    tokens = (p.log() - by_seed.log()).argmax(-1)
    assert ((tokens.bincount(minlength=6) - expected) ** 2 / expected).sum() < 20.5


def test_noise_is_exponential_and_unrelated_from_step_to_step() -> None:
    noise = exponential_noise(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 0, 1]), vocab_size=100_000)
    assert noise.min() > 0
    assert noise.isfinite().all()
    for row in noise:  # Kolmogorov-Smirnov against 1 - exp(-x), 99.9%
        cdf = 1 - torch.exp(-row.double().sort().values)
        steps = torch.arange(1, 100_001, dtype=torch.float64) / 100_000
        assert (cdf - steps).abs().max() < 1.95 / 100_000**0.5
    assert (torch.corrcoef(noise) - torch.eye(4)).abs().max() < 0.015
    assert torch.corrcoef(torch.stack([noise[0, :-1], noise[0, 1:]]))[0, 1].abs() < 0.015


some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    top_k=st.sampled_from([0, 3, 90]),
    top_p=st.sampled_from([0.4, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    logit_bias=st.dictionaries(st.integers(0, 49), st.floats(-5, 5), max_size=2),
    seed=st.integers(0, 2**63 - 1),
)


@settings(max_examples=60)
@given(batch=st.lists(some_params, min_size=1, max_size=4), seed=seeds)
def test_a_row_in_a_batch_gives_what_it_gives_alone(batch: list[SamplingParams], seed: int) -> None:
    def run(params: list[SamplingParams], which: list[int]) -> list[list[int]]:
        rows = RowParams.stack(params, vocab_size=50)
        history = History.of_prompts([[row, 7] for row in which], vocab_size=50)
        taken = []
        for step in range(4):
            logits = random_logits(seed + step, rows=4)[which]
            tokens = next_tokens(logits, rows, steps=torch.full((len(which),), step), history=history)
            history.observe(tokens)
            taken.append(tokens.tolist())
        return [list(column) for column in zip(*taken, strict=True)]

    together = run(batch, list(range(len(batch))))
    assert together == run(batch, list(range(len(batch))))
    for row, params in enumerate(batch):
        assert run([params], [row]) == [together[row]]


def test_a_row_without_a_seed_draws_one() -> None:
    first, second = (RowParams.stack([SamplingParams()], vocab_size=5).seeds for _ in range(2))
    assert first != second


@pytest.mark.parametrize("params", [SamplingParams(seed=1), everything], ids=["plain", "everything"])
def test_one_graph_without_breaks(params: SamplingParams) -> None:
    logits = random_logits(3)
    rows = RowParams.stack([params] * 3, vocab_size=50)
    history = History.of_prompts([[1], [2], [3]], vocab_size=50)
    steps = torch.arange(3)

    def step(logits: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return next_tokens(logits, rows, steps=steps, history=history)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(logits, steps), step(logits, steps))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", INF),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 10**400),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: INF}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", [1, 2]),
        ("seed", -1),
        ("seed", 2**63),
        ("max_new_tokens", 0),
        ("min_new_tokens", 257),
        ("stop", ("",)),
        ("stop", 5),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", 3),
        ("ignore_eos", "yes"),
    ],
)
def test_a_bad_setting_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_params_are_values() -> None:
    a = SamplingParams(stop="\n", logit_bias={3: 1, 1: -INF}, stop_token_ids=[4])  # type: ignore[arg-type]
    b = SamplingParams(stop=("\n",), logit_bias=LogitBias({1: -INF, 3: 1.0}), stop_token_ids=(4,))
    assert a == b
    assert hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a
    assert a != SamplingParams()


def test_noise_by_rows_is_the_noise_of_all_rows_at_once():
    seeds, steps = torch.tensor([0, 5, 2**62, 7, 7]), torch.tensor([0, 1, 2, 3, 4])
    for vocab_size in (50, 20_000, 70_000):  # several rows at a time, one, and one in pieces of its own
        whole = exponential_noise(seeds, steps, vocab_size=vocab_size)
        for row in range(5):
            alone = exponential_noise(seeds[row : row + 1], steps[row : row + 1], vocab_size=vocab_size)
            assert torch.equal(whole[row], alone[0])
        compiled_path = exponential_noise(seeds.to("meta"), steps.to("meta"), vocab_size=vocab_size)
        assert compiled_path.shape == whole.shape


@pytest.mark.parametrize("scale", [0.5, 4.0])  # flat: all must be sorted; peaked: the first few are enough
@pytest.mark.parametrize("top_k", [0, 40, 3000])
def test_top_p_looks_at_few_tokens_without_changing_what_is_kept(scale, top_k, monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(4, 5000) * scale
    params = [SamplingParams(top_p=p, top_k=top_k, seed=1) for p in (0.5, 0.9, 1.0, 0.97)]
    rows = RowParams.stack(params, vocab_size=5000)
    found = process(logits, rows)
    monkeypatch.setattr("hasten.engine.sampling._FEW", 5000)  # sort all
    assert torch.equal(found, process(logits, rows))


def test_top_p_looks_past_the_first_few_where_they_have_almost_its_probability():
    p = torch.full((1, 5000), 0.0501 / 4488)
    p[:, :512] = 0.9499 / 512  # the first that are looked at
    kept = ours(p.log(), SamplingParams(top_p=0.95)).isfinite().sum()
    assert kept > 512


class NoCopies(TorchFunctionMode):
    """Fails where a list becomes a tensor: on a GPU that waits for everything before it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func is not torch.tensor
        return func(*args, **(kwargs or {}))


def test_rows_at_one_step_wait_for_no_copy():
    params = [SamplingParams(seed=seed) for seed in (1, 2)]
    sampler = Sampler(params, [(), ()], eos_ids=(0,), vocab_size=50, device=torch.device("cpu"))
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    with NoCopies():
        together = sampler.next_tokens(logits, steps=[7, 7])
    apart = [sampler.next_tokens(logits, steps=steps) for steps in ([7, 8], [6, 7])]
    assert together.tolist() == [apart[0][0], apart[1][1]]


@pytest.mark.parametrize("bias", [{}, {3: 2.0}])
def test_rows_of_drafts_are_drawn_with_their_own_settings(bias):
    """Whatever rows were asked for before, and how often."""
    params = [SamplingParams(seed=n, temperature=0.5 + n, top_k=40 - 9 * n, logit_bias=bias) for n in (0, 1, 2)]

    def sampler(own: list[SamplingParams]) -> Sampler:
        return Sampler(own, [()] * len(own), eos_ids=(0,), vocab_size=50, device=torch.device("cpu"))

    together, shapes = sampler(params), [(a, b, c) for a in range(5) for b in range(5) for c in range(4)]
    for number, lengths in enumerate([*shapes, *shapes[::-1]]):  # more than are kept, and each of them again
        drafts, logits = [[7] * length for length in lengths], random_logits(number, rows=3 + sum(lengths))
        taken = together.take(logits, drafts, steps=[4, 5, 6])
        alone = [
            sampler([own]).take(part, [draft], steps=[4 + row])
            for row, (own, part, draft) in enumerate(
                zip(params, logits.split([1 + length for length in lengths]), drafts, strict=True)
            )
        ]
        assert taken == [tokens for (tokens,) in alone]


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 2.0}, {"logit_bias": {3: 2.0}}, {"min_new_tokens": 9}])
def test_rows_take_in_company_what_they_take_alone(more):
    """Greedy ones beside drawn ones, whatever these need."""
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1, temperature=0.7, top_k=9, top_p=0.8, min_p=0.01, **more),
        SamplingParams(temperature=0, top_k=2, min_p=0.5),
        SamplingParams(seed=2),
        SamplingParams(temperature=0, **more),
    ]

    def sampler(own: list[SamplingParams]) -> Sampler:
        return Sampler(
            own, [[5, 6]] * len(own), [[7]] * len(own), eos_ids=(0,), vocab_size=50, device=torch.device("cpu")
        )

    together, apart = sampler(params), [sampler([own]) for own in params]
    for step in range(1, 6):
        logits = random_logits(step, rows=len(params))
        expected = [one.next_tokens(row[None], steps=[step]).item() for one, row in zip(apart, logits, strict=True)]
        assert together.next_tokens(logits, steps=[step] * len(params)).tolist() == expected


def test_rows_at_the_same_step_draw_with_its_noise_however_far_they_are():
    params = [SamplingParams(seed=seed, temperature=0.9) for seed in (3, 4)]
    rows, logits = RowParams.stack(params, vocab_size=50), random_logits(1, rows=2)
    sampler = Sampler(params, [(), ()], eos_ids=(0,), vocab_size=50, device=torch.device("cpu"))
    for step in (0, 255, 256, 1000, 3):
        expected = next_tokens(logits, rows, steps=torch.full((2,), step))
        assert torch.equal(sampler.next_tokens(logits, steps=[step, step]), expected)


class Even:
    """A guide whose rows may have even tokens only, at most `most` of them each."""

    def __init__(self, most: list[int]) -> None:
        self.left = list(most)

    def mask(self, row: int, logits: torch.Tensor) -> None:
        logits[1::2] = -INF

    def took(self, row: int, token: int) -> bool:
        assert token % 2 == 0
        self.left[row] -= 1
        return self.left[row] > 0


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("penalty", [{}, {"presence_penalty": 2.0, "frequency_penalty": 2.0}])
def test_drafts_change_no_token_where_a_draw_depends_on_those_before_it(penalty, guided):
    """Rows with drafts of any length, right up to any place, take what they take without."""
    params = [SamplingParams(seed=n, top_k=4, **penalty) for n in range(4)]
    drafted, right, most = [3, 0, 5, 4], [3, 0, 2, 4], [9, 9, 9, 2]
    logits = [random_logits(row, rows=1 + count, vocab=20) for row, count in enumerate(drafted)]

    def sampler(own: list[SamplingParams]) -> Sampler:
        return Sampler(own, [[1]] * len(own), eos_ids=(0,), vocab_size=20, device=torch.device("cpu"))

    expected, drafts = [], []
    for row, own in enumerate(params):
        alone, guide = sampler([own]), Even([most[row]]) if guided else None
        text = [
            alone.take(scores[None].clone(), [[]], steps=[place], guide=guide)[0][0]
            for place, scores in enumerate(logits[row])
        ]
        expected.append(text[: min(1 + right[row], most[row] if guided else 9)])
        wrong = (text[right[row]] + 2) % 20
        drafts.append([*text[: right[row]], wrong, *text[1 + right[row] :]][: drafted[row]])
    guide = Even(most) if guided else None
    assert sampler(params).take(torch.cat(logits), drafts, steps=[0] * 4, guide=guide) == expected
