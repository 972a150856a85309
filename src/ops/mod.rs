//! Operators, each in a folder of its own, and what several of them share.

mod attention_settings;
pub(crate) mod attention_update;
pub mod batch_mat_mul;
pub mod block_sparse_attention;
pub mod causal_conv1d;
pub mod chunk_gated_delta_rule;
pub mod delta_rule;
pub mod flash_attention_score;
pub mod fused_causal_conv1d;
mod fused_conv_sequences;
pub mod fused_infer_attention_score;
pub mod gather_pa_kv_cache;
pub mod incre_flash_attention;
pub(crate) mod inference_attention;
pub mod inplace_fused_causal_conv1d;
mod known_numbers;
pub mod kv_quant_sparse_flash_attention;
pub mod lightning_indexer;
pub mod nsa_compress;
pub mod nsa_compress_attention_infer;
pub mod nsa_compress_with_cache;
pub mod nsa_selected_attention_infer;
pub mod operation;
pub mod prompt_flash_attention;
pub mod quant_lightning_indexer;
pub mod recurrent_gated_delta_rule;
pub mod ring_attention_update;
pub mod rms_norm;
pub mod scatter_pa_kv_cache;
pub mod sparse_flash_attention;
pub mod sparse_sequences;

/// The modules by their public names.
pub(crate) mod public {
    pub use super::{
        batch_mat_mul as matmul, block_sparse_attention as block_sparse, causal_conv1d as causal_conv,
        chunk_gated_delta_rule as chunk_delta_rule, delta_rule, flash_attention_score as flash,
        fused_causal_conv1d as fused_causal_conv, fused_infer_attention_score as attention,
        gather_pa_kv_cache as gather, incre_flash_attention as incre,
        inplace_fused_causal_conv1d as inplace_fused_causal_conv,
        kv_quant_sparse_flash_attention as quant_sparse_flash, lightning_indexer as indexer, nsa_compress,
        nsa_compress_attention_infer, nsa_compress_with_cache, nsa_selected_attention_infer, operation,
        prompt_flash_attention as prompt, quant_lightning_indexer as quant_indexer,
        recurrent_gated_delta_rule as recurrent_delta_rule, ring_attention_update as ring, rms_norm as norm,
        scatter_pa_kv_cache as scatter, sparse_flash_attention as sparse_flash, sparse_sequences as sparse,
    };
}

/// Hands the operators to a macro: a line each with the contract's name of the operator and the module, which is called
/// the same here and there.
macro_rules! for_each_operator {
    ($then:ident) => {
        $then! {
            FusedInferAttentionScore: fused_infer_attention_score;
            FlashAttentionScore: flash_attention_score;
            FlashAttentionVarlenScore: flash_attention_score;
            RingAttentionUpdate: ring_attention_update;
            PromptFlashAttention: prompt_flash_attention;
            IncreFlashAttention: incre_flash_attention;
            GatherPaKvCache: gather_pa_kv_cache;
            ScatterPaKvCache: scatter_pa_kv_cache;
            AttentionUpdate: attention_update;
            BatchMatMul: batch_mat_mul;
            RmsNorm: rms_norm;
            LightningIndexer: lightning_indexer;
            SparseFlashAttention: sparse_flash_attention;
            KvQuantSparseFlashAttention: kv_quant_sparse_flash_attention;
            QuantLightningIndexer: quant_lightning_indexer;
            BlockSparseAttention: block_sparse_attention;
            NsaCompress: nsa_compress;
            NsaCompressWithCache: nsa_compress_with_cache;
            NsaCompressAttentionInfer: nsa_compress_attention_infer;
            NsaSelectedAttentionInfer: nsa_selected_attention_infer;
            RecurrentGatedDeltaRule: recurrent_gated_delta_rule;
            ChunkGatedDeltaRule: chunk_gated_delta_rule;
            CausalConv1d: causal_conv1d;
            FusedCausalConv1d: fused_causal_conv1d;
            InplaceFusedCausalConv1d: inplace_fused_causal_conv1d;
        }
    };
}

pub(crate) use for_each_operator;
