"""/v1/rerank and /score: how well texts belong together, with the fields of Jina, Cohere and vLLM.

A decoder has two ways to say so, and its chat template decides which one is taken (`pairs_template`):
- "yes_no": the template writes a query and a document (messages of these roles, as vLLM's templates for rerankers do)
  and the model answers whether they belong together. The score is its probability of "yes" beside "no", 0 to 1.
- "cosine": any other model. The cosine of the two embeddings, -1 to 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import Field

from hasten.engine.params import LARGEST_BIAS, SamplingParams
from hasten.engine.request import Request
from hasten.errors import HastenError
from hasten.server.answers import Json, check_end, reply
from hasten.server.bodies import PROMPTS, ConversationPart, ModelBody, Neutral, Text, Texts
from hasten.server.build_request import check_limit, prompts_of, room
from hasten.server.documentation import ERRORS, Reranked, Scored
from hasten.server.embeddings import vectors_of
from hasten.server.errors import ApiError, from_library
from hasten.server.service import Service
from hasten.text.chat import ChatTemplate

Method = Literal["yes_no", "cosine"]
Pair = tuple[str, str]
_PROBE = ("zqquery", "zqdocument")


class DocumentText(ConversationPart):
    """A document as an object."""

    text: Text


class PairsBody(ModelBody):
    """Fields of both endpoints. pooling: of the embeddings, where the score is their cosine; mean by default."""

    pooling: Literal["mean", "last"] | None = None
    neutral: ClassVar[Neutral] = {"truncate_prompt_tokens": (), "priority": (0,), "mm_processor_kwargs": ()}


class RerankBody(PairsBody):
    """A query and documents, of which the `top_n` best are returned."""

    query: Text
    documents: Annotated[list[Text | DocumentText], Field(min_length=1, max_length=PROMPTS, fail_fast=True)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None  # true by default
    neutral: ClassVar[Neutral] = PairsBody.neutral | {
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
        "rank_fields": (["text"],),
    }


class ScoreBody(PairsBody):
    """One text beside each of several, or two lists of the same length, pair by pair."""

    text_1: Text | Texts
    text_2: Text | Texts


def add_rerank(router: APIRouter, service: Service) -> None:

    @router.post("/rerank", response_model=Reranked, responses=ERRORS)
    @router.post("/v1/rerank", response_model=Reranked, responses=ERRORS)
    async def rerank(body: RerankBody, http: HttpRequest) -> Response:
        """Sort documents by how well they belong to a query."""
        service.check_in(body, http)
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        scorer = await Scorer.of(body, service, http)
        scores = await scorer.scores([(body.query, text) for text in texts], params=("query", "documents"))
        best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
        results: list[Json] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if body.return_documents is not False:
            results = [result | {"document": {"text": texts[result["index"]]}} for result in results]
        return reply(scorer.facts("rerank") | {"results": results})

    @router.post("/score", response_model=Scored, responses=ERRORS)
    @router.post("/v1/score", response_model=Scored, responses=ERRORS)
    async def score(body: ScoreBody, http: HttpRequest) -> Response:
        """Score pairs of texts."""
        service.check_in(body, http)
        pairs = _pairs(body)
        scorer = await Scorer.of(body, service, http)
        scores = await scorer.scores(pairs, params=("text_1", "text_2"))
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        facts = {"object": "list", "created": int(time.time()), "data": data}
        return reply(scorer.facts("score") | facts)


class Scorer:
    """Scores the pairs of one HTTP request, and counts its tokens."""

    def __init__(self, body: PairsBody, service: Service, http: HttpRequest, answers: tuple[int, int] | None) -> None:
        self.body, self.service, self.http = body, service, http
        self.answers = answers  # token ids of yes and no
        self.method: Method = "cosine" if answers is None else "yes_no"
        self.tokens = 0
        if answers is not None and body.pooling is not None:
            raise ApiError("pooling: this model scores by its answer, not by embeddings", param="pooling")

    @classmethod
    async def of(cls, body: PairsBody, service: Service, http: HttpRequest) -> Scorer:
        """The scorer of a request, by the method that suits the model."""
        return cls(body, service, http, await service.in_thread(partial(answers_of, service)))

    async def scores(self, pairs: Sequence[Pair], *, params: tuple[str, str]) -> list[float]:
        """The scores of pairs, in order. params: the fields that hold the first and second texts, for errors."""
        check_limit(params[1], len(pairs), self.service.settings.choices)
        found = await (self._cosines(pairs, params) if self.answers is None else self._by_answer(pairs, params[1]))
        self.http.state.facts["prompt_tokens"] = self.tokens
        return found

    def facts(self, kind: str) -> Json:
        """What an answer says beside its scores."""
        usage = {"prompt_tokens": self.tokens, "total_tokens": self.tokens}
        name = f"{kind}-{self.http.state.request_id}"
        return {"id": name, "model": self.body.model, "method": self.method, "usage": usage}

    async def _cosines(self, pairs: Sequence[Pair], params: tuple[str, str]) -> list[float]:
        """The cosines of embeddings; each text is computed once."""
        service, special = self.service, self.body.add_special_tokens
        known: dict[str, int] = {}
        prompts: list[tuple[int, ...]] = []
        for pair in pairs:
            for text, param in zip(pair, params, strict=True):
                if text not in known:
                    known[text] = len(prompts)
                    prompts += await prompts_of(text, service, param=param, add_special_tokens=special)
        self.tokens = sum(map(len, prompts))
        vectors = await vectors_of(prompts, service, model=self.body.model, pooling=self.body.pooling or "mean")
        return [float(vectors[known[first]] @ vectors[known[second]]) for first, second in pairs]

    async def _by_answer(self, pairs: Sequence[Pair], param: str) -> list[float]:
        """The probabilities of yes beside no.

        The score of a token is known where it is drawn. So each pair is asked twice, with a bias that decides the
        draw; the second time its prompt is in the prefix cache.
        """
        assert self.answers is not None
        requests = []
        for pair in pairs:
            prompt = await self._prompt(pair, param)
            self.tokens += len(prompt)
            requests += [self._request(prompt, token) for token in self.answers]
        asked, found = {request.id: request for request in requests}, dict[str, float]()
        try:
            async with aclosing(self.service.engine.generate(*requests)) as outputs:
                async for output in outputs:
                    check_end(asked[output.request_id], output)
                    for token in output.logprobs or ():
                        found[output.request_id] = token.logprob
        except HastenError as error:
            raise from_library(error) from None
        values = [found[request.id] for request in requests]
        return [_share(yes, no) for yes, no in zip(values[::2], values[1::2], strict=True)]

    async def _prompt(self, pair: Pair, param: str) -> list[int]:
        service = self.service
        try:
            text = await service.in_thread(partial(_rendered, service.tokenizer.templates["default"], service, pair))
        except HastenError as error:
            raise ApiError(str(error)[:500], param=param, code="chat_template") from None
        ids = await service.encode(text, add_special_tokens=self.body.add_special_tokens is True, param=param)
        room(ids, 1, service, param=param, wanted_by=param, default=None)
        return ids

    def _request(self, prompt: list[int], token: int) -> Request:
        service = self.service
        params = SamplingParams(
            temperature=0.0, max_new_tokens=1, min_new_tokens=1, ignore_eos=True, logit_bias={token: LARGEST_BIAS}
        )
        return Request(
            id=f"score-{self.http.state.request_id}-{service.number()}",
            prompt=prompt,
            params=params,
            logprobs=0,
            adapter=service.check_model(self.body.model),
            timeout=service.settings.request_timeout,
            whole=True,
        )


def answers_of(service: Service) -> tuple[int, int] | None:
    """The token ids of yes and no of a model whose template writes a query and a document; None for any other."""
    if not service.has_tokenizer or not pairs_template(service.tokenizer.templates.get("default"), service):
        return None
    words = [service.tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    (yes, *more), (no, *others) = words
    return None if more or others else (yes, no)


def pairs_template(template: ChatTemplate | None, service: Service) -> bool:
    """Whether a chat template is one of pairs: it names both roles, and writes both of their texts."""
    source = "" if template is None else template.source
    if template is None or not all(f'"{role}"' in source or f"'{role}'" in source for role in ("query", "document")):
        return False
    try:
        text = _rendered(template, service, _PROBE)
    except HastenError:
        return False
    return all(word in text for word in _PROBE)


def _rendered(template: ChatTemplate, service: Service, pair: Pair) -> str:
    messages = [{"role": role, "content": text} for role, text in zip(("query", "document"), pair, strict=True)]
    special = service.tokenizer.special_tokens
    return template.render(messages, special_tokens=special, add_generation_prompt=True)


def _share(yes: float, no: float) -> float:
    """The probability of yes beside no, of their log-probabilities."""
    difference = yes - no
    small = math.exp(-abs(difference))
    return (1.0 if difference >= 0 else small) / (1.0 + small)


def _pairs(body: ScoreBody) -> list[Pair]:
    """The pairs that are asked for. Raises ApiError where the lists do not fit."""
    firsts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    seconds = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if not firsts or not seconds:
        name = "text_2" if firsts else "text_1"
        raise ApiError(f"{name} is empty: it needs at least one text", param=name)
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        message = f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}; give one, or as many as in text_2"
        raise ApiError(message, param="text_1")
    return list(zip(firsts, seconds, strict=True))
