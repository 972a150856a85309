"""Sparse modes 0 to 4, with masks of each dtype and rank."""

import torch

from harness import case, fused
from layouts import compare
from reference import band, full, left_up, right_down
from tensors import Batch, npu, packed, triangle

MASK_DTYPES = [torch.bool, torch.int8, torch.uint8]
ROWS, KEYS = [30, 12], [45, 64]


def call(batch, layout, entry=1, **arguments):
    return fused(
        entry,
        **batch.lay_out(layout),
        **batch.lengths(layout),
        **batch.heads_and_scale(),
        input_layout=layout,
        **arguments,
    )


@case(layout=["BNSD", "BSH", "TND", "NTD_TND"], mask=MASK_DTYPES, entry=[1, 2])
def right_down_causal(layout, mask, entry):
    batch = Batch(ROWS, KEYS, dtype=torch.bfloat16)
    output, lse = call(batch, layout, entry, sparse_mode=3, atten_mask=triangle(mask), softmax_lse_flag=True)
    compare(batch, layout, output, lse, visible=lambda i: right_down(ROWS[i], KEYS[i]))


@case(layout=["BSND", "BNSD_BSND", "TND"], rank=[2, 3, 4])
def left_up_causal(layout, rank):
    batch = Batch(ROWS, KEYS)
    output, _ = call(batch, layout, sparse_mode=2, atten_mask=triangle(rank=rank))
    compare(batch, layout, output, visible=lambda i: left_up(ROWS[i], KEYS[i]))


@case(layout=["BNSD", "TND"], tokens=[(8, 0), (0, 0), (40, 5), (-1, 9), (2147483647, 0)])
def bands(layout, tokens):
    before, after = tokens
    batch = Batch(ROWS, KEYS)
    output, _ = call(
        batch, layout, sparse_mode=4, atten_mask=triangle(), pre_tokens=before, next_tokens=after
    )
    compare(batch, layout, output, visible=lambda i: band(ROWS[i], KEYS[i], before, after))


@case(mode=[0, 1], mask=MASK_DTYPES, rank=[2, 3, 4])
def full_masks(mode, mask, rank):
    batch = Batch([24, 24], [40, 40])
    hidden = torch.rand(*[1, 1][: rank - 3], *[2][: rank - 2], 24, 40) < 0.4
    if rank == 4:
        hidden = (torch.rand(2, 1, 24, 40)) < 0.4
    hidden[..., 0] = False
    seen = [~(hidden if rank == 2 else hidden[i].reshape(24, 40)) for i in range(2)]
    output, lse = call(
        batch, "BNSD", sparse_mode=mode, atten_mask=npu(hidden.to(mask)), softmax_lse_flag=True
    )
    compare(batch, "BNSD", output, lse, visible=lambda i: seen[i])


@case(tokens=[(5, 3), (2147483647, 0), (0, 2147483647)])
def a_mask_and_a_band_in_mode_0(tokens):
    before, after = tokens
    batch = Batch([24], [40])
    hidden = torch.rand(24, 40) < 0.3
    hidden.fill_diagonal_(False)
    output, _ = call(
        batch, "BSND", sparse_mode=0, atten_mask=npu(hidden), pre_tokens=before, next_tokens=after
    )
    compare(batch, "BSND", output, visible=lambda i: ~hidden & band(24, 40, before, after, origin=0))


@case(layout=["BNSD", "TND"])
def mode_0_without_a_mask_has_no_band(layout):
    batch = Batch(ROWS, KEYS)
    output, _ = call(batch, layout, sparse_mode=0, pre_tokens=1, next_tokens=0)
    compare(batch, layout, output, visible=lambda i: full(ROWS[i], KEYS[i]))


@case(precise=[2, 3])
def rows_that_see_nothing_are_zero(precise):
    batch = Batch([10], [20])
    hidden = torch.rand(10, 20) < 0.5
    hidden[:, 0] = False
    hidden[3] = True
    output, _ = call(batch, "BNSD", sparse_mode=1, atten_mask=npu(hidden), inner_precise=precise)
    compare(batch, "BNSD", output, visible=lambda i: ~hidden)


@case(layout=["BNSD", "BSND"])
def more_rows_than_keys_in_mode_3(layout):
    batch = Batch([12], [7])
    output, _ = call(batch, layout, sparse_mode=3, atten_mask=triangle())
    compare(batch, layout, output, visible=lambda i: right_down(12, 7))


@case(mask=MASK_DTYPES)
def single_rows_with_a_mask_of_their_own(mask):
    batch = Batch([1] * 3, [40] * 3)
    hidden = torch.rand(3, 1, 40) < 0.4
    hidden[..., 0] = False
    output, _ = call(batch, "BNSD", sparse_mode=0, atten_mask=npu(hidden.to(mask)))
    compare(batch, "BNSD", output, visible=lambda i: ~hidden[i])
