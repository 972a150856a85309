"""Dropout of attention of training: masks that are given, and masks that `torch_npu` draws."""

import torch
import torch_npu

from fusion import DENSE, DTYPES, VERSIONS, compare, fusion, triangle
from harness import Trace, case, close, exact
from reference import right_down
from tensors import Batch, npu, separate

GENERATED = "aclnnDropoutGenMaskV2"


def packed_bits(kept):
    """Truth values of all sequences as bits, the least significant of each byte first, up to a multiple of 128."""
    bits = torch.cat([part.flatten() for part in kept]).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -len(bits) % 128)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def separate_bits(mask, batch):
    """The truth values [N, rows, keys] of each sequence in a mask on the device."""
    bits = (mask.cpu()[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    sizes = [batch.heads * rows * keys for rows, keys in zip(batch.rows, batch.keys)]
    parts = bits.flatten()[: sum(sizes)].bool().split(sizes)
    return [part.view(batch.heads, rows, keys) for part, rows, keys in zip(parts, batch.rows, batch.keys)]


def some(layout, dtype=torch.float16):
    if layout == "TND":
        return Batch([20, 9, 1], [33, 9, 40], dtype=dtype)
    return Batch([20] * 2, [33] * 2, dtype=dtype)


@case(layout=DENSE + ["TND"], keep=[0.9, 0.25], version=[1, 2])
def masks_that_are_given(layout, keep, version):
    batch = some(layout)
    kept = [torch.rand(batch.heads, rows, keys) < keep for rows, keys in zip(batch.rows, batch.keys)]
    result = fusion(version, batch, layout, keep_prob=keep, dropout_mask=npu(packed_bits(kept)))
    compare(batch, layout, result, kept=lambda i: kept[i], keep_prob=keep)


@case(layout=DENSE + ["TND"], dtype=DTYPES, keep=[0.9, 0.5], version=VERSIONS)
def masks_that_are_drawn(layout, dtype, keep, version):
    """The seed and the offset that the call gives back draw its mask once more."""
    batch = some(layout, dtype)
    masked = {"sparse_mode": 3, "atten_mask": triangle(torch.bool)} if layout == "BNSD" else {}
    torch.npu.manual_seed(int(keep * 100))
    result = fusion(version, batch, layout, keep_prob=keep, **masked)
    seed, offset = int(result[4]), int(result[5])
    count = sum(batch.heads * rows * keys for rows, keys in zip(batch.rows, batch.keys))
    query = batch.query[0].npu()
    mask = torch_npu._npu_dropout_gen_mask(query, [count], float(torch.tensor(1.0) - torch.tensor(keep)), seed, offset)
    kept = separate_bits(mask, batch)
    share = torch.cat([part.flatten() for part in kept]).double().mean().item()
    assert abs(share - keep) < 0.04, f"{share} of the weights are kept"
    visible = (lambda i: right_down(batch.rows[i], batch.keys[i])) if masked else None
    compare(batch, layout, result, visible=visible, kept=lambda i: kept[i], keep_prob=keep)


@case(parallel=[True, False], sync=[True, False])
def masks_drawn_on_another_stream(parallel, sync):
    batch = some("BNSD")
    first, second = (
        fusion(1, batch, "BNSD", keep_prob=0.5, gen_mask_parallel=parallel, sync=sync) for _ in range(2)
    )
    assert first[4:6] != second[4:6] and not torch.equal(first[0].cpu(), second[0].cpu()), "the same mask twice"
    exact(first[1], second[1].cpu(), "largest scores")
    torch.npu.manual_seed(5)
    first = fusion(1, batch, "BNSD", keep_prob=0.5)
    torch.npu.manual_seed(5)
    exact(fusion(1, batch, "BNSD", keep_prob=0.5)[0], first[0].cpu())


@case(version=VERSIONS)
def nothing_is_drawn_when_all_is_kept(version):
    batch = some("BNSD")
    Trace.new()
    compare(batch, "BNSD", fusion(version, batch, "BNSD", keep_prob=1.0))
    torch.nn.functional.scaled_dot_product_attention(*batch.lay_out("BNSD").values(), enable_gqa=True)
    assert GENERATED not in Trace.new()


@case(causal=[True, False])
def dropout_of_scaled_dot_product_attention(causal):
    """Each weight is dropped or enlarged, so that the mean of many calls is what comes without a dropout."""
    batch = Batch([8], [8], heads=2, kv_heads=2, dim=16, dtype=torch.float32)
    attend = torch.nn.functional.scaled_dot_product_attention
    tensors = list(batch.lay_out("BNSD").values())
    whole = attend(*tensors, is_causal=causal)
    Trace.new()
    drawn = torch.stack([attend(*tensors, dropout_p=0.25, is_causal=causal).cpu() for _ in range(300)])
    assert Trace.new().count(GENERATED) == 300
    close(drawn.mean(0), whole.cpu().double(), tolerance=(0.25, 0.0))
    assert drawn.std(0).max() > 0.05, "nothing was dropped"
