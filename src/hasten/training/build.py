"""Builds the model that a recipe trains: its shape, then the techniques in their one order."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hasten.checkpoints.advice import asked_as, export_plain, plain_folder
from hasten.checkpoints.fill_quantized import OnPacked
from hasten.checkpoints.one_by_one import RowsOfPacked, unfilled_model
from hasten.checkpoints.source import ModelSource
from hasten.distributed.expert_parallel import HeldExperts, apply_expert_parallel
from hasten.distributed.placement import Placement, Replicated, Sharded
from hasten.distributed.ranks import ALONE, Ranks
from hasten.distributed.tensor_training import apply_tensor_parallel
from hasten.errors import CheckpointError, ConfigError, HastenWarning
from hasten.machine import resolve_dtype
from hasten.machine.threads import thread_count
from hasten.model.attention import Attention
from hasten.model.config import ModelConfig
from hasten.model.experts import Experts
from hasten.model.families import read_config
from hasten.model.initialize import Weights, draw_weights, unfilled
from hasten.model.lora import Factors, attach, new_adapter
from hasten.model.mlp import MLP
from hasten.model.norms import place_ones
from hasten.model.swap import replace_modules, swap_kinds
from hasten.model.transformer import Transformer
from hasten.model.vocabulary import pad_vocabulary
from hasten.ops.activation import KERNELS, ActivationRequest, bind
from hasten.ops.attention.pattern_text import parse_pattern, pattern_values
from hasten.ops.native import library, obtainable
from hasten.ops.picker import explain
from hasten.planning.shapes import gpt2, llama
from hasten.text.tokenizer import Tokenizer
from hasten.training.activations import apply_checkpointing
from hasten.training.allocator import keep_freed_memory, return_large_blocks
from hasten.training.compiled import apply_compile
from hasten.training.optimizers import make_optimizer
from hasten.training.patterns import give_pattern, set_dropout
from hasten.training.precision import Precision
from hasten.training.qat import apply_rounding
from hasten.training.recipe import Lora, Recipe, Shape
from hasten.training.step import TrainStep
from hasten.training.teacher import Teacher
from hasten.training.training_modules import FusedMLP, JoinedAttention
from hasten.training.whole import why_not_whole
from hasten.training.whole_step import check_fp8, whole_step


def shape_config(shape: Shape, *, vocab_size: int, positions: int, tokenizer: Tokenizer | None = None) -> ModelConfig:
    """The config of a shape, read from the config.json that an exported folder will have.

    positions: the longest context that the model declares, unless the shape names one. tokenizer: whose ids of text
    begin and end are stored. Raises ConfigError for sizes that do not fit together.
    """
    if shape.hidden_size % shape.heads:
        raise ConfigError(f"model.hidden_size ({shape.hidden_size}) must be a multiple of model.heads ({shape.heads})")
    kv_heads = shape.heads if shape.kv_heads is None else shape.kv_heads
    if kv_heads < 1 or shape.heads % kv_heads:
        raise ConfigError(f"model.heads ({shape.heads}) must be a multiple of model.kv_heads ({kv_heads})")
    values = _published(shape, kv_heads=kv_heads, positions=shape.max_positions or positions)
    values |= {"vocab_size": vocab_size, "tie_word_embeddings": shape.tie_embeddings}
    if shape.attention_pattern is not None:
        values["hasten"] = {"attention_pattern": pattern_values(parse_pattern(shape.attention_pattern))}
    if tokenizer is not None:
        values |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": next(iter(tokenizer.eos_ids), None)}
    try:
        return read_config(values)
    except CheckpointError as error:
        raise ConfigError(f"the recipe's shape cannot be built: {str(error).removeprefix('config.json: ')}") from None


def _published(shape: Shape, *, kv_heads: int, positions: int) -> dict[str, Any]:
    """The fields of a config.json, under the family's names."""
    if shape.family == "gpt2":
        if kv_heads != shape.heads:
            raise ConfigError("model.kv_heads: gpt2 has as many key/value heads as heads; use the llama family")
        inner = shape.feed_forward or 4 * shape.hidden_size
        return gpt2(shape.hidden_size, shape.layers, shape.heads, n_inner=inner, n_positions=positions)
    inner = shape.feed_forward or -(-shape.hidden_size * 8 // 3 // 64) * 64
    sizes = (shape.hidden_size, inner, shape.layers, shape.heads, kv_heads)
    return llama(*sizes, max_position_embeddings=positions, rope_theta=shape.rope_theta)


def training_config(recipe: Recipe, config: ModelConfig) -> ModelConfig:
    """The config with the recipe's dropout and padded vocabulary."""
    return replace(config, dropout=recipe.dropout).padded_to(recipe.techniques.pad_vocabulary_to)


def pretrained_model(
    source: str | ModelSource, recipe: Recipe, *, device: torch.device, on_packed: OnPacked | None = None
) -> Transformer:
    """Load a checkpoint to train: in float32, copied, so that training does not write into the mapped file.

    With LoRA the weights stay frozen, in the stored dtype or in `lora.base`; they may be quantized. Without it, raises
    ConfigError for quantized weights. on_packed: called with each packed layer when it is loaded.
    """
    from hasten.checkpoints.load import load_quietly

    frozen = recipe.lora.rank is not None
    dtype = recipe.lora.base.replace("auto", "stored") if frozen else "float32"
    model = load_quietly(source, dtype=dtype, device=str(device), on_packed=on_packed)
    model.destination = device
    if model.quantization and not frozen:
        path = source if isinstance(source, str) else source.path
        raise ConfigError(
            f"{asked_as(path)} is quantized, and such weights are not trained: train an adapter beside them "
            f"(--lora.rank 16), or all of its weights after {export_plain(path)} (then --init {plain_folder(path)})"
        )
    if not frozen:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    return _as_asked(model, recipe)


def model_and_weights(
    source: ModelSource | None, config: ModelConfig, recipe: Recipe, *, device: torch.device, ranks: Ranks = ALONE
) -> tuple[Transformer, Weights]:
    """The model to train without memory for its weights, and the weights: the checkpoint's, or random ones of `config`.

    The model is on the meta device, and takes `device` for its own. Packed weights are taken from the checkpoint now,
    one layer after the other: those of `ranks` keep their rows of each.
    """
    if source is not None and source.quantized is not None:
        shards = ranks.readers // recipe.parallel.replicas
        rows = RowsOfPacked(ranks.rank % shards, shards)
        return pretrained_model(source, recipe, device=device, on_packed=rows.take), rows
    if source is None:
        with unfilled():
            model = Transformer(config)
            # All draws are made in their order, also of experts that this rank will not have.
            drawn = model if recipe.parallel.experts == 1 else Transformer(config)
        weights: Weights = partial(draw_weights, drawn, seed=recipe.run.seed, device=device)
    else:
        model, weights = unfilled_model(source)
        if recipe.lora.rank is not None:  # the others are trained in float32
            model.to(resolve_dtype(recipe.lora.base, auto=model.stored_dtype))
        _as_asked(model, recipe)
    model.destination = device
    model.ropes.to(device)
    place_ones(model, device=device, dtype=model.dtype)
    return model, weights


def _as_asked(model: Transformer, recipe: Recipe) -> Transformer:
    """Give a checkpoint's model the recipe's attention pattern and dropout, in place."""
    if recipe.model.attention_pattern is not None:
        give_pattern(model, recipe.model)
    if recipe.dropout:
        set_dropout(model, recipe.dropout)
    return model


def training_step(
    model: Transformer,
    recipe: Recipe,
    *,
    ranks: Ranks = ALONE,
    should_stop: Callable[[], bool] = lambda: False,
    restored: bool = False,
    weights: Weights | None = None,
) -> TrainStep:
    """Apply a recipe's techniques to a model, in their one order, and create the step that trains it.

    model: with float32 weights; for LoRA in any format. should_stop: called between micro-batches. restored: the
    trained weights will be read from a checkpoint. weights: of a model without memory for them (`model_and_weights`),
    which ZeRO divides. ranks: checked by `hasten.training.rank_checks`. Raises
    ConfigError if a technique does not fit the model.
    """
    techniques, parallel, on_cpu = recipe.techniques, recipe.parallel, model.device.type == "cpu"
    if techniques.layer_drop is not None and model.config.shares_keys:
        raise ConfigError(
            f"techniques.layer_drop: layers of a {model.config.family} use the keys of others, which cannot be "
            "dropped; leave it out"
        )
    if techniques.keep_memory and on_cpu:
        keep_freed_memory()
    elif on_cpu and parallel.zero:
        return_large_blocks()
    if recipe.lora.rank is None:
        pad_vocabulary(model, techniques.pad_vocabulary_to)
    # At stage 3 no rank is to have all weights at once, nor their casts: recomputing blocks casts them again.
    keeps_casts = parallel.zero < 3 or techniques.checkpointing == "none"
    precision = Precision(techniques.precision, model.device, keeps_casts=keeps_casts)
    masters = parallel.policy == "float32-masters"
    if masters and recipe.lora.rank is None:
        model.to(precision.dtype)
    if ranks.tensor > 1:
        model = apply_tensor_parallel(model, ranks, parallel.replicas)
    apply_kernels(model, attention_kernel(recipe, model.device), techniques.loss, precision.dtype)
    if techniques.fused_activation:
        apply_fused_activations(model, precision.dtype)
    if techniques.joined_projections and on_cpu:
        apply_joined_projections(model)
    if recipe.lora.rank is not None:
        apply_lora(model, recipe.lora, seed=recipe.run.seed, dtype=precision.dtype if masters else torch.float32)
    if recipe.qat.bits is not None:
        apply_rounding(model, recipe.qat, begin=not restored or recipe.lora.rank is not None)
    if techniques.checkpointing != "none":
        apply_checkpointing(model, techniques.checkpointing)
    experts = None
    if parallel.experts > 1:
        experts = apply_expert_parallel(model, ranks, parallel.experts)
    by_blocks = why_block_by_block(model, recipe, ranks)
    if techniques.fp8:
        check_fp8(model, recipe, precision, by_blocks)
    if techniques.compile and by_blocks is not None:
        apply_compile(model)
    placement = apply_data_parallel(model, recipe, ranks, weights, experts)
    optimizer = make_optimizer(placement, recipe.optimizer, fused=techniques.fused_optimizer)
    if by_blocks is None:
        return whole_step(model, recipe, placement, optimizer, precision, should_stop)
    teacher = None
    if recipe.teacher is not None:
        teacher = Teacher.of(
            recipe.teacher, model, device=precision.device, dtype=precision.dtype, tokens=recipe.data.context
        )
    return TrainStep(
        model,
        optimizer,
        precision,
        clip=recipe.optimizer.clip,
        separate_documents=recipe.data.separate_documents,
        should_stop=should_stop,
        placement=placement,
        teacher=teacher,
        how=f"block by block: {by_blocks}" if techniques.compile and not on_cpu else "",
        # Ranks must agree in every bit of what each of them has of its own.
        shares_cores=on_cpu and ranks.size == 1 and thread_count(recipe.run.threads) is None,
    )


def why_block_by_block(model: Transformer, recipe: Recipe, ranks: Ranks = ALONE) -> str | None:
    """Why a model is not trained as one function (`training/whole.py`), or None."""
    techniques = recipe.techniques
    if model.device.type == "cpu":
        return "on a CPU one graph that serves every block is as fast, and compiles sooner"
    if not techniques.whole_model:
        return "techniques.whole_model is off"
    if ranks.joined:
        return "several processes exchange weights and gradients block by block"
    if recipe.parallel.policy != "float32-weights" or recipe.parallel.offload != "none":
        return "the optimizer has copies of the weights"
    if techniques.checkpointing != "none":
        return f"activations are recomputed block by block (checkpointing {techniques.checkpointing})"
    if techniques.layer_drop is not None:
        return "layer dropping skips different blocks in every step"
    if recipe.data.separate_documents:
        return "packed documents need a new mask in every batch"
    if recipe.teacher is not None:
        return "it learns from a teacher"
    if recipe.lora.rank is not None or recipe.qat.bits is not None:
        return "only an adapter, or rounded weights, are trained"
    return why_not_whole(model)


def divided_at_once(recipe: Recipe, ranks: Ranks, source: ModelSource | None) -> bool:
    """Whether no rank needs the whole model: ZeRO divides all of its weights, and each rank makes or reads its own.

    Rounded weights begin with scales that are found from whole ones; packed ones are divided by rows, experts not.
    """
    if recipe.parallel.experts > 1 and source is not None and source.quantized is not None:
        return False
    divided = recipe.parallel.zero > 0 and (recipe.lora.rank is None or recipe.parallel.zero == 3)
    divided = divided and recipe.qat.bits is None
    return ranks.joined and divided and ranks.tensor == 1


def apply_data_parallel(
    model: Transformer,
    recipe: Recipe,
    ranks: Ranks = ALONE,
    weights: Weights | None = None,
    experts: HeldExperts | None = None,
) -> Placement:
    """Distribute the model over the ranks: whole on each (DDP) or sharded (FSDP2).

    weights: as in `training_step`. experts: this rank's, where ranks divide them.
    """
    parallel = recipe.parallel
    copies = None
    if parallel.offload == "optimizer" or parallel.policy == "float32-masters":
        copies = model.device if parallel.offload == "none" else torch.device("cpu")
    if not ranks.joined:
        return Placement(model, copies=copies)
    if parallel.zero == 0:
        # Some experts, and biases that only choose among them, have no gradient.
        unreached = bool(model.config.experts) and (experts is None or model.config.expert_choice_bias)
        unused = unreached or recipe.techniques.layer_drop is not None
        return Replicated(model, ranks=ranks, unused=unused, copies=copies, experts=experts)
    for module in model.modules():
        # Ranks reduce the gradients of a block together, and so all or none of it.
        if isinstance(module, Experts) and any(one.requires_grad for one in module.experts.parameters()):
            module.all_take_part = True
    return Sharded(
        model,
        ranks=ranks,
        stage=parallel.zero,
        replicas=parallel.replicas,
        offload=parallel.offload == "all",
        prefetch=parallel.prefetch,
        copies=copies,
        experts=experts,
        weights=weights,
    )


def attention_kernel(recipe: Recipe, device: torch.device) -> str | None:
    """Name of the attention kernel to force, None for the first that fits.

    The recipe's, or "reference" for short compiled rows with dropout on a CPU without native kernels: PyTorch's fused
    CPU kernel has no dropout and is slower there than matrix products with a compiled softmax between them.
    """
    techniques = recipe.techniques
    short = techniques.compile and recipe.data.context <= 512
    if techniques.attention is None and device.type == "cpu" and recipe.dropout > 0 and short:
        return None if obtainable("training") else "reference"
    return techniques.attention


def apply_kernels(model: Transformer, attention: str | None, loss: str | None, dtype: torch.dtype) -> None:
    """Choose the fastest attention and loss kernels that fit, or the named ones. Raises ConfigError for unknown names.

    dtype: of the matrix products; on a CPU every kernel takes the weights' own. The native attention is compiled
    first: if that fails, or PyTorch's is faster, it is not used.
    """
    if model.device.type == "cpu" and attention in (None, "native", "native-sparse"):
        library(part="training")
    model.bind(attention=attention, loss=loss, dtype=None if model.device.type == "cpu" else dtype)
    first = next((module for module in model.modules() if isinstance(module, Attention)), None)
    if first is None:  # some layers of a model whose others have attention
        return
    tokens, dropout = first.kernels.tokens.name, first.kernels.dropout.name
    if first.dropout and tokens != dropout and (attention or first.block_size):
        message = f"attention kernel {tokens!r} does not support dropout, so {dropout!r} computes the training steps"
        warnings.warn(message, HastenWarning, stacklevel=3)


def apply_fused_activations(model: Transformer, dtype: torch.dtype) -> bool:
    """On a CPU, compute bias and GELU, or SiLU and gate, in one native pass, forward and backward.

    dtype: of the matrix products. Returns whether any MLP was changed.
    """
    layers = [module for module in model.modules() if isinstance(module, MLP)]
    if not layers or model.device.type != "cpu":  # a GPU's compiler does as well
        return False
    request = ActivationRequest(device=model.device, dtype=dtype)
    if explain(KERNELS, request).kernel != "native":  # a compiler does better with PyTorch's own functions
        return False
    functions = bind(request)
    fused = {layer: FusedMLP.of(layer, functions) for layer in layers}
    replace_modules(model, {old: new for old, new in fused.items() if new is not None})
    return any(fused.values())


def apply_joined_projections(model: Transformer) -> None:
    """Project to queries, keys and values with one wider product, forward and backward, which reads x once."""
    swap_kinds(model, {Attention: JoinedAttention})


def apply_lora(
    model: Transformer,
    settings: Lora,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> None:
    """Freeze all weights and add trained LoRA factors, in `dtype`, to the targeted layers.

    device: of the factors; None: the model's.
    """
    adapter = lora_adapter(model.config, settings, seed=seed, device=device or model.device)
    attach(model, [adapter], dropout=settings.dropout)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def lora_adapter(
    config: ModelConfig, settings: Lora, *, seed: int = 0, device: torch.device | str = "meta"
) -> dict[str, Factors]:
    """Create the trained factors by layer name, on meta for counting. Raises ConfigError for unknown targets."""
    rank = settings.rank or 1
    alpha = 2 * rank if settings.alpha is None else settings.alpha
    targets, rslora = settings.targets, settings.rslora
    return new_adapter(config, rank=rank, alpha=alpha, targets=targets, rslora=rslora, seed=seed, device=device)
