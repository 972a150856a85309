//! The keys that the lists of sparse attention name, which are known on the device alone.

use super::declared::{DeclaredOperator, Launch, ParameterOf};
use super::paged_tokens::{read_tokens, read_whole};
use super::sparse_contents;
use crate::elements::{Elements, NamedTensor, Reader};
use crate::finding_kind::FindingKind;
use crate::kernel::element_view::ElementView;
use crate::kernel::sparse_attention::{self, Buffers};
use crate::kernel::token_rows::TokenRows;
use crate::status::Outcome;
use ascend_spec::TensorDesc;
use ascend_spec::operator::DeclaredParameter as _;
use ascend_spec::ops::sparse_flash_attention::{EntryFaultKind, SparseFlashProblem};
use ascend_spec::ops::sparse_sequences::{SparseContents, SparseSequence, TokenLayout};

/// An operator whose rows attend to the keys that lists name.
pub(super) trait ListedKeys: DeclaredOperator {
    /// Lengths of queries and of keys, and the block table.
    const CONTENTS: [ParameterOf<Self>; 3];
    /// The lists.
    const INDICES: ParameterOf<Self>;
    /// The values, which are read as elements of the keys and never from their own tensor.
    const VALUE: ParameterOf<Self>;
    /// Queries and their rotary parts, keys and theirs, attention, maxima and sums, and sinks, of which the operator
    /// may lack some.
    const TENSORS: [Option<ParameterOf<Self>>; 8];

    /// The call, resolved.
    fn problem(&self) -> &SparseFlashProblem;

    /// A tensor as a launch walks it.
    fn walked(&self, parameter: ParameterOf<Self>) -> Option<TensorDesc>;

    /// Reads lengths, block table and lists, and reports numbers that lead outside of a tensor and entries of lists
    /// that are not read, or are read twice.
    ///
    /// # Errors
    /// A device fault in strict mode, or where there is no host memory for them.
    ///
    /// # Safety
    ///
    /// The bytes of the tensors are live and written by no other thread.
    unsafe fn numbers(launch: &Launch<'_, Self>) -> Outcome<([Vec<i64>; 3], Vec<i64>)> {
        let problem = launch.op.problem();
        // SAFETY: the caller's promise.
        let (numbers, lists) = unsafe {
            let numbers = sparse_contents::read(launch, &problem.sequences, Self::CONTENTS)?;
            (numbers, launch.integers(Self::INDICES)?)
        };
        inspect_lists(launch, SparseContents::of(&numbers), &lists)?;
        Ok((numbers, lists))
    }

    /// Passes what a launch reads of the inputs that have unwritten bytes to the reader: of keys in a paged cache those
    /// that some row reads.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::reads`].
    unsafe fn read_listed(&self, launch: &Launch<'_, Self>, reader: &mut dyn Reader) {
        let paged = self.problem().sequences.key.layout == TokenLayout::PaBsnd;
        for (argument, bytes) in launch.doubtful(reader) {
            let named = launch.named(argument);
            if argument.parameter == Self::VALUE {
                continue;
            }
            if paged && Self::TENSORS[2..4].contains(&Some(argument.parameter)) {
                // SAFETY: the caller's promise, for each of them.
                let numbers = |parameter: ParameterOf<Self>| unsafe { launch.integers(parameter) };
                let [queries, keys, table] = Self::CONTENTS.map(numbers);
                let lists = numbers(Self::INDICES);
                // Without memory for them the launch fails with the same error.
                if let (Ok(queries), Ok(keys), Ok(table), Ok(lists), Some(desc)) =
                    (queries, keys, table, lists, self.walked(argument.parameter))
                {
                    let numbers = [queries, keys, table];
                    read_keys(self.problem(), (named, desc), &numbers, &lists, reader);
                }
            } else {
                read_whole(named, bytes, reader);
            }
        }
    }

    /// Attends.
    ///
    /// # Errors
    /// A device fault in strict mode, or where there is no host memory.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::compute`].
    unsafe fn attend(&self, launch: &Launch<'_, Self>) -> Outcome {
        let walked = Self::TENSORS.map(|parameter| self.walked(parameter?));
        let rows = |number: usize| {
            let (parameter, desc) = (Self::TENSORS[number]?, walked[number].as_ref()?);
            Some(TokenRows { desc, base: launch.base(parameter) })
        };
        let (Some(query), Some(key), Some(out)) = (rows(0), rows(2), rows(4)) else {
            return Ok(());
        };
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the outputs, the only tensors written, share no memory with them.
        let (numbers, lists) = unsafe { Self::numbers(launch) }?;
        let sinks = Self::TENSORS[7].zip(walked[7]);
        let buffers = Buffers {
            query,
            query_rope: rows(1),
            key,
            key_rope: rows(3),
            out,
            softmax: rows(5).zip(rows(6)).map(|(max, sum)| [max, sum]),
            sinks: sinks.map(|(parameter, desc)| ElementView::new(launch.first(parameter), desc)),
            lists: &lists,
        };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the outputs apart from
        // everything else.
        let run = unsafe { sparse_attention::run(self.problem(), SparseContents::of(&numbers), &buffers) };
        run.map_err(|why| launch.fault(why))
    }

    /// Visits the elements of the outputs that a launch writes.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::writes`].
    unsafe fn write_rows(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
        // Packed rows are the first axis of attention, and the second of maxima and sums.
        let [_, _, _, _, out, max, sum, _] = Self::TENSORS;
        let outputs = [out, max, sum].into_iter().zip([0, 1, 1]);
        let outputs = outputs.filter_map(|(named, axis)| Some((named?, self.walked(named?)?, axis)));
        let sequences = (&self.problem().sequences, Self::CONTENTS[0]);
        // SAFETY: the caller's promise.
        unsafe { sparse_contents::write_rows(launch, sequences, outputs, visit) };
    }
}

/// [`ListedKeys`] of an operator that has a problem, arguments and a call `$call`.
macro_rules! listed_keys {
    ($operator:ident, $call:ident, $tensors:expr) => {
        impl $crate::ops::listed_keys::ListedKeys for $operator {
            const CONTENTS: [Parameter; 3] = $call::CONTENTS;
            const INDICES: Parameter = Parameter::SparseIndices;
            const VALUE: Parameter = Parameter::Value;
            const TENSORS: [Option<Parameter>; 8] = $tensors;

            fn problem(&self) -> &SparseFlashProblem {
                &self.problem
            }

            fn walked(&self, parameter: Parameter) -> Option<TensorDesc> {
                let desc = self.arguments.tensor(parameter)?;
                ascend_spec::operator::WalkedTensors::walked(&self.problem, &self.arguments.call(), parameter, desc)
            }
        }
    };
}

/// What a `DeclaredOperator` with listed keys reads, writes and computes.
macro_rules! attends_to_listed_keys {
    () => {
        fn overruns(&self) -> bool {
            self.problem.overruns
        }

        unsafe fn reads(&self, launch: &Launch<'_, Self>, reader: &mut dyn $crate::elements::Reader) {
            // SAFETY: the caller's promise.
            unsafe { self.read_listed(launch, reader) };
        }

        unsafe fn writes(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&$crate::elements::Elements)) {
            // SAFETY: the caller's promise.
            unsafe { self.write_rows(launch, visit) };
        }

        unsafe fn compute(&self, launch: &Launch<'_, Self>) -> $crate::status::Outcome {
            // SAFETY: the caller's promise.
            unsafe { self.attend(launch) }
        }
    };
}

pub(super) use {attends_to_listed_keys, listed_keys};

/// The list of a row.
fn list<'l>(problem: &SparseFlashProblem, lists: &'l [i64], row: usize) -> &'l [i64] {
    let list = lists.get(row.saturating_mul(problem.entries)..);
    let list = list.unwrap_or_default();
    &list[..list.len().min(problem.entries)]
}

/// Reports the first entry of a list by which a row reads other keys than its list seems to say; in strict mode that is
/// a device fault.
fn inspect_lists<O: ListedKeys>(launch: &Launch<'_, O>, contents: SparseContents<'_>, lists: &[i64]) -> Outcome {
    let (problem, mut seen) = (launch.op.problem(), Vec::new());
    for sequence in problem.sequences.each(contents) {
        for row in 0..sequence.queries {
            let keys = problem.sequences.candidates(&sequence, row);
            let list = list(problem, lists, sequence.first_query + row);
            if let Some(fault) = problem.entry_fault(list, keys, &mut seen) {
                let kind = match fault.kind {
                    EntryFaultKind::Twice => FindingKind::RepeatedBlock,
                    EntryFaultKind::Negative | EntryFaultKind::Beyond(_) | EntryFaultKind::Unread => {
                        FindingKind::SkippedEntry
                    }
                };
                let tensor = O::INDICES.info().acl_name;
                let index = sequence.index;
                let text = format_args!("{tensor}: row {row} of sequence {index}: {fault}");
                return launch.suspect(kind, tensor, text);
            }
        }
    }
    Ok(())
}

/// Passes each key that some row of the call reads from a paged cache to the reader.
fn read_keys(
    problem: &SparseFlashProblem,
    cache: (NamedTensor, TensorDesc),
    numbers: &[Vec<i64>; 3],
    lists: &[i64],
    reader: &mut dyn Reader,
) {
    let read = |sequence: &SparseSequence, read: &mut [bool]| {
        for row in 0..sequence.queries {
            let keys = problem.sequences.candidates(sequence, row);
            let list = list(problem, lists, sequence.first_query + row);
            let chosen = problem.chosen(list, keys);
            chosen.for_each(|keys| read[keys].fill(true));
        }
    };
    read_tokens(&problem.sequences, SparseContents::of(numbers), cache, &read, reader);
}
