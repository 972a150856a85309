//! FusedInferAttentionScore as an operator of the emulator.

use super::attention::{self, refused, within_reach};
use super::declared::DeclaredOperator;
use super::entry_point::{phase_one, phase_two};
use super::launch::Launch;
use super::lints;
use super::phase_one::executor_of;
use super::{attention_contents, attention_reads};
use crate::config::{Check, check};
use crate::descriptor::Described;
use crate::elements::Reader;
use crate::fault::Fault;
use crate::kernel::Buffers;
use crate::memory::DeviceMemory;
use crate::observe::{ObservedCall, observer};
use crate::operator::Addresses;
use crate::runtime::context;
use crate::status::{ACLNN_INNER, DEVICE_INTERNAL, Outcome, contain};
use ascend_spec::attention_problem::{AttentionProblem, TensorRole};
use ascend_spec::ops::fused_infer_attention_score::{Argument, Arguments, Version};
use ascend_spec::{
    Level, Refusal, Target, TensorDesc, arguments_of_version, fused_infer_attention_score_arguments,
};
use ascend_sys::bindings::aclOpExecutor;
use std::ops::Range;

/// A call that satisfies every rule.
#[derive(Debug)]
struct FiaOperator {
    arguments: Arguments<TensorDesc>,
    version: Version,
    target: Target,
    /// What the call computes.
    problem: AttentionProblem<'static>,
    /// Bytes of each tensor that a launch touches, from the tensor's base address.
    touches: Vec<(Argument, Range<u64>)>,
    /// Whether the call breaks a lint by which the device may access memory outside of the call's tensors.
    overruns: bool,
    /// How strictly misuse that is found on the device is treated.
    check: Check,
    /// Whether the length arrays are placeholders, with which nothing can be computed.
    measured: bool,
}

impl FiaOperator {
    /// Checks a call for a product and a release.
    fn new(arguments: Arguments<TensorDesc>, version: Version, target: Target) -> Outcome<Self> {
        let Some(observer) = observer() else {
            return FiaOperator::checked(arguments, version, target, false);
        };
        let kept = arguments.clone();
        FiaOperator::checked(arguments, version, target, false).inspect_err(|failure| {
            let call = kept.call();
            let observed = ObservedCall::unread(&call, version, target);
            let _ = contain(ACLNN_INNER, || {
                observer.refused(&observed, &failure.message);
                Ok(())
            });
        })
    }

    fn checked(
        arguments: Arguments<TensorDesc>,
        version: Version,
        target: Target,
        measured: bool,
    ) -> Outcome<Self> {
        let mut touches = Vec::new();
        let call = arguments.call();
        let checked = call.check(version, target);
        let checked = checked.map_err(|refusal| refused(version.symbol(), refusal))?;
        let mut overruns = false;
        lints::report(version.symbol(), &arguments, |report| {
            checked.each_lint(&mut |lint| {
                overruns |= lint.rule.overruns;
                // Lints about placeholder lengths do not apply to the later lengths.
                if !measured || lint.rule.level == Level::HostCrash {
                    report(lint);
                }
            });
        })?;
        within_reach(&checked.problem).map_err(Refusal::from)?;
        checked.touches(&mut |argument, range| {
            // A range that no memory could hold is refused by the allocation table.
            touches.push((argument, range.unwrap_or(0..u64::MAX)));
        });
        let problem = checked.problem.into_owned();
        Ok(FiaOperator {
            problem,
            arguments,
            version,
            target,
            touches,
            overruns,
            check: check(),
            measured,
        })
    }

    /// Checks a call whose lengths the operator does not know, to find the workspace that is enough for all lengths.
    fn measured(
        mut arguments: Arguments<TensorDesc>,
        version: Version,
        target: Target,
    ) -> Outcome<Self> {
        let unread = arguments.call().unread_lengths(version, target);
        let unread = unread.map_err(|refusal| refused(version.symbol(), refusal))?;
        arguments.actual_seq_lengths = unread.actual_seq_lengths;
        arguments.actual_seq_lengths_kv = unread.actual_seq_lengths_kv;
        arguments.actual_shared_prefix_len = unread.actual_shared_prefix_len;
        let measured = arguments.actual_seq_lengths.is_some()
            || arguments.actual_seq_lengths_kv.is_some()
            || arguments.actual_shared_prefix_len.is_some();
        FiaOperator::checked(arguments, version, target, measured)
    }
}

impl DeclaredOperator for FiaOperator {
    type Arguments = Arguments<TensorDesc>;

    fn symbol(&self) -> &'static str {
        self.version.symbol()
    }

    fn version(&self) -> u8 {
        self.version.number()
    }

    fn arguments(&self) -> &Self::Arguments {
        &self.arguments
    }

    fn is_idle(&self) -> bool {
        match self.measured {
            // A call with other lengths may have something to compute.
            true => (self.arguments.query.as_ref()).is_none_or(TensorDesc::is_empty),
            false => self.touches.is_empty(),
        }
    }

    fn overruns(&self) -> bool {
        self.overruns
    }

    fn unlaunchable(&self) -> Option<&'static str> {
        self.measured.then_some(
            "the executor is of GetMaxWorkspaceSize, which keeps no lengths: launch one of GetWorkspaceSize",
        )
    }

    fn touches(&self, visit: &mut dyn FnMut(Argument, Range<u64>)) {
        for (argument, range) in &self.touches {
            visit(*argument, range.clone());
        }
    }

    unsafe fn reads(&self, at: &Addresses, memory: &DeviceMemory, reader: &mut dyn Reader) {
        let of_role = |role| Some(Argument::of_role(role));
        // SAFETY: the caller's promise.
        unsafe { attention_reads::reads(self, &self.problem, &of_role, (at, memory), reader) };
    }

    unsafe fn compute(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        let launch = unsafe { Launch::new(self, self.check, at, memory) };
        let outcome = launch.and_then(|launch| self.attend(&launch));
        if let Some(observer) = observer() {
            let call = self.arguments.call();
            let base = |argument| at.get(argument);
            let observed = ObservedCall::unread(&call, self.version, self.target);
            // SAFETY: the ranges are those of `touches`: live, and locked for the task that runs this, which has
            // finished writing.
            let observed = unsafe { observed.with_tensors(memory, &self.touches, &base) };
            let told = outcome.as_ref().map(|_| ());
            let told = told.map_err(|fault| fault.message.as_str());
            // A failure of the observer fails no call.
            let _ = contain(DEVICE_INTERNAL, || {
                observer.ran(&observed, told);
                Ok(())
            });
        }
        outcome
    }
}

impl FiaOperator {
    /// Does the work of a launch.
    fn attend(&self, launch: &Launch<'_, Self>) -> Result<(), Fault> {
        let problem = &self.problem;
        let base = |role: TensorRole| launch.base(Argument::of_role(role));
        let buffers = Buffers(&base);
        let name = |role| Some(Argument::of_role(role).acl_name());
        // SAFETY: the ranges that `AttentionProblem::touches` reports are those of `touches`: live (the allocation
        // table let the launch in), locked for the task that runs this, and with outputs apart from everything else.
        unsafe { attention_contents::inspect(launch, problem, &buffers, &name) }?;
        // SAFETY: as above.
        unsafe { attention::run(problem, &buffers) }
    }
}

/// The purpose of a phase one.
#[derive(Clone, Copy)]
enum Purpose {
    /// `GetWorkspaceSize`.
    Launch,
    /// `GetMaxWorkspaceSize`: the workspace that is enough for all lengths.
    Measure,
}

/// Phase one.
///
/// # Safety
///
/// The pointers are null or valid for writing.
unsafe fn prepare(
    version: Version,
    purpose: Purpose,
    read: impl FnOnce() -> Outcome<Arguments<Described>>,
    workspace_size: *mut u64,
    executor: *mut *mut aclOpExecutor,
) -> Outcome {
    let machine = context::machine();
    machine.admits(version)?;
    version.enter(machine.target)?;
    let new = |arguments: &Arguments<Described>| {
        let descs = arguments.map(|_, tensor| tensor.desc);
        match purpose {
            Purpose::Launch => FiaOperator::new(descs, version, machine.target),
            Purpose::Measure => FiaOperator::measured(descs, version, machine.target),
        }
    };
    // SAFETY: the caller's promise.
    unsafe { executor_of(new, read, workspace_size, executor) }
}

/// Defines the functions of one version: phase one, the measurement where there is one, and phase two.
macro_rules! version {
    ($number:tt $version:ident: $one:ident $(, $max:ident)?; $two:ident) => {
        fused_infer_attention_score_arguments! { arguments_of_version {
            $number phase_one { $one, Arguments, prepare(Version::$version, Purpose::Launch) }
        } }
        $(fused_infer_attention_score_arguments! { arguments_of_version {
            $number phase_one { $max, Arguments, prepare(Version::$version, Purpose::Measure) }
        } })?
        phase_two!($two, Version::$version.symbol());
    };
}

version! {
    1 V1: aclnnFusedInferAttentionScoreGetWorkspaceSize;
    aclnnFusedInferAttentionScore
}
version! {
    2 V2: aclnnFusedInferAttentionScoreV2GetWorkspaceSize, aclnnFusedInferAttentionScoreV2GetMaxWorkspaceSize;
    aclnnFusedInferAttentionScoreV2
}
version! {
    3 V3: aclnnFusedInferAttentionScoreV3GetWorkspaceSize, aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize;
    aclnnFusedInferAttentionScoreV3
}
version! {
    4 V4: aclnnFusedInferAttentionScoreV4GetWorkspaceSize, aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize;
    aclnnFusedInferAttentionScoreV4
}
version! {
    5 V5: aclnnFusedInferAttentionScoreV5GetWorkspaceSize, aclnnFusedInferAttentionScoreV5GetMaxWorkspaceSize;
    aclnnFusedInferAttentionScoreV5
}
