"""lm-eval on our kernels and engine: a tiny local task of each kind, against what the logits say directly."""

import json
import math
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch

import hasten
from hasten.cli.main import main
from hasten.errors import ConfigError
from hasten.model.context import training_context

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'hasten[eval]')")

QUESTIONS = [
    {"question": f"def add{i}(a, b):\n    return", "choices": ["a + b", "b", f"print({i})"], "answer": i % 3}
    for i in range(4)
]
TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true},
              {metric: acc_norm, aggregation: mean, higher_is_better: true}]
""",
    "tiny_generate": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 12, do_sample: false, num_beams: 1}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "tiny_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
""",
}


@pytest.fixture(scope="module")
def folder_of_tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (folder / f"{name}.yaml").write_text(head + text)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Where the package datasets puts what it has read."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def nats(model, context, continuation):
    """log p(continuation | context), both texts, from the logits of the whole."""
    whole = model.tokenizer.encode(context + continuation)
    return nats_of_ids(model, whole, len(model.tokenizer.encode(context)))


def nats_of_ids(model, ids, first):
    with torch.no_grad():
        logits = model(torch.tensor([ids]), torch.arange(len(ids))[None], training_context(model, len(ids)))[0].double()
    return sum(float(logits[at - 1].log_softmax(-1)[ids[at]]) for at in range(first, len(ids)))


def requests(*arguments):
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, each, index) for index, each in enumerate(arguments)]


def test_the_command(tiny_folder, tiny, folder_of_tasks, tmp_path, capsys):
    output = tmp_path / "results.json"
    names = ["--tasks", "tiny_choice,tiny_generate", "tiny_rolling", "--include-path", str(folder_of_tasks)]
    main(["eval", str(tiny_folder), *names, "--json", str(output)])
    assert "tiny_generate" in capsys.readouterr().out
    found = json.loads(output.read_text())["results"]
    right = normed = 0
    for question in QUESTIONS:
        scores = [nats(tiny, question["question"], f" {choice}") for choice in question["choices"]]
        right += scores.index(max(scores)) == question["answer"]
        means = [score / len(choice) for score, choice in zip(scores, question["choices"], strict=True)]
        normed += means.index(max(means)) == question["answer"]
    assert found["tiny_choice"]["acc,none"] == right / len(QUESTIONS)
    assert found["tiny_choice"]["acc_norm,none"] == normed / len(QUESTIONS)
    start = tiny.tokenizer.eos_ids[0] if tiny.tokenizer.bos_id is None else tiny.tokenizer.bos_id
    texts = [question["question"] for question in QUESTIONS]
    total = sum(nats_of_ids(tiny, [start, *tiny.tokenizer.encode(text)], 1) for text in texts)
    bits = -total / math.log(2) / sum(len(text.encode()) for text in texts)
    assert found["tiny_rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert 0 <= found["tiny_generate"]["exact_match,none"] <= 1


def test_the_entry_point_for_its_next_release():
    from hasten.evaluation.lm_eval import HastenLM

    (point,) = entry_points(group="lm_eval.models", name="hasten")
    assert point.load() is HastenLM


def test_lm_evals_own_command_line_knows_the_model(tiny_folder, folder_of_tasks, tmp_path, monkeypatch, capsys):
    from hasten.cli.lm_eval import main as lm_eval_main

    words = ["run", "--model", "hasten", "--model_args", f"pretrained={tiny_folder},max_length=64", "--tasks"]
    words += ["tiny_choice", "--include_path", str(folder_of_tasks), "--limit", "2", "--output_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
    lm_eval_main()
    assert "hasten" in capsys.readouterr().out
    (written,) = tmp_path.rglob("results_*.json")
    assert json.loads(written.read_text())["n-samples"]["tiny_choice"]["effective"] == 2
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words[:4], "pretrained=/nowhere/at/all", *words[5:]])
    with pytest.raises(SystemExit) as ended:
        lm_eval_main()
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_likelihoods_of_texts(tiny):
    from hasten.evaluation.lm_eval import HastenLM

    lm = HastenLM(tiny)
    pairs = [("def add", "(a, b)"), ("for name ", "in names"), ("", "return a")]
    found = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
    # A space at the end of a context belongs to its continuation; an empty context is the beginning of a text.
    expected = [nats(tiny, "def add", "(a, b)"), nats(tiny, "for name", " in names")]
    expected.append(nats_of_ids(tiny, [lm.prefix_token_id, *tiny.tokenizer.encode("return a")], 1))
    assert [value for value, _ in found] == pytest.approx(expected, abs=1e-4)


def test_long_texts_are_cut_as_lm_eval_says(tiny):
    from hasten.evaluation.lm_eval import HastenLM

    lm = HastenLM(tiny, max_length=12)
    text = "def add(a, b):\n    return a + b\n" * 2
    ids = [lm.prefix_token_id, *tiny.tokenizer.encode(text)]
    assert len(ids) > 26
    expected, done = 0.0, 1
    while done < len(ids):  # twelve at once; those of the last window see twelve before the last
        end = min(done + 12, len(ids))
        start = max(0, end - 13)
        expected += nats_of_ids(tiny, ids[start:end], done - start)
        done = end
    assert lm.loglikelihood_rolling(requests((text,))) == pytest.approx([expected], abs=1e-3)
    with pytest.warns(hasten.HastenWarning, match="1 of 2 contexts lose their beginning"):
        found = lm.loglikelihood(requests((text, "return"), ("a", "b")), disable_tqdm=True)
    answer = len(tiny.tokenizer.encode(text + "return")) - len(tiny.tokenizer.encode(text.rstrip()))
    kept = tiny.tokenizer.encode(text + "return")[-13:]
    assert found[0][0] == pytest.approx(nats_of_ids(tiny, kept, 13 - answer), abs=1e-4)
    with pytest.raises(ConfigError, match="an answer has"):
        lm.loglikelihood(requests(("a", text)), disable_tqdm=True)
    with pytest.raises(ConfigError, match="max_length is 513"):
        HastenLM(tiny, max_length=513)


def test_texts_are_generated_until_their_stop(tiny):
    from hasten.evaluation.lm_eval import HastenLM

    lm, prompts = HastenLM(tiny), [question["question"] for question in QUESTIONS]
    alone = [hasten.generate(tiny, [text], hasten.SamplingParams(temperature=0, max_new_tokens=12)) for text in prompts]
    texts = [answer[0].text for answer in alone]
    stop = next(letter for text in texts for letter in text[1:] if letter.isascii())
    arguments = {"until": [stop, ""], "max_gen_toks": 12}
    found = lm.generate_until(requests(*((text, dict(arguments)) for text in prompts)))
    assert found == [text.partition(stop)[0] for text in texts]
    sampled = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 6}
    torch.manual_seed(7)
    one = lm.generate_until(requests(*((prompts[0], dict(sampled)) for _ in range(4))))
    assert len(set(one)) > 1
    torch.manual_seed(7)
    assert one == lm.generate_until(requests(*((prompts[0], dict(sampled)) for _ in range(4))))
    with pytest.raises(ConfigError, match=r"generation_kwargs ask for what hasten lacks: .*penalty_alpha"):
        lm.generate_until(requests(("a", {"penalty_alpha": 0.6})))
    with pytest.raises(ConfigError, match="asks for 600 new tokens"):
        lm.generate_until(requests(("a", {"max_gen_toks": 600})))


def test_chats(tiny):
    from hasten.evaluation.lm_eval import HastenLM

    lm = HastenLM(tiny)
    question = [{"role": "user", "content": "Hello"}]
    assert lm.apply_chat_template(question) == "<|user|>Hello\n<|assistant|>"
    begun = [*question, {"role": "assistant", "content": "The answer is "}]
    assert lm.apply_chat_template(begun, add_generation_prompt=False) == "<|user|>Hello\n<|assistant|>The answer is"
    assert lm.chat_template(True) == tiny.tokenizer.chat_template
    name = lm.tokenizer_name
    tiny.tokenizer = tiny.tokenizer.with_chat_template("{{ messages[0].content }}")
    assert HastenLM(tiny).tokenizer_name != name


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--tasks", "no_such_task"], "lm-eval has no task no_such_task"),
        (["--tasks", "tiny_choice", "--stride", "4"], "--stride has no effect without --text"),
        (["--text", "stdlib", "--limit", "4"], "--limit has no effect without --tasks"),
        ([], "give --text FILE, or --tasks"),
    ],
)
def test_the_commands_errors(tiny_folder, words, error, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(tiny_folder), *words])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.slow  # commands of several processes
def test_two_ranks_find_what_one_process_finds(tiny_folder, folder_of_tasks, tmp_path):
    found = []
    for ranks in ("1", "2"):
        output = tmp_path / f"{ranks}.json"
        words = ["eval", str(tiny_folder), "--tasks", "tiny_choice,tiny_generate,tiny_rolling", "--dtype", "float32"]
        words += ["--include-path", str(folder_of_tasks), "--tensor-parallel", ranks, "--json", str(output)]
        own = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
        done = subprocess.run([sys.executable, "-m", "hasten", *words], capture_output=True, text=True, env=own)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(output.read_text())["results"])
    one, two = found
    for task, metric in [("tiny_choice", "acc,none"), ("tiny_generate", "exact_match,none")]:
        assert one[task][metric] == two[task][metric]
    bits = "bits_per_byte,none"
    assert two["tiny_rolling"][bits] == pytest.approx(one["tiny_rolling"][bits], rel=1e-5)
