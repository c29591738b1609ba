"""/v1/embeddings: the mean, or the last, of the final hidden states of a text's tokens."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from hasten.errors import HastenError
from hasten.server.answers import reply
from hasten.server.bodies import ModelBody, Neutral, Prompts
from hasten.server.build_request import prompts_of
from hasten.server.documentation import ERRORS
from hasten.server.documentation import Embeddings as EmbeddingsReply
from hasten.server.errors import from_library
from hasten.server.service import Service

if TYPE_CHECKING:
    from torch import Tensor


class EmbeddingBody(ModelBody):
    """A text, several, or their token ids. pooling and normalize are ours: mean and unit length by default."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    neutral: ClassVar[Neutral] = {"dimensions": (), "truncate_prompt_tokens": (), "priority": (0,)}


def add_embeddings(router: APIRouter, service: Service) -> None:

    @router.post("/v1/embeddings", response_model=EmbeddingsReply, responses=ERRORS)
    async def embeddings(body: EmbeddingBody, http: HttpRequest) -> Response:
        """Vectors of texts."""
        service.check_in(body, http)
        given = await prompts_of(body.input, service, param="input", add_special_tokens=body.add_special_tokens)
        normalize = body.normalize is not False
        vectors = await vectors_of(
            given, service, model=body.model, pooling=body.pooling or "mean", normalize=normalize
        )
        as_bytes = body.encoding_format == "base64"
        data = [{"index": i, "object": "embedding", "embedding": _encoded(v, as_bytes)} for i, v in enumerate(vectors)]
        tokens = sum(map(len, given))
        http.state.facts["prompt_tokens"] = tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return reply({"object": "list", "data": data, "model": body.model, "usage": usage})


async def vectors_of(
    given: Sequence[Sequence[int]], service: Service, *, model: str, pooling: str = "mean", normalize: bool = True
) -> Tensor:
    """Embeddings (N, C) float32 of token ids, of length 1 with `normalize`. Raises ApiError."""
    import torch

    timeout = service.settings.request_timeout
    try:
        adapter = service.check_model(model)
        vectors = await service.engine.embed(given, pooling=pooling, adapter=adapter, timeout=timeout)
    except HastenError as error:
        raise from_library(error) from None
    vectors = vectors.float().cpu()
    return torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors


def _encoded(vector: Any, as_bytes: bool) -> Any:
    """A vector as numbers, or as little-endian float32 in base64, which OpenAI's client asks for."""
    if as_bytes:
        return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
    return vector.tolist()
