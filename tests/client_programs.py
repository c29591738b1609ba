"""Libraries that speak to servers, each with a task of one tool call: PYTHON client_programs.py NAME URL says the end.

Run by test_client_programs.py with a Python that has the libraries, which hasten's own need not.
"""

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


def litellm_task(model: str, url: str, *, stream: bool = False, **options) -> str:
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
    return ask().content


def litellm_openai(url: str) -> str:
    return litellm_task("openai/tiny", f"{url}/v1")


def litellm_streamed(url: str) -> str:
    return litellm_task("openai/tiny", f"{url}/v1", stream=True)


def litellm_hosted_vllm(url: str) -> str:
    return litellm_task("hosted_vllm/tiny", f"{url}/v1", reasoning_effort="low", drop_params=True)


def litellm_anthropic(url: str) -> str:
    return litellm_task("anthropic/tiny", url)


def pydantic_ai(url: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    return Agent(model, tools=[look]).run_sync(TASK).output


def _openai_agent(model) -> str:
    from agents import Agent, Runner, function_tool

    agent = Agent(name="helper", instructions="Be brief.", model=model, tools=[function_tool(look)])
    return Runner.run_sync(agent, TASK).final_output


def openai_agents_chat(url: str) -> str:
    from agents import OpenAIChatCompletionsModel
    from openai import AsyncOpenAI

    return _openai_agent(OpenAIChatCompletionsModel("tiny", AsyncOpenAI(base_url=f"{url}/v1", max_retries=0)))


def openai_agents_responses(url: str) -> str:
    from agents import OpenAIResponsesModel
    from openai import AsyncOpenAI

    return _openai_agent(OpenAIResponsesModel("tiny", AsyncOpenAI(base_url=f"{url}/v1", max_retries=0)))


def _langchain(url: str, ask) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=f"{url}/v1", max_retries=0).bind_tools([look])
    messages = [HumanMessage(TASK)]
    messages.append(ask(model, messages))
    (call,) = messages[-1].tool_calls
    messages.append(ToolMessage(look(**call["args"]), tool_call_id=call["id"]))
    return ask(model, messages).content


def langchain_openai(url: str) -> str:
    return _langchain(url, lambda model, messages: model.invoke(messages))


def langchain_streamed(url: str) -> str:
    from functools import reduce
    from operator import add

    return _langchain(url, lambda model, messages: reduce(add, model.stream(messages)))


PROGRAMS = {
    program.__name__: program
    for program in (
        *(litellm_openai, litellm_streamed, litellm_hosted_vllm, litellm_anthropic, pydantic_ai),
        *(openai_agents_chat, openai_agents_responses, langchain_openai, langchain_streamed),
    )
}

if __name__ == "__main__":
    print(PROGRAMS[sys.argv[1]](sys.argv[2]))
