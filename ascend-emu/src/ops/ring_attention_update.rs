//! RingAttentionUpdate as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use crate::elements::{Elements, Reader};
use crate::finding_kind::FindingKind;
use crate::host_memory::try_collect;
use crate::kernel::element_view::ElementView;
use crate::kernel::ring_update::{self, Buffers, Triple};
use crate::status::Outcome;
use ascend_spec::ops::flash_attention_score::SoftmaxOrder;
use ascend_spec::ops::ring_attention_update::{Argument, Arguments, Parameter, RingUpdateProblem, Version};
use ascend_spec::{TensorDesc, ring_attention_update_arguments};

checked_call! { RingUpdateOperator: RingUpdateProblem, target, version }

impl RingUpdateOperator {
    /// The order of maxima and sums, where it makes a difference.
    fn softmax_order(&self) -> Option<&'static str> {
        let (packed, heads) = (self.problem.layout.is_packed(), self.problem.heads);
        let order = self.problem.softmax_order.matters(packed, heads);
        order.map(SoftmaxOrder::name)
    }
}

impl DeclaredOperator for RingUpdateOperator {
    declared_by_problem! { of a version }

    unsafe fn reads(&self, launch: &Launch<'_, Self>, reader: &mut dyn Reader) {
        let Some(order) = self.softmax_order() else {
            return;
        };
        for (argument, desc) in self.arguments.each_tensor() {
            let read = is_softmax(argument.parameter) && argument.parameter.info().output.is_none();
            let elements = Elements::described(launch.named(argument), desc).filter(|_| read);
            if let Some(elements) = elements {
                reader.read_in_order(&elements.in_order(Some(order)));
            }
        }
    }

    unsafe fn writes(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
        let order = self.softmax_order();
        launch.outputs(&mut |argument, elements| {
            let of_softmax = is_softmax(argument.parameter);
            visit(&elements.in_order(order.filter(|_| of_softmax)));
        });
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        let elements = |parameter: Parameter| {
            let desc = self.arguments.tensor(parameter)?;
            Some(ElementView::new(launch.first(parameter), *desc))
        };
        let triple = |[attn, max, sum]: [Parameter; 3]| {
            Some(Triple { attn: elements(attn)?, max: elements(max)?, sum: elements(sum)? })
        };
        use Parameter as P;
        let triples = [
            triple([P::PrevAttnOut, P::PrevSoftmaxMax, P::PrevSoftmaxSum]),
            triple([P::CurAttnOut, P::CurSoftmaxMax, P::CurSoftmaxSum]),
            triple([P::AttnOut, P::SoftmaxMax, P::SoftmaxSum]),
        ];
        let [Some(prev), Some(cur), Some(out)] = triples else {
            // A call that lacks one of them breaks a rule.
            return Ok(());
        };
        let buffers = Buffers { prev, cur, out };
        let entries = match self.problem.layout.is_packed() {
            true => self.problem.batch + 1,
            false => 0,
        };
        let ends = match elements(P::ActualSeqQlen) {
            Some(of) => {
                // SAFETY: the check has found that the tensor has these entries of INT64, which are live and locked
                // for the task that runs this.
                let entry = |entry| unsafe { of.read::<i64>(entry) };
                try_collect((0..entries).map(entry)).map_err(|why| launch.fault(why))?
            }
            None => Vec::new(),
        };
        if let Err(violation) = self.problem.admits_lengths(&ends) {
            launch.suspect(FindingKind::OutOfBounds, "actualSeqQlen", violation)?;
        }
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the
        // allocation table let the launch in) and locked for the task that runs this; the launch has found the
        // outputs apart from everything else.
        unsafe {
            if let Some((row, violation)) = ring_update::lost_row(&self.problem, &ends, &buffers) {
                let text = format_args!("{row}: {violation}");
                launch.suspect(FindingKind::EmptyRow, "prevSoftmaxMax", text)?;
            }
            ring_update::run(&self.problem, &ends, &buffers);
        }
        Ok(())
    }
}

/// Whether a tensor holds maxima or sums.
fn is_softmax(parameter: Parameter) -> bool {
    use Parameter as P;
    let maxima = [P::PrevSoftmaxMax, P::CurSoftmaxMax, P::SoftmaxMax];
    let sums = [P::PrevSoftmaxSum, P::CurSoftmaxSum, P::SoftmaxSum];
    maxima.contains(&parameter) || sums.contains(&parameter)
}

c_functions! {
    ring_attention_update_arguments of RingUpdateOperator;
    1 V1: aclnnRingAttentionUpdateGetWorkspaceSize, aclnnRingAttentionUpdate;
    2 V2: aclnnRingAttentionUpdateV2GetWorkspaceSize, aclnnRingAttentionUpdateV2;
}
