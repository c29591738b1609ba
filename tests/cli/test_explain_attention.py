"""`hasten explain attention`: the article's rule is visible, for this machine and for one that is not here."""

import json

import pytest
import torch

from hasten.cli.main import main
from hasten.ops.attention import KERNELS
from hasten.ops.native import library


def explained(capsys, *arguments):
    main(["explain", "attention", *arguments, "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert {found["kernel"], *(other["kernel"] for other in found["others"])} == {k.name for k in KERNELS}
    assert all(other["reason"] for other in found["others"])
    return found["kernel"], {other["kernel"]: other["reason"] for other in found["others"]}


def test_on_cuda_an_explicit_mask_excludes_flash_and_causal_does_not(capsys):
    assert explained(capsys, "--device", "cuda", "--kernel", "flash")[0] == "flash"
    kernel, others = explained(capsys, "--device", "cuda", "--mask")
    assert kernel == "memory-efficient"
    assert "explicit mask" in others["flash"]
    for option in (["--bias"], ["--key-padding"], ["--window", "8"], ["--block-mask"]):
        assert "explicit mask" in explained(capsys, "--device", "cuda", *option)[1]["flash"]


def test_on_cuda_unequal_lengths_exclude_what_is_aligned_top_left(capsys):
    kernel, others = explained(capsys, "--device", "cuda", "--keys", "2048", "--dtype", "float32")
    assert kernel == "sdpa"
    assert "aligned top left" in others["memory-efficient"]
    kernel, others = explained(capsys, "--device", "cuda", "--keys", "2048")
    assert kernel not in ("flash", "cudnn", "memory-efficient")
    for name in ("flash", "cudnn", "memory-efficient"):
        assert "aligned top left" in others[name]
    kernel, _ = explained(capsys, "--device", "cuda", "--keys", "2048", "--no-causal", "--kernel", "flash")
    assert kernel == "flash"


def test_on_a_cpu_two_backends_do_not_exist_and_flash_takes_masks(capsys):
    others = explained(capsys, "--device", "cpu", "--kernel", "reference")[1]
    assert "CPU" in others["memory-efficient"]
    assert "CPU" in others["cudnn"]
    assert explained(capsys, "--device", "cpu", "--mask", "--kernel", "flash")[0] == "flash"
    kernel, others = explained(capsys, "--device", "cpu", "--dropout")
    assert kernel == ("chunked" if library() is None else "native")
    assert "dropout" in others["flash"]


@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [
        (["--capability", "7.0", "--dtype", "float16"], "flash", "8.0 or later, the device has 7.0"),
        (["--dtype", "float32"], "flash", "not float32"),
        (["--shape", "1,8,2,264"], "flash", "264"),
        (["--shape", "1,8,2,100"], "memory-efficient", "multiple of 8"),
        (["--shape", "1,8,2,264"], "cudnn", "up to 256"),
        (["--shape", "1,8,2,160", "--capability", "8.0"], "cudnn", "up to 128"),
        (["--window", "8"], "cudnn", "explicit mask"),
        (["--no-gradient"], "cudnn", "makes a plan for each length"),
        (["--softcap", "30"], "flash", "soft-capping"),
        (["--sinks"], "flash", "no attention sinks"),
        (["--sinks"], "flash-triton", "takes no attention sinks"),
        (["--sinks", "--layer"], "sdpa", "no attention sinks"),
        (["--alibi"], "memory-efficient", "rounds"),
    ],
)
def test_reasons_on_cuda(capsys, arguments, name, words):
    assert words in explained(capsys, "--device", "cuda", *arguments)[1][name]


def test_one_query_on_a_cpu_is_no_work_for_tiles(capsys):
    one = ["--device", "cpu", "--dtype", "float32", "--shape", "1,1,8,64", "--keys", "900"]
    kernel, others = explained(capsys, *one, "--no-gradient")
    assert kernel == "flash"
    assert "native" in others


def test_flex_takes_block_masks(capsys):
    blocks = ["--device", "cuda", "--block-mask", "--keys", "256"]
    assert explained(capsys, *blocks, "--shape", "1,100,8,64")[0] == "flex"


def test_float64_is_answered(capsys):
    assert "float64" in explained(capsys, "--dtype", "float64", "--device", "cpu")[1]["native"]


def test_for_people(capsys):
    main(["explain", "attention", "--device", "cpu", "--shape", "2,64,8,16", "--kv-heads", "2", "--dtype", "float32"])
    out = capsys.readouterr().out
    assert "2 x 64 tokens, 8/2 heads of 16, float32, cpu, causal: " in out
    assert "    not reference: " in out
    assert "0.2 MiB" in out  # 2 · 8 · 64 · 64 · 4 bytes
    if not torch.cuda.is_available():
        main(["explain", "attention", "--device", "cuda"])
        assert "no CUDA device here" in capsys.readouterr().out


def test_a_layer_leaves_the_choice_to_every_call(capsys):
    kernel, others = explained(capsys, "--layer", "--device", "cpu", "--dtype", "float32")
    assert kernel == ("sdpa" if library() is None else "native")
    assert "calls differ" in others["flash"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "1,2,3"], "B,T,H,D"),
        (["--shape", "1,2,3,0"], "from 1 on"),
        (["--shape", "1,2,3,0"], "found 1,2,3,0"),
        (["--kv-heads", "3"], "16 heads over 3"),
        (["--kv-heads", "0"], "--kv-heads is 0"),
        (["--keys", "0"], "--keys is 0"),
        (["--softcap", "0"], "found 0"),
        (["--softcap", "-1"], "found -1"),
        (["--layer", "--mask"], "--mask has no effect with --layer"),
        (["--layer", "--no-gradient"], "--no-gradient has no effect with --layer"),
        (["--layer", "--keys", "2048"], "--keys has no effect with --layer"),
        (["--window", "8", "--no-causal"], "a window belongs to causal attention"),
        (["--keys", "8"], "would see nothing"),
        (["--window", "0"], "found 0"),
        (["--device", "cuda", "--capability", "nine"], "nine"),
        (["--kernel", "warp"], "known: triton"),
        (["--device", "cpu", "--kernel", "cudnn"], "none on a CPU"),
    ],
)
def test_nonsense_is_refused(capsys, arguments, words):
    with pytest.raises(SystemExit):
        main(["explain", "attention", *arguments])
    assert words in capsys.readouterr().err
