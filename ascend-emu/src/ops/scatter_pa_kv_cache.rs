//! ScatterPaKvCache as an operator of the emulator.

use super::declared::{DeclaredOperator, Launch};
use crate::config::{Check, check};
use crate::descriptor::DescribedTensor;
use crate::elements::{Elements, Place};
use crate::finding_kind::FindingKind;
use crate::lints;
use crate::runtime::context;
use crate::status::Outcome;
use ascend_spec::ops::scatter_pa_kv_cache::{
    Argument, Arguments, Parameter, Pieces, ScatterProblem, SlotFault, Version, slot_faults,
};
use ascend_spec::{Soc, TensorDesc, scatter_pa_kv_cache_arguments};
use std::ops::Range;
use std::ptr;

/// A call that satisfies every rule.
#[derive(Debug)]
pub(crate) struct ScatterOperator {
    /// The operator's name.
    symbol: &'static str,
    arguments: Arguments<TensorDesc>,
    problem: ScatterProblem,
    /// How strictly misuse that is found on the device is treated.
    check: Check,
}

impl ScatterOperator {
    /// Checks a call.
    fn new(arguments: &Arguments<DescribedTensor>) -> Outcome<Self> {
        let symbol = Version::V1.symbol();
        let soc = context::machine().target.soc;
        let op = ScatterOperator::of(symbol, arguments, soc)?;
        lints::report_first(symbol, &op.arguments, |allowed| op.arguments.call().lint(soc, allowed))?;
        Ok(op)
    }

    /// A call of the operator `symbol`, checked as ScatterPaKvCache checks it on a product.
    pub(crate) fn of(symbol: &'static str, arguments: &Arguments<DescribedTensor>, soc: Soc) -> Outcome<Self> {
        let arguments = arguments.map(|_, tensor| tensor.desc);
        Ok(ScatterOperator { symbol, problem: arguments.call().check(soc)?, arguments, check: check() })
    }

    /// The slots of a launch that exist in the cache, each with the number of its token.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::run`].
    unsafe fn slots(&self, launch: &Launch<'_, Self>) -> Vec<(usize, usize)> {
        // SAFETY: the caller's promise.
        let slots = unsafe { launch.integers(Parameter::SlotMapping) };
        // Without memory for the slots, the launch itself fails.
        let slots = slots.unwrap_or_default();
        let inside = |slot: i64| u64::try_from(slot).ok().filter(|&slot| slot < self.problem.slots());
        let inside = slots.into_iter().map(inside).enumerate();
        inside.filter_map(|(token, slot)| Some((token, slot? as usize))).collect()
    }

    /// Reports the faults of the slots; in strict mode the first is a device fault.
    fn inspect(&self, launch: &Launch<'_, Self>, slots: &[i64]) -> Outcome {
        let mut outcome = Ok(());
        slot_faults(slots, self.problem.slots(), &mut |fault| {
            let kind = match fault {
                SlotFault::OutOfRange { .. } => FindingKind::SlotOutOfRange,
                SlotFault::Duplicate { .. } => FindingKind::DuplicateSlot,
                SlotFault::Negative { .. } => return,
            };
            let reported = launch.suspect(kind, "slotMapping", fault);
            if outcome.is_ok() {
                outcome = reported;
            }
        });
        outcome
    }
}

impl DeclaredOperator for ScatterOperator {
    type Arguments = Arguments<TensorDesc>;

    const UPDATED: &'static [Parameter] = &[Parameter::KeyCache, Parameter::ValueCache];

    fn symbol(&self) -> &'static str {
        self.symbol
    }

    fn arguments(&self) -> &Self::Arguments {
        &self.arguments
    }

    fn check(&self) -> Check {
        self.check
    }

    fn is_idle(&self) -> bool {
        self.problem.tokens == 0
    }

    fn touches(&self, visit: &mut dyn FnMut(Argument, Range<u64>)) {
        let call = self.arguments.call();
        (self.problem).touches(&call, &mut |parameter, range| visit(parameter.into(), range));
    }

    unsafe fn writes(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
        let pairs = [(Some(self.problem.key), Parameter::KeyCache), (self.problem.value, Parameter::ValueCache)];
        for (pieces, cache) in pairs {
            let Some(pieces) = pieces else { continue };
            let (tensor, first) = (launch.named(cache), launch.first_byte(cache));
            // SAFETY: the caller's promise.
            let slots = unsafe { self.slots(launch) };
            // Tokens in consecutive slots of a block are elements of one step.
            let block = |slot: usize| slot / self.problem.block_size.max(1);
            let runs = slots.chunk_by(|(_, one), (_, next)| *next == one + 1 && block(*one) == block(*next));
            for run in runs {
                let place = |token: usize, piece| {
                    (run.get(token)).map_or(0, |(_, slot)| self.problem.place(&pieces, *slot, piece))
                };
                let step = |to: usize| (to as i64).saturating_sub(place(0, 0) as i64);
                let axes = [(run.len(), step(place(1, 0))), (pieces.count, step(place(0, 1)))];
                let start = first.saturating_add(place(0, 0));
                let rows = Elements::new(tensor, start, pieces.bytes, &axes, None, Place::Whole);
                rows.iter().for_each(&mut *visit);
            }
        }
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        // SAFETY: the ranges of `touches`, which begin at the first byte of each tensor, are live (the allocation
        // table let the launch in), locked for the task that runs this, and, as the launch has found, with the caches
        // apart from everything else.
        unsafe {
            let slots = launch.integers(Parameter::SlotMapping)?;
            self.inspect(launch, &slots)?;
            scatter_rows(&self.problem, &slots, &|parameter| launch.first(parameter));
        }
        Ok(())
    }
}

/// Finds the address of a tensor's first element.
type Base<'a> = &'a dyn Fn(Parameter) -> *mut u8;

/// Writes each token's rows into its KV slot, in the order of the tokens. Slots that the cache does not have are
/// skipped.
///
/// # Safety
///
/// Each address that `base` returns is valid for the bytes that [`ScatterProblem::touches`] reports for its tensor:
/// for reads, and those of the caches for writes; the caches overlap nothing else.
unsafe fn scatter_rows(problem: &ScatterProblem, slots: &[i64], base: Base<'_>) {
    let pairs = [
        (Some(problem.key), Parameter::Key, Parameter::KeyCache),
        (problem.value, Parameter::Value, Parameter::ValueCache),
    ];
    for (pieces, rows, cache) in pairs {
        let Some(pieces) = pieces else { continue };
        for (token, &slot) in slots.iter().enumerate().take(problem.tokens) {
            let inside = u64::try_from(slot).is_ok_and(|slot| slot < problem.slots());
            if inside {
                // SAFETY: the caller keeps this contract; the slot is inside and the token one of the call's.
                unsafe { write(problem, &pieces, base(rows), token, base(cache), slot as usize) };
            }
        }
    }
}

/// Writes the row of one token.
///
/// # Safety
///
/// As for [`scatter_rows`]; the token is one of the call's, the slot one of the cache's.
unsafe fn write(problem: &ScatterProblem, pieces: &Pieces, rows: *const u8, token: usize, cache: *mut u8, slot: usize) {
    for piece in 0..pieces.count {
        let from = token * pieces.row_bytes() + piece * pieces.bytes;
        let to = problem.place(pieces, slot, piece);
        // SAFETY: both pieces are within their tensors, as token and slot are; the tensors do not overlap.
        unsafe {
            ptr::copy_nonoverlapping(rows.add(from), cache.add(to), pieces.bytes);
        }
    }
}

c_functions! {
    scatter_pa_kv_cache_arguments;
    1 V1: aclnnScatterPaKvCacheGetWorkspaceSize, aclnnScatterPaKvCache => ScatterOperator::new;
}
