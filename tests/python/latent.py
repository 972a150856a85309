"""Latent attention: rotary parts beside the keys, and absorbed queries over a cache of latents."""

import torch

from harness import case, close, fused
from layouts import compare
from reference import attend, right_down
from tensors import Batch, arrange, cache, ends, npu, packed, separate, shuffled_blocks, table, triangle

HALVES = [torch.float16, torch.bfloat16]
LATENT, ROPE = 512, 64
SCALE = (128 + ROPE) ** -0.5


@case(layout=["TND", "NTD_TND", "BSND", "BNSD", "BSH", "BNSD_BSND"], dtype=HALVES, entry=[1, 2])
def prefill_with_rotary_parts(layout, dtype, entry):
    batch = Batch([20, 7], [33, 7], heads=4, kv_heads=4, dim=128, dtype=dtype, rope=ROPE)
    output, lse = fused(
        entry,
        **batch.lay_out(layout),
        **batch.lengths(layout),
        **batch.heads_and_scale(),
        input_layout=layout,
        sparse_mode=3,
        atten_mask=triangle(),
        softmax_lse_flag=True,
    )
    compare(batch, layout, output, lse, visible=lambda i: right_down(batch.rows[i], batch.keys[i]))


class Absorbed:
    """Queries against latents that are keys and values in one cache, with rotary parts in another."""

    def __init__(self, rows, keys, heads, dtype):
        self.rows, self.keys, self.heads = rows, keys, heads
        draw = lambda heads, lengths, dim: [torch.randn(heads, n, dim).to(dtype) for n in lengths]
        self.query, self.query_rope = draw(heads, rows, LATENT), draw(heads, rows, ROPE)
        self.latent, self.key_rope = draw(1, keys, LATENT), draw(1, keys, ROPE)

    def caches(self, form, block):
        order = shuffled_blocks(self.keys, block, 2)
        latent = npu(cache(self.latent, order, form, block))
        return {
            "key": latent,
            "value": latent,
            "key_rope": npu(cache(self.key_rope, order, form, block)),
            "block_table": npu(table(order)),
            "block_size": block,
        }

    def compare(self, layout, output, causal):
        for i, actual in enumerate(separate(output, layout, self.rows, self.heads)):
            query = torch.cat([self.query[i], self.query_rope[i]], -1)
            key = torch.cat([self.latent[i], self.key_rope[i]], -1)
            seen = right_down(self.rows[i], self.keys[i]) if causal else None
            expected, _ = attend(query, key, self.latent[i], SCALE, seen)
            close(actual, expected, f"output of sequence {i}")


@case(
    layout=["BNSD_NBSD", "BSND_NBSD", "BSH_NBSD", "BNSD", "BSND", "BSH"],
    form=["BnBsH", "BnNBsD", "NZ"],
    entry=[1, 2],
)
def absorbed_decode(layout, form, entry):
    step = Absorbed([1] * 3, [130, 128, 5], heads=8, dtype=torch.bfloat16)
    q_form = layout.split("_")[0]
    output, _ = fused(
        entry,
        query=npu(arrange(step.query, q_form)),
        query_rope=npu(arrange(step.query_rope, q_form)),
        **step.caches(form, 128),
        actual_seq_lengths_kv=step.keys,
        num_heads=step.heads,
        num_key_value_heads=1,
        scale=SCALE,
        input_layout=layout,
    )
    step.compare(layout, output, causal=False)


@case(layout=["TND", "TND_NTD"], form=["BnBsH", "BnNBsD", "NZ"], dtype=HALVES)
def absorbed_drafts(layout, form, dtype):
    step = Absorbed([2, 1, 4], [130, 60, 256], heads=16, dtype=dtype)
    output, _ = fused(
        2,
        query=npu(arrange(step.query, "TND")),
        query_rope=npu(arrange(step.query_rope, "TND")),
        **step.caches(form, 128),
        actual_seq_lengths=ends(step.rows),
        actual_seq_lengths_kv=step.keys,
        num_heads=step.heads,
        num_key_value_heads=1,
        scale=SCALE,
        input_layout=layout,
        sparse_mode=3,
        atten_mask=triangle(),
    )
    step.compare(layout, output, causal=True)


@case(layout=["BSND_NBSD", "TND_NTD"])
def absorbed_decode_with_an_int8_query(layout):
    """Query quantised by token and head, latents by tensor; the rotary parts are stored divided by the same scales."""
    rows, keys, heads = [1, 1], [140, 30], 32
    step = Absorbed(rows, keys, heads, torch.bfloat16)
    scales = [q.float().abs().amax(-1) / 127 for q in step.query]
    query = [torch.round(q.float() / s[..., None]).to(torch.int8) for q, s in zip(step.query, scales)]
    latent_scale = max(l.float().abs().max() for l in step.latent) / 127
    latent = [torch.round(l.float() / latent_scale).to(torch.int8) for l in step.latent]
    query_rope = [(r.float() / s[..., None]).bfloat16() for r, s in zip(step.query_rope, scales)]
    key_rope = [(r.float() / latent_scale).bfloat16() for r in step.key_rope]
    order = shuffled_blocks(keys, 128, 2)
    stored = npu(cache(latent, order, "NZ", 128))
    q_form = layout.split("_")[0]
    by_row = arrange([s[..., None] for s in scales], q_form).squeeze(-1)
    lengths = {"actual_seq_lengths": ends(rows)} if packed(layout) else {}
    masked = {"sparse_mode": 3, "atten_mask": triangle()} if packed(layout) else {}
    output, _ = fused(
        2,
        query=npu(arrange(query, q_form)),
        key=stored,
        value=stored,
        query_rope=npu(arrange(query_rope, q_form)),
        key_rope=npu(cache(key_rope, order, "NZ", 128)),
        block_table=npu(table(order)),
        block_size=128,
        **lengths,
        **masked,
        actual_seq_lengths_kv=keys,
        num_heads=heads,
        num_key_value_heads=1,
        scale=SCALE,
        input_layout=layout,
        dequant_scale_query=npu(by_row),
        key_antiquant_scale=latent_scale.reshape(1).npu(),
        value_antiquant_scale=latent_scale.reshape(1).npu(),
        query_quant_mode=3,
        key_antiquant_mode=0,
        value_antiquant_mode=0,
    )
    for i, actual in enumerate(separate(output, layout, rows, heads)):
        whole_query = torch.cat([query[i].double(), query_rope[i].double()], -1) * scales[i].double()[..., None]
        whole_key = torch.cat([latent[i].double(), key_rope[i].double()], -1) * latent_scale.double()
        expected, _ = attend(whole_query, whole_key, latent[i].double() * latent_scale.double(), SCALE)
        close(actual, expected, f"output of sequence {i}", tolerance=(4e-2, 4e-2))
