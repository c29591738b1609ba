"""An engine that answers at once, fails on demand, and counts what was begun and ended: for tests of the server."""

import asyncio
import itertools
import json
from types import SimpleNamespace

import torch

from hasten.engine.request import EngineFailed, RequestOutput, TokenLogprob
from hasten.engine.settings import ModelFacts, Stats
from hasten.engine.stopping import TextStream

THOUGHT, SAID = "A tool would help.", "All done: hi-from-tool."


class FakeEngine:
    """Says `answer` token by token to every request, whatever the prompt; obeys constraints, stops and lengths."""

    def __init__(self, tokenizer, *, answer="def add(a, b):\n    return a + b\n", vocabulary=None, delay=0.0):
        self.tokenizer = tokenizer
        self.answer = tokenizer.encode(answer, add_special_tokens=False)
        self.vocabulary = vocabulary or tokenizer.vocab_size
        self.engine = SimpleNamespace(  # what a server asks of the real one
            tokenizer=tokenizer,
            eos_ids=tokenizer.eos_ids,
            max_length=4096,
        )
        self.delay = delay
        self.error = None
        self.refusal = None  # raised by the next requests
        self.fails_after = None  # tokens after which a request fails
        self.endless = False
        self.insists = False  # with a constraint too, its answer is said as far as that allows it
        self.running = {}  # id -> request
        self.requests = []
        self.aborted = []
        self.closed = False

    @property
    def healthy(self):
        return self.error is None

    @property
    def facts(self):
        return ModelFacts(**vars(self.engine), vocabulary=self.vocabulary)

    def replica_stats(self):
        counted = {"prefix_queries": 10, "prefix_hits": 4, "generated_tokens": 7, "accepted_by_position": [5, 2]}
        return {"": Stats(running=len(self.running), **counted)}

    async def generate(self, *requests):
        self.requests += requests
        if self.refusal is not None:
            raise self.refusal
        self.running |= {request.id: request for request in requests}
        try:
            for request in requests:
                for index in range(request.n):
                    async for piece in self._sample(request, index):
                        yield piece
                del self.running[request.id]
        finally:
            self.aborted += [request.id for request in requests if self.running.pop(request.id, None)]

    async def _sample(self, request, index):
        constraint = None if request.constraint is None else request.constraint.fork()
        eos = set(self.tokenizer.eos_ids)
        answer = itertools.cycle(self.answer) if self.endless or request.params.ignore_eos else iter(self.answer)
        text, first = "", index == 0
        stream = TextStream(self.tokenizer, skip_special_tokens=request.skip_special_tokens)
        for count in itertools.count(1):
            await asyncio.sleep(self.delay)
            if self.fails_after is not None and count > self.fails_after:
                raise EngineFailed("the fake engine failed as it was told to")
            token = next(answer, None)
            ended = token is None
            if constraint is not None:
                row = torch.zeros(self.vocabulary)
                constraint.mask(row)
                allowed = torch.isfinite(row).nonzero().flatten().tolist()
                if self.insists and token is None:
                    token = next((end for end in eos if end in allowed), None)
                elif self.insists and token not in allowed:
                    answer = itertools.chain([token], answer)
                if not self.insists or token not in allowed:
                    token = allowed[(count * 7) % len(allowed)]
                if count > 40 and not self.insists:  # come to an end
                    closing = [*eos, *map(self.tokenizer.backend.token_to_id, '"}]:1')]
                    token = next((token for token in closing if token in allowed), token)
                ended = token in eos
                constraint.advance(token)
            piece = "" if ended else stream.push(token)
            reason = "stop" if ended or (constraint is not None and constraint.done) else None
            text += piece
            stopped_by = next((stop for stop in request.params.stop if stop in text), None)
            if stopped_by is not None:
                reason, piece = "stop", ""
            if reason is None and count >= request.params.max_new_tokens:
                reason = "length"
            if ended or reason == "length":
                piece += stream.flush()
            yield RequestOutput(
                request_id=request.id,
                index=index,
                text=piece,
                tokens=() if ended and constraint is None else (token,),
                logprobs=None if request.logprobs is None or ended else (self._logprob(token, request.logprobs),),
                finish_reason=reason,
                stop_reason=stopped_by,
                prompt_tokens=len(request.prompt),
                cached_tokens=1 if first else 0,
                prompt_logprobs=self._of_prompt(request) if first and request.prompt_logprobs is not None else None,
            )
            first = False
            if reason is not None:
                return

    def _logprob(self, token, top):
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        others = tuple(TokenLogprob(i, f"t{i}", b"t", -1.0 - i) for i in range(top))
        return TokenLogprob(token, text, text.encode(), -0.5, others)

    def _of_prompt(self, request):
        return (None, *(self._logprob(token, request.prompt_logprobs) for token in request.prompt[1:]))

    async def embed(self, prompts, *, pooling, adapter="", timeout=None):
        return torch.tensor([[float(len(prompt)), 1.0 if pooling == "mean" else 2.0, 0.5] for prompt in prompts])

    def watch(self):
        return None

    async def close(self):
        self.closed = True


class ScriptedEngine(FakeEngine):
    """Thinks, calls a tool, and once its result is in the prompt says that all is done."""

    def __init__(self, tokenizer, name, arguments):
        super().__init__(tokenizer)
        call = json.dumps({"name": name, "arguments": arguments})
        said = f"<think>\n{THOUGHT}\n</think>\n\nI look.\n<tool_call>\n{call}\n</tool_call>"
        self.call = tokenizer.encode(said, add_special_tokens=False)
        self.said = tokenizer.encode(SAID, add_special_tokens=False)
        self.results = 0
        self.prompts = []

    async def generate(self, *requests):
        self.prompts.append(self.tokenizer.decode(requests[0].prompt))
        seen = "<|tool|>" in self.prompts[-1]
        self.results += seen
        self.answer = self.said if seen else self.call
        async for output in super().generate(*requests):
            yield output
