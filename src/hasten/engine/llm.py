"""`hasten.LLM`: many prompts at once in process, with the engine that the server uses."""

from __future__ import annotations

import itertools
import queue
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hasten.checkpoints.adapters import load_adapters
from hasten.engine.async_engine import AsyncEngine
from hasten.engine.engine import Engine
from hasten.engine.params import SamplingParams
from hasten.engine.prompts import Prompt, encode_prompts, params_of
from hasten.engine.request import EngineFailed, FinishReason, QueueFull, Request, RequestOutput, TokenLogprob
from hasten.engine.settings import EngineSettings, Stats
from hasten.engine.speculation import Accept, make_speculator
from hasten.errors import ConfigError
from hasten.model.fused import fuse_where_it_fits
from hasten.model.transformer import Transformer
from hasten.text.chat import plain_messages
from hasten.text.tokenizer import Tokenizer

SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)}
DRAFT_TOKENS = 1 << 16  # of all sequences of an engine, for which a draft model keeps keys and values


def make_engine(
    model: Transformer,
    tokenizer: Tokenizer | None,
    settings: EngineSettings,
    *,
    adapters: Mapping[str, str | Path] | None = None,
    draft: str | Path | Transformer = "none",
    secret: bytes | None = None,
    **drafting: Any,
) -> Engine:
    """The engine of a loaded model, with its adapters (folders by their names) and what drafts for it."""
    if adapters:
        load_adapters(model, list(adapters.values()))
    speculator = make_speculator(model, draft, **drafting, tokens=DRAFT_TOKENS)
    return Engine(model, tokenizer, settings, speculator=speculator, adapters=list(adapters or ()), secret=secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the texts of a prompt. tokens include the one that ended it (an end-of-text id), text does not."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    logprobs: list[TokenLogprob] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one prompt: its texts, the best first where they were ranked."""

    completions: list[CompletionOutput]
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[TokenLogprob | None] | None

    @property
    def text(self) -> str:
        """The first text."""
        return self.completions[0].text

    @property
    def tokens(self) -> list[int]:
        return self.completions[0].tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.completions[0].finish_reason


class LLM:
    """A model that continues many prompts together: paged cache, continuous batching, sharing.

        llm = hasten.LLM("folder-or-hub-id")
        answers = llm.generate(["Once upon", "In the end"], hasten.SamplingParams(temperature=0))

    The first use starts a thread that runs the engine. The methods with an `a` in front are for event loops. As many
    may be awaited at once as `queue_limit` allows; further ones raise QueueFull (`generate` holds its prompts back by
    itself).
    """

    def __init__(
        self,
        model: Transformer | str | Path,
        settings: EngineSettings | None = None,
        *,
        dtype: str | None = None,
        device: str | None = None,
        draft: str | Path | Transformer = "none",
        speculate: int | None = None,
        accept: Accept = "exact",
        adapters: Mapping[str, str | Path] | None = None,
        **more: Any,
    ) -> None:
        """model: a loaded one, or a folder or hub id, which is loaded (on the CPU and in the dtype that `hasten.load`
        chooses, unless `device` and `dtype` say otherwise). It is fused where it can be. settings, or single fields of
        `EngineSettings` by keyword. draft, speculate, accept: what proposes tokens, for the same texts sooner
        (`hasten.generate`). adapters: LoRA folders by the names that requests give (`adapter="name"`). Raises
        ConfigError.
        """
        if more:
            if settings is not None:
                raise ConfigError(f"settings and {', '.join(more)} were given; give one or the other")
            try:
                settings = EngineSettings(**more)
            except TypeError as error:
                raise ConfigError(f"unknown setting of the engine: {error}") from None
        if isinstance(model, str | Path):
            from hasten.checkpoints.load import load

            model = load(model, dtype=dtype, device=device or "cpu")
        elif dtype is not None or device is not None:
            raise ConfigError("dtype and device are for a model that is loaded here; this one has its own")
        self.model = model = fuse_where_it_fits(model)
        how: dict[str, Any] = {"adapters": adapters, "draft": draft, "speculate": speculate, "accept": accept}
        self.engine = make_engine(model, model.tokenizer, settings or EngineSettings(), **how)
        self._numbers = itertools.count()
        self._async: AsyncEngine | None = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **request: Any,
    ) -> list[Answer]:
        """Continue all prompts; the answers come in their order.

        params: for all, or one for each prompt. request: fields of `Request` for all of them (n, best_of, beam_width,
        logprobs, …), and single fields of `SamplingParams` (temperature=0, max_new_tokens=100, …), as in
        `hasten.generate`. Raises RequestRefused before anything is computed, EngineFailed when a step failed.
        """
        requests = self._requests(prompts, params, {"gathered": True} | request)
        outputs: dict[str, list[RequestOutput]] = {one.id: [] for one in requests}
        for output in self._run(requests):
            outputs[output.request_id].append(output)
        return [_answer(one, outputs[one.id]) for one in requests]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **request: Any,
    ) -> list[Answer]:
        """Answer one conversation, or several; one Answer for each, in their order.

        messages: {"role", "content"} mappings as in OpenAI's API. add_generation_prompt: begin a new turn, as by
        default unless continue_final_message goes on with the last one. tools, chat_template_kwargs: what the model's
        chat template gets. params, request, errors: as in `generate`; ConfigError where the template cannot render the
        messages.
        """
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise ConfigError("this model's folder has no tokenizer; a chat needs one")
        one = isinstance(messages, Mapping) or any(isinstance(message, Mapping) for message in messages)
        conversations: Any = [messages] if one else messages
        prompted = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        prompts = [
            tokenizer.encode_chat(
                plain_messages(conversation),
                add_generation_prompt=prompted,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, params, **request)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **request: Any) -> Iterator[RequestOutput]:
        """The parts of one prompt's texts as they come (`output.text`, and `output.index` where n > 1)."""
        yield from self._run([self._request(prompt, params, request)])

    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None, **request: Any) -> Answer:
        """`generate` of one prompt; many at once by asyncio.gather."""
        one = self._request(prompt, params, {"gathered": True} | request)
        return _answer(one, [output async for output in self._started().generate(one)])

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **request: Any
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for event loops; closing it gives the request up."""
        one = self._request(prompt, params, request)
        async with aclosing(self._started().generate(one)) as outputs:
            async for output in outputs:
                yield output

    def stats(self) -> Stats:
        return self.engine.stats()

    def close(self) -> None:
        """Let the cache (and the thread, if there is one) go. May be called again."""
        if self._async is not None:
            self._async.thread.close()
        self.engine.close()

    def _started(self) -> AsyncEngine:
        if self._async is None:
            self.engine.check_open()
            self._async = AsyncEngine(self.engine)
            weakref.finalize(self, self._async.thread.close)  # the thread must not keep the cache of a forgotten LLM
        return self._async

    def _requests(self, prompts: Any, params: Any, request: dict[str, Any]) -> list[Request]:
        encoded = encode_prompts(self.model, prompts)
        sampling = {name: request.pop(name) for name in SAMPLING_FIELDS & request.keys()}
        rows = params_of(params, prompts=len(encoded), **sampling)
        try:
            return [
                Request(id=f"llm-{next(self._numbers)}", prompt=tuple(ids), params=row, **request)
                for ids, row in zip(encoded, rows, strict=True)
            ]
        except TypeError as error:
            raise ConfigError(f"unknown setting of a request: {error}") from None

    def _request(self, prompt: Any, params: Any, request: dict[str, Any]) -> Request:
        requests = self._requests(prompt, params, request)
        if len(requests) != 1:
            raise ConfigError(f"this takes one prompt, found {len(requests)}; use generate for several")
        return requests[0]

    def _run(self, requests: list[Request]) -> Iterator[RequestOutput]:
        """The outputs of the requests as they come; what is left of them is given up when the caller stops."""
        thread = self._started().thread
        # All of them before any is computed; the order of the list is that of the prompts, the next at its end.
        waiting = [self.engine.admit(one) for one in reversed(requests)]
        unfinished = {one.id for one in requests}
        arrived: queue.SimpleQueue[list[RequestOutput | Exception]] = queue.SimpleQueue()
        sink = arrived.put
        try:
            while unfinished:
                with suppress(QueueFull):
                    while waiting:  # as many at once as there is room for, so that they share steps from the first on
                        free = max(1, self.engine.settings.queue_limit - thread.waiting)
                        thread.submit(waiting[: -free - 1 : -1], sink)
                        del waiting[-free:]
                try:  # where others fill the queue, nothing of ours may come before there is room
                    outputs = arrived.get(timeout=0.01 if waiting else None)
                except queue.Empty:
                    continue
                for output in outputs:
                    if isinstance(output, Exception):
                        raise output
                    if output.finish_reason == "error" and self.engine.error is not None:
                        raise EngineFailed(f"the engine failed: {self.engine.error}")
                    if output.finished:
                        unfinished.remove(output.request_id)
                    yield output
        finally:
            if unfinished:
                for request_id in unfinished:
                    thread.abort(request_id, sink)
                with suppress(EngineFailed):  # the blocks are free when this returns
                    thread.ask(lambda: None).result()


def _answer(request: Request, outputs: Sequence[RequestOutput]) -> Answer:
    """All outputs of a request put together."""
    texts: list[list[RequestOutput]] = [[] for _ in range(request.n)]
    for output in outputs:
        texts[output.index].append(output)
    first = outputs[0]
    return Answer(
        completions=[_completion(request, own) for own in texts],
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        prompt_logprobs=None if first.prompt_logprobs is None else list(first.prompt_logprobs),
    )


def _completion(request: Request, outputs: Sequence[RequestOutput]) -> CompletionOutput:
    logprobs = [token for output in outputs for token in output.logprobs or ()]
    return CompletionOutput(
        text="".join(output.text for output in outputs),
        tokens=[token for output in outputs for token in output.tokens],
        finish_reason=outputs[-1].finish_reason,
        stop_reason=outputs[-1].stop_reason,
        logprobs=None if request.logprobs is None else logprobs,
    )
