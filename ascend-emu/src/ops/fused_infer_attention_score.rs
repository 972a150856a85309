//! FusedInferAttentionScore, versions 1 to 5.

use super::attention::{Attention, AttentionCall};
use super::declared::Launch;
use super::entry_point::executor_of;
use crate::descriptor::DescribedTensor;
use crate::emulated_only;
use crate::lints;
use crate::observe::{ObservedCall, observer};
use crate::runtime::context;
use crate::status::{ACLNN_INNER, DEVICE_INTERNAL, Failure, Outcome, contain};
use ascend_spec::ops::fused_infer_attention_score::{Arguments, Version};
use ascend_spec::{Target, TensorDesc, fused_infer_attention_score_arguments};
use ascend_sys::bindings::aclOpExecutor;

type Checked = Attention<Arguments<TensorDesc>>;

impl AttentionCall for Arguments<TensorDesc> {
    const OVERRUNS: bool = true;

    unsafe fn ran(launch: &Launch<'_, Checked>, outcome: Result<(), &Failure>) {
        let Some(observer) = observer() else {
            return;
        };
        let op = launch.op;
        let call = op.arguments.call();
        let base = |argument| launch.address(argument);
        let observed = ObservedCall::unread(&call, op.version, op.target);
        // SAFETY: the ranges are those of `touches`: live, and locked for the task that runs this, which has finished
        // writing.
        let observed = unsafe { observed.with_tensors(launch.memory, &op.touches, &base) };
        let outcome = outcome.map_err(|fault| &*fault.message);
        // A failure of the observer fails no call.
        let _ = contain(DEVICE_INTERNAL, || {
            observer.ran(&observed, outcome);
            Ok(())
        });
    }
}

/// Checks a call for a product and a release.
fn checked(arguments: Arguments<TensorDesc>, version: Version, target: Target) -> Outcome<Checked> {
    let new = |arguments| {
        let mut op = Checked::new(arguments, version, target, false)?;
        if let Some(problem) = &mut op.problem {
            problem.soft_cap = emulated_only::soft_cap();
        }
        Ok(op)
    };
    let Some(observer) = observer() else {
        return new(arguments);
    };
    let kept = arguments.clone();
    new(arguments).inspect_err(|failure: &Failure| {
        let call = kept.call();
        let observed = ObservedCall::unread(&call, version, target);
        let _ = contain(ACLNN_INNER, || {
            observer.refused(&observed, &failure.message);
            Ok(())
        });
    })
}

/// Checks a call whose lengths the operator does not know, to find the workspace that is enough for all lengths.
fn measured(mut arguments: Arguments<TensorDesc>, version: Version, target: Target) -> Outcome<Checked> {
    let unread = arguments.call().unread_lengths(version, target);
    let unread = unread.map_err(|refusal| lints::refused(version.symbol(), refusal))?;
    arguments.actual_seq_lengths = unread.actual_seq_lengths;
    arguments.actual_seq_lengths_kv = unread.actual_seq_lengths_kv;
    arguments.actual_shared_prefix_len = unread.actual_shared_prefix_len;
    let measured = arguments.actual_seq_lengths.is_some()
        || arguments.actual_seq_lengths_kv.is_some()
        || arguments.actual_shared_prefix_len.is_some();
    Checked::new(arguments, version, target, measured)
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
    read: impl FnOnce() -> Outcome<Arguments<DescribedTensor>>,
    workspace_size: *mut u64,
    executor: *mut *mut aclOpExecutor,
) -> Outcome {
    let machine = context::machine();
    machine.admits(version)?;
    version.enter(machine.target)?;
    let new = |arguments: &Arguments<DescribedTensor>| {
        let descs = arguments.map(|_, tensor| tensor.desc);
        match purpose {
            Purpose::Launch => checked(descs, version, machine.target),
            Purpose::Measure => measured(descs, version, machine.target),
        }
    };
    // SAFETY: the caller's promise.
    unsafe { executor_of(new, read, workspace_size, executor) }
}

/// Defines the functions of one version: phase one, the measurement where there is one, and phase two.
macro_rules! version {
    ($number:tt $version:ident: $one:ident $(, $max:ident)?; $two:ident) => {
        fused_infer_attention_score_arguments! { ascend_spec::arguments_of_version {
            $number phase_one { $one, Arguments, prepare(Version::$version, Purpose::Launch) }
        } }
        $(fused_infer_attention_score_arguments! { ascend_spec::arguments_of_version {
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
