//! Operators: the computation of a launch of each, and its C functions.

#[macro_use]
pub(crate) mod entry_point;
mod atb_attention;
mod attention;
mod attention_contents;
mod attention_reads;
mod attention_update;
mod batch_mat_mul;
mod block_sparse_attention;
mod causal_conv1d;
mod checked_call;
mod chunk_gated_delta_rule;
mod contiguous;
mod convolution;
mod declared;
mod delta_rule;
mod flash_attention_score;
mod fused_causal_conv1d;
mod fused_infer_attention_score;
mod gather_pa_kv_cache;
mod incre_flash_attention;
mod inplace_fused_causal_conv1d;
mod kv_quant_sparse_flash_attention;
mod lightning_indexer;
mod listed_keys;
mod nsa_compress;
mod nsa_compress_attention_infer;
mod nsa_compress_with_cache;
mod nsa_selected_attention_infer;
mod paged_tokens;
mod prompt_flash_attention;
mod quant_lightning_indexer;
mod recurrent_gated_delta_rule;
mod ring_attention_update;
mod rms_norm;
mod scatter_pa_kv_cache;
mod sparse_contents;
mod sparse_flash_attention;

pub(crate) use atb_attention::AtbAttention;
pub(crate) use scatter_pa_kv_cache::ScatterOperator;

/// The C functions of all operators.
pub(crate) mod functions {
    pub use super::attention_update::*;
    pub use super::batch_mat_mul::*;
    pub use super::block_sparse_attention::*;
    pub use super::causal_conv1d::*;
    pub use super::chunk_gated_delta_rule::*;
    pub use super::flash_attention_score::*;
    pub use super::fused_causal_conv1d::*;
    pub use super::fused_infer_attention_score::*;
    pub use super::gather_pa_kv_cache::*;
    pub use super::incre_flash_attention::*;
    pub use super::inplace_fused_causal_conv1d::*;
    pub use super::kv_quant_sparse_flash_attention::*;
    pub use super::lightning_indexer::*;
    pub use super::nsa_compress::*;
    pub use super::nsa_compress_attention_infer::*;
    pub use super::nsa_compress_with_cache::*;
    pub use super::nsa_selected_attention_infer::*;
    pub use super::prompt_flash_attention::*;
    pub use super::quant_lightning_indexer::*;
    pub use super::recurrent_gated_delta_rule::*;
    pub use super::ring_attention_update::*;
    pub use super::rms_norm::*;
    pub use super::scatter_pa_kv_cache::*;
    pub use super::sparse_flash_attention::*;
}
