"""Block by block: each block is quantized for the inputs that the quantized blocks before it give."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hasten.errors import ConfigError
from hasten.model.layer_format import LayerFormat, held_format, regrouped
from hasten.model.transformer import Transformer
from hasten.ops.linear import PackedEmbedding, PackedLinear, QuantizedWeight
from hasten.ops.pages import return_freed_memory
from hasten.quantization.report import LayerReport, compare
from hasten.quantization.rounding import Grid, Search, round_weight
from hasten.quantization.schemes import KERNEL_BITS
from hasten.quantization.walk import CalibrationWalk, Call, Run, shared_copy

if TYPE_CHECKING:
    from hasten.quantization.resume import WorkFolder


@dataclass(frozen=True, slots=True)
class BlockResult:
    """The layers of a block, and its other tensors that were changed (norms, biases), by their names in the model."""

    weights: dict[str, QuantizedWeight]
    changed: dict[str, Tensor]
    reports: list[LayerReport]

    def to(self, device: torch.device) -> "BlockResult":
        """The same on another device."""
        weights = {name: weight.map(lambda tensor: tensor.to(device)) for name, weight in self.weights.items()}
        return replace(self, weights=weights, changed={n: tensor.to(device) for n, tensor in self.changed.items()})


@dataclass(slots=True)
class BlockTask:
    """One block at work: `block` is a copy in which layers are replaced as they are done, `before` the block as it was.

    layers: by their names in the block. calls run a block on the quantized blocks' outputs, a few samples each;
    calls_before on those of the model before (None where the method does not need them). run: on any of the samples
    (not of the head). prefix: the block's name in the model; empty for the head. changed: other tensors of the block
    that a method replaced, by their names in it.
    """

    block: nn.Module
    before: nn.Module
    layers: Mapping[str, LayerFormat]
    calls: Sequence[Call]
    calls_before: Sequence[Call] | None
    search: Search
    dtype: torch.dtype
    prefix: str
    run: Run | None = None
    saved: "WorkFolder | None" = None
    progress: Callable[[int, int], None] = lambda done, total: None
    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    changed: dict[str, Tensor] = field(default_factory=dict)
    reports: list[LayerReport] = field(default_factory=list)

    def weight(self, name: str) -> Tensor:
        """A layer's weight before quantization (N, K)."""
        linear = self.before.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        return linear.weight.detach()

    def tensor(self, name: str) -> Tensor:
        """A tensor of the block as it is now."""
        if name in self.changed:
            return self.changed[name]
        owner, _, leaf = name.rpartition(".")
        return getattr(self.before.get_submodule(owner), leaf).detach()

    def change(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into the place of another: a weight that will be quantized, or one that is stored as it is, in
        the dtype that stands there.
        """
        owner, _, leaf = name.rpartition(".")
        if owner not in self.layers:
            module = shared_copy(self.block.get_submodule(owner))
            tensor = tensor.to(getattr(module, leaf).dtype)
            setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
            self.block.set_submodule(owner, module)
        self.changed[name] = tensor

    def nearest(self, name: str) -> QuantizedWeight:
        """The layer rounded to nearest."""
        return round_weight(self.weight(name), self.layers[name].weight, search=self.search)

    def grid(self, name: str) -> Grid:
        """The integers of a layer's format."""
        return Grid(self.layers[name].weight, self.search)

    def place(self, name: str, weight: QuantizedWeight, **report: Any) -> None:
        """Put a quantized layer into its place, as it will be served: rounding activations, where its format does.

        report: what only the method can say of it, `output_error`, `nearest_output_error` and `note`.
        """
        layer = self.layers[name]
        linear = self.before.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        bias = self.changed.get(f"{name}.bias", linear.bias)
        self.block.set_submodule(name, served(weight, linear, bias, layer, self.dtype))
        self.weights[name] = weight
        done = compare(self.prefix + name, self.tensor(f"{name}.weight"), weight, layer, **report)
        self.reports.append(replace(done, bytes_before=linear.weight.nbytes))  # a changed weight is in float32

    def result(self) -> BlockResult:
        """What has become of the block."""
        replaced = {f"{name}.weight" for name in self.layers}
        changed = {self.prefix + name: tensor for name, tensor in self.changed.items() if name not in replaced}
        return BlockResult({self.prefix + name: weight for name, weight in self.weights.items()}, changed, self.reports)


class BlockMethod(Protocol):
    """A method that looks at calibration samples, one block at a time."""

    @property
    def needs_before(self) -> bool:
        """Whether the samples are also taken through the model as it was."""

    def quantize_block(self, task: BlockTask) -> None:
        """Choose and place the weights of all of a block's layers. An error names no layer: the caller does."""


@torch.no_grad()
def quantize_blocks(
    model: Transformer,
    formats: Mapping[str, LayerFormat],
    tokens: Tensor,
    method: BlockMethod,
    *,
    search: Search,
    saved: "WorkFolder | None" = None,
    spill: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    device: torch.device | None = None,
) -> Iterator[BlockResult]:
    """Quantize the layers `formats` for calibration tokens (S, T), a result for each block and one for the head.

    The model is not changed. Blocks are computed on `device`, one of them there at a time; the results are where the
    model is. Blocks that `saved` has are not computed again. `spill` is a folder for files that hold
    the samples' states. `progress` is told what of a block is done, by methods that take long.
    """
    files = [None if spill is None else spill / f"{name}.spill" for name in ("states", "before")]
    walks = [_first_walk(model, formats.get("embedding"), tokens, search, device=device, spill=files[0])]
    if method.needs_before:
        walks.append(CalibrationWalk(model, tokens, device=device, spill=files[1]))
    done = 0 if saved is None else saved.blocks()
    if done:
        assert saved is not None
        for walk, states in zip(walks, saved.states(), strict=True):
            walk.states.copy_(states)

    def finished(index: int | None) -> BlockTask:
        task = block_task(model, index, formats, walks, search=search, saved=saved, progress=progress)
        try:
            method.quantize_block(task)
        except ConfigError as error:
            raise ConfigError(f"{task.prefix.rstrip('.') or 'head'}: {error}") from None
        assert task.weights.keys() == task.layers.keys(), "a method places every layer"
        return_freed_memory()
        return task

    for index in range(len(model.blocks)):
        if saved is not None and index < done:
            yield saved.load(index)
            continue
        task = finished(index)
        for walk, module in zip(walks, (task.block, task.before), strict=False):
            walk.advance(index, module)
        result = task.result().to(model.device)
        del task, module  # before the next block takes their place
        if saved is not None:
            saved.save(index, result, [walk.states for walk in walks])
        yield result
    if "head" in formats:
        yield finished(None).result().to(model.device)


def block_task(
    model: Transformer,
    index: int | None,
    formats: Mapping[str, LayerFormat],
    walks: Sequence[CalibrationWalk],
    **options: Any,
) -> BlockTask:
    """What a method is given of a block; index None: of norm and head."""
    block: nn.Module
    if index is None:
        prefix, names, block = "", ["head"], head_of(model)
        calls = [walk.whole_calls() for walk in walks]
    else:
        prefix, block = f"blocks.{index}.", model.blocks[index]
        names = [name for name in formats if name.startswith(prefix)]
        calls = [walk.calls(index) for walk in walks]
        options["run"] = walks[0].run(index)
    block = walks[0].here(block)
    return BlockTask(
        block=shared_copy(block),
        before=block,
        layers={name.removeprefix(prefix): formats[name] for name in names},
        calls=calls[0],
        calls_before=calls[1] if len(calls) > 1 else None,
        dtype=walks[0].dtype,
        prefix=prefix,
        **options,
    )


def head_of(model: Transformer) -> nn.Module:
    """What comes behind the last block: norm and head."""
    return nn.Sequential(OrderedDict(norm=model.norm, head=model.head))


def _first_walk(
    model: Transformer, layer: LayerFormat | None, tokens: Tensor, search: Search, **options: Any
) -> CalibrationWalk:
    """The walk through the model as it will be: from an embedding's rows as they will be stored."""
    exact = model.embedding
    try:
        if layer is not None:
            weight = round_weight(exact.weight.detach(), layer.weight, search=search)
            model.embedding = served(weight, exact, None, layer, model.compute_dtype)
        return CalibrationWalk(model, tokens, **options)
    finally:
        model.embedding = exact


def served(weight: QuantizedWeight, old: Any, bias: Tensor | None, layer: LayerFormat, dtype: torch.dtype) -> nn.Module:
    """A layer of a quantized weight as it is run: packed for its kernel, or plain where no kernel takes the format."""
    if weight.format.bits in KERNEL_BITS:
        if (held := held_format(weight.format)) not in (None, weight.format):
            weight = regrouped(weight, held)  # one scale a row, in groups that kernels know
        if isinstance(old, nn.Embedding):
            return PackedEmbedding.from_weight(weight, dtype=dtype)
        return PackedLinear.from_weight(weight, bias, activations=layer.activations, dtype=dtype)
    plain = shared_copy(old)
    plain.weight = nn.Parameter(weight.dequantize(old.weight.dtype), requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias, requires_grad=False)
    return plain
