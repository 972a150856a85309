"""Attention over parts of the keys, merged by log-sums."""

import torch
import torch_npu

from harness import case, close, counted, fused
from reference import attend, merge, right_down
from tensors import Batch, ends, npu, triangle


@case(dtype=[torch.float32, torch.float16, torch.bfloat16], parts=[1, 2, 5], with_sums=[True, False])
def merged_parts(dtype, parts, with_sums):
    outputs = [torch.randn(37, 64).to(dtype) for _ in range(parts)]
    sums = [torch.randn(37) * 4 for _ in range(parts)]
    counted("npu_attention_update")
    output, total = torch_npu.npu_attention_update(
        [npu(s) for s in sums], [npu(o) for o in outputs], 1 if with_sums else 0
    )
    expected, expected_total = merge(outputs, sums)
    close(output, expected)
    if with_sums:
        close(total, expected_total, "log-sums")


@case(dim=[8, 128, 512])
def merged_head_dimensions(dim):
    outputs, sums = [torch.randn(6, dim) for _ in range(2)], [torch.randn(6) for _ in range(2)]
    counted("npu_attention_update")
    output, _ = torch_npu.npu_attention_update([npu(s) for s in sums], [npu(o) for o in outputs], 0)
    close(output, merge(outputs, sums)[0])


@case(dtype=[torch.float16, torch.bfloat16])
def two_halves_of_the_keys_are_the_whole(dtype):
    """The older half without a mask and the newer causal half are one causal call."""
    batch = Batch([6, 9], [20, 30], heads=4, kv_heads=4, dtype=dtype)
    part = {"outputs": [], "sums": []}
    older = [k - r for k, r in zip(batch.keys, batch.rows)]
    whole = batch.expected(attend, visible=lambda i: right_down(batch.rows[i], batch.keys[i]))[0]
    keys, values = batch.key, batch.value
    for first in (True, False):
        cut = lambda x, i: x[:, : older[i]] if first else x[:, older[i] :]
        batch.key = [cut(k, i) for i, k in enumerate(keys)]
        batch.value = [cut(v, i) for i, v in enumerate(values)]
        batch.keys = [k.shape[1] for k in batch.key]
        masked = {} if first else {"sparse_mode": 3, "atten_mask": triangle()}
        output, lse = fused(
            1,
            **batch.lay_out("TND"),
            **batch.lengths("TND"),
            **batch.heads_and_scale(),
            input_layout="TND",
            softmax_lse_flag=True,
            **masked,
        )
        part["outputs"].append(output.view(-1, 64))
        part["sums"].append(lse.view(-1))
    counted("npu_attention_update")
    output, _ = torch_npu.npu_attention_update(part["sums"], part["outputs"], 0)
    expected = torch.cat(whole, 1).transpose(0, 1).reshape(-1, 64)
    close(output, expected)
