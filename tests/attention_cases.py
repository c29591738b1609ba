"""Attention problems for tests: random ones of all kinds, their exact answer in float64, and plain PyTorch's.

The rule for every kernel: it may err at most twice what plain PyTorch in the same precision errs, both against float64.
"""

import torch
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def seen_by(q, k, *, causal=None, window=None, mask=None, key_padding_mask=None, cu_seqlens=None, cu_seqlens_k=None):
    """bool (B, T, S), and the distance (T, S) of each query from each key; pair by pair, without any of our code."""
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    causal = mask is None if causal is None else causal
    starts = [0, queries] if cu_seqlens is None else cu_seqlens.tolist()
    key_starts = [0, keys] if cu_seqlens is None else (cu_seqlens if cu_seqlens_k is None else cu_seqlens_k).tolist()
    seen = torch.zeros(batch, queries, keys, dtype=torch.bool)
    distance = torch.zeros(queries, keys, dtype=torch.float64)
    for first, end, first_key, end_key in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        own = slice(first, end), slice(first_key, end_key)
        # Both counted from the end of the document.
        behind = torch.arange(first - end, 0)[:, None] - torch.arange(first_key - end_key, 0)
        distance[own] = behind.double()
        near = behind < window if window is not None else torch.ones_like(behind, dtype=torch.bool)
        seen[:, own[0], own[1]] = (behind >= 0) & near if causal else torch.ones_like(near)
    if mask is not None:
        seen &= mask
    if key_padding_mask is not None:
        seen &= key_padding_mask[:, None]
    return seen, distance


def slopes_of(alibi, heads):
    if alibi is not True:
        return alibi.double()
    whole = 2 ** (heads.bit_length() - 1)
    first = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    between = [2 ** (-8 * i / (2 * whole)) for i in range(1, 2 * whole + 1)][::2]
    return torch.tensor((first + between)[:heads], dtype=torch.float64)


def explicit(q, k, v, *, scale=None, softcap=None, bias=None, alibi=None, sinks=None, **hidden):
    """Attention in the inputs' own precision, one head at a time, with autograd; rows that see nothing give zeros."""
    shape = q.shape
    if hidden.get("cu_seqlens") is not None:  # the rows of a batch laid end to end
        q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    batch, _, heads, size = q.shape
    groups = heads // k.shape[2]
    scale = size**-0.5 if scale is None else scale
    seen, distance = (x.to(q.device) for x in seen_by(q, k, **hidden))
    if bias is not None:
        bias = bias.to(q.dtype).expand(batch, heads, q.shape[1], k.shape[1])
    sequences = []
    for b in range(batch):
        rows = []
        for h in range(heads):
            scores = q[b, :, h] @ k[b, :, h // groups].T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if bias is not None:
                scores = scores + bias[b, h]
            if alibi is not None:
                scores = scores - (slopes_of(alibi, heads)[h] * distance.abs()).to(scores.dtype)
            empty = ~seen[b].any(-1, keepdim=True)
            scores = scores.masked_fill(~seen[b] & ~empty, -torch.inf)
            if sinks is not None:  # the score of a key without a value
                scores = torch.cat((scores, sinks[h].to(scores.dtype).expand(len(scores), 1)), dim=-1)
            probabilities = scores.softmax(-1)[:, : k.shape[1]].masked_fill(empty, 0)
            rows.append(probabilities @ v[b, :, h // groups])
        sequences.append(torch.stack(rows, 1))
    return torch.stack(sequences).reshape(shape)


def exact(q, k, v, **options):
    """The answer in float64."""
    return explicit(q.double(), k.double(), v.double(), **options)


def error(found, expected):
    return (found.double() - expected).abs().max().item()


def allowed(plain, expected, dtype):
    """Twice what plain PyTorch errs; one rounding is allowed even where it happens to hit the result exactly."""
    return 2 * error(plain, expected) + torch.finfo(dtype).eps * expected.abs().max().item()


def one_rounding(q, k, v, options):
    """What rounding the scores once changes: in a problem of few numbers plain PyTorch may be luckier than that."""
    scale = options["scale"] or q.shape[3] ** -0.5
    largest = scale * q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()
    if options["softcap"] is not None:
        largest = largest.clamp(max=options["softcap"])
    if options.get("bias") is not None:
        largest = largest + options["bias"].double().abs().max()
    if options["alibi"] is not None:
        largest = largest + slopes_of(options["alibi"], q.shape[2]).max() * k.shape[1]
    return (torch.finfo(q.dtype).eps * largest * v.double().abs().max()).item()


@st.composite
def documents(draw, tokens):
    """Cumulative lengths of documents in so many tokens; some may be empty."""
    inner = draw(st.lists(st.integers(0, tokens), max_size=4))
    return [0, *sorted(inner), tokens]


@st.composite
def paddings(draw, batch, keys, generator):
    """bool (B, S): keys that exist, with gaps or one stretch a row (some without any)."""
    if draw(st.booleans()):
        return torch.rand((batch, keys), generator=generator) < 0.8
    low, high = torch.randint(0, keys + 1, (2, batch, 1), generator=generator)
    return (torch.arange(keys) >= low) & (torch.arange(keys) < high)


@st.composite
def problems(draw, dtypes=DTYPES, sizes=(1, 3, 8, 16, 40), sinks=False):
    """q, k, v and the options of `attention`."""
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    queries = draw(st.integers(1, 9))
    keys = queries + draw(st.integers(0, 9))
    batch, size = draw(st.integers(1, 3)), draw(st.sampled_from(sizes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    dtype = draw(st.sampled_from(dtypes))

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    heads = kv_heads * groups
    options = {}
    kind = draw(st.sampled_from(["causal", "everything", "mask", "rows' masks", "both", "packed", "packed unequal"]))
    if kind == "packed":
        keys = queries
        options["cu_seqlens"] = torch.tensor(draw(documents(batch * queries)))
    elif kind == "packed unequal":
        own = draw(documents(batch * queries))
        more = draw(st.lists(st.integers(0, 5), min_size=len(own) - 1, max_size=len(own) - 1))
        ends = [0]
        for length, extra in zip(torch.tensor(own).diff().tolist(), more, strict=True):
            ends.append(ends[-1] + length + extra)
        ends[-1] += -ends[-1] % batch
        keys = max(1, ends[-1] // batch)
        ends[-1] = keys * batch
        options |= {"cu_seqlens": torch.tensor(own).int(), "cu_seqlens_k": torch.tensor(ends).int()}
    q, k, v = (random(batch, n, h, size) for n, h in ((queries, heads), (keys, kv_heads), (keys, kv_heads)))
    if kind in ("mask", "rows' masks", "both"):
        shape = (queries, keys) if kind == "mask" else (batch, queries, keys)
        options["mask"] = torch.rand(shape, generator=generator) < 0.6
        options["causal"] = True if kind == "both" else draw(st.sampled_from([None, False]))
    elif kind == "everything":
        options["causal"] = False
    if options.get("causal", "mask" not in options) is not False and (kind != "mask" and kind != "rows' masks"):
        options["window"] = draw(st.none() | st.integers(1, keys + 2))
    options["softcap"] = draw(st.none() | st.sampled_from([5.0, 50.0]))
    options["scale"] = draw(st.none() | st.sampled_from([0.05, 1.0]))
    options["alibi"] = draw(st.sampled_from([None, None, True, torch.rand(heads, generator=generator)]))
    options["sinks"] = draw(st.sampled_from([None, torch.randn(heads, generator=generator) * 2])) if sinks else None
    if "cu_seqlens" not in options:
        if draw(st.booleans()):
            options["key_padding_mask"] = draw(paddings(batch, keys, generator))
        if draw(st.booleans()):
            shape = [draw(st.sampled_from([1, n])) for n in (batch, heads, queries, keys)]
            options["bias"] = torch.randn(shape, generator=generator).to(dtype)
    return q, k, v, options


def inputs(seed, batch, tokens, heads, kv_heads, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, tokens, h, size, generator=generator).to(dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]
