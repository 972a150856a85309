"""`torch.nn.functional.scaled_dot_product_attention`, which takes the operator of training where it can."""

import torch

from fusion import DTYPES, TOLERANCE
from harness import ON_950, Trace, case, close, counted
from reference import attend, left_up
from tensors import Batch

FUSED = "aclnnFlashAttentionScore" + ("V4" if ON_950 else "")
NAME = "scaled_dot_product_attention"


def dot_product(batch, fused=True, **arguments):
    Trace.new()
    output = getattr(torch.nn.functional, NAME)(*batch.lay_out("BNSD").values(), **arguments)
    assert (FUSED in Trace.new()) == fused, f"{FUSED} was {'not ' if fused else ''}called"
    counted(f"{NAME} by {FUSED if fused else 'small operators'}")
    return output


def compare(batch, output, tolerance=None, **reference):
    expected, _ = batch.expected(attend, **reference)
    for i, want in enumerate(expected):
        close(output[i], want, f"output of sequence {i}", tolerance or TOLERANCE[output.dtype])


@case(dtype=DTYPES, dim=[64, 80, 128])
def without_a_mask(dtype, dim):
    batch = Batch([20] * 2, [33] * 2, 4, 4, dim=dim, dtype=dtype)
    compare(batch, dot_product(batch))


@case(dtype=DTYPES, rows=[20, 40])
def causal(dtype, rows):
    batch = Batch([rows] * 2, [33] * 2, 4, 4, dtype=dtype)
    compare(batch, dot_product(batch, is_causal=True), visible=lambda i: left_up(rows, 33))


@case(dtype=DTYPES, shape=[(20, 33), (1, 1, 20, 33), (2, 1, 20, 33), (2, 4, 20, 33), (2, 1, 1, 33), (1, 33)])
def masks_of_truth_values(dtype, shape):
    """True is what a row sees, and masks of other shapes are expanded before the operator."""
    batch = Batch([20] * 2, [33] * 2, 4, 4, dtype=dtype)
    seen = torch.rand(shape) < 0.6
    seen[..., 0] = True
    whole = seen.expand(2, 4, 20, 33)
    compare(batch, dot_product(batch, attn_mask=seen.npu()), visible=lambda i: whole[i])


@case(dtype=DTYPES)
def masks_that_are_added(dtype):
    """The operator has no such mask before its scale; PyTorch computes it with small operators."""
    batch = Batch([20] * 2, [33] * 2, 4, 4, dtype=dtype)
    added = torch.randn(2, 1, 20, 33).to(dtype)
    tolerance = {torch.float16: (8e-3, 8e-3), torch.bfloat16: (6e-2, 6e-2), torch.float32: (1e-4, 1e-4)}[dtype]
    output = dot_product(batch, fused=False, attn_mask=added.npu())
    compare(batch, output, tolerance, bias=lambda i: added[i].double())


@case(dtype=DTYPES, kv_heads=[1, 2])
def groups_of_heads(dtype, kv_heads):
    batch = Batch([20] * 2, [33] * 2, 4, kv_heads, dtype=dtype)
    compare(batch, dot_product(batch, enable_gqa=True))


@case(scale=[0.3, 1.0])
def scales(scale):
    batch = Batch([20] * 2, [33] * 2, 4, 4)
    compare(batch, dot_product(batch, scale=scale), scale=scale)
