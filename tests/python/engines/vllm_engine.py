"""vLLM-Ascend without its compiled parts: its patches applied, its configurations, metadata and forward contexts."""

import contextlib
import json
import os
import sys
import tempfile
import types

import torch
import torch_npu  # noqa: F401
from engines.batches import BLOCK, BLOCKS

SOC = os.environ.get("ASCEND_EMU_SOC", "")
PRODUCTS = {"Ascend950": "A5", "Ascend910_93": "A3", "Ascend310P": "_310P"}
# The module that the engine's build writes: the product that it was built for.
built = types.ModuleType("vllm_ascend._build_info")
built.__device_type__ = next((name for start, name in PRODUCTS.items() if SOC.startswith(start)), "A2")
sys.modules[built.__name__] = built

from vllm_ascend import utils  # noqa: E402

utils.adapt_patch(is_global_patch=True)
utils.adapt_patch(is_global_patch=False)
utils.register_ascend_customop()

from vllm import config as settings  # noqa: E402
from vllm.forward_context import get_forward_context, set_forward_context  # noqa: E402
from vllm_ascend.ascend_config import get_ascend_config, init_ascend_config  # noqa: E402
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata  # noqa: E402

DEVICE = torch.device("npu:0")
LAYER = "model.layers.{}.self_attn.attn"
LONGEST = 4096


@contextlib.contextmanager
def configured(model, dtype):
    """The engine's configuration of a model that exists as its numbers alone, which is the current one meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(model, file)
        described = settings.ModelConfig(
            model=folder,
            tokenizer=folder,
            dtype=str(dtype).removeprefix("torch."),
            seed=0,
            max_model_len=LONGEST,
            skip_tokenizer_init=True,
        )
        cache = settings.CacheConfig(block_size=BLOCK, cache_dtype="auto")
        cache.num_gpu_blocks, cache.num_cpu_blocks = BLOCKS, 0
        scheduler = settings.SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=LONGEST,
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        )
        setup = settings.VllmConfig(
            model_config=described,
            cache_config=cache,
            parallel_config=settings.ParallelConfig(tensor_parallel_size=1),
            scheduler_config=scheduler,
            device_config=settings.DeviceConfig(),
            load_config=settings.LoadConfig(),
            compilation_config=settings.CompilationConfig(),
        )
        init_ascend_config(setup)
        with settings.set_current_vllm_config(setup):
            # Releases that fetch weights ahead are told by their workers whether to.
            if hasattr(utils, "set_weight_prefetch_method"):
                utils.set_weight_prefetch_method(get_ascend_config().weight_prefetch_config)
            yield setup


def metadata(batch, state, causal=True):
    """What the engine's model runner hands to the builders of metadata."""
    computed = torch.tensor(batch.cached, dtype=torch.int32)
    lengths = torch.tensor(batch.lengths, dtype=torch.int32)
    positions = torch.cat([torch.arange(old, length) for old, length in zip(batch.cached, batch.lengths)])
    return AscendCommonAttentionMetadata(
        query_start_loc=batch.starts.to(DEVICE),
        query_start_loc_cpu=batch.starts,
        seq_lens=lengths.to(DEVICE),
        seq_lens_cpu=lengths,
        _num_computed_tokens_cpu=computed,
        num_reqs=len(batch.rows),
        num_actual_tokens=batch.tokens,
        num_input_tokens=batch.tokens,
        max_query_len=max(batch.rows),
        max_seq_len=max(batch.lengths),
        block_table_tensor=batch.table.to(DEVICE),
        slot_mapping=batch.slots.to(DEVICE),
        causal=causal,
        positions=positions.to(DEVICE),
        attn_state=state,
    )


@contextlib.contextmanager
def forward(setup, metadata, tokens, capturing=False, sinks=False, **more):
    """The engine's forward context, with what its own model runner adds to it."""
    with set_forward_context(attn_metadata=metadata, vllm_config=setup, num_tokens=tokens, **more):
        context = get_forward_context()
        context.num_tokens, context.capturing, context.sinks = tokens, capturing, sinks
        context.is_draft_model = context.is_draft_model_prefill = False
        yield context
