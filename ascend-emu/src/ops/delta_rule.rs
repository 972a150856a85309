//! What the emulated operators of the gated delta rule share.

use super::declared::{DeclaredOperator, ParameterOf};
use super::launch::Launch;
use crate::fault::Fault;
use crate::finding_kind::FindingKind;
use crate::kernel::delta_rule::Tensor;
use ascend_spec::TensorDesc;
use ascend_spec::ops::delta_rule::{DeltaRuleContents, DeltaRuleFault, DeltaRuleProblem, Run};

/// The sequences of a launch whose numbers lead to their own tokens and states, and whether two of them share a state,
/// which is reported. Others are reported, and left out; in strict mode each report is a device fault.
pub(super) fn runs<O: DeclaredOperator>(
    launch: &Launch<'_, O>,
    problem: &DeltaRuleProblem,
    contents: DeltaRuleContents<'_>,
) -> Result<(Vec<Run>, bool), Fault> {
    let report = |fault: DeltaRuleFault| {
        let kind = match fault {
            DeltaRuleFault::Length { .. } | DeltaRuleFault::Accepted { .. } | DeltaRuleFault::Few { .. } => {
                FindingKind::SequenceLength
            }
            DeltaRuleFault::NoSlot { .. } => FindingKind::SlotOutOfRange,
            DeltaRuleFault::SharedSlot { .. } | DeltaRuleFault::RepeatedSlot { .. } => FindingKind::DuplicateSlot,
        };
        launch.suspect(kind, fault.tensor(), format_args!("{}: {fault}", fault.tensor()))
    };
    let mut runs = Vec::new();
    for run in problem.runs(contents) {
        match run {
            Ok(run) => runs.push(run),
            Err(fault) => report(fault)?,
        }
    }
    let shared = problem.shared_slot(contents);
    shared.map_or(Ok(()), report)?;
    Ok((runs, shared.is_some()))
}

/// A tensor as a launch walks it; `None` where the call has none.
pub(super) fn tensor<O: DeclaredOperator>(
    launch: &Launch<'_, O>,
    parameter: ParameterOf<O>,
    walked: Option<TensorDesc>,
) -> Option<Tensor> {
    Some(Tensor::new(launch.base(parameter), &walked?))
}
