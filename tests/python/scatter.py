"""New keys and values into their slots of a cache."""

import torch
import torch_npu

from harness import case, counted, exact
from tensors import npu

BLOCKS, BLOCK, HEADS = 4, 16, 2


def slots(count, dtype, padded=()):
    chosen = torch.randperm(BLOCKS * BLOCK)[:count]
    for token in padded:
        chosen[token] = -1
    return chosen.to(dtype)


def draw(shape, dtype):
    return torch.randint(-100, 100, shape).to(dtype)


def written(cache, tokens, slot_mapping):
    """The cache [blocks, block, ...] after the writes; negative slots write nothing."""
    flat = cache.clone().flatten(0, 1)
    for token, slot in zip(tokens, slot_mapping.tolist()):
        if slot >= 0:
            flat[slot] = token
    return flat.unflatten(0, (BLOCKS, BLOCK))


@case(
    dtype=[torch.float16, torch.bfloat16, torch.int8],
    index=[torch.int32, torch.int64],
    mode=["Norm", None],
)
def caches_in_rows(dtype, index, mode):
    key, value = draw((11, HEADS, 64), dtype), draw((11, HEADS, 32), dtype)
    key_cache, value_cache = draw((BLOCKS, BLOCK, HEADS, 64), dtype), draw((BLOCKS, BLOCK, HEADS, 32), dtype)
    mapping = slots(11, index)
    on_device = npu(key_cache), npu(value_cache)
    counted("npu_scatter_pa_kv_cache")
    torch_npu.npu_scatter_pa_kv_cache(npu(key), npu(value), *on_device, npu(mapping), cache_mode=mode)
    exact(on_device[0], written(key_cache, key, mapping), "key cache")
    exact(on_device[1], written(value_cache, value, mapping), "value cache")


def blocked(cache):
    """[blocks, block, N, D] as [blocks, N * D / c, block, c]."""
    lane = 32 // cache.element_size()
    return cache.flatten(2).unflatten(-1, (-1, lane)).transpose(1, 2).contiguous()


@case(dtype=[torch.float16, torch.bfloat16, torch.int8], axes=[4, 5], default_mode=[True, False])
def caches_in_fractals(dtype, axes, default_mode):
    key, value = draw((9, HEADS, 64), dtype), draw((9, HEADS, 64), dtype)
    caches = draw((2, BLOCKS, BLOCK, HEADS, 64), dtype)
    mapping = slots(9, torch.int32)
    on_device = [npu(blocked(cache)) for cache in caches]
    lane = 32 // key.element_size()
    views = [c if axes == 4 else c.view(BLOCKS, HEADS, 64 // lane, BLOCK, lane) for c in on_device]
    counted("npu_scatter_pa_kv_cache")
    mode = {} if default_mode else {"cache_mode": "PA_NZ"}
    torch_npu.npu_scatter_pa_kv_cache(npu(key), npu(value), *views, npu(mapping), **mode)
    exact(on_device[0], blocked(written(caches[0], key, mapping)), "key cache")
    exact(on_device[1], blocked(written(caches[1], value, mapping)), "value cache")


@case(padded=[(0,), (3, 4), (10,)])
def padding_slots_write_nothing(padded):
    key, value = draw((11, HEADS, 64), torch.float16), draw((11, HEADS, 64), torch.float16)
    caches = draw((2, BLOCKS, BLOCK, HEADS, 64), torch.float16)
    mapping = slots(11, torch.int32, padded)
    on_device = [npu(cache) for cache in caches]
    counted("npu_scatter_pa_kv_cache")
    torch_npu.npu_scatter_pa_kv_cache(npu(key), npu(value), *on_device, npu(mapping), cache_mode="Norm")
    exact(on_device[0], written(caches[0], key, mapping), "key cache")
    exact(on_device[1], written(caches[1], value, mapping), "value cache")


@case(mode=["Norm"])
def the_functional_form_leaves_its_caches(mode):
    key, value = draw((5, HEADS, 64), torch.float16), draw((5, HEADS, 64), torch.float16)
    caches = draw((2, BLOCKS, BLOCK, HEADS, 64), torch.float16)
    mapping = slots(5, torch.int32)
    on_device = [npu(cache) for cache in caches]
    counted("npu_scatter_pa_kv_cache")
    results = torch.ops.npu.npu_scatter_pa_kv_cache_functional(
        npu(key), npu(value), *on_device, npu(mapping), cache_mode=mode
    )
    for cache, before, result, tokens in zip(on_device, caches, results, (key, value)):
        exact(cache, before, "cache given")
        exact(result, written(before, tokens, mapping), "cache returned")
