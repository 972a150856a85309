"""Calls of attention of training that are refused: RuntimeErrors that name the rule."""

import torch
import torch_npu

from fusion import compare, fusion, triangle_and_prefix
from harness import case, refused
from tensors import Batch, npu, triangle


def call(version, layout="BNSD", rows=6, keys=9, **arguments):
    """A call of a batch of which some arguments are changed; those that are functions are called when it is."""
    batch = Batch([rows] * 2, [keys] * 2)
    given = {name: value() if callable(value) else value for name, value in arguments.items()}
    return lambda: fusion(version, batch, layout, **given)


def hidden(*shape, dtype=torch.bool):
    return lambda: torch.zeros(shape, dtype=dtype).npu()


def normal(*shape, dtype=torch.float16):
    return lambda: torch.randn(shape).to(dtype).npu()


# What is refused: the call, and the rule or the words that the message must have.
REFUSED = {
    "INT8 masks": (call(1, atten_mask=hidden(6, 9, dtype=torch.int8)), "flash.atten_mask_dtype"),
    "masks of another shape": (call(1, atten_mask=hidden(7, 9)), "flash.atten_mask_shape"),
    "padding masks": (call(1, atten_mask=hidden(2, 1, 1, 9)), "flash.atten_mask_shape"),
    "compressed masks of another shape": (
        call(1, sparse_mode=2, atten_mask=hidden(6, 9)),
        "flash.atten_mask_compressed",
        "[2048, 2048]",
    ),
    "mode 6 with a square mask": (
        call(1, sparse_mode=6, atten_mask=lambda: triangle(torch.bool), prefix=[3, 4]),
        "flash.atten_mask_compressed",
        "[3072, 2048]",
    ),
    "prefixes that are too short": (
        call(1, sparse_mode=6, atten_mask=triangle_and_prefix, prefix=[0, 4]),
        "flash.prefix",
    ),
    "too few prefixes": (call(1, sparse_mode=6, atten_mask=triangle_and_prefix, prefix=[4]), "flash.prefix"),
    "bands that see nothing": (
        call(1, sparse_mode=4, atten_mask=lambda: triangle(torch.bool), pre_tockens=-5, next_tockens=-5),
        "flash.tokens_negative",
    ),
    "position bias of another dtype": (call(1, pse=normal(2, 4, 6, 9, dtype=torch.float32)), "flash.pse_dtype"),
    "position bias of another shape": (call(1, pse=normal(2, 4, 5, 9)), "flash.pse_shape"),
    "slopes of another number": (
        call(2, keys=6, pse=normal(3, dtype=torch.float32), pse_type=2),
        "flash.pse_slopes_shape",
    ),
    "slopes of half precision": (call(2, keys=6, pse=normal(4), pse_type=2), "flash.pse_slopes"),
    "slopes without a tensor": (call(2, keys=6, pse_type=3), "flash.pse_slopes"),
    "slopes of rows and keys of other numbers": (
        call(2, pse=normal(4, dtype=torch.float32), pse_type=2),
        "flash.pse_slopes_square",
    ),
    "a type of position bias that is not there": (call(2, pse=normal(2, 4, 6, 9), pse_type=4), "flash.pse_type"),
    "sinks of half precision": (call(1, sink=normal(4)), "flash.sink_dtype"),
    "sinks of another number": (call(1, sink=normal(3, dtype=torch.float32)), "flash.sink_shape"),
    "drop masks that are too short": (
        call(1, keep_prob=0.5, dropout_mask=hidden(16, dtype=torch.uint8)),
        "flash.drop_mask_size",
    ),
    "heads that key heads do not divide": (
        call(1, key=normal(2, 3, 9, 64), value=normal(2, 3, 9, 64)),
        "flash.head_groups",
    ),
    "keys of another dtype": (call(1, key=normal(2, 2, 9, 64, dtype=torch.float32)), "flash.dtype"),
    "values wider than keys": (call(1, value=normal(2, 2, 9, 80)), "flash.value_dim"),
    "lengths beyond the tensor": (call(1, "TND", actual_seq_qlen=[6, 13]), "flash.lengths_sum"),
    "mode 3 of more packed rows than keys": (
        call(1, "TND", rows=9, keys=6, sparse_mode=3, atten_mask=lambda: triangle(torch.bool)),
        "flash.packed_rows",
    ),
    # What the extension refuses before any operator is asked.
    "a mode that is not there": (call(1, sparse_mode=7), "sparse_mode value must be in range of [0,6], but got 7"),
    "mode 5 of packed sequences": (call(1, "TND", sparse_mode=5), "sparse_mode value must be in range of [0,5)"),
    "nothing kept": (call(1, keep_prob=0.0), "keep_prob value must be in range of (0, 1], but got 0"),
    "statistics of another layout": (call(1, softmax_layout="BNSD"), "only supported softmax_layout=TND"),
}


@case(what=list(REFUSED))
def refused_calls(what):
    call, text, *more = REFUSED[what]
    refused(call, text, *more, *(["fix: "] if text.startswith("flash.") else []))
    batch = Batch([4] * 2, [9] * 2)
    compare(batch, "BNSD", fusion(1, batch, "BNSD"))


@case()
def what_measures_the_workspace_of_a_graph_is_refused_by_name():
    batch = Batch([4], [9])
    query, key, value = batch.lay_out("TND").values()
    lengths = {"actual_seq_qlen": torch.tensor([4]), "actual_seq_kvlen": torch.tensor([9])}
    measure = torch_npu._npu_fusion_attention_v3_get_max_workspace
    refused(
        lambda: measure(query, key, value, batch.heads, "TND", **lengths),
        "aclnnFlashAttentionVarLenScoreV5GetMaxWorkspaceSize is not emulated",
    )
