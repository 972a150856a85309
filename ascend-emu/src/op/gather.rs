//! GatherPaKvCache as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::overlap::refuse_overlap;
use crate::config::{Check, check};
use crate::fault::Fault;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use crate::sanitizer::{FindingKind, Suspicion, report};
use crate::status::AICORE_EXCEPTION;
use ascend_spec::ops::gather_pa_kv_cache::{Argument, Arguments, GatherProblem, Parameter, Source};
use ascend_spec::scatter::Pieces;
use ascend_spec::{DType, OperatorVersion, Refusal, Soc, TensorDesc};
use std::ops::Range;
use std::ptr;

/// A call that holds every rule.
#[derive(Debug)]
pub(crate) struct GatherOperator {
    arguments: Arguments<TensorDesc>,
    problem: GatherProblem,
    /// How far misuse that shows on the device is let pass.
    check: Check,
}

impl GatherOperator {
    /// Checks a call.
    pub(crate) fn new(arguments: Arguments<TensorDesc>, soc: Soc) -> Result<Self, Refusal> {
        let problem = arguments.call().check(soc)?;
        Ok(GatherOperator {
            arguments,
            problem,
            check: check(),
        })
    }

    /// First element of a tensor, null where there is none.
    fn first(&self, parameter: Parameter, at: &Addresses, memory: &DeviceMemory) -> *mut u8 {
        let Some(desc) = self.arguments.tensor(parameter) else {
            return ptr::null_mut();
        };
        let start = desc.byte_range().map_or(0, |range| range.start);
        let start = usize::try_from(start).unwrap_or(usize::MAX);
        memory.host(at.get(parameter.into()).saturating_add(start))
    }

    /// The numbers of a tensor; none where there is none.
    ///
    /// # Safety
    ///
    /// The tensor's bytes are live and written by nobody else.
    unsafe fn numbers(
        &self,
        parameter: Parameter,
        at: &Addresses,
        memory: &DeviceMemory,
    ) -> Vec<i64> {
        let desc = self.arguments.tensor(parameter);
        let count = desc.and_then(TensorDesc::elements).unwrap_or(0);
        let first = self.first(parameter, at, memory);
        let one = |index: usize| match self.problem.index_dtype {
            // SAFETY: the caller's promise; the index is one of the tensor's elements. Alignment is not required.
            DType::Int64 => unsafe { first.cast::<i64>().add(index).read_unaligned() },
            // SAFETY: as above.
            _ => i64::from(unsafe { first.cast::<i32>().add(index).read_unaligned() }),
        };
        (0..usize::try_from(count).unwrap_or(0)).map(one).collect()
    }

    /// Files a number that leads nowhere; in strict mode that is a device fault.
    fn inspect(&self, source: Source) -> Result<(), Fault> {
        let (tensor, text) = match source {
            Source::Row { .. } => return Ok(()),
            Source::NoBlock { sequence, block } => (
                "blockTables",
                format!(
                    "block {block} of sequence {sequence}, allowed: 0 to {}",
                    self.problem.blocks.saturating_sub(1)
                ),
            ),
            Source::NoColumn { sequence, column } => (
                "blockTables",
                format!(
                    "sequence {sequence} needs column {column}, and there are {}",
                    self.problem.columns
                ),
            ),
            Source::NoToken { sequence, token } => (
                "keyRef",
                format!(
                    "sequence {sequence} has row {token}, and there are {}",
                    self.problem.tokens
                ),
            ),
            Source::BadNumber { sequence, given } => (
                "seqLens",
                format!(
                    "{given} of sequence {sequence}, allowed: lengths and offsets of at least 0, ends that ascend"
                ),
            ),
        };
        let suspicion = Suspicion {
            kind: FindingKind::BlockTable,
            site: (self.symbol(), tensor),
            message: format!("{}: {tensor}: {text}", self.symbol()),
        };
        report(self.check, AICORE_EXCEPTION, suspicion).map_err(|failure| Fault {
            code: failure.code,
            message: failure.message.into_owned(),
        })
    }
}

impl DeclaredOperator for GatherOperator {
    type Arguments = Arguments<TensorDesc>;

    fn symbol(&self) -> &'static str {
        OperatorVersion::GatherPaKvCache.symbol()
    }

    fn arguments(&self) -> &Self::Arguments {
        &self.arguments
    }

    fn is_idle(&self) -> bool {
        self.problem.tokens == 0
    }

    fn touches(&self, visit: &mut dyn FnMut(Argument, Range<u64>)) {
        let call = self.arguments.call();
        (self.problem).touches(&call, &mut |parameter, range| {
            visit(parameter.into(), range)
        });
    }

    fn compute(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        if self.is_idle() {
            return Ok(());
        }
        refuse_overlap(self, at)?;
        let numbers = |parameter| {
            // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the outputs, which alone are
            // written, share no memory with them, by the check above.
            unsafe { self.numbers(parameter, at, memory) }
        };
        let table = numbers(Parameter::BlockTables);
        let lengths = numbers(Parameter::SeqLens);
        let offsets = numbers(Parameter::SeqOffset);
        let mut inspected = Ok(());
        (self.problem).sources(&table, &lengths, &offsets, &mut |source| {
            let found = self.inspect(source);
            if inspected.is_ok() {
                inspected = found;
            }
        });
        inspected?;
        let pairs = [
            (self.problem.key, Parameter::KeyCache, Parameter::Key),
            (self.problem.value, Parameter::ValueCache, Parameter::Value),
        ];
        for (pieces, cache, rows) in pairs {
            let cache = self.first(cache, at, memory).cast_const();
            let rows = self.first(rows, at, memory);
            (self.problem).sources(&table, &lengths, &offsets, &mut |source| {
                if let Source::Row { token, block, row } = source {
                    let place = |piece| pieces.place(self.problem.block_size, block, row, piece);
                    // SAFETY: the contract has checked the shapes, and block, row and token lie within them; both tensors are
                    // live, contiguous and apart.
                    unsafe { copy(&pieces, cache, &place, rows, token) };
                }
            });
        }
        Ok(())
    }
}

/// Copies the row of one token.
///
/// # Safety
///
/// The places are within the cache, and the token's row is within `rows`, which overlaps nothing.
unsafe fn copy(
    pieces: &Pieces,
    cache: *const u8,
    place: &dyn Fn(usize) -> usize,
    rows: *mut u8,
    token: usize,
) {
    for piece in 0..pieces.count {
        let to = (token * pieces.count + piece) * pieces.bytes;
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(cache.add(place(piece)), rows.add(to), pieces.bytes) };
    }
}
