"""From the name of a draft ("suffix", "mtp", "self:4-layers", a folder) to a `Speculator`."""

import re
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hasten.checkpoints.load import load_quietly, open_checkpoint, planned
from hasten.checkpoints.multi_token import has_head, load_head
from hasten.checks import whole
from hasten.engine.params import SamplingParams, draft_name
from hasten.engine.speculation.draft_model import DraftModel
from hasten.engine.speculation.multi_token import MultiTokenDraft
from hasten.engine.speculation.price import Price
from hasten.engine.speculation.proposer import LIMIT, Accept, Proposer, ReadsStates, Text
from hasten.engine.speculation.speculator import MOST, Speculator
from hasten.engine.speculation.suffix import SuffixProposer
from hasten.errors import ConfigError, HastenWarning, ResourceError
from hasten.machine.memory import available_memory
from hasten.model.config import ModelConfig
from hasten.model.fused import fuse_where_it_fits, new_stack, refusal
from hasten.model.multi_token import MultiTokenHead
from hasten.model.sharded import ShardedTransformer
from hasten.model.transformer import Transformer
from hasten.model.vocabulary import check_vocabulary
from hasten.planning.held import held_bytes

# The steps of each target, and the drafts of each model that drafts: a second speculator begins with what the first one
# learnt. By the rule, because for "distribution" each draft token is drawn in Python.
_PRICES: WeakKeyDictionary[Transformer, Price] = WeakKeyDictionary()
_DRAFTING: WeakKeyDictionary[Transformer, dict[Accept, Price]] = WeakKeyDictionary()
_HEADS: WeakKeyDictionary[Transformer, MultiTokenHead] = WeakKeyDictionary()  # that models draft with
_REHEARSED = (1, 5) * 3  # tokens of the drafts that are timed before the first real one
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

    draft: "suffix" (what followed the same words before), "auto" (see `automatic`), "mtp" (the multi-token head of the
    model's checkpoint), "self:N-layers" (the model's own first N layers), a folder or hub id of a smaller model with
    the same vocabulary (`small_model`), or such a model.
    speculate: the most tokens of a draft; how many are proposed is decided step by step, by what is accepted and what
    steps take. accept: "exact" takes what the model would have drawn, so that the text is the one without drafts;
    "distribution" (for models that draft) takes a token with min(1, p/q), more of them at high temperatures, for
    another text of the same distribution. tokens: of all sequences together, whose keys and values a draft model keeps.

    Of several ranks that hold a model the first one proposes, alone; all of them call this.
    Raises ConfigError for a draft that does not fit, CheckpointError for a folder that cannot be read.
    """
    draft = draft if isinstance(draft, Transformer) else draft_name(str(draft))
    draft = automatic(model) if draft == "auto" else draft
    most = MOST if speculate is None else whole("speculate", speculate, low=1, high=LIMIT)
    if accept not in get_args(Accept):
        raise ConfigError(f"accept is {accept!r:.40}; choose one of {', '.join(get_args(Accept))}")
    ranks = model.group if isinstance(model, ShardedTransformer) else None
    if ranks is not None and isinstance(draft, ShardedTransformer):
        raise ConfigError("the draft model is split over ranks, and one of them drafts alone: load it without group")
    if ranks is not None and draft == "mtp":
        raise ConfigError("the draft mtp is for a model that one process holds; take suffix, or a smaller model")
    if ranks is not None and ranks.rank and draft != "none":  # what it proposes here nobody takes
        draft, accept = "suffix", "exact"
    proposer = _proposer(model, draft, tokens, accept)
    if accept == "distribution" and not isinstance(proposer, DraftModel | None):
        raise ConfigError(f"accept='distribution' is for a model that drafts; {proposer.name} gives no probabilities")
    if proposer is None:
        return None
    price = _PRICES.setdefault(model, Price())
    return Speculator(proposer, price=price, drafting=rehearsed(proposer), most=most)


def rehearsed(proposer: Proposer) -> Price:
    """Draft for a meaningless text, so that the first real draft finds its memory and an estimate of what it takes."""
    drafting, reads = Price(), 2 * max(_REHEARSED)
    if isinstance(proposer, DraftModel):
        reads = proposer.reads
        if isinstance(proposer, ReadsStates):
            states = torch.zeros(reads, proposer.model.config.hidden_size, device=proposer.model.device)
            proposer.take_states([(-1, 0, reads)], states)
        drafting = _DRAFTING.setdefault(proposer.model, {}).setdefault(proposer.accept, drafting)
    rooms = (1,) if drafting.measured else (1, *_REHEARSED)
    for number, room in enumerate(rooms):
        text = Text(number=-1, tokens=[1] * reads, step=0, params=SamplingParams(temperature=0), room=room)
        start = time.perf_counter()
        proposer.propose([text], floor=0.0, chance=lambda kind: 1.0)
        if number:  # the first one also reads the text
            drafting.learn(room, time.perf_counter() - start)
    proposer.end(-1, ())
    return drafting


def automatic(model: Transformer) -> str:
    """The draft that never costs a text or its speed: "suffix" where rows beside a row do not change it (fused blocks,
    and float32, on a CPU), "none" elsewhere, and where layers keep states.
    """
    if model.config.keeps_states:
        return "none"
    exact = model.stack is not None or model.dtype == torch.float32
    return "suffix" if exact and model.device.type == "cpu" else "none"


def _proposer(model: Transformer, draft: str | Transformer, tokens: int, accept: Accept) -> Proposer | None:
    if isinstance(draft, Transformer):
        check_vocabulary(draft, model, name="the draft model")
        return DraftModel(fuse_where_it_fits(draft), tokens=tokens, accept=accept)
    name = draft
    if not name:
        raise ConfigError("draft is empty; give suffix, none, mtp, self:int4, self:N-layers or a model's folder")
    if name == "none":
        return None
    if name == "suffix":
        return SuffixProposer()
    if name == "mtp":
        return MultiTokenDraft(multi_token_head(model), tokens=tokens, accept=accept)
    if name.startswith("self:"):
        found = _LAYERS.fullmatch(name)
        if name == "self:int4":
            raise ConfigError(
                "self:int4 is the command line's; here load the model again, hasten.quantize(it, hasten.Int4()), and "
                "give it as draft"
            )
        if found is None:
            raise ConfigError(f"draft is {name!r:.60}; a model drafts for itself as self:int4 or self:N-layers")
        if isinstance(model, ShardedTransformer):
            return DraftModel(first_layers_of_whole(model, int(found[1])), tokens=tokens, name=name, accept=accept)
        _check_count(model.config, int(found[1]))
        refuse_states(model.config, model, int(found[1]))
        return DraftModel(first_layers(model, int(found[1])), tokens=tokens, name=name, accept=accept)
    return DraftModel(small_model(name, model), tokens=tokens, name=name, accept=accept)


def small_model(name: str, model: Transformer) -> Transformer:
    """The model of a folder or hub id, to draft for another one: in int8 where both have the fused native steps, since
    it is read for each token and need not be exact. Raises ConfigError for another vocabulary, CheckpointError.
    """
    small = load_quietly(name, dtype=model.dtype, device=str(model.device))
    check_vocabulary(small, model, name=f"the draft {name}")
    return _to_draft(small, model)


def _to_draft(small: Transformer, model: Transformer) -> Transformer:
    """A model that drafts for another one, in int8 where that is faster, and fused."""
    if model.stack is not None and small.quantization is None and refusal(small) is None:
        from hasten.quantization import Int8, quantize  # only here: it takes a while to import

        quantize(small, Int8())
    return fuse_where_it_fits(small)


def multi_token_head(model: Transformer) -> MultiTokenHead:
    """The head in the model's checkpoint, read once and then kept beside the model."""
    _refuse_adapters(model, "mtp")
    head = _HEADS.get(model)
    if head is None or not head.shares(model):  # the model was fused since, or taken apart
        head = load_head(model)
        head.share(model)
        _HEADS[model] = head
    return head


def first_layers_of_whole(model: ShardedTransformer, count: int) -> Transformer:
    """The first layers of a model of which this rank holds a share: loaded whole, beside it, and no further ones.

    Raises ResourceError, before anything is loaded, if they do not fit into memory.
    """
    _refuse_adapters(model, "self:N-layers")
    assert model.origin is not None, "ranks load their shares from files"
    source = open_checkpoint(model.origin)
    _check_count(source.config, count)
    refuse_states(source.config, model, count)
    all_layers = source.config.token_features > 0  # a row of their table is for all layers
    own = source if all_layers else replace(source, config=replace(source.config, layers=source.config.layers[:count]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HastenWarning)  # the share was loaded with the same
        names = {piece.name for piece in planned(own)[1].values()}
        needed = held_bytes(own, itemsize=model.dtype.itemsize, names=names)
        if needed > (free := available_memory(model.device)):
            raise ResourceError(
                f"self:{count}-layers: the first rank loads the layers that draft whole beside its share, "
                f"{needed:,} bytes, and {free:,} are free; take fewer layers, or suffix"
            )
        whole = load_quietly(own, dtype=model.dtype, device=str(model.device))
    return _to_draft(first_layers(whole, count) if all_layers else whole, model)


def _check_count(config: ModelConfig, count: int) -> None:
    layers = len(config.layers)
    if not 0 < count < layers:
        raise ConfigError(f"self:{count}-layers: this model has {layers} layers; take from 1 to {layers - 1}")


def refuse_states(config: ModelConfig, model: Transformer, count: int | None = None) -> None:
    """Raise ConfigError where layers of the model's own that are to draft keep states.

    config: that of the whole model. count: the first layers; None: all, in int4.
    """
    if replace(config, layers=config.layers[:count]).keeps_states:
        head = not isinstance(model, ShardedTransformer) and has_head(model)
        instead = "mtp, the multi-token head of its checkpoint" if head else "suffix, or a model of another kind"
        raise ConfigError(
            f"self:{'int4' if count is None else f'{count}-layers'}: this model is a {config.family}, whose layers "
            f"keep states, from which rejected tokens cannot be taken back; take {instead}"
        )


def _refuse_adapters(model: Transformer, draft: str) -> None:
    if model.adapters is not None:
        raise ConfigError(f"{draft} drafts with layers that have adapters, which is not supported; take suffix")


def first_layers(model: Transformer, count: int) -> Transformer:
    """The model without its last layers, of the same tensors. Raises ConfigError unless some stay and some go."""
    layers = model.config.layers
    _refuse_adapters(model, "self:N-layers")
    _check_count(model.config, count)
    with torch.device("meta"):
        short = Transformer(replace(model.config, layers=layers[:count])).eval()
    for name, part in model.named_children():
        if name != "blocks":
            setattr(short, name, part)
    short.blocks, short.bound = nn.ModuleList(model.blocks[:count]), model.bound
    short.tokenizer, short.generation, short.quantization = model.tokenizer, model.generation, model.quantization
    if model.stack is not None:
        short.stack = new_stack(short)
    return short
