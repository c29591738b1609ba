"""`hasten generate`: continue one prompt as a stream, or several as a batch."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from hasten.cli.options import CacheOptions, DraftOptions, JsonOption, ModelOptions, RankOptions, SamplingOptions
from hasten.effects import Holds, Needs, Unless
from hasten.errors import ConfigError

if TYPE_CHECKING:
    from hasten.engine.generate import Generation


@dataclass(frozen=True, kw_only=True)
class Generate(JsonOption, SamplingOptions, DraftOptions, CacheOptions, RankOptions, ModelOptions):
    """Continue a prompt, or several at once."""

    prompt: tuple[str, ...] = ()
    """One or more texts; "-" reads one from standard input."""
    prompt_ids: tuple[int, ...] = ()
    """A prompt as token ids instead, for a folder without a tokenizer."""
    chat: Annotated[bool, Unless("prompt_ids")] = False
    """Take each prompt as a user's message and answer it, in the model's chat template."""
    chat_template_kwargs: Annotated[str | None, Needs("chat")] = None
    """With --chat: variables of the chat template as a JSON object, such as '{"enable_thinking": false}'."""
    compile: bool = False
    """Compile the model's blocks first (some seconds), for long answers; blocks fused for a GPU need no compiling."""

    EFFECTS: ClassVar = {
        "speculate": Holds("drafts", "with --compile and --draft auto, which drafts nothing; give --draft suffix")
    }

    @property
    def drafts(self) -> bool:
        """Whether anything may draft: compiled blocks are compiled again for each number of rows."""
        return self.draft != "none" and not (self.compile and self.draft == "auto")

    def run(self) -> None:
        from hasten.text.chat import parse_template_kwargs

        if bool(self.prompt) == bool(self.prompt_ids):
            raise ConfigError("give one of --prompt TEXT and --prompt-ids ID …, and not both")
        variables = parse_template_kwargs(self.chat_template_kwargs, option="--chat-template-kwargs")
        texts = [_standard_input() if text == "-" else text for text in self.prompt]
        prompts: list[Any] = [list(self.prompt_ids)] if self.prompt_ids else texts
        from hasten.machine import resolve_device

        # Compiled blocks are PyTorch's path; the fused ones are the other. On a GPU those come first.
        readable = self.compile and resolve_device(self.device).type == "cpu"
        model = (replace(self, fuse=False) if readable else self).load()
        from hasten.engine.generate import Generation, Timing
        from hasten.engine.speculation import make_speculator

        if self.chat:
            if model.tokenizer is None:
                raise ConfigError("this model's folder has no tokenizer; --chat needs one")
            turns = [[{"role": "user", "content": text}] for text in texts]
            prompts = [model.tokenizer.encode_chat(turn, chat_template_kwargs=variables) for turn in turns]
        params = self.params(model.generation)
        options = self if self.drafts else replace(self, draft="none")  # compiled blocks draft nothing
        speculator = make_speculator(model, **options.drafting(model))
        if self.compile:
            from hasten.engine.compiled import compile_blocks
            from hasten.model.fused import CudaStack

            if isinstance(model.stack, CudaStack):
                raise ConfigError("--compile has no effect on blocks fused for a GPU; leave it out, or give --no-fuse")

            compile_blocks(model)
        timing = Timing()
        show = self.json != "-"
        streamed = show and len(prompts) == 1
        run = Generation(
            model,
            prompts,
            params,
            compiled=self.compile,
            kv_cache_dtype=self.kv_cache_dtype,
            timing=timing,
            speculator=speculator,
            gathered=not streamed,
        )
        if streamed:
            print(*([] if self.chat else texts), end="", flush=True)
        results = _run(run, stream=streamed, ids=model.tokenizer is None)
        if show and len(prompts) > 1:
            for text, result in zip(texts, results, strict=True):
                print(f"--- {text!r}\n{'' if self.chat else text}{result['text']}")
        speeds: dict[str, Any] = {
            "prefill_tokens_per_second": timing.prefill_tokens_per_second,
            "decode_tokens_per_second": timing.decode_tokens_per_second,
            "time_to_first_token_seconds": timing.first_token,
        }
        if speculator is not None:
            speeds["speculation"] = speculator.stats.to_json()
        if show:
            decode = timing.decode_tokens_per_second
            print(
                f"\n[{timing.prefill_tokens} prompt tokens at {timing.prefill_tokens_per_second:.1f}/s, "
                f"{sum(len(r['tokens']) for r in results)} new{f' at {decode:.1f}/s' if decode else ''}, "
                f"first after {timing.first_token:.2f} s]",
                file=sys.stderr,
            )
        # What drafts by themselves (auto) and finds nothing has nothing to say.
        if show and speculator is not None and (speculator.stats.draft_tokens or self.draft != "auto"):
            print(speculator.stats, file=sys.stderr)
        self.write((results[0] if len(results) == 1 else {"outputs": results}) | speeds)
        if any(result["finish_reason"] == "interrupted" for result in results):
            raise KeyboardInterrupt  # the status says it too, and no other rank waits for the next step


def _standard_input() -> str:
    """The prompt from standard input. Raises ConfigError where nothing came: most often the wrong pipe."""
    text = sys.stdin.read()
    if not text:
        raise ConfigError('standard input is empty, from which --prompt "-" reads; --prompt "" begins with nothing')
    return text


def _run(run: Generation, *, stream: bool, ids: bool) -> list[dict[str, Any]]:
    """Generate to the end, or to Ctrl-C; what there is then is still shown, counted and written."""
    interrupted = False
    try:
        for step in run:
            for output in step if stream else ():
                said = "".join(f"{token} " for token in output.tokens) if ids else output.text
                print(said, end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    if stream:
        print()
    results = [asdict(result) for result in run.results()]
    for row in run.unfinished if interrupted else ():
        results[row]["finish_reason"] = "interrupted"
    return results
