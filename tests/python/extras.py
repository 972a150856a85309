"""Sinks, position bias, shared prefixes and left padding."""

import torch

from harness import case, close, fused
from layouts import compare
from reference import attend, band, full, right_down
from tensors import JUNK, Batch, npu, separate, triangle

HALVES = [torch.float16, torch.bfloat16]


@case(layout=["TND", "BSND"], dtype=HALVES, dim=[64, 128])
def sinks(layout, dtype, dim):
    batch = Batch([9, 30], [40, 30], heads=8, kv_heads=2, dim=dim, dtype=dtype)
    sink = torch.randn(8).to(dtype if layout == "TND" else torch.bfloat16)
    if layout != "TND" and dtype == torch.float16:
        sink = sink.to(torch.bfloat16)
    output, _ = fused(
        2,
        **batch.lay_out(layout),
        **batch.lengths(layout),
        **batch.heads_and_scale(),
        input_layout=layout,
        sparse_mode=3,
        atten_mask=triangle(),
        learnable_sink=npu(sink),
    )
    compare(batch, layout, output, visible=lambda i: right_down(batch.rows[i], batch.keys[i]), sink=sink)


@case(window=[4, 33])
def sinks_beside_a_window_over_a_cache(window):
    batch = Batch([1, 12, 3], [150, 40, 129], heads=8, kv_heads=2, dtype=torch.bfloat16)
    sink = torch.randn(8).bfloat16()
    output, _ = fused(
        2,
        **batch.lay_out("TND") | batch.page("BnBsH"),
        **batch.lengths("TND", paged=True),
        **batch.heads_and_scale(),
        input_layout="TND",
        sparse_mode=4,
        pre_tokens=window - 1,
        next_tokens=0,
        atten_mask=triangle(),
        learnable_sink=npu(sink),
    )
    seen = lambda i: band(batch.rows[i], batch.keys[i], window - 1, 0)
    compare(batch, "TND", output, visible=seen, sink=sink)


@case(layout=["BNSD", "BSND", "BSH"], dtype=HALVES, shared=[True, False], entry=[1, 2])
def position_bias(layout, dtype, shared, entry):
    batch = Batch([16, 16], [32, 32], dim=128, dtype=dtype)
    bias = torch.randn(1 if shared else 2, 4, 16, 32).to(dtype)
    output, lse = fused(
        entry,
        **batch.lay_out(layout),
        **batch.heads_and_scale(),
        input_layout=layout,
        pse_shift=npu(bias),
        softmax_lse_flag=True,
    )
    compare(batch, layout, output, lse, bias=lambda i: bias[0 if shared else i])


@case(dtype=HALVES)
def position_bias_of_single_rows(dtype):
    batch = Batch([1, 1], [64, 64], heads=8, kv_heads=2, dim=128, dtype=dtype)
    bias = torch.randn(2, 8, 1, 64).to(dtype)
    output, _ = fused(
        1, **batch.lay_out("BNSD"), **batch.heads_and_scale(), input_layout="BNSD", pse_shift=npu(bias)
    )
    compare(batch, "BNSD", output, bias=lambda i: bias[i])


@case(layout=["BNSD", "BSND", "BSH"], dtype=HALVES, causal=[True, False])
def shared_prefix(layout, dtype, causal):
    batch = Batch([12, 5], [12, 20], dtype=dtype)
    prefix = Batch([1], [30], dtype=dtype)
    used = 17
    laid = prefix.lay_out(layout)
    masked = {"sparse_mode": 3, "atten_mask": triangle()} if causal else {}
    arguments = batch.lay_out(layout)
    output, _ = fused(
        1,
        **arguments,
        **batch.lengths(layout),
        **batch.heads_and_scale(),
        input_layout=layout,
        key_shared_prefix=laid["key"],
        value_shared_prefix=laid["value"],
        actual_shared_prefix_len=[used],
        **masked,
    )
    batch.key = [torch.cat([prefix.key[0][:, :used], k], 1) for k in batch.key]
    batch.value = [torch.cat([prefix.value[0][:, :used], v], 1) for v in batch.value]
    batch.keys = [used + n for n in batch.keys]
    see = right_down if causal else full
    compare(batch, layout, output, visible=lambda i: see(batch.rows[i], batch.keys[i]))


@case(layout=["BNSD", "BSH"], rows=[1, 6])
def left_padding(layout, rows):
    """Sequences that end before the tensors do."""
    lengths, room, after = [4, 6] if rows > 1 else [1, 1], 40, 3
    batch = Batch(lengths, [20, 31])

    def shifted(sequences, room, after):
        heads, _, dim = sequences[0].shape
        padded = torch.full((2, heads, room, dim), JUNK).to(sequences[0].dtype)
        for row, sequence in zip(padded, sequences):
            row[:, room - after - sequence.shape[1] : room - after] = sequence
        return padded if layout == "BNSD" else padded.transpose(1, 2).flatten(2)

    query_room, query_after = (rows + 2, 2) if rows > 1 else (1, 0)
    query_padding = {"query_padding_size": torch.tensor([query_after]).npu()} if rows > 1 else {}
    query_lengths = {"actual_seq_lengths": batch.rows} if rows > 1 else {}
    output, _ = fused(
        1,
        query=npu(shifted(batch.query, query_room, query_after)),
        key=npu(shifted(batch.key, room, after)),
        value=npu(shifted(batch.value, room, after)),
        **query_lengths,
        actual_seq_lengths_kv=batch.keys,
        **query_padding,
        kv_padding_size=torch.tensor([after]).npu(),
        **batch.heads_and_scale(),
        input_layout=layout,
    )
    expected, _ = batch.expected(attend)
    whole = separate(output, layout, [query_room] * 2, batch.heads)
    for i, (actual, want) in enumerate(zip(whole, expected)):
        start = query_room - query_after - lengths[i]
        close(actual[:, start : start + lengths[i]], want, f"output of sequence {i}")
