"""vLLM-Ascend's latent attention (MLA): decoding, prefill, context in chunks, speculative rows, fractal caches."""

import torch
from engines import vllm_engine
from engines.batches import BLOCK, Batch
from engines.latent_model import VALUE, Latent
from engines.vllm_engine import DEVICE, LAYER
from harness import case, close, refused
from vllm_ascend.attention.attention_v1 import AscendAttentionState as State

HALVES = (torch.bfloat16, torch.float16)
HEADS = (8, 20, 32, 64, 128)
# Projections, norm and angles are rounded before attention.
TOLERANCE = (2e-2, 2e-2)


def attends(state, cached, rows, **shape):
    """One call of the layer, whose output and caches are compared with the reference."""
    layer, batch = Latent(**shape), Batch(cached, rows)
    drawn = layer.drawn(batch)
    with layer.configured() as setup:
        metadata = layer.builder(setup).build(0, vllm_engine.metadata(batch, state))
        implementation = layer.implementation()
        caches = tuple(cache.to(DEVICE) for cache in drawn.caches(cached))
        output = torch.zeros(batch.tokens, layer.heads * VALUE, dtype=layer.dtype, device=DEVICE)
        with vllm_engine.forward(setup, metadata, batch.tokens):
            output = implementation.forward(
                LAYER.format(0), drawn.inputs().to(DEVICE), caches, metadata, output=output
            )
    close(output, drawn.expected(), tolerance=TOLERANCE)
    drawn.wrote(caches)


@case(dtype=HALVES, fractal=[False, True])
def decode(dtype, fractal):
    attends(State.DecodeOnly, [200, 31, 300], [1, 1, 1], dtype=dtype, fractal=fractal)


@case(dtype=HALVES)
def prefill(dtype):
    attends(State.PrefillNoCache, [0, 0], [60, 130], dtype=dtype)


# Batches with new rows behind kept ones, whose latents the engine gathers.
GATHERED = {
    "prefix": ([200, 31], [60, 40], {}),
    "beside decode": ([300, 17, 200, 0], [1, 1, 40, 33], {}),
    "in chunks": ([500, 200, 130], [40, 33, 20], {"workspace": 3 * BLOCK}),
}


@case(batch=list(GATHERED))
def context(batch):
    cached, rows, more = GATHERED[batch]
    attends(State.ChunkedPrefill, cached, rows, **more)


@case(batch=list(GATHERED))
def context_of_float16(batch):
    """The engine computes prefill in bfloat16 and gathers rotary parts of float16 into a tensor of that dtype."""
    cached, rows, more = GATHERED[batch]
    refused(
        lambda: attends(State.ChunkedPrefill, cached, rows, dtype=torch.float16, **more),
        "gather.same_dtype",
    )


@case(dtype=HALVES, fractal=[False, True])
def speculative_rows(dtype, fractal):
    attends(State.SpecDecoding, [200, 31, 300], [3, 3, 3], dtype=dtype, speculative=2, fractal=fractal)


@case(dtype=HALVES)
def speculative_rows_beside_chunks(dtype):
    attends(State.ChunkedPrefill, [200, 31, 0], [3, 3, 50], dtype=dtype, speculative=2)


@case(heads=HEADS)
def heads_in_decode(heads):
    attends(State.DecodeOnly, [200, 31, 300], [1, 1, 1], heads=heads)


@case(heads=HEADS)
def heads_after_a_prefix(heads):
    attends(State.ChunkedPrefill, [130, 31], [20, 30], heads=heads)


@case(heads=HEADS)
def heads_of_speculative_rows(heads):
    attends(State.SpecDecoding, [200, 31], [3, 3], heads=heads, speculative=2)
