"""Every layout, both dtypes, grouped and single key heads, with the log-sums where the operator gives them."""

import torch

from harness import case, close, fused
from reference import attend
from tensors import Batch, packed, separate, separate_sums

DENSE = ["BNSD", "BSND", "BSH", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD"]
PACKED = ["TND", "NTD", "NTD_TND"]
HALVES = [torch.float16, torch.bfloat16]


def compare(batch, layout, output, lse=None, **reference):
    expected, sums = batch.expected(attend, **reference)
    for i, actual in enumerate(separate(output, layout, batch.rows, batch.heads)):
        close(actual, expected[i], f"output of sequence {i}")
    if lse is not None:
        for i, actual in enumerate(separate_sums(lse, layout, batch.rows)):
            close(actual, sums[i], f"log-sums of sequence {i}")


@case(layout=DENSE + PACKED, dtype=HALVES, entry=[1, 2])
def sequences_of_several_lengths(layout, dtype, entry):
    batch = Batch([33, 7, 20], [40, 65, 20], dtype=dtype)
    output, lse = fused(
        entry,
        **batch.lay_out(layout),
        **batch.lengths(layout),
        **batch.heads_and_scale(),
        input_layout=layout,
        softmax_lse_flag=True,
    )
    compare(batch, layout, output, lse)


@case(layout=DENSE, heads=[(4, 4), (4, 1)], dtype=HALVES)
def whole_tensors_need_no_lengths(layout, heads, dtype):
    batch = Batch([24] * 2, [31] * 2, *heads, dim=128, dtype=dtype)
    output, _ = fused(1, **batch.lay_out(layout), **batch.heads_and_scale(), input_layout=layout)
    compare(batch, layout, output)


@case(layout=["BNSD", "BSND", "BSH", "BNSD_BSND"], dtype=HALVES, entry=[1, 2])
def single_rows(layout, dtype, entry):
    batch = Batch([1] * 3, [40, 1, 129], heads=8, kv_heads=2, dtype=dtype)
    lengths = {"actual_seq_lengths_kv": batch.keys}
    output, lse = fused(
        entry,
        **batch.lay_out(layout),
        **lengths,
        **batch.heads_and_scale(),
        input_layout=layout,
        softmax_lse_flag=True,
    )
    compare(batch, layout, output, lse)


@case(dim=[64, 80, 128, 192, 256], dtype=HALVES)
def packed_head_dimensions(dim, dtype):
    batch = Batch([5, 18], [12, 18], dim=dim, dtype=dtype)
    output, _ = fused(
        1, **batch.lay_out("TND"), **batch.lengths("TND"), **batch.heads_and_scale(), input_layout="TND"
    )
    compare(batch, "TND", output)


@case(dim=[16, 80, 96, 256, 512])
def dense_head_dimensions(dim):
    batch = Batch([9], [17], dim=dim)
    output, _ = fused(1, **batch.lay_out("BNSD"), **batch.heads_and_scale(), input_layout="BNSD")
    compare(batch, "BNSD", output)


@case(layout=["TND", "BSND"])
def values_narrower_than_keys(layout):
    batch = Batch([6, 11], [6, 13], heads=4, kv_heads=4, dim=192, value_dim=128, dtype=torch.bfloat16)
    lengths = batch.lengths(layout) if packed(layout) else batch.lengths(layout)
    output, _ = fused(1, **batch.lay_out(layout), **lengths, **batch.heads_and_scale(), input_layout=layout)
    compare(batch, layout, output)


@case(precise=[0, 1, 2, 3])
def every_inner_precision(precise):
    batch = Batch([20], [50], dim=128)
    output, _ = fused(
        1, **batch.lay_out("BNSD"), **batch.heads_and_scale(), input_layout="BNSD", inner_precise=precise
    )
    compare(batch, "BNSD", output)


@case(entry=[1, 2])
def sequences_without_rows_or_keys(entry):
    batch = Batch([0, 4, 3], [5, 0, 9], dtype=torch.bfloat16)
    output, lse = fused(
        entry,
        **batch.lay_out("TND"),
        **batch.lengths("TND"),
        **batch.heads_and_scale(),
        input_layout="TND",
        softmax_lse_flag=True,
    )
    compare(batch, "TND", output)
