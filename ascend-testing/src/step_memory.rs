//! What a planned step says of the device's memory, compared with what it takes.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::Arc;

use ascend_attention::sys::Api;
use ascend_attention::sys::bindings::{aclError, aclrtMemMallocPolicy};
use ascend_attention::{Runtime, Stream, bf16};
use ascend_serving::kv::{CacheWrite, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality, LayerMask,
    StatePolicy, Step, StepMemory,
};
use proptest::test_runner::TestCaseError;
use proptest::{prop_assert, prop_assert_eq};

use crate::harness;
use crate::tokens::DIM;

/// Query heads of the layers.
pub const HEADS: usize = 4;
/// Key heads of the layers.
pub const KV_HEADS: usize = 2;
/// Tokens of a block.
pub const BLOCK_SIZE: usize = 128;
/// What a step takes besides, such as slots.
const BESIDES: usize = 16 << 10;

thread_local! {
    /// Bytes that this thread has allocated on devices.
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

unsafe extern "C" fn counted(place: *mut *mut c_void, bytes: usize, policy: aclrtMemMallocPolicy) -> aclError {
    ALLOCATED.set(ALLOCATED.get() + bytes);
    // SAFETY: handed on to the caller.
    unsafe { harness::functions().aclrtMalloc.unwrap()(place, bytes, policy) }
}

/// A stream of a runtime whose allocations are counted.
fn counted_stream() -> Stream {
    let mut functions = harness::functions();
    functions.aclrtMalloc = Some(counted);
    let api = Arc::new(Api::from_functions(functions, "allocations counted"));
    // SAFETY: one function counts, and hands on to that of the platform.
    let runtime = unsafe { Runtime::from_api(api) }.unwrap();
    runtime.device(0).unwrap().stream().unwrap()
}

/// Compares the memory that a step's plan says with what the step takes. Of each request `requests` has the cached and
/// the new tokens; they share what the first one has cached, in whole blocks.
pub fn check(
    name: &str,
    backends: Backends<bf16>,
    cache: impl FnOnce(&Stream) -> PagedKvCache<bf16>,
    mask: LayerMask,
    requests: &[(usize, usize)],
) -> Result<(), TestCaseError> {
    let stream = counted_stream();
    let cache = cache(&stream);
    let named = matches!(mask, LayerMask::Named(_));
    let shape = AttentionShape::new(HEADS, KV_HEADS, DIM);
    let mut attention = Attention::<bf16>::new(shape, cache, backends);
    let mut sequences: Vec<Sequence> = Vec::new();
    for (cached, new) in requests {
        let computed = sequences.first().and(requests.first());
        let shared = computed.map_or(0, |(of_first, _)| *cached.min(of_first));
        let shared = shared / BLOCK_SIZE * BLOCK_SIZE;
        let mut sequence = match sequences.first() {
            Some(first) => first.share_prefix(shared).unwrap(),
            None => Sequence::new(attention.cache().pool()),
        };
        attention.grow(&stream, &mut sequence, cached - shared + new).unwrap();
        attention.cache().mark_computed(&sequence, *cached).unwrap();
        sequences.push(sequence);
    }
    let settings = BatchSettings::of(attention.cache(), Causality::Causal).policy(StatePolicy::new(true, None));
    let batch: Vec<_> = (sequences.iter().zip(requests))
        .map(|(sequence, (cached, new))| BatchRequest::of(sequence, *new).prompt_len(cached + new))
        .collect();
    let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
    metadata.set_mask(mask);
    let choice = attention.backend_choice(&stream, &metadata, 0, None, None);
    let choice = choice.unwrap();
    let said = choice.memory.total(1);

    let tokens = metadata.tokens();
    let rows = |heads: usize| {
        let zeros = vec![bf16::ZERO; tokens * heads * DIM];
        stream.upload(&zeros, [tokens, heads, DIM]).unwrap()
    };
    let (query, key) = (rows(HEADS), rows(KV_HEADS));
    let mut output = rows(HEADS);
    // What is quantised before it is written is the cache's, not the backend's.
    let before = ALLOCATED.get();
    let write = CacheWrite::plan(attention.cache(), &stream, metadata.slots(), &key, &key);
    drop(write.unwrap());
    let writes = ALLOCATED.get() - before;
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let mut layer = |step: &mut Step<'_, bf16>, layer| {
        let before = ALLOCATED.get();
        step.forward_into(layer, (&query, &key, &key), &mut output).unwrap();
        ALLOCATED.get() - before
    };
    let first = layer(&mut step, 0).saturating_sub(writes);
    let second = layer(&mut step, 1);
    let selected = step.selected(0).unwrap();
    prop_assert_eq!(choice.served.as_deref().ok(), Some(selected.name));
    prop_assert_eq!(selected.plan.memory(), choice.memory);
    let StepMemory { held, layer, .. } = choice.memory;
    prop_assert!(second.abs_diff(layer) <= BESIDES, "{name}: {second} bytes taken by a layer, {layer} said");
    // Masks are there already, and they are what is held of these. While it is planned, what is merged is there once
    // more.
    let masks = if named { held } else { 0 };
    let taken = first + masks;
    prop_assert!(
        (said..=said + layer + 2 * BESIDES).contains(&(taken + BESIDES)),
        "{name}: {first} bytes taken by a step, {said} said, {masks} of them masks"
    );
    drop(step);
    stream.synchronize().unwrap();
    Ok(())
}
