//! Decode steps replayed from captured graphs, checked against whole-sequence attention:
//! `cargo run -p ascend-serving --example 08-graph`.
//!
//! Requests come and go, so that each step has another number of them, and other lengths. Graphs are captured for a few
//! sizes; a step is padded to the smallest that holds it, its table, slots and tokens are filled into that graph's
//! buffers, and one call replays all layers with the step's lengths. There is no model: a token's query, key and value
//! are random numbers made from its number.

use std::error::Error;

use ascend_attention::attention::{BlockTable, CallLengths, Cumulative, Inputs, PerRequest};
use ascend_attention::graph::{CaptureEstimate, Capturing};
use ascend_attention::scatter::{ScatterPaKvCache, SlotMapping};
use ascend_attention::{Device, FusedInferAttention, Layout, Output, Runtime, Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{AttentionMetadata, BatchRequest, BatchSettings, Causality, GraphPool, Result};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const LAYERS: usize = 3;
const BLOCKS: usize = 32;
const BLOCK_SIZE: usize = 128;
/// Blocks of the longest sequence.
const COLUMNS: usize = 2;
const SIZES: [usize; 4] = [1, 2, 4, 8];
const STEPS: usize = 160;

/// What a graph of one size reads and writes.
struct Buffers {
    table: BlockTable,
    slots: SlotMapping,
    layers: Vec<Layer>,
}

struct Layer {
    query: Tensor<bf16>,
    key: Tensor<bf16>,
    value: Tensor<bf16>,
    output: Output<bf16>,
}

/// A request: its tokens, all of which are cached.
struct Request {
    tokens: Vec<u64>,
    cached: Sequence,
    end: usize,
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let runtime = Runtime::auto()?;
    let device = runtime.device(0)?;
    let stream = device.stream()?;
    println!("{} on {}", device.soc_name(), runtime.platform());
    let heads = CacheShape::new(LAYERS, KV_HEADS, DIM);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(&device, BLOCKS, BLOCK_SIZE, heads, pad)?;
    let settings = BatchSettings::of(&cache, Causality::Causal);
    let call = FusedInferAttention::new(Layout::Tnd)
        .heads(HEADS)
        .kv_heads(KV_HEADS)
        .scale(1.0 / (DIM as f64).sqrt())
        .mask(settings.causality.mask(&device.masks())?);

    let estimate = CaptureEstimate::new(SIZES.len(), LAYERS);
    estimate.fits(CaptureEstimate::STREAMS)?;
    let mut graphs = GraphPool::capture(
        &device,
        &SIZES,
        |size| buffers(&device, &stream, size),
        |capture, size, buffers| record(capture, &call, &cache, size, buffers),
    )?;
    println!(
        "captured {:?} requests: at most {} streams and {} events",
        graphs.sizes().collect::<Vec<_>>(),
        estimate.streams(),
        estimate.events()
    );

    let mut running: Vec<Request> = Vec::new();
    let (mut arrived, mut worst, mut rows) = (0, 0f64, 0);
    let mut replays = SIZES.map(|size| (size, 0));
    for step in 0..STEPS {
        // Requests arrive and leave in waves; the first ones stay until they are long.
        let wanted = [1, 2, 5, 8, 3][step / 8 % 5];
        running.truncate(wanted);
        while running.len() < wanted {
            arrived += 1;
            running.push(Request {
                tokens: Vec::new(),
                cached: Sequence::new(cache.pool()),
                end: 20 + 31 * (arrived % 6),
            });
        }
        for (at, request) in running.iter_mut().enumerate() {
            request.tokens.push((1000 * step + at) as u64);
            // It says which blocks to copy, which is for sequences that share some.
            let _ = request.cached.grow(1)?;
        }
        let batch: Vec<_> = running.iter().map(|request| BatchRequest::of(&request.cached, 1)).collect();
        let mut metadata = AttentionMetadata::new(&batch, settings)?;
        let buffers =
            graphs.launch(&stream, &mut metadata, |buffers, metadata| fill(&stream, buffers, metadata, &running))?;
        let size = metadata.tokens();
        for (of, count) in &mut replays {
            *count += usize::from(*of == size);
        }

        // Some rows against whole sequences in double precision.
        for (layer, tensors) in buffers.layers.iter().enumerate() {
            if (step + layer) % 4 != 0 {
                continue;
            }
            let output = tensors.output.attention.download(&stream)?;
            for (row, request) in running.iter().enumerate() {
                let got = &output[row * HEADS * DIM..][..HEADS * DIM];
                for (got, want) in got.iter().zip(dense(&request.tokens, layer)) {
                    let error = (got.to_f64() - want).abs();
                    worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
                }
                rows += 1;
            }
        }
        running.retain(|request| request.tokens.len() < request.end);
    }
    for (size, count) in replays {
        println!("{count:4} replays of {size}");
    }
    println!("{rows} rows against whole sequences, worst error {worst:.1e}");
    if rows == 0 || worst > 1e-2 || replays.iter().any(|(_, count)| *count == 0) {
        return Err("the answer is wrong, or a size was never replayed".into());
    }
    println!("as expected");
    Ok(())
}

fn buffers(device: &Device, stream: &Stream, rows: usize) -> Result<Buffers> {
    let layer = |_| {
        Ok(Layer {
            query: Tensor::empty(device, [rows, HEADS, DIM])?,
            key: Tensor::empty(device, [rows, KV_HEADS, DIM])?,
            value: Tensor::empty(device, [rows, KV_HEADS, DIM])?,
            output: Output { attention: Tensor::empty(device, [rows, HEADS, DIM])?, softmax_lse: None },
        })
    };
    // Slots of padding are below 0, which the emulation skips; `PadPolicy::DumpSlot` needs nothing from the device.
    let negative = &["slot_mapping.negative"];
    let slots = BLOCKS * BLOCK_SIZE;
    Ok(Buffers {
        table: BlockTable::zeroed(device, rows, COLUMNS, BLOCK_SIZE)?,
        slots: SlotMapping::allowing(stream, &vec![-1; rows], slots, negative)?,
        layers: (0..LAYERS).map(layer).collect::<Result<_>>()?,
    })
}

/// A decode step of `size` requests: each layer writes its keys and values, then attends.
fn record(
    capture: &Capturing<'_>,
    call: &FusedInferAttention,
    cache: &PagedKvCache<bf16>,
    size: usize,
    buffers: &Buffers,
) -> Result<()> {
    let ends = Cumulative::new((1..=size).collect())?;
    let most = COLUMNS * BLOCK_SIZE;
    let keys = PerRequest::new(vec![most; size])?;
    let longest = CallLengths::PackedPaged { q: &ends, kv: &keys };
    let slots = &buffers.slots;
    let mut planned = None;
    for (at, layer) in buffers.layers.iter().enumerate() {
        let Layer { query, key, value, output } = layer;
        let cached = cache.layer(at)?;
        let inputs = Inputs::new(query, &cached.key, &cached.value).paged(&buffers.table);
        let (call, write) = match planned.take() {
            Some(planned) => planned,
            None => {
                let write = ScatterPaKvCache::new();
                let write = write.plan((key, value, slots, &cached.key, &cached.value))?;
                (capture.attention(call, longest, inputs)?, write)
            }
        };
        write.launch(capture, (key, value, slots, &cached.key, &cached.value))?;
        capture.launch_into(call, inputs, &mut output.clone())?;
        planned = Some((call, write));
    }
    Ok(())
}

/// Puts a step into the buffers of its size.
fn fill(stream: &Stream, buffers: &Buffers, metadata: &AttentionMetadata, running: &[Request]) -> Result<()> {
    let table = metadata.table();
    let rows: Vec<_> = (0..table.requests()).filter_map(|request| table.row(request)).collect();
    buffers.table.overwrite(stream, &rows)?;
    let slots: Vec<i64> = metadata.slots().iter().map(|slot| (*slot).into()).collect();
    buffers.slots.overwrite(stream, &slots)?;
    for (at, layer) in buffers.layers.iter().enumerate() {
        let tensors = [(&layer.query, 0, HEADS), (&layer.key, 1, KV_HEADS), (&layer.value, 2, KV_HEADS)];
        for (tensor, role, heads) in tensors {
            let mut rows = Vec::with_capacity(tensor.len());
            for request in running {
                let token = request.tokens.last().copied().unwrap_or(0);
                rows.extend(token_rows(token, at, role, heads));
            }
            rows.resize(tensor.len(), bf16::ZERO);
            tensor.overwrite(stream, &rows)?;
        }
    }
    Ok(())
}

/// The query (role 0), key (1) or value (2) of a token in a layer.
fn token_rows(token: u64, layer: usize, role: u64, heads: usize) -> Vec<bf16> {
    let mut state = (token * 31 + layer as u64 * 7 + role + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..heads * DIM).map(|_| next()).collect()
}

/// Attention of the last token over all of a sequence.
fn dense(tokens: &[u64], layer: usize) -> Vec<f64> {
    let last = tokens.last().copied().unwrap_or(0);
    let query = token_rows(last, layer, 0, HEADS);
    let keys: Vec<_> = tokens.iter().map(|token| token_rows(*token, layer, 1, KV_HEADS)).collect();
    let values: Vec<_> = tokens.iter().map(|token| token_rows(*token, layer, 2, KV_HEADS)).collect();
    let mut out = Vec::with_capacity(HEADS * DIM);
    for (head, query) in query.chunks_exact(DIM).enumerate() {
        let shared = head / (HEADS / KV_HEADS) * DIM;
        let score = |key: &Vec<bf16>| -> f64 {
            let key = &key[shared..][..DIM];
            let products = query.iter().zip(key).map(|(q, k)| q.to_f64() * k.to_f64());
            products.sum::<f64>() / (DIM as f64).sqrt()
        };
        let scores: Vec<f64> = keys.iter().map(score).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for d in 0..DIM {
            let of = |(weight, value): (&f64, &Vec<bf16>)| weight * value[shared + d].to_f64();
            out.push(weights.iter().zip(&values).map(of).sum::<f64>() / sum);
        }
    }
    out
}
