"""/v1/completions as OpenAI describes it: https://platform.openai.com/docs/api-reference/completions"""

from typing import Annotated, ClassVar

from pydantic import Field

from hasten.serving.api.fields import COMMON_NEUTRAL, Count, Neutral, Prompts, SamplingBody
from hasten.serving.api.response_schema import ResponseFormat


class CompletionBody(SamplingBody):
    """A prompt, several, or their token ids; each gives n choices."""

    prompt: Prompts
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    response_format: ResponseFormat | None = None
    neutral: ClassVar[Neutral] = COMMON_NEUTRAL | {"suffix": ("",), "prompt_embeds": ()}
