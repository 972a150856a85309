//! Keys and values out of a paged cache.

use std::fmt;
use std::sync::Arc;

use ascend_spec::declared::AnyArguments;
use ascend_spec::ops::gather_pa_kv_cache::{Argument, GatherCall, Parameter, Version};
use ascend_spec::ops::scatter_pa_kv_cache::{NORM, PA_NZ};
use ascend_spec::{TensorDesc, arguments_of_version, gather_pa_kv_cache_arguments};
use ascend_sys::Api;

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{
    self, AllowedLints, Descriptors, Plan, Tensors, entry_points, into_new, lies_as_planned,
    lints_of, new_output, phase_one, standing_in,
};
use crate::ops::recorded_plan::RecordedPlan;
use crate::ops::scatter_pa_kv_cache::CacheOrder;
use crate::runtime::{Context, LaunchQueue, Queue};
use crate::tensor::{AnyTensor, Tensor};

use super::SequenceBlocks;

entry_points! {
    gather_pa_kv_cache_arguments, GatherCall<'_>, Parameter, Version;
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
/// let plan = GatherPaKvCache::new().plan(&sequences, &cache, &cache)?;
/// let (keys, _values) = plan.launch(&stream, &cache, &cache)?;
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
    pub fn plan<T: Element>(
        &self,
        sequences: &SequenceBlocks,
        key_cache: &Tensor<T>,
        value_cache: &Tensor<T>,
    ) -> Result<GatherPlan> {
        let context = key_cache.memory().context();
        let api = context.runtime().api();
        phases_of(Version::V1).required(api, Version::V1.info(), INSTEAD)?;
        value_cache.on("value_cache", context)?;
        sequences.block_tables().on("block_tables", context)?;
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
        let call = GatherCall {
            key_cache: Some(*key_cache.desc()),
            value_cache: Some(*value_cache.desc()),
            block_tables: Some(*sequences.block_tables().desc()),
            seq_lens: Some(*sequences.seq_lens().desc()),
            key: rows(key_cache),
            value: rows(value_cache),
            cache_mode: Some(match self.order {
                CacheOrder::Norm => NORM,
                CacheOrder::PaNz => PA_NZ,
            }),
            ..GatherCall::default()
        };
        let soc = context.soc()?;
        let problem = call.check(soc)?;
        call.lint(&problem, soc, &self.allowed.ids(lints_of::<Version>)?)?;
        sequences.fits(&problem)?;
        let outputs = (call.key, call.value);
        let (Some(key), Some(value)) = outputs else {
            return Err(
                Error::invalid("sequences", "no rows", "rows that memory can hold")
                    .fix("gather fewer sequences at once"),
            );
        };
        let prepared = match problem.tokens {
            0 => None,
            _ => Some(RecordedPlan::new(
                prepare(context, &call, key_cache)?,
                AnyArguments::GatherPaKvCache(call.to_arguments()),
                Version::V1.number(),
            )),
        };
        Ok(GatherPlan {
            context: Arc::clone(context),
            sequences: sequences.clone(),
            outputs: [key, value],
            caches: [*key_cache.desc(), *value_cache.desc()],
            prepared,
        })
    }
}

impl operator::Parameter for Parameter {}

/// Prepares a call that the contract has accepted, with one placeholder address for all tensors.
fn prepare(
    context: &Arc<Context>,
    call: &GatherCall<'_>,
    stand_in: &AnyTensor,
) -> Result<Plan<Parameter>> {
    let tensors = standing_in(call.each_tensor(), stand_in);
    let phase_one = |api: &Api, descriptors: &mut Descriptors<Parameter>| {
        phase_one(api, Version::V1, call, descriptors)
    };
    // SAFETY: phase one is called with pointers of the descriptors, and only its executor is returned.
    unsafe { Plan::new(context, &phases_of(Version::V1), &tensors, &[], phase_one) }
}

/// A call of GatherPaKvCache that was checked and prepared. From [`GatherPaKvCache::plan`].
///
/// All layers of a step share its shapes: one plan serves them all, and a launch swaps addresses and nothing else.
///
/// # Threads
/// `Send` and `Sync`. Launches of one plan from several threads take turns.
pub struct GatherPlan {
    context: Arc<Context>,
    sequences: SequenceBlocks,
    /// Keys and values.
    outputs: [TensorDesc; 2],
    /// Keys and values.
    caches: [TensorDesc; 2],
    /// `None` without tokens.
    prepared: Option<RecordedPlan<Parameter>>,
}

/// The tensors of a launch.
struct Given<'a> {
    plan: &'a GatherPlan,
    caches: [&'a AnyTensor; 2],
    outputs: [&'a AnyTensor; 2],
}

impl Tensors<Parameter> for Given<'_> {
    fn each<'t>(
        &'t self,
        mut visit: impl FnMut(Argument, &'t AnyTensor) -> Result<()>,
    ) -> Result<()> {
        let [key, value] = self.outputs;
        visit(Parameter::Key.into(), key)?;
        visit(Parameter::Value.into(), value)?;
        let [key_cache, value_cache] = self.caches;
        visit(Parameter::KeyCache.into(), key_cache)?;
        visit(Parameter::ValueCache.into(), value_cache)?;
        let sequences = &self.plan.sequences;
        visit(Parameter::BlockTables.into(), sequences.block_tables())?;
        visit(Parameter::SeqLens.into(), sequences.seq_lens())
    }
}

impl GatherPlan {
    /// Bytes of scratch memory that a launch needs. They belong to the stream, which keeps them for later launches.
    pub fn workspace_bytes(&self) -> usize {
        (self.prepared.as_ref()).map_or(0, RecordedPlan::workspace_bytes)
    }

    /// Queues the copies into new tensors: keys and values of all sequences, `[tokens, N, D]` and `[tokens, N, Dv]`,
    /// or in the order [`CacheOrder::PaNz`] `[tokens, N * D]` and `[tokens, N * Dv]`. Returns at once.
    ///
    /// # Errors
    /// As for [`GatherPlan::launch_into`], and for [`Device::alloc`](crate::Device::alloc); [`Error::Capturing`] for
    /// a graph that is captured, whose launches write outputs that were there before.
    #[doc(alias = "aclnnGatherPaKvCache")]
    pub fn launch<T: Element>(
        &self,
        queue: &impl Queue,
        key_cache: &Tensor<T>,
        value_cache: &Tensor<T>,
    ) -> Result<(Tensor<T>, Tensor<T>)> {
        let output = || {
            let [key, value] = self.outputs;
            Ok((
                new_output(&self.context, Parameter::Key.name(), key)?,
                new_output(&self.context, Parameter::Value.name(), value)?,
            ))
        };
        into_new(queue, output, |(key, value)| {
            self.launch_into(queue, key_cache, value_cache, key, value)
        })
    }

    /// Queues the copies into tensors of the caller. Returns at once, and allocates no host memory from the second
    /// launch on a stream on.
    ///
    /// # Errors
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for tensors that differ from the planned ones in more than their
    /// addresses; [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for tensors of another device, or outputs that share
    /// memory with another tensor; [`Error::OutOfMemory`] for the workspace; [`Error::Aclnn`]. A failure while it
    /// runs shows when the stream is synchronised.
    #[doc(alias = "aclnnGatherPaKvCache")]
    pub fn launch_into<T: Element>(
        &self,
        queue: &impl Queue,
        key_cache: &Tensor<T>,
        value_cache: &Tensor<T>,
        key: &mut Tensor<T>,
        value: &mut Tensor<T>,
    ) -> Result<()> {
        queue.note(self.run(queue, [key_cache, value_cache], [key, value]))
    }

    fn run(
        &self,
        queue: &impl LaunchQueue,
        caches: [&AnyTensor; 2],
        outputs: [&AnyTensor; 2],
    ) -> Result<()> {
        let given = Given {
            plan: self,
            caches,
            outputs,
        };
        let Some(prepared) = &self.prepared else {
            self.context.admits("stream", queue.context())?;
            let [key, value] = given.outputs;
            let [key_cache, value_cache] = given.caches;
            let tensors = [
                (Parameter::Key, key, self.outputs[0]),
                (Parameter::Value, value, self.outputs[1]),
                (Parameter::KeyCache, key_cache, self.caches[0]),
                (Parameter::ValueCache, value_cache, self.caches[1]),
            ];
            for (parameter, tensor, planned) in tensors {
                tensor.on(parameter.name(), &self.context)?;
                lies_as_planned(parameter, tensor, &planned)?;
            }
            return Ok(());
        };
        prepared.run(queue, &given, || Ok(()))?
    }
}

impl fmt::Debug for GatherPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GatherPlan")
            .field("sequences", &self.sequences)
            .field("workspace_bytes", &self.workspace_bytes())
            .finish_non_exhaustive()
    }
}
