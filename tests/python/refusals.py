"""Calls that the operator refuses: RuntimeErrors that name the rule."""

import torch
import torch_npu

from harness import case, close, fused, refused
from reference import attend
from tensors import Batch, npu, triangle


def changed(batch, layout="BNSD", **arguments):
    tensors = batch.lay_out(layout)
    return lambda: fused(1, **(tensors | batch.heads_and_scale() | {"input_layout": layout} | arguments))


def still_works():
    """A call after a refused one is computed right."""
    batch = Batch([4], [9])
    output, _ = changed(batch)()
    expected, _ = batch.expected(attend)
    close(output[0], expected[0])


REFUSED = {
    "heads that key heads do not divide": (dict(num_key_value_heads=3), "num_key_value_heads"),
    "a sparse mode that is not there": (dict(sparse_mode=7), "sparse_mode"),
    "mode 3 without a mask": (dict(sparse_mode=3), "atten_mask"),
    "an inner precision that is not there": (dict(inner_precise=9), "inner_precise"),
    "a length beyond the tensor": (dict(actual_seq_lengths_kv=[4000, 1]), "actual_seq_lengths_kv"),
    "too few lengths": (dict(actual_seq_lengths=[]), "actual_seq_lengths"),
}


@case(what=list(REFUSED))
def attributes(what):
    arguments, rule = REFUSED[what]
    batch = Batch([6, 6], [9, 9])
    refused(changed(batch, **arguments), rule, "fix")
    still_works()


@case(shape=[(64, 64), (2, 2048, 2048), (2048, 2047)])
def compressed_masks_of_another_shape(shape):
    batch = Batch([6], [9])
    mask = torch.zeros(*shape, dtype=torch.int8).npu()
    refused(changed(batch, sparse_mode=3, atten_mask=mask), "atten_mask", "2048")
    still_works()


@case(dtype=[torch.float16, torch.int32])
def masks_of_another_dtype(dtype):
    batch = Batch([6], [9])
    refused(changed(batch, atten_mask=torch.zeros(1, 6, 9, dtype=dtype).npu()), "dtype.registered", "attenMask")
    still_works()


@case()
def packed_calls_without_lengths():
    batch = Batch([6], [9])
    refused(changed(batch, "TND"), "packed.lengths_required", "fix")
    still_works()


@case()
def packed_ends_that_are_not_the_number_of_rows():
    batch = Batch([6, 2], [9, 4])
    call = changed(batch, "TND", actual_seq_lengths=[6, 7], actual_seq_lengths_kv=[9, 13])
    refused(call, "packed.q_total", "given last entry 7, allowed: 8")
    still_works()


@case()
def keys_of_another_dtype():
    batch = Batch([6], [9])
    tensors = batch.lay_out("BNSD")
    refused(changed(batch, key=tensors["key"].cpu().bfloat16().npu()), "key")
    still_works()


@case()
def tables_of_too_few_columns():
    batch = Batch([6], [300])
    paged = batch.page("BnBsH")
    paged["block_table"] = npu(paged["block_table"].cpu()[:, :2])
    lengths = batch.lengths("BSND", paged=True)
    refused(changed(batch, "BSND", **paged, **lengths, sparse_mode=3, atten_mask=triangle()), "actual_seq_lengths_kv.range", "block table")
    still_works()


@case(heads=[0, -1])
def numbers_of_heads_that_the_extension_itself_refuses(heads):
    refused(changed(Batch([6], [9]), num_heads=heads), "num_heads")
    still_works()


@case()
def caches_of_another_dtype_than_the_keys():
    cache = torch.zeros(4, 16, 2, 64).bfloat16().npu()
    rows, slots = torch.zeros(3, 2, 64).half().npu(), torch.arange(3, dtype=torch.int32).npu()
    refused(
        lambda: torch_npu.npu_scatter_pa_kv_cache(rows, rows, cache, cache.clone(), slots, cache_mode="Norm"), "cache"
    )
    still_works()


@case()
def sums_of_another_length_than_the_outputs():
    refused(
        lambda: torch_npu.npu_attention_update(
            [torch.zeros(5).npu()] * 2, [torch.zeros(6, 64).npu()] * 2, 0
        ),
        "lse",
    )
    still_works()
