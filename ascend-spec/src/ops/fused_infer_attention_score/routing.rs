//! Which of the operator's checkers judges a call.

use super::rules::antiquant::NULL_LENGTHS;
use super::rules::entry::MainTensors;
use super::{Checker, FiaCall};
use crate::layout::Extents;
use crate::rule::require;
use crate::{Cann, DType, Layout, SparseMode, Target, TensorDesc, Violation};

/// The properties of a call that decide which checker judges it.
#[derive(Clone, Copy)]
pub(super) struct Routing<'a> {
    pub(super) call: &'a FiaCall<'a>,
    pub(super) target: Target,
    pub(super) layout: Layout,
    pub(super) query: &'a TensorDesc,
    pub(super) key: &'a TensorDesc,
    pub(super) q: Extents,
    /// Head dimensions of the first key and value, 0 where their shapes have none.
    pub(super) key_dim: i64,
    pub(super) value_dim: i64,
}

impl Routing<'_> {
    pub(super) fn checker(&self, main: &MainTensors<'_>) -> Checker {
        if self.target.is_950() {
            return Checker::Unified;
        }
        if self.target.cann >= Cann::V8_5 {
            if self.split_fuse() {
                return Checker::SplitFuse;
            }
            if self.is_unified() {
                return Checker::Unified;
            }
        }
        self.legacy(main)
    }

    /// Whether the call has one query row a sequence in a layout with a batch axis, and no rotary parts. The unified
    /// checker ignores mode, tokens, query lengths and query padding of such calls, except on Ascend 950.
    pub(super) fn one_row(&self) -> bool {
        matches!(self.layout, Layout::Bsh | Layout::Bsnd | Layout::Bnsd)
            && self.q.rows == 1
            && self.q.dim == self.value_dim
            && self.call.query_rope.is_none()
    }

    /// Refuses null pointers in decode over an NZ cache of INT8 keys, which reads lengths and block table before
    /// checking that they are given.
    pub(super) fn null_lengths(&self) -> Result<(), Violation> {
        let call = self.call;
        let read = self.layout == Layout::Tnd
            && self.key.shape.rank() == 5
            && self.key.dtype == DType::Int8
            && self.query.dtype == DType::Bf16
            && self.q.dim == 128;
        let given =
            call.actual_seq_lengths.is_some() && call.actual_seq_lengths_kv.is_some() && call.block_table.is_some();
        require!(
            for self.target => !read || given,
            NULL_LENGTHS,
            "a null pointer",
            "actualSeqLengths, actualSeqLengthsKv and blockTable",
        );
        Ok(())
    }

    fn legacy(&self, main: &MainTensors<'_>) -> Checker {
        let (call, q) = (self.call, self.q);
        let rope = call.query_rope.is_some();
        let float = |tensor: &Option<TensorDesc>| tensor.is_some_and(|tensor| tensor.dtype == DType::Float);
        let decode = match self.layout {
            Layout::NtdTnd | Layout::BnsdBsnd | Layout::Ntd => false,
            Layout::Tnd | Layout::TndNtd => {
                q.dim == 512
                    || self.packed_nz()
                    || (call.block_table.is_some()
                        && main.key.dtype == DType::Int8
                        && main.query.dtype != DType::Int8
                        && float(&call.antiquant_scale)
                        && float(&call.antiquant_offset))
            }
            _ => {
                let absorbed = q.dim == 512 && rope;
                let several = match absorbed {
                    true => FiaCall::most_decode_rows(self.target, self.query.dtype),
                    false => FiaCall::MOST_DECODE_ROWS,
                };
                q.rows == 1
                    || ((2..=several).contains(&q.rows) && (absorbed || main.key.shape.rank() == 5))
                    || (call.mode() == 4 && rope && q.dim == 512)
            }
        };
        if decode { Checker::Decode } else { Checker::Prefill }
    }

    /// Packed decode over an NZ cache of INT8 keys, which 9.0 adds.
    fn packed_nz(&self) -> bool {
        self.target.cann >= Cann::V9_0
            && self.layout == Layout::Tnd
            && self.call.block_table.is_some()
            && self.key.shape.rank() == 5
            && self.key.dtype == DType::Int8
            && self.query.dtype == DType::Bf16
            && self.q.dim == 128
    }

    fn split_fuse(&self) -> bool {
        let (call, cann) = (self.call, self.target.cann);
        let dim = self.q.dim;
        if self.layout != Layout::Tnd
            || call.query_rope.is_some()
            || call.key_rope.is_some()
            || (dim, dim) != (self.key_dim, self.value_dim)
            || !(1..=256).contains(&dim)
            || (cann >= Cann::V9_1 && call.quant_scale2.is_some())
        {
            return false;
        }
        let mode = SparseMode::from_acl(call.mode());
        let modes = match mode {
            Some(SparseMode::DefaultMask | SparseMode::RightDownCausal) => true,
            Some(SparseMode::Band) => cann >= Cann::V9_0,
            _ => false,
        };
        let masked = call.mask().is_some();
        let paged = call.block_table.is_some();
        let kv_heads = call.num_key_value_heads;
        let own_heads = kv_heads == 0 || kv_heads == call.num_heads;
        let precise = match (own_heads, cann) {
            (false, _) => call.inner_precise == 0,
            (true, Cann::V8_1 | Cann::V8_5) => {
                self.query.dtype == DType::Float16 && call.inner_precise == 1 && !masked && !paged
            }
            (true, _) => {
                let fast = self.query.dtype == DType::Bf16 && call.inner_precise == 1;
                let full = mode == Some(SparseMode::DefaultMask) && masked;
                !fast && !full
            }
        };
        let sink = match &call.learnable_sink {
            None => true,
            Some(sink) => cann >= Cann::V9_0 && !(dim == 64 && sink.dtype == DType::Bf16),
        };
        let bs = call.block_size;
        let cache = !paged
            || match self.key.shape[..] {
                // Only caches with blocks of 128 rows leave the unified checker.
                [_, _, _] if cann == Cann::V8_5 && self.is_unified() => bs == 128,
                [_, _, _] => bs % 16 == 0 && bs <= 512,
                [_, _, _, _, c] => {
                    cann >= Cann::V9_1
                        && c == 16
                        && dim % 16 == 0
                        && !matches!(dim, 64 | 128)
                        && bs % 16 == 0
                        && bs <= 512
                }
                _ => false,
            };
        modes && precise && sink && cache
    }

    /// Whether the unified checker takes the call unless the split-fuse path does.
    fn is_unified(&self) -> bool {
        let halves = self.query.dtype.is_half() && self.query.dtype == self.key.dtype;
        halves && self.has_unified_form()
    }

    /// Whether the form of a call in half precision is one that the unified checker takes.
    fn has_unified_form(&self) -> bool {
        let call = self.call;
        if self.target.cann >= Cann::V9_0 {
            return !self.kept_single();
        }
        let rope = |tensor: &Option<TensorDesc>| {
            let desc = tensor.as_ref()?;
            Some(self.layout.input().extents(&desc.shape, call.num_heads)?.dim)
        };
        let rope_dim = rope(&call.query_rope).unwrap_or(0);
        let dims = (self.q.dim, rope_dim, self.value_dim);
        let ropes = call.query_rope.is_some() || call.key_rope.is_some();
        let layout = matches!(
            self.layout,
            Layout::Bsh
                | Layout::Bsnd
                | Layout::Bnsd
                | Layout::BnsdBsnd
                | Layout::BshBnsd
                | Layout::BsndBnsd
                | Layout::Tnd
                | Layout::Ntd
                | Layout::NtdTnd
        );
        let features = [
            &call.pse_shift,
            &call.query_padding_size,
            &call.kv_padding_size,
            &call.key_shared_prefix,
            &call.value_shared_prefix,
            &call.quant_scale2,
            &call.quant_offset2,
        ];
        let plain = features.into_iter().all(Option::is_none)
            && call.actual_shared_prefix_len.is_none()
            && !self.query.is_empty()
            && !call.key.iter().chain(call.value).any(TensorDesc::is_empty);
        let common = layout && plain && matches!(dims, (128, 0 | 64, 128) | (64, 0, 64) | (192, 0, 128));
        let classic = matches!(self.layout, Layout::Bsh | Layout::Bsnd | Layout::Bnsd | Layout::BnsdBsnd | Layout::Tnd)
            && self.q.dim == self.value_dim
            && !ropes
            && matches!(self.key.shape.rank(), 3 | 4);
        let wide = self.layout == Layout::Tnd && self.value_dim == 192;
        common || dims == (512, 64, 512) || (!classic && !wide)
    }

    /// Whether single rows stay with the decode path, whose kernels are faster for them.
    fn kept_single(&self) -> bool {
        let call = self.call;
        let prefix = call.key_shared_prefix.is_some() || call.value_shared_prefix.is_some();
        let kv_heads = call.num_key_value_heads;
        self.one_row()
            && (kv_heads == 0 || kv_heads == call.num_heads)
            && call.block_table.is_none()
            && match self.q.dim {
                256 => !prefix,
                80 => prefix,
                _ => false,
            }
    }
}
