//! NsaSelectedAttentionInfer as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use super::paged_tokens::{inspect_table, read_tokens, read_whole};
use crate::elements::Reader;
use crate::finding_kind::FindingKind;
use crate::kernel::native_sparse::{self, Buffers, HeadRow};
use crate::kernel::token_rows::TokenRows;
use crate::status::Outcome;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::nsa_selected_attention_infer::{
    Argument, Arguments, NsaSelectedProblem, Parameter, SelectionFault, Version,
};
use ascend_spec::ops::sparse_sequences::{SparseContents, SparseSequence};
use ascend_spec::{TensorDesc, nsa_selected_attention_infer_arguments};

checked_call! { SelectedAttentionOperator: NsaSelectedProblem, target }

impl SelectedAttentionOperator {
    /// Reports the first list by which a row attends to other tokens than it seems to say; in strict mode that is a
    /// device fault.
    fn inspect(&self, launch: &Launch<'_, Self>, contents: SparseContents<'_>, lists: &[i64]) -> Outcome {
        let (problem, sequences) = (&self.problem, &self.problem.attention.sequences);
        let tensor = Parameter::TopkIndices.acl_name();
        let mut seen = Vec::new();
        for sequence in sequences.each(contents) {
            for row in 0..sequence.queries {
                let (tokens, index) = (sequence.keys, sequence.index);
                let list = |kv_head| problem.list(lists, sequence.first_query + row, kv_head);
                for kv_head in 0..problem.attention.kv_heads {
                    let place = format_args!("{tensor}: row {row} of sequence {index}, key head {kv_head}");
                    if let Some(fault) = problem.fault(list(kv_head), tokens, &mut seen) {
                        let kind = match fault {
                            SelectionFault::Twice { .. } => FindingKind::RepeatedBlock,
                            SelectionFault::Beyond { .. } | SelectionFault::Behind { .. } => FindingKind::SkippedEntry,
                        };
                        return launch.suspect(kind, tensor, format_args!("{place}: {fault}"));
                    }
                    if problem.differs(list(0), list(kv_head), tokens) {
                        let why = "another number of blocks than key head 0, or others of the last two, which the \
                                   operator takes from that head";
                        return launch.suspect(FindingKind::SkippedEntry, tensor, format_args!("{place}: {why}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Calls `visit` with the tokens that a row of a key head attends to.
    fn chosen(&self, lists: &[i64], row: &HeadRow, visit: &mut dyn FnMut(usize)) {
        let tokens = self.problem.attention.sequences.candidates(&row.sequence, row.row);
        let list = self.problem.list(lists, row.number(), row.kv_head);
        self.problem.chosen(list, tokens).flatten().for_each(visit);
    }
}

impl DeclaredOperator for SelectedAttentionOperator {
    declared_by_problem! {}

    unsafe fn reads(&self, launch: &Launch<'_, Self>, reader: &mut dyn Reader) {
        for (argument, bytes) in launch.doubtful(reader) {
            let named = launch.named(argument);
            match (argument.parameter, self.arguments.tensor(argument)) {
                (Parameter::Key | Parameter::Value, Some(desc)) => {
                    // SAFETY: the caller's promise. Without memory for them the launch fails with the same error.
                    let held = |parameter: Parameter| unsafe { launch.integers(parameter) };
                    let table = held(Parameter::BlockTable).unwrap_or_default();
                    let lists = held(Parameter::TopkIndices).unwrap_or_default();
                    let numbers = self.arguments.call().numbers(&self.problem, table);
                    let mark = |sequence: &SparseSequence, read: &mut [bool]| {
                        let heads = self.problem.attention.kv_heads;
                        let rows = (0..sequence.queries).flat_map(|row| (0..heads).map(move |head| (row, head)));
                        for (row, kv_head) in rows {
                            let row = HeadRow { sequence: *sequence, row, kv_head };
                            self.chosen(&lists, &row, &mut |token| read[token] = true);
                        }
                    };
                    let contents = SparseContents::of(&numbers);
                    read_tokens(&self.problem.attention.sequences, contents, (named, *desc), &mark, reader);
                }
                _ => read_whole(named, bytes, reader),
            }
        }
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        let Arguments { query: Some(query), key: Some(key), value: Some(value), output: Some(output), .. } =
            &self.arguments
        else {
            return Ok(());
        };
        let attention = &self.problem.attention;
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the output, the only tensor written, shares no memory with them.
        let (table, lists) =
            unsafe { (launch.integers(Parameter::BlockTable)?, launch.integers(Parameter::TopkIndices)?) };
        let numbers = self.arguments.call().numbers(&self.problem, table);
        let contents = SparseContents::of(&numbers);
        inspect_table(launch, &attention.sequences, contents, Parameter::BlockTable)?;
        self.inspect(launch, contents, &lists)?;
        let descs = [attention.query(query), attention.cache(key), attention.cache(value), attention.query(output)];
        let rows = |parameter: Parameter, desc| TokenRows { desc, base: launch.base(parameter) };
        let buffers = Buffers {
            query: rows(Parameter::Query, &descs[0]),
            key: rows(Parameter::Key, &descs[1]),
            value: rows(Parameter::Value, &descs[2]),
            out: rows(Parameter::Output, &descs[3]),
        };
        let tokens = |row: &HeadRow, visit: &mut dyn FnMut(usize)| self.chosen(&lists, row, visit);
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the output apart from
        // everything else.
        let run = unsafe { native_sparse::attend(attention, contents, &buffers, &tokens) };
        run.map_err(|why| launch.fault(why))
    }
}

c_functions! {
    nsa_selected_attention_infer_arguments;
    1 V1: aclnnNsaSelectedAttentionInferGetWorkspaceSize, aclnnNsaSelectedAttentionInfer
        => SelectedAttentionOperator::new;
}
