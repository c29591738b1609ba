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
    completion_tokens_details: dict[str, int] | None = None


class CompletionChoice(BaseModel):
    """One answer to a prompt."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None


class Timings(BaseModel):
    """Times of a request, in llama.cpp's fields: prompt (without cached tokens) and answer, in milliseconds."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Answered(BaseModel):
    """Fields of both kinds of answers."""

    id: str
    created: int
    model: str
    usage: Usage
    timings: Timings | None = None  # not of beams, nor of the best of more samples


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


class MessagesAnswer(BaseModel):
    """Answers to /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, int]


class TokenCount(BaseModel):
    """Answers to /v1/messages/count_tokens and /v1/responses/input_tokens."""

    object: str | None = None
    input_tokens: int


class ResponsesAnswer(BaseModel):
    """Answers to /v1/responses; OpenAI's reference has the further fields."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class DeletedResponse(BaseModel):
    """Answer to the deletion of a stored response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


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
    type: Literal["model"]
    display_name: str
    created: int
    created_at: str
    owned_by: str
    max_model_len: int
    vocab_size: int


class Models(BaseModel):
    """Answer to /v1/models."""

    object: Literal["list"]
    data: list[Model]
    has_more: Literal[False]
    first_id: str
    last_id: str


class Status(BaseModel):
    """Answer to /, /health, /v1/health, /ping and /ready."""

    status: str


class Version(BaseModel):
    """Answer to /version."""

    version: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": text} for status, (_, text) in errors.ERRORS.items()
}
ERRORS[422] = {"description": "Never sent: what does not fit is a 400.", "model": ErrorReply}


class AnthropicError(BaseModel):
    """The body of every error response under /v1/messages."""

    type: Literal["error"]
    error: dict[str, str]
    request_id: str


ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    (529 if status == 503 else status): facts | {"model": AnthropicError} for status, facts in ERRORS.items()
}


class RankedDocument(BaseModel):
    """A document, by its place in the request."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class Scores(BaseModel):
    """Fields of answers to /v1/rerank and /score. method: how the scores were made."""

    id: str
    model: str
    method: Literal["yes_no", "cosine"]
    usage: dict[str, int]


class Reranked(Scores):
    """Answers to /v1/rerank: the best documents first."""

    results: list[RankedDocument]


class PairScore(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class Scored(Scores):
    """Answers to /score."""

    object: Literal["list"]
    created: int
    data: list[PairScore]


class OllamaError(BaseModel):
    """The body of every error response under /api."""

    error: str


class OllamaAnswer(BaseModel):
    """Fields of answers to /api/chat and /api/generate; the counts and times (in nanoseconds) come at the end."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"]
    logprobs: list[dict[str, Any]] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChat(OllamaAnswer):
    """Answers to /api/chat."""

    message: dict[str, Any]


class OllamaText(OllamaAnswer):
    """Answers to /api/generate."""

    response: str
    thinking: str | None = None


class OllamaEmbeddings(BaseModel):
    """Answers to /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaModel(BaseModel):
    """A served model, or an adapter of it."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, Any]


class OllamaModels(BaseModel):
    """Answer to /api/tags."""

    models: list[OllamaModel]


class OllamaShown(BaseModel):
    """Answer to /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(BaseModel):
    """Answer to /api/version: the version of Ollama whose API this is, and that of hasten."""

    version: str
    hasten: str


OLLAMA_ERRORS: dict[int | str, dict[str, Any]] = {
    status: facts | {"model": OllamaError} for status, facts in ERRORS.items() if status != 429
}
# An answer that is streamed, beside the whole one.
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
LINES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {}}}}
