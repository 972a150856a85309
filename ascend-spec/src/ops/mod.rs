//! Operators, a folder or a file each: the description of a call, its rules, and what a call that holds them computes.

pub mod atb_attention;
pub mod attention_update;
pub mod batch_mat_mul;
pub mod block_sparse_attention;
pub mod causal_conv1d;
pub mod chunk_gated_delta_rule;
pub mod convolution;
pub mod delta_rule;
pub mod flash_attention_score;
pub mod fused_causal_conv1d;
pub mod fused_infer_attention_score;
pub mod gather_pa_kv_cache;
pub mod incre_flash_attention;
pub mod inference_attention;
pub mod inplace_fused_causal_conv1d;
pub mod kv_quant_sparse_flash_attention;
pub mod lightning_indexer;
pub mod native_sparse;
pub mod nsa_compress;
pub mod nsa_compress_attention_infer;
pub mod nsa_compress_with_cache;
pub mod nsa_selected_attention_infer;
pub mod prompt_flash_attention;
pub mod quant_lightning_indexer;
pub mod recurrent_gated_delta_rule;
pub mod ring_attention_update;
pub mod rms_norm;
pub mod scatter_pa_kv_cache;
pub mod sparse_flash_attention;
pub mod sparse_sequences;

/// Passes the list of all operators to a macro. A line names the type that stands for the operator, the module it is
/// in, the operator's name in case files, and the page of the book with its tables.
macro_rules! for_each_operator {
    ($then:ident) => {
        $then! {
            FusedInferAttentionScore: fused_infer_attention_score, "fused_infer_attention_score", None;
            FlashAttentionScore: flash_attention_score, "flash_attention_score", Some("flash-attention-score");
            FlashAttentionVarlenScore: flash_attention_score,
                "flash_attention_varlen_score", Some("flash-attention-score");
            RingAttentionUpdate: ring_attention_update, "ring_attention_update", Some("ring-attention-update");
            PromptFlashAttention: prompt_flash_attention, "prompt_flash_attention", Some("prompt-flash-attention");
            IncreFlashAttention: incre_flash_attention, "incre_flash_attention", Some("incre-flash-attention");
            GatherPaKvCache: gather_pa_kv_cache, "gather_pa_kv_cache", Some("gather-pa-kv-cache");
            ScatterPaKvCache: scatter_pa_kv_cache, "scatter_pa_kv_cache", Some("scatter-pa-kv-cache");
            AttentionUpdate: attention_update, "attention_update", Some("attention-update");
            BatchMatMul: batch_mat_mul, "batch_mat_mul", Some("batch-mat-mul");
            RmsNorm: rms_norm, "rms_norm", Some("rms-norm");
            LightningIndexer: lightning_indexer, "lightning_indexer", Some("lightning-indexer");
            SparseFlashAttention: sparse_flash_attention,
                "sparse_flash_attention", Some("sparse-flash-attention");
            KvQuantSparseFlashAttention: kv_quant_sparse_flash_attention,
                "kv_quant_sparse_flash_attention", Some("sparse-flash-attention");
            QuantLightningIndexer: quant_lightning_indexer,
                "quant_lightning_indexer", Some("lightning-indexer");
            BlockSparseAttention: block_sparse_attention,
                "block_sparse_attention", Some("block-sparse-attention");
            NsaCompress: nsa_compress, "nsa_compress", Some("native-sparse-attention");
            NsaCompressWithCache: nsa_compress_with_cache,
                "nsa_compress_with_cache", Some("native-sparse-attention");
            NsaCompressAttentionInfer: nsa_compress_attention_infer,
                "nsa_compress_attention_infer", Some("native-sparse-attention");
            NsaSelectedAttentionInfer: nsa_selected_attention_infer,
                "nsa_selected_attention_infer", Some("native-sparse-attention");
            RecurrentGatedDeltaRule: recurrent_gated_delta_rule,
                "recurrent_gated_delta_rule", Some("gated-delta-rule");
            ChunkGatedDeltaRule: chunk_gated_delta_rule, "chunk_gated_delta_rule", Some("gated-delta-rule");
            CausalConv1d: causal_conv1d, "causal_conv1d", Some("causal-conv1d");
            FusedCausalConv1d: fused_causal_conv1d, "fused_causal_conv1d", Some("fused-causal-conv1d");
            InplaceFusedCausalConv1d: inplace_fused_causal_conv1d,
                "inplace_fused_causal_conv1d", Some("fused-causal-conv1d");
        }
    };
}

pub(crate) use for_each_operator;
