//! A description of a call that owns what it refers to.

use ascend_spec::TensorDesc;
use ascend_spec::fia::FiaCall;

/// What [`FiaCall`] borrows, owned.
#[derive(Clone, Debug)]
pub(super) struct OwnedCall {
    /// Attributes and single tensors.
    plain: FiaCall<'static>,
    input_layout: String,
    actual_seq_lengths: Option<Vec<i64>>,
    actual_seq_lengths_kv: Option<Vec<i64>>,
    actual_shared_prefix_len: Option<Vec<i64>>,
    q_start_idx: Option<Vec<i64>>,
    kv_start_idx: Option<Vec<i64>>,
    pub(super) key: Vec<TensorDesc>,
    pub(super) value: Vec<TensorDesc>,
}

impl OwnedCall {
    /// The attributes and arrays of a call, without its tensors.
    pub(super) fn attributes_of(call: &FiaCall<'_>) -> Self {
        let owned = |array: Option<&[i64]>| array.map(<[i64]>::to_vec);
        Self {
            plain: FiaCall {
                num_heads: call.num_heads,
                scale: call.scale,
                pre_tokens: call.pre_tokens,
                next_tokens: call.next_tokens,
                num_key_value_heads: call.num_key_value_heads,
                sparse_mode: call.sparse_mode,
                inner_precise: call.inner_precise,
                block_size: call.block_size,
                antiquant_mode: call.antiquant_mode,
                softmax_lse_flag: call.softmax_lse_flag,
                key_antiquant_mode: call.key_antiquant_mode,
                value_antiquant_mode: call.value_antiquant_mode,
                query_quant_mode: call.query_quant_mode,
                pse_type: call.pse_type,
                ..FiaCall::new("")
            },
            input_layout: call.input_layout.to_owned(),
            actual_seq_lengths: owned(call.actual_seq_lengths),
            actual_seq_lengths_kv: owned(call.actual_seq_lengths_kv),
            actual_shared_prefix_len: owned(call.actual_shared_prefix_len),
            q_start_idx: owned(call.q_start_idx),
            kv_start_idx: owned(call.kv_start_idx),
            key: Vec::new(),
            value: Vec::new(),
        }
    }

    /// The call.
    pub(super) fn borrow(&self) -> FiaCall<'_> {
        FiaCall {
            input_layout: &self.input_layout,
            actual_seq_lengths: self.actual_seq_lengths.as_deref(),
            actual_seq_lengths_kv: self.actual_seq_lengths_kv.as_deref(),
            actual_shared_prefix_len: self.actual_shared_prefix_len.as_deref(),
            q_start_idx: self.q_start_idx.as_deref(),
            kv_start_idx: self.kv_start_idx.as_deref(),
            key: &self.key,
            value: &self.value,
            ..self.plain.clone()
        }
    }

    /// Attributes and single tensors, to be changed.
    pub(super) fn plain_mut(&mut self) -> &mut FiaCall<'static> {
        &mut self.plain
    }
}
