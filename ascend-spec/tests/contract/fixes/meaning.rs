//! What a call of FusedInferAttentionScore means, read from its arguments as their documentation has them, not as one
//! of the operator's checkers takes them.

use super::Call;
use ascend_spec::declared::AnyArguments;
use ascend_spec::ops::fused_infer_attention_score::{Arguments, FiaCall};
use ascend_spec::{Layout, MaskGeometry, Operator, SparseMode, TOKENS_UNBOUNDED, Target, TensorDesc, Violation};
use std::ops::Range;

/// Most sequences that are looked at.
const SEQUENCES: usize = 4;

/// Which keys rows see, and the factor of their scores.
#[derive(Debug, PartialEq)]
pub(super) struct Meaning {
    scale: f64,
    /// Of each sequence its first, middle and last row.
    visible: Vec<Vec<Range<u64>>>,
    /// Whether a full mask hides further keys.
    full_mask: bool,
}

/// Three rows of so many.
fn sampled(rows: u64) -> impl Iterator<Item = u64> {
    let mut sample = vec![0, rows / 2, rows.saturating_sub(1)];
    sample.dedup();
    sample.into_iter().filter(move |&row| row < rows)
}

/// The keys that rows see, an empty range where there are none.
fn rows_of(geometry: &MaskGeometry) -> Vec<Range<u64>> {
    let row = |i| Some(geometry.row(i)).filter(|row| !row.is_empty());
    sampled(geometry.q_len()).map(|i| row(i).unwrap_or(0..0)).collect()
}

/// Length of sequence `b`; `None` where the array does not say it.
fn length(lengths: Option<&[i64]>, ends: bool, b: usize, rows: i64) -> Option<u64> {
    let len = match (lengths, ends) {
        (None | Some([]), true) => return None,
        (None | Some([]), false) => rows,
        (Some(all), true) => {
            let before = b.checked_sub(1).map_or(Some(0), |b| all.get(b).copied())?;
            all.get(b)?.checked_sub(before)?
        }
        (Some(&[one]), false) => one,
        (Some(all), false) => *all.get(b)?,
    };
    u64::try_from(len).ok().filter(|_| len <= rows)
}

impl Meaning {
    /// `None` for what the arguments do not say: contents of tensors, wrong lengths, modes that there are not.
    pub(super) fn of(call: &Call) -> Option<Self> {
        let AnyArguments::FusedInferAttentionScore(call) = call else {
            return None;
        };
        Self::of_fused(call)
    }

    fn of_fused(of: &Arguments<TensorDesc>) -> Option<Self> {
        let call: FiaCall<'_> = of.call();
        let layout = Layout::parse(&call.input_layout.to_ascii_uppercase())?;
        let axes = layout.input();
        let query = call.query?;
        let q = axes.extents(&query.shape, call.num_heads)?;
        let elsewhere = [&call.key_shared_prefix, &call.query_padding_size, &call.kv_padding_size];
        let [key] = call.key else { return None };
        if elsewhere.into_iter().any(Option::is_some) {
            return None;
        }
        let paged = call.block_table;
        let key_rows = match &paged {
            Some(table) => table.shape.get(1)?.checked_mul(call.block_size)?,
            None => *key.shape.get(axes.row_axis())?,
        };
        let packed = layout.is_packed();
        let (batch, q_lengths) = match packed {
            true => (call.actual_seq_lengths?.len(), call.actual_seq_lengths),
            // No single row is left out.
            false if q.rows == 1 => (usize::try_from(q.batch).ok()?, None),
            false => (usize::try_from(q.batch).ok()?, call.actual_seq_lengths),
        };
        let mode = Operator::FusedInferAttentionScore.sparse_mode(call.sparse_mode)?;
        let mask = call.mask();
        let compressed = mode.takes_compressed_mask();
        let triangle = |mask: &TensorDesc| mask.shape.ends_with(&[2048, 2048]);
        if compressed && mask.is_some_and(|mask| !triangle(mask)) {
            return None;
        }
        let bounded = |tokens: i64| tokens < TOKENS_UNBOUNDED;
        let window = bounded(call.pre_tokens) || bounded(call.next_tokens);
        let mode = match (mode, mask) {
            // A window that no mask makes counts from the last key, as where it is one.
            (SparseMode::DefaultMask, None) if window => SparseMode::Band,
            // A causal window: 0 is what clients leave there.
            (SparseMode::RightDownCausal, _) if (1..TOKENS_UNBOUNDED).contains(&call.pre_tokens) => SparseMode::Band,
            (SparseMode::DefaultMask, Some(_)) if q.rows == 1 && !packed => SparseMode::AllMask,
            (mode, _) => mode,
        };
        let total = |lengths: Option<&[i64]>, rows: i64| lengths.and_then(<[i64]>::last).is_none_or(|&end| end == rows);
        let dense = packed && paged.is_none();
        if packed && !total(q_lengths, q.rows) || dense && !total(call.actual_seq_lengths_kv, key_rows) {
            return None;
        }
        let visible = (0..batch.min(SEQUENCES)).map(|b| {
            let rows = length(q_lengths, packed, b, q.rows)?;
            let keys = length(call.actual_seq_lengths_kv, dense, b, key_rows)?;
            let causal = call.sparse_mode == SparseMode::RightDownCausal.acl();
            let tokens = (call.pre_tokens, if causal { 0 } else { call.next_tokens });
            let geometry = MaskGeometry::new(mode, true, rows, keys, tokens.0, tokens.1);
            Some(rows_of(&geometry))
        });
        Some(Meaning {
            scale: call.scale,
            visible: visible.collect::<Option<_>>()?,
            full_mask: mask.is_some() && !compressed,
        })
    }

    /// Visible keys of the first, middle and last row of a sequence.
    pub(super) fn of_sequence(&self, b: usize) -> &[Range<u64>] {
        &self.visible[b]
    }

    /// A fix changes nothing of it. A full mask that it gives hides what the mode hid.
    #[track_caller]
    pub(super) fn is_kept_by(&self, after: &Meaning, of: &Violation) {
        assert_eq!(self.scale, after.scale, "{of}");
        let new_mask = after.full_mask && !self.full_mask;
        assert!(after.full_mask || !self.full_mask, "the mask is lost: {of}");
        let kept = |before: &Range<u64>, after: &Range<u64>| match new_mask {
            true => after.start <= before.start && before.end <= after.end,
            false => before == after,
        };
        for (before, after) in self.visible.iter().zip(&after.visible) {
            let rows = before.iter().zip(after);
            assert!(
                before.len() == after.len() && rows.into_iter().all(|(old, new)| kept(old, new)),
                "{before:?} became {after:?}: {of}"
            );
        }
        assert_eq!(self.visible.len(), after.visible.len(), "{of}");
    }

    /// A call that no rule and no lint stops computes it.
    #[track_caller]
    pub(super) fn is_computed_by(&self, call: &Call, version: u8, target: Target, said: &[&str]) {
        let AnyArguments::FusedInferAttentionScore(call) = call else {
            return;
        };
        let mut versions = ascend_spec::ops::fused_infer_attention_score::Version::ALL.into_iter();
        let version = versions.find(|of| of.number() == version).unwrap();
        let call = call.call();
        let problem = call.check(version, target).unwrap().problem;
        if problem.work != ascend_spec::attention_problem::Work::Attend {
            return;
        }
        assert_eq!(self.scale, problem.scale, "{said:?}");
        let full_mask = problem.mask.is_tensor();
        for (b, meant) in self.visible.iter().enumerate() {
            let rows = rows_of(&problem.geometry(b));
            for (meant, row) in meant.iter().zip(&rows) {
                let within = row.start <= meant.start && meant.end <= row.end;
                assert!(
                    row == meant || full_mask && within,
                    "{said:?}: sequence {b} sees {rows:?}, {meant:?} was meant\n{call:?}"
                );
            }
        }
    }
}
