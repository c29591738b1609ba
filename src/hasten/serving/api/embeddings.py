"""/v1/embeddings: the mean, or the last, of the final hidden states of a text's tokens."""

from __future__ import annotations

import base64
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from pydantic import Field

from hasten.errors import HastenError
from hasten.serving.api.asking import check_ids
from hasten.serving.api.documentation import ERRORS
from hasten.serving.api.documentation import Embeddings as EmbeddingsReply
from hasten.serving.api.errors import ApiError, overloaded
from hasten.serving.api.fields import Body, Neutral, Prompts
from hasten.serving.api.replies import reply
from hasten.serving.api.running import told
from hasten.serving.api.service import Service, too_long


class EmbeddingBody(Body):
    """A text, several, or their token ids. pooling and normalize are ours: mean and unit length by default."""

    model: Annotated[str, Field(max_length=512)]
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    add_special_tokens: bool | None = None
    neutral: ClassVar[Neutral] = {"dimensions": (), "truncate_prompt_tokens": (), "priority": (0,)}


def embeddings_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/embeddings", response_model=EmbeddingsReply, responses=ERRORS)
    async def embeddings(body: EmbeddingBody, http: HttpRequest) -> Response:
        """Vectors of texts."""
        import torch

        service.check_model(body.model)
        http.state.facts.update({} if body.user is None else {"user": body.user})
        if not service.engine.healthy:
            raise overloaded(f"the engine has failed: {service.engine.error}", seconds=30)
        prompts = await _prompts(body, service)
        try:
            vectors = await service.engine.embed(prompts, pooling=body.pooling or "mean")  # (N, C)
        except HastenError as error:
            raise told(error) from None
        vectors = vectors.float().cpu()
        if body.normalize is not False:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        as_bytes = body.encoding_format == "base64"
        data = [{"index": i, "object": "embedding", "embedding": _told(v, as_bytes)} for i, v in enumerate(vectors)]
        tokens = sum(map(len, prompts))
        http.state.facts["prompt_tokens"] = tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return reply({"object": "list", "data": data, "model": service.model_name, "usage": usage})

    return router


async def _prompts(body: EmbeddingBody, service: Service) -> list[tuple[int, ...]]:
    given: Any = body.input
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise ApiError("input is empty", param="input")
    most = service.settings.prompts
    if len(given) > most:
        raise ApiError(f"input: {len(given)} texts; this server's limit is {most}", param="input")
    special = body.add_special_tokens is not False
    prompts = []
    for text in given:
        ids = text
        if isinstance(text, str):
            ids = await service.encode(text, add_special_tokens=special, param="input")
        if len(ids) > service.max_length:
            raise too_long(len(ids), service.max_length, param="input")
        prompts.append(check_ids(ids, service, param="input"))
    return prompts


def _told(vector: Any, as_bytes: bool) -> Any:
    """Numbers, or the bytes of little-endian float32 in base64, which OpenAI's client asks for."""
    if as_bytes:
        return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
    return vector.tolist()
