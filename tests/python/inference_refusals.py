"""Calls of `npu_prompt_flash_attention` and `npu_incre_flash_attention` that are refused by a rule."""

import torch

import incre
import prompt
from harness import case, refused
from tensors import Batch


def called(function, batch, layout, arguments):
    """A call of which some arguments are made when it is."""
    given = lambda: {name: value() if callable(value) else value for name, value in arguments.items()}
    return lambda: function(batch, layout, **given())


def prompts(layout="BNSD", batch=None, **arguments):
    return called(prompt.prompt, batch or Batch([6] * 2, [9] * 2), layout, arguments)


def rows(layout="BNSD", batch=None, **arguments):
    return called(incre.incre, batch or incre.single([9] * 2), layout, arguments)


def zeros(*shape, dtype=torch.float16):
    return lambda: torch.zeros(shape, dtype=dtype).npu()


# What is refused: the rule that the message must name, and the call.
PROMPTS = {
    "a mode that is not there": ("sparse_mode.known", prompts(sparse_mode=5)),
    "mode 3 without a mask": ("atten_mask.required", prompts(sparse_mode=3)),
    "a mask of another shape": ("atten_mask.full_shape", prompts(atten_mask=zeros(5, 9, dtype=torch.bool))),
    "a compressed mask of another shape": (
        "atten_mask.compressed_shape",
        prompts(sparse_mode=2, atten_mask=zeros(64, 64, dtype=torch.bool)),
    ),
    "a mask of another dtype": ("prompt.mask_dtype", prompts(atten_mask=zeros(6, 9, dtype=torch.int32))),
    "key heads that do not divide": ("num_key_value_heads.divides", prompts(num_key_value_heads=3)),
    "no heads": ("prompt.num_heads", prompts(num_heads=0)),
    "keys of another dtype": ("prompt.dtype", prompts(key=zeros(2, 2, 9, 64, dtype=torch.bfloat16))),
    "FLOAT": ("prompt.dtype", prompts(batch=Batch([6], [9], dtype=torch.float32))),
    "lengths beyond the tensor": ("actual_seq_lengths_kv.range", prompts(actual_seq_lengths_kv=[10, 9])),
    "too few lengths": (
        "actual_seq_lengths.count",
        prompts(batch=Batch([6] * 3, [9] * 3), actual_seq_lengths=[6, 6]),
    ),
    "a layout that is not there": ("prompt.input_layout", prompts(input_layout="SBH")),
    "position bias of another dtype": (
        "prompt.pse_dtype",
        prompts(pse_shift=zeros(2, 4, 6, 9, dtype=torch.float32)),
    ),
    "a scale of some channels of the output": (
        "quant_scale2.size",
        prompts(quant_scale2=zeros(3, dtype=torch.float32)),
    ),
}
BLOCKS = {"block_table": zeros(2, 1, dtype=torch.int32), "block_size": 128}
ROWS = {
    "more than one row": ("incre.rows", rows(batch=Batch([2] * 2, [9] * 2, 8, 2))),
    "a mask of another batch": ("atten_mask.full_shape_decode", rows(atten_mask=zeros(3, 9, dtype=torch.bool))),
    "a mask that is too narrow": ("atten_mask.full_shape_decode", rows(atten_mask=zeros(2, 8, dtype=torch.bool))),
    "a mask of another dtype": ("dtype.registered", rows(atten_mask=zeros(2, 9, dtype=torch.int32))),
    "key heads that do not divide": ("num_key_value_heads.divides", rows(num_key_value_heads=3)),
    "no heads": ("num_heads.positive", rows(num_heads=0)),
    "keys of another dtype": ("value.dtype_of_key", rows(key=zeros(2, 2, 9, 64, dtype=torch.bfloat16))),
    "lengths beyond the tensor": ("actual_seq_lengths_kv.range", rows(actual_seq_lengths=[10, 9])),
    "a cache without lengths": (
        "actual_seq_lengths_kv.required",
        rows(key=zeros(4, 128, 128), value=zeros(4, 128, 128), **BLOCKS),
    ),
    "blocks of an odd size": (
        "block_size.decode",
        rows(
            key=zeros(4, 24, 128),
            value=zeros(4, 24, 128),
            actual_seq_lengths=[9, 9],
            **BLOCKS | {"block_size": 24},
        ),
    ),
    "a cache by heads under rows by positions": (
        "cache.layout",
        rows("BSH", key=zeros(4, 2, 128, 64), value=zeros(4, 2, 128, 64), actual_seq_lengths=[9, 9], **BLOCKS),
    ),
    "INT8 keys without a scale": (
        "antiquant.scale_required",
        rows(key=zeros(2, 2, 9, 64, dtype=torch.int8), value=zeros(2, 2, 9, 64, dtype=torch.int8)),
    ),
    "position bias of another shape": ("pse_shift.shape", rows(pse_shift=zeros(2, 4, 1, 9))),
}


@case(what=list(PROMPTS))
def prompts_are_refused(what):
    rule, call = PROMPTS[what]
    refused(call, f"{rule}: ", "fix: ")
    batch = Batch([4], [9])
    prompt.compare(batch, "BNSD", prompt.prompt(batch))


@case()
def masks_of_half_precision_are_refused_by_name():
    refused(prompts(atten_mask=zeros(6, 9)), "call.unsupported: ", "attenMask of FLOAT16")


@case(what=list(ROWS))
def single_rows_are_refused(what):
    rule, call = ROWS[what]
    refused(call, f"{rule}: ", "fix: ")
    batch = incre.single([9])
    incre.compare(batch, "BNSD", incre.incre(batch))
