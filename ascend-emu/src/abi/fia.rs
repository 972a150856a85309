//! FusedInferAttentionScore, versions 1 to 5.

use super::executor_of;
use crate::descriptor::Described;
use crate::executor::launch;
use crate::op::fia::FiaOperator;
use crate::runtime::context;
use crate::status::{Outcome, aclnn};
use ascend_spec::fia::{Arguments, Version};
use ascend_spec::{arguments_of_version, fused_infer_attention_score_arguments};
use ascend_sys::bindings::{aclOpExecutor, aclnnStatus, aclrtStream};
use std::ffi::c_void;

/// What a phase one is for.
#[derive(Clone, Copy)]
enum Purpose {
    /// `GetWorkspaceSize`.
    Launch,
    /// `GetMaxWorkspaceSize`: the workspace that any lengths need.
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
