"""`hasten.load`: a decoder from a folder, a GGUF file, a hub id, or a transformers model already in memory."""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.checkpoints.checkpoint import DTYPES, StoredTensor, check_finite
from hasten.checkpoints.fill_quantized import NO_KERNEL, OnPacked, fill_quantized
from hasten.checkpoints.formats.file_format import QuantizedFolder
from hasten.checkpoints.formats.stream import NAMES
from hasten.checkpoints.gguf.open import open_gguf
from hasten.checkpoints.hub import resolve_folder, resolve_model
from hasten.checkpoints.source import ModelSource, open_folder
from hasten.checkpoints.unread import check_constants, warn_of_towers, warn_of_unused
from hasten.checkpoints.upload import Upload
from hasten.errors import CheckpointError, ConfigError, HastenWarning
from hasten.machine.device import resolve_device, resolve_dtype
from hasten.machine.pages import release_pages
from hasten.model.config import ModelConfig
from hasten.model.experts import kept_dtype
from hasten.model.families import FAMILIES, family_of, read_config
from hasten.model.families.family import Family, layouts
from hasten.model.families.slices import TensorSlice
from hasten.model.families.wrapped import text_tensors
from hasten.model.inference import inference_dtype
from hasten.model.initialize import unfilled
from hasten.model.norms import place_ones
from hasten.model.sharded import connect
from hasten.model.shares import Share, shares, whole_groups
from hasten.model.transformer import Transformer
from hasten.ops.collective import RankGroup

__all__ = ["load", "open_checkpoint", "resolve_folder", "resolve_model"]


def load(
    source: str | Path | nn.Module | ModelSource,
    *,
    dtype: str | torch.dtype | None = "auto",
    device: str = "cpu",
    group: RankGroup | None = None,
) -> Transformer:
    """Load a language model, ready for inference.

    Its blocks are the readable ones of `hasten.model.transformer`. What generates (`hasten.generate`, `stream`, `Chat`,
    `LLM`) swaps them for fused ones where these can run, in place and without changing a weight; `hasten.unfuse`
    undoes it and keeps the model readable. A model that is being trained or has hooks is not touched.

    source: a folder with config.json and safetensors, a GGUF file or a folder with one, a hub id such as "owner/name"
    (downloaded with huggingface_hub), a short name (`hasten.checkpoints.published`), what `open_checkpoint` has opened,
    or a transformers model, whose weights are taken over without a copy. dtype: "float32", "bfloat16" or "float16";
    "stored" for the checkpoint's own; "auto" (or None) for the one to generate in: bfloat16 for a float32 checkpoint
    where the fused steps can run (`hasten.model.inference` has the whole rule), and for a transformers model the one it
    has.
    device: "auto", "cpu", "cuda", "cuda:0", …. group: the ranks that hold the model together
    (`hasten.distributed.tensor_parallel`); this one then takes its share of any folder or file, and no more.

    A folder's weights are memory-mapped: in their own dtype on the CPU they cost no second copy. The model carries
    the folder's tokenizer, or None where it has none: then prompts are token ids.

    Raises CheckpointError for a folder that is damaged, of an unknown family, or not what its config.json says;
    ResourceError if the device or the hub cannot be reached.
    """
    return _load(source, dtype=dtype, device=device, group=group)


def _load(
    source: str | Path | nn.Module | ModelSource,
    *,
    dtype: str | torch.dtype | None = "auto",
    device: str = "cpu",
    group: RankGroup | None = None,
    on_packed: OnPacked | None = None,
) -> Transformer:
    found = resolve_device(device)
    place = None if found.type == "cpu" else found  # None: where the tensors are
    auto = dtype is None or dtype == "auto"
    wanted = None if auto or dtype == "stored" else resolve_dtype(dtype)  # type: ignore[arg-type]
    if isinstance(source, nn.Module):
        if group is not None:
            raise ConfigError("ranks load a model together from a folder or a file; this one is in memory already")
        model = _from_transformers(source, wanted, place)
        model.dtype_asked = not auto
        return model
    checkpoint = source if isinstance(source, ModelSource) else open_checkpoint(source)
    held = None if group is None else shares_of(checkpoint, group.size)
    share = None if group is None or held is None else held[group.rank]
    with ThreadPoolExecutor(1, thread_name_prefix="hasten-tokenizer") as beside:
        tokenizer = beside.submit(lambda: checkpoint.tokenizer)  # while torch's functions let Python go on
        model, own, packed, quantized = fill_plain(checkpoint, share, dtype=wanted, device=place, to_generate=auto)
        if quantized is not None:
            fill_quantized(model, packed, quantized, dtype=own, device=place, share=share, on_packed=on_packed)
        model.tokenizer = tokenizer.result()
    if group is not None and held is not None:
        model = connect(model, group, held, checkpoint.config)
    model.dtype_asked = not auto
    model.origin = str(source.path if isinstance(source, ModelSource) else source)
    _finish(model, place)
    return model


def load_quietly(source: str | Path | ModelSource, **options: Any) -> Transformer:
    """Load a model that will not generate, so without the warning about formats that no kernel takes.

    options: those of `load`, and `on_packed` (`fill_quantized`).
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", NO_KERNEL, HastenWarning)
        return _load(source, **options)


def load_as_stored(source: str | Path | ModelSource) -> Transformer:
    """Load a model that is only written again: each plain tensor keeps the dtype it is stored in, and no warning says
    which formats no kernel takes."""
    checkpoint = source if isinstance(source, ModelSource) else open_checkpoint(source)
    model, own, packed, quantized = fill_plain(checkpoint, keep_dtypes=True)
    if quantized is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", NO_KERNEL, HastenWarning)
            fill_quantized(model, packed, quantized, dtype=own, device=None)
    model.tokenizer = checkpoint.tokenizer
    model.origin = str(checkpoint.path if isinstance(source, ModelSource) else source)
    _finish(model, None)
    return model


def shares_of(checkpoint: ModelSource, size: int) -> list[Share]:
    """Each rank's share for `size` ranks. Raises ConfigError if the model cannot be split that way."""
    together = {"output": 1, "down": 1}
    roles = {"output": (".output.weight", ".out.weight"), "down": (".down.weight",)}
    if checkpoint.quantized is not None:
        config, modules = checkpoint.config, checkpoint.quantized.modules
        for role, endings in roles.items():
            every = (place for layout in layouts(FAMILIES[config.family], config) for place in layout)
            names = {piece.name for ours, piece in every if ours.endswith(endings)}
            formats = (modules[name].layer for name in names & set(modules))
            together[role] = whole_groups(one.weight for one in formats if one is not None)
    return shares(checkpoint.config, size, **together)


def fill_plain(
    checkpoint: ModelSource,
    share: Share | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    keep_dtypes: bool = False,
    to_generate: bool = False,
) -> tuple[Transformer, torch.dtype, dict[str, TensorSlice], QuantizedFolder | None]:
    """Build the model and load its plain weights; return it, their dtype, and the quantized layers left to load.

    Everything is checked as `load` does. share: the part that this rank holds. dtype None: the checkpoint's own, or
    to_generate the one that `inference_dtype` chooses. keep_dtypes: each plain tensor has the one it is stored in.
    """
    config, stored, quantized = checkpoint.config, checkpoint.stored, checkpoint.quantized
    modules = {} if quantized is None else quantized.modules
    model, pieces = planned(checkpoint)
    if share is not None:
        model = _skeleton(share.config())
    model.generation = checkpoint.generation
    # The weights last: what else is wrong with a folder, but for its tokenizer, shows before gigabytes are read.
    plain = {o: p for o, p in pieces.items() if p.name not in modules}
    model.stored_dtype = checkpoint.dtype or own_dtype([stored[piece.name] for piece in plain.values()])
    own = dtype or model.stored_dtype
    if to_generate:
        own = inference_dtype(config, own, device or torch.device("cpu"))
    kept = None if keep_dtypes else own
    fill_pieces(model, plain, checkpoint.read, stored, dtype=kept, device=device, share=share, mapped=True)
    place_ones(model, device=device, dtype=own)
    return model, own, {ours: piece for ours, piece in pieces.items() if ours not in plain}, quantized


def planned(checkpoint: ModelSource) -> tuple[Transformer, dict[str, TensorSlice]]:
    """The model of a checkpoint without its weights, on the meta device, and where the file has each of them.

    Names, dtypes and shapes are checked.
    """
    config, quantized = checkpoint.config, checkpoint.quantized
    seen, modules = (checkpoint.stored, {}) if quantized is None else (quantized.logical, quantized.modules)
    family = FAMILIES[config.family]
    pieces = _locate(config, family, seen, str(checkpoint.path))
    # Where others store a weight transposed, its quantized form is (out, in) all the same.
    pieces = {o: replace(p, transposed=False) if p.name in modules else p for o, p in pieces.items()}
    model = _skeleton(config)
    check_pieces(pieces, seen, model)
    check_constants(config, checkpoint.stored, checkpoint.read, str(checkpoint.path))
    known = {name: one for name, one in seen.items() if not name.startswith(family.unused(config))}
    warn_of_unused(known, pieces, config, checkpoint.path)
    warn_of_towers(checkpoint.towers, str(checkpoint.path))
    return model, pieces


def open_checkpoint(source: str | Path) -> ModelSource:
    """Open a folder, a GGUF file or a hub id, and check its headers. Raises as `load` does."""
    path = resolve_model(source)
    return open_gguf(path) if path.is_file() else open_folder(path)


def _from_transformers(module: nn.Module, dtype: torch.dtype | None, device: torch.device | None) -> Transformer:
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    if to_dict is None:
        raise ConfigError(f"hasten.load takes a folder, hub id or transformers model; found {type(module).__name__}")
    values = to_dict()
    family, config = family_of(values), read_config(values)
    where, given = type(module).__name__, module.state_dict()
    names, towers = text_tensors(values, given)
    tensors = {ours: given[name] for ours, name in names.items()}
    pieces = _locate(config, family, tensors, where)
    model = _skeleton(config)
    stored = {
        name: StoredTensor(name, NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), Path(where))
        for name, tensor in tensors.items()
    }
    check_pieces(pieces, stored, model)
    check_constants(config, stored, tensors.__getitem__, where)
    warn_of_towers(towers, where)
    fill_pieces(model, pieces, tensors.__getitem__, stored, dtype=dtype, device=device)
    place_ones(model, device=model.embedding.weight.device, dtype=model.embedding.weight.dtype)
    _finish(model, device)
    generation = getattr(module, "generation_config", None)
    if generation is not None:
        model.generation = generation.to_dict()
    return model


def _skeleton(config: ModelConfig) -> Transformer:
    with unfilled():
        return Transformer(config).eval()


def _locate(config: ModelConfig, family: Family, tensors: Mapping[str, Any], where: str) -> dict[str, TensorSlice]:
    """Find every parameter's piece under one of the layouts, or say which tensor the closest of them lacks."""
    most, missing = -1, ""
    for layout in layouts(family, config):
        pieces: dict[str, TensorSlice] = {}
        absent = "model.embed_tokens.weight"
        for ours, piece in layout:
            name = piece.name
            if name not in tensors:
                name = name.removeprefix(family.base)  # a checkpoint of the bare model, as GPT-2's on the hub
            if name not in tensors:
                if config.tie_embeddings and ours in ("head.weight", "embedding.weight"):
                    continue
                absent = piece.name
                break
            pieces[ours] = piece if name == piece.name else replace(piece, name=name)
        else:
            tied = pieces.get("embedding.weight") or pieces.get("head.weight")
            if tied is not None:  # of two tied weights a file may hold either
                return {"embedding.weight": tied} | pieces
        if len(pieces) > most:
            most, missing = len(pieces), absent
    packed = tensors.get(f"{missing}_packed")
    if isinstance(packed, StoredTensor):
        raise CheckpointError(
            f"{packed.file}: {packed.name:.100} is quantized, and config.json has no quantization_config that says "
            "how; download it again"
        )
    raise CheckpointError(
        f"{where}: the tensor {missing!r} is missing, which a {family.model_type} of {len(config.layers)} layers "
        f"(config.json) needs; {len(tensors)} tensors are there. Download the folder again, or correct config.json"
    )


def check_pieces(pieces: Mapping[str, TensorSlice], stored: Mapping[str, StoredTensor], model: Transformer) -> None:
    """Compare every tensor's dtype and shape with what the config asks for, before any is read."""
    for ours, piece in pieces.items():
        _check_piece(ours, piece, stored[piece.name], model)
    taken: Counter[str] = Counter()  # numbers of each stored tensor
    for piece, count in {piece: model.get_parameter(ours).numel() for ours, piece in pieces.items()}.items():
        taken[piece.name] += count  # a tied one once
    for name, count in taken.items():
        shape = stored[name].shape
        if count != math.prod(shape):
            raise CheckpointError(
                f"{stored[name].file}: {name} has shape {list(shape)}, {math.prod(shape):,} numbers; config.json asks "
                f"for {count:,} of them: one of the two belongs to another model"
            )


def _check_piece(ours: str, piece: TensorSlice, stored: StoredTensor, model: Transformer) -> None:
    if stored.dtype not in DTYPES:
        raise CheckpointError(
            f"{stored.file}: {stored.name} is stored as {stored.dtype!s:.20}; expected one of {', '.join(DTYPES)}: "
            "take a checkpoint that states its quantization_config, or the unquantized one"
        )
    expected = tuple(model.get_parameter(ours).shape)
    try:
        found: tuple[int, ...] = piece.of(torch.empty(stored.shape, device="meta")).shape
    except (IndexError, RuntimeError):
        found = ()  # there is no such part of it
    if found != expected:
        raise CheckpointError(
            f"{stored.file}: {stored.name} has shape {list(stored.shape)}; config.json asks for {list(expected)}"
            f"{'' if found == stored.shape else f' as a part of it ({ours})'}: one of the two belongs to another model"
        )


def own_dtype(stored: Iterable[StoredTensor]) -> torch.dtype:
    """The dtype that most of the checkpoint's bytes are in; bfloat16 where it has no plain tensor."""
    counts: Counter[str] = Counter()
    for tensor in stored:
        counts[tensor.dtype] += tensor.bytes
    return DTYPES[counts.most_common(1)[0][0]] if counts else torch.bfloat16


def fill_pieces(
    model: Transformer,
    pieces: Mapping[str, TensorSlice],
    read: Callable[[str], Tensor],
    stored: Mapping[str, StoredTensor],
    *,
    dtype: torch.dtype | None,
    device: torch.device | None,
    share: Share | None = None,
    mapped: bool = False,
) -> None:
    """Put every tensor, or a share of it, into the skeleton, converting one at a time where dtype or device differ.

    mapped: what is read are views of files, whose pages are released where the skeleton does not use them as they are.
    """
    if share is None and device is not None and device.type == "cuda":
        fill_uploaded(model, pieces, read, stored, dtype=dtype, device=device)
        return
    checked: set[str] = set()
    tied = pieces.get("head.weight") in (None, pieces.get("embedding.weight"))
    for ours, piece in pieces.items():
        whole = read(piece.name)
        cut = None if share is None else share.cut(ours)
        held = piece.of(whole)
        if cut is not None:
            held = cut.of(held)
            check_finite(piece.name, held, stored[piece.name].file)
        elif piece.name not in checked:  # a fused tensor once, not once for each of its parts
            check_finite(piece.name, whole, stored[piece.name].file)
            checked.add(piece.name)
        owner, _, leaf = ours.rpartition(".")
        parameter = nn.Parameter(held.to(device=device, dtype=kept_dtype(ours, dtype)))
        setattr(model.get_submodule(owner), leaf, parameter)
        copied = parameter.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        # A step reads single rows of a table that is only looked up.
        few_rows = ours == "token_features.embedding.weight" or (ours == "embedding.weight" and not tied)
        if mapped and (copied or few_rows):
            release_pages(whole)


def fill_uploaded(
    model: Transformer,
    pieces: Mapping[str, TensorSlice],
    read: Callable[[str], Tensor],
    stored: Mapping[str, StoredTensor],
    *,
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """Put every tensor into the skeleton, on a GPU: each goes there as it is stored, to be cut, converted and checked
    there. What holds NaN or infinity is found when all are there."""
    extremes: dict[str, Tensor] = {}
    parts: dict[str, list[str]] = {}  # of each stored tensor, which goes to the GPU once
    for ours, piece in pieces.items():
        parts.setdefault(piece.name, []).append(ours)
    with Upload(device) as upload:
        for name, places in parts.items():
            own = read(name)
            whole = upload(own) if own.device.type == "cpu" else own.to(device)
            if whole.numel():
                extremes[name] = torch.stack(whole.detach().aminmax())
            for ours in places:
                held = pieces[ours].of(whole).to(dtype=kept_dtype(ours, dtype))
                if whole is not own and held.numel() != whole.numel():
                    held = held.clone()  # memory of its own, aligned as kernels want it
                owner, _, leaf = ours.rpartition(".")
                setattr(model.get_submodule(owner), leaf, nn.Parameter(held))
    for name, found in extremes.items():
        if not torch.isfinite(found).all():
            check_finite(name, read(name), stored[name].file)


def tie(model: Transformer) -> None:
    """Make head and embedding one matrix where the config says so and the checkpoint does not contradict it."""
    if model.config.tie_embeddings and not {"head", "embedding"} & set(model.quantization or {}):
        head, embedding = model.head.weight, model.embedding.weight
        same = head.is_meta or head.data_ptr() == embedding.data_ptr()
        if same or (head.dtype == embedding.dtype and torch.equal(head, embedding)):
            model.head.weight = embedding


def _finish(model: Transformer, device: torch.device | None) -> None:
    """Tie head and embedding, and compute the rotary tables where the weights are."""
    tie(model)
    if device is not None:
        model.ropes.to(device)
