"""`hasten eval`: how well a model predicts a text."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from hasten.cli.options import ModelOptions
from hasten.errors import ConfigError
from hasten.machine.files import require_writable, write_json
from hasten.machine.progress import share


@dataclass(frozen=True, kw_only=True)
class Eval(ModelOptions):
    """Perplexity and bits per byte of a text; every token after the first of a document is predicted once."""

    text: str
    """A file, a folder or a glob of .txt, .py, .md, .jsonl or .parquet; each file or line of .jsonl is a document."""
    context: int | None = None
    """Tokens a window holds; the model's positions, at most 2048, by default."""
    stride: int | None = None
    """How far a window moves; half the context by default. Smaller is slower and gives each token more context."""
    overlap: bool = True
    """--no-overlap moves each window by its whole length: half the work, and less context for the first tokens."""
    limit_bytes: int | None = None
    """Stop after about so many bytes of text."""
    json: str | None = None
    """Write perplexity, bits_per_byte, tokens and seconds as JSON to this file; "-": to standard output."""

    def run(self) -> None:
        require_writable(self.json)
        if not self.overlap and self.stride is not None:
            raise ConfigError("--no-overlap is a stride of the whole context: give it or --stride, not both")
        from hasten.data import read_documents

        documents = list(read_documents(self.text, limit_bytes=self.limit_bytes))
        model = self.load()
        import torch

        from hasten.generation.perplexity import DEFAULT_CONTEXT, perplexity
        from hasten.training.build import fuse_activations

        if self.fuse and model.dtype == torch.float32:  # other dtypes have fused blocks
            fuse_activations(model, torch.float32)

        context = min(model.config.max_positions, DEFAULT_CONTEXT) if self.context is None else self.context
        stride = self.stride if self.overlap else context
        start = time.perf_counter()
        with share("scored tokens") as progress:
            found = perplexity(model, documents, context=context, stride=stride, progress=progress)
        seconds = time.perf_counter() - start
        write_json(self.json, asdict(found) | {"seconds": seconds})
        if self.json != "-":
            bits = "" if found.bits_per_byte is None else f"bits per byte {found.bits_per_byte:.4f}   "
            print(f"perplexity {found.perplexity:.4f}   {bits}tokens {found.tokens:,} in {seconds:.1f} s")
