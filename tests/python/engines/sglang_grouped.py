"""SGLang's attention with grouped queries: prefill, prefixes, decoding, drafts, sinks."""

import reference
import torch
from engines import sglang_engine
from engines.batches import BLOCK, Batch
from engines.sglang_engine import DEVICE, LONGEST
from harness import case, close, exact, refused
from sglang.srt.model_executor.forward_batch_info import ForwardMode

HALVES = (torch.bfloat16, torch.float16)
HEADS, GROUPS = 16, 2


def attends(mode, cached, rows, dtype=torch.bfloat16, width=128, drafts=None, sinks=False, fused=True):
    """One call of the backend, whose output and caches are compared with the reference."""
    make = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=make).to(dtype)

    batch = Batch(cached, rows, width=LONGEST // BLOCK)
    keys, values = ([draw(length, GROUPS, width) for length in batch.lengths] for _ in range(2))
    query, scale = draw(batch.tokens, HEADS, width), width**-0.5
    sink = draw(HEADS) if sinks else None
    pool = sglang_engine.Pool(*(batch.cache(parts, cached).to(DEVICE) for parts in (keys, values)))
    layer = sglang_engine.layer(HEADS, GROUPS, width, width, width, scale)
    forward = sglang_engine.forward_batch(batch, mode, drafts)
    more = {"sinks": sink.to(DEVICE)} if sinks else {}
    with sglang_engine.backend(batch, pool, HEADS, dtype, False, drafts, fused) as backend:
        backend.init_forward_metadata(forward)
        call = backend.forward_decode if mode == ForwardMode.DECODE else backend.forward_extend
        new = [tensor.to(DEVICE) for tensor in (query, batch.new(keys), batch.new(values))]
        output = call(*new, layer, forward, **more)
    expected = []
    for request, (key, value) in enumerate(zip(keys, values)):
        visible = reference.right_down(rows[request], len(key))
        parts = (tensor.transpose(0, 1) for tensor in (batch.of(request, query), key, value))
        expected.append(reference.attend(*parts, scale, visible, sink=sink)[0].transpose(0, 1))
    close(output.view(-1, HEADS, width), torch.cat(expected))
    for what, cache, parts in zip(("keys", "values"), pool.caches, (keys, values)):
        exact(cache, batch.cache(parts, batch.lengths), what)


@case(dtype=HALVES, width=[128, 64])
def extend(dtype, width):
    attends(ForwardMode.EXTEND, [0, 0, 0], [17, 130, 64], dtype, width)


@case(dtype=HALVES, width=[128, 64])
def extend_after_a_prefix(dtype, width):
    attends(ForwardMode.EXTEND, [128, 256, 0], [17, 130, 64], dtype, width)


@case(dtype=HALVES)
def decode(dtype):
    attends(ForwardMode.DECODE, [127, 300, 5], [1, 1, 1], dtype)


@case(dtype=HALVES)
def verify_drafts(dtype):
    attends(ForwardMode.TARGET_VERIFY, [127, 300, 5], [4, 4, 4], dtype, drafts=4)


@case(dtype=HALVES)
def sinks_in_extend(dtype):
    attends(ForwardMode.EXTEND, [128, 0], [17, 130], dtype, sinks=True)


@case()
def sinks_in_decode():
    attends(ForwardMode.DECODE, [127, 300, 5], [1, 1, 1], torch.bfloat16, sinks=True)


@case()
def sinks_of_float16_in_decode():
    """The engine hands the operator sinks of the query's dtype, which the operator takes on Ascend 950 alone."""
    refused(
        lambda: attends(ForwardMode.DECODE, [127, 300, 5], [1, 1, 1], torch.float16, sinks=True),
        "learnable_sink.dtype_of_target",
    )


@case(mode=["EXTEND", "DECODE"], dtype=HALVES, width=[128, 64])
def without_fused_operators(mode, dtype, width):
    """The backend calls operators of ATB where ASCEND_USE_FIA is not set. They take prefixes of whole pages of 128, which
    are what the engine's own prefix cache shares."""
    cached, rows = ([0, 128, 256], [17, 130, 64]) if mode == "EXTEND" else ([127, 5, 300], [1, 1, 1])
    attends(ForwardMode[mode], cached, rows, dtype, width, fused=False)
