//! A description of a call that owns what it refers to.

use ascend_spec::fia::FiaCall;
use ascend_spec::{DType, Extents, Layout, TensorDesc};

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
    ///
    /// A wrong call may imply none: its output is described like the query, so that the contract names what is wrong
    /// rather than a missing output.
    pub(super) fn imply_outputs(&mut self) {
        let of = self.output_extents();
        let Some(query) = self.plain.query else {
            return;
        };
        if self.plain.attention_out.is_none() {
            let shape = of.map_or(query.shape, |(layout, of)| layout.out_shape(of));
            let desc = TensorDesc::packed(self.output_dtype(query.dtype), shape);
            // What no memory could hold stays away.
            self.plain.attention_out = desc.byte_range().map(|_| desc);
        }
        if self.plain.softmax_lse_flag && self.plain.softmax_lse.is_none() {
            let desc =
                of.map(|(layout, of)| TensorDesc::packed(DType::Float, layout.lse_shape(of)));
            self.plain.softmax_lse = desc.filter(|desc| desc.byte_range().is_some());
        }
    }

    /// Element type of the output: INT8 when it is quantised, for a quantised query the rotary part's or FLOAT16, else
    /// the query's.
    fn output_dtype(&self, query: DType) -> DType {
        if self.plain.quant_scale2.is_some() {
            return DType::Int8;
        }
        if query.is_half() || query.bits() > 8 {
            return query;
        }
        let rope = self.plain.query_rope;
        rope.map_or(DType::Float16, |rope| rope.dtype)
    }

    /// Layout and axes of the output.
    fn output_extents(&self) -> Option<(Layout, Extents)> {
        let layout = Layout::parse(&self.input_layout)?;
        let query = self.plain.query.as_ref()?;
        let of = layout.input().extents(&query.shape, self.plain.num_heads)?;
        let dim = self.value_dim(layout)?;
        Some((layout, Extents { dim, ..of }))
    }

    /// Head dimension of the value.
    fn value_dim(&self, layout: Layout) -> Option<i64> {
        let heads = match self.plain.num_key_value_heads {
            0 => self.plain.num_heads,
            heads => heads,
        };
        let value = self.value.first()?;
        let dim = match (self.plain.block_table, &value.shape[..]) {
            (None, shape) => layout.input().extents(shape, heads)?.dim,
            // A cache of blocks: rows of all heads, heads of rows, or heads of columns of rows.
            (Some(_), &[_, _, hidden]) => hidden
                .checked_div(heads)
                .filter(|dim| dim * heads == hidden)?,
            (Some(_), &[_, _, _, dim]) => dim,
            (Some(_), &[_, _, columns, _, width]) => columns.checked_mul(width)?,
            _ => return None,
        };
        match value.dtype {
            // Eight packed INT4 in each.
            DType::Int32 => dim.checked_mul(8),
            _ => Some(dim),
        }
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
