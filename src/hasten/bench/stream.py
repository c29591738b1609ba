"""What the generation ladder measures: sequences of random tokens, decoded together after prompts of one length."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hasten.generation.decoder import Decoder
    from hasten.model.transformer import Transformer


class Stream:
    """`batch` sequences, greedy. cache: False computes the whole sequences again for each token.

    keep_prompt: the prompts are taken in once, and every measurement starts after them; else they are taken in, and
    measured, each time. Set up, everything is warm; `compile_seconds` is what the first decode step took then, where
    the model's blocks are compiled.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        batch: int,
        prompt_tokens: int,
        new_tokens: int,
        seed: int,
        cache: bool = True,
        compiled: bool = False,
        keep_prompt: bool = False,
    ) -> None:
        import torch

        from hasten.generation.graphs import fastest_decoder

        self.model, self.batch, self.new_tokens = model, batch, new_tokens
        generator = torch.Generator().manual_seed(seed)
        self.prompts = torch.randint(model.config.vocab_size, (batch, prompt_tokens), generator=generator).tolist()
        self.decoder: Decoder | None = None
        if cache:
            capacity = prompt_tokens + new_tokens
            self.decoder = fastest_decoder(model, batch=batch, capacity=capacity, compiled=compiled)
        self.compile_seconds: float | None = None
        self.kept: list[int] | None = None  # the tokens after prompts that are kept
        if compiled or keep_prompt:
            tokens = self.first_tokens()
            start = time.perf_counter()
            self.next_tokens(tokens)
            self.compile_seconds = time.perf_counter() - start if compiled else None
            self.kept = tokens if keep_prompt else None

    def measure(self) -> dict[str, float]:
        """The prompts, unless they are kept, then the new tokens, each waited for, as a stream shows them."""
        found: dict[str, float] = {}
        start = time.perf_counter()
        if self.kept is None:
            tokens = self.first_tokens()
            seconds = time.perf_counter() - start
            found["prefill_tokens_per_second"] = self.batch * len(self.prompts[0]) / seconds
            found["time_to_first_token_seconds"] = seconds
        else:
            assert self.decoder is not None, "without a cache there are no prompts to keep"
            self.decoder.truncate(len(self.prompts[0]))
            tokens = self.kept
        start = time.perf_counter()
        for _ in range(self.new_tokens):
            tokens = self.next_tokens(tokens)
        each = self.new_tokens / (time.perf_counter() - start)
        found["decode_tokens_per_second"] = self.batch * each
        if self.batch > 1:
            found["decode_tokens_per_second_per_sequence"] = each
        return found

    def first_tokens(self) -> list[int]:
        """Take the prompts in, whatever came before; the most likely token after each."""
        if self.decoder is None:
            self.sequences = [list(prompt) for prompt in self.prompts]
            return self._recompute()
        self.decoder.truncate(0)
        return _most_likely(self.decoder.prefill(self.prompts))

    def next_tokens(self, tokens: list[int]) -> list[int]:
        """Append a token to each sequence; the most likely ones after them."""
        import torch

        if self.decoder is None:
            for sequence, token in zip(self.sequences, tokens, strict=True):
                sequence.append(token)
            return self._recompute()
        return _most_likely(self.decoder.decode(torch.tensor(tokens, device=self.model.device)))

    def _recompute(self) -> list[int]:
        """The next tokens from the whole sequences, nothing kept."""
        import torch

        from hasten.model.context import TrainingContext

        tokens = torch.tensor(self.sequences, device=self.model.device)  # (B, T)
        batch, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).expand(batch, -1)
        last = torch.arange(1, batch + 1, device=tokens.device) * length - 1
        context = TrainingContext([layer.window for layer in self.model.config.layers])
        with torch.inference_mode():
            return _most_likely(self.model(tokens, positions, context, rows=last))


def _most_likely(logits: torch.Tensor) -> list[int]:
    """Of each row of (B, V), brought to the host."""
    chosen: list[int] = logits.argmax(-1).tolist()
    return chosen
