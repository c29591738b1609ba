"""One stream: hasten's captured step and gpt-fast's compiled one, with random weights of the same shapes.

`waited` waits for every token before the next step; `queued` is `generate`, which reads them a step late, where
gpt-fast reads none.
"""

import sys
import time
import types
from typing import Any

import torch

from gpu.models import by_compiler, bytes_per_token, decoder_of, fastest, random_model
from gpu.worker import DEVICE, PEERS, TINY, kernel_table, memory, seconds_of, serve, sync, tidy

CONTEXT, NEW = (512, 96) if not TINY else (32, 8)
# gpt-fast's own names of the shapes.
PEER_SHAPES = {
    "llama-7b": {"block_size": 4096, "n_layer": 32, "n_head": 32, "dim": 4096},
    "llama-1.1b": {
        "block_size": 4096, "n_layer": 22, "n_head": 32, "n_local_heads": 4, "dim": 2048, "intermediate_size": 5632,
    },
    "tiny": {
        "block_size": 512, "vocab_size": 256, "n_layer": 2, "n_head": 4, "n_local_heads": 2, "dim": 256,
        "intermediate_size": 512,
    },
}  # fmt: skip


def hasten(shape: str, format: str, group: int = 0) -> None:
    from hasten.engine.generate import Timing, generate
    from hasten.engine.given_texts import GivenTexts
    from hasten.engine.params import SamplingParams

    model = fastest(random_model(shape, format=format, group=group))
    prompt = torch.randint(model.config.vocab_size, (CONTEXT,)).tolist()
    decoder = decoder_of(model, batch=1, capacity=CONTEXT + NEW)
    begin = time.perf_counter()
    decoder.decode(decoder.prefill([prompt]).argmax(-1))
    sync()
    compiled = round(time.perf_counter() - begin, 1)

    def measure() -> dict[str, Any]:
        decoder.truncate(0)
        token = int(decoder.prefill([prompt]).argmax())
        begin = time.perf_counter()
        for _ in range(NEW):
            token = int(decoder.decode(torch.tensor([token], device=DEVICE)).argmax())
        waited = NEW / (time.perf_counter() - begin)
        timing, params = Timing(), SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True)
        generate(model, [prompt], params, compiled=by_compiler(model), timing=timing)
        queued = timing.decode_tokens_per_second
        read = bytes_per_token(shape, format, group, CONTEXT + NEW // 2)
        return {"waited": waited, "queued": queued, "bytes_per_token": read, "compile_s": compiled, **memory()}

    def one_prompt(length: int) -> Any:
        own = GivenTexts(model, batch=1, capacity=length + 1)
        ids = torch.randint(model.config.vocab_size, (length,)).tolist()

        def run() -> None:
            own.truncate(0)
            own.prefill([ids])

        return run

    def prefill() -> dict[str, float]:
        return {str(n): n / seconds_of(one_prompt(n), 4, 1) for n in (CONTEXT, 4 * CONTEXT)}

    def user() -> dict[str, Any]:
        """`hasten.generate` as a user calls it: the first call compiles and captures, the second may reuse that."""
        params = SamplingParams(max_new_tokens=NEW, temperature=0.8, top_k=200, ignore_eos=True)
        found = []
        for _ in range(2):
            timing = Timing()
            sync()
            begin = time.perf_counter()
            generate(model, [prompt], params, compiled=by_compiler(model), timing=timing)
            found.append({"all": NEW / (time.perf_counter() - begin), "decode": timing.decode_tokens_per_second})
        return {"first": found[0], "second": found[1]}

    def profile() -> dict[str, Any]:
        decoder.truncate(0)
        tokens = decoder.prefill([prompt]).argmax(-1)

        def run() -> None:
            nonlocal tokens
            decoder.truncate(CONTEXT)
            for _ in range(8):
                tokens = decoder.decode(tokens).argmax(-1)

        return kernel_table(run, 8)

    serve({"measure": measure, "prefill": prefill, "user": user, "profile": profile})


def _peer_model(theirs: Any, shape: str, format: str, group: int) -> Any:
    from model import ModelArgs, Transformer  # type: ignore[import-not-found]

    with torch.device("meta"):
        model = Transformer(ModelArgs(**PEER_SHAPES[shape if not TINY else "tiny"]))
    if format != "bfloat16":
        import quantize  # type: ignore[import-not-found]

        kinds = {"int8": quantize.WeightOnlyInt8QuantHandler, "int4": quantize.WeightOnlyInt4QuantHandler}
        model = kinds[format](model, *([group] if group else [])).convert_for_runtime()
    model = model.to(torch.bfloat16).to_empty(device=DEVICE).eval()
    for name, one in [*model.named_parameters(), *model.named_buffers()]:
        if one.is_floating_point():
            one.requires_grad_(False)
        if one.dtype == torch.int8:
            one.random_(-128, 128)
        elif one.dtype == torch.int32:
            one.random_(-(1 << 31), (1 << 31) - 1)
        elif name.endswith("scales"):
            one.fill_(2e-4)
        elif name.endswith("scales_and_zeros"):
            one[..., 0].fill_(3e-3)
            one[..., 1].fill_(0)
        elif one.dim() == 1:
            one.fill_(1)
        else:
            one.normal_(0, 0.02)
    return model


def gptfast(shape: str, format: str, group: int = 0, checkout: str = "gptfast-sdpa") -> None:
    """gpt-fast's own functions, compiled as its README does; its tokenizer is left out."""
    stub = types.ModuleType("tokenizer")
    stub.get_tokenizer = None  # type: ignore[attr-defined]
    sys.modules["tokenizer"] = stub
    sys.path.insert(0, str(PEERS / checkout))
    import generate as theirs  # type: ignore[import-not-found]

    model = _peer_model(theirs, shape, format, group)
    vocab = model.config.vocab_size
    if DEVICE != "cpu":
        theirs.decode_one_token = torch.compile(theirs.decode_one_token, mode="reduce-overhead", fullgraph=True)
    prompt = torch.randint(0, vocab, (CONTEXT,), device=DEVICE, dtype=torch.int64)
    how: dict[str, Any] = {"temperature": 0.8, "top_k": min(200, vocab)}

    def own(new: int) -> Any:
        return theirs.generate(model, prompt, new, batch_size=1, interactive=False, draft_model=None, **how)

    begin = time.perf_counter()
    own(NEW)
    own(12)
    sync()
    compiled = round(time.perf_counter() - begin, 1)

    def start() -> tuple[Any, Any]:
        token = theirs.prefill(model, prompt.view(1, -1), torch.arange(CONTEXT, device=DEVICE), **how).clone()
        return token.view(1, -1), torch.tensor([CONTEXT], device=DEVICE, dtype=torch.int)

    @torch.no_grad()
    def measure() -> dict[str, Any]:
        sync()
        begin = time.perf_counter()
        own(NEW)  # the prompt included, as its README reports
        sync()
        whole = NEW / (time.perf_counter() - begin)
        token, at = start()
        sync()
        begin = time.perf_counter()
        theirs.decode_n_tokens(model, token, at, NEW - 1, **how)
        sync()
        queued = (NEW - 1) / (time.perf_counter() - begin)
        read = bytes_per_token(shape, format, group, CONTEXT + NEW // 2, 4)
        return {"user": whole, "queued": queued, "bytes_per_token": read, "compile_s": compiled, **memory()}

    @torch.no_grad()
    def profile() -> dict[str, Any]:
        token, _ = start()

        def run() -> None:
            at = torch.tensor([CONTEXT], device=DEVICE, dtype=torch.int)
            theirs.decode_n_tokens(model, token, at, 8, **how)

        return kernel_table(run, 8)

    @torch.no_grad()
    def prefill() -> dict[str, float]:
        """Needs caches of its own length, so those that decoding was compiled for come back afterwards."""
        found = {}
        names = ("max_seq_length", "max_batch_size", "freqs_cis", "causal_mask")
        before = {name: getattr(model, name) for name in names if hasattr(model, name)}
        caches = [layer.attention.kv_cache for layer in model.layers]
        for length in (CONTEXT, 4 * CONTEXT):
            with torch.device(DEVICE):
                model.setup_caches(max_batch_size=1, max_seq_length=max(length, CONTEXT + NEW))
            ids, at = torch.randint(0, vocab, (1, length), device=DEVICE), torch.arange(length, device=DEVICE)
            found[str(length)] = length / seconds_of(lambda x=ids, p=at: theirs.prefill(model, x, p, **how), 4, 1)
        for name, value in before.items():
            setattr(model, name, value)
        for layer, cache in zip(model.layers, caches, strict=True):
            layer.attention.kv_cache = cache
        tidy()
        return found

    serve({"measure": measure, "profile": profile, "prefill": prefill})
