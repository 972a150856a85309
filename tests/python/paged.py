"""Caches of blocks in their three forms, under dense and packed queries."""

import torch

from harness import case, fused
from layouts import compare
from reference import band, right_down
from tensors import Batch, triangle

FORMS = ["BnBsH", "BnNBsD", "NZ"]
HALVES = [torch.float16, torch.bfloat16]


def call(batch, layout, form, entry=1, block=128, **arguments):
    tensors = batch.lay_out(layout) | batch.page(form, block)
    return fused(
        entry,
        **tensors,
        **batch.lengths(layout, paged=True),
        **batch.heads_and_scale(),
        input_layout=layout,
        **arguments,
    )


@case(form=FORMS, dtype=HALVES, entry=[1, 2])
def packed_prefill(form, dtype, entry):
    batch = Batch([70, 3, 1, 16], [200, 3, 129, 40], dim=128, dtype=dtype)
    output, lse = call(batch, "TND", form, entry, sparse_mode=3, atten_mask=triangle(), softmax_lse_flag=True)
    compare(batch, "TND", output, lse, visible=lambda i: right_down(batch.rows[i], batch.keys[i]))


@case(form=FORMS, dtype=HALVES, entry=[1, 2])
def packed_decode(form, dtype, entry):
    batch = Batch([1] * 5, [1, 128, 129, 260, 77], heads=8, kv_heads=2, dim=128, dtype=dtype)
    output, _ = call(batch, "TND", form, entry, sparse_mode=3, atten_mask=triangle())
    compare(batch, "TND", output)


@case(form=FORMS, layout=["BNSD", "BSND", "BSH"], rows=[1, 5])
def dense_queries(form, layout, rows):
    batch = Batch([rows] * 3, [150, rows, 300], dtype=torch.bfloat16)
    masked = {"sparse_mode": 3, "atten_mask": triangle()} if rows > 1 else {}
    output, _ = call(batch, layout, form, **masked)
    compare(batch, layout, output, visible=lambda i: right_down(rows, batch.keys[i]))


@case(block=[16, 32, 256, 512], form=["BnBsH", "BnNBsD"])
def block_sizes(block, form):
    batch = Batch([4, 9], [600, 33], dtype=torch.bfloat16)
    output, _ = call(batch, "TND", form, block=block, sparse_mode=3, atten_mask=triangle())
    compare(batch, "TND", output, visible=lambda i: right_down(batch.rows[i], batch.keys[i]))


@case(form=["BnBsH", "BnNBsD"], window=[16, 100])
def sliding_windows(form, window):
    batch = Batch([20, 1, 6], [180, 40, 130], dtype=torch.bfloat16)
    output, _ = call(
        batch, "TND", form, sparse_mode=4, atten_mask=triangle(), pre_tokens=window - 1, next_tokens=0
    )
    compare(batch, "TND", output, visible=lambda i: band(batch.rows[i], batch.keys[i], window - 1, 0))


@case(dtype=HALVES)
def packed_rows_that_see_every_key(dtype):
    batch = Batch([20, 1, 6], [180, 40, 130], dtype=dtype)
    output, lse = call(batch, "TND", "BnBsH", sparse_mode=0, softmax_lse_flag=True)
    compare(batch, "TND", output, lse)
