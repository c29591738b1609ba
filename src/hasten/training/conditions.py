"""Conditions under which options of a recipe have an effect (`hasten.effects`)."""

from hasten.effects import Needs, Unless

SCRATCH = Unless("init")
TOKENIZER_TRAINED = Unless("data.tokenizer")
LLAMA, MUON, WSD = Needs("model.family", "llama"), Needs("optimizer.kind", "muon"), Needs("schedule.kind", "wsd")
VALIDATED = Needs("data.validation_fraction")
WITH_LORA, ROUNDED, FALLING = Needs("lora.rank"), Needs("qat.bits"), Needs("qat.start_bits")
SHARED = Needs("parallel.zero")
DROPPED, ONEBIT = Needs("techniques.layer_drop"), Needs("optimizer.kind", "onebit-adam", "onebit-lamb")
# Conditions that recipes keep, not only command lines: a recipe made from another one does not carry such values along.
KEPT_BY_RECIPES = (WITH_LORA, ROUNDED, FALLING, SHARED, DROPPED, ONEBIT)
