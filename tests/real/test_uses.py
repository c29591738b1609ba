"""A published instruct model through every face: chat, command, LLM, server, drafts, LoRA, llama.cpp."""

import json
import os
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch

import hasten
from hasten.checkpoints.adapter_files import load_adapter
from hasten.checkpoints.gguf.header import read_gguf
from hasten.checkpoints.gguf.write import write_gguf
from hasten.cli.main import main
from hasten.engine.async_engine import AsyncEngine
from hasten.engine.chat import Chat
from hasten.engine.llm import make_engine
from hasten.model.fused import is_fused
from hasten.quantization.merge import merge
from hasten.training.journal import read
from hasten.training.recipe import Lora
from hasten.training.recipes import RECIPES
from hasten.training.session import train
from real_models import TEXT, load_file, real_model
from server_case import app_of, serving

pytestmark = [pytest.mark.real(minutes=4), pytest.mark.timeout(600)]
GREEDY = hasten.SamplingParams(temperature=0, max_new_tokens=32)
# Not "What is …": there plain PyTorch in bfloat16 and llama.cpp begin with another word than float32, a near-tie.
QUESTION = "Name the capital of France."
ASK_LLAMA_CPP = """
import json, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.cpuparams.n_threads, params.verbosity = sys.argv[1], 256, 1, 0
question = {"prompt": sys.argv[2], "n_predict": 8, "temperature": 0, "logprobs": 5, "n_probs": 5}
answer = xllamacpp.Server(params).handle_completions(question)
answer = json.loads(answer) if isinstance(answer, str) else answer
text = answer.get("content") or answer["choices"][0]["text"]
print(json.dumps([text, answer.get("completion_probabilities") or answer["choices"][0].get("logprobs")]))
"""


@pytest.fixture(scope="module")
def model(smollm2):
    """The file, in the steps that a command takes for it."""
    return load_file(smollm2)


def test_the_answer_to_a_question_is_right(model):
    assert "Paris" in "".join(Chat(model).say(QUESTION, GREEDY))


def test_server_and_llm_give_the_commands_text(smollm2, model):
    prompt = TEXT[:300]
    command = [sys.executable, "-m", "hasten", "generate", str(smollm2.file), "--prompt", prompt, "--json", "-"]
    command += ["--temperature", "0", "--max-new-tokens", "32", "--dtype", "bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    text = json.loads(done.stdout)["text"]
    assert len(text) > 32
    llm = hasten.LLM(model, cache_bytes=64 << 20)
    assert llm.generate(prompt, GREEDY)[0].text == text
    llm.close()
    engine = AsyncEngine(make_engine(model, model.tokenizer, hasten.EngineSettings(cache_bytes=64 << 20)))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 32, "temperature": 0}
    with serving(app_of(engine)) as (url, _):
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["choices"][0]["text"] == text
    engine.thread.close()


def test_the_readmes_python_runs_fused(smollm2, capsys, monkeypatch):
    monkeypatch.setattr("secrets.randbits", lambda bits: 7)  # some texts that are drawn end soon
    _, _, rest = (Path(__file__).parents[2] / "README.md").read_text().partition("\n    import hasten\n")
    lines = [line.removeprefix("    ") for line in rest.partition("\n\n")[0].splitlines()]
    code = "\n".join(lines).replace("folder-or-hub-id", str(smollm2.file))
    assert str(smollm2.file) in code
    found = {"hasten": hasten}
    exec(code, found)
    assert len(capsys.readouterr().out) > 100
    assert all(answer.text for answer in found["answers"])
    assert is_fused(found["model"])


@pytest.mark.parametrize("draft", ["suffix", "self:6-layers"])
def test_drafts_change_nothing(model, draft):
    prompt = f"{TEXT[:400]}\n\nThe same again:\n\n{TEXT[:100]}"
    assert_drafts_change_nothing(model, prompt, draft)


def test_drafts_change_nothing_of_a_file_of_four_formats():
    prompt = f"{TEXT[:400]}\n\nThe same again:\n\n{TEXT[:100]}"
    assert_drafts_change_nothing(load_file(real_model("gemma3-270m")), prompt, "suffix")


def assert_drafts_change_nothing(model, prompt, draft):
    params = replace(GREEDY, max_new_tokens=48)
    (plain,), (drafted,) = (hasten.generate(model, prompt, params, draft=how) for how in ("none", draft))
    assert drafted.tokens == plain.tokens


def test_lora_lowers_the_loss_and_the_merged_model_loads_in_transformers(smollm2, tmp_path):
    transformers = pytest.importorskip("transformers")
    talk = [[{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"Arr! {n}, me hearty!"}]
            for n in range(40)]  # fmt: skip
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in talk))
    recipe = RECIPES["finetune"]
    recipe = replace(
        recipe,
        init=str(smollm2.folder),
        lora=Lora(rank=8, targets=("q_proj", "v_proj", "up_proj", "down_proj")),
        data=replace(
            recipe.data,
            source=str(tmp_path / "chat.jsonl"),
            context=48,
            batch_size=1,
            accumulation=1,
            validation_fraction=0.1,
        ),
        optimizer=replace(recipe.optimizer, learning_rate=2e-4),
        schedule=replace(recipe.schedule, warmup_steps=5),
        techniques=replace(recipe.techniques, compile=False),
        run=replace(
            recipe.run,
            steps=50,
            epochs=None,
            validate_every=25,
            validation_batches=1,
            folder=str(tmp_path / "runs"),
            threads=1,  # the other core is another test's
        ),
    )
    result = train(recipe, progress=False)
    losses = [line["loss"] for line in read(result.folder / "train.jsonl")]
    assert len(losses) == 50
    assert mean(losses[-10:]) < 0.5 * mean(losses[:10])
    base = hasten.load(smollm2.folder, dtype="float32")
    merge(base, load_adapter(result.model_folder, base), tmp_path / "merged", dtype=torch.float32)
    loss = {}
    for folder in (smollm2.folder, tmp_path / "merged"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokens = theirs_tokens(folder, talk[-1])
        with torch.inference_mode():
            loss[folder.name] = float(theirs(tokens, labels=tokens).loss)
    assert loss["merged"] < loss[smollm2.folder.name]


def theirs_tokens(folder, messages):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return torch.tensor([tokenizer(text)["input_ids"]])


@pytest.fixture(scope="module")
def llama_cpp(llama_cpp_wheel):
    """A function that has llama.cpp continue a question with a file: its text, and what is likely at each token."""

    def ask(path):
        command = [
            sys.executable,
            "-c",
            ASK_LLAMA_CPP,
            str(path),
            "Q: What is the capital of France?\nA: The capital is",
        ]
        environment = os.environ | {"PYTHONPATH": str(llama_cpp_wheel)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return ask


def test_llama_cpp_loads_the_export(real, llama_cpp, tmp_path):
    path = tmp_path / "export.gguf"
    write_gguf(hasten.load(real.folder, dtype="bfloat16"), path, "Q8_0")
    answer, _ = llama_cpp(path)
    # What hasten says from the published file, too: Gemma 3 270M does not name Paris here.
    assert {"gemma3-270m": "the largest city in France"}.get(real.name, "Paris") in answer


def test_a_file_written_again_has_its_tensors_and_says_the_same_in_llama_cpp(real, llama_cpp, tmp_path):
    path = tmp_path / "again.gguf"
    main(["export", real.name, str(path)])
    first, second = read_gguf(real.file), read_gguf(path)
    assert {name: one.type.name for name, one in first.tensors.items()} == {
        name: one.type.name for name, one in second.tensors.items()
    }
    assert [name for name in first.tensors if not torch.equal(first.raw(name), second.raw(name))] == []
    before, after = llama_cpp(real.file), llama_cpp(path)
    assert before[1]
    assert before == after
