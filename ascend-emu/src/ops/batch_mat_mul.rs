//! BatchMatMul as an operator of the emulator.
//!
//! `cubeMathType` makes no difference: factors are multiplied as they are, in single precision.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use crate::kernel::batch_mat_mul;
use crate::kernel::token_rows::TokenRows;
use crate::status::Outcome;
use ascend_spec::ops::batch_mat_mul::{Argument, Arguments, BatchMatMulProblem, Parameter, Version};
use ascend_spec::{TensorDesc, batch_mat_mul_arguments};

checked_call! { BatchMatMulOperator: BatchMatMulProblem, target.soc }

/// Copies the bytes of a tensor before the output is written. Returns the copy, and the base address from which the
/// description leads to the copy.
///
/// # Safety
///
/// The tensor's bytes may be read.
unsafe fn copy_of(desc: &TensorDesc, base: *const u8) -> Result<(Vec<u8>, *mut u8), String> {
    let range = desc.byte_range().unwrap_or(0..0);
    let (start, bytes) = (range.start as usize, (range.end - range.start) as usize);
    let mut copy: Vec<u8> = Vec::new();
    (copy.try_reserve_exact(bytes)).map_err(|_| format!("no host memory for {bytes} bytes"))?;
    // SAFETY: the caller's promise; the copy has room for as many bytes, which it has afterwards.
    unsafe {
        let first = base.wrapping_add(start);
        first.copy_to_nonoverlapping(copy.as_mut_ptr(), bytes);
        copy.set_len(bytes);
    }
    let base = copy.as_mut_ptr().wrapping_sub(start);
    Ok((copy, base))
}

impl DeclaredOperator for BatchMatMulOperator {
    declared_by_problem! {}

    unsafe fn run(&self, launch: &Launch<'_, Self>) -> Outcome {
        match self.is_idle() {
            true => Ok(()),
            // SAFETY: the caller's promise; `compute` copies the factors that the output overlaps.
            false => unsafe { self.compute(launch) },
        }
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        let Arguments { self_: Some(left), mat2: Some(right), out: Some(out), .. } = &self.arguments else {
            return Ok(());
        };
        let placed = |parameter: Parameter, desc| TokenRows { desc, base: launch.base(parameter) };
        let bytes = |matrices: &TokenRows<'_>| {
            let range = matrices.desc.byte_range().unwrap_or(0..0);
            let base = matrices.base.addr();
            base.saturating_add(range.start as usize)..base.saturating_add(range.end as usize)
        };
        let out = placed(Parameter::Out, out);
        let written = bytes(&out);
        let factors = [(Parameter::SelfMatrices, left), (Parameter::Mat2, right)];
        let mut factors = factors.map(|(parameter, desc)| placed(parameter, desc));
        // PyTorch may let views of one tensor interleave: factors are read before the output is written.
        let mut copies = Vec::new();
        let mut multiply = || {
            for factor in &mut factors {
                let read = bytes(factor);
                if read.start < written.end && written.start < read.end {
                    // SAFETY: the ranges of `touches` are live and locked for the task that runs this.
                    let (copy, base) = unsafe { copy_of(factor.desc, factor.base) }?;
                    copies.push(copy);
                    factor.base = base;
                }
            }
            // SAFETY: the ranges of `touches` are live and locked for the task that runs this, and the parts that
            // they share with the output were copied; the problem is of these descriptions.
            unsafe { batch_mat_mul::run(&self.problem, factors, out) }
        };
        multiply().map_err(|why| launch.fault(why))
    }
}

c_functions! {
    batch_mat_mul_arguments;
    1 V1: aclnnBatchMatMulGetWorkspaceSize, aclnnBatchMatMul => BatchMatMulOperator::new;
}
