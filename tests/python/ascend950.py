"""Attention of training and of inference cards on Ascend 950: what is refused there, and what the extension leaves out."""

import torch
import torch_npu

from around import ND, NZ, VERSION, blocks, in_memory
from dropout import packed_bits
from fusion import compare, fusion
from harness import Trace, case, exact, refused
from incre import incre, single
from prompt import prompt
from tensors import Batch, npu


def call(version, layout="BNSD", dtype=torch.float16, **arguments):
    batch = Batch([6] * 2, [9] * 2, dtype=dtype)
    return lambda: fusion(version, batch, layout, **arguments)


def quantised():
    """Attention of training with queries, keys and values of HIFLOAT8."""
    eight = torch.zeros(1, 4, 256, 128, dtype=torch.uint8).npu()
    scales = {f"d_scale_{tensor}": torch.ones(1, 4, 2, 1).npu() for tensor in "qkv"}
    dtype = torch_npu.hifloat8
    return torch_npu.npu_quant_fusion_attention(eight, eight, eight, 4, "BNSD", **scales, query_dtype=dtype)


OPERATOR = "FlashAttentionScore on Ascend 950"
# What is refused: the call, and what the message must have.
REFUSED = {
    "FLOAT": (call(1, dtype=torch.float32), OPERATOR, "FLOAT16 and BF16"),
    "sinks": (call(2, sink=torch.zeros(4).npu()), f"sink of {OPERATOR}"),
    "statistics in the layout of the rows": (call(1, "TND", softmax_layout="TND"), f"softmaxOutLayout of {OPERATOR}"),
    "dropout drawn by the operator": (call(1, keep_prob=0.5), OPERATOR),
    "quantised tensors": (quantised, "aclnnQuantFlashAttentionScore"),
    # What the extension refuses before any operator is asked.
    "the third version": (call(3), "Ascend950 not support"),
    "prompts": (lambda: prompt(Batch([6], [9])), "npu_prompt_flash_attention is no longer supported on Ascend950"),
    "single rows": (lambda: incre(single([9])), "npu_incre_flash_attention is no longer supported on Ascend950"),
}


@case(what=list(REFUSED))
def refused_calls(what):
    call, *texts = REFUSED[what]
    refused(call, *texts)
    batch = Batch([4] * 2, [9] * 2)
    compare(batch, "BNSD", fusion(1, batch, "BNSD"))


@case(layout=["BNSD", "TND"], version=[1, 2])
def drop_masks_that_are_given(layout, version):
    batch = Batch([20] * 2, [33] * 2)
    kept = [torch.rand(batch.heads, 20, 33) < 0.5 for _ in batch.rows]
    result = fusion(version, batch, layout, keep_prob=0.5, dropout_mask=npu(packed_bits(kept)))
    compare(batch, layout, result, kept=lambda i: kept[i], keep_prob=0.5)


@case()
def sinks_of_the_first_version_do_not_reach_the_operator():
    """The extension passes none on, so that the call is the one without."""
    batch = Batch([6] * 2, [9] * 2)
    compare(batch, "BNSD", fusion(1, batch, "BNSD", sink=torch.full((4,), 5.0).npu()))


@case(
    dtype=[torch.float16, torch.bfloat16, torch.float32, torch.int8],
    shape=[(16, 32), (20, 70), (3, 40, 33)],
)
def weights_cast_to_nz_and_back(dtype, shape):
    host = torch.randint(-100, 100, shape).to(dtype)
    Trace.new()
    cast = torch_npu.npu_format_cast(host.npu(), NZ)
    assert "aclnnNpuFormatCast" in Trace.new()
    # Weights in FLOAT are laid out for products with rows of FLOAT16, but for one version of the extension.
    for_half = dtype == torch.float32 and VERSION != (2, 10)
    expected = blocks(host, 16 if for_half else 32 // host.element_size())
    exact(in_memory(cast, expected.numel()), expected.flatten())
    exact(torch_npu.npu_format_cast(cast, ND).cpu(), host)


@case()
def weights_that_are_not_cast():
    refused(lambda: torch_npu.npu_format_cast(torch.zeros(1, 5).half().npu(), NZ), "more than one row, on Ascend 950")
    host = torch.randn(20, 40).half()
    exact(torch_npu.npu_format_cast(torch_npu.npu_format_cast(host.npu(), NZ), ND).cpu(), host)


@case(rows=[torch.float16, torch.bfloat16, torch.int8])
def packed_weights_cast_for_products_with_rows_of_a_type(rows):
    host = torch.randint(-100, 100, (2, 20, 40), dtype=torch.int32)
    cast = torch_npu.npu_format_cast(host.npu(), NZ, customize_dtype=rows)
    expected = blocks(host, 32 if rows == torch.int8 else 16)
    exact(in_memory(cast, expected.numel()), expected.flatten())
    exact(torch_npu.npu_format_cast(cast, ND).cpu(), host)
