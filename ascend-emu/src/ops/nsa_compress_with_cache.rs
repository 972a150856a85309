//! NsaCompressWithCache as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use super::paged_tokens::{read_tokens, read_whole};
use crate::elements::{Elements, Place, Reader};
use crate::finding_kind::FindingKind;
use crate::kernel::compression::{self, Buffers};
use crate::kernel::token_rows::TokenRows;
use crate::status::Outcome;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::nsa_compress_with_cache::{
    Argument, Arguments, CompressFault, NsaCompressCacheProblem, Parameter, Version,
};
use ascend_spec::ops::scatter_pa_kv_cache::SlotFault;
use ascend_spec::ops::sparse_sequences::{SparseContents, SparseSequence, TokenLayout};
use ascend_spec::{TensorDesc, nsa_compress_with_cache_arguments};

checked_call! { CompressCacheOperator: NsaCompressCacheProblem, target }

impl CompressCacheOperator {
    /// What sequences read, and the slots; none where there is no host memory for them, with which the launch fails.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::run`].
    unsafe fn numbers(&self, launch: &Launch<'_, Self>) -> ([Vec<i64>; 3], Vec<i64>) {
        // SAFETY: the caller's promise.
        let held = |parameter: Parameter| unsafe { launch.integers(parameter) }.unwrap_or_default();
        let numbers = self.arguments.call().numbers(&self.problem, held(Parameter::BlockTable));
        (numbers, held(Parameter::SlotMapping))
    }

    /// The sequences that write a token, each with the first token that it reads and its slot, which the cache has.
    fn written(&self, contents: SparseContents<'_>, slots: &[i64]) -> Vec<(SparseSequence, usize, usize)> {
        let slot = |sequence: &SparseSequence| {
            let slot = usize::try_from(*slots.get(sequence.index)?).ok()?;
            (slot < self.problem.slots).then_some(slot)
        };
        let completed = self.problem.completed(contents);
        completed.filter_map(|(sequence, first)| Some((sequence, first, slot(&sequence)?))).collect()
    }

    /// Reports slots and blocks that the caches do not have; in strict mode the first is a device fault.
    fn inspect(&self, launch: &Launch<'_, Self>, contents: SparseContents<'_>, slots: &[i64]) -> Outcome {
        let mut outcome = Ok(());
        self.problem.faults(contents, slots, &mut |fault| {
            let (kind, parameter) = match fault {
                CompressFault::Slot(SlotFault::Duplicate { .. }) => {
                    (FindingKind::DuplicateSlot, Parameter::SlotMapping)
                }
                CompressFault::Slot(_) => (FindingKind::SlotOutOfRange, Parameter::SlotMapping),
                CompressFault::NoBlock { .. } => (FindingKind::BlockTable, Parameter::BlockTable),
            };
            let tensor = parameter.acl_name();
            let reported = launch.suspect(kind, tensor, format_args!("{tensor}: {fault}"));
            if outcome.is_ok() {
                outcome = reported;
            }
        });
        outcome
    }
}

impl DeclaredOperator for CompressCacheOperator {
    declared_by_problem! {}

    const UPDATED: &'static [Parameter] = &[Parameter::OutputCache];

    unsafe fn reads(&self, launch: &Launch<'_, Self>, reader: &mut dyn Reader) {
        for (argument, bytes) in launch.doubtful(reader) {
            let named = launch.named(argument);
            let paged = self.problem.sequences.key.layout == TokenLayout::PaBsnd;
            match self.arguments.tensor(argument) {
                Some(desc) if argument.parameter == Parameter::Input && paged => {
                    // SAFETY: the caller's promise.
                    let (numbers, _) = unsafe { self.numbers(launch) };
                    let compression = self.problem.compression;
                    let mark = |sequence: &SparseSequence, read: &mut [bool]| {
                        if compression.completes(sequence.keys) {
                            read[sequence.keys - compression.block..].fill(true);
                        }
                    };
                    let contents = SparseContents::of(&numbers);
                    read_tokens(&self.problem.sequences, contents, (named, *desc), &mark, reader);
                }
                _ => read_whole(named, bytes, reader),
            }
        }
    }

    unsafe fn writes(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
        let Some(desc) = self.arguments.output_cache else {
            return;
        };
        // SAFETY: the caller's promise.
        let (numbers, slots) = unsafe { self.numbers(launch) };
        let (size, named) = (desc.dtype.size().unwrap_or(1), launch.named(Parameter::OutputCache));
        let bytes = |elements: i64| elements.saturating_mul(size as i64);
        let &[of_slot, of_head, of_element] = &desc.strides[..] else {
            return;
        };
        let axes = [(self.problem.heads, bytes(of_head)), (self.problem.dim, bytes(of_element))];
        for (_, _, slot) in self.written(SparseContents::of(&numbers), &slots) {
            let place = desc.offset.saturating_add(of_slot.saturating_mul(slot as i64));
            let first = named.address.saturating_add_signed(bytes(place) as isize);
            let token = Elements::new(named, first, size, &axes, None, Place::Whole);
            token.iter().for_each(&mut *visit);
        }
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        let Arguments { input: Some(input), weight: Some(weight), output_cache: Some(cache), .. } = &self.arguments
        else {
            return Ok(());
        };
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the cache, the only tensor written, shares no memory with them.
        let (table, slots) =
            unsafe { (launch.integers(Parameter::BlockTable)?, launch.integers(Parameter::SlotMapping)?) };
        let numbers = self.arguments.call().numbers(&self.problem, table);
        let contents = SparseContents::of(&numbers);
        self.inspect(launch, contents, &slots)?;
        let written = self.written(contents, &slots);
        let targets: Vec<usize> = written.iter().map(|&(_, _, slot)| slot).collect();
        let sequences = &self.problem.sequences;
        let find = |block: usize, token: usize| {
            let (sequence, first, _) = written.get(block)?;
            sequences.key(&contents, sequence, first + token)
        };
        let rows = |parameter: Parameter, desc| TokenRows { desc, base: launch.base(parameter) };
        let buffers = Buffers {
            input: rows(Parameter::Input, input),
            weight: rows(Parameter::Weight, weight),
            out: rows(Parameter::OutputCache, cache),
            paged: sequences.key.layout == TokenLayout::PaBsnd,
        };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the cache apart from
        // everything else. Slots are in the cache, and sequences find tokens within the input alone.
        unsafe { compression::run(&buffers, &targets, &find) };
        Ok(())
    }
}

c_functions! {
    nsa_compress_with_cache_arguments;
    1 V1: aclnnNsaCompressWithCacheGetWorkspaceSize, aclnnNsaCompressWithCache => CompressCacheOperator::new;
}
