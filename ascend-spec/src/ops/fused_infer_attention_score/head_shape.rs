//! Which heads the operator takes, checked before there is a call.

use super::{FiaCall, Version};
use crate::layout::Extents;
use crate::{DType, Layout, Target, TensorDesc, Violation};

/// The heads of a model, with the layout and the dtype of its calls, for checks that need no tensors.
///
/// The answer is that of the rules for the plainest call with these heads, one sequence without a mask. Other
/// arguments (a cache, sinks, quantisation) have rules of their own.
///
/// ```
/// use ascend_spec::ops::fused_infer_attention_score::{HeadShape, Version};
/// use ascend_spec::{Cann, DType, Layout, Soc, Target};
///
/// let target = Target::new(Soc::AtlasA2, Cann::V8_1);
///
/// // A vision tower with heads of 80, packed.
/// let heads = HeadShape::new(Layout::Tnd, DType::Bf16, 16, 80);
/// let why = heads.check(Version::V3, target).unwrap_err();
/// assert!(why.to_string().starts_with("packed.head_dim: "));
/// // Padded with zeros to 128 they are taken; the scale stays that of 80.
/// assert_eq!(heads.padded(Version::V3, target).map(|heads| heads.query_dim), Some(128));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadShape {
    /// Axis orders.
    pub layout: Layout,
    /// Element type of query, key and value.
    pub dtype: DType,
    /// Query heads.
    pub heads: i64,
    /// Key heads.
    pub kv_heads: i64,
    /// Elements of a query's and a key's head.
    pub query_dim: i64,
    /// Elements of a value's head.
    pub value_dim: i64,
    /// Query rows of a sequence: 1 for decoding, more for prefill.
    pub rows: i64,
}

impl HeadShape {
    /// Heads for prefill, with as many key heads as query heads and `head_dim` elements in each.
    pub fn new(layout: Layout, dtype: DType, heads: i64, head_dim: i64) -> Self {
        Self { layout, dtype, heads, kv_heads: heads, query_dim: head_dim, value_dim: head_dim, rows: 2 }
    }

    /// Checks whether the operator takes these heads. The lints of a call find heads that the operator takes and then
    /// misreads, such as packed query heads that are no multiple of the key heads.
    ///
    /// # Errors
    /// The rule that they break, as a call with them would.
    pub fn check(&self, version: Version, target: Target) -> Result<(), Violation> {
        let axes = self.layout.input();
        let tensor = |heads, dim| {
            let shape = axes.shape(Extents { batch: 1, heads, rows: self.rows, dim });
            TensorDesc::packed(self.dtype, shape)
        };
        let key = [tensor(self.kv_heads, self.query_dim)];
        let value = [tensor(self.kv_heads, self.value_dim)];
        let ends = [self.rows];
        let ends = self.layout.is_packed().then_some(&ends[..]);
        let mut call = FiaCall {
            query: Some(tensor(self.heads, self.query_dim)),
            key: &key,
            value: &value,
            actual_seq_lengths: ends,
            actual_seq_lengths_kv: ends,
            num_heads: self.heads,
            num_key_value_heads: self.kv_heads,
            ..FiaCall::new(self.layout.as_str())
        };
        call.attention_out = call.implied_outputs().0;
        call.check(version, target).map(drop)
    }

    /// The smallest heads that the operator takes and that have room for these, padded with zeros: these heads
    /// themselves, or ones whose dimensions are multiples of 16. `None` if padding does not help.
    ///
    /// Zeros at the end of query and key change no score, so the scale stays that of the heads as they were; those at
    /// the end of the value come out as zeros.
    pub fn padded(&self, version: Version, target: Target) -> Option<Self> {
        let takes = |heads: &Self| heads.check(version, target).is_ok();
        if takes(self) {
            return Some(*self);
        }
        let sizes = |from: i64| {
            let sizes = (Self::STEP..=Self::MOST).step_by(Self::STEP as usize);
            sizes.filter(move |dim| *dim >= from)
        };
        let all = sizes(self.query_dim)
            .flat_map(|query_dim| sizes(self.value_dim).map(move |value_dim| (query_dim, value_dim)));
        all.map(|(query_dim, value_dim)| Self { query_dim, value_dim, ..*self }).find(takes)
    }

    /// The largest head dimension that padding tries.
    const MOST: i64 = 512;
    /// Head dimensions that padding tries are multiples of this.
    const STEP: i64 = 16;
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::Soc;

    const A2: Target = Target::snapshot(Soc::AtlasA2);

    fn padded(heads: HeadShape) -> Option<(i64, i64)> {
        let padded = heads.padded(Version::V3, A2)?;
        Some((padded.query_dim, padded.value_dim))
    }

    fn packed(dim: i64) -> HeadShape {
        HeadShape { kv_heads: 2, ..HeadShape::new(Layout::Tnd, DType::Bf16, 4, dim) }
    }

    #[test]
    fn packed_heads_grow_to_the_next_size() {
        for (dim, want) in [(1, 64), (64, 64), (65, 128), (80, 128), (96, 128), (128, 128)] {
            assert_eq!(padded(packed(dim)), Some((want, want)), "{dim}");
        }
        // Between 128 and 192 only the latent form's pair is left, which values of up to 128 fit.
        let latent = HeadShape { value_dim: 120, ..packed(180) };
        assert_eq!(padded(latent), Some((192, 128)));
        assert_eq!(padded(packed(513)), None);
    }

    #[test]
    fn rows_with_a_batch_axis_take_every_multiple_of_16() {
        let heads = |layout, dim| HeadShape::new(layout, DType::Float16, 4, dim);
        for layout in [Layout::Bnsd, Layout::Bsnd, Layout::Bsh] {
            assert_eq!(padded(heads(layout, 80)), Some((80, 80)));
            let why = heads(layout, 84).check(Version::V1, A2).unwrap_err();
            assert!(why.to_string().starts_with("head_dim.aligned: "), "{why}");
            assert_eq!(padded(heads(layout, 84)), Some((96, 96)));
        }
        // Decoding takes them as they are.
        let decode = HeadShape { rows: 1, ..heads(Layout::Bnsd, 84) };
        assert_eq!(padded(decode), Some((84, 84)));
    }

    #[test]
    fn what_padding_cannot_mend_is_no_answer() {
        let f16 = HeadShape { dtype: DType::Float16, ..packed(64) };
        assert_eq!(padded(f16), None);
        assert_eq!(packed(64).padded(Version::V3, Target::snapshot(Soc::AtlasInference)), None);
        for dim in [i64::MIN, -1, i64::MAX] {
            assert!(packed(dim).check(Version::V3, A2).is_err(), "{dim}");
            let head_shape = HeadShape { heads: dim, kv_heads: dim, rows: dim, ..packed(dim) };
            let _ = head_shape.padded(Version::V3, A2);
        }
    }
}
