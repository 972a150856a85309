//! GatherPaKvCache: copies the keys and values of sequences out of a paged cache, into rows one after the other.
//!
//! [`GatherPaKvCache`] describes a call, which is planned once and launched per layer as a [`GatherPlan`]. Which
//! blocks hold the sequences is a [`SequenceBlocks`], checked on the host before it reaches the device.

mod sequence_blocks;

pub use sequence_blocks::SequenceBlocks;

use ascend_spec::ops::gather_pa_kv_cache::{GatherCall, Parameter, Version};
use ascend_spec::ops::scatter_pa_kv_cache::{NORM, PA_NZ};
use ascend_spec::{TensorDesc, gather_pa_kv_cache_arguments};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed};
use crate::ops::scatter_pa_kv_cache::CacheOrder;
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    gather_pa_kv_cache_arguments, GatherCall<'_>, AnyArguments::GatherPaKvCache;
    Version::V1 => 1: aclnnGatherPaKvCacheGetWorkspaceSize, aclnnGatherPaKvCache;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "copy the rows out of their blocks with aclrtMemcpyAsync";

/// A call of GatherPaKvCache, which copies the keys and values of sequences out of a paged cache.
///
/// Describe it, plan it for caches of certain shapes, and launch the [`GatherPlan`] once a layer. Prefill over a
/// cached prefix that attention cannot read by its table, and moving a cache to another machine, begin with such a
/// call.
///
/// Source: aclnnGatherPaKvCache, since CANN 8.5; before, planning is an [`Error::MissingOperator`].
///
/// ```
/// use ascend_attention::gather::{GatherPaKvCache, SequenceBlocks};
/// use ascend_attention::{Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// // 3 blocks of 2 tokens with a head of 16 numbers: token by token 0, 1, ... 5.
/// let numbers: Vec<f16> = (0..6).flat_map(|token| [f16::from_f32(token as f32); 16]).collect();
/// let cache = stream.upload(&numbers, [3, 2, 1, 16])?;
/// let sequences = SequenceBlocks::new(&stream, &[vec![2, 0]], &[3], 3, 2)?;
/// let plan = GatherPaKvCache::new().plan(&sequences, (&cache, &cache))?;
/// let (keys, _values) = plan.launch(&stream, (&cache, &cache))?;
/// assert_eq!(keys.shape(), [3, 1, 16]);
/// let gathered = keys.download(&stream)?;
/// assert_eq!([gathered[0], gathered[16], gathered[32]].map(f16::to_f32), [4.0, 5.0, 0.0]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a description does nothing until planned"]
pub struct GatherPaKvCache {
    order: CacheOrder,
    allowed: AllowedLints,
}

impl GatherPaKvCache {
    /// A call that reads caches in the order [`CacheOrder::Norm`].
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the order of the caches (`cacheMode`).
    pub fn cache_order(mut self, order: CacheOrder) -> Self {
        self.order = order;
        self
    }

    /// Lets a call through that breaks this lint: `gather.unit` or `gather.token_bytes`.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call with caches `[blocks, block size, N, D]` and `[blocks, block size, N, Dv]`, or in the order
    /// [`CacheOrder::PaNz`] `[blocks, N * D / c, block size, c]` with `c` elements in 32 bytes, and prepares it for
    /// caches of these shapes. Nothing is launched, and the caches are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`], [`Error::UnknownProduct`],
    /// [`Error::MissingOperator`], [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for tensors of different devices, or sequences that were
    /// checked for another cache. After that [`Error::Aclnn`], should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnGatherPaKvCacheGetWorkspaceSize")]
    pub fn plan<T: Element>(&self, sequences: &SequenceBlocks, caches: (&Tensor<T>, &Tensor<T>)) -> Result<GatherPlan> {
        let (key_cache, value_cache) = caches;
        let context = key_cache.memory().context();
        let tensors: NamedTensors<'_, _> = Self::tensors(sequences, &caches).collect();
        GatherCall::check_device(Version::V1, context, INSTEAD, tensors.iter().copied())?;
        let rows = |cache: &AnyTensor| {
            let tokens = i64::try_from(sequences.tokens()).unwrap_or(i64::MAX);
            let shape = match (self.order, &cache.desc().shape[..]) {
                (CacheOrder::Norm, &[_, _, heads, dim]) => vec![tokens, heads, dim],
                (CacheOrder::PaNz, &[_, parts, _, lanes]) => {
                    vec![tokens, parts.saturating_mul(lanes)]
                }
                // The contract refuses the cache.
                _ => vec![tokens, 1],
            };
            TensorDesc::contiguous(cache.dtype(), &shape)
        };
        let mut call = GatherCall {
            key: rows(key_cache),
            value: rows(value_cache),
            cache_mode: Some(match self.order {
                CacheOrder::Norm => NORM,
                CacheOrder::PaNz => PA_NZ,
            }),
            ..GatherCall::default()
        };
        call.describe(&tensors);
        GatherPlan::of_call((&call, Version::V1), key_cache, &tensors, || {
            let target = context.target()?;
            let problem = call.check(target)?;
            call.lint(target, &self.allowed.ids(lints_of::<Version>)?)?;
            sequences.fits(&problem)?;
            if call.key.is_none() || call.value.is_none() {
                return Err(Error::invalid("sequences", "no rows", "rows that memory can hold")
                    .fix("gather fewer sequences at once"));
            }
            let operation = PlainOperation::new(sequences.clone(), [sequences.replay_check()]);
            Ok((operation, problem.is_idle()))
        })
    }
}

/// A call of GatherPaKvCache that was checked and prepared. From [`GatherPaKvCache::plan`].
///
/// A launch reads the pair of both caches, and writes the pair of keys and values of all sequences: `[tokens, N, D]`
/// and `[tokens, N, Dv]`, or in the order [`CacheOrder::PaNz`] `[tokens, N * D]` and `[tokens, N * Dv]`.
pub type GatherPlan = operation::Plan<PlainOperation<GatherPaKvCache>>;

impl Sealed for GatherPaKvCache {}

impl PlainCall for GatherPaKvCache {
    type Inputs<'a, T: Element> = (&'a Tensor<T>, &'a Tensor<T>);
    type Output<T: Element> = (Tensor<T>, Tensor<T>);
    type Parameter = Parameter;
    type Kept = SequenceBlocks;
    const OUTPUTS: &'static [Parameter] = &[Parameter::Key, Parameter::Value];

    fn tensors<'t, 'i: 't, T: Element>(
        sequences: &'t SequenceBlocks,
        (key_cache, value_cache): &'t (&'i Tensor<T>, &'i Tensor<T>),
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        let caches: [(_, &AnyTensor); 2] = [(Parameter::KeyCache, key_cache), (Parameter::ValueCache, value_cache)];
        let blocks: [(_, &AnyTensor); 2] =
            [(Parameter::BlockTables, sequences.block_tables()), (Parameter::SeqLens, sequences.seq_lens())];
        caches.into_iter().chain(blocks)
    }
}
