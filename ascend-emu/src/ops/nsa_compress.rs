//! NsaCompress as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use super::paged_tokens::read_whole;
use crate::elements::{Elements, Reader};
use crate::kernel::compression::{self, Buffers};
use crate::kernel::token_rows::TokenRows;
use crate::status::Outcome;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::nsa_compress::{Argument, Arguments, NsaCompressProblem, Parameter, Version};
use ascend_spec::{TensorDesc, nsa_compress_arguments};

checked_call! { NsaCompressOperator: NsaCompressProblem, target }

impl NsaCompressOperator {
    /// A tensor as a launch walks it.
    fn walked(&self, parameter: Parameter) -> Option<TensorDesc> {
        let desc = self.arguments.tensor(parameter)?;
        self.problem.walked(&self.arguments.call(), parameter, desc)
    }
}

impl DeclaredOperator for NsaCompressOperator {
    declared_by_problem! { with overruns }

    unsafe fn reads(&self, launch: &Launch<'_, Self>, reader: &mut dyn Reader) {
        for (argument, bytes) in launch.doubtful(reader) {
            read_whole(launch.named(argument), bytes, reader);
        }
    }

    unsafe fn writes(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
        let written = self.walked(Parameter::Output);
        let written = written.and_then(|desc| Elements::described(launch.named(Parameter::Output), &desc));
        written.iter().for_each(visit);
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        let walked = [Parameter::Input, Parameter::Weight, Parameter::Output].map(|parameter| self.walked(parameter));
        let [Some(input), Some(weight), Some(output)] = &walked else {
            return Ok(());
        };
        let rows = |parameter: Parameter, desc| TokenRows { desc, base: launch.base(parameter) };
        let buffers = Buffers {
            input: rows(Parameter::Input, input),
            weight: rows(Parameter::Weight, weight),
            out: rows(Parameter::Output, output),
            paged: false,
        };
        let firsts: Vec<usize> = self.problem.firsts(self.arguments.call().act_seq_len.unwrap_or_default()).collect();
        let targets: Vec<usize> = (0..firsts.len()).collect();
        let find = |block: usize, token: usize| Some((0, firsts.get(block)? + token));
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the output apart from
        // everything else. Blocks lie within the input, and the output has a row for each.
        unsafe { compression::run(&buffers, &targets, &find) };
        Ok(())
    }
}

c_functions! {
    nsa_compress_arguments;
    1 V1: aclnnNsaCompressGetWorkspaceSize, aclnnNsaCompress => NsaCompressOperator::new;
}
