"""Sinks, rotary parts and given outputs of attention of training, which Ascend 950 lacks in extension or emulation."""

import torch
import torch_npu

from fusion import DENSE, DTYPES, SOFTMAX_LAYOUTS, VERSIONS, compare, fusion
from harness import Trace, case, counted
from reference import left_up, right_down
from tensors import Batch, ends, npu, triangle


@case(layout=DENSE + ["TND"], dtype=DTYPES, version=VERSIONS)
def sinks(layout, dtype, version):
    batch = Batch([20] * 2, [33] * 2, dtype=dtype)
    sink = torch.randn(batch.heads)
    result = fusion(version, batch, layout, sink=npu(sink), sparse_mode=3, atten_mask=triangle(torch.bool))
    compare(batch, layout, result, visible=lambda i: right_down(20, 33), sink=sink)


@case(version=VERSIONS, softmax_layout=SOFTMAX_LAYOUTS)
def sinks_of_packed_sequences(version, softmax_layout):
    batch = Batch([20, 0, 9], [33, 4, 9])
    sink = torch.randn(batch.heads)
    result = fusion(version, batch, "TND", sink=npu(sink), softmax_layout=softmax_layout)
    compare(batch, "TND", result, softmax_layout, sink=sink)


@case(mode=[0, 1, 2, 3])
def rotary_parts(mode):
    batch = Batch([20, 12], [25, 40], dim=128, rope=64, dtype=torch.bfloat16)
    if mode < 2:
        hidden = torch.rand(20, 40) < 0.4
        hidden[:, 0] = False
        mask, seen = npu(hidden), lambda i: ~hidden[: batch.rows[i], : batch.keys[i]]
    else:
        see = left_up if mode == 2 else right_down
        mask, seen = triangle(torch.bool), lambda i: see(batch.rows[i], batch.keys[i])
    result = fusion(2, batch, "TND", sparse_mode=mode, atten_mask=mask)
    compare(batch, "TND", result, visible=seen)


@case(softmax_layout=["", "same_as_input"])
def packed_sequences_into_given_outputs(softmax_layout):
    """The form of the third version that takes outputs; the layout of the statistics is handed on as it is."""
    batch = Batch([33, 7], [40, 65], dtype=torch.bfloat16)
    head = (*batch.lay_out("TND").values(), batch.heads, "TND")
    outputs = [torch.empty_like(tensor) for tensor in torch_npu._npu_fusion_attention_v3_infer_output(*head)]
    rest = [torch.empty(0).npu(), torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)]
    Trace.new()
    torch.ops.npu.npu_fusion_attention_v3.out(
        *head,
        scale=batch.scale,
        actual_seq_qlen=torch.tensor(ends(batch.rows)),
        actual_seq_kvlen=torch.tensor(ends(batch.keys)),
        sparse_mode=3,
        atten_mask=triangle(torch.bool),
        softmax_layout=softmax_layout,
        out=[*outputs, *rest],
    )
    assert "aclnnFlashAttentionVarLenScoreV5" in Trace.new()
    counted("npu_fusion_attention_v3.out by aclnnFlashAttentionVarLenScoreV5")
    seen = lambda i: right_down(batch.rows[i], batch.keys[i])
    compare(batch, "TND", outputs, "TND" if softmax_layout else "", visible=seen)


@case(version=VERSIONS, dtype=DTYPES)
def rows_behind_the_last_sequence(version, dtype):
    """Trailing lengths of 0 mark a tail of rows and keys that no sequence has: zeros come out."""
    batch = Batch([12, 20, 5], [17, 24, 9], dtype=dtype)
    lengths = {"actual_seq_qlen": [12, 32, 0], "actual_seq_kvlen": [17, 41, 0]}
    if version == 3:
        lengths = {name: torch.tensor(values) for name, values in lengths.items()}
    result = fusion(version, batch, "TND", **lengths)
    assert not any(tensor[32:].cpu().any() for tensor in result[:3]), "the tail is not 0"
    batch.rows, batch.keys = batch.rows[:2], batch.keys[:2]
    compare(batch, "TND", [tensor[:32] for tensor in result[:3]])


@case(heads=[False, True], mode=[0, 1])
def packed_masks_of_four_axes(heads, mode):
    """The kernel reads one sequence's mask behind the other, whatever the shape says."""
    batch = Batch([20, 12], [25, 40], dtype=torch.bfloat16)
    count = batch.heads if heads else 1
    hidden = torch.zeros(2 * count * 20 * 40, dtype=torch.bool)
    parts, at = [], 0
    for rows, keys in zip(batch.rows, batch.keys):
        part = torch.rand(count, rows, keys) < 0.4
        part[..., 0] = False
        hidden[at : at + part.numel()] = part.flatten()
        at += part.numel()
        parts.append(~part)
    mask = npu(hidden.view(2, count, 20, 40))
    result = fusion(2, batch, "TND", sparse_mode=mode, atten_mask=mask)
    compare(batch, "TND", result, visible=lambda i: parts[i])


@case(layout=DENSE)
def no_keys_at_all(layout):
    batch = Batch([6] * 2, [0] * 2)
    compare(batch, layout, fusion(1, batch, layout))


@case(layout=DENSE)
def layouts_in_small_letters(layout):
    batch = Batch([12] * 2, [12] * 2)
    result = fusion(1, batch, layout, input_layout=layout.lower())
    compare(batch, layout, result)


@case(start=[(5, 17), (0, 12)])
def slopes_of_a_sequence_cut_in_two(start):
    """Mode 8: the first sequence's rows are the later ones of those that its keys are of; the start says so."""
    batch = Batch([8, 10], [20, 10], dtype=torch.float32)
    slopes = torch.rand(batch.heads)
    starts = {"q_start_idx": [start[1]], "kv_start_idx": [start[0]]}
    mask = {"sparse_mode": 8, "atten_mask": triangle(torch.bool), "pre_tokens": 20, "next_tokens": 0}
    result = fusion(2, batch, "TND", pse=npu(slopes), pse_type=2, **starts, **mask)
    shift = [start[1] - start[0], 0]

    def bias(i):
        rows, keys = torch.arange(batch.rows[i])[:, None], torch.arange(batch.keys[i])
        return -slopes.double()[:, None, None] * (keys - rows - shift[i]).abs()

    see = [right_down, left_up]
    seen = lambda i: see[i](batch.rows[i], batch.keys[i])
    compare(batch, "TND", result, visible=seen, bias=bias)
