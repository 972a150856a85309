"""Attention of training, prompts, single rows and the ring update as graphs, which compute with what their tensors hold then."""

import torch
import torch_npu

from fusion import compare as compare_training
from incre import compare as compare_single, single
from harness import case, counted
from prompt import compare as compare_prompt
from reference import left_up, right_down
from tensors import Batch, ends, triangle

SHAPES = {
    "npu_fusion_attention": lambda: Batch([20] * 2, [33] * 2, dtype=torch.bfloat16),
    "npu_fusion_attention, packed": lambda: Batch([20, 0, 9], [33, 4, 9], dtype=torch.bfloat16),
    "npu_fusion_attention_v3": lambda: Batch([20] * 2, [33] * 2),
    "npu_fusion_attention_v2, slopes": lambda: Batch([20] * 2, [20] * 2, dtype=torch.float32),
    "npu_prompt_flash_attention": lambda: Batch([20] * 2, [33] * 2),
    "npu_incre_flash_attention": lambda: single([200, 9, 128], dim=128),
}


def calls(what, tensors, batch, mask, slopes):
    """The call of a name on tensors that stay where they are."""
    query, key, value = tensors
    dense = (query, key, value, batch.heads, "BNSD")
    lengths = {"actual_seq_qlen": ends(batch.rows), "actual_seq_kvlen": ends(batch.keys)}
    heads = {"num_heads": batch.heads, "num_key_value_heads": batch.kv_heads, "scale_value": batch.scale}
    masked = {"sparse_mode": 3, "atten_mask": mask}
    # Otherwise the extension has a second stream wait for the call, which a capture would have to wait for in turn.
    joined = {"sync": True}
    return {
        "npu_fusion_attention": lambda: torch_npu.npu_fusion_attention(*dense, scale=batch.scale, **masked, **joined),
        "npu_fusion_attention_v3": lambda: torch_npu.npu_fusion_attention_v3(*dense, scale=batch.scale, **masked),
        "npu_fusion_attention, packed": lambda: torch_npu.npu_fusion_attention(
            query, key, value, batch.heads, "TND", scale=batch.scale, **lengths, **joined
        ),
        "npu_fusion_attention_v2, slopes": lambda: torch_npu.npu_fusion_attention_v2(
            *dense, scale=batch.scale, pse=slopes, pse_type=2, **joined
        ),
        "npu_prompt_flash_attention": lambda: torch_npu.npu_prompt_flash_attention(
            query, key, value, input_layout="BNSD", **heads, **masked
        ),
        "npu_incre_flash_attention": lambda: torch_npu.npu_incre_flash_attention(
            query, key, value, input_layout="BNSD", actual_seq_lengths=batch.keys, **heads
        ),
    }[what]


@case(what=list(SHAPES))
def replays(what):
    make = SHAPES[what]
    batch = make()
    layout = "TND" if what.endswith("packed") else "BNSD"
    tensors = list(batch.lay_out(layout).values())
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    call = calls(what, tensors, batch, triangle(torch.bool), slopes.npu())
    call()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = call()
    for _ in range(3):
        batch = make()
        for tensor, new in zip(tensors, batch.lay_out(layout).values(), strict=True):
            tensor.copy_(new)
        torch.npu.current_stream().synchronize()
        graph.replay()
        torch.npu.synchronize()
        counted(what.split(",")[0])
        if what == "npu_incre_flash_attention":
            compare_single(batch, layout, result)
        elif what == "npu_prompt_flash_attention":
            compare_prompt(batch, layout, result, visible=lambda i: right_down(20, 33))
        elif what in ("npu_fusion_attention", "npu_fusion_attention_v3"):
            compare_training(batch, layout, result, visible=lambda i: right_down(20, 33))
        elif what.endswith("packed"):
            compare_training(batch, layout, result)
        else:
            apart = (torch.arange(20)[:, None] - torch.arange(20)).abs().double()
            compare_training(batch, layout, result, bias=lambda i: -slopes.double()[:, None, None] * apart)


@case()
def pieces_merged_in_one_graph():
    """Both calls over halves of the keys and their merge."""
    make = lambda: Batch([20] * 2, [40] * 2, 4, 4)
    batch = make()
    query, key, value = batch.lay_out("SBH").values()

    def merged():
        pieces = [
            torch_npu.npu_fusion_attention(query, key[part], value[part], 4, "SBH", scale=batch.scale, sync=True)[:3]
            for part in (slice(0, 17), slice(17, 40))
        ]
        return torch_npu.npu_ring_attention_update(*pieces[0], *pieces[1], input_layout="SBH")

    merged()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = merged()
    for _ in range(3):
        batch = make()
        for tensor, new in zip((query, key, value), batch.lay_out("SBH").values(), strict=True):
            tensor.copy_(new)
        torch.npu.current_stream().synchronize()
        graph.replay()
        torch.npu.synchronize()
        counted("npu_ring_attention_update")
        compare_training(batch, "SBH", result)
