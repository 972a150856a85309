//! What the emulated operators of the gated delta rule share.

use super::declared::{DeclaredOperator, ParameterOf};
use super::launch::Launch;
use crate::fault::Fault;
use crate::finding_kind::FindingKind;
use crate::kernel::delta_rule::{Buffers, Tensor};
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

/// The parameters of an operator that its kernel reads and writes; it may have no decay of columns.
pub(super) struct Parameters<P> {
    pub(super) query: P,
    pub(super) key: P,
    pub(super) value: P,
    pub(super) beta: P,
    pub(super) g: P,
    pub(super) gk: Option<P>,
    /// Where states begin, and where they are written.
    pub(super) states: [P; 2],
    pub(super) out: P,
}

/// The tensors of a launch, each as `walked` says; `None` where one that the kernel needs is absent.
pub(super) fn buffers<'a, O: DeclaredOperator>(
    launch: &Launch<'_, O>,
    parameters: Parameters<ParameterOf<O>>,
    walked: impl Fn(ParameterOf<O>) -> Option<TensorDesc>,
    slots: &'a [i64],
) -> Option<Buffers<'a>> {
    let tensor = |parameter| Some(Tensor::new(launch.base(parameter), &walked(parameter)?));
    let [begin, end] = parameters.states.map(tensor);
    Some(Buffers {
        query: tensor(parameters.query)?,
        key: tensor(parameters.key)?,
        value: tensor(parameters.value)?,
        beta: tensor(parameters.beta)?,
        g: tensor(parameters.g),
        gk: parameters.gk.and_then(tensor),
        begin: begin?,
        end: end?,
        out: tensor(parameters.out),
        slots,
    })
}
