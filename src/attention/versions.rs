//! The versions of the operator: which one takes a call, and its two phases.

use std::ptr;
use std::sync::Arc;

use ascend_spec::fia::{FiaCall, Operand, Parameter, Place, Places, Version};
use ascend_spec::{Cann, Refusal, Target, Violation};
use ascend_sys::{Api, Library};

use crate::error::{Error, Result, aclnn};
use crate::operator::{Addressed, Argument, Descriptors, PhaseOne, Phases, Plan, phases};
use crate::runtime::Context;
use crate::tensor::AnyTensor;

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
    let Some(version) = candidates().find(|&version| phases_of(version).are_installed(api)) else {
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

/// The functions of a version.
fn phases_of(version: Version) -> Phases {
    match version {
        Version::V1 => phases!(
            aclnnFusedInferAttentionScoreGetWorkspaceSize,
            aclnnFusedInferAttentionScore
        ),
        Version::V2 => phases!(
            aclnnFusedInferAttentionScoreV2GetWorkspaceSize,
            aclnnFusedInferAttentionScoreV2
        ),
        Version::V3 => phases!(
            aclnnFusedInferAttentionScoreV3GetWorkspaceSize,
            aclnnFusedInferAttentionScoreV3
        ),
        Version::V4 => phases!(
            aclnnFusedInferAttentionScoreV4GetWorkspaceSize,
            aclnnFusedInferAttentionScoreV4
        ),
        Version::V5 => phases!(
            aclnnFusedInferAttentionScoreV5GetWorkspaceSize,
            aclnnFusedInferAttentionScoreV5
        ),
    }
}

impl Argument for Operand {
    fn name(self) -> &'static str {
        self.name()
    }

    fn input(self) -> Option<usize> {
        match self.place() {
            Place::Input(input, _) => Some(input),
            Place::Output(_) => None,
        }
    }

    fn output(self) -> Option<usize> {
        match self.place() {
            Place::Input(..) => None,
            Place::Output(output) => Some(output),
        }
    }

    fn element(self) -> Option<usize> {
        match self {
            Operand::Key(index) | Operand::Value(index) => Some(index),
            _ => None,
        }
    }

    #[cold]
    fn shares_memory(self, other: Self) -> Error {
        let with = if other.is_output() {
            "another output"
        } else {
            other.name()
        };
        Error::invalid(
            "output",
            format_args!("memory that is shared with {with}"),
            "memory of its own",
        )
    }
}

/// Phase one of a call that the contract has accepted, with these tensors and a mask that stays the same.
pub(super) fn prepare(
    context: &Arc<Context>,
    version: Version,
    call: &FiaCall<'_>,
    tensors: &[Addressed<Operand>],
    mask: Option<&AnyTensor>,
) -> Result<Plan<Operand>> {
    let mask = mask.map(|mask| (Operand::AttenMask, mask));
    let phase_one = |api: &Api, descriptors: &mut Descriptors<Operand>| {
        phase_one(api, version, call, descriptors)
    };
    // SAFETY: phase one gets what the descriptors give, and nothing else is returned.
    unsafe { Plan::new(context, &phases_of(version), tensors, mask, phase_one) }
}

/// Phase one of a version. The device must be bound.
fn phase_one(
    api: &Api,
    version: Version,
    call: &FiaCall<'_>,
    descriptors: &mut Descriptors<Operand>,
) -> Result<PhaseOne> {
    use Parameter as P;

    let lengths = descriptors.ints(call.actual_seq_lengths)?;
    let lengths_kv = descriptors.ints(call.actual_seq_lengths_kv)?;
    let prefix_len = descriptors.ints(call.actual_shared_prefix_len)?;
    let q_start = descriptors.ints(call.q_start_idx)?;
    let kv_start = descriptors.ints(call.kv_start_idx)?;
    let input_layout = descriptors.text("input_layout", Some(call.input_layout))?;
    let key = descriptors.list(Operand::Key(0));
    let value = descriptors.list(Operand::Value(0));
    let t = |parameter: P| descriptors.tensor(parameter.into()).cast_const();
    let (mut workspace_bytes, mut executor) = (0, ptr::null_mut());
    /// The arguments that all versions have, around those that later ones added.
    macro_rules! phase_one {
        ($function:ident, inputs: [$($input:expr),*], modes: [$($mode:expr),*]) => {
            // SAFETY: every argument is null where the operator allows that, or a live object of this call; the last two
            // are places for the results; the contract has accepted the call.
            unsafe {
                aclnn!(api, $function(
                    t(P::Query), key, value, t(P::PseShift), t(P::AttenMask),
                    lengths, lengths_kv, t(P::DeqScale1), t(P::QuantScale1), t(P::DeqScale2), t(P::QuantScale2),
                    t(P::QuantOffset2), t(P::AntiquantScale), t(P::AntiquantOffset), t(P::BlockTable),
                    t(P::QueryPaddingSize), t(P::KvPaddingSize),
                    $($input,)*
                    call.num_heads, call.scale, call.pre_tokens, call.next_tokens, input_layout,
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
    Ok(PhaseOne {
        workspace_bytes,
        executor,
    })
}
