"""The benchmarks of lm-evaluation-harness (the package lm-eval) on hasten's kernels and engine.

lm-eval 0.4.13 knows only the models of its own package. Importing this file adds "hasten" to them, as `hasten eval
--tasks` and `python -m hasten.cli.lm_eval` (lm-eval's own command line) do. Later releases find it by our entry point.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hasten.checkpoints.load import load
from hasten.engine.following import follow
from hasten.engine.llm import LLM
from hasten.engine.params import SamplingParams
from hasten.engine.settings import EngineSettings
from hasten.errors import ConfigError, DataError, HastenWarning, ResourceError
from hasten.evaluation.likelihood import log_likelihoods
from hasten.machine import resolve_device
from hasten.machine.progress import share
from hasten.model.fused import fuse_where_it_fits
from hasten.model.sharded import ShardedTransformer, broadcast_from_rank0
from hasten.model.transformer import Transformer

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window
    from lm_eval.utils import make_table as make_table
except ModuleNotFoundError as error:
    raise ResourceError(f"the package lm-eval is not installed ({error}): pip install 'hasten[eval]'") from None

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

Pair = tuple[Sequence[int], Sequence[int]]  # a context and its continuation, as token ids


@register_model("hasten")
class HastenLM(TemplateLM):
    """A model with lm-eval's interface. BOS and truncation of contexts are as in lm-eval's own "hf" model.

    pretrained: a loaded model, or a folder or hub id. device: cuda:0, which lm-eval passes by default, is a GPU where
    there is one. max_length: tokens of context and answer; the model's positions
    by default. batch_size, max_batch_size: lm-eval passes them to every model; here a batch is cut by tokens, not by
    requests. Raises ConfigError for a model without a tokenizer.
    """

    def __init__(
        self,
        pretrained: Transformer | str,
        *,
        dtype: str = "auto",
        device: str | None = None,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(pretrained, Transformer):
            place = resolve_device("auto" if device in (None, "cuda:0") else device)
            pretrained = load(pretrained, dtype=dtype, device=str(place))
        self.model = fuse_where_it_fits(pretrained)
        positions = self.model.config.max_positions
        self.max_length = positions if max_length is None else max_length
        if not 2 <= self.max_length <= positions:
            raise ConfigError(f"max_length is {max_length}; it must be from 2 to the model's {positions} positions")
        if self.model.tokenizer is None:
            raise ConfigError("lm-eval's tasks are texts, and this model's folder has no tokenizer")
        self.tokenizer = self.model.tokenizer
        if self.tokenizer.bos_id is None and not self.tokenizer.eos_ids:
            raise ConfigError("lm-eval begins a text with the beginning- or end-of-text token; this tokenizer has none")

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_ids[0] if self.tokenizer.eos_ids else self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that replaces an empty context."""
        bos = self.tokenizer.bos_id
        return self.tokenizer.eos_ids[0] if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:  # a chat template writes the beginning itself
            begin = self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(begin)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[Pair] = []
        ends = [0]
        for request in requests:
            tokens, length = self.tok_encode(request.args[0]), self.max_length
            cut = get_rolling_token_windows(tokens, self.prefix_token_id, max_seq_len=length, context_len=1)
            windows += [make_disjoint_window(pair) for pair in cut]
            ends.append(len(windows))
        found = self._score(windows)
        return [sum(nats for nats, _ in found[start:end]) for start, end in itertools.pairwise(ends)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise ConfigError(f"an answer has {longest} tokens, and the model reads {self.max_length} at once")
        # The last token of an answer is predicted and not read.
        rooms = [self.max_length + 1 - len(continuation) for _, _, continuation in requests]
        contexts = self._fitting([context for _, context, _ in requests], rooms)
        return self._score([(context, request[2]) for context, request in zip(contexts, requests, strict=True)])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        params = []
        for index, request in enumerate(requests):
            wanted = normalize_gen_kwargs(request.args[1])
            stop = tuple(text for text in wanted.pop("until", []) if text)
            if not wanted.pop("do_sample"):
                wanted["temperature"] = 0.0
            if wanted.get("num_beams") == 1:
                del wanted["num_beams"]
            new, seed = wanted.pop("max_gen_toks"), torch.initial_seed() % 2**62 + index
            try:
                params.append(SamplingParams(stop=stop, max_new_tokens=new, **{"seed": seed, **wanted}))
            except TypeError as error:
                raise ConfigError(f"a task's generation_kwargs ask for what hasten lacks: {error}") from None
        longest = max((one.max_new_tokens for one in params), default=0)
        if longest >= self.max_length:
            raise ConfigError(f"a task asks for {longest} new tokens, and the model reads {self.max_length} at once")
        rooms = [self.max_length - one.max_new_tokens for one in params]
        contexts = self._fitting([self.tok_encode(request.args[0]) for request in requests], rooms)
        prompts = [context or [self.prefix_token_id] for context in contexts]
        return self._texts(prompts, params) if prompts else []

    def _texts(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[str]:
        """Continue the prompts; of several ranks the first one has the engine, and tells the others the texts."""
        if isinstance(self.model, ShardedTransformer) and self.model.group.rank:
            follow(self.model, EngineSettings(max_length=self.max_length))
            texts = [""] * len(prompts)
        else:
            with contextlib.closing(LLM(self.model, max_length=self.max_length)) as llm:
                texts = [answer.text for answer in llm.generate(prompts, params)]
        return [bytes(text).decode() for text in broadcast_from_rank0(self.model, [[*t.encode()] for t in texts])]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = self.tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()  # which the answer goes on from: what the template puts behind goes
        return text[: text.rindex(last) + len(last)]

    @property
    def tokenizer_name(self) -> str:
        """Key of lm-eval's cache of prompts; it changes with the tokenizer and the chat template."""
        parts = f"{self.tokenizer.digest} {self.tokenizer.chat_template}"
        return f"hasten-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"

    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        with share("scored tokens") as progress:
            return log_likelihoods(self.model, pairs, progress=progress)

    def _fitting(self, contexts: Sequence[list[int]], rooms: Sequence[int]) -> list[list[int]]:
        """Cut the beginning of contexts that are too long, with a warning."""
        long = sum(len(context) > room for context, room in zip(contexts, rooms, strict=True))
        if long:
            warnings.warn(
                f"{long} of {len(contexts)} contexts lose their beginning: context and answer are longer than "
                f"{self.max_length} tokens",
                HastenWarning,
                stacklevel=2,
            )
        return [context[-room:] for context, room in zip(contexts, rooms, strict=True)]


def run_tasks(lm: HastenLM, tasks: Sequence[str], *, include_path: str | None = None, **options: Any) -> dict[str, Any]:
    """Run tasks (names, or patterns such as "mmlu_*") and return lm-eval's results as JSON values.

    Of several ranks the first one has them, the others an empty dictionary.

    include_path: a folder with your own tasks. options: those of `lm_eval.simple_evaluate`. Raises ConfigError for
    unknown tasks, and DataError where a task's data cannot be had.
    """
    manager = TaskManager(include_path=include_path)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown or not tasks:
        raise ConfigError(
            f"lm-eval has no task {', '.join(unknown)}; `python -m hasten.cli.lm_eval ls tasks` lists what it has, and "
            "--include-path names a folder with more"
        )
    names = manager.match_tasks(list(tasks))
    try:
        results = simple_evaluate(lm, tasks=names, task_manager=manager, log_samples=False, **options)
    except OSError as error:
        raise DataError(f"the data of {', '.join(tasks)} cannot be had: {error}") from error
    plain: dict[str, Any] = json.loads(json.dumps(results or {}, default=handle_non_serializable))
    return plain
