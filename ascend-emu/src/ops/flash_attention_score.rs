//! FlashAttentionScore and FlashAttentionVarLenScore as an operator of the emulator.

use super::attention::{self, refused, within_reach};
use super::contiguous::{gather, scatter};
use super::declared::DeclaredOperator;
use super::entry_point::{phase_one, phase_two};
use super::launch::Launch;
use super::lints;
use super::phase_one::executor_of;
use super::{attention_contents, attention_reads};
use crate::config::{Check, check};
use crate::descriptor::Described;
use crate::elements::{Elements, Reader};
use crate::fault::Fault;
use crate::kernel::Buffers;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use crate::runtime::context;
use crate::status::Outcome;
use ascend_spec::attention_problem::{AttentionProblem, MaskUse, TensorRole};
use ascend_spec::operator::EntryPoint;
use ascend_spec::ops::flash_attention_score::{
    Argument, Arguments, Parameter, SoftmaxOrder, Version,
};
use ascend_spec::{
    Refusal, Target, TensorDesc, Unsupported, arguments_of_version,
    flash_attention_score_arguments, flash_attention_var_len_score_arguments,
};
use std::ops::Range;
use std::ptr;

/// A call that satisfies every rule.
#[derive(Debug)]
struct FlashAttentionOperator {
    arguments: Arguments<TensorDesc>,
    version: Version,
    /// What the call computes.
    problem: AttentionProblem<'static>,
    /// Bytes of each tensor that a launch touches, from the tensor's base address.
    touches: Vec<(Argument, Range<u64>)>,
    /// How strictly misuse that is found on the device is treated.
    check: Check,
    /// The order of maxima and sums, where it makes a difference.
    softmax_order: Option<SoftmaxOrder>,
}

/// Tensors that the kernels read and write only in row-major order: the operator makes contiguous copies of others.
const IN_ORDER: [(TensorRole, Parameter); 5] = [
    (TensorRole::Mask, Parameter::AttenMask),
    (TensorRole::Bias, Parameter::RealShift),
    (TensorRole::DropMask, Parameter::DropMask),
    (TensorRole::SoftmaxMax, Parameter::SoftmaxMax),
    (TensorRole::SoftmaxSum, Parameter::SoftmaxSum),
];

/// Largest number of elements of a contiguous copy. Tensors of stride 0 are small however many elements they have.
const MOST_COPIED: u64 = 1 << 32;

impl FlashAttentionOperator {
    /// Checks a call for a product and a release.
    fn new(arguments: Arguments<TensorDesc>, version: Version, target: Target) -> Outcome<Self> {
        let call = arguments.call();
        let checked = call.check(version, target);
        let checked = checked.map_err(|refusal| refused(version.symbol(), refusal))?;
        lints::report(version.symbol(), &arguments, |report| {
            checked.each_lint(report)
        })?;
        let problem = checked.attention().map_err(Refusal::from)?;
        within_reach(&problem).map_err(Refusal::from)?;
        let softmax_order = checked.softmax_order.matters(problem.packed, problem.heads);
        let problem = problem.into_owned();
        let mut op = FlashAttentionOperator {
            arguments,
            version,
            problem,
            touches: Vec::new(),
            check: check(),
            softmax_order,
        };
        op.touches = op.find_touches()?;
        Ok(op)
    }

    fn find_touches(&self) -> Outcome<Vec<(Argument, Range<u64>)>> {
        let mut touches = Vec::new();
        let mut large = false;
        self.problem.touches(&mut |role, range| {
            let Some(parameter) = Parameter::of_role(role) else {
                return;
            };
            let range = match self.copied(role) {
                Some(desc) => {
                    let elements = desc.elements().unwrap_or(u64::MAX);
                    large |= elements > MOST_COPIED;
                    // The elements of the copy are contiguous.
                    let copy = TensorDesc::packed(desc.dtype, desc.shape).byte_range();
                    let walked = range.zip(copy);
                    let inside = walked.is_some_and(|(range, copy)| range.end <= copy.end);
                    desc.byte_range().filter(|_| inside)
                }
                None => range,
            };
            // A range that no memory could hold is refused by the allocation table.
            touches.push((parameter.into(), range.unwrap_or(0..u64::MAX)));
        });
        match large {
            true => Err(Refusal::from(Unsupported::new(
                "a mask, bias or output of more than 4294967296 elements that is not contiguous",
            ))
            .into()),
            false => Ok(touches),
        }
    }

    /// The description of the tensor with a role, if its elements are read or written through a contiguous copy.
    fn copied(&self, role: TensorRole) -> Option<&TensorDesc> {
        let (_, parameter) = IN_ORDER.iter().find(|(of, _)| *of == role)?;
        let by_order = match role {
            TensorRole::Mask => self.problem.mask == MaskUse::OfSequences,
            // Slopes are read in place.
            TensorRole::Bias => self.problem.bias.is_some(),
            _ => true,
        };
        let desc = self.arguments.tensor(*parameter)?;
        (by_order && !desc.is_contiguous()).then_some(desc)
    }

    /// Does the work of a launch.
    fn attend(&self, launch: &Launch<'_, Self>) -> Result<(), Fault> {
        let mut copies: Vec<(TensorRole, Vec<u8>)> = Vec::new();
        for (role, parameter) in IN_ORDER {
            if let Some(desc) = self.copied(role) {
                // SAFETY: the ranges of `touches`, which has all of this tensor, are live and locked for the task
                // that runs this.
                let copy = unsafe { gather(desc, launch.base(parameter)) };
                let copy = copy.map_err(|why| launch.fault(why))?;
                copies.push((role, copy));
            }
        }
        let copy_addresses: Vec<(TensorRole, *mut u8)> = copies
            .iter_mut()
            .map(|(role, copy)| (*role, copy.as_mut_ptr()))
            .collect();
        let base = |role: TensorRole| {
            let copy = copy_addresses.iter().find(|(of, _)| *of == role);
            match (copy, Parameter::of_role(role)) {
                (Some((_, copy)), _) => *copy,
                (None, Some(parameter)) => launch.base(parameter),
                (None, None) => ptr::null_mut(),
            }
        };
        let name = |role| Parameter::of_role(role).map(|parameter| parameter.info().acl_name);
        // SAFETY: the ranges that `AttentionProblem::touches` reports are those of `touches`: live (the allocation
        // table let the launch in), locked for the task that runs this, and, as the launch has found, with outputs
        // apart from everything else. Copies have all elements of their tensors.
        unsafe { attention_contents::inspect(launch, &self.problem, &Buffers(&base), &name) }?;
        // SAFETY: as above.
        unsafe { attention::run(&self.problem, &Buffers(&base)) }?;
        for (role, copy) in &copies {
            let output = Parameter::of_role(*role).filter(|parameter| parameter.is_output());
            if let (Some(parameter), Some(desc)) = (output, self.copied(*role)) {
                // SAFETY: as above.
                unsafe { scatter(desc, copy, launch.base(parameter)) };
            }
        }
        Ok(())
    }
}

impl DeclaredOperator for FlashAttentionOperator {
    type Arguments = Arguments<TensorDesc>;

    fn symbol(&self) -> &'static str {
        self.version.symbol()
    }

    fn entry_point(&self) -> EntryPoint<Parameter> {
        self.version.entry_point()
    }

    fn arguments(&self) -> &Self::Arguments {
        &self.arguments
    }

    fn is_idle(&self) -> bool {
        self.touches.is_empty()
    }

    fn touches(&self, visit: &mut dyn FnMut(Argument, Range<u64>)) {
        for (argument, range) in &self.touches {
            visit(*argument, range.clone());
        }
    }

    unsafe fn reads(&self, at: &Addresses, memory: &DeviceMemory, reader: &mut dyn Reader) {
        let of_role = |role| Parameter::of_role(role).map(Argument::from);
        // SAFETY: the caller's promise.
        unsafe { attention_reads::reads(self, &self.problem, &of_role, (at, memory), reader) };
    }

    unsafe fn writes(&self, at: &Addresses, _: &DeviceMemory, visit: &mut dyn FnMut(&Elements)) {
        self.written(at, &mut |argument, elements| {
            let of_softmax =
                [Parameter::SoftmaxMax, Parameter::SoftmaxSum].contains(&argument.parameter);
            let order = self.softmax_order.filter(|_| of_softmax);
            visit(&elements.in_order(order.map(SoftmaxOrder::name)));
        });
    }

    unsafe fn compute(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        if self.is_idle() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        self.attend(&unsafe { Launch::new(self, self.check, at, memory) }?)
    }
}

fn new(version: Version) -> impl FnOnce(&Arguments<Described>) -> Outcome<FlashAttentionOperator> {
    move |arguments| {
        let descs = arguments.map(|_, tensor| tensor.desc);
        FlashAttentionOperator::new(descs, version, context::machine().target)
    }
}

/// Defines both functions of a version.
macro_rules! version {
    (dense $number:tt $version:ident: $one:ident, $two:ident) => {
        flash_attention_score_arguments! { arguments_of_version {
            $number phase_one { $one, Arguments, executor_of(new(Version::$version)) }
        } }
        phase_two!($two, Version::$version.symbol());
    };
    (packed $number:tt $version:ident: $one:ident, $two:ident) => {
        flash_attention_var_len_score_arguments! {
            $number phase_one { $one, Arguments, executor_of(new(Version::$version)) }
        }
        phase_two!($two, Version::$version.symbol());
    };
}

version! { dense 1 V1: aclnnFlashAttentionScoreGetWorkspaceSize, aclnnFlashAttentionScore }
version! { dense 2 V2: aclnnFlashAttentionScoreV2GetWorkspaceSize, aclnnFlashAttentionScoreV2 }
version! { dense 3 V3: aclnnFlashAttentionScoreV3GetWorkspaceSize, aclnnFlashAttentionScoreV3 }
version! { dense 4 V4: aclnnFlashAttentionScoreV4GetWorkspaceSize, aclnnFlashAttentionScoreV4 }
version! {
    packed 1 VarLenV1: aclnnFlashAttentionVarLenScoreGetWorkspaceSize, aclnnFlashAttentionVarLenScore
}
version! {
    packed 2 VarLenV2: aclnnFlashAttentionVarLenScoreV2GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV2
}
version! {
    packed 3 VarLenV3: aclnnFlashAttentionVarLenScoreV3GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV3
}
version! {
    packed 4 VarLenV4: aclnnFlashAttentionVarLenScoreV4GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV4
}
version! {
    packed 5 VarLenV5: aclnnFlashAttentionVarLenScoreV5GetWorkspaceSize, aclnnFlashAttentionVarLenScoreV5
}
