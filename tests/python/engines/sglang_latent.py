"""SGLang's latent attention (MLA): prefill with projected keys, decoding and drafts over latents."""

import reference
import torch
from engines import sglang_engine
from engines.batches import BLOCK, Batch
from engines.sglang_engine import DEVICE, LATENT, LONGEST, NOPE, ROPE, VALUE
from harness import case, close, exact
from sglang.srt.model_executor.forward_batch_info import ForwardMode

HALVES = (torch.bfloat16, torch.float16)
HEADS = 16
SCALE = (NOPE + ROPE) ** -0.5


class Drawn:
    """Random latents and rotary parts of keys of a batch, and the weight that makes keys and values of latents."""

    def __init__(self, cached, rows, dtype):
        self.make, self.dtype = torch.Generator().manual_seed(1), dtype
        self.batch = Batch(cached, rows, width=LONGEST // BLOCK)
        # Latents are small, so that scores over them are of the size of scores over keys.
        self.latents = [self.draw(length, 1, LATENT, scale=0.3) for length in self.batch.lengths]
        self.rope = [self.draw(length, 1, ROPE) for length in self.batch.lengths]
        self.up = self.draw(HEADS * (NOPE + VALUE), LATENT, scale=LATENT**-0.5)
        self.pool = sglang_engine.Pool(*(cache.to(DEVICE) for cache in self.caches(cached)))

    def draw(self, *shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=self.make)).to(self.dtype)

    def caches(self, lengths):
        return [self.batch.cache(parts, lengths) for parts in (self.latents, self.rope)]

    def expected(self, query, key_and_value):
        """Attention of a packed query over what a function says of each request."""
        outputs = []
        for request, rows in enumerate(self.batch.rows):
            key, value = key_and_value(request)
            visible = reference.right_down(rows, len(key))
            parts = (tensor.transpose(0, 1) for tensor in (self.batch.of(request, query), key, value))
            outputs.append(reference.attend(*parts, SCALE, visible)[0].transpose(0, 1))
        return torch.cat(outputs)

    def projected(self, request):
        """Keys and values of each head."""
        latents, rope = self.latents[request], self.rope[request]
        both = (latents.double().view(-1, LATENT) @ self.up.double().T).to(self.dtype).view(-1, HEADS, NOPE + VALUE)
        return torch.cat([both[..., :NOPE], rope.expand(-1, HEADS, -1)], -1), both[..., NOPE:]

    def absorbed(self, request):
        """Latents as the keys and values of all heads."""
        return torch.cat([self.latents[request], self.rope[request]], -1), self.latents[request]


def extends(cached, rows, dtype):
    drawn = Drawn(cached, rows, dtype)
    query = drawn.draw(drawn.batch.tokens, HEADS, NOPE + ROPE)
    up = drawn.up.to(DEVICE)

    def project(latents):
        return (torch.nn.functional.linear(latents.reshape(-1, LATENT), up),)

    layer = sglang_engine.layer(HEADS, HEADS, NOPE + ROPE, VALUE, LATENT + ROPE, SCALE, project)
    forward = sglang_engine.forward_batch(drawn.batch, ForwardMode.EXTEND)
    projected = [drawn.projected(request) for request in range(len(rows))]
    new = [drawn.batch.new(parts).to(DEVICE) for parts in zip(*projected)]
    with sglang_engine.backend(drawn.batch, drawn.pool, HEADS, dtype, True, None, True) as backend:
        backend.init_forward_metadata(forward)
        output = backend.forward_extend(query.to(DEVICE), *new, layer, forward, save_kv_cache=False)
    close(output.view(-1, HEADS, VALUE), drawn.expected(query, projected.__getitem__))


def decodes(mode, cached, rows, dtype, drafts=None):
    drawn = Drawn(cached, rows, dtype)
    query = drawn.draw(drawn.batch.tokens, HEADS, LATENT, scale=0.3)
    rope = drawn.draw(drawn.batch.tokens, HEADS, ROPE)
    layer = sglang_engine.layer(HEADS, 1, NOPE + ROPE, VALUE, LATENT + ROPE, SCALE)
    forward = sglang_engine.forward_batch(drawn.batch, mode, drafts)
    new, new_rope = (drawn.batch.new(parts).to(DEVICE) for parts in (drawn.latents, drawn.rope))
    with sglang_engine.backend(drawn.batch, drawn.pool, HEADS, dtype, True, drafts, True) as backend:
        backend.init_forward_metadata(forward)
        call = backend.forward_decode if mode == ForwardMode.DECODE else backend.forward_extend
        output = call(
            query.to(DEVICE), new, new, layer, forward, q_rope=rope.to(DEVICE), k_rope=new_rope
        )
    close(output.view(-1, HEADS, LATENT), drawn.expected(torch.cat([query, rope], -1), drawn.absorbed))
    for what, cache, expected in zip(("latents", "keys"), drawn.pool.caches, drawn.caches(drawn.batch.lengths)):
        exact(cache, expected, what)


@case(dtype=HALVES)
def extend(dtype):
    extends([0, 0], [17, 130], dtype)


@case(dtype=HALVES, cached=[(128, 256), (128, 0)])
def extend_after_a_prefix(dtype, cached):
    extends(cached, [17, 40], dtype)


@case(dtype=HALVES)
def decode(dtype):
    decodes(ForwardMode.DECODE, [127, 300, 5], [1, 1, 1], dtype)


@case(dtype=HALVES)
def verify_drafts(dtype):
    decodes(ForwardMode.TARGET_VERIFY, [127, 300, 5], [4, 4, 4], dtype, 4)
