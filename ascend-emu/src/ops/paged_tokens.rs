//! The tokens of a paged cache that a launch reads, which block tables on the device name.

use super::declared::{DeclaredOperator, Launch, ParameterOf};
use crate::elements::{Elements, NamedTensor, Place, Reader};
use crate::finding_kind::FindingKind;
use crate::status::Outcome;
use ascend_spec::TensorDesc;
use ascend_spec::operator::DeclaredParameter as _;
use ascend_spec::ops::sparse_sequences::{SparseContents, SparseFault, SparseSequence, SparseSequences};
use smallvec::SmallVec;
use std::ops::Range;

/// Passes each token that is read from a paged cache to the reader; `mark` marks those of a sequence. The first two
/// axes of the cache are those of blocks and of their tokens.
pub(super) fn read_tokens(
    sequences: &SparseSequences,
    contents: SparseContents<'_>,
    (cache, desc): (NamedTensor, TensorDesc),
    mark: &dyn Fn(&SparseSequence, &mut [bool]),
    reader: &mut dyn Reader,
) {
    let bytes = |elements: i64| elements.saturating_mul(desc.dtype.size().unwrap_or(1) as i64);
    let &[blocks, rows, ref steps @ ..] = &desc.strides[..] else {
        return;
    };
    let sizes = desc.shape.iter().skip(2).map(|&size| size.max(0) as usize);
    let axes: SmallVec<[_; 4]> = sizes.zip(steps.iter().map(|&step| bytes(step))).collect();
    for sequence in sequences.each(contents) {
        let mut read = vec![false; sequence.keys];
        mark(&sequence, &mut read);
        for token in (0..sequence.keys).filter(|&token| read[token]) {
            let Some((block, row)) = sequences.key(&contents, &sequence, token) else {
                continue;
            };
            let place = desc.offset + blocks * block as i64 + rows * row as i64;
            let first = cache.address.saturating_add_signed(bytes(place) as isize);
            let place = Place::Block { block, first: row, sequence: Some((sequence.index, sequence.keys)) };
            let token = Elements::new(cache, first, bytes(1) as usize, &axes, None, place);
            token.iter().for_each(|token| reader.read(token));
        }
    }
}

/// Passes a tensor of which nothing has been written to the reader.
pub(super) fn read_whole(tensor: NamedTensor, bytes: Range<usize>, reader: &mut dyn Reader) {
    if reader.untouched(bytes.clone()) {
        let whole = Elements::new(tensor, bytes.start, bytes.len(), &[], None, Place::Whole);
        whole.iter().for_each(|whole| reader.read(whole));
    }
}

/// Reports blocks of a table that the cache does not have.
///
/// # Errors
/// A device fault in strict mode.
pub(super) fn inspect_table<O: DeclaredOperator>(
    launch: &Launch<'_, O>,
    sequences: &SparseSequences,
    contents: SparseContents<'_>,
    table: ParameterOf<O>,
) -> Outcome {
    let tensor = table.info().acl_name;
    let mut missing = sequences.faults(contents).filter(|fault| matches!(fault, SparseFault::NoBlock { .. }));
    missing.try_for_each(|fault| launch.suspect(FindingKind::BlockTable, tensor, format_args!("{tensor}: {fault}")))
}
