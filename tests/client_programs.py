"""Libraries that speak to servers, each with a task of one tool call: PYTHON client_programs.py NAME URL.

Run by test_client_programs.py with a Python that has the libraries, which hasten's own need not. Prints JSON: the
answer in the end, and what the library keeps of the reasoning before the call (null where it keeps none).
"""

import asyncio
import json
import os
import sys

os.environ |= {"OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
TASK = "say what the tool says"
LOOK = {
    "name": "look",
    "description": "Look a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}


def look(word: str) -> str:
    """Look a word up."""
    assert word == "hello"
    return "hi-from-tool"


def litellm_task(model: str, url: str, *, stream: bool = False, **options) -> tuple[str, str | None]:
    import litellm

    messages = [{"role": "user", "content": TASK}]
    tools = [{"type": "function", "function": LOOK}]

    def ask():
        answer = litellm.completion(
            model=model,
            api_base=url,
            api_key="none",
            messages=messages,
            tools=tools,
            max_tokens=200,
            stream=stream,
            num_retries=0,
            **options,
        )
        return (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0].message

    said = ask()
    (call,) = said.tool_calls
    messages.append(said.model_dump(exclude_none=True))
    result = look(**json.loads(call.function.arguments))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ask().content, said.reasoning_content


def litellm_openai(url: str) -> tuple[str, str | None]:
    return litellm_task("openai/tiny", f"{url}/v1")


def litellm_streamed(url: str) -> tuple[str, str | None]:
    return litellm_task("openai/tiny", f"{url}/v1", stream=True)


def litellm_hosted_vllm(url: str) -> tuple[str, str | None]:
    return litellm_task("hosted_vllm/tiny", f"{url}/v1", reasoning_effort="low", drop_params=True)


def litellm_anthropic(url: str) -> tuple[str, str | None]:
    return litellm_task("anthropic/tiny", url)


def pydantic_ai(url: str, *, stream: bool = False) -> tuple[str, str | None]:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    agent = Agent(model, tools=[look])

    async def streamed():
        async with agent.run_stream_events(TASK) as events:
            return [event async for event in events][-1].result

    done = asyncio.run(streamed()) if stream else agent.run_sync(TASK)
    parts = [part for message in done.all_messages() for part in message.parts]
    return done.output, next(part.content for part in parts if part.part_kind == "thinking")


def pydantic_ai_streamed(url: str) -> tuple[str, str | None]:
    return pydantic_ai(url, stream=True)


def _openai_agent(model, *, stream: bool = False) -> tuple[str, str | None]:
    from agents import Agent, Runner, function_tool

    agent = Agent(name="helper", instructions="Be brief.", model=model, tools=[function_tool(look)])

    async def streamed():
        run = Runner.run_streamed(agent, TASK)
        async for _ in run.stream_events():
            pass
        return run

    done = asyncio.run(streamed()) if stream else Runner.run_sync(agent, TASK)
    (thought,) = [item.raw_item for item in done.new_items if item.type == "reasoning_item"]
    return done.final_output, (thought.content or thought.summary)[0].text


def openai_agents_chat(url: str) -> tuple[str, str | None]:
    from agents import OpenAIChatCompletionsModel
    from openai import AsyncOpenAI

    return _openai_agent(OpenAIChatCompletionsModel("tiny", AsyncOpenAI(base_url=f"{url}/v1", max_retries=0)))


def openai_agents_responses(url: str, *, stream: bool = False) -> tuple[str, str | None]:
    from agents import OpenAIResponsesModel
    from openai import AsyncOpenAI

    model = OpenAIResponsesModel("tiny", AsyncOpenAI(base_url=f"{url}/v1", max_retries=0))
    return _openai_agent(model, stream=stream)


def openai_agents_streamed(url: str) -> tuple[str, str | None]:
    return openai_agents_responses(url, stream=True)


def _langchain(url: str, ask) -> tuple[str, str | None]:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=f"{url}/v1", max_retries=0).bind_tools([look])
    messages = [HumanMessage(TASK)]
    messages.append(ask(model, messages))
    (call,) = messages[-1].tool_calls
    messages.append(ToolMessage(look(**call["args"]), tool_call_id=call["id"]))
    return ask(model, messages).content, None  # ChatOpenAI keeps only what OpenAI's own API sends


def langchain_openai(url: str) -> tuple[str, str | None]:
    return _langchain(url, lambda model, messages: model.invoke(messages))


def langchain_streamed(url: str) -> tuple[str, str | None]:
    from functools import reduce
    from operator import add

    return _langchain(url, lambda model, messages: reduce(add, model.stream(messages)))


PROGRAMS = {
    program.__name__: program
    for program in (
        *(litellm_openai, litellm_streamed, litellm_hosted_vllm, litellm_anthropic, pydantic_ai),
        *(pydantic_ai_streamed, openai_agents_chat, openai_agents_responses, openai_agents_streamed),
        *(langchain_openai, langchain_streamed),
    )
}

if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]](sys.argv[2])))
