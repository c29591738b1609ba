"""Engines and requests for the tests of serving."""

import math

from hasten.engine.cache import KVCache, row_format
from hasten.engine.engine import Engine
from hasten.engine.params import SamplingParams
from hasten.engine.request import Request, RequestOutput
from hasten.engine.settings import EngineSettings


def make_engine(model, *, blocks: int = 200, block_size: int = 4, **settings) -> Engine:
    """An engine with so many blocks exactly."""
    values = {"max_sequences": 8, "token_budget": 16} | settings
    rows = row_format(values.get("kv_cache_dtype", "auto"))
    size = KVCache.bytes_per_block(model.config, block_size=block_size, dtype=model.dtype, row_format=rows)
    return Engine(model, model.tokenizer, EngineSettings(cache_bytes=blocks * size, block_size=block_size, **values))


def request(name: str, prompt, *, params: SamplingParams | None = None, **settings) -> Request:
    """A request; sampling settings and request settings by keyword, greedy unless said otherwise."""
    own = {key: settings.pop(key) for key in list(settings) if key in SamplingParams.__slots__}
    params = params or SamplingParams(**{"temperature": 0, "ignore_eos": True, **own})
    return Request(id=name, prompt=tuple(prompt), params=params, **settings)


def run(engine: Engine, requests=(), *, check: bool = True) -> dict[str, list[RequestOutput]]:
    """Everything the engine says until it is idle, by request."""
    for one in requests:
        engine.add(one)
    found: dict[str, list[RequestOutput]] = {}
    while not engine.idle:
        for piece in engine.step():
            found.setdefault(piece.request_id, []).append(piece)
        if check:
            engine.check()
    return found


def tokens_of(pieces: list[RequestOutput], index: int = 0) -> list[int]:
    return [token for piece in pieces if piece.index == index for token in piece.tokens]


def text_of(pieces: list[RequestOutput], index: int = 0) -> str:
    return "".join(piece.text for piece in pieces if piece.index == index)


def reason_of(pieces: list[RequestOutput], index: int = 0) -> str | None:
    return [piece.finish_reason for piece in pieces if piece.index == index][-1]


class Counting:
    """Allows the ids first, first + 1, … in this order, `length` of them."""

    def __init__(self, first: int, length: int, *, at: int = 0, broken_at: int | None = None):
        self.first, self.length, self.at, self.broken_at = first, length, at, broken_at

    @property
    def done(self) -> bool:
        return self.at >= self.length

    def mask(self, row):
        if self.at == self.broken_at:
            row.fill_(-math.inf)
            return
        keep = row[self.first + self.at].clone()
        row.fill_(-math.inf)
        row[self.first + self.at] = keep

    def advance(self, token: int) -> None:
        if token != self.first + self.at:
            raise ValueError(f"{token} was not allowed")
        self.at += 1

    def fork(self):
        return Counting(self.first, self.length, at=self.at, broken_at=self.broken_at)
