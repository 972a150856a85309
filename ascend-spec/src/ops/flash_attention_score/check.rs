//! The order of the rules, and the resolution of a call that holds them.

use super::facts::{Facts, Required};
use super::rules::{drop_mask, entry, heads, layouts, lengths, mask, outputs, pse, rope, tokens};
use super::{Bias, FlashAttentionCall, FlashAttentionProblem, InputLayout, MaskKind, SoftmaxOrder, Version, Work};
use crate::{SparseMode, Target, Violation};

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
            return Ok(without_work(call, version, target, layout, Work::Nothing));
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
        let work = match required.query.is_empty() || required.key.is_empty() || required.value.is_empty() {
            true => Work::Fill,
            false => Work::Attend,
        };
        let facts = facts(call, version, target, layout, dims, &required, work)?;
        if work == Work::Fill {
            outputs::check(&facts, &required)?;
            heads::computed_without_keys(&facts)?;
            return Ok(without_work(call, version, target, layout, work));
        }
        drop_mask::keep_prob(&call)?;
        pse::known(&call)?;
        heads::counts(&facts)?;
        let (mode, mask) = mask::check(&facts)?;
        drop_mask::check(&facts)?;
        heads::sinks(&facts)?;
        let bias = pse::check(&facts, mode, mask)?;
        tokens::check(&facts, mode, mask)?;
        outputs::check(&facts, &required)?;
        layouts::computed(&facts)?;
        rope::computed(&facts)?;
        heads::computed(&facts)?;
        pse::computed(&facts, bias)?;
        entry::computed(&call, target)?;
        Ok(resolve(&facts, mode, mask, bias))
    }
}

/// Sizes and lengths of a call. Unless there is attention to compute, length arrays are not read, and the lengths are
/// those of the tensors.
fn facts<'a>(
    call: FlashAttentionCall<'a>,
    version: Version,
    target: Target,
    layout: InputLayout,
    dims: heads::HeadDims,
    required: &Required<'_>,
    work: Work,
) -> Result<Facts<'a>, Violation> {
    let packed = match layout.is_packed() && work == Work::Attend {
        true => Some(lengths::packed(&call, required)?),
        false => None,
    };
    let axis = layout.row_axis();
    let rows = |desc: &crate::TensorDesc| desc.shape.get(axis).copied().unwrap_or(0);
    let batch = layout.batch_axis().and_then(|axis| required.query.shape.get(axis));
    let mut facts = Facts {
        call,
        version,
        target,
        query: *required.query,
        key: *required.key,
        value: *required.value,
        layout,
        batch: batch.copied().unwrap_or(1),
        heads: call.num_heads,
        kv_heads: dims.kv_heads,
        dim: dims.query,
        value_dim: dims.value,
        q_rows: rows(required.query),
        kv_rows: rows(required.key),
        packed,
        as_batch: false,
    };
    if let Some(lengths) = packed {
        (facts.q_rows, facts.kv_rows) = lengths.longest();
        facts.as_batch = as_batch(&facts);
        facts.batch = match facts.as_batch {
            true => lengths.filled().0,
            false => i64::try_from(lengths.batch()).unwrap_or(i64::MAX),
        };
    }
    Ok(facts)
}

/// Whether the host runs packed sequences as a batch: they are of one length and fill the tensors.
fn as_batch(f: &Facts<'_>) -> bool {
    const DIM: i64 = 128;
    let Some(lengths) = f.packed else {
        return false;
    };
    let call = &f.call;
    let (of_query, of_key) = lengths.filled();
    let fills =
        |desc: &crate::TensorDesc, longest: i64, count: i64| longest.checked_mul(count) == desc.shape.first().copied();
    let plain = call.query_rope.is_none()
        && call.softmax_out_layout != Some(FlashAttentionCall::SAME_AS_INPUT)
        && call.real_shift.is_none()
        && !matches!(call.sparse_mode, 7 | 8);
    let last = |desc: &crate::TensorDesc| desc.shape.last() == Some(&DIM);
    plain
        && last(&f.query)
        && last(&f.key)
        && last(&f.value)
        && of_query == of_key
        && fills(&f.query, f.q_rows, of_query)
        && fills(&f.key, f.kv_rows, of_key)
        && lengths.each().all(|(rows, keys)| (rows > 0) == (keys > 0))
}

fn without_work(
    call: FlashAttentionCall<'_>,
    version: Version,
    target: Target,
    layout: InputLayout,
    work: Work,
) -> FlashAttentionProblem<'_> {
    FlashAttentionProblem {
        call,
        version,
        target,
        work,
        layout,
        batch: 0,
        heads: 0,
        kv_heads: 0,
        q_rows: 0,
        kv_rows: 0,
        head_dim: 0,
        value_dim: 0,
        rope_dim: 0,
        packed: None,
        as_batch: false,
        mode: SparseMode::DefaultMask,
        mask: MaskKind::None,
        bias: Bias::None,
        zeroes_masked_rows: false,
        cut_sequence: None,
        softmax_order: SoftmaxOrder::Batches,
    }
}

fn resolve<'a>(f: &Facts<'a>, mode: SparseMode, mask: MaskKind, bias: Bias) -> FlashAttentionProblem<'a> {
    // This is called for tensors with elements, whose sizes are at least 1 and fit in memory.
    let size = |dim: i64| usize::try_from(dim).unwrap_or(0);
    let call = f.call;
    let same = call.softmax_out_layout == Some(FlashAttentionCall::SAME_AS_INPUT);
    let rope = call.query_rope.and_then(|rope| rope.shape.last().copied());
    FlashAttentionProblem {
        call,
        version: f.version,
        target: f.target,
        work: Work::Attend,
        layout: f.layout,
        batch: match f.packed {
            Some(lengths) => lengths.batch(),
            None => size(f.batch),
        },
        heads: size(f.heads),
        kv_heads: size(f.kv_heads),
        q_rows: size(f.q_rows),
        kv_rows: size(f.kv_rows),
        head_dim: size(f.dim),
        value_dim: size(f.value_dim),
        rope_dim: size(rope.unwrap_or(0)),
        packed: f.packed,
        as_batch: f.as_batch,
        mode,
        mask,
        bias,
        zeroes_masked_rows: tokens::fully_masked_rows(f, mode, mask),
        cut_sequence: f.packed.and_then(|lengths| lengths.cut_sequence(mode)),
        softmax_order: match f.packed {
            None => SoftmaxOrder::Batches,
            Some(_) if same => SoftmaxOrder::SameAsInput,
            Some(_) => SoftmaxOrder::SequenceBlocks,
        },
    }
}
