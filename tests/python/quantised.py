"""INT8 keys and values, INT8 outputs, INT8 throughout."""

import torch

from harness import case, close, counted, fused
from layouts import compare
from reference import attend, right_down
from tensors import Batch, arrange, cache, npu, separate, shuffled_blocks, table, triangle

HALVES = [torch.float16, torch.bfloat16]


def rounded(values, scale):
    return torch.clamp(torch.round(values.double() / scale.double()), -128, 127).to(torch.int8)


def by_channel(sequences):
    """INT8 sequences and their scales [Nk, D] in the sequences' dtype."""
    scale = (torch.cat(sequences, 1).float().abs().amax(1) / 127).to(sequences[0].dtype)
    return [rounded(s, scale[:, None]) for s in sequences], scale


def with_values(batch, key, value):
    batch.key, batch.value = key, value
    return batch


@case(layout=["BNSD", "BSND", "BSH"], dtype=HALVES, split=[True, False], offsets=[True, False])
def keys_by_channel(layout, dtype, split, offsets):
    batch = Batch([1] * 2, [96, 64], heads=8, kv_heads=2, dim=128, dtype=dtype)
    (key, key_scale), (value, value_scale) = by_channel(batch.key), by_channel(batch.value)
    key_offset, value_offset = (torch.randint(-3, 4, (2, 2, 128)).to(dtype)) if offsets else torch.zeros(2, 2, 128)
    shape = (256,) if layout == "BSH" else (2, 128) if layout == "BSND" else (2, 1, 128)

    def grids(key_grid, value_grid, key_name, value_name, merged_name):
        if split:
            return {key_name: npu(key_grid.reshape(1, *shape)), value_name: npu(value_grid.reshape(1, *shape))}
        return {merged_name: npu(torch.stack([key_grid, value_grid]).reshape(2, *shape))}

    arguments = grids(key_scale, value_scale, "key_antiquant_scale", "value_antiquant_scale", "antiquant_scale")
    if offsets:
        arguments |= grids(
            key_offset, value_offset, "key_antiquant_offset", "value_antiquant_offset", "antiquant_offset"
        )
    stored = {"key": npu(arrange(key, layout)), "value": npu(arrange(value, layout))}
    output, _ = fused(
        1,
        query=npu(arrange(batch.query, layout)),
        **stored,
        actual_seq_lengths_kv=batch.keys,
        **batch.heads_and_scale(),
        input_layout=layout,
        **arguments,
    )
    exact = lambda x, offset, scale: (x.double() + offset.double()[:, None]) * scale.double()[:, None]
    with_values(
        batch,
        [exact(k, key_offset, key_scale) for k in key],
        [exact(v, value_offset, value_scale) for v in value],
    )
    close_enough(batch, layout, output)


def close_enough(batch, layout, output, visible=None):
    """The operator rounds what it multiplies to half precision."""
    expected, _ = batch.expected(attend, visible=visible)
    tolerance = (4e-3, 4e-3) if output.dtype == torch.float16 else (3e-2, 3e-2)
    for i, actual in enumerate(separate(output, layout, batch.rows, batch.heads)):
        close(actual, expected[i], f"output of sequence {i}", tolerance)


@case(layout=["BNSD", "BSH"], dtype=HALVES, entry=[1, 2])
def keys_by_token(layout, dtype, entry):
    batch = Batch([1] * 2, [64, 40], heads=4, kv_heads=2, dim=128, dtype=dtype)

    def by_token(sequences):
        scales = [s.float().abs().amax((0, 2)) / 127 for s in sequences]
        stored = [rounded(s, scale[None, :, None]) for s, scale in zip(sequences, scales)]
        return stored, scales

    (key, key_scales), (value, value_scales) = by_token(batch.key), by_token(batch.value)
    grid = lambda scales: npu(
        torch.stack([torch.nn.functional.pad(s, (0, 64 - len(s)), value=1.0) for s in scales])[None]
    )
    output, _ = fused(
        entry,
        query=npu(arrange(batch.query, layout)),
        key=npu(arrange(key, layout)),
        value=npu(arrange(value, layout)),
        actual_seq_lengths_kv=batch.keys,
        **batch.heads_and_scale(),
        input_layout=layout,
        key_antiquant_scale=grid(key_scales),
        value_antiquant_scale=grid(value_scales),
        key_antiquant_mode=1,
        value_antiquant_mode=1,
    )
    with_values(
        batch,
        [k.double() * s.double()[None, :, None] for k, s in zip(key, key_scales)],
        [v.double() * s.double()[None, :, None] for v, s in zip(value, value_scales)],
    )
    close_enough(batch, layout, output)


@case(form=["BnBsH", "BnNBsD"], dtype=HALVES)
def keys_by_channel_in_a_cache(form, dtype):
    batch = Batch([1] * 3, [200, 128, 9], heads=8, kv_heads=2, dim=128, dtype=dtype)
    (key, key_scale), (value, value_scale) = by_channel(batch.key), by_channel(batch.value)
    order = shuffled_blocks(batch.keys, 128, 2)
    output, _ = fused(
        1,
        query=npu(arrange(batch.query, "BNSD")),
        key=npu(cache(key, order, form, 128)),
        value=npu(cache(value, order, form, 128)),
        block_table=npu(table(order)),
        block_size=128,
        actual_seq_lengths_kv=batch.keys,
        **batch.heads_and_scale(),
        input_layout="BNSD",
        key_antiquant_scale=npu(key_scale.reshape(1, 2, 1, 128)),
        value_antiquant_scale=npu(value_scale.reshape(1, 2, 1, 128)),
    )
    exact = lambda x, scale: x.double() * scale.double()[:, None]
    with_values(batch, [exact(k, key_scale) for k in key], [exact(v, value_scale) for v in value])
    close_enough(batch, "BNSD", output)


@case(layout=["BNSD", "BSND", "BSH", "BNSD_BSND"], dtype=HALVES, scale_shape=["tensor", "channel"], entry=[1, 2])
def int8_outputs(layout, dtype, scale_shape, entry):
    batch = Batch([16, 16], [40, 40], heads=4, kv_heads=4, dim=64, dtype=dtype)
    if scale_shape == "tensor":
        scale, grid = torch.tensor([40.0]), torch.full((4, 64), 40.0)
    else:
        grid = 30 + 30 * torch.rand(4, 64)
        scale = grid.reshape(1, 4, 1, 64) if layout.startswith("BNSD") else grid.flatten()
    offset, offset_grid = torch.full_like(scale, 3.0), 3.0
    output, _ = fused(
        entry,
        **batch.lay_out(layout),
        **batch.heads_and_scale(),
        input_layout=layout,
        quant_scale2=npu(scale),
        quant_offset2=npu(offset),
    )
    assert output.dtype == torch.int8
    expected, _ = batch.expected(attend)
    for i, actual in enumerate(separate(output, layout, batch.rows, batch.heads)):
        want = torch.clamp(torch.round(expected[i] * grid.double()[:, None] + offset_grid), -128, 127)
        # A step of the grid beside the reference's, where rounding to half precision crosses a bound.
        close(actual, want, f"output of sequence {i}", tolerance=(1.0, 0.0))
        wrong = (actual.cpu().double() != want).float().mean().item()
        assert wrong < (0.02 if dtype == torch.float16 else 0.12), f"{wrong:.3f} of the elements are a step off"


@case(int8_output=[True, False])
def int8_throughout(int8_output):
    batch = Batch([24], [48], heads=2, kv_heads=2, dim=64)
    quantise = lambda sequences: [rounded(s, torch.tensor(0.03)) for s in sequences]
    query, key, value = quantise(batch.query), quantise(batch.key), quantise(batch.value)
    deq1, quant1, deq2, quant2 = 0.03 * 0.03, 127.0, 0.03 / 127.0, 50.0
    scalar = lambda x: torch.tensor([x], dtype=torch.float32).npu()
    output, _ = fused(
        1,
        query=npu(query[0][None]),
        key=npu(key[0][None]),
        value=npu(value[0][None]),
        **batch.heads_and_scale(),
        input_layout="BNSD",
        dequant_scale1=scalar(deq1),
        quant_scale1=scalar(quant1),
        dequant_scale2=scalar(deq2),
        **({"quant_scale2": scalar(quant2)} if int8_output else {}),
    )
    exact = [x[0].double() * 0.03 for x in (query, key, value)]
    expected, _ = attend(*exact, batch.scale)
    if int8_output:
        close(output[0], torch.clamp(torch.round(expected * quant2), -128, 127), tolerance=(3.0, 0.0))
    else:
        close(output[0], expected, tolerance=(3e-2, 1e-2))
