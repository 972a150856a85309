//! NsaCompressAttentionInfer as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use super::paged_tokens::{inspect_table, read_tokens, read_whole};
use crate::elements::Reader;
use crate::kernel::element_view::ElementView;
use crate::kernel::native_sparse::{self, Buffers, HeadRow};
use crate::kernel::token_rows::TokenRows;
use crate::status::Outcome;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::nsa_compress_attention_infer::{
    Argument, Arguments, NsaCompressAttentionProblem, Parameter, Version,
};
use ascend_spec::ops::sparse_sequences::SparseContents;
use ascend_spec::{TensorDesc, nsa_compress_attention_infer_arguments};

checked_call! { CompressAttentionOperator: NsaCompressAttentionProblem, target }

impl DeclaredOperator for CompressAttentionOperator {
    declared_by_problem! {}

    unsafe fn reads(&self, launch: &Launch<'_, Self>, reader: &mut dyn Reader) {
        for (argument, bytes) in launch.doubtful(reader) {
            let named = launch.named(argument);
            match (argument.parameter, self.arguments.tensor(argument)) {
                (Parameter::Key | Parameter::Value, Some(desc)) => {
                    // SAFETY: the caller's promise. Without memory for the table the launch fails with the same error.
                    let table = unsafe { launch.integers(Parameter::BlockTable) };
                    let numbers = self.arguments.call().numbers(&self.problem, table.unwrap_or_default());
                    let (sequences, contents) = (&self.problem.attention.sequences, SparseContents::of(&numbers));
                    read_tokens(sequences, contents, (named, *desc), &|_, read| read.fill(true), reader);
                }
                _ => read_whole(named, bytes, reader),
            }
        }
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        let Arguments {
            query: Some(query),
            key: Some(key),
            value: Some(value),
            output: Some(output),
            top_k_output: Some(selected),
            ..
        } = &self.arguments
        else {
            return Ok(());
        };
        let (problem, attention) = (&self.problem, &self.problem.attention);
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the outputs, the only tensors written, share no memory with them.
        let table = unsafe { launch.integers(Parameter::BlockTable) }?;
        let numbers = self.arguments.call().numbers(problem, table);
        let contents = SparseContents::of(&numbers);
        inspect_table(launch, &attention.sequences, contents, Parameter::BlockTable)?;
        let descs = [attention.query(query), attention.cache(key), attention.cache(value)];
        let rows = |parameter: Parameter, desc| TokenRows { desc, base: launch.base(parameter) };
        let buffers = Buffers {
            query: rows(Parameter::Query, &descs[0]),
            key: rows(Parameter::Key, &descs[1]),
            value: rows(Parameter::Value, &descs[2]),
            out: rows(Parameter::Output, output),
        };
        let original = self.arguments.actual_sel_kv_seq_len.as_deref();
        let visible = |row: &HeadRow| {
            let original = original.and_then(|original| original.get(row.sequence.index)).copied();
            problem.visible(&row.sequence, row.row, original)
        };
        let selected = ElementView::new(launch.first(Parameter::TopKOutput), *selected);
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the outputs apart from
        // everything else.
        let run = unsafe {
            let tokens = |row: &HeadRow, visit: &mut dyn FnMut(usize)| (0..visible(row)).for_each(visit);
            native_sparse::attend(attention, contents, &buffers, &tokens).and_then(|()| {
                native_sparse::select(problem, contents, [buffers.query, buffers.key], &visible, selected)
            })
        };
        run.map_err(|why| launch.fault(why))
    }
}

c_functions! {
    nsa_compress_attention_infer_arguments;
    1 V1: aclnnNsaCompressAttentionInferGetWorkspaceSize, aclnnNsaCompressAttentionInfer
        => CompressAttentionOperator::new;
}
