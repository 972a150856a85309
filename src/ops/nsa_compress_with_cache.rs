//! NsaCompressWithCache: the newest block of tokens of each sequence, compressed into a cache.
//!
//! [`NsaCompressWithCache`] describes a call, which is planned once a step and launched per layer as an
//! [`NsaCompressCachePlan`]. Which row of the cache each sequence writes is a [`CompressedSlots`], which the host
//! knows.

use std::sync::Arc;

use ascend_spec::nsa_compress_with_cache_arguments;
use ascend_spec::ops::nsa_compress_with_cache::{NsaCompressCacheCall, NsaCompressCacheProblem, Parameter, Version};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::known_numbers::{narrow, numbers};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed};
use crate::ops::sparse_sequences::SparseSequences;
use crate::runtime::Stream;
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    nsa_compress_with_cache_arguments, NsaCompressCacheCall<'_>, AnyArguments::NsaCompressWithCache;
    Version::V1 => 1: aclnnNsaCompressWithCacheGetWorkspaceSize, aclnnNsaCompressWithCache;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "multiply blocks and their weights with BatchMatMul, or attend to all tokens";

/// A call of NsaCompressWithCache: where the newest token of a sequence is the last of a block, the block becomes one
/// token of a cache, as [`NsaCompress`](crate::nsa_compress::NsaCompress) makes it. Other sequences leave the cache as
/// it is.
///
/// Describe it, plan it once a step, and launch the [`NsaCompressCachePlan`] once a layer, for keys and for values.
///
/// Source: aclnnNsaCompressWithCache, since CANN 8.5, on Atlas A2 and A3; elsewhere planning is an
/// [`Error::MissingOperator`](crate::Error::MissingOperator) or an [`Error::Violation`](crate::Error::Violation).
///
/// ```
/// use ascend_attention::nsa_compress_with_cache::{CompressedSlots, NsaCompressWithCache};
/// use ascend_attention::sparse::SparseSequences;
/// use ascend_attention::{Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// // Two sequences with a block of 64 tokens each: of 32 tokens, which complete a block, and of 33.
/// let tokens = stream.upload(&[f16::ONE; 2 * 64 * 16], [2, 64, 1, 16])?;
/// let weights = stream.upload(&[f16::from_f32(0.125); 32], [32, 1])?;
/// let cache = stream.upload(&[f16::ZERO; 3 * 16], [3, 1, 16])?;
/// let sequences = SparseSequences::padded(&stream, &[1, 1], &[32, 33])?.paged(&stream, &[[1], [0]])?;
/// let slots = CompressedSlots::new(&stream, &[2, 0])?;
/// let inputs = (&tokens, &weights, &slots, &cache);
/// NsaCompressWithCache::new(32, 16).plan(&sequences, inputs)?.launch(&stream, inputs)?;
/// let slots = cache.download(&stream)?;
/// assert_eq!([slots[0], slots[16], slots[32]].map(f16::to_f32), [0.0, 0.0, 4.0]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct NsaCompressWithCache {
    block: i64,
    stride: i64,
    allowed: AllowedLints,
}

impl NsaCompressWithCache {
    /// A call that compresses blocks of `block` tokens, of which one begins every `stride` tokens of a sequence.
    pub fn new(block: usize, stride: usize) -> Self {
        let [block, stride] = [block, stride].map(|size| i64::try_from(size).unwrap_or(i64::MAX));
        Self { block, stride, allowed: AllowedLints::default() }
    }

    /// Lets a call through that breaks this lint, which stays within the call's tensors.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call with the keys of `sequences` as tokens, `[blocks, page, N, D]` or, packed, `[T, N, D]`, weights
    /// `[block, N]` and a cache `[slots, N, D]`, and prepares it for tensors of these shapes and strides. Nothing is
    /// launched, and the tensors are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation), by
    /// `nsa_compress_with_cache.contents` for slots and blocks that the caches do not have, and slots that are there
    /// twice, of sequences that write a token;
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator),
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for padded sequences without a block table,
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnNsaCompressWithCacheGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(
        &self,
        sequences: &SparseSequences,
        inputs: impl Into<NsaCompressCacheInputs<'a, T>>,
    ) -> Result<NsaCompressCachePlan> {
        let inputs = inputs.into();
        let input = inputs.input;
        let context = input.memory().context();
        NsaCompressCacheCall::check_device(Version::V1, context, INSTEAD, inputs.each())?;
        sequences.on(context)?;
        if sequences.block_table().is_none() && sequences.layouts()[1] != "TND" {
            return Err(Error::invalid("sequences", "padded sequences", "packed ones, or keys in a paged cache")
                .fix("make them by `SparseSequences::packed`"));
        }
        let ([_, lengths], fixed) = sequences.lengths()?;
        let table = sequences.table(Parameter::BlockTable);
        let tensors: NamedTensors<'_, _> = inputs.each().into_iter().chain(table).collect();
        let mut call = NsaCompressCacheCall {
            act_seq_len: Some(&lengths),
            layout: Some("TND"),
            compress_block_size: self.block,
            compress_stride: self.stride,
            page_block_size: input.desc().shape.get(1).copied().unwrap_or(0),
            ..NsaCompressCacheCall::default()
        };
        call.describe(&tensors);
        NsaCompressCachePlan::of_call((&call, Version::V1), input, &tensors, || {
            let target = context.target()?;
            let problem = call.check(target)?;
            call.lint(target, &self.allowed.ids(lints_of::<Version>)?)?;
            let within = sequences.check_slots(problem, &inputs.slots.numbers)?;
            let kept = SlotChecks { problem, sequences: sequences.clone() };
            Ok((PlainOperation::new(kept, [fixed, within]), false))
        })
    }
}

/// The row of a cache of compressed tokens that each sequence writes, on the device and known to the host. It counts
/// where a sequence has a new block. Cloning shares the memory.
#[derive(Clone, Debug)]
pub struct CompressedSlots {
    tensor: Tensor<i32>,
    numbers: Arc<[i64]>,
}

impl CompressedSlots {
    /// Copies the slot of each sequence to the device.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for slots beyond INT32; otherwise as for [`Stream::upload`].
    pub fn new(stream: &Stream, slots: &[usize]) -> Result<Self> {
        let numbers = numbers("slots", slots.iter().copied())?;
        let slots: Vec<i32> = numbers.iter().copied().map(narrow).collect();
        let tensor = stream.upload(&slots, [slots.len()])?;
        tensor.freeze();
        Ok(Self { tensor, numbers: numbers.into() })
    }

    /// The slots on the device, `[B]`. Nothing can be written to them.
    pub fn tensor(&self) -> &Tensor<i32> {
        &self.tensor
    }
}

/// What a launch reads and writes. From tokens, weights, slots and the cache, which is written, though it is borrowed
/// like the rest: a tensor is a handle of device memory.
#[derive(Clone, Copy, Debug)]
#[must_use = "a description of tensors does nothing until planned or launched"]
pub struct NsaCompressCacheInputs<'a, T: Element> {
    input: &'a Tensor<T>,
    weight: &'a Tensor<T>,
    slots: &'a CompressedSlots,
    cache: &'a Tensor<T>,
}

type CacheTensors<'a, T> = (&'a Tensor<T>, &'a Tensor<T>, &'a CompressedSlots, &'a Tensor<T>);

impl<'a, T: Element> From<CacheTensors<'a, T>> for NsaCompressCacheInputs<'a, T> {
    /// Tokens, weights, slots and the cache.
    fn from((input, weight, slots, cache): CacheTensors<'a, T>) -> Self {
        Self { input, weight, slots, cache }
    }
}

impl<'a, T: Element> NsaCompressCacheInputs<'a, T> {
    /// The tensor of each argument.
    fn each(&self) -> [(Parameter, &'a AnyTensor); 4] {
        [
            (Parameter::OutputCache, self.cache),
            (Parameter::Input, self.input),
            (Parameter::Weight, self.weight),
            (Parameter::SlotMapping, &self.slots.tensor),
        ]
    }
}

/// A call of NsaCompressWithCache that was checked and prepared. From [`NsaCompressWithCache::plan`].
///
/// A launch reads [`NsaCompressCacheInputs`], whose cache it writes: it makes no output, so that a captured one is a
/// [`launch`](operation::Plan::launch) too. It refuses slots that the cache does not have.
pub type NsaCompressCachePlan = operation::Plan<PlainOperation<NsaCompressWithCache>>;

/// What a plan of NsaCompressWithCache checks slots by, and the sequences of its launches.
#[doc(hidden)]
#[derive(Debug)]
pub struct SlotChecks {
    problem: NsaCompressCacheProblem,
    sequences: SparseSequences,
}

impl Sealed for NsaCompressWithCache {}

impl PlainCall for NsaCompressWithCache {
    type Inputs<'a, T: Element> = NsaCompressCacheInputs<'a, T>;
    type Output<T: Element> = ();
    type Parameter = Parameter;
    type Kept = SlotChecks;
    const OUTPUTS: &'static [Parameter] = &[];

    fn tensors<'t, 'i: 't, T: Element>(
        kept: &'t SlotChecks,
        inputs: &'t NsaCompressCacheInputs<'i, T>,
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs.each().into_iter().chain(kept.sequences.table(Parameter::BlockTable))
    }

    fn admits<T: Element>(kept: &SlotChecks, inputs: &NsaCompressCacheInputs<'_, T>) -> Result<()> {
        kept.sequences.admits_slots(&kept.problem, &inputs.slots.numbers)
    }
}
