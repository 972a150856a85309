//! Lengths and block tables of sparse attention, which are known on the device alone.

use super::declared::{DeclaredOperator, Launch, ParameterOf};
use crate::elements::Elements;
use crate::finding_kind::FindingKind;
use crate::status::Outcome;
use ascend_spec::TensorDesc;
use ascend_spec::operator::DeclaredParameter as _;
use ascend_spec::ops::sparse_sequences::{Side, SparseContents, SparseFault, SparseSequences, TokenLayout};

/// Reads the lengths of queries and keys and the block table, whose parameters these are, and reports numbers that lead
/// outside of a tensor.
///
/// # Errors
/// A device fault in strict mode, or where there is no host memory for them.
///
/// # Safety
///
/// The bytes of the tensors are live and written by no other thread.
pub(super) unsafe fn read<O: DeclaredOperator>(
    launch: &Launch<'_, O>,
    sequences: &SparseSequences,
    parameters: [ParameterOf<O>; 3],
) -> Outcome<[Vec<i64>; 3]> {
    let [of_query, of_key, of_table] = parameters;
    // SAFETY: the caller's promise.
    let numbers = unsafe { [launch.integers(of_query)?, launch.integers(of_key)?, launch.integers(of_table)?] };
    for fault in sequences.faults(SparseContents::of(&numbers)) {
        let (kind, parameter) = match fault {
            SparseFault::Length { side, .. } => {
                let parameter = match side {
                    Side::Query => of_query,
                    Side::Key => of_key,
                };
                (FindingKind::SequenceLength, parameter)
            }
            SparseFault::NoColumn { .. } => (FindingKind::SequenceLength, of_key),
            SparseFault::NoBlock { .. } => (FindingKind::BlockTable, of_table),
        };
        let tensor = parameter.info().acl_name;
        launch.suspect(kind, tensor, format_args!("{tensor}: {fault}"))?;
    }
    Ok(numbers)
}

/// Visits the elements of outputs that a launch writes, each with the axis of its packed rows: all of them, but for
/// packed rows after the last sequence. `query_lengths` names the tensor of the queries' lengths.
///
/// # Safety
///
/// As for [`DeclaredOperator::writes`].
pub(super) unsafe fn write_rows<O: DeclaredOperator>(
    launch: &Launch<'_, O>,
    (sequences, query_lengths): (&SparseSequences, ParameterOf<O>),
    outputs: impl IntoIterator<Item = (ParameterOf<O>, TensorDesc, usize)>,
    visit: &mut dyn FnMut(&Elements),
) {
    // SAFETY: the caller's promise.
    let lengths = unsafe { launch.integers(query_lengths) };
    let contents = SparseContents { query_lengths: &lengths.unwrap_or_default(), ..SparseContents::default() };
    let ends = sequences.each(contents).map(|sequence| sequence.first_query + sequence.written);
    let rows = ends.max().unwrap_or(0) as i64;
    let packed = sequences.query.layout == TokenLayout::Tnd;
    for (parameter, mut desc, axis) in outputs {
        if packed {
            desc.shape = desc.shape.with(axis, rows);
        }
        Elements::described(launch.named(parameter), &desc).iter().for_each(&mut *visit);
    }
}
