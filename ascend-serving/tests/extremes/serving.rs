//! What an engine computes between its scheduler and the calls.

use std::num::NonZeroUsize;

use ascend_attention::attention::PerRequest;
use ascend_attention::{bf16, f16};
use ascend_serving::kv::{BlockPool, CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backend, Backends, BatchRequest, BatchSettings,
    Causality, ContextParallel, CrossAttention, CustomMask, DraftSource, DraftTree, Drafting, EncoderAttention,
    GraphLimits, IndexerTensors, LatentForm, LatentTensors, LayerInputs, LayerMask, MultiItemPrompt, NamedMask,
    PageIndices, RecordedBatch, SampledDrafts, SharedPrefixDecode, SparseLatent, SparseTensors, SplitDecode,
    StatePolicy, TokenIndices, TreeRequest, TreeVerification,
};

use crate::draw::Draw;
use crate::kv::{pad, row, slots, table};
use crate::{Call, Forwards};

pub static CROSS_STEPS: Forwards = Forwards::new();
pub static STEPS: Forwards = Forwards::new();
pub static GRAPH_STEPS: Forwards = Forwards::new();
pub static LATENT_GRAPH_STEPS: Forwards = Forwards::new();
pub static TREE_STEPS: Forwards = Forwards::new();
pub static TREE_GRAPH_STEPS: Forwards = Forwards::new();

fn lengths(draw: &mut Draw) -> PerRequest {
    let lengths = draw.few(|draw| draw.usize().min(PerRequest::MAX_LENGTH));
    PerRequest::new(lengths).unwrap()
}

/// As many as `of`.
fn lengths_for(of: usize, draw: &mut Draw) -> PerRequest {
    let lengths = (0..of).map(|_| draw.usize().min(PerRequest::MAX_LENGTH));
    PerRequest::new(lengths.collect()).unwrap()
}

/// Settings as a recorded batch may have them, whatever cache there is; none where no cache has them.
fn settings(blocks: usize, block_size: usize, pad: PadPolicy, window: usize) -> Option<BatchSettings> {
    let pad = match pad {
        PadPolicy::SkipNegative => "\"SkipNegative\"".to_owned(),
        PadPolicy::DumpSlot(slot) => format!("{{\"DumpSlot\":{slot}}}"),
        other => panic!("{other:?}: how is it written?"),
    };
    let causality = match window {
        0 => "\"Causal\"".to_owned(),
        keys => format!("{{\"Window\":{keys}}}"),
    };
    let json = format!(
        "{{\"version\":1,\"settings\":{{\"blocks\":{blocks},\"block_size\":{block_size},\"pad\":{pad},\
         \"causality\":{causality},\"policy\":{{\"chunked_prefill\":false,\"drafting\":null}}}},\"requests\":[]}}"
    );
    let recorded = RecordedBatch::from_json(&json);
    recorded.ok().map(|recorded| recorded.settings)
}

struct Request {
    numbers: [usize; 3],
    row: Vec<usize>,
    prompt_len: Option<usize>,
}

impl Request {
    /// One that a cache of four blocks of 16 tokens has room for.
    fn fitting(draw: &mut Draw) -> Self {
        Self { numbers: [draw.of(&[0, 1, 15, 16, 40]), draw.of(&[1, 2]), 0], row: vec![0, 1, 2, 3], prompt_len: None }
    }

    /// Two of three fit, so that steps are computed too.
    fn draw(draw: &mut Draw) -> Self {
        if draw.below(3) > 0 {
            return Self::fitting(draw);
        }
        Self {
            numbers: [draw.usize(), draw.usize(), draw.usize()],
            row: match draw.bool() {
                true => vec![0, 1, 2, 3],
                false => row(draw),
            },
            prompt_len: draw.bool().then(|| draw.usize()),
        }
    }

    fn view(&self) -> BatchRequest<'_> {
        let [cached, new, drafts] = self.numbers;
        BatchRequest::in_row(&self.row, cached, new).drafts(drafts).prompt_len(self.prompt_len)
    }
}

fn split(draw: &mut Draw) -> SplitDecode {
    match NonZeroUsize::new(draw.usize()).zip(NonZeroUsize::new(draw.usize())) {
        Some((tile, _)) if draw.bool() => SplitDecode::Tiles(tile),
        Some((keys, max_splits)) if draw.bool() => SplitDecode::Capped { keys, max_splits },
        _ => SplitDecode::Balanced { max_splits: draw.usize(), cores: draw.usize() },
    }
}

fn shared_prefix(draw: &mut Draw) -> Backend {
    let [min_requests, min_shared_keys, min_saved_keys] = [draw.usize(), draw.usize(), draw.usize()];
    Backend::SharedPrefixDecode(SharedPrefixDecode { min_requests, min_shared_keys, min_saved_keys })
}

/// Limits of graphs for one or two requests of a cache of four blocks of 16 tokens.
fn fitting_limits() -> GraphLimits {
    GraphLimits::new([1, 2, 4], 64).tokens_each(2)
}

fn graph_limits(draw: &mut Draw) -> GraphLimits {
    let sizes = draw.few(|draw| draw.of(&[1, 2, 3, usize::MAX]));
    let tokens = draw.usize();
    let limits = GraphLimits::new(sizes, draw.usize()).tokens_each(draw.of(&[1, 2, 4, tokens]));
    match draw.bool() {
        true => limits,
        false => limits.blocks(draw.usize()),
    }
}

pub const CALLS: &[Call] = &[
    ("PageIndices", |draw| {
        let lists = [slots(draw), slots(draw), slots(draw)];
        let [starts, pages, last] = lists;
        let starts = [vec![0], starts].concat();
        if let Ok(lists) = PageIndices::new(starts, pages, last, draw.usize()) {
            let _ = (lists.to_table(draw.usize()), lists.pages(draw.usize()));
        }
        let table = table(draw);
        let lengths = lengths_for(table.requests(), draw);
        let _ = PageIndices::from_table(&table, &lengths, draw.usize());
    }),
    ("TokenIndices", |draw| {
        let slots = slots(draw);
        let ends = vec![0, slots.len() as i32];
        if let Ok(lists) = TokenIndices::new(ends, slots) {
            let _ = (lists.to_table(draw.usize()), lists.slots(draw.usize()));
        }
        let table = table(draw);
        let lengths = lengths_for(table.requests(), draw);
        let window = draw.bool().then(|| draw.usize());
        let _ = TokenIndices::from_table(&table, &lengths, draw.usize(), window);
    }),
    ("CustomMask", |draw| {
        let trees = draw.few(|draw| DraftTree::chain(draw.usize()).ok());
        let trees: Vec<DraftTree> = trees.into_iter().flatten().collect();
        let lengths = draw.bool().then(|| lengths_for(trees.len(), draw));
        if let Ok(mask) = CustomMask::of_trees(&trees, lengths.as_ref()) {
            let _ = (mask.extent(draw.usize()), mask.request(draw.usize()).len());
            let _ = mask.pack::<u16>();
        }
        let starts = |draw: &mut Draw| [vec![0], draw.few(Draw::usize)].concat();
        let visible = draw.few(Draw::bool);
        if let Ok(mask) = CustomMask::new(visible, starts(draw), starts(draw)) {
            let _ = (mask.extent(draw.usize()), mask.request(draw.usize()).len());
            let _ = mask.pack::<u64>();
        }
    }),
    ("CustomMask::unpack", |draw| {
        let (words, word_indptr) = (draw.few(Draw::u32), draw.few(Draw::usize));
        let extents = draw.few(|draw| (draw.usize(), draw.usize()));
        let _ = CustomMask::unpack(&words, &word_indptr, &extents);
    }),
    ("DraftTree", |draw| {
        let _ = DraftTree::from_parents(&draw.few(Draw::i64));
        let (selected, parents) = (draw.few(Draw::usize), draw.few(Draw::usize));
        if let Ok(tree) = DraftTree::from_candidates(&selected, &parents, draw.usize()) {
            let _ = (tree.depths().count(), tree.sees(draw.usize(), draw.usize()));
            let _ = (tree.parent(draw.usize()), tree.depth(draw.usize()), tree.is_chain());
            let _ = tree.accept_greedy(&draw.few(Draw::u32), &draw.few(Draw::u32));
        }
    }),
    ("SampledDrafts", |draw| {
        let tree = DraftTree::chain(draw.of(&[0, 1, 2])).unwrap();
        let row = draw.of(&[&[0.5f32, 0.5][..], &[1.0], &[]]);
        let rows = row.repeat(draw.of(&[tree.nodes(), 1]));
        let _ = tree.accept_sampled(&SampledDrafts {
            tokens: &draw.few(Draw::u32),
            vocabulary: draw.of(&[row.len(), 0, usize::MAX]),
            target: &rows,
            source: draw.of(&[DraftSource::Fixed, DraftSource::Independent(&rows), DraftSource::Distinct(&rows)]),
            uniform: &draw.few(Draw::f64),
        });
    }),
    ("MultiItemPrompt", |draw| {
        let (starts, tokens) = (draw.few(Draw::usize), draw.usize());
        if let Ok(prompt) = MultiItemPrompt::new(starts, tokens) {
            let _ = (prompt.prefix(), prompt.items().count());
            let _ = (prompt.positions().nth(draw.usize().min(9)), prompt.sees(draw.usize(), draw.usize()));
        }
    }),
    ("StatePolicy", |draw| {
        let requests = draw.few(Request::draw);
        let requests: Vec<_> = requests.iter().map(Request::view).collect();
        let drafting = draw.of(&[None, Some(Drafting::Mtp), Some(Drafting::Other)]);
        let _ = StatePolicy::new(draw.bool(), drafting).state(&requests);
    }),
    ("SplitDecode", |draw| {
        let (split, shape) = (split(draw), AttentionShape::new(draw.usize(), draw.usize(), 64));
        let _ = split.parts(&lengths(draw), shape);
    }),
    ("EncoderAttention", |draw| {
        let stream = crate::stream();
        let heads = AttentionShape::new(draw.of(&[1, 2, usize::MAX]), draw.of(&[0, 1, 2]), 64);
        let tokens = draw.of(&[1usize, 2, 8]);
        let rows = |heads: usize| {
            let ones = vec![bf16::ONE; tokens * heads * 64];
            stream.upload(&ones, [tokens, heads, 64]).unwrap()
        };
        let (query, key) = (rows(2), rows(1));
        let lengths = match draw.bool() {
            true => lengths(draw),
            false => PerRequest::new(vec![tokens - 1, 0, 1]).unwrap(),
        };
        if let Ok(encoder) = EncoderAttention::plan(heads, &stream, &lengths, (&query, &key, &key)) {
            encoder.launch(&stream, (&query, &key, &key)).unwrap();
            let _ = encoder.launch(&stream, (&key, &query, &key));
        }
    }),
    ("CrossAttention", |draw| {
        let stream = crate::stream();
        let cache = || {
            let shape = CacheShape::new(1, 1, 64);
            let pad = PadPolicy::SkipNegative;
            PagedKvCache::<bf16>::new(stream.device(), 4, 16, shape, pad).unwrap()
        };
        let heads = AttentionShape::new(draw.of(&[1, 2, 2, 2, usize::MAX]), 1, 64);
        let mut cross = CrossAttention::new(heads, cache()).unwrap();
        let mut encoded = [Sequence::new(cross.cache().pool()), Sequence::new(cross.cache().pool())];
        let (one, two) = (draw.usize(), draw.usize());
        let [first, second] = &mut encoded;
        if let Ok(mut encoding) = cross.encode(&stream, &mut [(first, one), (second, two)]) {
            let ones = vec![bf16::ONE; (one + two) * 64];
            let rows = stream.upload(&ones, [one + two, 1, 64]).unwrap();
            if encoding.write(draw.usize(), &rows, &rows).is_err() {
                encoding.write(0, &rows, &rows).unwrap();
            }
        }
        let settings = settings(4, 16, PadPolicy::SkipNegative, 0).unwrap();
        let requests = draw.few(Request::draw);
        let requests: Vec<_> = requests.iter().map(Request::view).collect();
        let Ok(metadata) = AttentionMetadata::new(&requests, settings) else {
            return;
        };
        let sequences: Vec<&Sequence> = encoded.iter().cycle().take(metadata.requests()).collect();
        let Ok(mut step) = cross.begin(&stream, &metadata, &sequences) else {
            return;
        };
        let tokens = metadata.tokens();
        let ones = vec![bf16::ONE; tokens * 2 * 64];
        let query = stream.upload(&ones, [tokens, 2, 64]).unwrap();
        let _ = step.forward(draw.usize(), &query);
        let _ = step.forward(0, &query);
        CROSS_STEPS.count();
    }),
    ("SparseLatent", |draw| {
        let stream = crate::stream();
        let (device, pad) = (stream.device(), PadPolicy::SkipNegative);
        let latents = match draw.of(&[false, true]) {
            true => PagedKvCache::<bf16>::quantised_sparse_latents(device, 4, 16, 1, pad),
            false => PagedKvCache::new(device, 4, 16, CacheShape::latent(1), pad),
        };
        let index_keys = match draw.of(&[false, true]) {
            true => PagedKvCache::quantised_index_keys(device, 4, 16, 1, pad),
            false => PagedKvCache::new(device, 4, 16, CacheShape::index_keys(1), pad),
        };
        let (latents, index_keys) = (latents.unwrap(), index_keys.unwrap());
        let index_keys = index_keys.with_pool(latents.pool()).unwrap();
        let shape = AttentionShape::latent(draw.of(&[1, 2, usize::MAX]));
        let [dim, rope] = if latents.is_quantised() { [576, 0] } else { [512, 64] };
        let sparse = SparseLatent::new(shape, latents, index_keys).unwrap();
        let mut sparse = sparse.sparse_count(draw.usize());
        let settings = settings(4, 16, PadPolicy::SkipNegative, draw.usize()).unwrap();
        let requests = draw.few(Request::draw);
        let requests: Vec<_> = requests.iter().map(Request::view).collect();
        let Ok(metadata) = AttentionMetadata::new(&requests, settings) else {
            return;
        };
        let Ok(mut step) = sparse.begin(&stream, &metadata) else {
            return;
        };
        let tokens = metadata.tokens();
        let ones = |heads: usize, dim: usize| {
            let ones = vec![bf16::ONE; tokens * heads * dim];
            stream.upload(&ones, [tokens, heads, dim]).unwrap()
        };
        let heads = draw.of(&[0, 1, 2, 65]);
        let inputs = IndexerTensors {
            query: &ones(heads, 128),
            weights: &ones(1, heads).reshape([tokens, heads]).unwrap(),
            key: &ones(1, 128),
        };
        // Over quantised keys.
        let weights = stream.upload(&vec![f16::ONE; tokens * heads], [tokens, heads]).unwrap();
        let (query, key) = (inputs.query, inputs.key);
        let halves = IndexerTensors { query, weights: &weights, key };
        let choice = step.choose(draw.usize(), inputs).or_else(|_| step.choose(0, inputs));
        let Ok(choice) = choice.or_else(|_| step.choose(0, halves)) else {
            return;
        };
        let inputs = SparseTensors {
            query: &ones(2, dim),
            query_rope: &ones(2, rope),
            latent: &ones(1, 512),
            key_rope: &ones(1, 64),
            choice: &choice,
        };
        let _ = step.forward(draw.usize(), inputs);
        let _ = step.forward(0, inputs);
        drop(step);
        stream.synchronize().unwrap();
    }),
    ("ContextParallel", |draw| {
        if let Ok(parallel) = ContextParallel::new(draw.usize(), draw.usize(), draw.usize()) {
            let _ = (parallel.rank_of(draw.usize()), parallel.local_len(draw.usize(), draw.usize()));
            let _ = parallel.slot(&row(draw), draw.usize(), draw.usize());
            let requests = draw.few(Request::draw);
            let requests: Vec<_> = requests.iter().map(Request::view).collect();
            let _ = (parallel.pool_block_size(), parallel.split(&requests, pad(draw)));
        }
    }),
    ("AttentionMetadata", |draw| {
        let sizes = (draw.usize(), draw.usize());
        let Some(settings) = settings(sizes.0, sizes.1, pad(draw), draw.usize()) else {
            return;
        };
        let requests = draw.few(Request::draw);
        let requests: Vec<_> = requests.iter().map(Request::view).collect();
        if let Ok(mut metadata) = AttentionMetadata::new(&requests, settings) {
            let _ = (metadata.prefill_tokens(), metadata.pad_to(draw.usize()), metadata.call_lengths().keys());
            let _ = metadata.renew(&requests);
        }
    }),
    ("BatchRequest::of", |draw| {
        let pool = BlockPool::new(4, 16, PadPolicy::SkipNegative).unwrap();
        let mut sequence = Sequence::new(&pool);
        drop(sequence.grow(draw.usize()));
        drop(sequence.drop_before(draw.of(&[0, 16, 17])));
        let window = draw.of(&[0, 1, 20]);
        let settings = settings(4, 16, PadPolicy::SkipNegative, window).unwrap();
        let mut request = BatchRequest::of(&sequence, draw.usize());
        let _ = AttentionMetadata::new(&[request], settings);
        (request.cached, request.new) = (draw.usize(), draw.usize());
        let _ = AttentionMetadata::new(&[request], settings);
        let parallel = ContextParallel::new(2, 8, 8).unwrap();
        let _ = parallel.split(&[request], PadPolicy::SkipNegative);
    }),
    ("Backends::prefer", |draw| {
        let backends = Backends::<bf16>::none().with(Backend::Fused);
        let _ = backends.prefer(draw.usize()..draw.usize(), &AttentionState::ALL, "fused");
    }),
    ("a step of an engine", |draw| {
        let stream = crate::stream();
        let shape = CacheShape::new(1, 1, 64);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 4, 16, shape, PadPolicy::SkipNegative);
        let backends = Backends::none()
            .with(shared_prefix(draw))
            .with(Backend::CascadePrefill)
            .with(Backend::ChunkedLocal)
            .with(Backend::SplitDecode(split(draw)))
            .with(Backend::FusedInTwo)
            .with(Backend::PagedDecode)
            .with(Backend::Fused);
        let backends = match draw.bool() {
            true => backends,
            false => backends.memory_limit(draw.usize(), draw.usize()),
        };
        let heads = AttentionShape::new(draw.of(&[1, 2, 2, 2, usize::MAX]), 1, 64);
        let mut attention = Attention::new(heads, cache.unwrap(), backends);
        let settings = settings(4, 16, PadPolicy::SkipNegative, draw.usize()).unwrap();
        let requests = draw.few(Request::draw);
        let requests: Vec<_> = requests.iter().map(Request::view).collect();
        let Ok(mut metadata) = AttentionMetadata::new(&requests, settings) else {
            return;
        };
        if let (true, Some(chunk)) = (draw.bool(), NonZeroUsize::new(draw.usize())) {
            metadata.set_mask(Causality::Chunk(chunk));
        }
        let _ = attention.backend_choices(&stream, 0, Causality::Causal, None);
        if let Ok(choice) = attention.backend_choice(&stream, &metadata, 0, None, None) {
            let _ = choice.memory.total(draw.usize());
        }
        let tokens = metadata.tokens();
        let of = |heads: usize| {
            let ones = vec![bf16::ONE; tokens * heads * 64];
            stream.upload(&ones, [tokens, heads, 64]).unwrap()
        };
        let (query, key) = (of(2), of(1));
        let mut step = attention.begin(&stream, &metadata).unwrap();
        let _ = step.forward(draw.usize(), (&query, &key, &key));
        let _ = step.forward(0, (&query, &key, &key));
        STEPS.count();
        drop(step);
        stream.synchronize().unwrap();
    }),
    ("a step by graphs", |draw| {
        let stream = crate::stream();
        let shape = CacheShape::new(1, 1, 64);
        let fits = draw.bool();
        let pad = match fits {
            true => PadPolicy::SkipNegative,
            false => pad(draw),
        };
        let Ok(cache) = PagedKvCache::<bf16>::new(stream.device(), 4, 16, shape, pad) else {
            return;
        };
        let heads = AttentionShape::new(draw.of(&[1, 2, 2, 2, usize::MAX]), 1, 64);
        let backends = Backends::none().with(Backend::NamedMask).with(Backend::Fused);
        let attention = Attention::new(heads, cache, backends);
        let limits = match fits {
            true => fitting_limits(),
            false => graph_limits(draw),
        };
        let window = draw.usize();
        let mask: LayerMask = match (draw.bool(), NonZeroUsize::new(window)) {
            (true, _) => NamedMask::new("near", |_, token, key| token.abs_diff(key) < 3).into(),
            (false, Some(window)) => Causality::Window(window).into(),
            (false, None) => Causality::Causal.into(),
        };
        let Ok(mut graphs) = attention.capture(&stream, mask.clone(), &limits) else {
            return;
        };
        let window = if draw.bool() { window } else { 0 };
        let settings = settings(4, 16, pad, window).unwrap();
        let requests = match fits {
            true => vec![Request::fitting(draw)],
            false => draw.few(Request::draw),
        };
        let requests: Vec<_> = requests.iter().map(Request::view).collect();
        let Ok(mut metadata) = AttentionMetadata::new(&requests, settings) else {
            return;
        };
        metadata.set_mask(mask);
        let _ = metadata.pad_to(metadata.tokens() + draw.of(&[0, 1, 5]));
        let tokens = metadata.actual_tokens();
        let of = |heads: usize| {
            let ones = vec![bf16::ONE; tokens * heads * 64];
            stream.upload(&ones, [tokens, heads, 64]).unwrap()
        };
        let (query, key) = (of(draw.of(&[1, 2])), of(1));
        let served = graphs.serves(&metadata);
        let Ok(mut step) = graphs.begin(&stream, &mut metadata) else {
            return;
        };
        assert!(served);
        let _ = step.forward(draw.usize(), (&query, &key, &key));
        let _ = step.forward(0, (&query, &key, &key));
        GRAPH_STEPS.count();
        drop(step);
        stream.synchronize().unwrap();
    }),
    ("a step over latents by graphs", |draw| {
        let stream = crate::stream();
        let shape = CacheShape::latent(1);
        let fits = draw.bool();
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::<bf16>::new(stream.device(), 4, 16, shape, pad).unwrap();
        let heads = AttentionShape::latent(draw.of(&[1, 2, 2, 2, usize::MAX]));
        let attention = Attention::new(heads, cache, Backends::none().with(Backend::MLA_256_MIB));
        let limits = match fits {
            true => fitting_limits(),
            false => graph_limits(draw),
        };
        let Ok(mut graphs) = attention.capture(&stream, Causality::Causal, &limits) else {
            return;
        };
        let settings = settings(4, 16, pad, 0).unwrap();
        let requests = match fits {
            true => vec![Request::fitting(draw)],
            false => draw.few(Request::draw),
        };
        let requests: Vec<_> = requests.iter().map(Request::view).collect();
        let Ok(mut metadata) = AttentionMetadata::new(&requests, settings) else {
            return;
        };
        let tokens = metadata.actual_tokens();
        let of = |heads: usize, dim: usize| {
            let ones = vec![bf16::ONE; tokens * heads * dim];
            stream.upload(&ones, [tokens, heads, dim]).unwrap()
        };
        let (query, query_rope) = (of(2, 512), of(draw.of(&[1, 2, 2]), draw.of(&[64, 64, 512])));
        let (latent, key_rope) = (of(1, 512), of(1, 64));
        let Ok(mut step) = graphs.begin(&stream, &mut metadata) else {
            return;
        };
        let tensors = LatentTensors { query_rope: &query_rope, form: LatentForm::Absorbed };
        let _ = step.forward(0, (&query, &latent, &key_rope));
        let inputs = LayerInputs::latent(&query, &latent, &key_rope, tensors);
        let _ = step.forward(draw.usize(), inputs);
        let _ = step.forward(0, inputs);
        LATENT_GRAPH_STEPS.count();
        drop(step);
        stream.synchronize().unwrap();
    }),
    ("trees", |draw| {
        let stream = crate::stream();
        let shape = CacheShape::new(1, 1, 64);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 4, 16, shape, PadPolicy::SkipNegative);
        let cache = cache.unwrap();
        let verification = TreeVerification::new(AttentionShape::new(draw.of(&[1, 2, 2, 2, usize::MAX]), 1, 64));
        let fits = draw.bool();
        let limits = match fits {
            true => fitting_limits(),
            false => graph_limits(draw),
        };
        let Ok(mut graphs) = verification.capture(&stream, &cache, &limits) else {
            return;
        };
        let mut sequence = Sequence::new(cache.pool());
        drop(sequence.grow(if fits { 3 } else { draw.usize() }));
        if fits {
            cache.mark_computed(&sequence, sequence.len()).unwrap();
        }
        let trees = match fits {
            true => vec![DraftTree::chain(draw.of(&[0, 1])).unwrap()],
            false => draw.few(|draw| DraftTree::chain(draw.of(&[0, 1, 2, 9])).unwrap()),
        };
        let request = |tree| TreeRequest { sequence: &sequence, cached: sequence.len(), tree };
        let requests: Vec<_> = trees.iter().map(request).collect();
        let nodes = graphs.nodes();
        if let Ok(mut step) = verification.begin(&stream, &cache, &requests) {
            let shape = [requests.len(), 1, draw.of(&[1, 2, 9]), 64];
            let ones = vec![bf16::ONE; shape.iter().product()];
            let rows = stream.upload(&ones, shape).unwrap();
            let _ = step.forward(draw.usize(), (&rows, &rows, &rows));
            let _ = step.forward(0, (&rows, &rows, &rows));
            TREE_STEPS.count();
        }
        let Ok(mut step) = graphs.begin(&stream, &requests) else {
            return;
        };
        let ones = vec![bf16::ONE; requests.len() * nodes * 64];
        let rows = stream.upload(&ones, [requests.len(), 1, nodes, 64]).unwrap();
        let _ = step.forward(draw.usize(), (&rows, &rows, &rows));
        let _ = step.forward(0, (&rows, &rows, &rows));
        TREE_GRAPH_STEPS.count();
        drop(step);
        stream.synchronize().unwrap();
    }),
];
