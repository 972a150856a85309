"""`npu_prompt_flash_attention`: layouts, lengths, masks, position bias, INT8."""

import torch

from harness import case, close, reaching
from quantised import rounded
from reference import attend, band, left_up, right_down
from tensors import Batch, ends, npu, separate, triangle

DENSE = ["BSH", "BSND", "BNSD", "BNSD_BSND"]
HALVES = [torch.float16, torch.bfloat16]
MASKS = [torch.bool, torch.int8, torch.uint8]
WHOLE = 2147483647


def prompt(batch, layout="BNSD", **arguments):
    """One call on the tensors of a batch, without a band unless it is asked for."""
    tensors = batch.lay_out(layout)
    given = {
        "num_heads": batch.heads,
        "num_key_value_heads": batch.kv_heads,
        "scale_value": batch.scale,
        "input_layout": layout,
        "next_tokens": WHOLE,
    }
    arguments = tensors | given | arguments
    return reaching("npu_prompt_flash_attention", "aclnnPromptFlashAttentionV3", **arguments)


def compare(batch, layout, output, **reference):
    expected, _ = batch.expected(attend, **reference)
    for i, actual in enumerate(separate(output, layout, batch.rows, batch.heads)):
        close(actual, expected[i], f"output of sequence {i}")


def lengths(batch):
    return {"actual_seq_lengths": batch.rows, "actual_seq_lengths_kv": batch.keys}


@case(layout=DENSE, dtype=HALVES, heads=[(4, 4), (4, 2), (6, 1)])
def whole_tensors(layout, dtype, heads):
    batch = Batch([24] * 2, [31] * 2, *heads, dtype=dtype)
    compare(batch, layout, prompt(batch, layout))


@case(layout=DENSE, dtype=HALVES)
def sequences_of_several_lengths(layout, dtype):
    batch = Batch([33, 7, 20], [40, 65, 20], dtype=dtype)
    compare(batch, layout, prompt(batch, layout, **lengths(batch)))


@case(dim=[16, 40, 72, 128, 256, 512], layout=["BNSD", "BSH"])
def head_sizes(dim, layout):
    batch = Batch([9] * 2, [17] * 2, dim=dim)
    compare(batch, layout, prompt(batch, layout))


@case(value_dim=[128, 192], mode=[0, 3])
def packed_sequences(value_dim, mode):
    batch = Batch([6, 20], [13, 33], 8, 8, dim=192, value_dim=value_dim, dtype=torch.bfloat16)
    packed = {"actual_seq_lengths": ends(batch.rows), "actual_seq_lengths_kv": ends(batch.keys)}
    masked = {"sparse_mode": 3, "atten_mask": triangle()} if mode else {}
    output = prompt(batch, "TND", **packed, **masked)
    visible = (lambda i: right_down(batch.rows[i], batch.keys[i])) if mode else None
    compare(batch, "TND", output, visible=visible)


@case(mode=[0, 1, 10, 11], mask=MASKS, shape=[(24, 40), (1, 24, 40), (2, 24, 40), (1, 1, 24, 40), (2, 1, 24, 40)])
def whole_masks(mode, mask, shape):
    """Modes from 10 on are those from 0 on, computed with more precision."""
    batch = Batch([24] * 2, [40] * 2)
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    output = prompt(batch, sparse_mode=mode, atten_mask=npu(hidden.to(mask)))
    whole = hidden.view(-1, 24, 40).expand(2, 24, 40)
    compare(batch, "BNSD", output, visible=lambda i: ~whole[i])


MODES = {2: left_up, 3: right_down, 4: lambda rows, keys: band(rows, keys, 20, 2)}


@case(mode=[2, 3, 4, 12, 13, 14], layout=DENSE, mask=MASKS)
def compressed_masks(mode, layout, mask):
    batch = Batch([30, 12], [45, 64], dtype=torch.bfloat16)
    tokens = {"pre_tokens": 20, "next_tokens": 2} if mode % 10 == 4 else {}
    output = prompt(batch, layout, **lengths(batch), sparse_mode=mode, atten_mask=triangle(mask), **tokens)
    compare(batch, layout, output, visible=lambda i: MODES[mode % 10](batch.rows[i], batch.keys[i]))


@case(window=[(WHOLE, 0), (5, 3), (0, 40)])
def bands_beside_a_mask(window):
    batch = Batch([24] * 2, [40] * 2)
    hidden = torch.rand(24, 40) < 0.3
    hidden.fill_diagonal_(False)
    output = prompt(batch, atten_mask=npu(hidden), pre_tokens=window[0], next_tokens=window[1])
    seen = ~hidden & band(24, 40, *window, origin=0)
    compare(batch, "BNSD", output, visible=lambda i: seen)


@case(layout=DENSE, dtype=HALVES, shared=[True, False])
def position_bias(layout, dtype, shared):
    batch = Batch([16] * 2, [32] * 2, dim=128, dtype=dtype)
    bias = torch.randn(1 if shared else 2, 4, 16, 32).to(dtype)
    output = prompt(batch, layout, pse_shift=npu(bias))
    compare(batch, layout, output, bias=lambda i: bias[0 if shared else i])


@case(layout=DENSE, channels=[True, False], offset=[True, False], dtype=HALVES)
def int8_outputs(layout, channels, offset, dtype):
    batch = Batch([16] * 2, [40] * 2, 4, 4, dtype=dtype)
    grid = 30 + 30 * torch.rand(4, 64) if channels else torch.full((4, 64), 40.0)
    scale = grid.reshape(1, 4, 1, 64) if layout.startswith("BNSD") else grid.flatten()
    scale = scale if channels else torch.tensor([40.0])
    offsets = {"quant_offset2": npu(torch.full_like(scale, 3.0))} if offset else {}
    output = prompt(batch, layout, quant_scale2=npu(scale), **offsets)
    assert output.dtype == torch.int8
    expected, _ = batch.expected(attend)
    for i, actual in enumerate(separate(output, layout, batch.rows, batch.heads)):
        want = torch.round(expected[i] * grid.double()[:, None] + (3.0 if offset else 0.0)).clamp(-128, 127)
        close(actual, want, f"output of sequence {i}", tolerance=(1.0, 0.0))
        wrong = (actual.double() != want).double().mean().item()
        assert wrong < (0.02 if dtype == torch.float16 else 0.12), f"{wrong:.3f} of the elements are a step off"


@case(int8_output=[True, False], layout=["BNSD", "BSH"])
def int8_throughout(int8_output, layout):
    batch = Batch([24] * 2, [48] * 2, 2, 2)
    exact = {}
    for name in ("query", "key", "value"):
        stored = [rounded(part, torch.tensor(0.03)) for part in getattr(batch, name)]
        exact[name] = [part.double() * 0.03 for part in stored]
        setattr(batch, name, stored)
    number = lambda value: torch.tensor([value], dtype=torch.float32).npu()
    scales = {"deq_scale1": number(0.03 * 0.03), "quant_scale1": number(127.0), "deq_scale2": number(0.03 / 127.0)}
    output = prompt(batch, layout, **scales, **({"quant_scale2": number(50.0)} if int8_output else {}))
    assert output.dtype == (torch.int8 if int8_output else torch.float16)
    vars(batch).update(exact)
    expected, _ = batch.expected(attend)
    for i, actual in enumerate(separate(output, layout, batch.rows, batch.heads)):
        if int8_output:
            close(actual, torch.round(expected[i] * 50.0).clamp(-128, 127), tolerance=(3.0, 0.0))
        else:
            close(actual, expected[i], tolerance=(3e-2, 1e-2))
