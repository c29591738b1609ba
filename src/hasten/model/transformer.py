"""The one decoder: the whole forward pass of every supported family, in the order it happens.

Everything but attention is position-wise: tokens may have any leading shape, and only a layer's `context` object knows
which tokens belong together and what is cached. B: sequences, T: tokens of each, H: query heads, Hkv: key/value
heads, D: head size, C: hidden size, V: vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hasten.errors import ConfigError
from hasten.model.attention import Attention, KeysValues
from hasten.model.config import LayerConfig, ModelConfig
from hasten.model.experts import NormedExperts, mlp_of
from hasten.model.interfaces import Context, LayerContext, SoftTargets, Stack, StateContext
from hasten.model.last_rows import of_rows
from hasten.model.latent import attention_of
from hasten.model.layer_format import LayerFormat
from hasten.model.mixers import mixer_of
from hasten.model.norms import norm_of
from hasten.model.rope import RotaryTable, Rotation
from hasten.model.token_features import TokenFeatures, TokenGate
from hasten.model.wide import check_trainable, choose_width
from hasten.ops.linear import PackedEmbedding, PackedLinear
from hasten.ops.linear.wide import WideEmbedding, WideLinear

if TYPE_CHECKING:
    from hasten.model.lora import AdapterChoice
    from hasten.text.tokenizer import Tokenizer

_BINDING = threading.RLock()  # held while a model's kernels are chosen: threads may use a new model at once


class Block(nn.Module):
    """One layer: attention (or `mixer`, which keeps a state) and MLP, each added to the residual stream.

    What a layer does not have is None.
    """

    attention: Any  # Attention, or None

    def __init__(self, config: ModelConfig, layer: LayerConfig) -> None:
        super().__init__()
        norm = partial(norm_of, config, config.hidden_size)
        self.attention_norm = norm(there=layer.mixes and config.pre_norms)
        self.mixer = mixer_of(config) if layer.keeps_state else None
        self.attention = attention_of(config, layer) if layer.attends else None
        self.attention_post_norm = norm(there=layer.mixes and config.post_norms)
        self.mixes, self.parallel, self.lends_keys = layer.mixes, config.parallel, layer.lends_keys
        self.mlp_norm = norm(there=layer.mlp and config.pre_norms and not config.parallel)
        self.mlp = mlp_of(config, layer) if layer.mlp else None
        self.mlp_post_norm = norm(there=layer.mlp and config.post_norms)
        self.token_gate = TokenGate(config) if config.token_features else None
        self.scale = nn.Parameter(torch.empty(1)) if config.block_scales else None
        self.dropout, self.residual_scale = nn.Dropout(config.dropout), config.residual_scale

    def forward(
        self,
        x: Tensor,
        rope: Rotation | None,
        layer: LayerContext | StateContext,
        scale: Tensor | None = None,
        features: Tensor | None = None,
        shared: KeysValues | None = None,
    ) -> Tensor | tuple[Tensor, KeysValues]:
        """x (B, T, C) -> (B, T, C), with the keys and values that it lends, if it does.

        scale: 0-dim factor of the residual branches (a kept block's 1/p). features (B, T, P): what the tokens bring.
        shared: keys and values of the layer whose it uses.
        """
        normal, lent = self.attention_norm(x), None
        if self.mixes:
            mixed, lent = self.mixed(normal, rope, layer, shared)
            x = self.add(x, self.dropout(self.attention_post_norm(mixed)), scale)
        if self.mlp is not None:
            normal = normal if self.parallel else self.mlp_norm(x)
            branch = self.mlp(normal, x) if isinstance(self.mlp, NormedExperts) else self.mlp(normal)
            x = self.add(x, self.dropout(self.mlp_post_norm(branch)), scale)
        if self.token_gate is not None and features is not None:
            x = self.add(x, self.token_gate(x, features), scale)
        x = x if self.scale is None else x * self.scale
        return x if lent is None else (x, lent)

    def mixed(self, x: Tensor, rope: Rotation | None, layer: Any, shared: Any) -> tuple[Tensor, KeysValues | None]:
        """What tokens x (B, T, C) take from those before them, and what the layer lends. layer: its kind's context."""
        if self.mixer is not None:
            return self.mixer(x, layer), None
        found = self.attention(x, rope, layer, *([] if shared is None else [shared]))
        return found if self.lends_keys else (found, None)

    def add(self, x: Tensor, added: Tensor, scale: Tensor | None) -> Tensor:
        """Add a branch to the residual stream, scaled as the model and the step say."""
        added = added if self.residual_scale == 1.0 else added * self.residual_scale
        return x + (added if scale is None else added * scale)


class Transformer(nn.Module):
    """A decoder-only language model.

    Built uninitialised: weights come from a checkpoint (`hasten.load`) or from `initialize`. `tokenizer` and
    `generation` (generation_config.json) travel with it; `quantization` says how each quantized layer is, by its name.
    """

    tokenizer: Tokenizer | None
    generation: dict[str, Any]
    embedding: Any  # nn.Embedding; PackedEmbedding where it is quantized, or tied to a packed head
    norm: Any  # RMSNorm or nn.LayerNorm
    head: Any  # nn.Linear, or PackedLinear
    quantization: Mapping[str, LayerFormat] | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = self.quantization = None
        self.generation = {}
        self.loss_kernel: str | None = None
        self._loss_kernels: dict[Any, Any] = {}  # picked ones, by the device and dtype of the products
        self.auto_fuse = True  # what generates may swap the blocks for fused ones (hasten.model.fused)
        self.dtype_asked = True  # the caller named the dtype, or made the weights
        self.stored_dtype: torch.dtype | None = None  # of the checkpoint's plain weights, where there is one
        self.origin: str | None = None  # the folder, file or hub id that it was loaded from
        self.stored_types: dict[str, str] = {}  # of a GGUF file's quantized layers, by name: Q4_K
        self.was_trained = False
        self.destination: torch.device | None = None  # of the weights, while they are on the meta device
        self.bound = False  # whether kernels were chosen, which readable blocks need at their first use
        self._binding = False  # whether they are being chosen
        self.stack: Stack | None = None  # all blocks in one call, where the model is fused
        self.adapters: AdapterChoice | None = None  # which of its adapters a step's rows take, where it has any
        self.embedding = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_positions, config.hidden_size) if config.learned_positions else None
        self.embedding_norm = norm_of(config, config.hidden_size) if config.embedding_norm else None
        self.token_features = TokenFeatures(config) if config.token_features else None
        self.ropes = nn.ModuleList(RotaryTable(rope) for rope in config.ropes)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in config.layers)
        self.norm = norm_of(config, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        context: Context,
        *,
        rows: Tensor | None = None,
        targets: Tensor | SoftTargets | None = None,
        block_scales: Sequence[float] | None = None,
    ) -> Tensor:
        """Logits, or with `targets` the loss.

        tokens and positions: int64 (B, T). rows: int64 (R,), which of the B·T flattened rows to score; logits are
        then (R, V), else (B, T, V), in float32. targets: int64 (B, T), or (R,) with `rows`, -100 where nothing is
        to be predicted; returns the sum of the token losses (float32 scalar, nats), for the caller to divide by the
        tokens it counted. SoftTargets (without `rows`): the divergence from another model's probabilities instead.
        block_scales: a factor of what each block adds; a block of scale 0 is skipped.
        """
        alone = rows is not None and self.config.shares_keys and self.adapters is None and len(rows) < tokens.numel()
        x = self.states(tokens, positions, context, block_scales=block_scales, rows=rows if alone else None)
        if rows is not None:
            x = x.flatten(0, -2) if alone else x.flatten(0, -2)[rows]  # (R, C)
        if targets is None:
            return self.scores(x)
        if isinstance(targets, SoftTargets):
            return self.divergence(self.norm(x), targets)
        return self.loss(self.norm(x), targets)

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        context: Context,
        *,
        block_scales: Sequence[float] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, T, C) after the last block, before the last norm; arguments as in `forward`.

        In `compute_dtype`, or in float32 if the model is fused. rows int64 (R,): only of these, (1, R, C).
        """
        if not self.bound:
            self.bind_once()
        x = self.embed(tokens, positions)
        features = None if self.token_features is None else self.token_features(tokens, x)
        if self.stack is not None and block_scales is None:
            return self.stack.run(self, x, positions, context, features, rows)
        ropes = self.rotations(positions, context.stretched)
        return self.each_block(x, ropes, context.layers, block_scales, features, rows)

    def rotations(self, positions: Tensor, stretched: Tensor | None) -> list[Rotation]:
        """Cosines and sines (B, T, dim/2) of each rotary table at positions (B, T); stretched as in `RotaryTable`."""
        return [table(positions, stretched) for table in self.ropes]

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Input of the first block: (B, T, C) for tokens and positions (B, T)."""
        x = self.embedding(tokens)  # (B, T, C)
        if self.config.embedding_scale != 1.0:
            # Rounded to the weights' dtype first, as Gemma was trained.
            x = x * torch.tensor(self.config.embedding_scale, dtype=self.dtype)
        if self.positions is not None:
            x = x + self.positions(positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.dropout(x) if self.training else x

    def each_block(
        self,
        x: Tensor,
        ropes: Sequence[Rotation],
        layers: Sequence[LayerContext | StateContext],
        block_scales: Sequence[float] | None = None,
        features: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run the blocks in order, x (B, T, C) -> (B, T, C). ropes: cos and sin of each rotary table. features
        (L, B, T, P): what the tokens bring to each block. rows: as in `states`.
        """
        lent: dict[int, KeysValues] = {}  # by the number of the layer whose they are
        for index, (block, layer) in enumerate(zip(self.blocks, self.config.layers, strict=True)):
            if rows is not None and index == self.config.first_without_keys:
                x, ropes, layers, features = of_rows(rows, x, ropes, layers, features)
            own, rope = layers[index], None if layer.rope is None else ropes[layer.rope]
            scale = 1.0 if block_scales is None else block_scales[index]
            more: dict[str, Any] = {} if features is None else {"features": features[index]}
            more |= {} if layer.keys_of is None else {"shared": lent[layer.keys_of]}
            if block_scales is None or (scale == 1.0 and not self.training):
                x = block(x, rope, own, **more)
            elif scale:
                # A tensor, because a compiled block would be recompiled for every new number.
                x = block(x, rope, own, x.new_full((), scale, dtype=torch.float32), **more)
            if layer.lends_keys:
                x, lent[index] = x
        return x

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sum of the token losses of normalized states x (..., C), without all logits in memory; see ops.loss."""
        # A plain head is its weight and no more: a packed one has none, others (LoRA) are called for what they do.
        # A wide one makes it float32 a piece at a time, where no gradient is wanted.
        plain = getattr(type(self.head), "forward", None) is nn.Linear.forward
        plain |= isinstance(self.head, WideLinear) and torch.is_grad_enabled()
        if not plain:
            return self.loss_by_logits(x, targets)
        from hasten.ops.loss import choose_loss, linear_cross_entropy  # here, as below: what generates needs no loss

        kind, cap, scale = x.device.type, self.config.logit_softcap, self.config.logit_scale
        x = x if scale == 1.0 else x * scale
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        key = x.device, dtype, self.loss_kernel
        if key not in self._loss_kernels:
            self._loss_kernels[key] = choose_loss(x.device, dtype, softcap=cap, kernel=self.loss_kernel)
        return linear_cross_entropy(
            x,
            self.head.weight.to(self.compute_dtype),
            targets,
            vocab_size=self.config.vocab_size,
            bias=self.head.bias,
            softcap=cap,
            kernel=self._loss_kernels[key],
        )

    def loss_by_logits(self, x: Tensor, targets: Tensor) -> Tensor:
        """`loss` computed from logits, a few rows at a time."""
        from hasten.ops.loss import IGNORED

        def own(x: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.logits(x), targets, ignore_index=IGNORED, reduction="sum")

        return self._by_rows(own, x.flatten(0, -2), targets.flatten())

    def divergence(self, x: Tensor, soft: SoftTargets) -> Tensor:
        """KL(other || this) of normalized states x (B, T, C), summed over the tokens with a target."""
        from hasten.ops.loss import IGNORED

        def own(x: Tensor, targets: Tensor, states: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = soft.logits(states).log_softmax(-1)
            found = F.kl_div(self.logits(x).log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
            return torch.where(targets == IGNORED, 0.0, found).sum()

        return self._by_rows(own, x.flatten(0, -2), soft.targets.flatten(), soft.states.flatten(0, -2))

    def _by_rows(self, loss: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Sum a loss over pieces of rows; the logits are recomputed in the backward pass."""
        from hasten.ops.loss import rows_of_a_chunk

        kind, size = rows[0].device.type, rows_of_a_chunk(self.config.vocab_size)
        parts = zip(*(one.split(size) for one in rows), strict=True)
        # Each piece has a cast of the head's weight of its own, so that their gradients are added up in float32.
        with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False):
            losses = [checkpoint(loss, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        return torch.stack(losses).sum()

    def scores(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Logits (..., V) of hidden states (..., C) after the last block. out: the tensor to write them to."""
        return self.finished(self.head(self.norm(x)) if self.stack is None else self.stack.scores(self, x), out=out)

    def logits(self, x: Tensor) -> Tensor:
        """Logits (..., V) in float32 of normalized states x (..., C), without the padded rows of the vocabulary."""
        return self.finished(self.head(x))

    def finished(self, scores: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Final logits from the head's output: padding removed, soft-capped, in float32."""
        cap, size = self.config.logit_softcap, self.config.vocab_size
        logits = scores if scores.shape[-1] == size else scores[..., :size]
        logits = logits.float() if out is None else out.copy_(logits)
        if self.config.logit_scale != 1.0:
            logits = torch.mul(logits, self.config.logit_scale, out=out)
        return logits if cap is None else torch.mul(torch.tanh(logits / cap), cap, out=out)

    @property
    def device(self) -> torch.device:
        own = self.norm.weight.device  # a plain tensor, whatever is quantized or packed
        return self.destination if own.type == "meta" and self.destination is not None else own

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def tie(self) -> None:
        """Let the embedding read its rows from the head's matrix."""
        if isinstance(self.head, PackedLinear):
            self.embedding = PackedEmbedding(self.head)
        else:
            self.embedding.weight = self.head.weight

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of activations (of readable blocks) and of the KV cache; see `hasten.model.wide`."""
        if (own := getattr(self.blocks[0], "cache_dtype", None)) is not None:
            return own
        if not self.bound:
            self.bind_once()
        if isinstance(self.embedding, PackedEmbedding):
            return self.embedding.dtype
        return torch.float32 if isinstance(self.embedding, WideEmbedding) else self.dtype

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one matrix, or two equal ones in a model that ties them."""
        if isinstance(self.embedding, PackedEmbedding):
            return self.embedding.table is self.head
        if isinstance(self.head, PackedLinear):
            return False
        head, embedding = self.head.weight, self.embedding.weight
        equal = self.config.tie_embeddings and not head.is_meta  # there they are equal where they are one
        return head is embedding or (equal and torch.equal(head, embedding))

    @property
    def readable(self) -> bool:
        """Whether the blocks are those of this file, not fused ones."""
        return all(isinstance(block, Block) for block in self.blocks)

    def train(self, mode: bool = True) -> Transformer:
        """Set training mode. Raises ConfigError for a fused model, whose packed weights have no gradients."""
        if mode:
            check_trainable(self)
            self.was_trained = True
        return super().train(mode)

    @torch.inference_mode(False)  # what it makes may be trained later
    def bind(self, *, attention: str | None = None, loss: str | None = None, dtype: torch.dtype | None = None) -> None:
        """Choose every layer's kernels, or force one by name; needed again after moving to another device or dtype.

        dtype: of the products, if autocast runs them in another dtype; the model may then only be called under it.
        Without `loss`, each call uses the first loss kernel that fits, since autocast decides its dtype; an earlier
        choice is dropped.
        """
        if loss is not None:
            from hasten.ops.loss import KERNELS

            if loss not in (known := [kernel.name for kernel in KERNELS]):
                raise ConfigError(f"there is no loss kernel {loss!r}; known: {', '.join(known)}")
        with _BINDING, torch.autocast("cpu", enabled=False):  # products may be measured
            self.loss_kernel, self._binding = loss, True
            try:
                choose_width(self)
                for layer in self.modules():
                    if isinstance(layer, Attention):
                        layer.bind(attention, dtype=dtype, device=self.device)
            finally:
                self._binding = False
            self.bound = True

    def bind_once(self) -> None:
        """Choose every layer's kernels unless they were chosen. Other threads that ask meanwhile wait."""
        with _BINDING:
            if not self.bound and not self._binding:
                self.bind()


def require_model(model: object, caller: str) -> None:
    """Raise ConfigError, naming the caller, for anything but a hasten model."""
    if not isinstance(model, Transformer):
        found = f"{model!r:.60}" if isinstance(model, str) else type(model).__name__
        raise ConfigError(f"{caller} takes a model, as hasten.load(...) returns one; found {found}")
