"""Response models for the OpenAPI description; responses themselves are built as plain values."""

from typing import Any, Literal

from pydantic import BaseModel

from hasten.server import errors


class ErrorFacts(BaseModel):
    """The error of a request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of every error response."""

    error: ErrorFacts


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class CompletionChoice(BaseModel):
    """One answer to a prompt."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None


class Answered(BaseModel):
    """Fields of both kinds of answers."""

    id: str
    created: int
    model: str
    usage: Usage


class Completion(Answered):
    """Answers to /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatChoice(BaseModel):
    """One answer to a conversation."""

    index: int
    message: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatCompletion(Answered):
    """Answers to /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Embedding(BaseModel):
    """One vector: numbers, or their float32 bytes in base64."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class Embeddings(BaseModel):
    """Answers to /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: dict[str, int]


class Tokens(BaseModel):
    """Answer to /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """Answer to /detokenize."""

    prompt: str


class Model(BaseModel):
    """The served model, or an adapter of it (parent: the model's name)."""

    id: str
    parent: str | None = None
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int


class Models(BaseModel):
    """Answer to /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Status(BaseModel):
    """Answer to /health and /ready."""

    status: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": text} for status, (_, text) in errors.ERRORS.items()
}
ERRORS[422] = {"description": "Never sent: what does not fit is a 400.", "model": ErrorReply}
