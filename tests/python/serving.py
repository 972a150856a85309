"""The calls that vLLM-Ascend makes, argument by argument, with tensors as it makes them."""

import numpy
import torch
import torch_npu

from harness import case, close, counted, exact, refused
from latent import LATENT, ROPE, SCALE
from reference import attend, band, full, merge, right_down
from tensors import ends, npu, triangle

BLOCK = 128
INT_MAX = 2147483647
HALVES = [torch.float16, torch.bfloat16]


class Engine:
    """A layer's cache of pages, filled by the cache write of each step."""

    def __init__(self, contexts, scheduled, heads=8, kv_heads=2, dim=128, dtype=torch.bfloat16, padded_to=None):
        self.contexts, self.scheduled = contexts, scheduled
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        self.scale = dim**-0.5
        self.lens = [c + s for c, s in zip(contexts, scheduled)]
        blocks = [-(-n // BLOCK) for n in self.lens]
        numbers = (1 + torch.randperm(sum(blocks) + 2)).tolist()
        # More rows and columns than this step needs, as the runner keeps them; block 0 pads.
        self.block_table = torch.zeros(len(contexts) + 3, max(blocks) + 2, dtype=torch.int32)
        for row, count in enumerate(blocks):
            self.block_table[row, :count] = torch.tensor([numbers.pop() for _ in range(count)])
        self.kv_cache = torch.zeros(2, sum(blocks) + 4, BLOCK, kv_heads, dim, dtype=dtype).npu()
        draw = lambda heads, lengths: [torch.randn(n, heads, dim).to(dtype) for n in lengths]
        self.query = draw(heads, scheduled)
        self.key, self.value = draw(kv_heads, self.lens), draw(kv_heads, self.lens)
        self.ends = ends(scheduled)
        self.tokens = self.ends[-1]
        self.room = padded_to or self.tokens
        # What earlier steps wrote, and then this step's keys and values.
        self.write([range(c) for c in contexts], None)
        self.write([range(c, n) for c, n in zip(contexts, self.lens)], self.room)

    def slot(self, request, position):
        return int(self.block_table[request, position // BLOCK]) * BLOCK + position % BLOCK

    def write(self, positions, room):
        """The cache write of a step: rows of the step's tokens, padded to `room` with slots of -1."""
        slots = [self.slot(r, p) for r, span in enumerate(positions) for p in span]
        if not slots:
            return
        pick = lambda sequences: torch.cat([s[list(span)] for s, span in zip(sequences, positions)])
        key, value = pick(self.key), pick(self.value)
        if room is not None and room > len(slots):
            more = room - len(slots)
            slots += [-1] * more
            key, value = (torch.cat([x, torch.full((more, *x.shape[1:]), 9.0).to(x.dtype)]) for x in (key, value))
        counted("npu_scatter_pa_kv_cache")
        torch_npu.npu_scatter_pa_kv_cache(
            key=npu(key),
            value=npu(value),
            key_cache=self.kv_cache[0],
            value_cache=self.kv_cache[1],
            slot_mapping=torch.tensor(slots, dtype=torch.int32).npu(),
            cache_mode="Norm",
        )

    def padded_query(self):
        query = torch.cat(self.query)
        return npu(torch.cat([query, torch.zeros(self.room - self.tokens, *query.shape[1:]).to(self.dtype)]))

    def caches(self):
        """Each half of the cache, as the backend views it."""
        blocks = self.kv_cache.shape[1]
        return self.kv_cache[0].view(blocks, BLOCK, -1), self.kv_cache[1].view(blocks, BLOCK, -1)

    def check(self, output, visible, sink=None, rows=None):
        """Compares rows [tokens, N, D] with the reference; `visible` is a function of rows and keys."""
        output, at = output.cpu(), 0
        for r in rows if rows is not None else range(len(self.lens)):
            count = self.scheduled[r]
            query, key, value = (x[r].transpose(0, 1) for x in (self.query, self.key, self.value))
            expected, _ = attend(query, key, value, self.scale, visible(count, self.lens[r]), sink=sink)
            close(output[at : at + count], expected.transpose(0, 1), f"output of request {r}")
            at += count


STATES = {
    # What each request has in the cache and what the step schedules of it.
    "PrefillCacheHit": ([128, 40, 256], [30, 5, 128]),
    "DecodeOnly": ([127, 128, 300, 1], [1, 1, 1, 1]),
    "ChunkedPrefill": ([200, 17, 0, 128], [1, 1, 40, 64]),
    "SpecDecoding": ([200, 17, 511], [4, 4, 4]),
}


def fia(engine, query, key, value, table, kv_lens, **arguments):
    counted("npu_fused_infer_attention_score")
    output, _ = torch_npu.npu_fused_infer_attention_score(
        query=query,
        key=key,
        value=value,
        block_table=table,
        input_layout="TND",
        block_size=BLOCK,
        actual_seq_lengths=engine.ends,
        actual_seq_lengths_kv=kv_lens,
        num_key_value_heads=engine.kv_heads,
        num_heads=engine.heads,
        scale=engine.scale,
        **arguments,
    )
    return output.view(engine.tokens, engine.heads, engine.dim)


@case(dtype=HALVES)
def prefill_no_cache(dtype):
    engine = Engine([0, 0, 0], [5, 40, 17], dtype=dtype, padded_to=64)
    query = engine.padded_query()
    key, value = (npu(torch.cat(x + [torch.zeros_like(x[0][:2])])) for x in (engine.key, engine.value))
    output = torch.zeros_like(query)
    attention = fia(
        engine,
        query[: engine.tokens],
        key[: engine.tokens].contiguous(),
        value[: engine.tokens].contiguous(),
        None,
        engine.ends,
        atten_mask=triangle(),
        sparse_mode=3,
    )
    output[: engine.tokens] = attention[: engine.tokens]
    engine.check(output, right_down)


@case(state=list(STATES), dtype=HALVES)
def paged_states(state, dtype):
    engine = Engine(*STATES[state], dtype=dtype, padded_to=256 if state == "ChunkedPrefill" else None)
    key, value = engine.caches()
    table = npu(engine.block_table)[: len(engine.lens), :]
    output = torch.zeros_like(engine.padded_query())
    attention = fia(
        engine,
        engine.padded_query()[: engine.tokens],
        key.contiguous(),
        value.contiguous(),
        table,
        engine.lens,
        atten_mask=triangle(),
        sparse_mode=3,
    )
    output[: engine.tokens] = attention[: engine.tokens]
    engine.check(output, right_down)


@case(state=list(STATES), window=[32, 150])
def paged_states_with_a_window(state, window):
    """The window's size is passed as it is, so that a row sees one key more than the model says."""
    engine = Engine(*STATES[state])
    key, value = engine.caches()
    output = fia(
        engine,
        engine.padded_query(),
        key,
        value,
        npu(engine.block_table)[: len(engine.lens), :],
        engine.lens,
        atten_mask=triangle(),
        pre_tokens=window,
        next_tokens=0,
        sparse_mode=4,
    )
    engine.check(output, lambda rows, keys: band(rows, keys, window, 0))


@case(state=["PrefillCacheHit", "ChunkedPrefill"])
def layers_that_are_not_causal(state):
    engine = Engine(*STATES[state])
    key, value = engine.caches()
    table = npu(engine.block_table)[: len(engine.lens), :]
    output = fia(engine, engine.padded_query(), key, value, table, engine.lens, sparse_mode=0)
    engine.check(output, full)


@case()
def cross_attention_of_an_encoder_and_a_decoder():
    """Rows of the decoder against dense keys of the encoder, whose lengths are cumulated on the host."""
    engine = Engine([10, 40], [3, 6])
    key, value = (npu(torch.cat(x)) for x in (engine.key, engine.value))
    lengths = torch.cumsum(torch.tensor(engine.lens, dtype=torch.int32), dim=0).tolist()
    output = fia(engine, engine.padded_query(), key, value, None, lengths, sparse_mode=0)
    engine.check(output, full)


@case(state=list(STATES), window=[None, 64], dtype=HALVES)
def sinks_over_pages(state, window, dtype):
    engine = Engine(*STATES[state], dim=64, dtype=dtype)
    sinks = torch.randn(engine.heads).to(dtype)
    key, value = engine.caches()
    lengths = engine.ends
    if state == "DecodeOnly":
        # A tensor on the host in the place of a list.
        lengths = torch.tensor([1] * len(engine.lens), dtype=torch.int32).cumsum(dim=0)
    counted("npu_fused_infer_attention_score_v2")
    output, _ = torch_npu.npu_fused_infer_attention_score_v2(
        engine.padded_query(),
        key.contiguous(),
        value.contiguous(),
        num_query_heads=engine.heads,
        num_key_value_heads=engine.kv_heads,
        input_layout="TND",
        pre_tokens=window if window is not None else INT_MAX,
        next_tokens=0,
        atten_mask=triangle(),
        sparse_mode=4 if window is not None else 3,
        softmax_scale=engine.scale,
        block_table=npu(engine.block_table)[: len(engine.lens), :],
        block_size=BLOCK,
        actual_seq_qlen=lengths,
        actual_seq_kvlen=engine.lens,
        learnable_sink=npu(sinks),
    )
    seen = right_down if window is None else lambda rows, keys: band(rows, keys, window, 0)
    engine.check(output, seen, sink=sinks)


@case(padding=[1, 3])
def a_dummy_request_takes_the_padding_of_the_queries(padding):
    """Sum of the lengths is the padded number of tokens; the padding request has one key in block 0."""
    engine = Engine([130, 20], [1, 1])
    tokens = engine.tokens + padding
    query = torch.cat([engine.padded_query().cpu(), torch.zeros(padding, engine.heads, engine.dim).bfloat16()])
    key, value = engine.caches()
    counted("npu_fused_infer_attention_score")
    output, _ = torch_npu.npu_fused_infer_attention_score(
        query=npu(query),
        key=key,
        value=value,
        atten_mask=triangle(),
        block_table=npu(engine.block_table)[:3, :],
        input_layout="TND",
        block_size=BLOCK,
        actual_seq_lengths=[1, 2, tokens],
        actual_seq_lengths_kv=engine.lens + [padding],
        num_key_value_heads=engine.kv_heads,
        num_heads=engine.heads,
        scale=engine.scale,
        sparse_mode=3,
    )
    engine.check(output, right_down)


@case(split=[True, False])
def mixed_steps_may_be_split_by_phase(split):
    """Decodes first, prefills behind them with ends that start again at 0."""
    engine = Engine([200, 17, 0, 128], [1, 1, 40, 64])
    key, value = engine.caches()
    query, table = engine.padded_query(), npu(engine.block_table)
    parts = [(0, 2), (2, 4)] if split else [(0, 4)]
    for first, last in parts:
        start = engine.ends[first - 1] if first else 0
        counted("npu_fused_infer_attention_score")
        output, _ = torch_npu.npu_fused_infer_attention_score(
            query=query[start : engine.ends[last - 1]],
            key=key,
            value=value,
            atten_mask=triangle(),
            block_table=table[first:last],
            input_layout="TND",
            block_size=BLOCK,
            actual_seq_lengths=[end - start for end in engine.ends[first:last]],
            actual_seq_lengths_kv=engine.lens[first:last],
            num_key_value_heads=engine.kv_heads,
            num_heads=engine.heads,
            scale=engine.scale,
            sparse_mode=3,
        )
        engine.check(output, right_down, rows=range(first, last))


@case(heads=[(8, 2), (32, 8)])
def int8_cache_decode(heads):
    """Static scales by channel, keys quantised before the write, an NZ cache viewed with five axes."""
    count, kv_heads = heads
    engine = Engine([127, 128, 300], [1, 1, 1], heads=count, kv_heads=kv_heads)
    blocks = engine.kv_cache.shape[1]
    scales = [torch.cat(x).float().abs().amax(0).div(127).bfloat16() for x in (engine.key, engine.value)]
    caches, exact_rows = [], []
    slots = [engine.slot(r, p) for r, n in enumerate(engine.lens) for p in range(n)]
    quantised = []
    for rows, scale in zip((engine.key, engine.value), scales):
        stored = torch.clamp(torch.round(torch.cat(rows).float() * (1 / scale.float())), -128, 127).to(torch.int8)
        quantised.append(stored)
        exact_rows.append(list((stored.double() * scale.double()).split(engine.lens)))
        layer = torch.zeros(blocks, BLOCK, kv_heads, engine.dim, dtype=torch.int8).npu()
        caches.append(layer.view(blocks, kv_heads, engine.dim // 32, BLOCK, 32))
    counted("npu_scatter_pa_kv_cache")
    torch_npu.npu_scatter_pa_kv_cache(
        key=npu(quantised[0]),
        value=npu(quantised[1]),
        key_cache=caches[0],
        value_cache=caches[1],
        slot_mapping=torch.tensor(slots, dtype=torch.int32).npu(),
    )
    call = lambda: torch_npu.npu_fused_infer_attention_score(
        engine.padded_query()[: len(engine.lens)].unsqueeze(2),
        *caches,
        key_antiquant_scale=npu(scales[0].view(kv_heads, 1, engine.dim)),
        value_antiquant_scale=npu(scales[1].view(kv_heads, 1, engine.dim)),
        block_table=npu(engine.block_table)[: len(engine.lens)],
        actual_seq_lengths_kv=engine.lens,
        num_heads=count,
        num_key_value_heads=kv_heads,
        input_layout="BNSD",
        scale=engine.scale,
        block_size=BLOCK,
        antiquant_mode=0,
        key_antiquant_mode=0,
        value_antiquant_mode=0,
        inner_precise=1,
        sparse_mode=0,
    )
    if torch.npu.get_device_name().startswith("Ascend950"):
        # There the innermost axis of quantised caches has 16 elements.
        refused(call, "cache.unified_shape")
        return
    counted("npu_fused_infer_attention_score")
    output, _ = call()
    engine.key, engine.value = exact_rows
    engine.check(output.squeeze(2), full)


@case()
def int8_cache_prefill_from_dense_keys():
    """Keys of the cache gathered and dequantised; their ends are a tensor on the host."""
    engine = Engine([100, 0], [20, 33])
    key, value = (npu(torch.cat(x)) for x in (engine.key, engine.value))
    lengths = torch.tensor(engine.lens, dtype=torch.int32).cumsum(dim=0)
    output = fia(
        engine, engine.padded_query(), key, value, None, lengths, atten_mask=triangle(), sparse_mode=3
    )
    engine.check(output, right_down)


@case(dim=[80, 128])
def vision_encoder(dim):
    """Head dimensions between 64 and 128 are padded to 128; key heads are repeated."""
    lengths, heads = [30, 70], 4
    rows = [torch.randn(sum(lengths), heads, dim).bfloat16() for _ in range(3)]
    padded = [npu(torch.nn.functional.pad(x, (0, 128 - dim))) for x in rows]
    counted("npu_fused_infer_attention_score")
    output, _ = torch_npu.npu_fused_infer_attention_score(
        *padded,
        actual_seq_lengths=ends(lengths),
        actual_seq_lengths_kv=ends(lengths),
        num_heads=heads,
        num_key_value_heads=heads,
        scale=dim**-0.5,
        input_layout="TND",
        sparse_mode=0,
        pre_tokens=INT_MAX,
        next_tokens=INT_MAX,
    )
    for part, *sequences in zip(output.cpu().split(lengths), *(x.split(lengths) for x in rows)):
        expected, _ = attend(*(s.transpose(0, 1) for s in sequences), dim**-0.5)
        close(part[..., :dim], expected.transpose(0, 1))


def local_length(length, rank, ranks, interleave=1):
    """How many of a request's keys a rank of decode context parallelism holds."""
    base = length // interleave // ranks * interleave
    rest = length - base * ranks
    return base + min(max(rest - rank * interleave, 0), interleave)


@case(ranks=[2, 4], drafts=[0, 2])
def decode_context_parallel(ranks, drafts):
    """Each rank attends its own keys and gives log-sums; the update operator merges them."""
    rows = 1 + drafts
    engine = Engine([150, 300, 41], [rows] * 3, padded_to=None)
    query = engine.padded_query()
    outputs, sums = [], []
    for rank in range(ranks):
        lens = numpy.array([local_length(n, rank, ranks) for n in engine.lens], dtype=numpy.int32)
        local = Engine([int(n) for n in lens], [0] * len(lens))
        for r, n in enumerate(engine.lens):
            local.key[r] = engine.key[r][rank::ranks][: lens[r]]
            local.value[r] = engine.value[r][rank::ranks][: lens[r]]
        local.write([range(int(n)) for n in lens], None)
        key, value = local.caches()
        mask, layout, lengths, rank_query = None, "TND", engine.ends, query
        if drafts:
            layout, lengths = "BSND", [rows] * 3
            rank_query = query.view(3, rows, engine.heads, engine.dim)
            mask = torch.zeros(3, rows, local.block_table.shape[1] * BLOCK, dtype=torch.bool)
            for r, n in enumerate(engine.lens):
                for i in range(rows):
                    mask[r, i, local_length(n - drafts + i, rank, ranks) :] = True
            mask = npu(mask)
        counted("npu_fused_infer_attention_score")
        output, lse = torch_npu.npu_fused_infer_attention_score(
            rank_query,
            key,
            value,
            num_heads=engine.heads,
            num_key_value_heads=engine.kv_heads,
            input_layout=layout,
            atten_mask=mask,
            scale=engine.scale,
            antiquant_mode=0,
            antiquant_scale=None,
            softmax_lse_flag=True,
            block_table=npu(local.block_table)[:3],
            block_size=BLOCK,
            actual_seq_lengths_kv=lens.tolist(),
            actual_seq_lengths=lengths,
        )
        if layout == "BSND":
            output = output.view(-1, output.shape[2], output.shape[3])
            lse = lse.transpose(1, 2).reshape(-1, lse.shape[1], 1)
        outputs.append(output.to(torch.float32))
        sums.append(lse.to(torch.float32))
    joined = [torch.cat([o, l], dim=-1) for o, l in zip(outputs, sums)]
    stacked = torch.stack(joined)
    out_flat, lse_flat = torch.split(stacked, [engine.dim, 1], dim=-1)
    out_list = out_flat.flatten(1, 2).unbind(0)
    lse_list = lse_flat.flatten(1, -1).unbind(0)
    counted("npu_attention_update")
    merged, _ = torch_npu.npu_attention_update(lse_list, out_list, 0)
    engine.check(merged.view(-1, engine.heads, engine.dim), right_down)


class Latent:
    """A layer of latent attention: its cache of latents and rotary keys, and the projections of the heads."""

    def __init__(self, contexts, scheduled, heads=16):
        self.contexts, self.scheduled, self.heads = contexts, scheduled, heads
        self.lens = [c + s for c, s in zip(contexts, scheduled)]
        draw = lambda *shape: torch.randn(*shape).bfloat16()
        self.latent = [draw(n, 1, LATENT) for n in self.lens]
        self.rope = [draw(n, 1, ROPE) for n in self.lens]
        blocks = [-(-n // BLOCK) for n in self.lens]
        self.table = torch.zeros(len(blocks), max(blocks) + 1, dtype=torch.int32)
        numbers = torch.randperm(sum(blocks) + 1).tolist()
        for row, count in enumerate(blocks):
            self.table[row, :count] = torch.tensor([numbers.pop() for _ in range(count)])
        self.blocks = sum(blocks) + 1

    def caches(self, nz):
        """Both caches, written with npu_scatter_pa_kv_cache."""
        slots = [
            int(self.table[r, p // BLOCK]) * BLOCK + p % BLOCK for r, n in enumerate(self.lens) for p in range(n)
        ]
        latent = torch.zeros(self.blocks, BLOCK, 1, LATENT).bfloat16().npu()
        rope = torch.zeros(self.blocks, BLOCK, 1, ROPE).bfloat16().npu()
        if nz:
            latent = latent.view(self.blocks, 1, LATENT // 16, BLOCK, 16)
            rope = rope.view(self.blocks, 1, ROPE // 16, BLOCK, 16)
        counted("npu_scatter_pa_kv_cache")
        torch_npu.npu_scatter_pa_kv_cache(
            key=npu(torch.cat(self.latent)),
            value=npu(torch.cat(self.rope)),
            key_cache=latent,
            value_cache=rope,
            slot_mapping=torch.tensor(slots, dtype=torch.int32).npu(),
            cache_mode="PA_NZ" if nz else "Norm",
        )
        if nz:
            return latent, rope
        return latent.view(self.blocks, 1, BLOCK, LATENT), rope.view(self.blocks, 1, BLOCK, ROPE)


@case(nz=[False, True], heads=[16, 32])
def latent_decode(nz, heads):
    layer = Latent([130, 128, 300], [1, 1, 1], heads)
    tokens = len(layer.lens)
    q_nope, q_pe = torch.randn(tokens, heads, LATENT).bfloat16(), torch.randn(tokens, heads, ROPE).bfloat16()
    latent, rope = layer.caches(nz)
    shape = (tokens, 1, heads, -1) if nz else (tokens, heads, 1, -1)
    counted("npu_fused_infer_attention_score_v2")
    output, _ = torch_npu.npu_fused_infer_attention_score_v2(
        npu(q_nope).view(shape).contiguous(),
        latent,
        latent,
        query_rope=npu(q_pe).view(shape),
        key_rope=rope,
        num_query_heads=heads,
        num_key_value_heads=1,
        input_layout="BSND_NBSD" if nz else "BNSD_NBSD",
        atten_mask=None,
        sparse_mode=0,
        softmax_scale=SCALE,
        block_table=npu(layer.table),
        block_size=BLOCK,
        actual_seq_qlen=None,
        actual_seq_kvlen=layer.lens,
    )
    assert tuple(output.shape) == (heads, tokens, 1, LATENT)
    output = output.cpu()
    for r in range(tokens):
        query = torch.cat([q_nope[r], q_pe[r]], -1)[:, None]
        key = torch.cat([layer.latent[r], layer.rope[r]], -1).transpose(0, 1)
        expected, _ = attend(query, key, layer.latent[r].transpose(0, 1), SCALE)
        close(output[:, r], expected, f"output of request {r}")


@case(nz=[False, True])
def latent_decode_of_drafts(nz):
    scheduled, heads = [3, 3, 3], 16
    layer = Latent([130, 128, 300], scheduled, heads)
    tokens = sum(scheduled)
    q_nope, q_pe = torch.randn(tokens, heads, LATENT).bfloat16(), torch.randn(tokens, heads, ROPE).bfloat16()
    latent, rope = layer.caches(nz)
    counted("npu_fused_infer_attention_score_v2")
    output, _ = torch_npu.npu_fused_infer_attention_score_v2(
        npu(q_nope),
        latent,
        latent,
        query_rope=npu(q_pe),
        key_rope=rope,
        num_query_heads=heads,
        num_key_value_heads=1,
        input_layout="TND_NTD",
        atten_mask=triangle(),
        sparse_mode=3,
        softmax_scale=SCALE,
        block_table=npu(layer.table),
        block_size=BLOCK,
        actual_seq_qlen=ends(scheduled),
        actual_seq_kvlen=layer.lens,
    )
    assert tuple(output.shape) == (heads, tokens, LATENT)
    output = output.cpu()
    parts = zip(output.split(scheduled, dim=1), q_nope.split(scheduled), q_pe.split(scheduled))
    for r, (actual, nope, pe) in enumerate(parts):
        query = torch.cat([nope, pe], -1).transpose(0, 1)
        key = torch.cat([layer.latent[r], layer.rope[r]], -1).transpose(0, 1)
        seen = right_down(scheduled[r], layer.lens[r])
        expected, _ = attend(query, key, layer.latent[r].transpose(0, 1), SCALE, seen)
        close(actual, expected, f"output of request {r}")


@case(contexts=[[0, 0], [40, 9]])
def latent_prefill(contexts):
    """The step's own keys with a causal mask, chunks of the context without one, merged by their log-sums."""
    scheduled, heads = [20, 33], 4
    draw = lambda n, dim: torch.randn(n, heads, dim).bfloat16()
    q_nope, q_pe = draw(sum(scheduled), 128), draw(sum(scheduled), ROPE)
    parts = []
    for lengths, causal in ((scheduled, True), (contexts, False)):
        if not sum(lengths):
            continue
        k_nope, v = draw(sum(lengths), 128), draw(sum(lengths), 128)
        # One rotary key for all heads.
        k_pe = torch.randn(sum(lengths), 1, ROPE).bfloat16().npu().expand(-1, heads, -1)
        counted("npu_fused_infer_attention_score")
        output, lse = torch_npu.npu_fused_infer_attention_score(
            npu(q_nope),
            npu(k_nope),
            npu(v),
            num_heads=heads,
            num_key_value_heads=heads,
            input_layout="TND",
            atten_mask=triangle() if causal else None,
            sparse_mode=3 if causal else 0,
            scale=SCALE,
            antiquant_mode=0,
            antiquant_scale=None,
            **({"block_table": None, "block_size": 0} if causal else {}),
            softmax_lse_flag=True,
            actual_seq_lengths=ends(scheduled),
            actual_seq_lengths_kv=ends(lengths),
            query_rope=npu(q_pe),
            key_rope=k_pe.contiguous(),
        )
        parts.append((output, lse, torch.cat([k_nope, k_pe.cpu()], -1), v, lengths))
    outputs = [p[0].to(torch.float32).reshape(-1, 128) for p in parts]
    sums = [p[1].to(torch.float32).reshape(-1) for p in parts]
    merged = outputs[0]
    if len(parts) > 1:
        counted("npu_attention_update")
        merged, _ = torch_npu.npu_attention_update(tuple(sums), tuple(outputs), 0)
    merged = merged.view(-1, heads, 128)
    query = torch.cat([q_nope, q_pe], -1).split(scheduled)
    for r, actual in enumerate(merged.cpu().split(scheduled)):
        # Keys of the context stand before the step's own.
        keys = torch.cat([p[2].split(p[4])[r] for p in reversed(parts)])
        values = torch.cat([p[3].split(p[4])[r] for p in reversed(parts)])
        seen = right_down(scheduled[r], len(keys))
        expected, _ = attend(
            query[r].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), SCALE, seen
        )
        close(actual, expected.transpose(0, 1), f"output of request {r}", tolerance=(1.6e-2, 1.6e-2))


@case()
def encoder_only_pooling():
    """Rows of an encoder see each other in both directions, by the operator of training."""
    query, key, value = (torch.randn(8, 4, 64).half() for _ in range(3))
    output = torch_npu.npu_fusion_attention(
        npu(query), npu(key), npu(value), 4, "TND", scale=0.125, actual_seq_qlen=[3, 8], actual_seq_kvlen=[3, 8]
    )[0]
    counted("npu_fusion_attention")
    for rows in (slice(0, 3), slice(3, 8)):
        heads = (tensor[rows].transpose(0, 1) for tensor in (query, key, value))
        expected, _ = attend(*heads, 0.125)
        close(output[rows], expected.transpose(0, 1))
