"""A layer of latent attention (MLA) with drawn weights as vLLM-Ascend makes it, and the same in double precision."""

import contextlib
from types import SimpleNamespace
from unittest.mock import MagicMock

import reference
import torch
from engines import vllm_engine
from engines.batches import BLOCK
from engines.vllm_engine import DEVICE, LONGEST
from harness import close
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm_ascend.attention.mla_v1 import AscendMLABackend
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec
from vllm_ascend.ops import rotary_embedding

LATENT, ROPE, NOPE, VALUE, HIDDEN = 512, 64, 128, 128, 256
EPSILON = 1e-6
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_act": "silu",
    "intermediate_size": 1024,
    "kv_lora_rank": LATENT,
    "q_lora_rank": 256,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "num_hidden_layers": 2,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "rms_norm_eps": EPSILON,
    "rope_theta": 1e4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "tie_word_embeddings": False,
    "vocab_size": 1000,
}


class Linear:
    """A projection whose weight the host knows too."""

    quant_method = UnquantizedLinearMethod()

    def __init__(self, out, into, dtype, make):
        self.host = (torch.randn(out, into, generator=make) / into**0.5).to(dtype)
        self.weight = torch.nn.Parameter(self.host.to(DEVICE), requires_grad=False)

    def __call__(self, rows, **_):
        return torch.nn.functional.linear(rows, self.weight), None


class Same:
    """In the place of the projection of outputs."""

    quant_method, weight = UnquantizedLinearMethod(), None

    def __call__(self, rows, **_):
        return rows, None


class Norm:
    variance_epsilon = EPSILON

    def __init__(self, width, dtype, make):
        self.host = (1 + 0.1 * torch.randn(width, generator=make)).to(dtype)
        self.weight = torch.nn.Parameter(self.host.to(DEVICE), requires_grad=False)


def angles(positions):
    return positions.double()[:, None] * (1e4 ** (-torch.arange(0, ROPE, 2).double() / ROPE))


def rotated(rows, positions):
    """Neighbours rotated by the angle of their position; the halves come out apart, as the operators leave them."""
    angle = angles(positions).reshape(rows.shape[0], *[1] * (rows.dim() - 2), ROPE // 2)
    even, odd = rows[..., 0::2], rows[..., 1::2]
    return torch.cat([even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()], -1)


class Latent:
    """The layer. Where decoding speculates, the engine is told the number of drafted tokens."""

    def __init__(self, heads=16, dtype=torch.bfloat16, fractal=False, speculative=0, workspace=None, seed=3):
        make = torch.Generator().manual_seed(seed)
        self.heads, self.dtype, self.fractal = heads, dtype, fractal
        self.speculative, self.workspace = speculative, workspace
        self.query = Linear(heads * (NOPE + ROPE), HIDDEN, dtype, make)
        self.down = Linear(LATENT + ROPE, HIDDEN, dtype, make)
        self.up = Linear(heads * (NOPE + VALUE), LATENT, dtype, make)
        self.norm = Norm(LATENT, dtype, make)
        self.scale = (NOPE + ROPE) ** -0.5

    @contextlib.contextmanager
    def configured(self):
        model = DEEPSEEK | {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "hidden_size": 64 * self.heads,
        }
        with vllm_engine.configured(model, self.dtype) as setup:
            angle = angles(torch.arange(LONGEST)).repeat(1, 2)
            rotary_embedding._cos_cache = angle.cos().to(self.dtype).to(DEVICE)
            rotary_embedding._sin_cache = angle.sin().to(self.dtype).to(DEVICE)
            rotary_embedding._cos_mla = torch.ones(LONGEST, 1, 1, ROPE, dtype=self.dtype, device=DEVICE)
            rotary_embedding._sin_mla = torch.zeros(LONGEST, 1, 1, ROPE, dtype=self.dtype, device=DEVICE)
            yield setup

    def builder(self, setup):
        if self.speculative:
            setup.speculative_config = SimpleNamespace(
                num_speculative_tokens=self.speculative,
                disable_padded_drafter_batch=False,
                use_eagle=lambda: True,
                parallel_drafting=False,
                method="mtp",
                enforce_eager=False,
            )
        name = vllm_engine.LAYER.format(0)
        setup.compilation_config.static_forward_context[name] = MagicMock()
        spec = AscendMLAAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=LATENT + ROPE, dtype=self.dtype
        )
        made = AscendMLABackend.get_builder_cls()(spec, [name], setup, DEVICE)
        if self.workspace:
            made.chunked_prefill_workspace_size = self.workspace
        return made

    def implementation(self):
        made = AscendMLABackend.get_impl_cls()(
            num_heads=self.heads,
            head_size=LATENT + ROPE,
            scale=self.scale,
            num_kv_heads=1,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype="auto",
            logits_soft_cap=None,
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            q_lora_rank=None,
            kv_lora_rank=LATENT,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            qk_head_dim=NOPE + ROPE,
            v_head_dim=VALUE,
            rotary_emb=None,
            fused_qkv_a_proj=None,
            q_proj=self.query,
            kv_b_proj=self.up,
            o_proj=Same(),
            kv_a_proj_with_mqa=self.down,
            kv_a_layernorm=self.norm,
            q_a_layernorm=None,
            layer_name=vllm_engine.LAYER.format(0),
        )
        made.enable_kv_nz = self.fractal
        made.enable_mlapo = made.fa_quant_layer = False
        made.process_weights_after_loading(self.dtype)
        return made

    def drawn(self, batch, seed=1):
        return Drawn(self, batch, seed)


class Drawn:
    """Random hidden states of a batch, and what the layer makes of them."""

    def __init__(self, layer, batch, seed):
        make = torch.Generator().manual_seed(seed)
        self.layer, self.batch = layer, batch
        self.hidden = [torch.randn(length, HIDDEN, generator=make).to(layer.dtype) for length in batch.lengths]
        self.kept = [self.latent(hidden) for hidden in self.hidden]

    def latent(self, hidden):
        """What the caches keep of each token: the normed latent, and the rotary part of the key."""
        rows = hidden.double() @ self.layer.down.host.double().T
        latent, key = rows[:, :LATENT], rows[:, LATENT:]
        latent = latent * torch.rsqrt((latent * latent).mean(-1, keepdim=True) + EPSILON)
        latent = latent * self.layer.norm.host.double()
        key = rotated(key, torch.arange(len(key)))
        return [part.to(self.layer.dtype)[:, None] for part in (latent, key)]

    def inputs(self):
        return self.batch.new(self.hidden)

    def caches(self, lengths):
        """Both caches with the first `lengths` tokens of each request."""
        return tuple(self.batch.cache(parts, lengths, self.layer.fractal) for parts in zip(*self.kept))

    def expected(self):
        return torch.cat([self.request(request) for request in range(len(self.batch.rows))])

    def request(self, request):
        layer, rows, length = self.layer, self.batch.rows[request], self.batch.lengths[request]
        latent, key = (part[:, 0].double() for part in self.kept[request])
        both = (latent @ layer.up.host.double().T).view(length, layer.heads, NOPE + VALUE)
        key = torch.cat([both[..., :NOPE], key[:, None].expand(length, layer.heads, ROPE)], -1)
        query = self.hidden[request][length - rows :].double() @ layer.query.host.double().T
        query = query.view(rows, layer.heads, NOPE + ROPE)
        query = torch.cat([query[..., :NOPE], rotated(query[..., NOPE:], torch.arange(length - rows, length))], -1)
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, both[..., NOPE:]))
        output, _ = reference.attend(query, key, value, layer.scale, reference.right_down(rows, length))
        return output.transpose(0, 1).reshape(rows, layer.heads * VALUE)

    def wrote(self, caches):
        """The caches have the new latents and keys too, and nothing else."""
        for what, cache, expected in zip(("latents", "keys"), caches, self.caches(self.batch.lengths)):
            close(cache, expected, what)
