//! The versions of the operator: which one takes a call, and its two phases.

use std::ptr;
use std::sync::Arc;

use ascend_spec::fia::{FiaCall, Parameter, Places, Version};
use ascend_spec::{Cann, Refusal, Target, Violation};
use ascend_sys::{Api, Library};

use crate::error::{Error, Result, aclnn};
use crate::executor::Slot;
use crate::runtime::Context;

use super::descriptor::{Descriptors, Executor};

/// Checks a call against the contract, and finds the oldest version of the operator that is installed, runs on the
/// product and can express the call, `at_least` one. With it come the bounds of what the call reads on the device as places.
pub(super) fn choose(
    api: &Api,
    target: Target,
    at_least: Version,
    call: &FiaCall<'_>,
    allowed: &[&str],
) -> Result<(Version, Option<Places>)> {
    let oldest = Version::oldest_for(call).max(at_least);
    let candidates = || {
        let able = |version: &Version| *version >= oldest && version.runs_on(target);
        Version::ALL.into_iter().filter(able)
    };
    // Where no version runs on the product, the contract says so.
    let first = candidates().next().unwrap_or(oldest);
    // Newer releases are asked only where this one refuses.
    let told = |mut violation: Violation| {
        violation.taken_by = call.taken_by(at_least, target, allowed);
        violation
    };
    let checked = call.check(first, target);
    if let Err(Refusal::Violation(violation)) = checked {
        return Err(told(violation).into());
    }
    let Some(version) = candidates().find(|&version| is_present(api, version)) else {
        return Err(Error::OperatorVersion {
            needed: first.symbol(),
            why: why(oldest),
            library: Library::Opapi.file_name(),
            since: first.since_cann(),
        });
    };
    let problem = if version == first {
        checked?
    } else {
        call.check(version, target)?
    };
    problem.lint(allowed).map_err(told)?;
    Ok((version, problem.places()))
}

/// Whether every release of the product from `since` on takes a call and makes the same of it.
pub(super) fn portable(
    target: Target,
    version: Version,
    since: Cann,
    call: &FiaCall<'_>,
    allowed: &[&str],
) -> Result<()> {
    let mut first = None;
    call.each_difference(version, target, since, &mut |lint| {
        if first.is_none() && !allowed.contains(&lint.rule.id) {
            first = Some(lint);
        }
    });
    first.map_or(Ok(()), |lint| Err(lint.into()))
}

/// What makes a version the oldest that can express a call.
fn why(oldest: Version) -> &'static str {
    match oldest {
        Version::V1 => "",
        Version::V2 => " (for a shared prefix, or separate antiquantisation of key and value)",
        Version::V3 => " (for rotary parts)",
        Version::V4 => " (for a quantised query, or learnable sinks)",
        Version::V5 => " (for start positions, or a kind of position bias)",
    }
}

/// Whether both phases of a version are there.
fn is_present(api: &Api, version: Version) -> bool {
    match version {
        Version::V1 => {
            api.aclnnFusedInferAttentionScoreGetWorkspaceSize().is_ok()
                && api.aclnnFusedInferAttentionScore().is_ok()
        }
        Version::V2 => {
            api.aclnnFusedInferAttentionScoreV2GetWorkspaceSize()
                .is_ok()
                && api.aclnnFusedInferAttentionScoreV2().is_ok()
        }
        Version::V3 => {
            api.aclnnFusedInferAttentionScoreV3GetWorkspaceSize()
                .is_ok()
                && api.aclnnFusedInferAttentionScoreV3().is_ok()
        }
        Version::V4 => {
            api.aclnnFusedInferAttentionScoreV4GetWorkspaceSize()
                .is_ok()
                && api.aclnnFusedInferAttentionScoreV4().is_ok()
        }
        Version::V5 => {
            api.aclnnFusedInferAttentionScoreV5GetWorkspaceSize()
                .is_ok()
                && api.aclnnFusedInferAttentionScoreV5().is_ok()
        }
    }
}

/// Phase one: a repeatable executor, and the bytes of workspace that each launch needs. The device must be bound.
pub(super) fn prepare(
    context: &Arc<Context>,
    version: Version,
    call: &FiaCall<'_>,
    descriptors: Descriptors,
) -> Result<(Executor, u64)> {
    use Parameter as P;

    let api = context.runtime().api();
    let t = |parameter| descriptors.tensor(parameter).cast_const();
    let [lengths, lengths_kv, prefix_len, q_start, kv_start] = descriptors.arrays();
    let mut workspace_bytes = 0;
    let mut executor = ptr::null_mut();

    /// The arguments that all versions have, around those that later ones added.
    macro_rules! phase_one {
        ($function:ident, inputs: [$($input:expr),*], modes: [$($mode:expr),*]) => {
            // SAFETY: every argument is null where the operator allows that, or a live object of this call; the last two
            // are places for the results; the contract has accepted the call.
            unsafe {
                aclnn!(api, $function(
                    t(P::Query), descriptors.key(), descriptors.value(), t(P::PseShift), t(P::AttenMask),
                    lengths, lengths_kv, t(P::DeqScale1), t(P::QuantScale1), t(P::DeqScale2), t(P::QuantScale2),
                    t(P::QuantOffset2), t(P::AntiquantScale), t(P::AntiquantOffset), t(P::BlockTable),
                    t(P::QueryPaddingSize), t(P::KvPaddingSize),
                    $($input,)*
                    call.num_heads, call.scale, call.pre_tokens, call.next_tokens, descriptors.input_layout(),
                    call.num_key_value_heads, call.sparse_mode, call.inner_precise, call.block_size,
                    call.antiquant_mode, call.softmax_lse_flag,
                    $($mode,)*
                    t(P::AttentionOut), t(P::SoftmaxLse), &mut workspace_bytes, &mut executor
                ))
            }
        };
    }

    match version {
        Version::V1 => {
            phase_one!(aclnnFusedInferAttentionScoreGetWorkspaceSize, inputs: [], modes: [])
        }
        Version::V2 => phase_one!(
            aclnnFusedInferAttentionScoreV2GetWorkspaceSize,
            inputs: [
                t(P::KeyAntiquantScale), t(P::KeyAntiquantOffset), t(P::ValueAntiquantScale),
                t(P::ValueAntiquantOffset), t(P::KeySharedPrefix), t(P::ValueSharedPrefix), prefix_len
            ],
            modes: [call.key_antiquant_mode, call.value_antiquant_mode]
        ),
        Version::V3 => phase_one!(
            aclnnFusedInferAttentionScoreV3GetWorkspaceSize,
            inputs: [
                t(P::KeyAntiquantScale), t(P::KeyAntiquantOffset), t(P::ValueAntiquantScale),
                t(P::ValueAntiquantOffset), t(P::KeySharedPrefix), t(P::ValueSharedPrefix), prefix_len,
                t(P::QueryRope), t(P::KeyRope), t(P::KeyRopeAntiquantScale)
            ],
            modes: [call.key_antiquant_mode, call.value_antiquant_mode]
        ),
        Version::V4 => phase_one!(
            aclnnFusedInferAttentionScoreV4GetWorkspaceSize,
            inputs: [
                t(P::KeyAntiquantScale), t(P::KeyAntiquantOffset), t(P::ValueAntiquantScale),
                t(P::ValueAntiquantOffset), t(P::KeySharedPrefix), t(P::ValueSharedPrefix), prefix_len,
                t(P::QueryRope), t(P::KeyRope), t(P::KeyRopeAntiquantScale), t(P::DequantScaleQuery),
                t(P::LearnableSink)
            ],
            modes: [call.key_antiquant_mode, call.value_antiquant_mode, call.query_quant_mode]
        ),
        Version::V5 => phase_one!(
            aclnnFusedInferAttentionScoreV5GetWorkspaceSize,
            inputs: [
                t(P::KeyAntiquantScale), t(P::KeyAntiquantOffset), t(P::ValueAntiquantScale),
                t(P::ValueAntiquantOffset), t(P::KeySharedPrefix), t(P::ValueSharedPrefix), prefix_len,
                t(P::QueryRope), t(P::KeyRope), t(P::KeyRopeAntiquantScale), t(P::DequantScaleQuery),
                t(P::LearnableSink), q_start, kv_start
            ],
            modes: [
                call.key_antiquant_mode, call.value_antiquant_mode, call.query_quant_mode, call.pse_type
            ]
        ),
    }?;
    // SAFETY: phase one made the executor of these descriptors.
    let executor = unsafe { Executor::new(context, version.symbol(), executor, descriptors) }?;
    Ok((executor, workspace_bytes))
}

/// Phase two: queues one launch. The device must be bound.
///
/// # Safety
/// The executor's addresses and the workspace are memory of the planned sizes, which is kept until the stream has passed
/// the launch; the stream is alive.
pub(super) unsafe fn launch(version: Version, executor: &Executor, slot: &Slot<'_>) -> Result<()> {
    let executor = executor.as_ptr();
    macro_rules! phase_two {
        ($function:ident) => {
            // SAFETY: handed on to the caller; the executor is repeatable, so it may be used any number of times.
            unsafe { aclnn!(slot.api, $function(slot.workspace, slot.bytes, executor, slot.stream)) }
        };
    }
    match version {
        Version::V1 => phase_two!(aclnnFusedInferAttentionScore),
        Version::V2 => phase_two!(aclnnFusedInferAttentionScoreV2),
        Version::V3 => phase_two!(aclnnFusedInferAttentionScoreV3),
        Version::V4 => phase_two!(aclnnFusedInferAttentionScoreV4),
        Version::V5 => phase_two!(aclnnFusedInferAttentionScoreV5),
    }
}
