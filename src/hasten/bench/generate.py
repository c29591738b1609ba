"""The ladder of generation: greedy decoding of random tokens, after the same prompt on every rung.

Cumulative rungs; their names never change:
- no-cache: the whole sequence is computed again for each token.
- static-cache: keys and values are kept; eager.
- static-cache-compiled: the same with torch.compile for the decode step; -int8 and -int4: on quantized weights, with
  activations rounded to int8.
- native-bf16, native-int8, native-int4: the fused native steps instead, on bfloat16, int8 and int4 (groups of 32)
  weights, the head quantized like the rest (with --text: as `--quantize` does it); with int8 and int4, activations are
  rounded to int8. On a CPU.
- int8-weight-only, gptq-int4-g32: int8 weights with activations of 16 bits, and int4 weights in groups of 32 by GPTQ
  (arXiv 2210.17323), of a checkpoint; with the native steps on a CPU, else compiled.
- gguf-file: a GGUF file's own formats with the native steps.
- speculation, all-together: bfloat16 and the GPTQ folder's weights with drafts (arXiv 2211.17192), after --text.

All other rungs of a GGUF file are made from its weights dequantized to bfloat16. A folder that is quantized already is
measured as it is: by default static-cache and the native rung of its format.

A rung with a cache may also be measured with several sequences at once (`-x8`) and after prompts of other lengths
(`-c2048`): further rows, measured in the same process in the same rounds.
"""

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from hasten.bench.gptq_folder import gptq_folder
from hasten.bench.models import BenchmarkModel, check_fits, choose_rungs, folder_name
from hasten.effects import Holds
from hasten.engine.params import KVCacheDtype, draft_name
from hasten.errors import ConfigError
from hasten.machine import emulated, resolve_device, resolve_dtype
from hasten.measure.ladder import Ladder
from hasten.measure.options import check_least, say
from hasten.measure.process import Rung
from hasten.model.config import ModelConfig
from hasten.planning.cost import parameters
from hasten.planning.memory import LARGEST_PREFILL, InferenceUse, Memory, cache_bytes, inference_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeMode:
    """How a rung generates. weights: "bfloat16", "int8" or "int4" whatever the ladder's dtype is; None: that dtype.

    activations: of products with int8 and int4 weights, as in `hasten quantize`. kv_heads: key/value heads in place of
    the shape's. drafted: with the ladder's draft. gptq: of the ladder's GPTQ folder. ranks: with a share each. file:
    the dtype of a folder that the model is written to and loaded from, as a user loads one. gguf: the GGUF file itself.
    """

    techniques: tuple[str, ...]
    cache: bool = True
    compiled: bool = False
    fused: bool = False
    weights: str | None = None
    activations: Literal["auto", "int8", "float"] = "auto"
    kv_heads: int | None = None
    drafted: bool = False
    gptq: bool = False
    ranks: int = 1
    file: str | None = None
    gguf: bool = False


COMPILED = ("static cache", "torch.compile")
NATIVE_STEPS = ("static cache", "native fused steps")
GPTQ = ("int4 in groups of 32", "GPTQ")
RUNGS: Mapping[str, DecodeMode] = {
    "no-cache": DecodeMode(techniques=("eager",), cache=False),
    "static-cache": DecodeMode(techniques=("eager", "static cache")),
    "static-cache-compiled": DecodeMode(techniques=COMPILED, compiled=True),
    "static-cache-compiled-int8": DecodeMode(
        techniques=(*COMPILED, "int8"), compiled=True, weights="int8", activations="int8"
    ),
    "static-cache-compiled-int4": DecodeMode(techniques=(*COMPILED, "int4"), compiled=True, weights="int4"),
    "native-bf16": DecodeMode(techniques=NATIVE_STEPS, fused=True, weights="bfloat16"),
    "float32-file": DecodeMode(
        techniques=(*NATIVE_STEPS, "a float32 checkpoint"), fused=True, weights="bfloat16", file="float32"
    ),
    "float16-file": DecodeMode(
        techniques=(*NATIVE_STEPS, "a float16 checkpoint"), fused=True, weights="bfloat16", file="float16"
    ),
    "gguf-file": DecodeMode(techniques=(*NATIVE_STEPS, "the file's own formats"), fused=True, gguf=True),
    "native-int8": DecodeMode(techniques=(*NATIVE_STEPS, "int8"), fused=True, weights="int8", activations="int8"),
    "native-int4": DecodeMode(techniques=(*NATIVE_STEPS, "int4"), fused=True, weights="int4"),
    "int8-weight-only": DecodeMode(
        techniques=(*NATIVE_STEPS, "int8", "16-bit activations"), fused=True, weights="int8", activations="float"
    ),
    "gptq-int4-g32": DecodeMode(techniques=(*NATIVE_STEPS, *GPTQ), fused=True, weights="int4", gptq=True),
    "speculation": DecodeMode(techniques=(*NATIVE_STEPS, "drafts"), fused=True, weights="bfloat16", drafted=True),
    "all-together": DecodeMode(
        techniques=(*NATIVE_STEPS, *GPTQ, "drafts"), fused=True, weights="int4", gptq=True, drafted=True
    ),
}
GPTQ_RUNG, GGUF_RUNG = "gptq-int4-g32", "gguf-file"
# Made of a checkpoint that is not a quantized folder; the last one only of a GGUF file.
OF_CHECKPOINT = {"int8-weight-only", GPTQ_RUNG, "speculation", "all-together", GGUF_RUNG}
NATIVE = tuple(name for name, mode in RUNGS.items() if mode.fused and name not in OF_CHECKPOINT)
# Where the native steps are, the compiler's rungs on quantized weights are measured only when they are asked for.
COMPILED_QUANTIZED = tuple(name for name, mode in RUNGS.items() if mode.compiled and mode.weights)
TEXT_BYTES = 200_000  # of a text that is scored
# Reported as they are given.
SETTINGS = ("dtype", "batches", "prompt_tokens", "contexts", "new_tokens", "kv_cache_dtype", "speculate")


@dataclass(frozen=True, kw_only=True)
class GenerateLadder(Ladder):
    """Generation: no cache, static cache, static cache + torch.compile, native steps in bf16, int8, int4; greedy."""

    title: ClassVar[str] = "Generation ladder"
    shape: str | None = None
    """A named shape with random weights: llama-120m, llama-1.1b, gpt2-124m, qwen3-0.6b, qwen3.5-0.8b, llama-7b,
    llama-70b, tiny."""
    model: str | None = None
    """A Hugging Face folder, a GGUF file, a hub id or a short name such as smollm2-135m instead of a shape, also
    without --model. The rungs of a GGUF file are made from its dequantized weights, but for gguf-file."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights (auto: bfloat16) and products; these are in float32 where the processor only emulates it."""
    prompt_tokens: int = 512
    """The context after which every rung decodes."""
    new_tokens: int = 64
    """Tokens that each sequence decodes in each round (2 at most without a cache, where each costs a whole prompt)."""
    batches: tuple[int, ...] = (1,)
    """Numbers of sequences decoded at once, separated by commas: 1,8 also measures 8 rows, beside one."""
    contexts: tuple[int, ...] = ()
    """Also decode after prompts of these lengths, separated by commas, each held against the first: 16,2048."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Format of the rungs' caches: the model's dtype, or int8 or int4 after a rotation; -plain: not rotated."""
    text: str | None = None
    """Also report each rung's perplexity on this text (a file, folder, glob or stdlib), and its KL divergence from the
    model in bfloat16; needs --model. For a GGUF file by default four short texts: a book, a chat, code, German."""
    gptq: str | None = None
    """Also measure gptq-int4-g32, of this folder; if there is none, the model is first quantized there (it writes
    the calibration text itself). Without it the rung is measured only if --rungs names it; its folder is not kept."""
    gptq_samples: Annotated[int, Holds("quantizes", "without a folder to make; give --gptq")] = 128
    """Pieces of 512 tokens of the calibration text, where the folder is made."""
    draft: str | None = None
    """Unless none (the default; of a GGUF file suffix): also measure speculation and, with --gptq, all-together, with
    drafts by this: suffix, mtp, a FOLDER with a smaller model, self:N-layers or self:int4. Needs --text, whose
    documents are the prompts of these rungs."""
    speculate: Annotated[int | None, Holds("drafts", "without drafts; give --draft")] = None
    """Maximum draft length."""
    tensor_parallel: int = 1
    """Also measure the rungs that are not compiled and draft nothing in N processes on the same cores, each with a
    share of the model (NAME-tpN); needs --model."""

    def settled(self) -> Self:
        """The ladder with the defaults that depend on the model."""
        if not self.source.is_gguf():
            return replace(self, draft=draft_name(self.draft or "none"))
        from hasten.data.book import TEXTS

        return replace(self, text=self.text or TEXTS, draft=draft_name(self.draft or "suffix"))

    @property
    def drafts(self) -> bool:
        """Whether a rung drafts, with the model's own default."""
        return self.settled().draft != "none"

    @property
    def quantizes(self) -> bool:
        """Whether a rung by GPTQ is asked for."""
        return self.gptq is not None or any(name in RUNGS and RUNGS[name].gptq for name in self.rungs)

    @property
    def source(self) -> BenchmarkModel:
        """The model. Raises ConfigError unless one of shape and model is given."""
        return BenchmarkModel(shape=self.shape, model=self.model)

    def rows(self, mode: DecodeMode) -> dict[str, dict[str, Any]]:
        """A rung's own row ("") and its further ones, by the ending of their names: each batch and each context, alone.

        Each says how many sequences are decoded at once, after how many tokens, and the ending of the row that it is
        held against.
        """
        first, *more = self.batches
        found: dict[str, dict[str, Any]] = {"": {"batch": first, "prompt_tokens": self.prompt_tokens}}
        # Without a cache a token costs a whole prompt: eight, or a longer one, would show nothing new.
        if mode.cache and not mode.drafted:
            for batch in more:
                found[f"x{batch}"] = {"batch": batch, "prompt_tokens": self.prompt_tokens, "ratio_to": ""}
            for context in self.contexts:
                found[f"c{context}"] = {"batch": first, "prompt_tokens": context, "ratio_to": f"c{self.contexts[0]}"}
        return found

    def modes(self) -> dict[str, DecodeMode]:
        """The rungs to run, by name. Raises ConfigError for those that cannot be."""
        names, stored, gguf = choose_rungs(RUNGS, self.rungs), self.source.only_format(), self.source.is_gguf()
        if GGUF_RUNG in self.rungs and not gguf:
            raise ConfigError(f"{GGUF_RUNG} is measured of a GGUF file, and {self.source.name} is none")
        names = [name for name in names if gguf or name != GGUF_RUNG]
        on_cpu = resolve_device(self.device).type == "cpu"
        if stored is not None:  # what runs it as it is; by default eager, and the native or compiled steps
            possible = [name for name in RUNGS if RUNGS[name].weights in (None, stored) and name not in OF_CHECKPOINT]
            default = ("static-cache", f"{'native' if on_cpu else 'static-cache-compiled'}-{stored}")
            names = [name for name in names if self.rungs or name in default]
            if refused := [name for name in names if name not in possible]:
                raise ConfigError(
                    f"the weights of {self.source.name} are {stored} already, which cannot become the rung "
                    f"{refused[0]!r}; possible: {', '.join(possible)}. The original checkpoint has them all"
                )
        elif not self.rungs:
            others = {*(COMPILED_QUANTIZED if on_cpu else NATIVE), *self.left_out()}
            names = [name for name in names if name not in others]
        for name in names:
            if not self._can_draft(RUNGS[name]) or (self.model is None and RUNGS[name].gptq):
                raise ConfigError(f"{name} is left out: {self.left_out()[name]}")
        found = {name: RUNGS[name] for name in names}
        if not on_cpu:
            for name in OF_CHECKPOINT & found.keys():
                techniques = (*COMPILED, *found[name].techniques[len(NATIVE_STEPS) :])
                found[name] = replace(found[name], fused=False, compiled=True, techniques=techniques)
        if (ranks := self.tensor_parallel) > 1:
            words = f"tensor parallelism of {ranks}"
            found |= {
                f"{name}-tp{ranks}": replace(mode, ranks=ranks, techniques=(*mode.techniques, words))
                for name, mode in found.items()
                if mode.cache and not (mode.compiled or mode.drafted or mode.gptq or mode.file or mode.gguf)
            }
        return found

    def left_out(self) -> dict[str, str]:
        """The rungs that are measured only when they are asked for, or not at all, and why."""
        if self.model is None:
            why = "random weights predict no text; it takes --model"
            return {"int8-weight-only": f"{why}, or --rungs"} | {
                name: why for name, mode in RUNGS.items() if mode.gptq or mode.drafted
            }
        found = {} if self.gptq else {GPTQ_RUNG: "it takes minutes to make; it takes --gptq DIR, or --rungs"}
        for name, mode in RUNGS.items():
            if not self._can_draft(mode) or (mode.drafted and mode.gptq and not self.gptq):
                found[name] = "it takes --draft and --gptq DIR" if mode.gptq else "it takes --draft"
                found[name] += ", another one than self:int4" if mode.gptq and self.draft == "self:int4" else ""
        return found

    def _can_draft(self, mode: DecodeMode) -> bool:
        """Whether the rung has no drafts, or there is what proposes them."""
        return not mode.drafted or (self.draft not in (None, "none") and not (mode.gptq and self.draft == "self:int4"))

    def show(self, report: Mapping[str, Any]) -> bool:
        """Print the table, and what is not in it, to standard error; whether any rung could be measured."""
        worked, settings = super().show(report), report["settings"]
        if settings["gptq"] and not settings["gptq"]["found"]:
            say(f"{GPTQ_RUNG}: quantized in {settings['gptq']['seconds']:.0f} s")
        for name, why in settings["left_out"].items():
            say(f"not {name}: {why}")
        return worked

    def run(self) -> dict[str, Any]:
        """Measure and return the report. Raises ConfigError or ResourceError before anything is allocated."""
        with tempfile.TemporaryDirectory(prefix="hasten-ladder-") as place:
            return self.settled()._run(Path(place))

    def _run(self, place: Path) -> dict[str, Any]:
        rungs, device, source = self.modes(), str(resolve_device(self.device)), self.source
        ladder = replace(self, device=device, dtype="bfloat16" if self.dtype == "auto" else self.dtype)
        _check(ladder)
        gptq, note = self.gptq or str(place / "gptq"), ""
        if source.is_gguf():
            note = " (dequantized)"
            ladder = replace(ladder, model=source.dequantized(place / "model").model)
        from_gptq = any(mode.gptq for mode in rungs.values())
        made_gptq = None
        if from_gptq:
            made_gptq = gptq_folder(ladder.source, Path(gptq), threads=self.threads, samples=self.gptq_samples)
        wide = emulated(ladder.dtype, device) is not None
        quantized = ladder.source.only_format() is not None
        made = []
        for name, mode in rungs.items():
            model = source if mode.gguf else replace(ladder.source, kv_heads=mode.kv_heads)
            model = BenchmarkModel(model=gptq) if mode.gptq else model
            config, size = model.config(), resolve_dtype(ladder.dtype).itemsize
            weights = model.held_bytes() if quantized or mode.gptq or mode.gguf else size * parameters(config).total
            need = _memory(config, ladder, ladder.rows(mode).values(), weights=weights, wide=wide)
            if mode.file:
                need = need.beside(written=resolve_dtype(mode.file).itemsize * parameters(config).total)
            if ladder.text and not quantized:
                need = need.beside(compared=2 * parameters(config).total)
            memory = check_fits(f"{model.name} in {ladder.dtype}", need, device)
            shown = name if ladder.batches[0] == 1 else f"{name}-x{ladder.batches[0]}"
            setup = "hasten.bench.generate_rung:GenerateRung"
            arguments = {"ladder": ladder, "mode": mode, "source": model}
            made.append(
                Rung(shown, mode.techniques, setup, arguments, memory, twice=mode.compiled, processes=mode.ranks)
            )
        integers = quantized or any(mode.weights in ("int8", "int4") for mode in rungs.values())
        return ladder.measure(
            made,
            kind="generate",
            settings={
                "model": f"{source.name}{note}, {ladder.dtype}, {ladder.prompt_tokens} prompt tokens",
                "weights": "checkpoint" if ladder.model else "random",
                "batch": ladder.batches[0],
                **{name: getattr(ladder, name) for name in SETTINGS},
                "text_bytes": None if ladder.text is None else TEXT_BYTES,
                "gptq": made_gptq,
                "draft": folder_name(ladder.draft) if ladder.draft and ladder.draft != "none" else None,
                "left_out": {name: why for name, why in self.left_out().items() if name not in rungs},
            },
            dtypes=("float32" if wide else ladder.dtype, *(("int8",) if integers else ())),
        )


def _check(ladder: GenerateLadder) -> None:
    """Raise ConfigError for what cannot be measured, before anything is allocated."""
    config = ladder.source.config()
    if ladder.text is not None and ladder.model is None:
        raise ConfigError("random weights predict no text; give --text with --model")
    if ladder.gptq and (ladder.model is None or ladder.source.only_format() is not None):
        raise ConfigError("--gptq quantizes a checkpoint that is not quantized; give it with --model")
    check_least("--gptq-samples", ladder.gptq_samples)
    check_least("--speculate", ladder.speculate)
    if ladder.draft != "none":
        if ladder.text is None:
            known = "suffix, mtp, a folder, self:N-layers or self:int4"
            raise ConfigError(f"--draft takes {known}, and --text for its prompts")
        if ladder.source.only_format() is not None:
            raise ConfigError("--draft is measured on a checkpoint that is not quantized, which has all rungs")
    check_least("--tensor-parallel", ladder.tensor_parallel)
    if ladder.tensor_parallel > 1:
        from hasten.checkpoints.load import open_checkpoint, shares_of

        if ladder.model is None:
            raise ConfigError("ranks load their shares from files; give --tensor-parallel with --model")
        shares_of(open_checkpoint(ladder.model), ladder.tensor_parallel)
    resolve_dtype(ladder.dtype)  # raises for a name that is not known
    for option, numbers in (("--batches", ladder.batches), ("--contexts", ladder.contexts)):
        if any(number < 1 for number in numbers) or len(set(numbers)) != len(numbers):
            raise ConfigError(f"{option} takes different whole numbers from 1 up; found {', '.join(map(str, numbers))}")
    if not ladder.batches:
        raise ConfigError("--batches needs at least one number of sequences")
    check_least("--prompt-tokens", ladder.prompt_tokens)
    check_least("--new-tokens", ladder.new_tokens, 2)
    longest = max((ladder.prompt_tokens, *ladder.contexts))
    if longest + ladder.new_tokens > config.max_positions:
        raise ConfigError(
            f"{longest} prompt and {ladder.new_tokens} new tokens do not fit the {config.max_positions} positions of "
            f"{ladder.source.name}; lower --prompt-tokens, --contexts or --new-tokens"
        )


def _memory(
    config: ModelConfig, ladder: GenerateLadder, rows: Collection[Mapping[str, Any]], *, weights: int, wide: bool
) -> Memory:
    """Memory of one rung with all of its rows. wide: readable blocks compute and cache in float32."""
    from hasten.engine.cache import row_format

    dtype = resolve_dtype("float32" if wide else ladder.dtype)
    longest = min(max(row["batch"] * row["prompt_tokens"] for row in rows), LARGEST_PREFILL)
    row_bytes = row_format(ladder.kv_cache_dtype).bytes(config.head_dim, dtype)
    use = InferenceUse(length=0, step=longest, weights=weights, row_bytes=row_bytes)
    lengths = [row["prompt_tokens"] + ladder.new_tokens for row in rows]
    each = [cache_bytes(config, replace(use, length=length)) for length in lengths]
    memory = inference_memory(config, use)
    caches = sum(row["batch"] * own for row, own in zip(rows, each, strict=True))
    return replace(memory, parts={**memory.parts, "cache": caches})
