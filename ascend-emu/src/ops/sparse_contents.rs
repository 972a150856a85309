//! Lengths and block tables of sparse attention, which are known on the device alone.

use super::declared::{DeclaredOperator, ParameterOf};
use super::launch::Launch;
use crate::fault::Fault;
use crate::finding_kind::FindingKind;
use ascend_spec::operator::DeclaredParameter as _;
use ascend_spec::ops::sparse_sequences::{Side, SparseContents, SparseFault, SparseSequences};

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
) -> Result<[Vec<i64>; 3], Fault> {
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
