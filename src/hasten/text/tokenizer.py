"""Text to token ids and back, with the `tokenizers` library: no transformers at run time.

A folder's own tokenizer.json decides how text is split, and equals what transformers' `AutoTokenizer` gives on the same
folder; this file adds which ids begin and end a text, the chat template, and saving.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from hasten.errors import CheckpointError, ConfigError, DataError
from hasten.machine.files import write_atomically
from hasten.text.chat import ChatTemplate
from hasten.text.tokenizer_files import add_tokens, finish_backend, parse_backend, read_parts, token_ids


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """A tokenizer with its special tokens and its chat template. Make one with `from_folder` or `from_tokenizers`.

    bos_id: the id that begins a text, if the model has one (whether `encode` puts it there is the backend's matter).
    eos_ids: every id that ends a generation, the tokenizer's own first, then those of generation_config.json.
    special_tokens: name to text ("bos_token", "eos_token", ...), what a chat template sees.
    templates: chat template by name; "default" is the usual one, "tool_use" is taken where tools are given.
    response_template: the folder's declaration of how answers are written, if it has one.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    special_tokens: Mapping[str, str]
    templates: Mapping[str, ChatTemplate] = field(default_factory=dict, repr=False)
    response_template: Mapping[str, Any] | None = field(default=None, repr=False)
    source: Path | None = None  # the folder it came from, whose files `save` copies
    files: tuple[str, ...] = ()  # their names in that folder
    replaced_template: bool = False  # the chat template is not the folder's own: `save` must write it

    # -- making one ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> "Tokenizer | None":
        """The tokenizer of a Hugging Face folder, or None if the folder has no tokenizer files.

        Reads tokenizer.json, else vocab.json + merges.txt (GPT-2 layout). Raises CheckpointError naming the file for
        a malformed one, and for a sentencepiece or tekken file alone (it says how to convert).
        """
        fields = read_parts(Path(folder))
        return None if fields is None else cls(**fields)

    @classmethod
    def from_tokenizers(
        cls,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        chat_template: str | None = None,
    ) -> "Tokenizer":
        """From a `tokenizers.Tokenizer` (freshly trained, say), which is copied; the tokens must be in it."""
        own = parse_backend(backend.to_str(), where="the given tokenizers.Tokenizer")
        named = {"bos_token": bos_token, "eos_token": eos_token, "pad_token": pad_token}
        special = {name: token for name, token in named.items() if token is not None}
        for name, token in special.items():
            if own.token_to_id(token) is None:
                raise ConfigError(f"{name} {token!r} is not in the tokenizer's vocabulary; add it before training it")
        add_tokens(own, tokens=(), special_tokens=special.values())
        finish_backend(own)
        return cls(
            backend=own,
            bos_id=next(iter(token_ids(own, bos_token)), None),
            eos_ids=token_ids(own, eos_token),
            pad_id=next(iter(token_ids(own, pad_token)), None),
            special_tokens=special,
            templates={} if chat_template is None else {"default": ChatTemplate(chat_template, origin="argument")},
        )

    def with_chat_template(self, template: str, *, origin: str = "argument") -> "Tokenizer":
        """The same tokenizer with another chat template (Jinja text); `origin` is what errors name."""
        templates = {"default": ChatTemplate(template, origin=origin)}
        return dataclasses.replace(self, templates=templates, response_template=None, replaced_template=True)

    # -- what it is ---------------------------------------------------------------------------------------------------

    @cached_property
    def vocab_size(self) -> int:
        """Highest id + 1, added tokens included: the least number of rows an embedding must have."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template, if there is one."""
        template = self.templates.get("default")
        return None if template is None else template.source

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that decides how text becomes ids and where a text begins and ends.

        The chat template is left out: token shards made from plain text stay valid when it is edited.
        """
        identity = [self.backend.to_str(), self.bos_id, self.eos_ids, self.pad_id]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    # -- text and ids -------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. add_special_tokens: what the tokenizer puts around a text (often BOS, never a chat's turns).

        Special tokens written out in the text become their ids, as in transformers.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # does not say what is wrong with the text
            _check_text(text)
            raise

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of many texts, in parallel on the library's threads."""
        texts = list(texts)
        try:
            return [e.ids for e in self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        except TypeError:
            for text in texts:
                _check_text(text)
            raise

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Ids outside the vocabulary (padding of the embedding) give nothing.

        Bytes that are not UTF-8 come out as U+FFFD. Spaces are left as they are (no clean-up).
        """
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    # -- chat ---------------------------------------------------------------------------------------------------------

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Messages ({"role", "content"}, in order) as the text the model was trained on.

        tools: JSON schemas, where the template knows what to do with them. The other options are those of
        `ChatTemplate.render`. Raises ConfigError where there is no template or the messages do not suit it,
        CheckpointError where the template is at fault.
        """
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        template = self.templates.get(name)
        if template is None and self.templates:
            raise ConfigError(
                f"the model has chat templates named {', '.join(sorted(self.templates))} and none named 'default'; "
                "pass one of them as a template file"
            )
        if template is None:
            raise ConfigError(
                "the model has no chat template (a base model has none); use `hasten generate` without --chat, or "
                "give one: `hasten chat --template FILE`, `hasten serve --chat-template FILE`"
            )
        return template.render(
            messages,
            special_tokens=self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of `render_chat`. Nothing is put around them: the template itself writes BOS where it belongs."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the tokenizer's files so that transformers' AutoTokenizer loads the folder and encodes the same.

        A tokenizer that came from a folder is copied file by file, unchanged. Each file is written under a temporary
        name and renamed. Raises CheckpointError.
        """
        target = Path(folder)
        contents = self._original_files() if self.source is not None else self._own_files()
        if self.replaced_template and self.chat_template is not None:
            contents["chat_template.jinja"] = self.chat_template.encode()  # this file wins over the config's entry
        try:
            for name, data in contents.items():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target / name, data)
        except OSError as error:
            raise CheckpointError(f"{target}: the tokenizer cannot be written ({error.strerror})") from error

    def _original_files(self) -> dict[str, bytes]:
        assert self.source is not None
        try:
            return {name: (self.source / name).read_bytes() for name in self.files}
        except OSError as error:
            raise CheckpointError(
                f"{self.source}: a tokenizer file that was there at loading cannot be copied ({error})"
            ) from error

    def _own_files(self) -> dict[str, bytes]:
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= dict(self.special_tokens)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        files = {
            "tokenizer.json": self.backend.to_str(pretty=True).encode(),
            "tokenizer_config.json": (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
        }
        if len(self.eos_ids) > 1:  # the others have no place in the tokenizer's own files
            files["generation_config.json"] = (json.dumps({"eos_token_id": self.eos_ids}) + "\n").encode()
        return files


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise DataError(f"expected text to tokenize, found {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text has half a surrogate pair at character {error.start}, which is not Unicode text; "
            "clean it, for example with text.encode('utf-8', 'replace').decode()"
        ) from error
