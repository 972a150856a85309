"""vLLM-Ascend's attention with grouped queries in graphs: captured with some lengths, replayed with others."""

import torch
from engines.batches import Batch
from engines.vllm_engine import DEVICE
from engines.vllm_graphs import Captured
from engines.vllm_layers import Grouped, Layer
from harness import case, close
from vllm.forward_context import get_forward_context
from vllm_ascend.attention.attention_v1 import AscendAttentionBackend
from vllm_ascend.attention.attention_v1 import AscendAttentionState as State

CAPTURED, REPLAYED = [200, 31, 128], [7, 300, 440]
ONE = [1, 1, 1]


def replays(rows=(ONE, ONE), state=State.DecodeOnly, layers=2, turns=2, **shape):
    """Layers in one graph, captured for the first rows and replayed in turn with the others and with these."""
    layer = Grouped(**shape)
    before = Batch(CAPTURED, rows[0], width=4)
    after = Batch(REPLAYED, rows[1], seed=9, width=4)
    with layer.configured() as setup:
        graph = Captured(setup, AscendAttentionBackend, before.tokens, layers, layer.sink is not None)
        implementations = [layer.implementation() for _ in range(layers)]
        drawn = [layer.drawn(before, 10 + at) for at in range(layers)]
        held = [[tensor.to(DEVICE) for tensor in part.inputs()] for part in drawn]
        caches = [part.cache(before.cached).to(DEVICE) for part in drawn]
        metadata = layer.metadata(setup, before, state)
        table, slots = before.table.to(DEVICE), before.slots.to(DEVICE)
        metadata.block_tables, metadata.slot_mapping = table, slots

        def model():
            known = get_forward_context().attn_metadata
            outputs = [
                part.forward(Layer(name), *held[at], caches[at], known[name], output=torch.empty_like(held[at][0]))
                for at, (name, part) in enumerate(zip(graph.names, implementations))
            ]
            return torch.stack(outputs)

        graph.capture(model, metadata)
        for turn in range(turns):
            batch = before if turn % 2 else after
            drawn = [layer.drawn(batch, 20 + at) for at in range(layers)]
            for at, part in enumerate(drawn):
                for kept, new in zip(held[at], part.inputs()):
                    kept.copy_(new)
                caches[at].copy_(part.cache(batch.cached))
            table.copy_(batch.table)
            slots.copy_(batch.slots)
            fresh = layer.metadata(setup, batch, state)
            fresh.block_tables = table
            outputs = graph.replay(fresh)
            for output, part, cache in zip(outputs, drawn, caches):
                close(output.view(-1, layer.heads, layer.width), part.expected())
                part.wrote(cache)


@case(dtype=[torch.bfloat16, torch.float16])
def decode(dtype):
    replays(dtype=dtype)


@case()
def speculative_rows():
    replays(([4, 4, 4], [4, 4, 4]), State.SpecDecoding)


@case()
def chunks():
    replays(([2, 5, 9], [9, 4, 3]), State.ChunkedPrefill)


@case()
def window():
    replays(window=64)


@case(window=[None, 64])
def sinks(window):
    replays(width=64, sinks=True, window=window)


@case()
def three_layers_four_times():
    replays(layers=3, turns=4)
