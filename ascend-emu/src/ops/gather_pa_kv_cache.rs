//! GatherPaKvCache as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use crate::elements::{Elements, Place, Reader};
use crate::finding_kind::FindingKind;
use crate::status::Outcome;
use ascend_spec::ops::gather_pa_kv_cache::{Argument, Arguments, GatherProblem, Parameter, Source, Version};
use ascend_spec::ops::scatter_pa_kv_cache::Pieces;
use ascend_spec::{TensorDesc, gather_pa_kv_cache_arguments};
use std::ptr;

checked_call! { GatherOperator: GatherProblem, target }

impl GatherOperator {
    /// Reports a source that is not in the cache; in strict mode that is a device fault.
    fn inspect(&self, launch: &Launch<'_, Self>, source: Source) -> Outcome {
        let (tensor, text) = match source {
            Source::Row { .. } => return Ok(()),
            Source::NoBlock { sequence, block } => (
                "blockTables",
                format!(
                    "block {block} of sequence {sequence}, allowed: 0 to {}",
                    self.problem.blocks.saturating_sub(1)
                ),
            ),
            Source::NoColumn { sequence, column } => (
                "blockTables",
                format!("sequence {sequence} needs column {column}, and there are {}", self.problem.columns),
            ),
            Source::NoToken { sequence, token } => {
                ("keyRef", format!("sequence {sequence} has row {token}, and there are {}", self.problem.tokens))
            }
            Source::BadNumber { sequence, given } => (
                "seqLens",
                format!("{given} of sequence {sequence}, allowed: lengths and offsets of at least 0, ends that ascend"),
            ),
        };
        let text = format_args!("{tensor}: {text}");
        launch.suspect(FindingKind::BlockTable, tensor, text)
    }
}

impl DeclaredOperator for GatherOperator {
    declared_by_problem! {}

    unsafe fn reads(&self, launch: &Launch<'_, Self>, reader: &mut dyn Reader) {
        for (argument, _) in launch.doubtful(reader) {
            let pieces = match argument.parameter {
                Parameter::KeyCache => self.problem.key,
                Parameter::ValueCache => self.problem.value,
                _ => continue,
            };
            // SAFETY: the caller's promise, for each of them.
            let numbers = |parameter: Parameter| unsafe { launch.integers(parameter) };
            let (Ok(table), Ok(lengths), Ok(offsets)) =
                (numbers(Parameter::BlockTables), numbers(Parameter::SeqLens), numbers(Parameter::SeqOffset))
            else {
                // The launch fails with the same error.
                return;
            };
            let (tensor, first) = (launch.named(argument), launch.first_byte(argument));
            (self.problem).sources(&table, &lengths, &offsets, &mut |source| {
                if let Source::Row { block, row, .. } = source {
                    let place = |piece| pieces.place(self.problem.block_size, block, row, piece);
                    let axes = [(pieces.count, place(1) as i64 - place(0) as i64)];
                    let start = first.saturating_add(place(0));
                    let named = Place::Block { block, first: row, sequence: None };
                    let row = Elements::new(tensor, start, pieces.bytes, &axes, None, named);
                    row.iter().for_each(|row| reader.read(row));
                }
            });
        }
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        let numbers = |parameter: Parameter| {
            // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found
            // that the outputs, the only tensors written, share no memory with them.
            unsafe { launch.integers(parameter) }
        };
        let table = numbers(Parameter::BlockTables)?;
        let lengths = numbers(Parameter::SeqLens)?;
        let offsets = numbers(Parameter::SeqOffset)?;
        let mut inspected = Ok(());
        (self.problem).sources(&table, &lengths, &offsets, &mut |source| {
            let found = self.inspect(launch, source);
            if inspected.is_ok() {
                inspected = found;
            }
        });
        inspected?;
        let pairs = [
            (self.problem.key, Parameter::KeyCache, Parameter::Key),
            (self.problem.value, Parameter::ValueCache, Parameter::Value),
        ];
        for (pieces, cache, rows) in pairs {
            let cache = launch.first(cache).cast_const();
            let rows = launch.first(rows);
            (self.problem).sources(&table, &lengths, &offsets, &mut |source| {
                if let Source::Row { token, block, row } = source {
                    let place = |piece| pieces.place(self.problem.block_size, block, row, piece);
                    // SAFETY: the contract has checked the shapes, and block, row and token are within them; both
                    // tensors are live and contiguous, and do not overlap.
                    unsafe { copy(&pieces, cache, &place, rows, token) };
                }
            });
        }
        Ok(())
    }
}

/// Copies the row of one token.
///
/// # Safety
///
/// The places are within the cache, and the token's row is within `rows`, which overlaps nothing.
unsafe fn copy(pieces: &Pieces, cache: *const u8, place: &dyn Fn(usize) -> usize, rows: *mut u8, token: usize) {
    for piece in 0..pieces.count {
        let to = (token * pieces.count + piece) * pieces.bytes;
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(cache.add(place(piece)), rows.add(to), pieces.bytes) };
    }
}

c_functions! {
    gather_pa_kv_cache_arguments;
    1 V1: aclnnGatherPaKvCacheGetWorkspaceSize, aclnnGatherPaKvCache => GatherOperator::new;
}
