"""The block manager beside a trivially right model: lists of tokens, whose keys and values are told by the tokens.

A key depends on all tokens up to its own and on the salt, as in a real model, so a block that is adopted, copied or
overwritten wrongly changes what attention reads. Used by test_blocks_machine.py.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from hasten.engine.block_table import Rows
from hasten.engine.blocks import BlockManager, OutOfBlocks
from hasten.engine.cache import KVCache
from hasten.model.config import LayerConfig, ModelConfig
from hasten.ops.attention import AttentionSpec
from hasten.ops.attention.cache_rows import PLAIN
from hasten.ops.attention.reference import reference
from hasten.ops.native import library
from layer_attention import layer_of

STATES = 8191
HEAD = 16
SPEC = AttentionSpec(heads=1, kv_heads=1, head_dim=HEAD, scale=0.25)
DTYPE = torch.bfloat16 if library() is not None else torch.float32
_generator = torch.Generator().manual_seed(0)
QUERY = torch.randn(1, 1, HEAD, generator=_generator)
KEYS, VALUES = torch.randn(2, STATES, 1, HEAD, generator=_generator).to(DTYPE).unbind()


def new_cache(blocks, size, rows):
    config = ModelConfig(
        family="llama",
        vocab_size=8,
        padded_vocab_size=8,
        hidden_size=HEAD,
        intermediate_size=HEAD,
        layers=(LayerConfig(),),
        heads=1,
        kv_heads=1,
        head_dim=HEAD,
        max_positions=1024,
    )
    return KVCache(config, blocks=blocks, block_size=size, dtype=DTYPE, device="cpu", row_format=rows)


def states(tokens, salt):
    """One number for each token, of all that stands before it too."""
    state, found = 1 + len(salt), []
    for token in tokens:
        state = (state * 31 + token + 1) % STATES
        found.append(state)
    return found


def write(cache, rows):
    """rows: [(table, start, the states of its new tokens)]."""
    view = cache.step([Rows(table, start, len(new)) for table, start, new in rows]).layers[0].held
    which = torch.tensor([state for _, _, new in rows for state in new])
    keys, values = KEYS[which], VALUES[which]
    slots, kept = view.metadata.slot_mapping, view.metadata.rows
    view.k[slots], view.v[slots] = kept.write(keys), kept.write(values)


def read(cache, rows, reach=None):
    """rows: [(table, length)]; what one query sees of what the next of each will look back to, (B, D)."""
    layer = cache.step([Rows(table, length - 1, 1) for table, length in rows]).layers[0]
    q = QUERY.expand(len(rows), 1, HEAD).to(torch.float32)
    spec = replace(SPEC, window=None if reach is None else reach - 1)  # itself is not among them
    return layer.kernel(q, layer.held, spec=spec, groups=layer.groups, dense=layer_of(reference, spec))


class Checked:
    """Every operation of the manager beside the model; `check` compares books and contents."""

    def __init__(self, blocks, size, rows=PLAIN, reach=None):
        self.manager = BlockManager(blocks=blocks, block_size=size, reach=reach)
        self.blocks, self.size, self.rows, self.reach = blocks, size, rows, reach
        self.cache, self.plain = new_cache(blocks, size, rows), None
        self.tokens = {}  # sequence -> tokens whose keys are in the cache, or will be after the step
        self.todo = {}  # sequence -> the rest of its prompt
        self.salts = {}
        self.pending = {}  # sequence -> how many of its tokens the step will write
        self.copies = []
        self.counts = Counter()
        self.next = 0

    def pick(self, index, *, idle=False):
        """One of the sequences, of those that have no part in the step that is being put together."""
        found = [s for s in self.tokens if not idle or s not in self.pending]
        return found[index % len(found)] if found else None

    def begin(self, tokens, salt):
        name, self.next = self.next, self.next + 1
        cached = self.manager.begin(name, tokens, salt=salt)
        assert cached < len(tokens)
        assert cached % self.size == 0
        self.counts["adopted"] += cached > 0
        self.tokens[name], self.todo[name], self.salts[name] = list(tokens[:cached]), list(tokens[cached:]), salt

    def schedule(self, name, count, fresh):
        """Up to `count` tokens of the prompt, and when it is done those of `fresh`, go into the next step."""
        if name in self.pending:
            return
        new = self.todo[name][:count] or list(fresh)
        if not self.reserve(name, len(self.tokens[name]) + len(new)):
            return
        self.tokens[name] += new
        del self.todo[name][: len(new)]
        self.pending[name] = len(new)
        self.manager.written(name, self.tokens[name])

    def reserve(self, name, length):
        """Whether there was room; it is not written yet, and may never be."""
        before = self.everything()
        free, needs = self.manager.free, self.manager.needs(name, length)
        try:
            self.copies += self.manager.reserve(name, length)
        except OutOfBlocks:
            assert needs > free
            assert self.everything() == before
            self.counts["refused"] += 1
            return False
        assert free - self.manager.free == needs <= free
        self.manager.check()
        return True

    def run(self):
        self.cache.copy(self.copies)
        self.counts["copied"] += len(self.copies)
        rows = []
        for name, count in self.pending.items():
            new = states(self.tokens[name], self.salts[name])[-count:]
            rows.append((self.manager.block_table(name), len(self.tokens[name]) - count, new))
        if rows:
            write(self.cache, rows)
        self.manager.computed()
        self.copies, self.pending = [], {}

    def refused(self, name, length):
        """What stands between steps changes nothing while one is put together."""
        before = self.everything()
        for call in (lambda: self.manager.fork(name, self.next), lambda: self.manager.truncate(name, length)):
            with pytest.raises(AssertionError, match="between `written` and `computed`"):
                call()
        assert self.everything() == before
        self.counts["forbidden"] += 1

    def fork(self, parent):
        child, self.next = self.next, self.next + 1
        self.manager.fork(parent, child)
        self.tokens[child], self.todo[child] = self.tokens[parent].copy(), self.todo[parent].copy()
        self.salts[child] = self.salts[parent]
        assert self.manager.block_table(child) == self.manager.block_table(parent)

    def truncate(self, name, length):
        if self.reach is not None:  # what came before may be gone
            return
        length %= len(self.tokens[name]) + 1
        self.manager.truncate(name, length)
        self.todo[name] = []
        del self.tokens[name][length:]

    def guess(self, name, tokens, right):
        """Tokens that are computed without being offered to anybody, of which the first `right` stay."""
        start = len(self.tokens[name])
        if self.todo[name] or not self.reserve(name, start + len(tokens)):
            return
        self.run()
        new = states([*self.tokens[name], *tokens], self.salts[name])[start:]
        write(self.cache, [(self.manager.block_table(name), start, new)])
        self.tokens[name] += tokens[:right]
        self.manager.truncate(name, len(self.tokens[name]))

    def release(self, name):
        self.manager.release(name)
        for of in (self.tokens, self.todo, self.salts):
            del of[name]

    def everything(self):
        return [self.manager.block_table(s) for s in self.tokens], self.manager.free, self.manager.stats

    def check(self):
        self.manager.check()
        tables = {name: self.manager.block_table(name) for name in self.tokens}
        assert self.blocks - self.manager.free == len({block for table in tables.values() for block in table})
        self.counts["left"] += any(len(own) > self.size * self.manager.count(name) for name, own in self.tokens.items())
        rows = {name: len(own) for name, own in self.tokens.items() if own}
        if self.pending or self.copies or not rows:
            return
        self.counts["evicted"] = self.manager.stats.evicted_blocks
        found = read(self.cache, [(tables[name], length) for name, length in rows.items()], self.reach)
        assert torch.equal(found, self.expected(rows))

    def expected(self, rows):
        """The same reading of a cache in which every sequence lies by itself, in order, written just now."""
        needed = [-(-length // self.size) for length in rows.values()]
        ends = np.cumsum(needed).tolist()
        if self.plain is None or self.plain.blocks < ends[-1]:
            self.plain = new_cache(2 * ends[-1], self.size, self.rows)
        own = [list(range(end - count, end)) for end, count in zip(ends, needed, strict=True)]
        write(self.plain, [(t, 0, states(self.tokens[n], self.salts[n])) for t, n in zip(own, rows, strict=True)])
        return read(self.plain, list(zip(own, rows.values(), strict=True)), self.reach)
