"""SGLang's attention backend without its compiled neighbours, its server and its model runner."""

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
import torch_npu  # noqa: F401
from engines.batches import BLOCK

# Packages with kernels of their own, which the backend imports and these cases do not reach.
ABSENT = ("sgl_kernel_npu", "sgl_kernel", "deep_ep", "memfabric_hybrid", "mooncake", "flashinfer", "deep_gemm")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes an empty module of each package that is absent; its names are mocks."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        class Module(types.ModuleType):
            def __getattr__(self, name):
                if name.startswith("__"):
                    raise AttributeError(name)
                return MagicMock()

        return Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Absent())
import sglang.srt.hardware_backend.npu.attention.ascend_backend as ascend_backend  # noqa: E402
from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402

DEVICE = torch.device("npu:0")
LONGEST = 1024
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128


class Pool:
    """The two caches of a layer, [blocks, BLOCK, groups, width]."""

    def __init__(self, key, value):
        self.caches = key, value

    def set_kv_buffer(self, layer, where, key, value):
        slots = getattr(where, "loc", where).long()
        for cache, new in zip(self.caches, (key, value)):
            cache.view(-1, *cache.shape[2:])[slots] = new.view(-1, *cache.shape[2:])

    def get_key_buffer(self, _):
        return self.caches[0]

    def get_value_buffer(self, _):
        return self.caches[1]

    def get_kv_buffer(self, _):
        return self.caches


@contextlib.contextmanager
def backend(batch, pool, heads, dtype, latent, drafts, fused):
    """The engine's backend over a batch's blocks; `fused` chooses FusedInferAttentionScore, as ASCEND_USE_FIA does."""
    slots = batch.table.repeat_interleave(BLOCK, 1) * BLOCK + torch.arange(BLOCK).repeat(batch.table.shape[1])
    model = SimpleNamespace(
        dtype=dtype,
        attention_arch=AttentionArch.MLA if latent else AttentionArch.MHA,
        hf_config=SimpleNamespace(architectures=[]),
        context_len=LONGEST,
        use_alibi=False,
        num_attention_heads=heads,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=NOPE,
        v_head_dim=VALUE,
    )
    runner = SimpleNamespace(
        device=DEVICE,
        is_draft_worker=False,
        page_size=BLOCK,
        model_config=model,
        kv_cache_dtype=dtype,
        dtype=dtype,
        req_to_token_pool=SimpleNamespace(req_to_token=slots.int().to(DEVICE)),
        token_to_kv_pool=pool,
        use_mla_backend=latent,
        is_hybrid_swa=False,
        sliding_window_size=None,
        spec_algorithm=SimpleNamespace(is_dspark=lambda: False),
        server_args=SimpleNamespace(dllm_algorithm=None, enable_mixed_chunk=False),
    )
    parallel = SimpleNamespace(attn_tp_size=1, dcp_enabled=False, attn_cp_size=1, attn_dcp_size=1, attn_dcp_rank=0)
    flags = SimpleNamespace(capture=SimpleNamespace(enable_torch_compile=False))
    speculation = SimpleNamespace(speculative_num_draft_tokens=drafts)
    # What the server has set up by the time that a backend is made.
    server = {
        "get_flags": lambda: flags,
        "get_spec": lambda: speculation,
        "get_parallel": lambda: parallel,
        "is_sparsity_driven_kv_offload_enabled": lambda **_: False,
        "is_deepseek_dsa": lambda _: False,
        "is_mla_preprocess_enabled": lambda: False,
        "is_fia_nz": lambda: False,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"ASCEND_USE_FIA": str(int(fused))}))
        stack.enter_context(patch.object(ascend_backend.DllmConfig, "from_server_args", lambda _: None))
        for name, function in server.items():
            stack.enter_context(patch.object(ascend_backend, name, function))
        yield ascend_backend.AscendAttnBackend(runner)


def layer(heads, groups, width, value_width, head, scale, up=None):
    """The module that owns a layer of attention."""
    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        tp_k_head_num=groups,
        tp_v_head_num=groups,
        qk_head_dim=width,
        v_head_dim=value_width,
        head_dim=head,
        scaling=scale,
        sliding_window_size=-1,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
        logit_cap=0,
        kv_b_proj=up,
    )


def forward_batch(batch, mode, drafts=None):
    """What the scheduler hands to the backend. Drafts do not count among the lengths yet."""
    lengths = torch.tensor(batch.cached if drafts else batch.lengths)
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(batch.rows),
        seq_lens=lengths.to(DEVICE),
        seq_lens_cpu=lengths,
        req_pool_indices=torch.arange(len(batch.rows), device=DEVICE),
        extend_seq_lens=torch.tensor(batch.rows, device=DEVICE),
        extend_seq_lens_cpu=batch.rows,
        extend_prefix_lens=torch.tensor(batch.cached, device=DEVICE),
        extend_prefix_lens_cpu=batch.cached,
        spec_info=SimpleNamespace(draft_token_num=drafts, spec_input_type=None) if drafts else None,
        spec_algorithm=None,
        out_cache_loc=batch.slots.to(DEVICE),
        origin_out_cache_loc=None,
        global_num_token_non_padded_cpu=batch.tokens,
        num_token_non_padded_cpu=batch.tokens,
        attn_cp_metadata=None,
        encoder_lens=None,
        encoder_out_cache_loc=None,
        positions=None,
    )
