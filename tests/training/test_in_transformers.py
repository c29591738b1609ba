"""hasten's attention and loss in transformers' Trainer and Accelerate: the same training, by our kernels."""

import gc
import json
import textwrap

import pytest
import torch
import transformers
from torch import nn

import hasten
import ranks
from hasten.errors import ConfigError, HastenWarning
from hasten.ops.loss import operator

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate, which is not installed")

SIZE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def llama(**changes):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZE | HEADS | changes)))


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config)


def examples(count=24):
    chance = torch.Generator().manual_seed(1)
    rows = []
    for length in torch.randint(6, 30, (count,), generator=chance).tolist():
        ids = torch.randint(3, 97, (length,), generator=chance)
        hidden = [-100] * (30 - length)  # padding is no target
        rows.append(
            {
                "input_ids": torch.cat([ids, torch.zeros(30 - length, dtype=torch.int64)]),
                "labels": torch.cat([ids, torch.tensor(hidden, dtype=torch.int64)]),
                "attention_mask": (torch.arange(30) < length).long(),
            }
        )
    return rows


def trained(model, folder, callbacks):
    """The losses of a Trainer's steps, its evaluation loss, and the weights."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=3e-3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=examples(), eval_dataset=examples(4), callbacks=callbacks
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"], model.state_dict()


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_trainer_trains_the_same_model(make, tmp_path, monkeypatch):
    expected = trained(make(), tmp_path, [])
    called = []
    run = operator.pick
    monkeypatch.setattr(operator, "pick", lambda *given, **more: called.append(given) or run(*given, **more))
    model = make()
    losses, evaluated, weights = trained(model, tmp_path, [hasten.trainer_callback()])
    assert len(called) == 10  # every micro-batch; none in evaluation
    assert losses == pytest.approx(expected[0], rel=1e-4)
    assert evaluated == pytest.approx(expected[1], rel=1e-4)
    assert weights.keys() == expected[2].keys()
    assert model.config._attn_implementation != "hasten"  # as it was before
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.slow
def test_after_a_training_that_failed_the_callback_begins_anew_and_gives_the_model_back(tmp_path):
    class Failing(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    model, callback = llama(), hasten.trainer_callback()
    theirs, attention = model.loss_function, model.config._attn_implementation
    with pytest.raises(KeyboardInterrupt):
        trained(model, tmp_path, [callback, Failing()])
    assert model.loss_function is not theirs
    trained(model, tmp_path, [callback])
    assert model.loss_function is theirs
    with pytest.raises(KeyboardInterrupt):
        trained(model, tmp_path, [callback, Failing()])
    del callback
    gc.collect()
    assert (model.loss_function, model.config._attn_implementation) == (theirs, attention)
    assert "forward" not in vars(model.get_output_embeddings())


def test_inside_with_a_failed_training_gives_the_model_back(tmp_path):
    class Failing(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    expected = trained(llama(), tmp_path, [])
    model = llama()
    theirs, attention = model.loss_function, model.config._attn_implementation
    with pytest.raises(KeyboardInterrupt), hasten.accelerated(model):
        trained(model, tmp_path, [Failing()])
    assert (model.loss_function, model.config._attn_implementation) == (theirs, attention)
    assert "forward" not in vars(model.get_output_embeddings())
    model = llama()
    with hasten.accelerated(model):
        losses, *_ = trained(model, tmp_path, [])
    assert losses == pytest.approx(expected[0], rel=1e-4)


def test_a_loop_of_accelerate():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer of another test has set it
    found = []
    for ours in (False, True):
        model, batch = llama(), {name: torch.stack([row[name] for row in examples(4)]) for name in examples(1)[0]}
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        prepared.train()
        losses = []

        def steps(prepared=prepared, optimizer=optimizer, losses=losses, batch=batch, accelerator=accelerator):
            for _ in range(4):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())

        if ours:
            with hasten.accelerated(model):
                steps()
        else:
            steps()
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=5e-3)
    assert found[0][-1] < found[0][0]


def test_logits_stay_in_evaluation():
    model = llama().eval()
    ids = torch.arange(3, 11)[None]
    expected = model(input_ids=ids, labels=ids)
    with hasten.accelerated(model):
        found = model(input_ids=ids, labels=ids)
    assert found.logits.shape == (1, 8, 97)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


def test_a_model_that_does_more_with_its_logits_keeps_its_loss():
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZE, **HEADS, head_dim=8)).train()
    ids = torch.arange(3, 11)[None]
    expected = model(input_ids=ids, labels=ids).loss
    entered = hasten.accelerated(model)
    with pytest.warns(HastenWarning, match="keeps its own loss"):
        entered.__enter__()
    assert model.config._attn_implementation == "hasten"
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected, rtol=1e-4, atol=1e-4)
    entered.__exit__(None, None, None)


def test_models_without_a_head_are_refused():
    for model in (nn.Linear(3, 3), llama().model):
        with pytest.raises(ConfigError, match="makes logits"), hasten.accelerated(model):
            pass


SHARDED = textwrap.dedent("""
    import json, os, sys
    import torch, transformers
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    import hasten
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**json.loads(sys.argv[1])))
    fully = sys.argv[2] == "sharded"
    if fully:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(2 * 24).view(2, 24) * 7 % 97
    rows, losses = tokens[dist.get_rank() :][:1] if fully else tokens, []
    model.train()
    with hasten.accelerated(model):
        for _ in range(4):
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / dist.get_world_size())
    print(json.dumps(losses))
""")


@pytest.mark.slow
def test_a_model_in_shards_trains_the_same():
    config = json.dumps(SIZE | HEADS)
    found = [ranks.run(SHARDED, config, how) for how in ("sharded", "whole")]
    assert all(status == 0 for run in found for status, _, _ in run), found
    (sharded, again), (whole, _) = ([json.loads(said.splitlines()[-1]) for _, said, _ in run] for run in found)
    assert sharded == again
    assert sharded == pytest.approx(whole, rel=1e-4)
