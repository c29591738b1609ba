"""transformers' generate on a folder in bfloat16."""

import protocol
import torch
from transformers import AutoModelForCausalLM

given = protocol.arguments()
torch.set_num_threads(given.threads)
model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).eval()


def generate(ids: list[int], answer: int) -> None:
    options = {"max_new_tokens": answer, "min_new_tokens": answer, "do_sample": False, "pad_token_id": 0}
    model.generate(torch.tensor([ids]), **options)


with torch.no_grad():
    turn = protocol.answers(given.work, generate, vocabulary=model.config.vocab_size)
    protocol.take_turns(turn, packages=["transformers", "torch"])
