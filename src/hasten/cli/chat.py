"""`hasten chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.cli.options import (
    CacheOptions,
    DraftOptions,
    ModelOptions,
    RankOptions,
    SamplingOptions,
    with_chat_template,
)
from hasten.errors import ConfigError

if TYPE_CHECKING:
    from hasten.model.transformer import Transformer

HELP = "/clear forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


@dataclass(frozen=True, kw_only=True)
class ChatInTerminal(SamplingOptions, DraftOptions, CacheOptions, RankOptions, ModelOptions):
    """Talk to a model that has a chat template. Ctrl-C stops the answer (of several ranks the chat), Ctrl-D leaves."""

    system: str | None = None
    """A system message to begin with."""
    template: Path | None = None
    """A file with a chat template (Jinja), where the folder has none or another is wanted."""

    chat_template_kwargs: str | None = None
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'."""

    def run(self) -> None:
        from hasten.text.chat import parse_template_kwargs

        variables = parse_template_kwargs(self.chat_template_kwargs, option="--chat-template-kwargs")
        model = self.load()
        from hasten.engine.chat import Chat
        from hasten.engine.generate import Timing

        if self.template is not None and model.tokenizer is not None:
            model.tokenizer = with_chat_template(model.tokenizer, self.template, option="--template")
        params = self.params(model.generation)
        chat = Chat(
            model,
            system=self.system,
            kv_cache_dtype=self.kv_cache_dtype,
            chat_template_kwargs=variables,
            **self.drafting(model),
        )
        print(HELP, file=sys.stderr)
        while True:
            text = next_line(model)
            if text is None:
                return
            if text.strip() in ("/exit", "/quit"):
                return
            if text.strip() == "/clear":
                chat.clear()
                continue
            if not text.strip():
                continue
            timing = Timing()
            answer = chat.say(text, params, timing=timing)
            try:
                for piece in answer:
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                answer.close()
                print(" [stopped]", end="")
            except ConfigError as error:
                hint = "; /clear starts a new conversation" if len(chat.messages) > 1 else ""
                print(f"error: {error}{hint}", file=sys.stderr)
                continue
            print()
            if not self.verbose:
                continue
            print(
                f"[{timing.prefill_tokens} new prompt tokens, {chat.reused} from the cache, "
                f"{timing.decode_tokens_per_second:.1f} tokens/s]",
                file=sys.stderr,
            )
            if chat.drafts is not None:
                print(f"so far {chat.drafts}", file=sys.stderr)


def next_line(model: Transformer) -> str | None:
    """The user's next line, None at the end of the input; of several ranks the first one reads it for all."""
    from hasten.model.sharded import ShardedTransformer, broadcast_from_rank0

    if isinstance(model, ShardedTransformer) and model.group.rank:
        line: list[int] = []
    else:
        line = _read_line()
    ((*found,),) = broadcast_from_rank0(model, [line])
    return bytes(found[1:]).decode() if found else None


def _read_line() -> list[int]:
    """A line of standard input, as 1 and its UTF-8 bytes; nothing at the end."""
    while True:
        try:
            return [1, *input("> " if sys.stdin.isatty() else "").encode()]
        except EOFError:
            return []
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
