"""vLLM-Ascend's attention with grouped queries: each state of a batch, windows, sinks, shapes, padding, encoders."""

import torch
from engines import vllm_engine
from engines.batches import Batch
from engines.vllm_engine import DEVICE, LAYER
from engines.vllm_layers import Grouped, Layer
from harness import case, close
from vllm_ascend.attention.attention_v1 import AscendAttentionState as State

HALVES = (torch.bfloat16, torch.float16)
PADDING = 3.0


def attends(state, cached, rows, padded=0, pooling=False, kind="decoder", **shape):
    """One call of the layer, whose output and cache are compared with the reference."""
    layer, batch = Grouped(**shape), Batch(cached, rows)
    drawn = layer.drawn(batch)
    with layer.configured() as setup:
        if pooling:
            setup.model_config.runner_type = "pooling"
        metadata = layer.metadata(setup, batch, state)
        implementation = layer.implementation(kind)
        inputs = [
            torch.cat([tensor, tensor.new_full((padded, *tensor.shape[1:]), PADDING)]).to(DEVICE)
            for tensor in drawn.inputs()
        ]
        cache, output = drawn.cache(cached).to(DEVICE), torch.zeros_like(inputs[0])
        with vllm_engine.forward(setup, metadata, batch.tokens + padded, sinks=layer.sink is not None):
            output = implementation.forward(Layer(LAYER.format(0)), *inputs, cache, metadata, output=output)
    output = output.view(-1, layer.heads, layer.width)
    close(output[: batch.tokens], drawn.expected())
    if kind == "decoder":
        drawn.wrote(cache)


@case(dtype=HALVES)
def prefill(dtype):
    attends(State.PrefillNoCache, [0, 0, 0], [17, 130, 64], dtype=dtype)


@case(dtype=HALVES)
def prefill_after_a_prefix(dtype):
    attends(State.PrefillCacheHit, [128, 300, 0], [17, 130, 64], dtype=dtype)


@case(dtype=HALVES)
def decode(dtype):
    attends(State.DecodeOnly, [127, 300, 5, 0], [1, 1, 1, 1], dtype=dtype)


@case(dtype=HALVES)
def decode_beside_chunks(dtype):
    attends(State.ChunkedPrefill, [200, 31, 128, 0], [1, 1, 40, 64], dtype=dtype)


@case(dtype=HALVES)
def speculative_rows(dtype):
    attends(State.SpecDecoding, [200, 31, 128], [4, 4, 4], dtype=dtype)


@case(dtype=HALVES)
def window_in_prefill(dtype):
    attends(State.PrefillNoCache, [0, 0], [130, 64], dtype=dtype, window=32)


@case(dtype=HALVES)
def window_in_chunks(dtype):
    attends(State.ChunkedPrefill, [200, 31, 128], [1, 1, 40], dtype=dtype, window=32)


@case(dtype=HALVES)
def window_in_decode(dtype):
    attends(State.DecodeOnly, [200, 31, 300], [1, 1, 1], dtype=dtype, window=64)


@case(dtype=HALVES)
def sinks_in_prefill(dtype):
    attends(State.PrefillNoCache, [0, 0], [130, 64], dtype=dtype, width=64, sinks=True)


@case(dtype=HALVES)
def sinks_in_chunks(dtype):
    attends(State.ChunkedPrefill, [200, 31, 128], [1, 1, 40], dtype=dtype, width=64, sinks=True)


@case(dtype=HALVES)
def sinks_in_decode(dtype):
    attends(State.DecodeOnly, [200, 31, 300], [1, 1, 1], dtype=dtype, width=64, sinks=True)


@case(dtype=HALVES)
def sinks_and_window_in_chunks(dtype):
    attends(State.ChunkedPrefill, [200, 31, 128], [1, 1, 40], dtype=dtype, width=64, sinks=True, window=32)


@case(dtype=HALVES)
def sinks_and_window_in_decode(dtype):
    attends(State.DecodeOnly, [200, 31, 300], [1, 1, 1], dtype=dtype, width=64, sinks=True, window=128)


@case(dtype=HALVES)
def every_key_is_seen(dtype):
    attends(State.ChunkedPrefill, [0, 0], [130, 64], dtype=dtype, causal=False)


@case(heads=[(8, 8), (8, 1), (64, 8), (12, 4), (28, 4), (5, 1), (128, 1)])
def heads_over_groups(heads):
    attends(State.ChunkedPrefill, [200, 31, 128], [1, 1, 40], heads=heads[0], groups=heads[1])


WIDTHS = (64, 80, 96, 128, 192, 256, 512)


@case(width=WIDTHS)
def width_in_chunks(width):
    attends(State.ChunkedPrefill, [200, 31, 128], [1, 1, 40], width=width)


@case(width=WIDTHS)
def width_in_decode(width):
    """The engine takes PagedAttention of ATB for a width of 512."""
    attends(State.DecodeOnly, [200, 31, 128], [1, 1, 1], width=width)


@case(width=WIDTHS)
def width_in_prefill(width):
    attends(State.PrefillNoCache, [0, 0], [40, 9], width=width)


@case()
def padding_after_decode():
    attends(State.DecodeOnly, [200, 31, 300], [1, 1, 1], padded=5)


@case()
def padding_after_chunks():
    attends(State.ChunkedPrefill, [200, 31, 128], [1, 1, 40], padded=6)


@case(padded=[0, 3])
def encoder(padded):
    attends(
        State.PrefillNoCache, [0, 0, 0], [17, 130, 64], padded, pooling=True, kind="encoder_only", causal=False
    )


@case(dtype=HALVES)
def pooling_of_a_decoder(dtype):
    attends(State.PrefillNoCache, [0, 0], [17, 64], pooling=True, dtype=dtype)
