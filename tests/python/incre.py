"""`npu_incre_flash_attention`: one query row a sequence, over tensors and caches, INT8 keys and outputs."""

import torch

from harness import case, close, reaching
from quantised import by_channel, rounded
from reference import attend
from tensors import JUNK, Batch, arrange, cache, npu, separate, shuffled_blocks, table

LAYOUTS = ["BSH", "BSND", "BNSD"]
HALVES = [torch.float16, torch.bfloat16]
MASKS = [torch.bool, torch.int8, torch.uint8]


def incre(batch, layout="BNSD", **arguments):
    """One call on the tensors of a batch."""
    given = {
        "num_heads": batch.heads,
        "num_key_value_heads": batch.kv_heads,
        "scale_value": batch.scale,
        "input_layout": layout,
    }
    arguments = batch.lay_out(layout) | given | arguments
    return reaching("npu_incre_flash_attention", "aclnnIncreFlashAttentionV4", **arguments)


def compare(batch, layout, output, tolerance=None, **reference):
    expected, _ = batch.expected(attend, **reference)
    for i, actual in enumerate(separate(output, layout, batch.rows, batch.heads)):
        close(actual, expected[i], f"output of sequence {i}", tolerance)


def single(keys, *heads, **shape):
    return Batch([1] * len(keys), keys, *(heads or (8, 2)), **shape)


@case(layout=LAYOUTS, dtype=HALVES, heads=[(4, 4), (8, 2), (6, 1)])
def whole_tensors(layout, dtype, heads):
    batch = single([40] * 3, *heads, dtype=dtype)
    compare(batch, layout, incre(batch, layout))


@case(layout=LAYOUTS, dtype=HALVES)
def keys_of_several_lengths(layout, dtype):
    batch = single([40, 1, 129], dtype=dtype)
    compare(batch, layout, incre(batch, layout, actual_seq_lengths=batch.keys))


@case(dim=[16, 40, 64, 128, 256, 512], layout=["BNSD", "BSH"])
def head_sizes(dim, layout):
    batch = single([33] * 2, dim=dim)
    compare(batch, layout, incre(batch, layout))


@case(precise=[0, 1])
def inner_precisions(precise):
    batch = single([200] * 2)
    compare(batch, "BNSD", incre(batch, inner_precise=precise))


@case(layout=LAYOUTS, mask=MASKS, shape=[(3, 40), (3, 1, 40), (3, 1, 1, 40)])
def masks(layout, mask, shape):
    batch = single([40] * 3)
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    output = incre(batch, layout, atten_mask=npu(hidden.to(mask)))
    compare(batch, layout, output, visible=lambda i: ~hidden[i].view(1, 40))


@case(layout=LAYOUTS, dtype=HALVES, shared=[True, False])
def position_bias(layout, dtype, shared):
    batch = single([64] * 2, dim=128, dtype=dtype)
    bias = torch.randn(1 if shared else 2, batch.heads, 1, 64).to(dtype)
    compare(batch, layout, incre(batch, layout, pse_shift=npu(bias)), bias=lambda i: bias[0 if shared else i])


def paged(batch, form, block):
    pages = batch.page(form, block)
    return pages | {"actual_seq_lengths": batch.keys}


# Forms of caches, and the layout of queries that go with them.
CACHES = [("BnBsH", "BSH"), ("BnBsH", "BSND"), ("BnBsH", "BNSD"), ("BnNBsD", "BNSD")]


@case(cache=CACHES, dtype=HALVES)
def caches_of_blocks(cache, dtype):
    form, layout = cache
    batch = single([200, 128, 9, 1], dim=128, dtype=dtype)
    compare(batch, layout, incre(batch, layout, **paged(batch, form, 128)))


@case(block=[16, 32, 256, 512], cache=CACHES)
def block_sizes(block, cache):
    form, layout = cache
    batch = single([600, 33], dtype=torch.bfloat16)
    compare(batch, layout, incre(batch, layout, **paged(batch, form, block)))


@case(layout=["BNSD", "BSH", "BSND"], dtype=HALVES)
def left_padding(layout, dtype):
    """Keys that end before the tensors do."""
    room, after = 40, 3
    batch = single([20, 31], dtype=dtype)

    def shifted(sequences):
        heads, _, dim = sequences[0].shape
        padded = [torch.full((heads, room, dim), JUNK).to(dtype) for _ in sequences]
        for row, sequence in zip(padded, sequences):
            row[:, room - after - sequence.shape[1] : room - after] = sequence
        return npu(arrange(padded, layout))

    padding = {"kv_padding_size": torch.tensor([after]).npu(), "actual_seq_lengths": batch.keys}
    output = incre(batch, layout, key=shifted(batch.key), value=shifted(batch.value), **padding)
    compare(batch, layout, output)


def grids(layout, key_grid, value_grid):
    """Grids [Nk, D] of keys and values as one argument."""
    heads, dim = key_grid.shape
    shape = {"BNSD": (2, heads, 1, dim), "BSND": (2, heads, dim), "BSH": (2, heads * dim)}[layout]
    return npu(torch.stack([key_grid, value_grid]).reshape(shape))


def close_enough(batch, layout, output):
    """The operator rounds what it multiplies to half precision."""
    compare(batch, layout, output, (4e-3, 4e-3) if output.dtype == torch.float16 else (3e-2, 3e-2))


@case(layout=LAYOUTS, dtype=HALVES, offsets=[True, False])
def int8_keys(layout, dtype, offsets):
    batch = single([96, 64], dim=128, dtype=dtype)
    (key, key_scale), (value, value_scale) = by_channel(batch.key), by_channel(batch.value)
    arguments = {"antiquant_scale": grids(layout, key_scale, value_scale)}
    key_offset = value_offset = torch.zeros(2, 128)
    if offsets:
        key_offset, value_offset = torch.randint(-3, 4, (2, 2, 128)).to(dtype)
        arguments["antiquant_offset"] = grids(layout, key_offset, value_offset)
    stored = {"key": npu(arrange(key, layout)), "value": npu(arrange(value, layout))}
    output = incre(batch, layout, actual_seq_lengths=batch.keys, **stored, **arguments)
    exact = lambda x, offset, scale: (x.double() + offset.double()[:, None]) * scale.double()[:, None]
    batch.key = [exact(part, key_offset, key_scale) for part in key]
    batch.value = [exact(part, value_offset, value_scale) for part in value]
    close_enough(batch, layout, output)


@case(dtype=HALVES, layout=LAYOUTS)
def int8_keys_by_tensor(dtype, layout):
    batch = single([96, 64], dim=128, dtype=dtype)
    key, value = ([rounded(part, torch.tensor(0.03)) for part in parts] for parts in (batch.key, batch.value))
    scale = torch.tensor([0.03, 0.03]).to(dtype)
    stored = {"key": npu(arrange(key, layout)), "value": npu(arrange(value, layout))}
    output = incre(batch, layout, actual_seq_lengths=batch.keys, antiquant_scale=npu(scale), **stored)
    batch.key = [part.double() * scale[0].double() for part in key]
    batch.value = [part.double() * scale[1].double() for part in value]
    close_enough(batch, layout, output)


@case(form=["BnBsH", "BnNBsD"], dtype=HALVES, block=[128, 32])
def int8_keys_in_a_cache(form, dtype, block):
    batch = single([200, 128, 9], dim=128, dtype=dtype)
    (key, key_scale), (value, value_scale) = by_channel(batch.key), by_channel(batch.value)
    order = shuffled_blocks(batch.keys, block, 2)
    output = incre(
        batch,
        key=npu(cache(key, order, form, block)),
        value=npu(cache(value, order, form, block)),
        block_table=npu(table(order)),
        block_size=block,
        actual_seq_lengths=batch.keys,
        antiquant_scale=grids("BNSD", key_scale, value_scale),
    )
    batch.key = [part.double() * key_scale.double()[:, None] for part in key]
    batch.value = [part.double() * value_scale.double()[:, None] for part in value]
    close_enough(batch, "BNSD", output)


@case(layout=LAYOUTS, channels=[True, False], offset=[True, False], dtype=HALVES)
def int8_outputs(layout, channels, offset, dtype):
    batch = single([40] * 2, 4, 4, dtype=dtype)
    grid = 30 + 30 * torch.rand(4, 64) if channels else torch.full((4, 64), 40.0)
    scale = grid.reshape(1, 4, 1, 64) if layout == "BNSD" else grid.flatten()
    scale = scale if channels else torch.tensor([40.0])
    offsets = {"quant_offset2": npu(torch.full_like(scale, 3.0))} if offset else {}
    output = incre(batch, layout, quant_scale2=npu(scale), **offsets)
    assert output.dtype == torch.int8
    expected, _ = batch.expected(attend)
    for i, actual in enumerate(separate(output, layout, batch.rows, batch.heads)):
        want = torch.round(expected[i] * grid.double()[:, None] + (3.0 if offset else 0.0)).clamp(-128, 127)
        close(actual, want, f"output of sequence {i}", tolerance=(1.0, 0.0))
        wrong = (actual.double() != want).double().mean().item()
        assert wrong < (0.03 if dtype == torch.float16 else 0.15), f"{wrong:.3f} of the elements are a step off"
