"""Triton's attention over a cache: interpreted on the CPU, and run where a GPU is."""

import pytest
import torch

from hasten.ops.attention.cache_rows import PLAIN, RowFormat
from triton_cases import needs_gpu, run_interpreted


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize("name", ["ragged", "step"])
def test_in_the_interpreter(name):
    run_interpreted(f"ops/interpreted_{name}.py")


def test_how_steps_are_cut():
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    from hasten.ops.attention.ragged import plan_for

    one = plan_for(tokens=1, sequences=1, kv_heads=32, group=1, head_dim=128, max_query=1, longest=640)
    assert (one.rows, one.queries, one.splits) == (16, 16, 8)  # 256 programs
    many = plan_for(tokens=256, sequences=256, kv_heads=4, group=8, head_dim=64, max_query=1, longest=2048)
    assert (many.rows, many.splits) == (16, 1)  # 1,024 programs, none idle
    prompt = plan_for(tokens=2048, sequences=1, kv_heads=32, group=1, head_dim=128, max_query=2048, longest=2048)
    assert (prompt.rows, prompt.queries, prompt.splits) == (128, 128, 1)
    draft = plan_for(tokens=8, sequences=1, kv_heads=8, group=4, head_dim=128, max_query=8, longest=4096)
    assert (draft.rows, draft.queries) == (32, 8)
    assert draft.splits > 8


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (14, 2)])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_on_a_gpu(heads, head_dim):
    from ragged_cases import check_ragged

    for counts in ([(700, 1), (0, 1), (129, 1)], [(0, 300), (5, 1), (200, 70)], [(300, 5), (20, 5)]):
        for window, softcap in ((None, None), (100, None), (None, 30.0)):
            for size in (16, None):
                check_ragged(
                    counts=counts,
                    heads=heads,
                    head_dim=head_dim,
                    window=window,
                    softcap=softcap,
                    size=size,
                    dtype=torch.bfloat16,
                    device="cuda",
                )
    for rows in (PLAIN, RowFormat(8), RowFormat(8, rotated=True)):
        check_ragged(
            counts=[(300, 1), (3, 40)],
            heads=heads,
            head_dim=head_dim,
            window=None,
            softcap=None,
            size=16,
            dtype=torch.bfloat16,
            device="cuda",
            rows=rows,
        )


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", [(8, 8), (32, 4), (14, 2)])
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (80, 16), (128, 64), (256, 128)])
def test_a_decode_step_on_a_gpu(heads, head_dim, half):
    from ragged_cases import check_step

    for before in ([700, 0, 129], [3000], [40] * 70):
        for window, softcap in ((None, None), (100, None), (None, 30.0)):
            for size in (16, None):
                for counted in (True, False):
                    check_step(
                        before=before,
                        heads=heads,
                        head_dim=head_dim,
                        half=half,
                        normed=window is not None,
                        window=window,
                        softcap=softcap,
                        size=size,
                        splits=None,
                        counted=counted,
                        padded=len(before) > 1,
                        dtype=torch.bfloat16,
                        device="cuda",
                    )
