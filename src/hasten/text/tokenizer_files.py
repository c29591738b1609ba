"""Reading the tokenizer files of a Hugging Face folder into what `Tokenizer` is made of.

The rules are those of transformers 5 (`TokenizersBackend`): tokenizer.json says how text becomes ids, BOS included;
tokenizer_config.json, special_tokens_map.json, generation_config.json and config.json say which ids are special.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from hasten.errors import CheckpointError
from hasten.machine import regular_files
from hasten.text.chat import ChatTemplate

# Ten times the largest published tokenizer.json: a file past this is not a tokenizer.
MAX_FILE_BYTES = 512 * 2**20

_VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "merges.txt")
_FOREIGN_FILES = ("tokenizer.model", "tekken.json", "tiktoken.model", "spiece.model")
_SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_TEMPLATE_FOLDER = "additional_chat_templates"
# Without tokenizer.json the split into words is known only by the class; these split as GPT-2 does.
_GPT2_CLASSES = (None, "GPT2Tokenizer", "PreTrainedTokenizer", "TokenizersBackend")
_GPT2_MODEL_TYPES = (None, "gpt2", "gpt_bigcode")


def read_parts(folder: Path) -> dict[str, Any] | None:
    """The fields of a folder's `Tokenizer`, None if it has none. Raises CheckpointError naming the file at fault."""
    has_json = (folder / "tokenizer.json").is_file()
    has_bpe = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    if not has_json and not has_bpe:
        foreign = next((name for name in _FOREIGN_FILES if (folder / name).is_file()), None)
        if foreign is None:
            return None
        raise CheckpointError(
            f"{folder / foreign}: this tokenizer format is not read directly; convert it once with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}), "
            "which writes tokenizer.json"
        )
    config = read_json(folder / "tokenizer_config.json")
    model_config = read_json(folder / "config.json")
    if has_json:
        backend = parse_backend(read_text(folder / "tokenizer.json"), where=folder / "tokenizer.json")
        _llama_spaces(backend, config=config, model_config=model_config)
    else:
        backend = _gpt2_layout(folder, config=config, model_config=model_config)
    settings = dict(config)
    if "added_tokens_decoder" not in config:  # where it is present, the config is the newer, complete account
        settings |= read_json(folder / "special_tokens_map.json")
    special = _named_tokens(settings, where=folder)
    if not has_json and backend.token_to_id("<|endoftext|>") is not None:
        special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", **special}
    add_tokens(backend, tokens=_added_tokens(folder, settings), special_tokens=special.values())
    finish_backend(backend)
    if not has_json:
        add_bos_eos(backend, special, settings)

    generation = read_json(folder / "generation_config.json")
    text_config = model_config.get("text_config")
    fall_backs = [generation, model_config, text_config if isinstance(text_config, dict) else {}]
    eos = token_ids(backend, special.get("eos_token")) + _ids(generation, "eos_token_id", folder)
    if not eos:
        eos = next((found for source in fall_backs if (found := _ids(source, "eos_token_id", folder))), ())

    def single(name: str) -> int | None:
        own = token_ids(backend, special.get(f"{name}_token"))
        candidates = [own, *(_ids(source, f"{name}_token_id", folder) for source in fall_backs)]
        return next((ids[0] for ids in candidates if ids), None)

    read = [*_VOCABULARY_FILES, *_SIDE_FILES, *_FOREIGN_FILES]
    extra = sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja"))
    return {
        "backend": backend,
        "special_tokens": special,
        "bos_id": single("bos"),
        "eos_ids": tuple(dict.fromkeys(eos)),
        "pad_id": single("pad"),
        "templates": _templates(folder, config, extra),
        "response_template": response if isinstance(response := config.get("response_template"), dict) else None,
        "source": folder,
        "files": (*(n for n in read if (folder / n).is_file()), *(f"{_TEMPLATE_FOLDER}/{p.name}" for p in extra)),
    }


def parse_backend(text: str, *, where: object) -> tokenizers.Tokenizer:
    """A `tokenizers.Tokenizer` from the text of a tokenizer.json. Raises CheckpointError naming `where`."""
    try:
        return tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        # The library answers malformed files with bare Exceptions, and with a panic that is no Exception at all.
        raise CheckpointError(
            f"{where}: not a tokenizer that can be read ({error}); download it again, or write it again with "
            "transformers' AutoTokenizer.save_pretrained"
        ) from error


def finish_backend(backend: tokenizers.Tokenizer) -> None:
    """Encode whole texts as they are: no truncation, no padding; and a post-processor, so that saving is idempotent."""
    backend.no_truncation()
    backend.no_padding()
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


def add_tokens(
    backend: tokenizers.Tokenizer, *, tokens: Iterable[AddedToken], special_tokens: Iterable[str] = ()
) -> None:
    """Add tokens that the config names; a special token is matched whole in text and skipped in decoding."""
    backend.add_tokens(list(tokens))
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([AddedToken(t, special=True) for t in dict.fromkeys(special_tokens) if t not in known])


def token_ids(backend: tokenizers.Tokenizer, token: str | None) -> tuple[int, ...]:
    """The id of a token as a tuple of one, or the empty tuple if there is no such token."""
    found = None if token is None else backend.token_to_id(token)
    return () if found is None else (found,)


def read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path}: {size:,} bytes is too large for a tokenizer ({MAX_FILE_BYTES:,} at most)")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if the file does not exist. Raises CheckpointError naming the file."""
    return regular_files.read_json(path, limit=MAX_FILE_BYTES) if path.is_file() else {}


def _named_tokens(settings: Mapping[str, Any], *, where: Path) -> dict[str, str]:
    """bos_token, eos_token, ... and a model's own names (image_token) to their text."""
    named = {}
    for key, value in settings.items():
        if not key.endswith("_token") or value is None or isinstance(value, bool):
            continue
        text = value.get("content") if isinstance(value, Mapping) else value
        if not isinstance(text, str) or not text:
            raise CheckpointError(f"{where / 'tokenizer_config.json'}: {key} should be text, found {value!r:.80}")
        named[key] = text
    return named


def _added_tokens(folder: Path, settings: Mapping[str, Any]) -> Iterator[AddedToken]:
    table = settings.get("added_tokens_decoder") or {}
    where = folder / "tokenizer_config.json"
    try:
        for _, token in sorted(table.items(), key=lambda item: int(item[0])):
            yield _added_token(token)
        extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
        for token in extra.values() if isinstance(extra, dict) else extra:
            yield _added_token({"content": token, "special": True} if isinstance(token, str) else token)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{where}: its table of added tokens is malformed ({error})") from error
    if "added_tokens_decoder" not in settings:
        legacy = read_json(folder / "added_tokens.json")
        special = set(_named_tokens(settings, where=folder).values())
        if any(type(position) is not int for position in legacy.values()):
            raise CheckpointError(f"{folder / 'added_tokens.json'}: expected token: id")
        for text, _ in sorted(legacy.items(), key=lambda item: item[1]):
            yield AddedToken(text, normalized=text not in special, special=text in special)


def _added_token(fields: Mapping[str, Any]) -> AddedToken:
    flags = {k: bool(fields[k]) for k in ("lstrip", "rstrip", "single_word", "normalized", "special") if k in fields}
    return AddedToken(fields["content"], **flags)


def _ids(source: Mapping[str, Any], key: str, folder: Path) -> tuple[int, ...]:
    value = source.get(key)
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if not all(type(v) is int and v >= 0 for v in values):
        raise CheckpointError(f"{folder}: {key} should be a token id or a list of them, found {value!r:.80}")
    return tuple(values)


def _templates(folder: Path, config: Mapping[str, Any], extra: list[Path]) -> dict[str, ChatTemplate]:
    """Template by name. A chat_template.jinja beside the config is the newer layout and wins."""
    single = folder / "chat_template.jinja"
    if single.is_file() or extra:
        files = ([("default", single)] if single.is_file() else []) + [(path.stem, path) for path in extra]
        return {name: ChatTemplate(read_text(path), origin=str(path)) for name, path in files}
    where, value = str(folder / "tokenizer_config.json"), config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": ChatTemplate(value, origin=where)}
    if isinstance(value, list) and all(
        isinstance(v, dict) and isinstance(v.get("name"), str) and isinstance(v.get("template"), str) for v in value
    ):
        return {v["name"]: ChatTemplate(v["template"], origin=where) for v in value}
    raise CheckpointError(f"{where}: chat_template should be text or a list of {{name, template}}, found {value!r:.80}")


def _gpt2_layout(folder: Path, *, config: Mapping[str, Any], model_config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """vocab.json + merges.txt: byte-level BPE with GPT-2's split into words (Radford et al. 2019)."""
    declared = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    class_name = declared.removesuffix("Fast") if isinstance(declared, str) else None
    model_type = model_config.get("model_type")
    if class_name not in _GPT2_CLASSES or (class_name != "GPT2Tokenizer" and model_type not in _GPT2_MODEL_TYPES):
        raise CheckpointError(
            f"{folder}: vocab.json and merges.txt alone do not say how {declared or model_type} splits words; convert "
            f"once with transformers: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}), "
            "which writes tokenizer.json"
        )
    vocabulary = read_json(folder / "vocab.json")
    if not vocabulary or any(type(v) is not int or not 0 <= v < 2**32 for v in vocabulary.values()):
        raise CheckpointError(f"{folder / 'vocab.json'}: expected an object of token: id")
    merges = []
    for number, line in enumerate(read_text(folder / "merges.txt").splitlines(), start=1):
        if not line.strip() or line.startswith("#version"):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise CheckpointError(f"{folder / 'merges.txt'}: line {number} is {line!r:.60}, expected two tokens")
        merges.append((pair[0], pair[1]))
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:
        raise CheckpointError(f"{folder / 'merges.txt'}: does not fit vocab.json ({error})") from error
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    return backend


def _llama_spaces(backend: tokenizers.Tokenizer, *, config: Mapping[str, Any], model_config: Mapping[str, Any]) -> None:
    """The class LlamaTokenizer puts its leading space before the text only, whatever its tokenizer.json says.

    Llama 2's own file puts one after every special token too, which transformers 5 overrides for this class (unless
    `legacy` is set), so that a chat of many turns is encoded as the model was trained. Byte-level files (Llama 3) and
    the model types for which transformers takes the file at its word are left alone.
    """
    declared = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    class_says = declared in ("LlamaTokenizer", "LlamaTokenizerFast")
    if not class_says or model_config.get("model_type") not in (None, "llama"):
        return
    if not isinstance(backend.model, models.BPE) or "ByteLevel" in str(backend.pre_tokenizer):
        return
    prefix = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if prefix else "never"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)


def add_bos_eos(backend: tokenizers.Tokenizer, special: Mapping[str, str], settings: Mapping[str, Any]) -> None:
    """add_bos_token / add_eos_token, which count only where no tokenizer.json says it."""
    single, used = "$A:0", []
    for name, before in (("bos", True), ("eos", False)):
        token = special.get(f"{name}_token")
        if token is None or not settings.get(f"add_{name}_token"):
            continue
        single = f"{token}:0 {single}" if before else f"{single} {token}:0"
        used.append((token, token_ids(backend, token)[0]))
    if used:
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} $B:1", special_tokens=used
        )
