"""vLLM-Ascend's latent attention in graphs: captured with some lengths, replayed with others."""

import torch
from engines import vllm_engine
from engines.batches import Batch
from engines.latent_model import VALUE, Latent
from engines.vllm_engine import DEVICE
from engines.vllm_graphs import Captured
from engines.vllm_latent import TOLERANCE
from harness import case, close
from vllm.forward_context import get_forward_context
from vllm_ascend.attention.attention_v1 import AscendAttentionState as State
from vllm_ascend.attention.mla_v1 import AscendMLABackend

CAPTURED, REPLAYED = [200, 31, 128], [7, 300, 440]
LAYERS = 2


def replays(rows=(1, 1, 1), state=State.DecodeOnly, **shape):
    """Layers in one graph, captured for some lengths and replayed with others and with these."""
    layers = [Latent(seed=3 + at, **shape) for at in range(LAYERS)]
    before = Batch(CAPTURED, rows, width=4)
    after = Batch(REPLAYED, rows, seed=9, width=4)
    with layers[0].configured() as setup:
        builder = layers[0].builder(setup)
        implementations = [layer.implementation() for layer in layers]
        graph = Captured(setup, AscendMLABackend, before.tokens, LAYERS)
        drawn = [layer.drawn(before, 10 + at) for at, layer in enumerate(layers)]
        held = [part.inputs().to(DEVICE) for part in drawn]
        caches = [tuple(cache.to(DEVICE) for cache in part.caches(before.cached)) for part in drawn]
        metadata = builder.build_for_graph_capture(vllm_engine.metadata(before, state), state)
        table, slots = metadata.decode.block_table, metadata.slot_mapping

        def model():
            known = get_forward_context().attn_metadata
            outputs = []
            for at, (name, part) in enumerate(zip(graph.names, implementations)):
                output = held[at].new_empty(before.tokens, layers[at].heads * VALUE)
                outputs.append(part.forward(name, held[at], caches[at], known[name], output=output))
            return torch.stack(outputs)

        graph.capture(model, metadata)
        for batch in (after, before):
            drawn = [layer.drawn(batch, 20 + at) for at, layer in enumerate(layers)]
            for at, part in enumerate(drawn):
                held[at].copy_(part.inputs())
                for kept, cache in zip(caches[at], part.caches(batch.cached)):
                    kept.copy_(cache)
            fresh = builder.build_for_graph_capture(vllm_engine.metadata(batch, state), state)
            table.copy_(batch.table)
            slots.copy_(batch.slots)
            outputs = graph.replay(fresh)
            for output, part, kept in zip(outputs, drawn, caches):
                close(output, part.expected(), tolerance=TOLERANCE)
                part.wrote(kept)


@case(dtype=[torch.bfloat16, torch.float16])
def decode(dtype):
    replays(dtype=dtype)


@case()
def decode_of_fractal_caches():
    replays(fractal=True)


@case()
def speculative_rows():
    replays((3, 3, 3), State.SpecDecoding, speculative=2)
