//! Whatever fails in between, every handle, byte and block of the serving layer is given back.
//!
//! Each piece is run once undisturbed, and then again and again with one call of the C ABI failing, the first, the
//! second and so on until none is left to fail. After each run nothing more may be alive than before, and no block
//! held.

#![cfg(feature = "emulation")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use ascend_attention::attention::{BlockTable, CallLengths, Cumulative, Inputs, PerRequest};
use ascend_attention::comm::Communicator;
use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::merge::{EmptyRows, MergeState, Part};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{
    CausalOrigin, FusedInferAttention, Graph, InnerPrecise, Layout, Machine, Output, Runtime, SlidingWindow, Stream,
    Tensor, bf16, f16,
};
use ascend_emu::Live;
use ascend_serving::kv::{
    Cache, CacheShape, CacheWrite, ChannelScales, Convolution, LatentScale, PadPolicy, PagedKvCache, QuantisedLayer,
    QuantisedType, Sequence, StatePool, StateShape,
};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backend, Backends, BatchRequest, BatchSettings,
    Causality, ContextAttention, DraftTree, GraphLimits, LatentForm, LatentRows, LatentTensors, LayerGroup,
    LayerInputs, LayerMask, NamedMask, NativeSparse, NativeTensors, PrefixCache, QuantisedQueries, Result,
    SharedPrefixDecode, StatePolicy, TreeRequest, TreeVerification, UpProjected, rules,
};
use ascend_testing::alone::alone;
use ascend_testing::faults::*;
use ascend_testing::harness;

fn packed_steps(stream: &Stream, pools: &mut Pools) -> Result<()> {
    schedule(stream, pools, Backends::none().with(Backend::Fused))
}

fn steps_by_several_backends(stream: &Stream, pools: &mut Pools) -> Result<()> {
    let backends = Backends::none().with(Backend::FusedInTwo).with(Backend::Fused).with(Backend::PagedDecode);
    let backends = backends.prefer([0], &[AttentionState::DecodeOnly], "paged_decode")?;
    schedule(stream, pools, backends)
}

/// Steps over a cache of INT8 with scales of channels.
fn integers_scaled_by_channel(stream: &Stream, pools: &mut Pools) -> Result<()> {
    let shape = CacheShape::new(LAYERS, 1, DIM);
    let scales = [(); LAYERS].map(|()| ChannelScales::uniform(&shape, 0.1, 0.1).unwrap());
    over_integers(
        stream,
        pools,
        PagedKvCache::quantised(stream, BLOCKS, 128, shape, PadPolicy::SkipNegative, QuantisedType::Int8, &scales)?,
    )
}

/// Steps over a cache of INT8 with scales of tokens.
fn integers_scaled_by_token(stream: &Stream, pools: &mut Pools) -> Result<()> {
    let shape = CacheShape::new(LAYERS, 1, DIM);
    let device = stream.device();
    over_integers(
        stream,
        pools,
        PagedKvCache::quantised_by_token(device, BLOCKS, 128, shape, PadPolicy::SkipNegative, QuantisedType::Int8)?,
    )
}

fn over_integers(stream: &Stream, pools: &mut Pools, cache: PagedKvCache<bf16>) -> Result<()> {
    pools.push(cache.pool().clone());
    schedule_over(stream, cache, Backends::none().with(Backend::QuantisedDecode).with(Backend::QuantisedPrefill))
}

fn steps_of_several_calls(stream: &Stream, pools: &mut Pools) -> Result<()> {
    let backends = Backends::none()
        .with(Backend::SharedPrefixDecode(SharedPrefixDecode::ALWAYS))
        .with(Backend::CascadePrefill)
        .with(Backend::Fused);
    schedule(stream, pools, backends)
}

/// A rank of a divided context, of a part of a communicator: a prompt, a chunk whose context is merged with it, a
/// decoded token, and one that is replayed from a graph.
fn ranks(stream: &Stream, pools: &mut Pools) -> Result<()> {
    let communicator = Communicator::all(&[stream.device().clone()])?.remove(0).split(&[0])?;
    let mut attention = ContextAttention::new(communicator, shape(), cache(stream, pools)?, 64)?;
    pools.push(attention.pool().clone());
    let mut sequence = attention.sequence();
    for tokens in [150, 6, 1] {
        attention.grow(stream, &mut sequence, tokens)?;
        let query = ones(stream, bf16::ONE, [tokens, HEADS, DIM])?;
        let key = ones(stream, bf16::ONE, [tokens, 1, DIM])?;
        let mut step = attention.begin(stream, &[BatchRequest::of(&sequence, tokens)])?;
        for layer in 0..LAYERS {
            step.forward(layer, (&query, &key, &key))?.download(stream)?;
        }
        step.end()?;
    }
    let mut graphs = attention.capture(stream, [1], 158)?;
    attention.grow(stream, &mut sequence, 1)?;
    let (query, key) = (ones(stream, bf16::ONE, [1, HEADS, DIM])?, ones(stream, bf16::ONE, [1, 1, DIM])?);
    let mut step = graphs.begin(&mut attention, stream, &[BatchRequest::of(&sequence, 1)])?;
    for layer in 0..LAYERS {
        step.forward(layer, (&query, &key, &key))?.download(stream)?;
    }
    step.end()
}

/// Latent attention: a prompt, a chunk whose context is up-projected in parts, absorbed decoding.
fn latent_steps(stream: &Stream, pools: &mut Pools) -> Result<()> {
    let device = stream.device();
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(device, BLOCKS, 128, CacheShape::latent(1), pad)?;
    let row = 512 + 64 + HEADS * (128 + 64 + 128);
    over_latents(stream, pools, cache, Backend::Mla { workspace_bytes: 100 * row * size_of::<bf16>() })
}

/// Steps of latent attention over an NZ cache of one byte an element, with quantised queries.
fn quantised_latent_steps(stream: &Stream, pools: &mut Pools) -> Result<()> {
    let (shape, pad) = (CacheShape::latent(1).format(Cache::Nz), PadPolicy::SkipNegative);
    let scales = [LatentScale::new(0.01)?];
    let cache = PagedKvCache::quantised_latents(stream, BLOCKS, 128, shape, pad, QuantisedType::Int8, &scales)?;
    over_latents(stream, pools, cache, Backend::QUANTISED_MLA_256_MIB)
}

fn over_latents(stream: &Stream, pools: &mut Pools, cache: PagedKvCache<bf16>, mla: Backend) -> Result<()> {
    pools.push(cache.pool().clone());
    let scale = cache.quantised_layer(0).ok().and_then(QuantisedLayer::latent_scale);
    let backends = Backends::none().with(mla);
    let mut attention = Attention::new(AttentionShape::latent(HEADS), cache, backends);
    let mut sequence = Sequence::new(attention.cache().pool());
    let projection = |stream: &Stream, _: usize, _: LatentRows<'_, bf16>, out: &UpProjected<bf16>| {
        for tensor in [&out.key, &out.key_rope, &out.value] {
            tensor.overwrite(stream, &vec![bf16::ONE; tensor.len()])?;
        }
        Ok(())
    };
    for (tokens, absorbed) in [(140, false), (3, false), (1, true)] {
        let _ = sequence.grow(tokens)?;
        let batch = [BatchRequest::of(&sequence, tokens)];
        let metadata = AttentionMetadata::new(&batch, settings(attention.cache(), Causality::Causal))?;
        let rows = |heads, dim| ones(stream, bf16::ONE, [tokens, heads, dim]);
        let (dim, form) = match absorbed {
            true => (512, LatentForm::Absorbed),
            false => (128, LatentForm::Plain(&projection)),
        };
        let (query, query_rope) = (rows(HEADS, dim)?, rows(HEADS, 64)?);
        let (latent, key_rope) = (rows(1, 512)?, rows(1, 64)?);
        let tensors = LatentTensors { query_rope: &query_rope, form };
        let quantised = scale
            .filter(|_| absorbed)
            .map(|scale| QuantisedQueries::quantise_on_host(stream, QuantisedType::Int8, (&query, &query_rope), scale));
        let quantised = quantised.transpose()?;
        let inputs = match &quantised {
            Some((queries, divided)) => LayerInputs::quantised_latent(queries, divided, &latent, &key_rope),
            None => LayerInputs::latent(&query, &latent, &key_rope, tensors),
        };
        let mut step = attention.begin(stream, &metadata)?;
        let output = step.forward(0, inputs)?.clone();
        drop(step);
        output.download(stream)?;
    }
    Ok(())
}

fn drafted_trees(stream: &Stream, pools: &mut Pools) -> Result<()> {
    let mut cache = cache(stream, pools)?;
    let mut sequence = Sequence::new(cache.pool());
    let grown = sequence.grow(5)?;
    let tokens = ones(stream, bf16::ONE, [5, 1, DIM])?;
    let write = CacheWrite::plan(&cache, stream, &grown.slots, &tokens, &tokens)?;
    cache.write(stream, &write, 0, &tokens, &tokens)?;
    cache.mark_computed(&sequence, 5)?;
    let trees = [DraftTree::chain(2)?, DraftTree::from_parents(&[-1, 0, 0, 1])?];
    // The second request has nothing cached.
    let empty = Sequence::new(cache.pool());
    let request = |sequence, tree| TreeRequest { sequence, cached: Sequence::len(sequence), tree };
    let requests = [request(&sequence, &trees[0]), request(&empty, &trees[1])];
    let rows = |heads| ones(stream, bf16::ONE, [2, heads, 4, DIM]);
    let verification = TreeVerification::new(shape());
    let mut step = verification.begin(stream, &cache, &requests)?;
    let output = step.forward(0, (&rows(HEADS)?, &rows(1)?, &rows(1)?))?;
    output.download(stream)?;
    Ok(())
}

/// A captured decoding step, replayed with lengths that grow.
fn graphs(stream: &Stream, _: &mut Pools) -> Result<()> {
    struct Buffers {
        query: Tensor<bf16>,
        cache: Tensor<bf16>,
        table: BlockTable,
        output: Output<bf16>,
    }
    let buffers = Buffers {
        query: ones(stream, bf16::ONE, [2, HEADS, DIM])?,
        cache: ones(stream, bf16::ONE, [4, 128, DIM])?,
        table: BlockTable::from_rows(stream, &[[2], [3]], 128)?,
        output: Output { attention: Tensor::empty(stream.device(), [2, HEADS, DIM])?, softmax_lse: None },
    };
    let call = FusedInferAttention::new(Layout::Tnd)
        .scale(1.0)
        .heads(HEADS)
        .kv_heads(1)
        .mask(stream.device().masks().causal(CausalOrigin::RightDown)?);
    let ends = Cumulative::new(vec![1, 2])?;
    let longest = PerRequest::new(vec![128, 128])?;
    let (mut graph, ()) = Graph::capture(stream.device(), buffers, |capture, buffers| {
        let inputs = Inputs::new(&buffers.query, &buffers.cache, &buffers.cache);
        let inputs = inputs.paged(&buffers.table);
        let longest = CallLengths::PackedPaged { q: &ends, kv: &longest };
        let call = capture.attention(&call, longest, inputs)?;
        capture.launch_into(call, inputs, &mut buffers.output.clone())
    })?;
    for keys in [5, 6] {
        let kv = PerRequest::new(vec![keys, 2 * keys])?;
        let lengths = CallLengths::PackedPaged { q: &ends, kv: &kv };
        let update = graph.update().all(lengths)?;
        graph.launch(stream, update)?;
    }
    let output = graph.buffers().output.attention.download(stream)?;
    assert!(output.iter().all(|x| *x == bf16::ONE));
    Ok(())
}

/// Full and windowed layers in one step, with a prompt whose prefix is found by its tokens, and blocks that are
/// evicted.
fn cached_prefixes(stream: &Stream, pools: &mut Pools) -> Result<()> {
    let window = Causality::Window(NonZeroUsize::new(100).unwrap());
    let mut group = |layers: [usize; LAYERS], causality| -> Result<_> {
        let backends = Backends::none().with(Backend::PagedDecode).with(Backend::Fused);
        Ok(LayerGroup::new(layers, causality, shape(), cache(stream, pools)?, backends))
    };
    let groups = [group([0, 2], Causality::Causal)?, group([1, 3], window)?];
    let mut attention = Attention::of_groups(2 * LAYERS, groups)?;
    let mut prefixes = PrefixCache::<u32>::of(&attention)?;
    let prompt: Vec<u32> = (0..400).collect();
    for turn in 0..3 {
        // The last one begins otherwise, and finds nothing.
        let tokens = prompt.get(turn / 2..).unwrap();
        let mut sequence = prefixes.share(b"", tokens);
        assert_eq!(sequence.is_empty(), turn != 1);
        for new in [tokens.len() - sequence.len(), 1] {
            attention.grow(stream, &mut sequence, new)?;
            let request = BatchRequest::of(&sequence, new);
            let metadata = attention.metadata(&[request], StatePolicy::default())?;
            let query = ones(stream, bf16::ONE, [new, HEADS, DIM])?;
            let key = ones(stream, bf16::ONE, [new, 1, DIM])?;
            let mut step = attention.begin(stream, &metadata)?;
            for layer in 0..2 * LAYERS {
                step.forward(layer, (&query, &key, &key))?;
            }
            drop(step);
            prefixes.insert(b"", tokens, &sequence)?;
            query.download(stream)?;
        }
        prefixes.evict(1, turn)?;
    }
    Ok(())
}

/// Layers with masks of their own in one step, two of them by rules that are made anew.
/// Steps of two tokens a request and drafted trees, by graphs of several sizes.
fn captured_steps(stream: &Stream, pools: &mut Pools) -> Result<()> {
    let backends = Backends::none().with(Backend::NamedMask).with(Backend::Fused);
    let mut attention = Attention::new(shape(), cache(stream, pools)?, backends);
    let limits = GraphLimits::new([1, 2], 200).tokens_each(2);
    let near = |_, token: usize, key: usize| key <= token && token - key < 9;
    let near = LayerMask::from(NamedMask::new("near", near));
    let of_layer = |layer: usize| match layer {
        0 => Causality::Causal.into(),
        _ => near.clone(),
    };
    let mut graphs = attention.capture_layers(stream, of_layer, &limits)?;
    let mut sequence = Sequence::new(attention.cache().pool());
    let query = ones(stream, bf16::ONE, [2, HEADS, DIM])?;
    let key = ones(stream, bf16::ONE, [2, 1, DIM])?;
    for _ in 0..2 {
        attention.grow(stream, &mut sequence, 2)?;
        let settings = settings(attention.cache(), Causality::Causal);
        let mut metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 2)], settings)?;
        let mut step = graphs.begin(stream, &mut metadata)?;
        for layer in 0..LAYERS {
            step.forward(layer, (&query, &key, &key))?;
        }
        drop(step);
        query.download(stream)?;
    }
    let verification = TreeVerification::new(shape());
    let mut graphs = verification.capture(stream, attention.cache(), &limits)?;
    let tree = DraftTree::chain(1)?;
    let request = TreeRequest { sequence: &sequence, cached: sequence.len(), tree: &tree };
    let rows = |heads| ones(stream, bf16::ONE, [1, heads, 2, DIM]);
    let mut step = graphs.begin(stream, &[request])?;
    let output = step.forward(0, (&rows(HEADS)?, &rows(1)?, &rows(1)?))?;
    output.download(stream)?;
    Ok(())
}

fn masked_layers(stream: &Stream, pools: &mut Pools) -> Result<()> {
    let backends = Backends::none().with(Backend::NamedMask).with(Backend::Fused);
    let mut attention = Attention::new(shape(), cache(stream, pools)?, backends);
    let mut sequence = Sequence::new(attention.cache().pool());
    let masks = ["one", "two"].map(|name| {
        let near = |_, token: usize, key: usize| key <= token && token - key < 9;
        LayerMask::from(NamedMask::new(name, near))
    });
    for new in [140, 1] {
        attention.grow(stream, &mut sequence, new)?;
        let request = BatchRequest::of(&sequence, new);
        let settings = settings(attention.cache(), Causality::Causal);
        let metadata = AttentionMetadata::new(&[request], settings)?;
        let query = ones(stream, bf16::ONE, [new, HEADS, DIM])?;
        let key = ones(stream, bf16::ONE, [new, 1, DIM])?;
        let mut step = attention.begin(stream, &metadata)?;
        for (layer, mask) in masks.iter().enumerate() {
            let inputs = LayerInputs::from((&query, &key, &key));
            step.forward(layer, inputs.mask(mask))?;
        }
        drop(step);
        query.download(stream)?;
    }
    Ok(())
}

/// Native sparse attention: a prompt of tokens that select nothing yet and of tokens that do, and a fork.
fn native_sparse_steps(stream: &Stream, pools: &mut Pools) -> Result<()> {
    let shape = CacheShape::new(1, 1, 192).value_dim(128);
    let cache = PagedKvCache::<bf16>::new(stream.device(), BLOCKS, 256, shape, PadPolicy::SkipNegative)?;
    pools.push(cache.pool().clone());
    let mut native = NativeSparse::new(AttentionShape::new(1, 1, 192), cache, 16, 16)?.select_block(16).select_count(3);
    let weights = ones(stream, bf16::ONE, [16, 1])?;
    let mut sequence = Sequence::new(native.cache().pool());
    for new in [60, 2] {
        native.grow(stream, &mut sequence, new)?;
        let settings = settings(native.cache(), Causality::Causal);
        let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, new)], settings)?;
        let (key, value) = (ones(stream, bf16::ONE, [new, 1, 192])?, ones(stream, bf16::ONE, [new, 1, 128])?);
        let (key_weight, value_weight) = (&weights, &weights);
        let mut step = native.begin(stream, &metadata)?;
        step.forward(0, NativeTensors { query: &key, key: &key, value: &value, key_weight, value_weight })?;
        step.end()?;
        key.download(stream)?;
        sequence = sequence.fork();
    }
    Ok(())
}

/// Steps on a card of the Atlas inference series: copies write, and the older operators attend.
fn inference_card(_: &Stream, pools: &mut Pools) -> Result<()> {
    let machine = Machine::new(Soc::AtlasInference, Cann::V9_1);
    let stream = Runtime::emulated_as(&machine)?.device(0)?.stream()?;
    let (of, pad) = (CacheShape::new(LAYERS, 1, DIM), PadPolicy::SkipNegative);
    let cache = PagedKvCache::<f16>::new(stream.device(), BLOCKS, 128, of, pad)?;
    let pool = cache.pool().clone();
    pools.push(pool.clone());
    let backends = Backends::none().with(Backend::Fused).with(Backend::PromptAndIncre);
    let mut attention = Attention::new(shape(), cache, backends);
    let outcome = (|| {
        let (mut first, mut second) = (Sequence::new(&pool), Sequence::new(&pool));
        for (one, other) in [(200, 1), (1, 30), (1, 1)] {
            attention.grow(&stream, &mut first, one)?;
            attention.grow(&stream, &mut second, other)?;
            let batch = [BatchRequest::of(&first, one), BatchRequest::of(&second, other)];
            let settings = BatchSettings::of(attention.cache(), Causality::Causal);
            let metadata = AttentionMetadata::new(&batch, settings)?;
            let query = ones(&stream, f16::ONE, [one + other, HEADS, DIM])?;
            let key = ones(&stream, f16::ONE, [one + other, 1, DIM])?;
            let mut step = attention.begin(&stream, &metadata)?;
            for layer in 0..LAYERS {
                step.forward(layer, (&query, &key, &key))?;
            }
            query.download(&stream)?;
        }
        Ok(())
    })();
    // Whatever failed, the stream goes on.
    let _ = stream.synchronize();
    outcome
}

/// Layers of linear attention beside one of full attention: a prompt beside a decode, padding, a fork that goes on.
/// What fails between the calls of a layer leaves states that nothing goes on from.
fn recurrent_steps(_: &Stream, pools: &mut Pools) -> Result<()> {
    let machine = Machine::new(Soc::AtlasA2, Cann::V9_1);
    let stream = Runtime::emulated_as(&machine)?.device(0)?.stream()?;
    let outcome = (|| {
        let full =
            PagedKvCache::new(stream.device(), BLOCKS, 128, CacheShape::new(1, 1, DIM), PadPolicy::SkipNegative)?;
        pools.push(full.pool().clone());
        let backends = Backends::none().with(Backend::Fused);
        let full = LayerGroup::new([1], Causality::Causal, AttentionShape::new(1, 1, DIM), full, backends);
        let shape = StateShape {
            layers: 2,
            key_heads: 1,
            value_heads: 1,
            value_dim: DIM,
            key_dim: DIM,
            scale: 0.25,
            g: false,
            gk: false,
            drafts: 1,
            convolution: Some(Convolution { width: 4, channels: DIM, silu: true }),
        };
        let mut attention = Attention::of_hybrid(3, [full], [0, 2], StatePool::new::<bf16>(&stream, 6, shape)?)?;
        let mut sequences = [attention.sequence(), attention.sequence()];
        for new in [[20, 1], [2, 1]] {
            for (sequence, new) in sequences.iter_mut().zip(new) {
                attention.grow(&stream, sequence, new)?;
            }
            let batch = [0, 1].map(|request| BatchRequest::of(&sequences[request], new[request]));
            let mut metadata = attention.metadata(&batch, StatePolicy::default())?;
            let tokens = metadata.tokens() + 1;
            metadata.pad_to(tokens)?;
            let rows = ones(&stream, bf16::ONE, [tokens, 1, DIM])?;
            let beta = rows.narrow(2, 0..1)?.contiguous(&stream)?.reshape([tokens, 1])?;
            let tensors = DeltaTensors::new((&rows, &rows, &rows), &beta);
            let (mixed, weight) = (rows.reshape([tokens, DIM])?, ones(&stream, bf16::ONE, [4, DIM])?);
            let mut step = attention.begin(&stream, &metadata)?;
            for layer in 0..3 {
                let mut forward = || match layer {
                    1 => step.forward(layer, (&rows, &rows, &rows)).map(drop),
                    _ => {
                        // Its rows are not read: where it fails on the device, nothing has written them.
                        step.convolve(layer, (&mixed, &weight))?;
                        step.forward(layer, tensors).map(drop)
                    }
                };
                let Err(failed) = forward() else {
                    continue;
                };
                let half_written = forward().is_err_and(|again| again.breaks(&rules::STATE_TORN));
                drop(step);
                if half_written {
                    let refused = attention.begin(&stream, &metadata).unwrap_err();
                    assert!(refused.breaks(&rules::STATE_TORN), "{refused}");
                    HALF_WRITTEN.fetch_add(1, Ordering::Relaxed);
                }
                return Err(failed);
            }
            step.end()?;
        }
        let weight = ones(&stream, bf16::ONE, [4, DIM])?;
        let weights = [(weight.clone(), None), (weight.clone(), None)];
        let limits = GraphLimits::new([3], 64).convolutions(weights);
        let mut graphs = attention.capture_layers(&stream, |layer| attention.mask(layer), &limits)?;
        for sequence in &mut sequences {
            attention.grow(&stream, sequence, 1)?;
        }
        let batch = sequences.each_ref().map(|sequence| BatchRequest::of(sequence, 1));
        let mut metadata = attention.metadata(&batch, StatePolicy::default())?;
        let rows = ones(&stream, bf16::ONE, [2, 1, DIM])?;
        let beta = rows.narrow(2, 0..1)?.contiguous(&stream)?.reshape([2, 1])?;
        let mixed = rows.reshape([2, DIM])?;
        let mut step = graphs.begin(&stream, &mut metadata)?;
        for layer in 0..3 {
            if layer == 1 {
                step.forward(layer, (&rows, &rows, &rows))?;
                continue;
            }
            step.convolve(layer, (&mixed, &weight))?;
            step.forward(layer, DeltaTensors::new((&rows, &rows, &rows), &beta))?;
        }
        step.end()?;
        let mut fork = sequences[0].fork();
        attention.grow(&stream, &mut fork, 1)?;
        drop((fork, sequences));
        assert_eq!(attention.states().map(StatePool::free_slots), Some(6));
        Ok(())
    })();
    // Whatever failed, the stream goes on.
    let _ = stream.synchronize();
    outcome
}

/// How often a layer of linear attention failed between its calls.
static HALF_WRITTEN: AtomicUsize = AtomicUsize::new(0);

/// Steps over a cache with keys and values side by side.
fn side_by_side(_: &Stream, pools: &mut Pools) -> Result<()> {
    let machine = Machine::new(Soc::Ascend950, Cann::V9_2);
    let stream = Runtime::emulated_as(&machine)?.device(0)?.stream()?;
    let shape = CacheShape::new(LAYERS, 1, DIM).side_by_side();
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), BLOCKS, 128, shape, pad)?;
    pools.push(cache.pool().clone());
    let outcome = schedule_over(&stream, cache, Backends::none().with(Backend::Fused));
    // Whatever failed, the stream goes on.
    let _ = stream.synchronize();
    outcome
}

fn merges(stream: &Stream, _: &mut Pools) -> Result<()> {
    let query = ones(stream, bf16::ONE, [3, HEADS, DIM])?;
    let keys = ones(stream, bf16::ONE, [5, 1, DIM])?;
    let plan = FusedInferAttention::new(Layout::Tnd)
        .scale(1.0)
        .heads(HEADS)
        .kv_heads(1)
        .actual_seq_lengths([1, 3])
        .actual_seq_lengths_kv([5, 5])
        .softmax_lse(true)
        .plan((&query, &keys, &keys))?;
    let outputs = [plan.launch(stream, (&query, &keys, &keys))?, plan.launch(stream, (&query, &keys, &keys))?];
    let parts = [Part::of(&outputs[0])?, Part::of(&outputs[1])?];
    let merge = MergeState::new(Layout::Tnd).empty_rows(EmptyRows::ThroughHost);
    let merged = merge.plan(&parts)?.launch(stream, &parts)?;
    merged.attention.download(stream)?;
    Ok(())
}

fn masks(stream: &Stream, _: &mut Pools) -> Result<()> {
    let masks = stream.device().masks();
    let query = ones(stream, f16::ONE, [1, HEADS, 9, DIM])?;
    let custom = HostMask::from_fn(9, 9, MaskForm::INT8, |row, _| row != 3)?;
    for mask in [
        masks.causal(CausalOrigin::RightDown)?,
        masks.sliding_window(SlidingWindow::new(3).unwrap())?,
        masks.causal_full(CausalOrigin::LeftUp, 9, 9)?,
        masks.custom(&custom)?,
    ] {
        let plan = FusedInferAttention::new(Layout::Bnsd)
            .scale(1.0)
            .heads(HEADS)
            .mask(mask)
            .inner_precise(InnerPrecise::HighPrecisionCorrected)
            .plan((&query, &query, &query))?;
        drop(plan.launch(stream, (&query, &query, &query))?);
    }
    Ok(stream.synchronize()?)
}

fn copies(stream: &Stream, _: &mut Pools) -> Result<()> {
    let tensor = ones(stream, 7i32, [100, 2])?;
    let strided = tensor.permute([1, 0])?.contiguous(stream)?.padded(stream, 128)?;
    let host = stream.device().host_buffer(256)?;
    let host = strided.download_async(stream, host)?.wait()?;
    drop(strided.overwrite_async(stream, host)?);
    let other = Tensor::<i32>::empty(stream.device(), [2, 128])?;
    other.copy_from(stream, &strided)?;
    let event = stream.record_event()?;
    Ok(event.synchronize()?)
}

fn launching(piece: Piece) {
    nothing_is_left(&[(piece, true)]);
}

fn without_launches(piece: Piece) {
    nothing_is_left(&[(piece, false)]);
}

/// Masks are made anew by each run, on a device of its own.
fn with_own_masks(piece: Piece) {
    let nothing = Live::default();
    run(piece, nothing).unwrap();
    let failed = with_each_fault(piece, nothing);
    assert!(failed.iter().all(|failed| *failed > 0), "{failed:?}");
}

fn half_written(piece: Piece) {
    launching(piece);
    assert!(HALF_WRITTEN.load(Ordering::Relaxed) > 0);
}

/// A test for each piece. What is alive is counted by process, so that each has its own.
macro_rules! tests {
    ($( $piece:ident: $check:ident; )*) => {
        mod nothing_is_left_whatever_fails {$(
            #[test]
            fn $piece() {
                let why = "failures are injected into, and leaks counted by, the emulation of this process";
                if super::harness::not_on_npu(why) {
                    return;
                }
                let name = concat!("nothing_is_left_whatever_fails::", stringify!($piece));
                super::alone(name, || super::$check(super::$piece));
            }
        )*}
    };
}

tests! {
    packed_steps: launching;
    integers_scaled_by_channel: launching;
    integers_scaled_by_token: launching;
    steps_by_several_backends: launching;
    steps_of_several_calls: launching;
    ranks: launching;
    latent_steps: launching;
    quantised_latent_steps: launching;
    drafted_trees: launching;
    graphs: launching;
    captured_steps: launching;
    cached_prefixes: launching;
    masked_layers: launching;
    native_sparse_steps: launching;
    recurrent_steps: half_written;
    inference_card: launching;
    side_by_side: launching;
    merges: launching;
    masks: with_own_masks;
    copies: without_launches;
}
