//! Contiguous tensors of calls, and what lengths of sparse attention show.

use ascend_spec::ops::sparse_sequences::{SparseSequences, unusual_contents};
use ascend_spec::{DType, Rule, TensorDesc};

pub(crate) fn of(dtype: DType, shape: &[i64]) -> Option<TensorDesc> {
    TensorDesc::contiguous(dtype, shape)
}

pub(crate) fn half(shape: &[i64]) -> Option<TensorDesc> {
    of(DType::Float16, shape)
}

pub(crate) fn numbers(shape: &[i64]) -> Option<TensorDesc> {
    of(DType::Int32, shape)
}

/// Breaks the rules of numbers that are known to who uploads them, by ends of two sequences of 5 rows and 70 keys:
/// query rows of no sequence, rows without keys, and what leads outside of the tensors. Returns their ids.
pub(crate) fn broken_by_numbers(sequences: &SparseSequences, rules: [&'static Rule; 3]) -> [&'static str; 3] {
    let [left_out, without_keys, contents] = rules;
    let unusual = |queries: [i64; 2], keys: [i64; 2]| {
        let numbers = [queries.to_vec(), keys.to_vec(), vec![]];
        let found = unusual_contents(sequences, &numbers, [left_out, without_keys].map(Some));
        found.map(|found| found.map(|found| found.rule.id))
    };
    assert_eq!(unusual([3, 5], [40, 70]), [None, None]);
    assert_eq!(unusual([2, 4], [40, 70]), [Some(left_out.id), None]);
    assert_eq!(unusual([3, 5], [2, 70])[1], Some(without_keys.id));
    // What the numbers name is not known before the launch.
    assert!(contents.overruns);
    [left_out.id, without_keys.id, contents.id]
}
