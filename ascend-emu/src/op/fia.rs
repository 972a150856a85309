//! FusedInferAttentionScore as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::overlap::refuse_overlap;
use crate::config::{Check, check};
use crate::fault::Fault;
use crate::kernel::{self, Buffers};
use crate::memory::DeviceMemory;
use crate::observe::{ObservedCall, observer};
use crate::operator::Addresses;
use crate::sanitizer::{FindingKind, Suspicion, report};
use crate::status::{ACLNN_INNER, AICORE_EXCEPTION, DEVICE_INTERNAL, Failure, Outcome, contain};
use ascend_spec::attention_problem::{AttentionProblem, TensorRole};
use ascend_spec::fia::{Argument, Arguments, CheckedCall, Operand, Version};
use ascend_spec::{Level, Refusal, Target, TensorDesc, Unsupported, Violation};
use std::ops::Range;
use std::ptr;

/// A call that holds every rule.
#[derive(Debug)]
pub(crate) struct FiaOperator {
    arguments: Arguments<TensorDesc>,
    version: Version,
    target: Target,
    /// What the call computes.
    problem: AttentionProblem<'static>,
    /// Bytes of each tensor that a launch touches, from the tensor's base address.
    touches: Vec<(Argument, Range<u64>)>,
    /// How far misuse that shows on the device is let pass.
    check: Check,
    /// Whether the length arrays are stand-ins, with which nothing can be computed.
    measured: bool,
}

impl FiaOperator {
    /// Checks a call for a product and a release.
    pub(crate) fn new(
        arguments: Arguments<TensorDesc>,
        version: Version,
        target: Target,
    ) -> Outcome<Self> {
        let Some(observer) = observer() else {
            return FiaOperator::checked(arguments, version, target);
        };
        let kept = arguments.clone();
        FiaOperator::checked(arguments, version, target).inspect_err(|failure| {
            let call = kept.call();
            let observed = ObservedCall::unread(&call, version, target);
            let _ = contain(ACLNN_INNER, || {
                observer.refused(&observed, &failure.message);
                Ok(())
            });
        })
    }

    fn checked(
        arguments: Arguments<TensorDesc>,
        version: Version,
        target: Target,
    ) -> Outcome<Self> {
        let mut touches = Vec::new();
        let call = arguments.call();
        let checked = call.check(version, target);
        let checked = checked.map_err(|refusal| refused(version, refusal))?;
        refuse_crash(&checked, version)?;
        within_reach(&checked.problem).map_err(Refusal::from)?;
        checked.touches(&mut |operand, range| {
            // A range that no memory could hold is one that no allocation answers for.
            touches.push((operand.argument(), range.unwrap_or(0..u64::MAX)));
        });
        let problem = checked.problem.into_owned();
        Ok(FiaOperator {
            problem,
            arguments,
            version,
            target,
            touches,
            check: check(),
            measured: false,
        })
    }

    /// Checks a call whose lengths the operator is not shown, to say how much workspace any lengths need.
    pub(crate) fn measured(
        mut arguments: Arguments<TensorDesc>,
        version: Version,
        target: Target,
    ) -> Outcome<Self> {
        let unread = arguments.call().unread_lengths(version, target);
        let unread = unread.map_err(|refusal| refused(version, refusal))?;
        arguments.actual_seq_lengths = unread.actual_seq_lengths;
        arguments.actual_seq_lengths_kv = unread.actual_seq_lengths_kv;
        arguments.actual_shared_prefix_len = unread.actual_shared_prefix_len;
        let measured = arguments.actual_seq_lengths.is_some()
            || arguments.actual_seq_lengths_kv.is_some()
            || arguments.actual_shared_prefix_len.is_some();
        let op = FiaOperator::checked(arguments, version, target)?;
        Ok(FiaOperator { measured, ..op })
    }
}

/// Reports a call of which the operator's host code dies on some hosts, and which others take.
fn refuse_crash(checked: &CheckedCall<'_>, version: Version) -> Outcome {
    let mut outcome = Ok(());
    checked.each_lint(&mut |lint| {
        if lint.rule.level == Level::HostCrash && outcome.is_ok() {
            outcome = report_crash(version, &lint, ACLNN_INNER);
        }
    });
    outcome
}

/// The failure of a call that the contract refuses; a crash is reported as well.
fn refused(version: Version, refusal: Refusal) -> Failure {
    match &refusal {
        Refusal::Violation(violation) if violation.rule.level == Level::HostCrash => {
            let reported = report_crash(version, violation, refusal.status());
            reported.err().unwrap_or_else(|| refusal.into())
        }
        _ => refusal.into(),
    }
}

/// Files the end of a host process; in strict mode the call fails with `code`.
fn report_crash(version: Version, violation: &Violation, code: i32) -> Outcome {
    let suspicion = Suspicion {
        kind: FindingKind::HostCrash,
        site: (version.symbol(), violation.rule.id),
        message: format!("{}: {violation}", version.symbol()),
    };
    report(check(), code, suspicion)
}

/// Blocks of queries, and blocks of cached keys, that a launch keeps a list of.
const MOST_BLOCKS: usize = 1 << 26;

/// Whether the kernel can take on a call. Tensors of stride 0 are small however many rows they have, so that memory sets
/// no limit to them.
fn within_reach(problem: &AttentionProblem<'_>) -> Result<(), Unsupported> {
    let unsupported = |feature| Err(Unsupported::new(feature));
    if problem.batch > MOST_BLOCKS {
        // An empty query may have any number of sequences.
        return unsupported("more than 67108864 sequences");
    }
    let longest = (0..problem.batch).map(|b| problem.kv_len(b)).max();
    let longest = longest.unwrap_or(0);
    if problem.query_rows > CheckedCall::MOST_ROWS || longest > CheckedCall::MOST_ROWS {
        return unsupported("a sequence of more than 20971520 query rows or keys");
    }
    let queries = problem
        .batch
        .saturating_mul(problem.heads)
        .saturating_mul(problem.query_rows.div_ceil(kernel::BLOCK_QUERIES));
    let keys = problem.pages.map_or(0, |pages| {
        let blocks = longest.div_ceil(pages.block_size.max(1));
        problem.batch.saturating_mul(blocks)
    });
    if queries.max(keys) > MOST_BLOCKS {
        return unsupported("more than 67108864 blocks of queries or of cached keys");
    }
    Ok(())
}

impl DeclaredOperator for FiaOperator {
    type Arguments = Arguments<TensorDesc>;

    fn symbol(&self) -> &'static str {
        self.version.symbol()
    }

    fn version(&self) -> u8 {
        self.version.number()
    }

    fn arguments(&self) -> &Self::Arguments {
        &self.arguments
    }

    fn is_idle(&self) -> bool {
        match self.measured {
            // Other lengths may have something to do.
            true => (self.arguments.query.as_ref()).is_none_or(TensorDesc::is_empty),
            false => self.touches.is_empty(),
        }
    }

    fn unlaunchable(&self) -> Option<&'static str> {
        self.measured.then_some(
            "the executor is of GetMaxWorkspaceSize, which keeps no lengths: launch one of GetWorkspaceSize",
        )
    }

    fn touches(&self, visit: &mut dyn FnMut(Argument, Range<u64>)) {
        for (argument, range) in &self.touches {
            visit(*argument, range.clone());
        }
    }

    fn compute(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        let outcome = self.attend(at, memory);
        if let Some(observer) = observer() {
            let call = self.arguments.call();
            let base = |argument| at.get(argument);
            let observed = ObservedCall::unread(&call, self.version, self.target);
            // SAFETY: the ranges are those of `touches`: live, and locked for the task that runs this, whose own writing is
            // over.
            let observed = unsafe { observed.with_tensors(memory, &self.touches, &base) };
            let told = outcome.as_ref().map(|_| ());
            let told = told.map_err(|fault| fault.message.as_str());
            // Looking on fails no call.
            let _ = contain(DEVICE_INTERNAL, || {
                observer.ran(&observed, told);
                Ok(())
            });
        }
        outcome
    }
}

impl FiaOperator {
    /// Does the work of a launch.
    fn attend(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        let fault = |code, message| Err(Fault { code, message });
        refuse_overlap(self, at)?;
        let problem = &self.problem;
        let base = |role: TensorRole| match at.get(Operand::of_role(role).argument()) {
            0 => ptr::null_mut(),
            address => memory.host(address),
        };
        let buffers = Buffers(&base);
        // SAFETY: the ranges that `AttentionProblem::touches` reports are those of `accesses`: live (the allocation table let the launch in),
        // locked for the task that runs this, and, by the check above, with outputs apart from everything else.
        if let Some(bad) = unsafe { kernel::bad_block(problem, &buffers) } {
            let suspicion = Suspicion {
                kind: FindingKind::BlockTable,
                site: (self.symbol(), "blockTable"),
                message: format!("{}: {bad}", self.symbol()),
            };
            if let Err(failure) = report(self.check, AICORE_EXCEPTION, suspicion) {
                return fault(failure.code, failure.message.into_owned());
            }
        }
        // SAFETY: as above.
        match unsafe { kernel::run(problem, &buffers) } {
            Ok(()) => Ok(()),
            Err(unsupported) => fault(AICORE_EXCEPTION, unsupported.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::within_reach;
    use ascend_spec::fia::{FiaCall, Version};
    use ascend_spec::{DType, Dims, Soc, Target, TensorDesc};

    /// A tensor of one element that claims to be larger.
    fn stretched(dtype: DType, shape: &[i64]) -> TensorDesc {
        let shape = Dims::new(shape).unwrap();
        let strides = Dims::new(&vec![0; shape.rank()]).unwrap();
        TensorDesc {
            strides,
            ..TensorDesc::packed(dtype, shape)
        }
    }

    fn reached(call: &FiaCall<'_>) -> bool {
        let checked = call
            .check(Version::V1, Target::snapshot(Soc::AtlasA2))
            .unwrap();
        within_reach(&checked.problem).is_ok()
    }

    #[test]
    fn tiny_tensors_that_claim_to_be_large_are_refused() {
        let half = |shape: &[i64]| stretched(DType::Float16, shape);
        let dense = |batch, heads, rows, keys: i64| {
            let key = [half(&[batch, heads, keys, 16])];
            let call = FiaCall {
                query: Some(half(&[batch, heads, rows, 16])),
                key: &key,
                value: &key,
                num_heads: heads,
                attention_out: Some(half(&[batch, heads, rows, 16])),
                ..FiaCall::new("BNSD")
            };
            reached(&call)
        };
        assert!(dense(2, 256, 1000, 1000));
        assert!(dense(1, 8, 20_971_520, 20_971_520));
        assert!(!dense(1, 1, 1_000_000_000_000, 16));
        assert!(!dense(1, 1, 16, 1_000_000_000_000));
        assert!(!dense(60_000, 256, 20_000_000, 16));
        let cache = [half(&[4, 16, 16])];
        let lengths = vec![16_000_000; 65_536];
        let paged = FiaCall {
            query: Some(half(&[65_536, 1, 1, 16])),
            key: &cache,
            value: &cache,
            num_heads: 1,
            block_table: Some(stretched(DType::Int32, &[65_536, 1_000_000])),
            block_size: 16,
            actual_seq_lengths_kv: Some(&lengths),
            attention_out: Some(half(&[65_536, 1, 1, 16])),
            ..FiaCall::new("BNSD")
        };
        assert!(!reached(&paged));
    }
}
