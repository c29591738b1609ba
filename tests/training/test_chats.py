"""Finetuning on conversations from the command line: rows, steps and warm-up follow the data and what was asked for."""

import json
import re
from dataclasses import replace

import pytest

import hasten
from hasten.cli.main import main
from hasten.data import train_bpe
from hasten.model.initialize import initialize
from hasten.text.tokenizer import Tokenizer
from hasten.training.build import shape_config
from hasten.training.recipe import Shape
from hasten.training.recipes import RECIPES, as_asked

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A folder with a tiny model that has a chat template, and room for 2,048 tokens."""
    backend = train_bpe(["what is the sum of one and two, and of three and four?\n" * 20], vocab_size=300).backend
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = Tokenizer.from_tokenizers(
        backend, bos_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=CHATML
    )
    shape = Shape(layers=1, hidden_size=32, heads=2, feed_forward=64)
    model = initialize(
        shape_config(shape, vocab_size=tokenizer.vocab_size, positions=2048, tokenizer=tokenizer), seed=0
    )
    model.tokenizer = tokenizer
    folder = tmp_path_factory.mktemp("chat") / "model"
    hasten.save(model, folder)
    return folder


def write_chats(path, count=120, answer="it is {}"):
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"what is the sum of {n} and {n}?"},
                {"role": "assistant", "content": answer.format(2 * n)},
            ]
        }
        for n in range(count)
    ]
    path.write_text(json.dumps(chats), encoding="utf-8")
    return path


def finetune(chat_model, tmp_path, source, *more):
    place = ["--init", str(chat_model), "--run.folder", str(tmp_path / "runs"), "--json", str(tmp_path / "out.json")]
    quick = ["--device", "cpu", "--techniques.no-compile", "--techniques.precision", "float32", "--threads", "1"]
    quick += ["--data.batch-size", "8", "--data.accumulation", "2"]
    main(["train", "finetune", *place, "--data.source", str(source), *quick, *more])
    lines = (tmp_path / "runs" / "finetune" / "train.jsonl").read_text().splitlines()
    return json.loads((tmp_path / "out.json").read_text()), [json.loads(line) for line in lines]


def test_short_chats_train_with_the_recipe_as_it_is(chat_model, tmp_path, capsys):
    result, lines = finetune(chat_model, tmp_path, write_chats(tmp_path / "chat.json"))
    told = capsys.readouterr().err
    recipe = json.loads((tmp_path / "runs" / "finetune" / "recipe.json").read_text())
    assert recipe["data"]["context"] == 64, "as long as the longest chat needs"
    assert "conversations in" in told
    assert result["steps"] == len(lines) > 8
    assert all(line["loss"] > 0.1 and line["gradient_norm"] > 0 for line in lines)
    assert lines[-1]["validation_loss"] > 0
    assert lines[1]["learning_rate"] >= lines[2]["learning_rate"], "the warm-up is a tenth of the run"
    again, _ = finetune(chat_model, tmp_path, tmp_path / "chat.json")  # finished: nothing to do, and no other recipe
    assert again["steps"] == result["steps"]


def test_the_steps_that_were_asked_for_are_taken(chat_model, tmp_path):
    result, lines = finetune(chat_model, tmp_path, write_chats(tmp_path / "chat.json"), "--steps", "30")
    assert result["steps"] == len(lines) == 30
    peak = max(line["learning_rate"] for line in lines)
    assert [line["learning_rate"] for line in lines].index(peak) == 2


def test_conversations_longer_than_the_context_are_counted(chat_model, tmp_path, capsys):
    source = write_chats(tmp_path / "chat.json", answer="it is {} " + "and one and two " * 30)
    _, lines = finetune(chat_model, tmp_path, source, "--steps", "2", "--data.context", "96")
    assert re.search(
        r"(1\d\d) conversations in \1 windows of 96 tokens; \1 longer ones are cut", capsys.readouterr().err
    )
    assert all(line["loss"] > 0.1 for line in lines)
    with pytest.raises(SystemExit):
        finetune(chat_model, tmp_path, source, "--steps", "2", "--data.context", "16", "--name", "other")
    assert "has an answer within 16 tokens; the longest has" in capsys.readouterr().err


def test_what_was_asked_for_wins_over_what_a_recipe_brings_along():
    demo, finetuned = RECIPES["demo"], RECIPES["finetune"]
    assert as_asked(demo, {"data.source"}) == demo
    assert as_asked(replace(demo, run=replace(demo.run, steps=9)), {"run.steps"}).run.minutes is None
    assert as_asked(finetuned, {"run.minutes"}).run.epochs == 2, "--minutes None asks for nothing"
    assert as_asked(replace(finetuned, run=replace(finetuned.run, minutes=5)), {"run.minutes"}).run.epochs is None
    assert as_asked(finetuned, {"run.steps", "run.epochs"}).run.epochs == 2
    assert as_asked(finetuned, {"schedule.warmup_steps"}).schedule.warmup_share == 1
    assert not as_asked(finetuned, {"data.context"}).data.fit_context
