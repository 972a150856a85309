//! BlockSparseAttention as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use super::paged_tokens::read_whole;
use crate::elements::{Elements, Place, Reader};
use crate::finding_kind::FindingKind;
use crate::kernel::block_sparse::{self, Buffers};
use crate::kernel::token_rows::TokenRows;
use crate::status::Outcome;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::block_sparse_attention::{
    Argument, Arguments, BlockFaultKind, BlockSparseProblem, Parameter, Version,
};
use ascend_spec::{TensorDesc, block_sparse_attention_arguments};
use std::collections::BTreeSet;
use std::ops::Range;

checked_call! { BlockSparseOperator: BlockSparseProblem, target }

/// Rows of a tensor: an entry of its axis of sequences, heads, and rows.
type Rows = (usize, Range<usize>, Range<usize>);

impl BlockSparseOperator {
    /// A tensor as a launch walks it.
    fn walked(&self, parameter: Parameter) -> Option<TensorDesc> {
        let desc = self.arguments.tensor(parameter)?;
        (self.problem).walked(&self.arguments.call(), parameter, desc)
    }

    /// The bytes of the mask.
    ///
    /// # Errors
    /// A device fault if there is no host memory for them.
    ///
    /// # Safety
    ///
    /// The bytes of the mask that a launch touches are live and written by no other thread.
    unsafe fn mask(&self, launch: &Launch<'_, Self>) -> Outcome<Vec<u8>> {
        let parameter = Parameter::BlockSparseMask;
        match self.walked(parameter) {
            None => Ok(Vec::new()),
            // SAFETY: the caller's promise.
            Some(walked) => unsafe { launch.bytes(parameter, walked) },
        }
    }

    /// Reports of each kind the first block of rows that sees other keys than the mask seems to say; in strict mode
    /// that is a device fault.
    fn inspect(&self, launch: &Launch<'_, Self>, mask: &[u8]) -> Outcome {
        let tensor = Parameter::BlockSparseMask.acl_name();
        let mut found = BTreeSet::new();
        for fault in self.problem.faults(&self.arguments.call(), mask) {
            let kind = match fault.kind {
                BlockFaultKind::Beyond { .. } => FindingKind::SkippedEntry,
                BlockFaultKind::Value { .. } => FindingKind::MaskByte,
                BlockFaultKind::Empty => FindingKind::HiddenRow,
            };
            if found.insert(kind) {
                launch.suspect(kind, tensor, format_args!("{tensor}{fault}"))?;
            }
        }
        Ok(())
    }

    /// The elements of some rows of a tensor.
    fn rows(&self, parameter: Parameter, launch: &Launch<'_, Self>, (batch, heads, rows): Rows) -> Option<Elements> {
        let desc = self.walked(parameter)?;
        let view = self.problem.axes.view(&desc, 0)?;
        let size = desc.dtype.size()?;
        let bytes = |elements: i64| elements.saturating_mul(size as i64);
        let named = launch.named(parameter);
        let place = bytes(view.at(batch, heads.start, rows.start));
        let dim = desc.shape.last().map_or(0, |&dim| dim.max(0) as usize);
        let axes = [(heads.len(), bytes(view.head)), (rows.len(), bytes(view.row)), (dim, bytes(view.dim))];
        let first = named.address.saturating_add_signed(place as isize);
        Elements::new(named, first, size, &axes, Some(1), Place::Whole)
    }

    /// The rows of keys that some row sees.
    fn keys_read(&self, mask: &[u8]) -> Vec<Rows> {
        let problem = &self.problem;
        let mut read = BTreeSet::new();
        for block in problem.row_blocks(&self.arguments.call()) {
            let (sequence, head) = (block.sequence, problem.kv_head(block.head));
            let selected = problem.selected(problem.bytes(&block, mask), sequence.keys);
            let first = sequence.first_key;
            read.extend(selected.map(|keys| {
                let (start, end) = (first + keys.start, first + keys.end);
                (sequence.batch, head, start, end)
            }));
        }
        let rows = read.into_iter();
        rows.map(|(batch, head, start, end)| (batch, head..head + 1, start..end)).collect()
    }

    /// The rows that a launch writes: those that see some key.
    fn rows_written(&self, mask: &[u8]) -> Vec<Rows> {
        let problem = &self.problem;
        let mut written: Vec<Rows> = Vec::new();
        for block in problem.row_blocks(&self.arguments.call()) {
            let sequence = block.sequence;
            let mut selected = problem.selected(problem.bytes(&block, mask), sequence.keys);
            if selected.next().is_none() {
                continue;
            }
            let first = sequence.first_query;
            let rows = first + block.rows.start..first + block.rows.end;
            match written.last_mut() {
                Some((batch, heads, before))
                    if (*batch, heads.start, before.end) == (sequence.batch, block.head, rows.start) =>
                {
                    before.end = rows.end;
                }
                _ => written.push((sequence.batch, block.head..block.head + 1, rows)),
            }
        }
        written
    }
}

impl DeclaredOperator for BlockSparseOperator {
    declared_by_problem! { with overruns }

    unsafe fn reads(&self, launch: &Launch<'_, Self>, reader: &mut dyn Reader) {
        for (argument, bytes) in launch.doubtful(reader) {
            let parameter = argument.parameter;
            let rows: Vec<Rows> = match parameter {
                Parameter::Query => {
                    let sequences = self.problem.sequences(&self.arguments.call());
                    let heads = 0..self.problem.heads;
                    let rows = sequences.map(|sequence| {
                        let first = sequence.first_query;
                        let rows = first..first + sequence.queries;
                        (sequence.batch, heads.clone(), rows)
                    });
                    rows.collect()
                }
                Parameter::Key | Parameter::Value => {
                    // SAFETY: the caller's promise. Without memory for the mask the launch fails with the same error.
                    unsafe { self.mask(launch) }.map(|mask| self.keys_read(&mask)).unwrap_or_default()
                }
                _ => {
                    read_whole(launch.named(argument), bytes, reader);
                    continue;
                }
            };
            for rows in rows {
                let elements = self.rows(parameter, launch, rows);
                elements.iter().for_each(|elements| reader.read(elements));
            }
        }
    }

    unsafe fn writes(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
        // SAFETY: the caller's promise. Without memory for the mask the launch has failed.
        let mask = unsafe { self.mask(launch) }.unwrap_or_default();
        for rows in self.rows_written(&mask) {
            for parameter in [Parameter::AttentionOut, Parameter::SoftmaxLse] {
                let elements = self.rows(parameter, launch, rows.clone());
                elements.iter().for_each(&mut *visit);
            }
        }
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        let mut walked = [None; Parameter::ALL.len()];
        for &parameter in Parameter::ALL {
            walked[parameter as usize] = self.walked(parameter);
        }
        let rows = |parameter: Parameter| {
            let desc = walked[parameter as usize].as_ref()?;
            let base = launch.base(parameter);
            Some(TokenRows { desc, base })
        };
        let (Some(query), Some(key), Some(value), Some(out)) =
            (rows(Parameter::Query), rows(Parameter::Key), rows(Parameter::Value), rows(Parameter::AttentionOut))
        else {
            return Ok(());
        };
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the outputs, the only tensors written, share no memory with them.
        let mask = unsafe { self.mask(launch) }?;
        self.inspect(launch, &mask)?;
        let buffers = Buffers { query, key, value, out, lse: rows(Parameter::SoftmaxLse), mask: &mask };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the outputs apart from
        // everything else.
        let run = unsafe { block_sparse::run(&self.problem, &self.arguments.call(), &buffers) };
        run.map_err(|why| launch.fault(why))
    }
}

c_functions! {
    block_sparse_attention_arguments;
    1 V1: aclnnBlockSparseAttentionGetWorkspaceSize, aclnnBlockSparseAttention => BlockSparseOperator::new;
}
