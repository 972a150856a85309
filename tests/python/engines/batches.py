"""Requests whose keys lie in the blocks of a cache, and what an engine knows of them."""

import torch

BLOCK = 128
BLOCKS = 64
# What caches hold where nothing was written: a key that is read there, or lost, shows.
UNWRITTEN = 7.0


class Batch:
    """Requests with `cached` keys that the cache has and `rows` new ones, in blocks of shuffled order."""

    def __init__(self, cached, rows, seed=0, width=None):
        self.cached, self.rows = list(cached), list(rows)
        self.lengths = [old + new for old, new in zip(cached, rows)]
        self.tokens = sum(rows)
        self.starts = torch.tensor([0, *rows]).cumsum(0).int()
        # Engines pad with block 0, which is nobody's here.
        order = 1 + torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(seed)).int()
        needed = [-(-length // BLOCK) for length in self.lengths]
        self.table = torch.zeros(len(rows), width or max(needed), dtype=torch.int32)
        for request, blocks in enumerate(needed):
            self.table[request, :blocks] = order[sum(needed[:request]) :][:blocks]
        self.slots = torch.cat([self.where(request)[old:] for request, old in enumerate(cached)]).int()

    def where(self, request, keys=None):
        """The slots of the oldest keys of a request, by default of all that it has in the end."""
        at = torch.arange(self.lengths[request] if keys is None else keys)
        return self.table[request, at // BLOCK].long() * BLOCK + at % BLOCK

    def of(self, request, packed):
        """The rows of a request in a tensor [tokens, ...]."""
        return packed[self.starts[request] : self.starts[request + 1]]

    def new(self, parts):
        """The new rows of all requests, of tensors with all rows of each."""
        return torch.cat([part[old:] for part, old in zip(parts, self.cached)])

    def cache(self, parts, lengths, fractal=False):
        """A cache with the first rows of `parts`, [keys, groups, width] of each request.

        Its shape is [blocks, BLOCK, groups, width], in the fractal format too, whose bytes are those of
        [blocks, groups * width / 16, BLOCK, 16].
        """
        groups, width = parts[0].shape[1:]
        cache = torch.full((BLOCKS, BLOCK, groups, width), UNWRITTEN, dtype=parts[0].dtype)
        for request, (part, length) in enumerate(zip(parts, lengths)):
            slots = self.where(request, length)
            if fractal:
                pieces = cache.view(BLOCKS, -1, BLOCK, 16)
                pieces[slots // BLOCK, :, slots % BLOCK] = part[:length].reshape(length, -1, 16)
            else:
                cache.view(-1, groups, width)[slots] = part[:length]
        return cache
