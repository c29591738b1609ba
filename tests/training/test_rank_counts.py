"""What two ranks hold and send, counted: FSDP2's formulas within 5% (bytes) and 0.1% (traffic)."""

import json
import textwrap
from pathlib import Path

import pytest

import ranks

pytestmark = pytest.mark.slow  # twelve trainings of two ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CHILD = textwrap.dedent("""
    import sys
    sys.path.insert(0, sys.argv[1])
    import zero
    zero.SHAPE = {"layers": 3, "hidden_size": 64, "heads": 2, "feed_forward": 176, "tie_embeddings": False}
    zero.VOCABULARY = 256
    zero.bytes_rank(sys.argv[2], sys.argv[3])
""")
CASES = [
    {"zero": 0, "accumulation": 2},
    {"zero": 1, "accumulation": 2},
    {"zero": 2, "accumulation": 2},
    {"zero": 3, "accumulation": 2},
    {"zero": 3, "policy": "float32-masters"},
    {"zero": 0, "experts": 2},
    {"zero": 2, "experts": 2, "accumulation": 2},
    {"zero": 3, "experts": 2},
    {"zero": 3, "offload": "optimizer"},
    {"zero": 3, "offload": "all"},
    {"zero": 3, "prefetch": 1},
    {"zero": 3},
]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    out = tmp_path_factory.mktemp("counts") / "found.json"
    for status, _, errors in ranks.run(CHILD, BENCHMARKS, json.dumps(CASES), out):
        assert status == 0, errors
    return json.loads(out.read_text())


def test_bytes_and_traffic_are_those_of_the_formulas(counted):
    for row in counted:
        for moment, formula in row["formula"].items():
            assert row["held"][moment] == pytest.approx(formula, rel=0.05), (row, moment)
        for place, formula in row.get("copies_formula", {}).items():
            assert row["copies"][place] == pytest.approx(formula, rel=0.05), (row, place)
        exchanged = row["sent"].get("alltoall_base", 0)  # which depends on what experts are chosen
        weights = row["sent_formula"] - row.get("exchanged_formula", 0)
        assert sum(row["sent"].values()) - exchanged == pytest.approx(weights, rel=1e-3), row
        assert exchanged == pytest.approx(row.get("exchanged_formula", 0), rel=0.2), row
    # All stages hold the same after a backward pass: 16 bytes a parameter over the ranks.
    assert [row["held"]["backward"] / row["parameters"] for row in counted[1:4]] == pytest.approx([8] * 3, rel=0.01)


def test_every_choice_of_every_token_travels_four_times_a_layer(counted):
    for row in counted:
        if "experts" in row:
            sent = [size for name, size in row["order"] if name == "alltoall_base"]
            assert len(sent) == 4 * 4 * row.get("accumulation", 1), "inputs, results, gradients of both; 4 layers"
            # 32 tokens of this rank, with 2 experts and 128 features each; what comes back is of other ranks' rows.
            assert sent[:8:2] == [32 * 2 * 128 * 4] * 4


def test_the_next_blocks_weights_are_asked_for_before_a_block_runs(counted):
    ahead, plain = (row["order"] for row in counted[-2:])
    assert counted[-2]["loss"] == counted[-1]["loss"]

    def gathered_before(order):
        """How many gatherings stand before each block's forward pass: the root's, and those of blocks."""
        kinds = [name for name, _ in order]
        return [kinds[: order.index(["block", n])].count("allgather_base") for n in range(3)]

    assert gathered_before(plain) == [2, 3, 4]
    assert gathered_before(ahead) == [3, 4, 4]
