"""/v1/completions: https://platform.openai.com/docs/api-reference/completions"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import Field

from hasten.engine.request import Request, RequestOutput, TokenLogprob
from hasten.server.answers import ChoiceBuilder, Json, completion_logprobs, join_logprobs
from hasten.server.bodies import COMMON_NEUTRAL, Count, Neutral, Prompts, SamplingBody, Text
from hasten.server.build_request import Samples, build_request, check_limit, constraint_of, prompts_of, room
from hasten.server.documentation import ERRORS, STREAMED, Completion
from hasten.server.errors import ApiError
from hasten.server.service import Service, too_long
from hasten.server.structured import Grammar
from hasten.text.infill import MARKS, infill_ends, infill_marks, infill_prompt

DEFAULT_TOKENS = 16  # OpenAI's


class CompletionBody(SamplingBody):
    """A prompt, several, or their token ids; each gives n choices."""

    prompt: Prompts
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    suffix: Text | None = None  # what comes behind the answer; "" asks for nothing
    neutral: ClassVar[Neutral] = COMMON_NEUTRAL | {"prompt_embeds": ()}


def add_completions(router: APIRouter, service: Service) -> None:

    @router.post("/v1/completions", response_model=Completion, responses=ERRORS | STREAMED)
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        """Continue a prompt, or fill the gap between it and a suffix."""
        service.check_in(body, http)
        given = await completion_prompts(body, service)
        return await _Completions(service, body, given).respond(http)


async def completion_prompts(body: CompletionBody, service: Service) -> list[tuple[int, ...]]:
    """Token ids of each prompt; with a suffix those that ask for what is missing between the two.

    Then the body's `stop_token_ids` get what ends such a text.
    """
    if not body.suffix or body.prompt == []:
        return await prompts_of(body.prompt, service, param="prompt", add_special_tokens=body.add_special_tokens)
    for name, given in (("echo", body.echo), ("response_format", body.response_format)):
        if given:
            raise ApiError(f"{name} cannot be combined with suffix", param="suffix")
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not all(isinstance(text, str) for text in texts):
        raise ApiError("with a suffix the prompt is a text, or several, and no token ids", param="prompt")
    tokenizer = service.tokenizer
    if infill_marks(tokenizer) is None:
        raise ApiError(
            f"{service.model_name} cannot fill in between prompt and suffix: its tokenizer has none of "
            f"{', '.join(marks[0] for marks in MARKS)}",
            param="suffix",
        )
    ends = [id for id in infill_ends(tokenizer) if id < service.vocabulary]
    body.stop_token_ids = [*(body.stop_token_ids or ()), *ends]
    behind = await service.encode(body.suffix, add_special_tokens=False, param="suffix")
    if len(behind) > service.max_length:
        raise too_long(len(behind), service.max_length, param="suffix")
    prompts = []
    for text in texts:
        before = await service.encode(str(text), add_special_tokens=False)
        asked = infill_prompt(tokenizer, before, behind, begin=body.add_special_tokens is not False)
        prompts += await prompts_of(asked, service, param="prompt", add_special_tokens=False)
    return prompts


def completion_request(
    body: CompletionBody,
    service: Service,
    *,
    id: str,
    prompt: tuple[int, ...],
    samples: Samples,
    constraint: Grammar | None,
    default: int | None = DEFAULT_TOKENS,
) -> Request:
    """Build the engine's request to continue one prompt. default: the most tokens of a body that gives none."""
    wanted = None if body.max_tokens is None else max(1, body.max_tokens)
    return build_request(
        body,
        service,
        id=id,
        prompt=prompt,
        max_tokens=room(prompt, wanted, service, param="prompt", wanted_by="max_tokens", default=default),
        samples=samples,
        constraint=constraint,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


class _Completions(ChoiceBuilder[CompletionBody]):
    """n choices for each prompt."""

    kind = chunk_kind = "text_completion"

    def __init__(self, service: Service, body: CompletionBody, prompts: list[tuple[int, ...]]) -> None:
        super().__init__(service, body, prompts=len(prompts))
        self.prompts = prompts
        self.nothing = body.max_tokens == 0  # only the prompt is returned
        if self.nothing and not body.echo:
            raise ApiError("max_tokens is 0: without echo nothing would come back", param="max_tokens")
        check_limit("logprobs", body.logprobs or 0, service.settings.logprobs)
        self._offsets: dict[int, int] = {}  # by choice: characters sent so far, where the next token's text begins
        self._scores: dict[int, tuple[TokenLogprob | None, ...]] = {}  # the prompts' log-probabilities

    async def requests(self, name: str) -> list[Request]:
        body, service = self.body, self.service
        self.id = f"cmpl-{name}-{service.number()}"
        constraint = None if body.response_format is None else await constraint_of(body.response_format, service)
        return [
            completion_request(
                body,
                service,
                id=f"{self.id}-{index}",
                prompt=prompt,
                samples=self.samples,
                constraint=None if constraint is None else constraint.fork(),
            )
            for index, prompt in enumerate(self.prompts)
        ]

    def take(self, which: int, output: RequestOutput) -> list[Json]:
        index = which * self.n + output.index
        text, tokens, reason = output.text, list[TokenLogprob | None](output.logprobs or ()), output.finish_reason
        if self.nothing:
            text, tokens, reason = "", [], reason and "length"
        if self.body.echo:
            if output.prompt_logprobs is not None:
                self._scores[which] = output.prompt_logprobs
            if index not in self._offsets:
                text = self._prompt_text(which) + text
                tokens = [*self._scores.get(which, ()), *tokens]
        offset = self._offsets.setdefault(index, 0)
        part: Json = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        if self.body.logprobs is not None and tokens:
            texts = [self._text_of(which, place, token) for place, token in enumerate(tokens)]
            part["logprobs"] = completion_logprobs(tokens, texts=texts, offset=offset)
            self._offsets[index] += sum(map(len, texts))
        if output.stop_reason is not None:
            part["stop_reason"] = output.stop_reason
        return [part]

    def join(self, index: int, parts: list[Json]) -> Json:
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = join_logprobs(completion_logprobs([], texts=[], offset=0), parts)
        return {"index": index, "text": "".join(part["text"] for part in parts), "logprobs": logprobs}

    def _prompt_text(self, which: int) -> str:
        given: Any = self.body.prompt
        if isinstance(given, str):
            return given
        if isinstance(given[which], str):
            return str(given[which])
        return self.service.tokenizer.decode(self.prompts[which]) if self.service.has_tokenizer else ""

    def _text_of(self, which: int, place: int, token: TokenLogprob | None) -> str:
        if token is not None:
            return token.text
        return self.service.tokenizer.decode([self.prompts[which][place]], skip_special_tokens=False)
