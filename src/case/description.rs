//! What the operator is told about a case: descriptors of all tensors, given and computed.

use ascend_spec::fia::FiaCall;
use ascend_spec::{DType, Extents, Layout, SparseMode, TensorDesc};

use super::{Case, MaskKind, Parameter};

/// Descriptors of the key and value lists and of the outputs of a case; [`Description::call`] makes a call of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    key: Vec<TensorDesc>,
    value: Vec<TensorDesc>,
    attention_out: Option<TensorDesc>,
    softmax_lse: Option<TensorDesc>,
}

impl Case {
    /// Descriptors of the lists, and of the outputs that the call implies.
    ///
    /// Where attributes and shapes imply no output shape, because the call is wrong, the output has the query's shape:
    /// the contract then names what is wrong rather than a missing output.
    pub fn describe(&self) -> Description {
        let of = self.output_extents();
        let query = self.tensor(Parameter::Query).map(|query| query.desc());
        let dtype = self.output_dtype();
        let attention_out = match (of, query) {
            (Some((layout, of)), _) => Some(TensorDesc::packed(dtype, layout.out_shape(of))),
            (None, Some(query)) => Some(TensorDesc::packed(dtype, query.shape)),
            (None, None) => None,
        };
        let softmax_lse = of
            .filter(|_| self.attributes.softmax_lse_flag)
            .map(|(layout, of)| TensorDesc::packed(DType::Float, layout.lse_shape(of)));
        Description {
            key: self.key.iter().map(|tensor| tensor.desc()).collect(),
            value: self.value.iter().map(|tensor| tensor.desc()).collect(),
            // What no memory can hold is left out.
            attention_out: attention_out.filter(|out| out.byte_range().is_some()),
            softmax_lse: softmax_lse.filter(|lse| lse.byte_range().is_some()),
        }
    }

    /// Element type of `attention_out`: INT8 with an output quantisation; with a quantised query that of its rotary
    /// part, or FLOAT16; else the query's.
    fn output_dtype(&self) -> DType {
        let dtype = |parameter| self.tensor(parameter).map(|tensor| tensor.dtype());
        if self.tensor(Parameter::QuantScale2).is_some() {
            return DType::Int8;
        }
        match dtype(Parameter::Query) {
            Some(DType::Int8 | DType::HiFloat8 | DType::Float8E4M3Fn) => {
                dtype(Parameter::QueryRope).unwrap_or(DType::Float16)
            }
            query => query.unwrap_or(DType::Float16),
        }
    }

    /// Layout and axes of `attention_out`.
    fn output_extents(&self) -> Option<(Layout, Extents)> {
        let layout = Layout::parse(&self.attributes.input_layout)?;
        let query = self.tensor(Parameter::Query)?;
        let of = layout
            .input()
            .extents(query.shape(), self.attributes.num_heads)?;
        let dim = self.value_dim(layout)?;
        Some((layout, Extents { dim, ..of }))
    }

    /// Head dimension of the value.
    fn value_dim(&self, layout: Layout) -> Option<i64> {
        let value = self.value.first()?;
        let heads = match self.attributes.num_key_value_heads {
            0 => self.attributes.num_heads,
            heads => heads,
        };
        let per_head = |hidden: i64| (heads > 0 && hidden % heads == 0).then(|| hidden / heads);
        let dim = if self.tensor(Parameter::BlockTable).is_some() {
            // Cache orders: [blocks, block size, H], [blocks, N, block size, D], [blocks, N, D / c, block size, c].
            match *value.shape() {
                [_, _, hidden] => per_head(hidden)?,
                [_, _, _, dim] => dim,
                [_, _, parts, _, part] => parts.checked_mul(part)?,
                _ => return None,
            }
        } else {
            layout.input().extents(value.shape(), heads)?.dim
        };
        match value.dtype() {
            // Eight INT4 in each.
            DType::Int32 => dim.checked_mul(8),
            _ => Some(dim),
        }
    }
}

impl Description {
    /// The call of `case`, which this description was made from.
    pub fn call<'a>(&'a self, case: &'a Case) -> FiaCall<'a> {
        let mut call = case.attributes.call();
        call.key = &self.key;
        call.value = &self.value;
        for (parameter, tensor) in &case.tensors {
            *parameter.of_mut(&mut call) = Some(tensor.desc());
        }
        if case.mask == MaskKind::Compressed {
            let size = SparseMode::COMPRESSED_MASK_SIZE;
            call.atten_mask = TensorDesc::contiguous(DType::Int8, &[size, size]);
        }
        call.attention_out = self.attention_out;
        call.softmax_lse = self.softmax_lse;
        call
    }

    /// Descriptor of `attention_out`.
    pub fn attention_out(&self) -> Option<TensorDesc> {
        self.attention_out
    }

    /// Descriptor of `softmax_lse`, if the call writes it.
    pub fn softmax_lse(&self) -> Option<TensorDesc> {
        self.softmax_lse
    }
}
