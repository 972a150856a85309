//! Heads divided over ranks.

use std::ops::Range;

use ascend_attention::Violation;

use crate::backends::AttentionShape;
use crate::error::Result;
use crate::rules;

/// Divides the heads of a model over ranks (tensor parallelism): each rank has as many consecutive query heads, and the
/// key heads that these read. Where there are fewer key heads than ranks, several ranks have the same one.
///
/// A rank's attention is that of a model with fewer heads: an [`Attention`](crate::Attention) of
/// [`rank_shape`](Self::rank_shape), over a cache with its key heads. Nothing is exchanged for it. A model multiplies
/// the output by the rank's rows of the output projection, and adds the products up:
/// `communicator.all_reduce_in_place(&stream, &projected, Reduction::Sum)`; one that needs the heads of all ranks
/// gathers them, `[tokens, N, D]` of one rank behind those of the other:
/// `communicator.all_gather(&stream, &output, &outputs)`.
///
/// ```
/// use ascend_serving::{AttentionShape, TensorParallel};
///
/// # fn main() -> ascend_serving::Result<()> {
/// let heads = TensorParallel::new(AttentionShape::new(32, 4, 128), 8)?;
/// assert_eq!(heads.rank_shape(), AttentionShape::new(4, 1, 128));
/// assert_eq!((heads.query_heads(5), heads.key_heads(5)), (20..24, 2..3));
/// assert_eq!(heads.replicas(), 2); // ranks 4 and 5 have the same key head
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorParallel {
    shape: AttentionShape,
    ranks: usize,
}

impl TensorParallel {
    /// Divides the heads of a model over `ranks` ranks.
    ///
    /// # Errors
    /// [`RANKS_HEADS`](crate::rules::RANKS_HEADS) for query heads that the ranks do not divide, and key heads that are
    /// neither a multiple nor a divisor of the ranks; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) as for
    /// [`AttentionShape::check`].
    pub fn new(shape: AttentionShape, ranks: usize) -> Result<Self> {
        shape.check()?;
        let is_multiple = |heads: usize, divisor: usize| heads.checked_rem(divisor) == Some(0);
        let divides = |ranks: usize| {
            let AttentionShape { heads, kv_heads, .. } = shape;
            is_multiple(heads, ranks) && (is_multiple(kv_heads, ranks) || is_multiple(ranks, kv_heads))
        };
        if divides(ranks) {
            return Ok(Self { shape, ranks });
        }
        // The least number of ranks above, and the largest below.
        let below = (1..ranks.min(shape.heads.saturating_add(1))).rev().find(|ranks| divides(*ranks)).unwrap_or(1);
        let above = (ranks.saturating_add(1)..=shape.heads).find(|ranks| divides(*ranks));
        let or = above.map_or(String::new(), |above| format!(" or {above}"));
        Err(Violation::new(
            &rules::RANKS_HEADS,
            format_args!("{} query heads and {} key heads over {ranks} ranks", shape.heads, shape.kv_heads),
            format_args!("{below}{or} ranks"),
            match is_multiple(shape.heads, ranks) {
                true => format!(
                    "use {below}{or} ranks for the heads, or copy the key heads so that their number divides the \
                     ranks or is a multiple of them"
                ),
                false => format!(
                    "use {below}{or} ranks for the heads, or fill the model's heads up to a multiple of the ranks"
                ),
            },
        )
        .into())
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The heads of each rank, with the model's scale.
    pub fn rank_shape(&self) -> AttentionShape {
        let AttentionShape { heads, kv_heads, .. } = self.shape;
        AttentionShape { heads: heads / self.ranks, kv_heads: (kv_heads / self.ranks).max(1), ..self.shape }
    }

    /// The model's query heads that a rank has, consecutive ones: of its query projection these columns, of the output
    /// projection these rows. None for a rank that does not exist.
    pub fn query_heads(&self, rank: usize) -> Range<usize> {
        let (heads, rank) = (self.rank_shape().heads, rank.min(self.ranks));
        rank * heads..((rank + 1) * heads).min(self.shape.heads)
    }

    /// The model's key heads that a rank has. None for a rank that does not exist.
    pub fn key_heads(&self, rank: usize) -> Range<usize> {
        let (kv_heads, rank) = (self.rank_shape().kv_heads, rank.min(self.ranks));
        let first = rank / self.replicas() * kv_heads;
        first..(first + kv_heads).min(self.shape.kv_heads)
    }

    /// The number of consecutive ranks with the same key heads: 1 unless there are fewer key heads than ranks. These
    /// can divide their contexts ([`ContextAttention`](crate::ContextAttention)) instead of each holding all keys.
    pub fn replicas(&self) -> usize {
        (self.ranks / self.shape.kv_heads).max(1)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every query head is on one rank, together with the key head that it reads; what cannot be is refused.
        #[test]
        fn ranks_divide_heads(ranks in 0usize..20, group in 1usize..9, kv_heads in 1usize..9) {
            let shape = AttentionShape::new(kv_heads * group, kv_heads, 64);
            let Ok(divided) = TensorParallel::new(shape, ranks) else {
                let refused = TensorParallel::new(shape, ranks).unwrap_err();
                prop_assert!(refused.breaks(&rules::RANKS_HEADS), "{}", refused);
                let whole = ranks > 0
                    && shape.heads.is_multiple_of(ranks)
                    && (kv_heads.is_multiple_of(ranks) || ranks.is_multiple_of(kv_heads));
                prop_assert!(!whole, "{}", refused);
                return Ok(());
            };
            let own = divided.rank_shape();
            let mut next = 0;
            for rank in 0..ranks {
                let (query, key) = (divided.query_heads(rank), divided.key_heads(rank));
                prop_assert_eq!((query.start, query.len(), key.len()), (next, own.heads, own.kv_heads));
                next = query.end;
                for head in query.clone() {
                    let local = (head - query.start) / (own.heads / own.kv_heads);
                    prop_assert_eq!(key.start + local, head / group);
                }
                let same = (0..ranks).filter(|other| divided.key_heads(*other) == key).count();
                prop_assert_eq!(same, divided.replicas());
            }
            prop_assert_eq!(next, shape.heads);
            prop_assert!(divided.query_heads(ranks).is_empty() && divided.key_heads(usize::MAX).is_empty());
        }
    }

    #[test]
    fn twelve_heads_are_refused_over_eight_ranks_with_the_numbers_that_divide_them() {
        let refused = TensorParallel::new(AttentionShape::new(12, 4, 64), 8).unwrap_err().to_string();
        for part in ["12 query heads and 4 key heads over 8 ranks", "use 4 or 12 ranks"] {
            assert!(refused.contains(part), "{refused}");
        }
        let many = TensorParallel::new(AttentionShape::new(12, 4, 64), usize::MAX).unwrap_err();
        assert!(many.breaks(&rules::RANKS_HEADS));
    }
}
