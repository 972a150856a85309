"""Operators of the ATB library: keys and values into a cache, attention over it, and attention of packed sequences."""

import torch
import torch_npu

import reference
from harness import case, close, counted, exact, strictly
from tensors import BLOCK, JUNK, Batch, npu

HALVES = [torch.float16, torch.bfloat16]


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


class Cache:
    """Keys and values of a batch in blocks of shuffled order, with a number of their own wherever nothing was written."""

    def __init__(self, batch, block=BLOCK):
        counts = [-(-length // block) for length in batch.keys]
        order = torch.randperm(sum(counts) + 2)[: sum(counts)].split(counts)
        self.table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        self.tensors = []
        for parts in (batch.key, batch.value):
            cache = torch.full((sum(counts) + 2, block, parts[0].shape[0], parts[0].shape[2]), JUNK, dtype=batch.dtype)
            for row, (blocks, part) in enumerate(zip(order, parts)):
                self.table[row, : len(blocks)] = blocks
                for token in range(part.shape[1]):
                    cache[blocks[token // block], token % block] = part[:, token]
            self.tensors.append(cache)


def packed(parts):
    """Tensors [N, rows, D] as one [rows, N, D]."""
    return torch.cat([part.transpose(0, 1) for part in parts])


def empty(query):
    return torch.full_like(query, JUNK)


@case(dtype=HALVES + [torch.int8], value_dim=[64, 32])
def keys_and_values_into_their_slots(dtype, value_dim):
    def draw(*shape):
        return torch.randint(-100, 100, shape).to(dtype)

    tokens = draw(9, 2, 64), draw(9, 2, value_dim)
    caches = draw(4, 16, 2, 64), draw(4, 16, 2, value_dim)
    slots = torch.randperm(64)[:9].to(torch.int32)
    slots[3] = -1
    on_device = [npu(cache) for cache in caches]
    torch_npu._npu_reshape_and_cache(*map(npu, tokens), *on_device, npu(slots))
    counted("_npu_reshape_and_cache")
    for what, token, cache, actual in zip(("keys", "values"), tokens, caches, on_device):
        expected = cache.clone().flatten(0, 1)
        for row, slot in zip(token, slots.tolist()):
            if slot >= 0:
                expected[slot] = row
        exact(actual, expected.view_as(cache), what)


@case(dtype=HALVES)
def keys_alone_into_their_slots(dtype):
    key, cache = torch.randn(5, 2, 64).to(dtype), torch.randn(4, 16, 2, 64).to(dtype)
    on_device, slots = npu(cache), int32([63, 0, 17, 16, 5])
    torch_npu._npu_reshape_and_cache_siso(npu(key), on_device, npu(slots))
    counted("_npu_reshape_and_cache_siso")
    cache.flatten(0, 1)[slots.long()] = key
    exact(on_device, cache)


@case(dtype=HALVES, heads=[(4, 4), (8, 2), (6, 1)], dims=[(64, 64), (128, 128), (128, 64), (512, 512)])
def decoding(dtype, heads, dims):
    batch = Batch([1] * 3, [300, 128, 7], *heads, *dims, dtype)
    cache, query = Cache(batch), npu(packed(batch.query))
    out = torch.full((3, heads[0], dims[1]), JUNK, dtype=dtype).npu()
    kv = map(npu, cache.tensors)
    lengths = int32(batch.keys)
    torch_npu._npu_paged_attention(query, *kv, heads[1], heads[0], batch.scale, npu(cache.table), lengths, out)
    counted("_npu_paged_attention")
    close(out, packed(batch.expected(reference.attend)[0]))


@case(dtype=HALVES)
def decoding_with_a_workspace(dtype):
    batch = Batch([1] * 2, [200, 40], 8, 2, 128, dtype=dtype)
    cache, query = Cache(batch), npu(packed(batch.query))
    out = empty(query)
    call = [query, *map(npu, cache.tensors), 2, 8, batch.scale, npu(cache.table), int32(batch.keys), out]
    workspace = torch_npu._npu_paged_attention_get_workspace(*call)
    assert workspace.numel() > 0
    torch_npu._npu_paged_attention(*call, workspace=workspace)
    counted("_npu_paged_attention")
    close(out, packed(batch.expected(reference.attend)[0]))


@case()
def decoding_in_a_graph():
    """The lengths are those of the capture; keys and queries those of the replay."""
    batch = Batch([1] * 2, [200, 40], 8, 2, 128)
    cache = Cache(batch)
    query, kv = torch.zeros(2, 8, 128).half().npu(), [torch.zeros_like(tensor).npu() for tensor in cache.tensors]
    out, table, lengths = empty(query), npu(cache.table), int32(batch.keys)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch_npu._npu_paged_attention(query, *kv, 2, 8, batch.scale, table, lengths, out)
    for held, tensor in zip([query, *kv], [packed(batch.query), *cache.tensors]):
        held.copy_(tensor)
    graph.replay()
    counted("_npu_paged_attention")
    close(out, packed(batch.expected(reference.attend)[0]))


def hiding(dtype):
    """The number that hides a key: what is added for FLOAT16, and a truth value for BF16."""
    return [-10000.0, -torch.inf] if dtype == torch.float16 else [1.0]


@case(dtype=HALVES, heads=[(4, 4), (8, 2)], dims=[(64, 64), (128, 128), (192, 128)], each=[False, True])
def packed_sequences_with_a_mask(dtype, heads, dims, each):
    batch = Batch([130, 17, 64], [130, 17, 64], *heads, *dims, dtype)
    query, key, value = (npu(packed(parts)) for parts in (batch.query, batch.key, batch.value))
    hidden = ~reference.left_up(144, 144)
    if each:
        hidden = hidden | (torch.rand(3, 144, 144) < 0.3).logical_and(~torch.eye(144, dtype=torch.bool))
    seen = batch.expected(
        reference.attend, visible=lambda i: ~(hidden[i] if each else hidden)[: batch.rows[i], : batch.keys[i]]
    )
    for number in hiding(dtype):
        mask = torch.zeros(hidden.shape).masked_fill(hidden, number).to(dtype)
        out = torch.full((*query.shape[:2], dims[1]), JUNK, dtype=dtype).npu()
        lengths = int32(batch.rows)
        torch_npu._npu_flash_attention(query, key, value, npu(mask), lengths, batch.scale, *heads, out)
        counted("_npu_flash_attention")
        close(out, packed(seen[0]))


@case(dtype=HALVES)
def packed_sequences_without_a_mask(dtype):
    batch = Batch([130, 17], [130, 17], 8, 2, 64, dtype=dtype)
    query, key, value = (npu(packed(parts)) for parts in (batch.query, batch.key, batch.value))
    out = empty(query)
    torch_npu._npu_flash_attention_unpad(query, key, value, int32(batch.rows), batch.scale, 8, 2, out)
    counted("_npu_flash_attention_unpad")
    close(out, packed(batch.expected(reference.attend)[0]))


@case(dtype=HALVES, dim=[64, 128])
def rows_after_a_prefix(dtype, dim):
    """A multiple of 128 keys before the rows, and a square of 128 rows that stands for the whole triangle."""
    batch = Batch([17, 130, 1], [145, 130, 257], 8, 2, dim, dtype=dtype)
    cache, query = Cache(batch), npu(packed(batch.query).flatten(1))
    mask = torch.triu(torch.ones(128, 128), 1).mul(hiding(dtype)[0]).to(dtype)
    out = empty(query)
    tensors = query, *map(npu, cache.tensors), npu(cache.table), npu(mask), int32(batch.rows), int32(batch.keys)
    torch_npu._npu_flash_attention_qlens(*tensors, 2, 8, batch.scale, out)
    counted("_npu_flash_attention_qlens")
    seen = batch.expected(reference.attend, visible=lambda i: reference.right_down(batch.rows[i], batch.keys[i]))
    close(out, packed(seen[0]).flatten(1))


REFUSED = """
import os, torch, torch_npu
def zeros(*shape, dtype=torch.half): return torch.zeros(*shape, dtype=dtype)
def run(function, *arguments, **named):
    function = getattr(torch_npu, function, None) or getattr(torch.ops.atb, function)
    try:
        function(*(a.npu() if torch.is_tensor(a) and a.dtype != torch.int32 else a for a in arguments), **named)
        torch.npu.synchronize()
        print("taken", flush=True)
    except RuntimeError as error:
        print("told:", error, flush=True)
table, lengths = zeros(2, 2, dtype=torch.int32), torch.tensor([5, 6], dtype=torch.int32)
query, cache, packed = zeros(2, 8, 64), zeros(4, 128, 2, 64), zeros(11, 8, 64)
{calls}
os._exit(0)
"""
# Calls whose set-up or launch is refused, and what is said of them.
SAID = [
    ("'_npu_paged_attention', query, cache, cache, 3, 8, 1.0, table.npu(), lengths, query", "PagedAttentionOperation: atb.heads"),
    ("'_npu_paged_attention', query, cache, cache, 2, 8, 1.0, table.npu(), lengths.npu(), query", "contextLens: given no hostData"),
    ("'_npu_flash_attention', packed, packed, packed, zeros(4, 4), lengths, 1.0, 8, 8, packed", "atb.mask"),
    ("'_npu_flash_attention', packed, packed, packed, zeros(16, 16) - 3, lengths, 1.0, 8, 8, packed",
     "mask: -3 for row 0 and key 0 is not emulated"),
    ("'_npu_reshape_and_cache', zeros(2, 2, 64), zeros(2, 2, 64), cache, cache.clone(), lengths.npu() * 0",
     "ReshapeAndCacheOperation: tokens 0 and 1 go to slot 0"),
]


@case(call=range(len(SAID)))
def what_is_refused_is_named(call):
    """After such a call the extension's queue is useless: each has a process of its own."""
    arguments, text = SAID[call]
    code, said = strictly(REFUSED.replace("{calls}", f"run({arguments})"))
    assert code == 0 and "taken" not in said and "told:" in said and text in said, said


# Calls for which there is no operator, and what is said of them.
ABSENT = [
    ("'_npu_paged_attention_mla', query, cache, 1, 8, 1.0, table.npu(), lengths, 32, query",
     "PagedAttentionOperation: mlaVHeadSize: given 32 is not emulated"),
    ("'_npu_paged_attention_splitfuse', query, cache, cache, table.npu(), lengths, zeros(16, 16), lengths, 2, 8, 1.0, query",
     "PagedAttentionOperation: maskType: given 3 is not emulated"),
    ("'_npu_rotary_embedding', torch.arange(2), zeros(2, 64), zeros(2, 64), 64, zeros(9, 64), True",
     "RopeOperation: the operator is not emulated"),
    ("'_npu_group_topk', zeros(2, 8), k=2, group_num=4, n=1", "GroupTopkOperation: the operator is not emulated"),
    ("'npu_ring_mla', *[zeros(4, 8, 64)] * 5, zeros(512, 512), lengths[:1], 8, 8", "GetApiFuncAddr not found AtbRingMLA"),
]


@case()
def what_is_absent_is_named():
    code, said = strictly(REFUSED.replace("{calls}", "\n".join(f"run({call})" for call, _ in ABSENT)))
    assert code == 0 and "taken" not in said and said.count("told:") == len(ABSENT), said
    for _, text in ABSENT:
        assert text in said, f"no {text!r}: {said}"


UNWRITTEN = """
import torch, torch_npu, os
query, caches = torch.randn(1, 8, 64).half().npu(), [torch.empty(4, 128, 2, 64, dtype=torch.half, device="npu") for _ in "kv"]
table, out = torch.ones(1, 2, dtype=torch.int32).npu(), torch.empty(1, 8, 64, dtype=torch.half, device="npu")
{write}
try:
    torch_npu._npu_paged_attention(query, *caches, 2, 8, 1.0, table, torch.tensor([5], dtype=torch.int32), out)
    torch.npu.synchronize()
    print("taken", flush=True)
except RuntimeError as error:
    print("told:", error, flush=True)
os._exit(0)
"""


@case()
def keys_that_nobody_wrote_are_found():
    """The strict mode sees which keys an operator reads, and which the writer of the cache has written."""
    write = """
tokens = torch.randn(2, {tokens}, 2, 64).half().npu()
torch_npu._npu_reshape_and_cache(*tokens, *caches, torch.arange(128, 128 + {tokens}, dtype=torch.int32).npu())
"""
    code, said = strictly(UNWRITTEN.replace("{write}", write.replace("{tokens}", "5")))
    assert code == 0 and "taken" in said, said
    code, said = strictly(UNWRITTEN.replace("{write}", write.replace("{tokens}", "4")))
    assert code == 0 and "told:" in said and "key block 1, token 4: PagedAttentionOperation reads" in said, said
