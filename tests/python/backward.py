"""Gradients of attention of training: their operators are not here, and the error says which one is missing."""

import torch
import torch_npu

from fusion import compare, fusion
from harness import case, refused
from tensors import Batch, npu

# The Python function's version, the layout, further arguments, and the operator of the gradient; none where the extension
# asks for the operator beforehand and refuses the argument that needs it.
MISSING = {
    "first version": (1, "BNSD", {}, "aclnnFlashAttentionScoreGrad"),
    "first version, packed": (1, "TND", {}, "aclnnFlashAttentionUnpaddingScoreGrad"),
    "first version, packed statistics": (1, "TND", {"softmax_layout": "TND"}, None),
    "second version": (2, "BSH", {}, "aclnnFlashAttentionScoreGradV2"),
    "second version, packed": (2, "TND", {}, "aclnnFlashAttentionUnpaddingScoreGradV2"),
    "third version": (3, "SBH", {}, "aclnnFlashAttentionScoreGrad"),
    "third version, packed": (3, "TND", {}, "aclnnFlashAttentionUnpaddingScoreGrad"),
    "dropout": (1, "BSND", {"keep_prob": 0.5}, "aclnnFlashAttentionScoreGrad"),
}


def still_works(batch, layout):
    """A call after a refused one is computed right, also one that remembers what a gradient would need."""
    tensors = batch.lay_out(layout)
    tensors["query"].requires_grad_(True)
    compare(batch, layout, fusion(1, batch, layout, **tensors))


@case(what=list(MISSING))
def backward_names_the_operator_that_is_missing(what):
    version, layout, arguments, operator = MISSING[what]
    batch = Batch([12] * 2, [12] * 2)
    tensors = batch.lay_out(layout)
    for tensor in tensors.values():
        tensor.requires_grad_(True)
    output = fusion(version, batch, layout, **tensors, **arguments)[0]
    named = f"{operator} or {operator}GetWorkspaceSize not in" if operator else "softmax_layout is not supported"
    refused(lambda: output.sum().backward(), named)
    assert all(tensor.grad is None for tensor in tensors.values()), "there is a gradient"
    still_works(batch, layout)


@case(is_causal=[True, False])
def backward_of_scaled_dot_product_attention(is_causal):
    batch = Batch([12], [12], 4, 4)
    tensors = [tensor.requires_grad_(True) for tensor in batch.lay_out("BNSD").values()]
    output = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=is_causal)
    refused(lambda: output.sum().backward(), "aclnnFlashAttentionScoreGrad or")
    still_works(batch, "BNSD")


@case(version=[1, 2, 3])
def gradients_that_are_called_by_themselves(version):
    batch = Batch([12] * 2, [12] * 2)
    query, key, value = batch.lay_out("BNSD").values()
    output, largest, total = fusion(version, batch, "BNSD")[:3]
    name = "npu_fusion_attention_grad" + {1: "", 2: "_v2", 3: "_v3"}[version]
    call = lambda: getattr(torch_npu, name)(
        query, key, value, npu(torch.ones(output.shape).half()), 4, "BNSD", scale_value=batch.scale,
        softmax_max=largest, softmax_sum=total, attention_in=output,
    )
    refused(call, "aclnnFlashAttentionScoreGrad" + ("V2" if version == 2 else ""))
    still_works(batch, "BNSD")
