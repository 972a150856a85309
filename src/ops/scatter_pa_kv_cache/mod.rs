//! ScatterPaKvCache: writes new keys and values into the slots of a paged cache.
//!
//! [`ScatterPaKvCache`] describes a call, which is planned once and launched per layer as a [`ScatterPlan`]. The
//! slots are a [`SlotMapping`], checked on the host before they reach the device.

mod slot_mapping;

pub use slot_mapping::SlotMapping;

use std::fmt;
use std::sync::Arc;

use ascend_spec::ops::scatter_pa_kv_cache::{NORM, PA_NZ, Parameter, ScatterCall, Version};
use ascend_spec::scatter_pa_kv_cache_arguments;

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{EntryPoints, NamedTensors, entry_points, phase_one};
use crate::ops::operation::{self, Operation, Sealed};
use crate::runtime::{Queue, ReplayCheck};
use crate::tensor::{AnyTensor, Tensor};

/// Order of the axes of a paged cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CacheOrder {
    /// `[blocks, block size, N, D]`, with the same bytes as `[blocks, block size, N * D]`, as attention names it.
    #[default]
    Norm,
    /// `[blocks, N * D / c, block size, c]` or `[blocks, N, D / c, block size, c]`, where `c` elements are 32 bytes.
    PaNz,
}

impl CacheOrder {
    /// Returns a cache in the operator's axes.
    fn view(self, cache: &AnyTensor, rows: &AnyTensor) -> Result<AnyTensor> {
        let shape = match (self, cache.shape(), rows.shape()) {
            (CacheOrder::Norm, &[blocks, block_size, hidden], &[_, heads, dim])
                if heads.checked_mul(dim) == Some(hidden) =>
            {
                [blocks, block_size, heads, dim]
            }
            (CacheOrder::Norm, &[blocks, 1, block_size, dim], &[_, 1, of]) if dim == of && block_size != 1 => {
                [blocks, block_size, 1, dim]
            }
            _ => return Ok(cache.clone()),
        };
        // A strided one is left for the contract to refuse.
        match cache.is_contiguous() {
            true => cache.reshape(shape),
            false => Ok(cache.clone()),
        }
    }
}

/// What a launch reads and writes: keys and values of new tokens, their slots, and the caches of both; or keys and
/// their cache alone, such as the latent rows of multi-head latent attention. Made from tuples. `T` is the element type
/// of rows and caches.
///
/// The caches are written, though they are borrowed like the rest: a tensor is a handle of device memory.
#[derive(Clone, Copy, Debug)]
#[must_use = "a description of tensors does nothing until planned or launched"]
pub struct ScatterInputs<'a, T: Element> {
    key: &'a Tensor<T>,
    /// The values, with their cache.
    values: Option<(&'a Tensor<T>, &'a Tensor<T>)>,
    slots: &'a SlotMapping,
    key_cache: &'a Tensor<T>,
}

type KeysAndValues<'a, T> = (&'a Tensor<T>, &'a Tensor<T>, &'a SlotMapping, &'a Tensor<T>, &'a Tensor<T>);

impl<'a, T: Element> From<KeysAndValues<'a, T>> for ScatterInputs<'a, T> {
    /// Key, value, slots, key cache and value cache.
    fn from((key, value, slots, key_cache, value_cache): KeysAndValues<'a, T>) -> Self {
        Self { key, values: Some((value, value_cache)), slots, key_cache }
    }
}

impl<'a, T: Element> From<(&'a Tensor<T>, &'a SlotMapping, &'a Tensor<T>)> for ScatterInputs<'a, T> {
    /// Key, slots and key cache.
    fn from((key, slots, key_cache): (&'a Tensor<T>, &'a SlotMapping, &'a Tensor<T>)) -> Self {
        Self { key, values: None, slots, key_cache }
    }
}

entry_points! {
    scatter_pa_kv_cache_arguments, ScatterCall<'_>, AnyArguments::ScatterPaKvCache;
    Version::V1 => 1: aclnnScatterPaKvCacheGetWorkspaceSize, aclnnScatterPaKvCache;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "copy the rows to their slots with aclrtMemcpyAsync";

/// A call of ScatterPaKvCache, which writes the keys and values of new tokens into their slots of a paged cache.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`ScatterPlan`] once a layer. A cache given as
/// attention names it, `[blocks, block size, N * D]`, or `[blocks, 1, block size, D]` of a single head, is viewed as
/// `[blocks, block size, N, D]`, which has the same bytes. The order `[blocks, N, block size, D]` of several heads
/// has other bytes: this operator cannot fill it, nor can a shape alone always tell it from the right one.
///
/// Rows go to slots in no order, and a slot that is there twice gets either of its rows: see [`SlotMapping`]. Caches
/// are written as a whole as far as streams and events are concerned: another stream that uses any block of them has
/// to be ordered by an event.
///
/// Source: aclnnScatterPaKvCache. Not in CANN 8.1, where planning is an [`Error::MissingOperator`].
#[derive(Clone, Debug, Default)]
#[must_use = "a description does nothing until planned"]
pub struct ScatterPaKvCache {
    order: CacheOrder,
}

impl ScatterPaKvCache {
    /// A call that writes caches in the order [`CacheOrder::Norm`].
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the order of the caches (`cacheModeOptional`).
    pub fn cache_order(mut self, order: CacheOrder) -> Self {
        self.order = order;
        self
    }

    /// Checks a call with keys `[tokens, N, D]` and values `[tokens, N, Dv]`, or with keys alone, and prepares it for
    /// tensors of these shapes. Nothing is launched, and the tensors are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`],
    /// [`UNSUPPORTED`](ascend_spec::UNSUPPORTED), [`Error::UnknownProduct`], [`Error::MissingOperator`],
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for
    /// tensors of different devices or slots that were checked for a larger cache. After that [`Error::Aclnn`],
    /// should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnScatterPaKvCacheGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(&self, inputs: impl Into<ScatterInputs<'a, T>>) -> Result<ScatterPlan> {
        let ScatterInputs { key, values, slots, key_cache } = inputs.into();
        let context = key.memory().context();
        slots.tensor().on("slot_mapping", context)?;
        key_cache.on("key_cache", context)?;
        if let Some((value, cache)) = values {
            value.on("value", context)?;
            cache.on("value_cache", context)?;
        }
        let key_cache = self.order.view(key_cache, key)?;
        let value_cache = match values {
            Some((value, cache)) => Some(self.order.view(cache, value)?),
            None => None,
        };
        let of_values = values.zip(value_cache.as_ref()).map(|((value, _), cache)| [&**value, cache]);
        let tensors = tensors([key, &key_cache], of_values, slots);
        let mut call = ScatterCall {
            cache_mode: Some(match self.order {
                CacheOrder::Norm => NORM,
                CacheOrder::PaNz => PA_NZ,
            }),
            ..ScatterCall::default()
        };
        call.describe(&tensors);
        ScatterPlan::of_call((&call, Version::V1), key, &tensors, || {
            let problem = call.check(context.soc()?)?;
            slots.fits(problem.slots())?;
            let operation =
                ScatterOperation { order: self.order, slots: problem.slots(), values: call.value.is_some() };
            let is_idle = problem.tokens == 0;
            if !is_idle {
                let api = context.runtime().api();
                phases_of(Version::V1).required(api, Version::V1.info(), INSTEAD)?;
            }
            Ok((operation, is_idle))
        })
    }
}

/// The tensors of a launch, caches in the operator's axes: the keys and the values, each with their cache.
fn tensors<'a>(
    [key, key_cache]: [&'a AnyTensor; 2],
    values: Option<[&'a AnyTensor; 2]>,
    slots: &'a SlotMapping,
) -> NamedTensors<'a, Parameter> {
    let [value, value_cache] = values.map_or([None; 2], |values| values.map(Some));
    let each = [
        (Parameter::KeyCache, Some(key_cache)),
        (Parameter::ValueCache, value_cache),
        (Parameter::Key, Some(key)),
        (Parameter::SlotMapping, Some(slots.tensor())),
        (Parameter::Value, value),
    ];
    each.into_iter().filter_map(|(parameter, tensor)| Some((parameter, tensor?))).collect()
}

/// A call of ScatterPaKvCache that was checked and prepared. From [`ScatterPaKvCache::plan`].
///
/// A launch reads [`ScatterInputs`], whose caches it writes: it makes no output, so that a captured one is a
/// [`launch`](operation::Plan::launch) too. It refuses slots that were checked for a larger cache. The slots are read
/// on the device, from the memory of the mapping: between the replays of a captured launch [`SlotMapping::overwrite`]
/// replaces them. A slot beyond the cache, in a mapping that was taken unchecked, fails when the stream is
/// synchronised, if the device notices.
pub type ScatterPlan = operation::Plan<ScatterOperation>;

/// ScatterPaKvCache, as its [`ScatterPlan`] knows it.
#[derive(Debug)]
pub struct ScatterOperation {
    order: CacheOrder,
    /// Slots of the caches.
    slots: u64,
    values: bool,
}

impl Sealed for ScatterOperation {}

impl Operation for ScatterOperation {
    type Inputs<'a, T: Element> = ScatterInputs<'a, T>;
    type Output<T: Element> = ();
    type Parameter = Parameter;
    const MAKES_OUTPUT: bool = false;

    fn output<T: Element>(&self, _: &ScatterPlan) -> Result<()> {
        Ok(())
    }

    fn launch<T: Element>(
        &self,
        plan: &ScatterPlan,
        queue: &impl Queue,
        &ScatterInputs { key, values, slots, key_cache }: &ScatterInputs<'_, T>,
        (): &mut (),
    ) -> Result<()> {
        if values.is_some() != self.values {
            let name = |values| match values {
                true => "keys and values",
                false => "keys alone",
            };
            return Err(Error::not_as_planned("value", name(values.is_some()), name(self.values)));
        }
        slots.fits(self.slots)?;
        let key_cache = self.order.view(key_cache, key)?;
        let value_cache = match values {
            Some((value, cache)) => Some(self.order.view(cache, value)?),
            None => None,
        };
        let values = values.zip(value_cache.as_ref()).map(|((value, _), cache)| [&**value, cache]);
        let given = tensors([key, &key_cache], values, slots);
        plan.queue(queue, &given, || Ok(())).flatten()
    }

    #[inline]
    fn replay_check<T: Element>(&self, inputs: &ScatterInputs<'_, T>) -> Option<Arc<dyn ReplayCheck>> {
        inputs.slots.replay_check()
    }

    fn describe(&self, _: &ScatterPlan, text: &mut fmt::DebugStruct<'_, '_>) {
        text.field("cache_order", &self.order).field("slots", &self.slots).field("values", &self.values);
    }
}
