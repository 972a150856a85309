//! A pure description of one call of RingAttentionUpdate.

use crate::TensorDesc;

/// Every argument of one call, without data and without addresses.
///
/// The fields are the operator's arguments in snake case, without `Optional`; `None` is a null pointer. The values are what
/// a caller wrote, right or wrong: [`RingUpdateCall::check`] tells.
///
/// Source: aclnnRingAttentionUpdate V1 and V2, parameter tables.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RingUpdateCall<'a> {
    /// Attention over the first keys, `[S, B, H]` or packed `[T, N, D]`.
    pub prev_attn_out: Option<TensorDesc>,
    /// Its maxima, `[B, N, S, 8]` or `[T, N, 8]`.
    pub prev_softmax_max: Option<TensorDesc>,
    /// Its sums, as the maxima.
    pub prev_softmax_sum: Option<TensorDesc>,
    /// Attention over the other keys.
    pub cur_attn_out: Option<TensorDesc>,
    /// Its maxima.
    pub cur_softmax_max: Option<TensorDesc>,
    /// Its sums.
    pub cur_softmax_sum: Option<TensorDesc>,
    /// Ends of packed sequences behind a leading 0, in device memory.
    pub actual_seq_qlen: Option<TensorDesc>,
    /// `SBH` or `TND`.
    pub input_layout: Option<&'a str>,
    /// Order of packed softmax tensors (V2): `TND` as they read, otherwise a block `[N, Sq, 8]` for each sequence.
    pub input_softmax_layout: Option<&'a str>,
    /// Merged attention.
    pub attn_out: Option<TensorDesc>,
    /// Merged maxima.
    pub softmax_max: Option<TensorDesc>,
    /// Merged sums.
    pub softmax_sum: Option<TensorDesc>,
}

impl RingUpdateCall<'_> {
    /// Every tensor that is given, and CANN's name of it.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (TensorDesc, &'static str)> + use<> {
        let all = [
            (self.prev_attn_out, "prevAttnOut"),
            (self.prev_softmax_max, "prevSoftmaxMax"),
            (self.prev_softmax_sum, "prevSoftmaxSum"),
            (self.cur_attn_out, "curAttnOut"),
            (self.cur_softmax_max, "curSoftmaxMax"),
            (self.cur_softmax_sum, "curSoftmaxSum"),
            (self.actual_seq_qlen, "actualSeqQlen"),
            (self.attn_out, "attnOut"),
            (self.softmax_max, "softmaxMax"),
            (self.softmax_sum, "softmaxSum"),
        ];
        all.into_iter()
            .filter_map(|(desc, name)| desc.map(|desc| (desc, name)))
    }
}
