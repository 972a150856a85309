"""Native sparse attention: compressed tokens, the blocks that they choose, and attention to these blocks."""

import torch
import torch_npu

from harness import case, close, counted, refused
from tensors import npu

HALVES = [torch.float16, torch.bfloat16]
# How far scores of blocks may be from exact ones near the last that is chosen.
NEAR = 1e-4
UNTOUCHED = 77.0


def draw(*shape, dtype=torch.float16):
    return torch.randn(shape).to(dtype)


def starts(tokens, block, stride):
    """The first tokens of the blocks that lie within so many tokens."""
    return [first for first in range(0, tokens, stride) if first + block <= tokens]


def compressed(tokens, weight, block, stride):
    """The compressed tokens of a sequence [tokens, N, D]."""
    rows = [
        torch.einsum("lnd,ln->nd", tokens[first : first + block].double(), weight.double())
        for first in starts(len(tokens), block, stride)
    ]
    return torch.stack(rows) if rows else tokens.new_zeros((0, *tokens.shape[1:])).double()


def paged(sequences, page):
    """Sequences [tokens, ...] in a cache [blocks, page, ...] whose blocks are in no order, and their table."""
    columns = max(-(-len(tokens) // page) for tokens in sequences) + 1
    blocks = torch.randperm(len(sequences) * columns + 1)
    table = blocks[:-1].reshape(len(sequences), columns)
    cache = torch.randn((len(blocks), page, *sequences[0].shape[1:])).to(sequences[0].dtype)
    for row, tokens in zip(table, sequences):
        for first in range(0, len(tokens), page):
            part = tokens[first : first + page]
            cache[row[first // page], : len(part)] = part
    return cache, table.int()


@case(dtype=HALVES, block=[16, 32, 64], stride=[16, 32], heads=[1, 3, 8, 16], dim=[64, 192])
def blocks_become_one_token(dtype, block, stride, heads, dim):
    if stride > block:
        return
    lengths = [100, block - 1, 3 * block, 257]
    tokens = [draw(length, heads, dim, dtype=dtype) for length in lengths]
    weight = draw(block, heads, dtype=dtype)
    counted("npu_nsa_compress")
    found = torch_npu.npu_nsa_compress(
        npu(torch.cat(tokens)), npu(weight), block, stride, actual_seq_len=torch.tensor(lengths).cumsum(0).tolist()
    )
    expected = torch.cat([compressed(of, weight, block, stride) for of in tokens])
    close(found, expected, tolerance=(2e-2, 1e-2))


@case(dtype=HALVES, block=[16, 32, 128], stride=[16, 32], heads=[1, 4], page=[64, 128], several=[1, 2])
def the_newest_block_goes_to_its_slot(dtype, block, stride, heads, page, several):
    if stride > block:
        return
    lengths = [block, block + stride + 1, block + 5 * stride, block - 1, 256 + block] * several
    tokens = [draw(length, heads, 64, dtype=dtype) for length in lengths]
    cache, table = paged(tokens, page)
    weight = draw(block, heads, dtype=dtype)
    slots = torch.randperm(4 * len(lengths))[: len(lengths)].int()
    into = npu(torch.full((4 * len(lengths), heads, 64), UNTOUCHED, dtype=dtype))
    counted("npu_nsa_compress_infer")
    torch_npu.npu_nsa_compress_infer(
        npu(cache), npu(weight), npu(slots), block, stride, page,
        block_table=npu(table), actual_seq_len=lengths, cache=into,
    )
    expected = torch.full(into.shape, UNTOUCHED).double()
    for of, slot in zip(tokens, slots):
        if len(of) >= block and (len(of) - block) % stride == 0:
            expected[slot] = compressed(of[-block:], weight, block, stride)[0]
    close(into, expected, tolerance=(2e-2, 1e-2))


class Decoding:
    """Query rows and original tokens of sequences, with heads of 192 elements and values of 128."""

    def __init__(self, rows, tokens, kv_heads=1, group=4, dtype=torch.float16, dims=(192, 128)):
        self.rows, self.tokens, self.kv_heads, self.group = rows, tokens, kv_heads, group
        self.query = [draw(n, kv_heads * group, dims[0], dtype=dtype) for n in rows]
        self.dtype, self.dims, self.scale = dtype, dims, dims[0] ** -0.5

    def queries(self, layout):
        return npu(torch.cat(self.query) if layout == "TND" else torch.stack(self.query))

    def weights(self, i, row, key):
        """Weights [N1, tokens] of a row for keys [tokens, N2, D]."""
        key = key.double().repeat_interleave(self.group, 1)
        return (self.scale * torch.einsum("hd,thd->ht", self.query[i][row].double(), key)).softmax(-1)

    def attention(self, weights, value):
        return torch.einsum("ht,thd->hd", weights, value.double().repeat_interleave(self.group, 1))


class Choosing(Decoding):
    """The same with compressed tokens."""

    def __init__(self, rows, tokens, block=32, stride=16, select=64, **arguments):
        super().__init__(rows, tokens, **arguments)
        self.block, self.stride, self.select = block, stride, select
        self.counts = [len(starts(length, block, stride)) for length in tokens]
        of = lambda dim: [draw(n, self.kv_heads, dim, dtype=self.dtype) for n in self.counts]
        self.key, self.value = map(of, self.dims)

    def call(self, layout, count, page, originals=True):
        keys, table = paged([torch.cat([k.flatten(1), v.flatten(1)], 1) for k, v in zip(self.key, self.value)], page)
        keys, values = keys.split([self.kv_heads * dim for dim in self.dims], -1)
        counted("npu_nsa_compress_attention_infer")
        return torch_npu.npu_nsa_compress_attention_infer(
            self.queries(layout), npu(keys.contiguous()), npu(values.contiguous()), self.scale,
            self.kv_heads * self.group, self.kv_heads, self.select, count, page, self.block, self.stride,
            layout=layout, block_table=npu(table), actual_seq_qlen=self.rows, actual_cmp_seq_kvlen=self.counts,
            actual_sel_seq_kvlen=self.tokens if originals else None,
        )

    def compare(self, layout, out, chosen):
        number = 0
        for i, rows in enumerate(self.rows):
            for row in range(rows):
                # Compressed tokens that end at the row's position or before.
                position = self.tokens[i] - rows + row
                seen = len(starts(position + 1, self.block, self.stride))
                weights = self.weights(i, row, self.key[i][:seen])
                at = number if layout == "TND" else (i, row)
                close(out[at], self.attention(weights, self.value[i][:seen]), f"row {row} of sequence {i}")
                for head, blocks in enumerate(chosen[at].cpu().tolist()):
                    of_heads = weights[head * self.group : (head + 1) * self.group].sum(0)
                    self.compare_blocks(i, blocks, of_heads)
                number += 1

    def compare_blocks(self, i, chosen, weights):
        reach = (self.counts[i] - 1) * self.stride + self.block
        blocks = -(-reach // self.select)
        outer, inner = self.select // self.stride, self.block // self.stride
        score = torch.zeros(blocks).double()
        for j in range(blocks):
            for m in range(outer):
                for n in range(inner):
                    at = outer * (j + 1) - m - n
                    if 0 <= at < len(weights):
                        score[j] += weights[at]
        forced = {0, blocks - 1, max(blocks - 2, 0)}
        assert len(set(chosen)) == len(chosen) and forced <= set(chosen), f"sequence {i}: {chosen} of {blocks}"
        best = score[[j for j in range(blocks) if j not in forced]].sort(descending=True).values
        found = score[[j for j in chosen if j not in forced]].sort(descending=True).values
        assert (best[: len(found)] - found).abs().max().item() < NEAR if len(found) else True, f"sequence {i}: {chosen}"


@case(layout=["TND", "BSND"], dtype=HALVES, rows=[1, 3], count=[3, 5, 8], heads=[(1, 4), (2, 8)], page=[64, 128])
def compressed_tokens_choose_blocks(layout, dtype, rows, count, heads, page):
    choosing = Choosing([rows] * 3, [600, 1111, 1040], kv_heads=heads[0], group=heads[1], dtype=dtype)
    choosing.compare(layout, *choosing.call(layout, count, page))


@case(sizes=[(16, 16, 16), (32, 32, 64), (64, 16, 64), (32, 16, 128), (48, 16, 48)], dims=[(192, 128), (64, 64)], group=[1, 16])
def sizes_of_blocks(sizes, dims, group):
    block, stride, select = sizes
    choosing = Choosing([1, 2, 4], [800, 700, 900], block, stride, select, dims=dims, group=group)
    choosing.compare("TND", *choosing.call("TND", 5, 64))


@case(layout=["TND", "BSND"])
def one_row_needs_no_original_lengths(layout):
    choosing = Choosing([1, 1], [520, 900])
    choosing.compare(layout, *choosing.call(layout, 4, 128, originals=False))


@case()
def more_blocks_than_a_sequence_has_are_refused():
    choosing = Choosing([1, 1], [520, 200])
    refused(lambda: choosing.call("TND", 5, 128), "561103", "nsa_compress_attention.short")


class Selecting(Decoding):
    """The same with lists of blocks."""

    def __init__(self, rows, tokens, count, select=64, **arguments):
        super().__init__(rows, tokens, **arguments)
        self.count, self.select = count, select
        of = lambda dim: [draw(n, self.kv_heads, dim, dtype=self.dtype) for n in tokens]
        self.key, self.value = map(of, self.dims)
        self.lists = [
            torch.stack([torch.stack([self.list(i, n, row) for _ in range(self.kv_heads)]) for row in range(n)])
            for i, n in enumerate(rows)
        ]

    def seen(self, i, rows, row):
        return self.tokens[i] - (rows - 1 - row)

    def list(self, i, rows, row):
        """The last block of a row and random others but the last but one, as many for each key head, then -1."""
        blocks = -(-self.seen(i, rows, row) // self.select)
        others = torch.randperm(max(blocks - 2, 0))[: self.count - 1 - row % 2]
        chosen = torch.cat([others, torch.tensor([blocks - 1])])
        return torch.nn.functional.pad(chosen, (0, self.count - len(chosen)), value=-1).int()

    def call(self, layout, page):
        keys, table = paged([torch.cat([k.flatten(1), v.flatten(1)], 1) for k, v in zip(self.key, self.value)], page)
        keys, values = keys.split([self.kv_heads * dim for dim in self.dims], -1)
        # The extension looks for an axis of heads in a cache as in queries of BSND, and for none with other queries.
        if layout == "BSND":
            keys, values = (of.unflatten(-1, (self.kv_heads, -1)) for of in (keys, values))
        query = self.queries(layout)
        lists = torch.cat(self.lists) if layout == "TND" else torch.stack(self.lists)
        counted("npu_nsa_select_attention_infer")
        return torch_npu.npu_nsa_select_attention_infer(
            query.flatten(2) if layout == "BSH" else query, npu(keys.contiguous()), npu(values.contiguous()), npu(lists),
            self.scale, self.kv_heads * self.group, self.kv_heads, self.select, self.count, page,
            layout=layout, block_table=npu(table), actual_seq_qlen=self.rows, actual_seq_kvlen=self.tokens,
        )

    def compare(self, layout, out):
        if layout == "BSH":
            out = out.unflatten(-1, (self.kv_heads * self.group, -1))
        number = 0
        for i, rows in enumerate(self.rows):
            for row in range(rows):
                parts = []
                for head in range(self.kv_heads):
                    blocks = [block for block in self.lists[i][row, head].tolist() if block >= 0]
                    named = [t for block in blocks for t in range(block * self.select, (block + 1) * self.select)]
                    named = [t for t in named if t < self.seen(i, rows, row)]
                    one = slice(head * self.group, (head + 1) * self.group)
                    weights = self.weights_of(i, row, named, head)
                    parts.append(weights @ self.value[i][named, head].double())
                close(out[number if layout == "TND" else (i, row)], torch.cat(parts), f"row {row} of sequence {i}")
                number += 1

    def weights_of(self, i, row, named, head):
        query = self.query[i][row, head * self.group : (head + 1) * self.group].double()
        return (self.scale * query @ self.key[i][named, head].double().T).softmax(-1)


@case(layout=["TND", "BSND", "BSH"], dtype=HALVES, rows=[1, 2, 4], heads=[(1, 16), (2, 4), (3, 1)], page=[64, 128])
def rows_attend_to_selected_blocks(layout, dtype, rows, heads, page):
    selecting = Selecting([rows] * 3, [600, 1111, 512], 5, kv_heads=heads[0], group=heads[1], dtype=dtype)
    selecting.compare(layout, selecting.call(layout, page))


@case(select=[16, 48, 128], layout=["TND", "BSND", "BSH"])
def sizes_of_selected_blocks(select, layout):
    selecting = Selecting([3, 3], [900, 700], 5, select, kv_heads=2)
    selecting.compare(layout, selecting.call(layout, 64))


@case()
def other_heads_than_the_operator_has_are_refused():
    selecting = Selecting([1], [600], 5, group=17)
    refused(lambda: selecting.call("TND", 64), "561103", "nsa_selected_attention.heads")
