//! What the emulated operators of the gated delta rule share.

use super::declared::{DeclaredOperator, Launch, ParameterOf};
use crate::elements::{Elements, Reader};
use crate::finding_kind::FindingKind;
use crate::kernel::delta_rule::{Buffers, Tensor};
use crate::status::Outcome;
use ascend_spec::ops::delta_rule::{DeltaRuleContents, DeltaRuleFault, DeltaRuleProblem, Run};
use ascend_spec::{Dims, TensorDesc};
use smallvec::SmallVec;
use std::iter;
use std::ops::Range;

/// The sequences of a launch whose numbers lead to their own tokens and states, and whether two of them share a state,
/// which is reported. Others are reported, and left out; in strict mode each report is a device fault.
pub(super) fn runs<O: DeclaredOperator>(
    launch: &Launch<'_, O>,
    problem: &DeltaRuleProblem,
    contents: DeltaRuleContents<'_>,
) -> Outcome<(Vec<Run>, bool)> {
    launch.runs(problem.runs(contents), problem.shared_slot(contents), |fault| {
        let kind = match fault {
            DeltaRuleFault::Length { .. } | DeltaRuleFault::Accepted { .. } | DeltaRuleFault::Few { .. } => {
                FindingKind::SequenceLength
            }
            DeltaRuleFault::NoSlot { .. } => FindingKind::SlotOutOfRange,
            DeltaRuleFault::SharedSlot { .. } | DeltaRuleFault::RepeatedSlot { .. } => FindingKind::DuplicateSlot,
        };
        (kind, fault.tensor())
    })
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

/// An operator of the gated delta rule.
pub(super) trait DeltaOperator: DeclaredOperator {
    const PARAMETERS: Parameters<ParameterOf<Self>>;

    fn problem(&self) -> &DeltaRuleProblem;

    /// A tensor as a launch walks it; `None` where the call has none, or where it is lost.
    fn walked(&self, parameter: ParameterOf<Self>) -> Option<TensorDesc>;

    /// The tensors of a launch; `None` where one that the kernel needs is absent.
    fn buffers<'a>(&self, launch: &Launch<'_, Self>, slots: &'a [i64]) -> Option<Buffers<'a>> {
        let tensor = |parameter| Some(Tensor::new(launch.base(parameter), &self.walked(parameter)?));
        let [begin, end] = Self::PARAMETERS.states.map(tensor);
        Some(Buffers {
            query: tensor(Self::PARAMETERS.query)?,
            key: tensor(Self::PARAMETERS.key)?,
            value: tensor(Self::PARAMETERS.value)?,
            beta: tensor(Self::PARAMETERS.beta)?,
            g: tensor(Self::PARAMETERS.g),
            gk: Self::PARAMETERS.gk.and_then(tensor),
            begin: begin?,
            end: end?,
            out: tensor(Self::PARAMETERS.out),
            slots,
        })
    }

    /// Passes to the reader the tokens that sequences read, and the states that they begin with.
    fn read_runs(&self, launch: &Launch<'_, Self>, contents: DeltaRuleContents<'_>, reader: &mut dyn Reader) {
        let Parameters { query, key, value, beta, g, gk, states: [begin, _], .. } = Self::PARAMETERS;
        for run in self.problem().runs(contents).filter_map(Result::ok) {
            let mut read = |parameter, rows| {
                let elements = self.rows(parameter, rows, launch);
                let unknown = elements.filter(|elements| !reader.knows(elements.bounds()));
                unknown.iter().for_each(|elements| reader.read(elements));
            };
            for parameter in [query, key, value, beta, g].into_iter().chain(gk) {
                read(parameter, run.first..run.first + run.tokens);
            }
            read(begin, run.start..run.start + 1);
        }
    }

    /// Visits the outputs of the tokens that sequences have, and the states that are written.
    fn write_runs(&self, launch: &Launch<'_, Self>, contents: DeltaRuleContents<'_>, visit: &mut dyn FnMut(&Elements)) {
        let Parameters { states: [_, end], out, .. } = Self::PARAMETERS;
        for run in self.problem().runs(contents).filter_map(Result::ok) {
            let tokens = run.first..run.first + run.tokens;
            self.rows(out, tokens.clone(), launch).iter().for_each(&mut *visit);
            let mut state = |slot: usize| self.rows(end, slot..slot + 1, launch).iter().for_each(&mut *visit);
            match contents.slots.get(tokens) {
                Some(slots) => slots.iter().filter_map(|&slot| usize::try_from(slot).ok()).for_each(state),
                None => state(run.sequence),
            }
        }
    }

    /// Some rows of the first axis of a tensor.
    fn rows(&self, parameter: ParameterOf<Self>, rows: Range<usize>, launch: &Launch<'_, Self>) -> Option<Elements> {
        let desc = self.walked(parameter)?;
        let &[_, ref others @ ..] = &desc.shape[..] else {
            return None;
        };
        let before = i64::try_from(rows.start).ok()?.checked_mul(*desc.strides.first()?)?;
        let shape: SmallVec<[i64; 4]> = iter::once(rows.len() as i64).chain(others.iter().copied()).collect();
        let offset = desc.offset.checked_add(before)?;
        let desc = TensorDesc { shape: Dims::new(&shape)?, offset, ..desc };
        Elements::described(launch.named(parameter), &desc)
    }
}
