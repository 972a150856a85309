//! The order of the rules, and the resolution of a call that holds them.

use super::rules::entry::Required;
use super::rules::{drop_mask, entry, heads, layouts, lengths, mask, outputs, pse, rope, tokens};
use super::{FlashAttentionCall, FlashAttentionProblem, InputLayout, SoftmaxOrder, Version, Work};
use crate::attention_problem::size;
use crate::{Lengths, Sparsity, Target, TensorDesc, Violation};

impl<'a> FlashAttentionCall<'a> {
    /// Checks the call against the contract of `version` for `target`, and resolves it.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule, or [`UNSUPPORTED`](crate::UNSUPPORTED) for what this crate does not
    /// compute.
    pub fn check(&self, version: Version, target: Target) -> Result<FlashAttentionProblem<'a>, Violation> {
        entry::entry_point(version, target)?;
        let call = self.read_by(version);
        let required = entry::required(&call)?;
        entry::COUNTABLE.addressable(&call)?;
        let outputs = [required.softmax_max, required.softmax_sum, required.attention_out];
        if outputs.iter().all(|desc| desc.is_empty()) {
            let layout = InputLayout::parse(required.layout).unwrap_or(InputLayout::Tnd);
            return Ok(FlashAttentionProblem::without_work(call, version, target, layout));
        }
        let layout = layouts::layout(version, &required)?;
        heads::head_num(call.num_heads)?;
        entry::inputs(&required)?;
        entry::FORMAT.plain(&call)?;
        layouts::key_axes(layout, &required)?;
        let dims = heads::dims(layout, call.num_heads, &required)?;
        if pse::dtype(&call, &required)? {
            heads::sink_dtype(&call)?;
        }
        entry::output(version, &required)?;
        layouts::ranks(version, layout, &required)?;
        rope::check(layout, &call, &required)?;
        layouts::batch(layout, &required)?;
        let blank = FlashAttentionProblem::without_work(call, version, target, layout);
        if required.query.is_empty() || required.key.is_empty() || required.value.is_empty() {
            let sized = blank.with_heads(dims);
            outputs::check(&sized, &required)?;
            heads::computed_without_keys(&sized, &required)?;
            return Ok(FlashAttentionProblem { work: Work::Fill, ..blank });
        }
        let mut p = blank.with_heads(dims).with_lengths(&required)?;
        drop_mask::keep_prob(&call)?;
        pse::known(&call)?;
        heads::counts(&p, &required)?;
        (p.mode, p.mask) = mask::check(&p)?;
        p.cut_sequence = Sparsity::new(p.mode, p.lengths).cut_sequence();
        drop_mask::check(&p)?;
        heads::sinks(&p)?;
        p.bias = pse::check(&p)?;
        tokens::check(&p)?;
        p.zeroes_masked_rows = tokens::fully_masked_rows(&p);
        outputs::check(&p, &required)?;
        layouts::computed(&p, &required)?;
        rope::computed(&p, &required)?;
        heads::computed(&p, &required)?;
        pse::computed(&p)?;
        entry::computed(&call, target)?;
        Ok(p)
    }
}

impl<'a> FlashAttentionProblem<'a> {
    /// The heads of a call, whose lengths are not read.
    fn with_heads(self, dims: heads::HeadDims) -> Self {
        let rope = self.call.query_rope.and_then(|rope| rope.shape.last().copied());
        FlashAttentionProblem {
            heads: self.call.num_heads,
            kv_heads: dims.kv_heads,
            head_dim: dims.query,
            value_dim: dims.value,
            rope_dim: rope.unwrap_or(0),
            ..self
        }
    }

    /// The lengths of a call that has attention to compute.
    fn with_lengths(self, required: &Required<'_>) -> Result<Self, Violation> {
        let call = &self.call;
        let size_of = |desc: &TensorDesc, axis: usize| desc.shape.get(axis).copied().unwrap_or(0);
        let Some(batch_axis) = self.layout.batch_axis() else {
            let lengths = lengths::packed(call, required)?;
            let (q_rows, kv_rows) = lengths.longest();
            let same_order = call.softmax_out_layout == Some(FlashAttentionCall::SAME_AS_INPUT);
            let mut p = FlashAttentionProblem { work: Work::Attend, q_rows, kv_rows, lengths, ..self };
            p.as_batch = as_batch(&p, required);
            p.batch = match p.as_batch {
                true => lengths.filled().0,
                false => i64::try_from(lengths.batch()).unwrap_or(i64::MAX),
            };
            p.softmax_order = if same_order { SoftmaxOrder::SameAsInput } else { SoftmaxOrder::SequenceBlocks };
            return Ok(p);
        };
        let rows = |desc: &TensorDesc| size_of(desc, self.layout.row_axis());
        let (batch, q_rows, kv_rows) = (size_of(required.query, batch_axis), rows(required.query), rows(required.key));
        let [q_len, kv_len] = [q_rows, kv_rows].map(|rows| size(rows) as u64);
        let lengths = Lengths::Dense { batch: size(batch), q_len, kv_len };
        Ok(FlashAttentionProblem { work: Work::Attend, batch, q_rows, kv_rows, lengths, ..self })
    }
}

/// Whether the host runs packed sequences as a batch: they are of one length and fill the tensors.
fn as_batch(p: &FlashAttentionProblem<'_>, required: &Required<'_>) -> bool {
    const DIM: i64 = 128;
    let call = &p.call;
    let (of_query, of_key) = p.lengths.filled();
    let fills = |desc: &TensorDesc, longest: i64, count: i64| longest.checked_mul(count) == desc.shape.first().copied();
    let plain = call.query_rope.is_none()
        && call.softmax_out_layout != Some(FlashAttentionCall::SAME_AS_INPUT)
        && call.real_shift.is_none()
        && !matches!(call.sparse_mode, 7 | 8);
    let last = |desc: &TensorDesc| desc.shape.last() == Some(&DIM);
    plain
        && last(required.query)
        && last(required.key)
        && last(required.value)
        && of_query == of_key
        && fills(required.query, p.q_rows, of_query)
        && fills(required.key, p.kv_rows, of_key)
        && p.lengths.each().all(|(rows, keys)| (rows > 0) == (keys > 0))
}
