//! Pieces of work that are run with one call of the C ABI failing after the other, and what may be left of them:
//! nothing.

use std::num::NonZeroUsize;

use ascend_attention::{AnyTensor, CausalOrigin, Error as CallError, Stream, Tensor, bf16};
use ascend_emu::{Live, Site, inject};
use ascend_serving::kv::{BlockPool, CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality, Drafting, Error,
    LayerInputs, RecordedBatch, Result, StatePolicy, rules,
};

use crate::harness;

pub const HEADS: usize = 2;
pub const DIM: usize = 64;
pub const BLOCKS: usize = 12;
pub const LAYERS: usize = 2;

/// Pools that a run made, to be asked when all else is gone.
pub type Pools = Vec<BlockPool>;
/// Work that may fail in between.
pub type Piece = fn(&Stream, &mut Pools) -> Result<()>;

pub fn ones<T: ascend_attention::Element>(stream: &Stream, one: T, shape: impl AsRef<[usize]>) -> Result<Tensor<T>> {
    let elements = vec![one; shape.as_ref().iter().product()];
    Ok(stream.upload(&elements, shape)?)
}

pub fn cache(stream: &Stream, pools: &mut Pools) -> Result<PagedKvCache<bf16>> {
    let shape = CacheShape::new(LAYERS, 1, DIM);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), BLOCKS, 128, shape, pad)?;
    pools.push(cache.pool().clone());
    Ok(cache)
}

pub fn shape() -> AttentionShape {
    AttentionShape::new(HEADS, 1, DIM)
}

pub fn settings(cache: &PagedKvCache<bf16>, causality: Causality) -> BatchSettings {
    BatchSettings::of(cache, causality).policy(StatePolicy::new(true, Some(Drafting::Mtp)))
}

/// One step over all layers, padded; the last layer's result is looked at.
pub fn step(
    stream: &Stream,
    attention: &mut Attention<bf16>,
    causality: Causality,
    batch: &[BatchRequest<'_>],
    sink: Option<&AnyTensor>,
) -> Result<()> {
    let settings = settings(attention.cache(), causality);
    let recorded = RecordedBatch::from_json(&RecordedBatch::new(settings, batch).to_json())?;
    let mut metadata = AttentionMetadata::new(&recorded.requests(), settings)?;
    metadata.renew(batch)?;
    metadata.pad_to(metadata.tokens() + 3)?;
    let tokens = metadata.tokens();
    let query = ones(stream, bf16::ONE, [tokens, HEADS, DIM])?;
    let key = ones(stream, bf16::ONE, [tokens, 1, DIM])?;
    let mut step = attention.begin(stream, &metadata)?;
    let mut inputs = LayerInputs::from((&query, &key, &key));
    inputs.learnable_sink = sink;
    for layer in 0..LAYERS - 1 {
        step.forward(layer, inputs)?;
    }
    let output = step.forward(LAYERS - 1, inputs)?.clone();
    drop(step);
    output.download(stream)?;
    Ok(())
}

/// A schedule of requests: prompts in chunks, a shared prefix that is written behind, decoding, drafts taken back, a
/// window that gives blocks back, sinks, a full cache.
pub fn schedule(stream: &Stream, pools: &mut Pools, backends: Backends<bf16>) -> Result<()> {
    let cache = cache(stream, pools)?;
    schedule_over(stream, cache, backends)
}

/// The schedule of [`schedule`], over a cache of the caller.
pub fn schedule_over(stream: &Stream, cache: PagedKvCache<bf16>, backends: Backends<bf16>) -> Result<()> {
    let mut attention = Attention::new(shape(), cache, backends);
    let pool = attention.cache().pool().clone();
    let causal = Causality::Causal;
    let mut first = Sequence::new(&pool);
    let _ = first.grow(200)?;
    step(stream, &mut attention, causal, &[BatchRequest::of(&first, 200).prompt_len(200)], None)?;
    // Another request begins alike, in the middle of a block.
    let mut second = first.share_prefix(150)?;
    let grown = second.grow(7)?;
    attention.cache_mut().copy_blocks(stream, &grown.copies)?;
    // The copy still holds the block that was shared, so that the first request writes into one of its own too.
    attention.grow(stream, &mut first, 1)?;
    let batch = [BatchRequest::of(&first, 1), BatchRequest::of(&second, 7)];
    step(stream, &mut attention, causal, &batch, None)?;
    let _ = first.grow(3)?;
    let _ = second.grow(1)?;
    let drafted = [BatchRequest::of(&first, 3).drafts(2), BatchRequest::of(&second, 1)];
    step(stream, &mut attention, causal, &drafted, None)?;
    first.truncate(202)?;
    let _ = first.grow(1)?;
    let _ = second.grow(1)?;
    let batch = [BatchRequest::of(&first, 1), BatchRequest::of(&second, 1)];
    let window = Causality::Window(NonZeroUsize::new(60).unwrap());
    let sink = ones(stream, bf16::ONE, [HEADS])?;
    step(stream, &mut attention, window, &batch, Some(&sink))?;
    first.drop_before(140)?;
    // Preempted when the cache is full.
    let full = second.grow(128 * BLOCKS).unwrap_err();
    assert_eq!(full.rule, &rules::POOL_EXHAUSTED);
    second.truncate(0)?;
    let _ = second.grow(5)?;
    step(stream, &mut attention, causal, &[BatchRequest::of(&second, 5)], None)
}

/// One run of a piece. Nothing but what was alive before is so afterwards.
pub fn run(piece: Piece, before: Live) -> Result<()> {
    let mut pools = Pools::new();
    let stream = harness::device().stream().map_err(Error::from);
    let outcome = stream.and_then(|stream| {
        let outcome = piece(&stream, &mut pools);
        // Whatever failed, the stream goes on.
        let _ = stream.synchronize();
        outcome
    });
    for pool in &pools {
        assert_eq!(pool.held_blocks(), 0, "{outcome:?}");
        assert_eq!(pool.steps_in_flight(), 0, "{outcome:?}");
        assert_eq!(pool.free_blocks(), BLOCKS, "{outcome:?}");
    }
    drop(pools);
    assert_eq!(ascend_emu::live(), before, "after {outcome:?}");
    outcome
}

/// Calls that fail, and with which statuses in turn: memory that ran out or not, launches refused at once or failing on
/// the device.
pub const FAULTS: [(Site, [i32; 2]); 4] = [
    (Site::Malloc, [207_001, 507_899]),
    (Site::Memcpy, [507_899; 2]),
    (Site::Launch, [361_001, 507_015]),
    (Site::Sync, [507_046; 2]),
];

/// Runs with the first call of each kind failing, with the second, and so on: how many runs failed, by kind.
pub fn with_each_fault(piece: Piece, before: Live) -> [usize; FAULTS.len()] {
    FAULTS.map(|(site, statuses)| {
        let mut failed = 0;
        // Some failures are made good, such as memory that is there after waiting.
        let mut good = 0;
        for nth in 1.. {
            let [odd, even] = statuses;
            let status = if nth % 2 == 1 { odd } else { even };
            let fault = inject(site, nth, status);
            match run(piece, before) {
                Ok(()) => good += 1,
                Err(
                    Error::Attention(CallError::Acl { .. })
                    | Error::Attention(CallError::Aclnn { .. })
                    | Error::Attention(CallError::OutOfMemory { .. }),
                )
                | Err(Error::Attention(CallError::Timeout { .. }) | Error::NoBackend { .. }) => {
                    (failed, good) = (failed + 1, 0);
                }
                Err(other) => panic!("{site:?} {nth}: {other}"),
            }
            drop(fault);
            if good == 4 {
                break;
            }
        }
        failed
    })
}

/// Runs each piece undisturbed, and then with every call failing in turn: nothing is alive afterwards but the mask that
/// the device keeps, and with the device nothing at all. A piece says whether it launches operators.
pub fn nothing_is_left(pieces: &[(Piece, bool)]) {
    let device = harness::device();
    drop(device.masks().causal(CausalOrigin::RightDown).unwrap());
    let before = ascend_emu::live();
    for (number, (piece, launches)) in pieces.iter().enumerate() {
        run(*piece, before).unwrap();
        let failed = with_each_fault(*piece, before);
        for ((site, _), failed) in FAULTS.iter().zip(failed) {
            let struck = failed > 0 || (*site == Site::Launch && !launches);
            assert!(struck, "piece {number}: no {site:?} failed");
        }
    }
    drop(device);
    assert_eq!(ascend_emu::live(), Live::default());
}
