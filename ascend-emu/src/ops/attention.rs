//! Attention operators: a call that was checked, whether the kernels can compute it, and what a launch of it does.

use super::contiguous::{gather, scatter};
use super::declared::{DeclaredOperator, Launch};
use super::{attention_contents, attention_reads};
use crate::config::{Check, check};
use crate::elements::{Elements, Reader};
use crate::kernel::{self, Buffers, RunOptions};
use crate::lints;
use crate::runtime::context;
use crate::status::{AICORE_EXCEPTION, Failure, Outcome};
use ascend_spec::attention_problem::{AttentionArguments, AttentionProblem, MaskTensor, MaskUse, TensorRole};
use ascend_spec::operator::{Argument, DeclaredVersion, EntryPoint};
use ascend_spec::ops::fused_infer_attention_score::CheckedCall;
use ascend_spec::{Level, SparseMode, Target, TensorDesc, Violation};
use std::ops::Range;
use std::ptr;

/// What an attention operator has of its own, beside its contract.
pub(crate) trait AttentionCall: AttentionArguments + Send + Sync + 'static {
    /// The tensors that the kernels read and write only in row-major order: the operator makes contiguous copies of
    /// others.
    const IN_ORDER: &'static [TensorRole] = &[];

    /// Whether a call is launched that breaks a lint by which the device may access memory outside of the tensors.
    const OVERRUNS: bool = false;

    /// The truth values of a mask whose elements are numbers, as the kernels read them.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::compute`].
    unsafe fn truth_values(_: &Launch<'_, Attention<Self>>) -> Outcome<Option<TruthValues>>
    where
        Self: Sized,
    {
        Ok(None)
    }

    /// Sees the end of a launch.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::run`]; the launch has finished writing.
    unsafe fn ran(_: &Launch<'_, Attention<Self>>, _: Result<(), &Failure>)
    where
        Self: Sized,
    {
    }
}

/// A mask of numbers as one of truth values, a byte for each: any but 0 hides.
pub(crate) struct TruthValues {
    pub(super) values: Vec<u8>,
    /// Where the values for rows and keys are.
    pub(super) places: MaskTensor,
}

/// Bytes of each tensor that a launch touches, from the tensor's base address.
type Touches<P> = Vec<(Argument<P>, Range<u64>)>;

/// A call that satisfies every rule, of the operator with these arguments.
pub(crate) struct Attention<A: AttentionArguments> {
    pub(super) arguments: A,
    pub(super) version: A::Version,
    pub(super) target: Target,
    /// What the call computes; `None` if it computes nothing.
    pub(super) problem: Option<AttentionProblem<'static>>,
    pub(super) touches: Touches<A::Parameter>,
    /// Whether the call breaks a lint by which the device may access memory outside of the call's tensors.
    overruns: bool,
    /// How strictly misuse that is found on the device is treated.
    check: Check,
    /// Whether the length arrays are placeholders, with which nothing can be computed.
    measured: bool,
    /// Whether the context asked for deterministic operators when the call was prepared.
    deterministic: bool,
}

/// Largest number of elements of a contiguous copy. Tensors of stride 0 are small however many elements they have.
const MOST_COPIED: u64 = 1 << 32;

/// Checks calls of a version as the process's machine does; `descs` describes the arguments.
pub(super) fn of_machine<D, A: AttentionCall>(
    version: A::Version,
    descs: impl FnOnce(&D) -> A,
) -> impl FnOnce(&D) -> Outcome<Attention<A>> {
    move |arguments| Attention::new(descs(arguments), version, context::machine().target, false)
}

impl<A: AttentionCall> Attention<A> {
    /// Checks a call for a product and a release. The lengths of a `measured` call are placeholders.
    pub(crate) fn new(arguments: A, version: A::Version, target: Target, measured: bool) -> Outcome<Self> {
        let symbol = version.info().symbol();
        let (mut overruns, mut problem) = (false, Ok(None));
        lints::report(symbol, &arguments, |report| {
            problem = arguments.resolve(version, target, &mut |lint| {
                overruns |= lint.rule.overruns;
                // Lints about placeholder lengths do not apply to the later lengths.
                if !measured || lint.rule.level == Level::HostCrash {
                    report(lint);
                }
            });
        })?;
        let problem = problem.map_err(|refusal| lints::refused(symbol, refusal))?;
        if let Some(problem) = &problem {
            within_reach(problem)?;
        }
        let mut op = Attention {
            arguments,
            version,
            target,
            problem,
            touches: Vec::new(),
            overruns: overruns && A::OVERRUNS,
            check: check(),
            measured,
            deterministic: context::is_deterministic(),
        };
        op.touches = op.find_touches()?;
        Ok(op)
    }

    fn find_touches(&self) -> Result<Touches<A::Parameter>, Violation> {
        let mut touches = Touches::new();
        let Some(problem) = &self.problem else {
            return Ok(touches);
        };
        let mut large = false;
        problem.touches(&mut |role, range| {
            let Some(argument) = A::of_role(role) else {
                return;
            };
            let range = match self.copied(problem, role) {
                Some((_, desc)) => {
                    let elements = desc.elements().unwrap_or(u64::MAX);
                    large |= elements > MOST_COPIED;
                    // The elements of the copy are contiguous.
                    let copy = TensorDesc::packed(desc.dtype, desc.shape).byte_range();
                    let walked = range.zip(copy);
                    let inside = walked.is_some_and(|(range, copy)| range.end <= copy.end);
                    desc.byte_range().filter(|_| inside)
                }
                None => range,
            };
            // A range that no memory could hold is refused by the allocation table.
            touches.push((argument, range.unwrap_or(0..u64::MAX)));
        });
        match large {
            true => Err(Violation::unsupported(
                "a mask, bias or output of more than 4294967296 elements that is not contiguous",
            )),
            false => Ok(touches),
        }
    }

    /// The tensor with a role, if its elements are read or written through a contiguous copy.
    fn copied(
        &self,
        problem: &AttentionProblem<'_>,
        role: TensorRole,
    ) -> Option<(Argument<A::Parameter>, &TensorDesc)> {
        let by_order = match role {
            TensorRole::Mask => problem.mask == MaskUse::OfSequences,
            // Slopes are read in place.
            TensorRole::Bias => problem.bias.is_some(),
            _ => true,
        };
        let argument = A::of_role(role).filter(|_| by_order && A::IN_ORDER.contains(&role))?;
        let desc = self.arguments.tensor(argument)?;
        (!desc.is_contiguous()).then_some((argument, desc))
    }
}

impl<A: AttentionCall> DeclaredOperator for Attention<A> {
    type Arguments = A;

    fn symbol(&self) -> &'static str {
        self.version.info().symbol()
    }

    fn entry_point(&self) -> EntryPoint<A::Parameter> {
        A::entry_point(self.version)
    }

    fn arguments(&self) -> &A {
        &self.arguments
    }

    fn check(&self) -> Check {
        self.check
    }

    fn is_idle(&self) -> bool {
        match self.measured {
            // A call with other lengths may have something to compute.
            true => {
                let query = A::of_role(TensorRole::Query);
                let query = query.and_then(|query| self.arguments.tensor(query));
                query.is_none_or(TensorDesc::is_empty)
            }
            false => self.touches.is_empty(),
        }
    }

    fn overruns(&self) -> bool {
        self.overruns
    }

    fn unlaunchable(&self) -> Option<&'static str> {
        self.measured
            .then_some("the executor is of GetMaxWorkspaceSize, which keeps no lengths: launch one of GetWorkspaceSize")
    }

    fn touches(&self, visit: &mut dyn FnMut(Argument<A::Parameter>, Range<u64>)) {
        for (argument, range) in &self.touches {
            visit(*argument, range.clone());
        }
    }

    unsafe fn reads(&self, launch: &Launch<'_, Self>, reader: &mut dyn Reader) {
        if let Some(problem) = &self.problem {
            // SAFETY: the caller's promise.
            unsafe { attention_reads::reads(launch, problem, &A::of_role, reader) };
        }
    }

    unsafe fn writes(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
        let softmax = self.problem.as_ref().and_then(|problem| problem.softmax);
        let order = softmax.and_then(|softmax| softmax.order);
        let ordered = [TensorRole::SoftmaxMax, TensorRole::SoftmaxSum].map(A::of_role);
        launch.outputs(&mut |argument, elements| {
            let order = order.filter(|_| ordered.contains(&Some(argument)));
            visit(&elements.in_order(order));
        });
    }

    unsafe fn run(&self, launch: &Launch<'_, Self>) -> Outcome {
        let outcome = match self.is_idle() {
            true => Ok(()),
            // SAFETY: the caller's promise; the outputs overlap no other tensor.
            false => launch.refuse_overlap().and_then(|()| unsafe { self.compute(launch) }),
        };
        // SAFETY: the caller's promise; the launch has ended.
        unsafe { A::ran(launch, outcome.as_ref().map(|_| ())) };
        outcome
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        let Some(problem) = &self.problem else {
            return Ok(());
        };
        let mut copies: Vec<(TensorRole, Vec<u8>)> = Vec::new();
        for &role in A::IN_ORDER {
            if let Some((argument, desc)) = self.copied(problem, role) {
                // SAFETY: the ranges of `touches`, which has all of this tensor, are live and locked for the task
                // that runs this.
                let copy = unsafe { gather(desc, launch.base(argument)) };
                let copy = copy.map_err(|why| launch.fault(why))?;
                copies.push((role, copy));
            }
        }
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this.
        let truth = unsafe { A::truth_values(launch) }?;
        let masked = truth.map(|TruthValues { values, places }| {
            copies.push((TensorRole::Mask, values));
            let mut problem = problem.clone();
            problem.mask = MaskUse::Full(places);
            problem.mode = SparseMode::AllMask;
            problem
        });
        let problem = masked.as_ref().unwrap_or(problem);
        let copy_addresses: Vec<(TensorRole, *mut u8)> =
            copies.iter_mut().map(|(role, copy)| (*role, copy.as_mut_ptr())).collect();
        let base = |role: TensorRole| {
            let copy = copy_addresses.iter().find(|(copied, _)| *copied == role);
            match (copy, A::of_role(role)) {
                (Some((_, copy)), _) => *copy,
                (None, Some(argument)) => launch.base(argument),
                (None, None) => ptr::null_mut(),
            }
        };
        let buffers = Buffers(&base);
        let name = |role| A::of_role(role).map(Argument::acl_name);
        // SAFETY: the ranges that `AttentionProblem::touches` reports are those of `touches`: live (the allocation
        // table let the launch in), locked for the task that runs this, and, as the launch has found, with outputs
        // apart from everything else. Copies have all elements of their tensors.
        unsafe { attention_contents::inspect(launch, problem, &buffers, &name) }?;
        let options = RunOptions { deterministic: self.deterministic, ..RunOptions::default() };
        // SAFETY: the ranges of `touches` are live and locked for this task, and the outputs overlap nothing else.
        unsafe { kernel::run_with(problem, &buffers, &options) }
            .map_err(|unsupported| Failure::new(AICORE_EXCEPTION, unsupported.to_string()))?;
        for (role, copy) in &copies {
            let copied = self.copied(problem, *role);
            if let Some((argument, desc)) = copied.filter(|(argument, _)| argument.is_output()) {
                // SAFETY: the bytes of an output are those of `touches`, live and locked for this task.
                unsafe { scatter(desc, copy, launch.base(argument)) };
            }
        }
        Ok(())
    }
}

/// Defines both functions of each version of an attention operator whose versions extend each other.
macro_rules! attention_functions {
    ($table:ident; $($number:tt $version:ident: $one:ident, $two:ident;)*) => {
        c_functions! {
            $table;
            $($number $version: $one, $two => of_machine(
                Version::$version,
                |arguments: &Arguments<DescribedTensor>| arguments.map(|_, tensor| tensor.desc),
            );)*
        }
    };
}

pub(super) use attention_functions;

/// Largest number of query blocks, and of cached key blocks, that a launch keeps a list of.
const MOST_BLOCKS: usize = 1 << 26;

/// Checks that the kernel can compute a call. Tensors of stride 0 are small however many rows they have, so memory
/// alone does not limit their rows.
fn within_reach(problem: &AttentionProblem<'_>) -> Result<(), Violation> {
    let unsupported = |feature| Err(Violation::unsupported(feature));
    if problem.batch > MOST_BLOCKS {
        // An empty query may have any number of sequences.
        return unsupported("more than 67108864 sequences");
    }
    let longest = (0..problem.batch).map(|b| problem.kv_len(b)).max();
    let longest = longest.unwrap_or(0);
    if problem.query_rows > CheckedCall::MOST_ROWS || longest > CheckedCall::MOST_ROWS {
        return unsupported("a sequence of more than 20971520 query rows or keys");
    }
    let queries =
        problem.batch.saturating_mul(problem.heads).saturating_mul(problem.query_rows.div_ceil(kernel::BLOCK_QUERIES));
    let keys = problem.pages.map_or(0, |pages| {
        let blocks = longest.div_ceil(pages.block_size.max(1));
        problem.batch.saturating_mul(blocks)
    });
    if queries.max(keys) > MOST_BLOCKS {
        return unsupported("more than 67108864 blocks of queries or of cached keys");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::within_reach;
    use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
    use ascend_spec::{DType, Dims, Soc, Target, TensorDesc};

    /// A tensor of one element in memory, whose shape claims more.
    fn stretched(dtype: DType, shape: &[i64]) -> TensorDesc {
        let shape = Dims::new(shape).unwrap();
        let strides = Dims::new(&vec![0; shape.rank()]).unwrap();
        TensorDesc { strides, ..TensorDesc::packed(dtype, shape) }
    }

    fn reached(call: &FiaCall<'_>) -> bool {
        let checked = call.check(Version::V1, Target::snapshot(Soc::AtlasA2)).unwrap();
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
