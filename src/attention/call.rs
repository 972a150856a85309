//! A description of a call that owns what it refers to.

use ascend_spec::TensorDesc;
use ascend_spec::fia::FiaCall;

use super::parameter::{Parameter, Slot};

/// What [`FiaCall`] borrows, owned.
#[derive(Clone, Debug)]
pub(super) struct OwnedCall {
    /// Attributes and single tensors.
    plain: FiaCall<'static>,
    pub(super) input_layout: String,
    pub(super) actual_seq_lengths: Option<Vec<i64>>,
    pub(super) actual_seq_lengths_kv: Option<Vec<i64>>,
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

    /// Description of a tensor.
    pub(super) fn get(&self, slot: Slot) -> Option<&TensorDesc> {
        match slot {
            Slot::One(parameter) => parameter.of(&self.plain).as_ref(),
            Slot::Key(index) => self.key.get(index),
            Slot::Value(index) => self.value.get(index),
        }
    }

    /// Fills in the outputs that the inputs imply, where none is described.
    pub(super) fn imply_outputs(&mut self) {
        let (attention_out, softmax_lse) = self.borrow().implied_outputs();
        let plain = &mut self.plain;
        plain.attention_out = plain.attention_out.or(attention_out);
        plain.softmax_lse = plain.softmax_lse.or(softmax_lse);
    }

    /// The length arrays, in the order of the operator's arguments.
    pub(super) fn arrays(&self) -> [Option<&[i64]>; 5] {
        [
            self.actual_seq_lengths.as_deref(),
            self.actual_seq_lengths_kv.as_deref(),
            self.actual_shared_prefix_len.as_deref(),
            self.q_start_idx.as_deref(),
            self.kv_start_idx.as_deref(),
        ]
    }

    /// Every single tensor that is described.
    pub(super) fn parameters(&self) -> impl Iterator<Item = Parameter> {
        let all = Parameter::ALL.iter().copied();
        all.filter(|parameter| parameter.of(&self.plain).is_some())
    }
}
