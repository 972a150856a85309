//! Calls that break the rules on lengths.

use ascend_spec::ops::fused_infer_attention_score::FiaCall;

use super::{Broken, Good, half};

pub(super) fn calls(broken: &mut Broken, good: &Good<'_>) {
    let Good { prefill, list, .. } = good;
    broken.by("actual_seq_lengths.range", FiaCall { actual_seq_lengths: Some(&[16, 17]), ..prefill.clone() });
    broken.by("actual_seq_lengths_kv.range", FiaCall { actual_seq_lengths_kv: Some(&[-1]), ..prefill.clone() });
    broken.by("actual_seq_lengths_kv.range", FiaCall { actual_seq_lengths_kv: Some(&[60, 61]), ..list.clone() });
    let three = [half(&[3, 4, 64, 32])];
    let three_rows = |rows| FiaCall {
        query: Some(half(&[3, 8, rows, 32])),
        attention_out: Some(half(&[3, 8, rows, 32])),
        key: &three,
        value: &three,
        ..prefill.clone()
    };
    broken.by("actual_seq_lengths.count", FiaCall { actual_seq_lengths: Some(&[4, 4]), ..three_rows(16) });
    broken.by("actual_seq_lengths_kv.count", FiaCall { actual_seq_lengths_kv: Some(&[4, 4]), ..three_rows(1) });
}
