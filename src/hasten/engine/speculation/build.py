"""From the name of a draft ("suffix", "self:4-layers", a folder) to a `Speculator`."""

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hasten.checkpoints.load import load_quietly
from hasten.checks import whole
from hasten.engine.speculation.cost import MOST_SECONDS, Price, StepCost, measure_price, measure_step_cost, warm_up
from hasten.engine.speculation.draft_model import DraftModel
from hasten.engine.speculation.proposer import LIMIT, Accept, Proposer
from hasten.engine.speculation.speculator import MOST, Speculator
from hasten.engine.speculation.suffix import SuffixProposer
from hasten.errors import ConfigError, ResourceError
from hasten.machine.caches import cache_folder, find_cached
from hasten.machine.files import write_atomically
from hasten.machine.processor import processor_name
from hasten.model.fused import fuse_where_it_fits, refusal
from hasten.model.sharded import ShardedTransformer, told_by_first
from hasten.model.transformer import Transformer
from hasten.model.vocabulary import check_vocabulary
from hasten.ops.native import choose_isa

# Of drafting with each model for each target, by the rule: for "distribution" each draft token is drawn in Python.
_PRICES: WeakKeyDictionary[Transformer, WeakKeyDictionary[Transformer, dict[Accept, Price]]] = WeakKeyDictionary()
_CHECKED: set[str] = set()  # tables of costs that this process has looked at
_LOOKED_AT = (1, 8)  # their rows
_FAR = 1.6  # as much as the speed of memory, which decides what one row costs, changes on shared machines
_LAYERS = re.compile(r"self:(\d+)(-layers)?")


def make_speculator(
    model: Transformer,
    draft: str | Path | Transformer,
    *,
    speculate: int | None = None,
    accept: Accept = "exact",
    tokens: int = 8192,
) -> Speculator | None:
    """What proposes for a model; None for "none".

    draft: "suffix" (what followed the same words before), "auto" (see `automatic`), "self:N-layers" (the model's own
    first N layers), a folder or hub id of a smaller model with the same vocabulary (`small_model`), or such a model.
    speculate: the most tokens of a draft; how many are proposed is decided step by step, by what is accepted and what
    steps cost. accept: "exact" takes what the model would have drawn, so that the text is the one without drafts;
    "distribution" (for models that draft) takes a token with min(1, p/q), more of them at high temperatures, for
    another text of the same distribution. tokens: of all sequences together, whose keys and values a draft model keeps.

    Of several ranks that hold a model the first one proposes, alone; all of them call this.
    Raises ConfigError for a draft that does not fit, CheckpointError for a folder that cannot be read.
    """
    draft = automatic(model) if draft == "auto" else draft
    most = MOST if speculate is None else whole("speculate", speculate, low=1, high=LIMIT)
    if accept not in get_args(Accept):
        raise ConfigError(f"accept is {accept!r:.40}; choose one of {', '.join(get_args(Accept))}")
    ranks = model.group if isinstance(model, ShardedTransformer) else None
    if ranks is not None and (isinstance(draft, ShardedTransformer) or str(draft).startswith("self:")):
        raise ConfigError("one rank drafts, which has a share of this model only: take suffix, or a smaller model")
    if ranks is not None and ranks.rank and draft != "none":  # what it proposes here nobody takes
        draft, accept = "suffix", "exact"
    proposer = _proposer(model, draft, tokens, accept)
    if accept == "distribution" and not isinstance(proposer, DraftModel | None):
        raise ConfigError(f"accept='distribution' is for a model that drafts; {proposer.name} gives no probabilities")
    if proposer is None:
        return None
    price = Price()
    if isinstance(proposer, DraftModel):
        prices = _PRICES.setdefault(proposer.model, WeakKeyDictionary()).setdefault(model, {})
        if accept in prices:
            warm_up(proposer)
        else:
            prices[accept] = measure_price(proposer, model)
        price = prices[accept]
    return Speculator(proposer, step_cost(model), most=most, price=price)


def automatic(model: Transformer) -> str:
    """The draft that never costs a text or its speed: "suffix" where rows beside a row do not change it (fused blocks,
    and float32, on a CPU), "none" elsewhere.
    """
    exact = model.stack is not None or model.dtype == torch.float32
    return "suffix" if exact and model.device.type == "cpu" else "none"


def _proposer(model: Transformer, draft: str | Path | Transformer, tokens: int, accept: Accept) -> Proposer | None:
    if isinstance(draft, Transformer):
        check_vocabulary(draft, model, name="the draft model")
        return DraftModel(fuse_where_it_fits(draft), tokens=tokens, accept=accept)
    name = str(draft)
    if not name:
        raise ConfigError("draft is empty; give suffix, none, self:int4, self:N-layers or a model's folder")
    if name == "none":
        return None
    if name == "suffix":
        return SuffixProposer()
    if name.startswith("self:"):
        found = _LAYERS.fullmatch(name)
        if name == "self:int4":
            raise ConfigError(
                "self:int4 is the command line's; here load the model again, hasten.quantize(it, hasten.Int4()), and "
                "give it as draft"
            )
        if found is None:
            raise ConfigError(f"draft is {name!r:.60}; a model drafts for itself as self:int4 or self:N-layers")
        return DraftModel(first_layers(model, int(found[1])), tokens=tokens, name=name, accept=accept)
    return DraftModel(small_model(name, model), tokens=tokens, name=name, accept=accept)


def small_model(name: str, model: Transformer) -> Transformer:
    """The model of a folder or hub id, to draft for another one: in int8 where both have the fused native steps, since
    it is read for each token and need not be exact. Raises ConfigError for another vocabulary, CheckpointError.
    """
    small = load_quietly(name, dtype=model.dtype, device=str(model.device))
    check_vocabulary(small, model, name=f"the draft {name}")
    if model.stack is not None and small.quantization is None and refusal(small) is None:
        from hasten.quantization import Int8, quantize  # only here: it takes a while to import

        quantize(small, Int8())
    return fuse_where_it_fits(small)


def first_layers(model: Transformer, count: int) -> Transformer:
    """The model without its last layers, of the same tensors. Raises ConfigError unless some stay and some go."""
    layers = model.config.layers
    if model.adapters is not None:
        raise ConfigError("self:N-layers drafts with layers that have adapters, which is not supported; take suffix")
    if not 0 < count < len(layers):
        raise ConfigError(f"self:{count}-layers: this model has {len(layers)} layers; take from 1 to {len(layers) - 1}")
    with torch.device("meta"):
        short = Transformer(replace(model.config, layers=layers[:count])).eval()
    for name in ("embedding", "positions", "ropes", "dropout", "norm", "head"):
        setattr(short, name, getattr(model, name))
    short.blocks = nn.ModuleList(model.blocks[:count])
    short.tokenizer, short.generation, short.quantization = model.tokenizer, model.generation, model.quantization
    if model.stack is not None:
        short.stack = type(model.stack)(short)  # type: ignore[call-arg]
    return short


def step_cost(model: Transformer) -> StepCost:
    """What the model's steps cost on this machine; measured once for a shape, its formats and the threads.

    A process times steps of one and eight rows before it believes a table that it finds: one that was measured while
    other programs kept the machine busy is measured again.
    """
    formats = sorted({f"{kind}" for kind in (model.quantization or {}).values()})
    shape, ranks = replace(model.config, source={}), model.group.size if isinstance(model, ShardedTransformer) else 1
    where = (
        f"{model.device}, {processor_name()}, {choose_isa()}, {torch.get_num_threads()} threads"
        + f", {ranks} ranks" * (ranks > 1)
    )
    key = f"4 {shape} {formats} {model.dtype} {model.readable} {where}"
    file = f"{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
    known: StepCost | None = None
    with suppress(OSError, ResourceError, ValueError, KeyError, TypeError):
        if (found_file := find_cached("steps", file)) is not None:
            known = StepCost(**json.loads(found_file.read_text(encoding="utf-8"))["cost"])
    holds = told_by_first(model, [[known is not None]]) == [[1]]
    if holds and key not in _CHECKED:
        now = measure_step_cost(model, row_counts=_LOOKED_AT, seconds=0.05)
        holds = told_by_first(model, [[known is not None and _agree(known, now)]]) == [[1]]
    _CHECKED.add(key)
    if holds:
        return known or StepCost((1,), (1.0,), (0.0,))  # only the first one asks it
    found = measure_step_cost(model, most_seconds=MOST_SECONDS)
    cost = {name: value for name, value in asdict(found).items() if not name.startswith("_")}
    with suppress(OSError, ResourceError):  # then it is measured again, as one that had to end early is
        if found.rows[-1] >= _LOOKED_AT[-1]:
            write_atomically(cache_folder("steps") / file, json.dumps({"key": key, "cost": cost}) + "\n")
    return found


def _agree(table: StepCost, now: StepCost) -> bool:
    """Whether more rows cost as many times one row by both."""
    shares = [now.seconds(rows, 0) / table.seconds(rows, 0) for rows in now.rows]
    return max(shares) < _FAR * min(shares)
