//! SparseFlashAttention as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::entry_point::{executor_of, phase_one, phase_two};
use super::launch::{Launch, integers};
use super::one_version::{checked_call, declared_by_problem};
use super::sparse_contents;
use crate::elements::{Elements, NamedTensor, Place, Reader};
use crate::fault::Fault;
use crate::finding_kind::FindingKind;
use crate::kernel::sparse_attention::{self, Buffers};
use crate::kernel::token_rows::TokenRows;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::sparse_flash_attention::{
    Argument, Arguments, EntryFaultKind, Parameter, SparseFlashProblem, Version,
};
use ascend_spec::ops::sparse_sequences::{SparseContents, TokenLayout};
use ascend_spec::{TensorDesc, arguments_of_version, sparse_flash_attention_arguments};

checked_call! { SparseFlashOperator: SparseFlashProblem, target }

impl SparseFlashOperator {
    /// A tensor as a launch walks it.
    fn walked(&self, parameter: Parameter) -> Option<TensorDesc> {
        let desc = self.arguments.tensor(parameter)?;
        (self.problem).walked(&self.arguments.call(), parameter, desc)
    }

    /// The list of a row.
    fn list<'l>(&self, lists: &'l [i64], row: usize) -> &'l [i64] {
        let entries = self.problem.entries;
        let list = lists.get(row.saturating_mul(entries)..).unwrap_or_default();
        &list[..list.len().min(entries)]
    }

    /// Reports the first entry of a list by which a row reads other keys than its list seems to say; in strict mode
    /// that is a device fault.
    fn inspect_lists(
        &self,
        launch: &Launch<'_, Self>,
        contents: SparseContents<'_>,
        lists: &[i64],
    ) -> Result<(), Fault> {
        let (problem, mut seen) = (&self.problem, Vec::new());
        for sequence in problem.sequences.each(contents) {
            for row in 0..sequence.queries {
                let keys = problem.sequences.candidates(&sequence, row);
                let list = self.list(lists, sequence.first_query + row);
                if let Some(fault) = problem.entry_fault(list, keys, &mut seen) {
                    let kind = match fault.kind {
                        EntryFaultKind::Twice => FindingKind::RepeatedBlock,
                        EntryFaultKind::Negative
                        | EntryFaultKind::Beyond(_)
                        | EntryFaultKind::Unread => FindingKind::SkippedEntry,
                    };
                    let tensor = Parameter::SparseIndices.acl_name();
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
        &self,
        (cache, desc): (NamedTensor, TensorDesc),
        numbers: &[Vec<i64>; 3],
        lists: &[i64],
        reader: &mut dyn Reader,
    ) {
        let (problem, contents) = (&self.problem, SparseContents::of(numbers));
        let bytes = |elements: i64| elements.saturating_mul(desc.dtype.size().unwrap_or(1) as i64);
        let &[blocks, rows, _, step] = &desc.strides[..] else {
            return;
        };
        for sequence in problem.sequences.each(contents) {
            let mut read = vec![false; sequence.keys];
            for row in 0..sequence.queries {
                let keys = problem.sequences.candidates(&sequence, row);
                let list = self.list(lists, sequence.first_query + row);
                let chosen = problem.chosen(list, keys);
                chosen.for_each(|keys| read[keys].fill(true));
            }
            for key in (0..sequence.keys).filter(|&key| read[key]) {
                let Some((block, row)) = problem.sequences.key(&contents, &sequence, key) else {
                    continue;
                };
                let place = desc.offset + blocks * block as i64 + rows * row as i64;
                let first = cache.address.saturating_add_signed(bytes(place) as isize);
                let dim = desc.shape.last().map_or(0, |&dim| dim.max(0) as usize);
                let place = Place::Block {
                    block,
                    first: row,
                    sequence: Some((sequence.index, sequence.keys)),
                };
                let axes = [(dim, bytes(step))];
                let key = Elements::new(cache, first, bytes(1) as usize, &axes, None, place);
                key.iter().for_each(|key| reader.read(key));
            }
        }
    }
}

impl DeclaredOperator for SparseFlashOperator {
    declared_by_problem! {}

    fn overruns(&self) -> bool {
        self.problem.overruns
    }

    unsafe fn reads(&self, addresses: &Addresses, memory: &DeviceMemory, reader: &mut dyn Reader) {
        let paged = self.problem.sequences.key.layout == TokenLayout::PaBsnd;
        for (argument, bytes) in self.doubtful(addresses, reader) {
            let named = self.named(argument, addresses);
            match argument.parameter {
                Parameter::Key | Parameter::KeyRope if paged => {
                    // SAFETY: the caller's promise, for each of them.
                    let numbers =
                        |parameter| unsafe { integers(self, memory, addresses, parameter) };
                    let [queries, keys, table] = SparseFlashProblem::CONTENTS.map(numbers);
                    let lists = numbers(Parameter::SparseIndices);
                    // Without memory for them the launch fails with the same error.
                    if let (Ok(queries), Ok(keys), Ok(table), Ok(lists), Some(desc)) =
                        (queries, keys, table, lists, self.walked(argument.parameter))
                    {
                        self.read_keys((named, desc), &[queries, keys, table], &lists, reader);
                    }
                }
                // The operator reads no values but the keys.
                Parameter::Value => {}
                _ if reader.untouched(bytes.clone()) => {
                    let (start, count) = (bytes.start, bytes.len());
                    let whole = Elements::new(named, start, count, &[], None, Place::Whole);
                    whole.iter().for_each(|whole| reader.read(whole));
                }
                _ => {}
            }
        }
    }

    unsafe fn writes(
        &self,
        addresses: &Addresses,
        memory: &DeviceMemory,
        visit: &mut dyn FnMut(&Elements),
    ) {
        // SAFETY: the caller's promise.
        let lengths =
            unsafe { integers(self, memory, addresses, Parameter::ActualSeqLengthsQuery) };
        let contents = SparseContents {
            query_lengths: &lengths.unwrap_or_default(),
            ..SparseContents::default()
        };
        let ends = (self.problem.sequences.each(contents))
            .map(|sequence| sequence.first_query + sequence.written);
        let rows = ends.max().unwrap_or(0) as i64;
        let packed = self.problem.sequences.query.layout == TokenLayout::Tnd;
        for (parameter, axis) in [
            (Parameter::AttentionOut, 0),
            (Parameter::SoftmaxMax, 1),
            (Parameter::SoftmaxSum, 1),
        ] {
            if let Some(mut desc) = self.walked(parameter) {
                if packed {
                    desc.shape = desc.shape.with(axis, rows);
                }
                let named = self.named(parameter.into(), addresses);
                Elements::described(named, &desc)
                    .iter()
                    .for_each(&mut *visit);
            }
        }
    }

    unsafe fn compute(&self, addresses: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        let mut walked = [None; Parameter::ALL.len()];
        for &parameter in Parameter::ALL {
            walked[parameter as usize] = self.walked(parameter);
        }
        // SAFETY: the caller's promise.
        let launch = unsafe { Launch::new(self, self.check, addresses, memory) }?;
        let rows = |parameter: Parameter| {
            let desc = walked[parameter as usize].as_ref()?;
            let base = launch.base(parameter);
            Some(TokenRows { desc, base })
        };
        let (Some(query), Some(query_rope), Some(key), Some(key_rope), Some(out)) = (
            rows(Parameter::Query),
            rows(Parameter::QueryRope),
            rows(Parameter::Key),
            rows(Parameter::KeyRope),
            rows(Parameter::AttentionOut),
        ) else {
            return Ok(());
        };
        let parameters = SparseFlashProblem::CONTENTS;
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the outputs, the only tensors written, share no memory with them.
        let (numbers, lists) = unsafe {
            let numbers = sparse_contents::read(&launch, &self.problem.sequences, parameters)?;
            (numbers, launch.integers(Parameter::SparseIndices)?)
        };
        let softmax = rows(Parameter::SoftmaxMax).zip(rows(Parameter::SoftmaxSum));
        let buffers = Buffers {
            query,
            query_rope,
            key,
            key_rope,
            out,
            softmax: softmax.map(|(max, sum)| [max, sum]),
            lists: &lists,
        };
        let contents = SparseContents::of(&numbers);
        self.inspect_lists(&launch, contents, &lists)?;
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the outputs apart from
        // everything else.
        let run = unsafe { sparse_attention::run(&self.problem, contents, &buffers) };
        run.map_err(|why| launch.fault(why))
    }
}

sparse_flash_attention_arguments! { arguments_of_version {
    1 phase_one {
        aclnnSparseFlashAttentionGetWorkspaceSize, Arguments, executor_of(SparseFlashOperator::new)
    }
} }
phase_two!(aclnnSparseFlashAttention, Version::V1.symbol());
