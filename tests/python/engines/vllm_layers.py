"""A layer of attention with grouped queries as vLLM-Ascend makes it, its tensors, and what it must compute."""

import reference
import torch
from engines import vllm_engine
from engines.batches import BLOCK
from engines.vllm_engine import DEVICE
from harness import exact
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_ascend.attention.attention_v1 import AscendAttentionBackend

QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 1000,
}


class Layer:
    """What the engine reads of the module that owns an implementation."""

    _q_scale_float = _k_scale_float = _v_scale_float = 1.0

    def __init__(self, name):
        self.layer_name = name


class Grouped:
    """The shape of a layer: heads of queries, heads of keys, their width, and what hides or joins keys."""

    def __init__(self, heads=8, groups=2, width=128, dtype=torch.bfloat16, window=None, sinks=False, causal=True):
        self.heads, self.groups, self.width, self.dtype = heads, groups, width, dtype
        self.window, self.causal, self.scale = window, causal, width**-0.5
        make = torch.Generator().manual_seed(5)
        self.sink = torch.randn(heads, generator=make).to(dtype) if sinks else None

    def configured(self):
        model = QWEN | {"num_attention_heads": self.heads, "num_key_value_heads": self.groups, "head_dim": self.width}
        if self.window:
            model |= {"sliding_window": self.window, "use_sliding_window": True}
        return vllm_engine.configured(model, self.dtype)

    def metadata(self, setup, batch, state):
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=self.groups, head_size=self.width, dtype=self.dtype
        )
        builder = AscendAttentionBackend.get_builder_cls()(spec, [vllm_engine.LAYER.format(0)], setup, DEVICE)
        return builder.build(0, vllm_engine.metadata(batch, state, self.causal))

    def implementation(self, kind="decoder"):
        return AscendAttentionBackend.get_impl_cls()(
            num_heads=self.heads,
            head_size=self.width,
            scale=self.scale,
            num_kv_heads=self.groups,
            alibi_slopes=None,
            sliding_window=self.window,
            kv_cache_dtype="auto",
            logits_soft_cap=None,
            attn_type=kind,
            kv_sharing_target_layer_name=None,
            sinks=None if self.sink is None else self.sink.to(DEVICE),
        )

    def drawn(self, batch, seed=1):
        return Drawn(self, batch, seed)


class Drawn:
    """Random queries, keys and values of a batch."""

    def __init__(self, layer, batch, seed):
        make = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(*shape, generator=make).to(layer.dtype)

        self.layer, self.batch = layer, batch
        self.keys = [draw(length, layer.groups, layer.width) for length in batch.lengths]
        self.values = [draw(length, layer.groups, layer.width) for length in batch.lengths]
        self.query = draw(batch.tokens, layer.heads, layer.width)

    def inputs(self):
        """Queries, keys and values of the new rows."""
        return self.query, self.batch.new(self.keys), self.batch.new(self.values)

    def cache(self, lengths):
        """Keys and values of the first `lengths` tokens of each request, as the engine keeps them."""
        return torch.stack([self.batch.cache(parts, lengths) for parts in (self.keys, self.values)])

    def expected(self):
        return torch.cat([self.request(request) for request in range(len(self.batch.rows))])

    def request(self, request):
        layer, rows, length = self.layer, self.batch.rows[request], self.batch.lengths[request]
        visible = reference.right_down(rows, length) if layer.causal else None
        if layer.window is not None:
            visible = reference.band(rows, length, layer.window, 0)
        query, key, value = (
            tensor.transpose(0, 1)
            for tensor in (self.batch.of(request, self.query), self.keys[request], self.values[request])
        )
        output, _ = reference.attend(query, key, value, layer.scale, visible, sink=layer.sink)
        return output.transpose(0, 1)

    def wrote(self, cache):
        """The cache has the new keys and values too, and nothing else."""
        exact(cache, self.cache(self.batch.lengths), "cache")
