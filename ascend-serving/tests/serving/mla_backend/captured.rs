//! Steps over latents replayed from graphs: bit by bit those without a graph, and the definition's.

use approx::abs_diff_eq;
use ascend_attention::spec::Cann;
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{Cache, CacheShape, PadPolicy, PagedKvCache, QuantisedLayer, QuantisedType, Sequence};
use ascend_serving::{
    Attention, AttentionBackend, AttentionGraphs, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest,
    BatchSettings, Causality, Error, GraphLimits, LatentForm, LatentRows, LatentTensors, LayerGroup, LayerInputs,
    LayerTensor, LayerTensors, QuantisedQueries, RangeCheck, Result, StatePolicy, StepCall, StepContext, StepProgram,
    UpProjected, Violation, rules,
};

use super::definition::{What, absorb, dense_over, exact, project, row};
use super::engine::{epsilon, read, scale_of};
use super::{DIM, LATENT, LAYERS, ROPE, harness};
use crate::quantised_caches::ascend_950;
use crate::tokens::packed;

const HEADS: usize = 2;

fn cache(stream: &Stream, format: Cache, layers: usize) -> PagedKvCache<bf16> {
    let shape = CacheShape::latent(layers).format(format);
    PagedKvCache::new(stream.device(), 16, 128, shape, PadPolicy::SkipNegative).unwrap()
}

/// A cache whose latents are of one byte.
fn quantised(stream: &Stream, format: Cache, stored: QuantisedType) -> PagedKvCache<bf16> {
    let (shape, scales) = (CacheShape::latent(LAYERS).format(format), [scale_of(stored); LAYERS]);
    PagedKvCache::quantised_latents(stream, 16, 128, shape, PadPolicy::SkipNegative, stored, &scales).unwrap()
}

fn attention(stream: &Stream, format: Cache, layers: usize, backends: Backends<bf16>) -> Attention<bf16> {
    Attention::new(AttentionShape::latent(HEADS), cache(stream, format, layers), backends)
}

/// Backends of which one reads latents.
fn backends() -> Backends<bf16> {
    Backends::none().with(Backend::Fused).with(Backend::MLA_256_MIB).with(Backend::QUANTISED_MLA_256_MIB)
}

/// The inputs of a layer: absorbed queries and their rotary parts, latents and rotary keys.
struct Rows {
    query: Tensor<bf16>,
    query_rope: Tensor<bf16>,
    latent: Tensor<bf16>,
    key_rope: Tensor<bf16>,
    /// The queries of one byte, and their rotary parts.
    quantised: Option<(QuantisedQueries, Tensor<bf16>)>,
}

impl Rows {
    fn of(stream: &Stream, names: &[u64], layer: usize) -> Self {
        let upload = |heads: usize, dim: usize, row: &dyn Fn(u64) -> Vec<bf16>| {
            let rows: Vec<bf16> = names.iter().flat_map(|name| row(*name)).collect();
            stream.upload(&rows, [names.len(), heads, dim]).unwrap()
        };
        let of = |what, heads: usize, dim: usize| upload(heads, dim, &|name| row(name, layer, what, heads * dim));
        Self {
            query: upload(HEADS, LATENT, &|name| absorb(layer, HEADS, &row(name, layer, What::Query, HEADS * DIM))),
            query_rope: of(What::QueryRope, HEADS, ROPE),
            latent: of(What::Latent, 1, LATENT),
            key_rope: of(What::KeyRope, 1, ROPE),
            quantised: None,
        }
    }

    /// These rows with queries of one byte, where the latents have these.
    fn stored(mut self, stream: &Stream, stored: Option<QuantisedType>) -> Self {
        let queries = (&self.query, &self.query_rope);
        self.quantised =
            stored.map(|stored| QuantisedQueries::quantise_on_host(stream, stored, queries, scale_of(stored)).unwrap());
        self
    }

    fn inputs(&self) -> LayerInputs<'_, bf16> {
        if let Some((queries, query_rope)) = &self.quantised {
            return LayerInputs::quantised_latent(queries, query_rope, &self.latent, &self.key_rope);
        }
        let tensors = LatentTensors { query_rope: &self.query_rope, form: LatentForm::Absorbed };
        LayerInputs::latent(&self.query, &self.latent, &self.key_rope, tensors)
    }
}

/// The row of a token in an output `[N, tokens, 512]`, of all heads.
fn row_of(output: &[bf16], tokens: usize, token: usize) -> Vec<bf16> {
    let heads = output.chunks(tokens * LATENT);
    let heads = heads.flat_map(|head| &head[token * LATENT..][..LATENT]);
    heads.copied().collect()
}

/// Requests with the names of their tokens, computed with and without graphs.
struct Server<'a> {
    stream: &'a Stream,
    attention: Attention<bf16>,
    graphs: AttentionGraphs<bf16>,
    requests: Vec<(Sequence, Vec<u64>)>,
    named: u64,
    replays: usize,
    stored: Option<QuantisedType>,
}

impl<'a> Server<'a> {
    fn new(stream: &'a Stream, format: Cache, limits: &GraphLimits) -> Self {
        Self::over(stream, cache(stream, format, LAYERS), limits)
    }

    fn over(stream: &'a Stream, cache: PagedKvCache<bf16>, limits: &GraphLimits) -> Self {
        let stored = cache.quantised_layer(0).ok().map(QuantisedLayer::stored);
        let attention = Attention::new(AttentionShape::latent(HEADS), cache, backends());
        let graphs = attention.capture(stream, Causality::Causal, limits);
        Self { stream, graphs: graphs.unwrap(), attention, requests: Vec::new(), named: 0, replays: 0, stored }
    }

    /// Computes a step, over latents of one byte in several where requests add more rows than quantised queries have.
    fn steps(&mut self, news: &[usize]) {
        let mut left = news.to_vec();
        while self.stored.is_some() && left.iter().any(|new| *new > 16) {
            let part: Vec<usize> = left.iter().map(|new| if *new > 16 { 16 } else { 0 }).collect();
            self.step(&part);
            left.iter_mut().zip(part).for_each(|(new, part)| *new -= part);
        }
        self.step(&left);
    }

    /// Computes a step in which each request adds some tokens, or none where it takes no part.
    fn step(&mut self, news: &[usize]) {
        let stream = self.stream;
        while self.requests.len() < news.len() {
            let sequence = Sequence::new(self.attention.cache().pool());
            self.requests.push((sequence, Vec::new()));
        }
        let turns: Vec<_> = (news.iter().copied().enumerate()).filter(|(_, new)| *new > 0).collect();
        let mut names = Vec::new();
        for &(request, new) in &turns {
            let (sequence, known) = &mut self.requests[request];
            let first = sequence.len();
            // Those of a request that was preempted have names.
            let grown = (first + new).saturating_sub(known.len());
            known.extend((0..grown as u64).map(|token| self.named + token));
            self.named += grown as u64;
            self.attention.grow(stream, sequence, new).unwrap();
            names.extend_from_slice(&known[first..first + new]);
        }
        let batch = turns.iter().map(|(request, new)| {
            let of = BatchRequest::of(&self.requests[*request].0, *new);
            of.recompute()
        });
        let settings = BatchSettings::of(self.attention.cache(), Causality::Causal);
        let batch: Vec<_> = batch.collect();
        let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
        let ends = metadata.q_ends().ends().to_vec();
        let mut replayed = Vec::new();
        if self.graphs.serves(&metadata) {
            let mut step = self.graphs.begin(stream, &mut metadata).unwrap();
            for layer in 0..LAYERS {
                let rows = Rows::of(stream, &names, layer).stored(stream, self.stored);
                let output = step.forward(layer, rows.inputs()).unwrap();
                assert_eq!(output.shape(), [HEADS, metadata.tokens(), LATENT]);
                replayed.push(output.download(stream).unwrap());
            }
            step.end().unwrap();
            self.replays += 1;
        }
        let padded = metadata.tokens();
        let filled = std::iter::repeat_n(0, padded - names.len());
        let with_padding: Vec<u64> = names.iter().copied().chain(filled).collect();
        let mut step = self.attention.begin(stream, &metadata).unwrap();
        for layer in 0..LAYERS {
            let rows = Rows::of(stream, &with_padding, layer).stored(stream, self.stored);
            let output = step.forward(layer, rows.inputs()).unwrap();
            let output = output.download(stream).unwrap();
            for token in 0..names.len() {
                let eager = row_of(&output, padded, token);
                if let Some(replayed) = replayed.get(layer) {
                    assert_eq!(row_of(replayed, padded, token), eager, "token {token}");
                }
            }
            for ((request, _), end) in turns.iter().zip(&ends) {
                let last = exact(&row_of(&output, padded, end - 1));
                let got = last
                    .chunks(LATENT)
                    .enumerate()
                    .flat_map(|(head, latent)| project(layer, true, HEADS, latent)[head * DIM..][..DIM].to_vec());
                let (sequence, names) = &self.requests[*request];
                let names = &names[..sequence.len()];
                let want = dense_over(names, layer, AttentionShape::latent(HEADS), |_, latent| match self.stored {
                    Some(stored) => latent.into_iter().map(|x| read(stored, x)).collect(),
                    None => latent,
                });
                for (got, want) in got.zip(want) {
                    assert!(abs_diff_eq!(got, want, epsilon = epsilon(self.stored)), "{got}, not {want}");
                }
            }
        }
        step.end().unwrap();
    }

    /// Begins a request with tokens of another one.
    fn fork(&mut self, request: usize, tokens: usize) {
        let (sequence, names) = &self.requests[request];
        let fork = sequence.share_prefix(tokens).unwrap();
        let names = names[..tokens].to_vec();
        self.requests.push((fork, names));
    }

    /// Gives everything of a request back. Its tokens are computed again in its next step.
    fn preempt(&mut self, request: usize) {
        self.requests[request].0.truncate(0).unwrap();
    }
}

/// Replays of steps in which requests come, share prefixes, are preempted and go on.
fn replays(format: Cache, each: usize, steps: &[&[usize]]) -> usize {
    let stream = harness::stream();
    let limits = GraphLimits::new([1, 2, 4], 300).tokens_each(each);
    replays_of(Server::new(&stream, format, &limits), each, steps)
}

fn replays_of(mut server: Server<'_>, each: usize, steps: &[&[usize]]) -> usize {
    let name = if server.stored.is_some() { "quantised_mla" } else { "mla" };
    assert_eq!(server.graphs.backend(LAYERS - 1), Some(name));
    server.steps(&[126, 30]);
    let before = std::mem::take(&mut server.replays);
    assert!(before == 0 || server.stored.is_some());
    for news in steps {
        server.step(news);
    }
    // In the middle of a block, which the next token copies.
    server.fork(0, 120);
    server.step(&[each, each, each]);
    server.preempt(1);
    server.step(&[1, 0, 1]);
    server.steps(&[0, 40, 1]);
    server.step(&[1, 1, 1]);
    server.replays
}

/// Decodes and drafts over latents of one byte, of each product.
#[test]
fn steps_over_quantised_latents_are_replayed() {
    let int8 = [(Cache::Nz, QuantisedType::Int8)];
    let floats = [(Cache::BnNBsD, QuantisedType::Float8E4M3Fn), (Cache::BnBsH, QuantisedType::HiFloat8)];
    let of_950 = ascend_950().map(|stream| (stream, [int8[0], floats[0], floats[1]].to_vec()));
    for (stream, caches) in [Some((harness::stream(), int8.to_vec())), of_950].into_iter().flatten() {
        for (number, (format, stored)) in caches.into_iter().enumerate() {
            // Drafts over the first cache of each product.
            for each in [1, 3].into_iter().take(if number == 0 { 2 } else { 1 }) {
                let limits = GraphLimits::new([1, 2, 4], 300).tokens_each(each);
                let server = Server::over(&stream, quantised(&stream, format, stored), &limits);
                let drafts: [&[usize]; 4] = [&[3, 1], &[2, 3], &[1, 0], &[3, 3]];
                let decodes: [&[usize]; 5] = [&[1, 1], &[1, 1], &[1, 0], &[1, 1], &[1, 1]];
                let steps: &[&[usize]] = if each == 1 { &decodes } else { &drafts };
                assert!(replays_of(server, each, steps) >= 7, "{format:?} {stored:?}");
            }
        }
    }
}

/// Inputs in another form than that of the cache, and queries of another type, are refused before anything is copied.
#[test]
fn a_graph_over_quantised_latents_takes_its_own_queries() {
    let stream = harness::stream();
    let limits = GraphLimits::new([1, 2], 300);
    let mut server = Server::over(&stream, quantised(&stream, Cache::Nz, QuantisedType::Int8), &limits);
    server.step(&[3]);
    let (sequence, _) = &mut server.requests[0];
    server.attention.grow(&stream, sequence, 1).unwrap();
    let settings = BatchSettings::of(server.attention.cache(), Causality::Causal);
    let mut metadata = AttentionMetadata::new(&[BatchRequest::of(sequence, 1)], settings).unwrap();
    let mut step = server.graphs.begin(&stream, &mut metadata).unwrap();
    let absorbed = Rows::of(&stream, &[7], 0);
    let why = step.forward(0, absorbed.inputs()).map(drop).unwrap_err();
    assert!(why.breaks(&rules::GRAPH_INPUTS), "{why}");
    assert!(why.to_string().contains("`LayerInputs::quantised_latent`"), "{why}");
    let other = Rows::of(&stream, &[7], 0).stored(&stream, Some(QuantisedType::Float8E4M3Fn));
    let why = step.forward(0, other.inputs()).map(drop).unwrap_err();
    assert!(why.breaks(&rules::ARGUMENT_VALUE), "{why}");
    let wide = Rows::of(&stream, &[7, 8, 9], 0).stored(&stream, Some(QuantisedType::Int8));
    let why = step.forward(0, wide.inputs()).map(drop).unwrap_err();
    assert!(why.breaks(&rules::STEP_TOKENS), "{why}");
    // Another query beside the quantised ones would be left out.
    let rows = Rows::of(&stream, &[7], 0).stored(&stream, Some(QuantisedType::Int8));
    let mut inputs = rows.inputs();
    inputs.query = &rows.query;
    let why = step.forward(0, inputs).map(drop).unwrap_err();
    assert!(why.breaks(&rules::GRAPH_INPUTS) && why.to_string().contains("beside quantised ones"), "{why}");
    for layer in 0..LAYERS {
        let rows = Rows::of(&stream, &[7], layer).stored(&stream, Some(QuantisedType::Int8));
        step.forward(layer, rows.inputs()).unwrap();
    }
    step.end().unwrap();
}

#[test]
fn decodes_over_latents_are_replayed() {
    let steps: [&[usize]; 5] = [&[1, 1], &[1, 1], &[1, 0], &[1, 1], &[1, 1]];
    for format in [Cache::BnBsH, Cache::BnNBsD, Cache::Nz] {
        assert_eq!(replays(format, 1, &steps), 8);
    }
}

#[test]
fn drafts_over_latents_are_replayed() {
    let steps: [&[usize]; 4] = [&[3, 1], &[2, 3], &[1, 0], &[3, 3]];
    for format in [Cache::BnBsH, Cache::Nz] {
        assert_eq!(replays(format, 3, &steps), 7);
    }
}

/// On CANN 8.1 absorbed queries have at most 16 rows a request, and steps that leave a longer dummy are computed
/// without a graph. All others are replayed, though a size has more rows than those of its other requests.
#[test]
fn dummies_have_as_many_rows_as_absorbed_queries_may() {
    for (stream, limited) in [(Some(harness::stream()), false), (harness::stream_of(Cann::V8_1), true)] {
        let Some(stream) = stream else {
            continue;
        };
        let limits = GraphLimits::new([1, 5, 9], 300).tokens_each(4);
        let mut server = Server::new(&stream, Cache::BnBsH, &limits);
        server.step(&[16, 5, 5, 5, 5, 5, 5, 5]);
        // Dummies of 10 and 9 rows, of 12, of 8 at most in four, and of 4 and 3.
        let replayed: [&[usize]; 4] = [&[3, 1, 2, 3, 4, 3, 1], &[3; 8], &[1; 5], &[4, 3, 1]];
        for (before, news) in replayed.into_iter().enumerate() {
            server.step(news);
            assert_eq!(server.replays, before + 1, "{news:?}");
        }
        let mut batch = Vec::new();
        for (sequence, _) in &mut server.requests {
            server.attention.grow(&stream, sequence, 1).unwrap();
            batch.push(BatchRequest::of(sequence, 1));
        }
        let settings = BatchSettings::of(server.attention.cache(), Causality::Causal);
        let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
        let before = metadata.clone();
        assert_eq!(server.graphs.serves(&metadata), !limited);
        match server.graphs.begin(&stream, &mut metadata).map(drop) {
            Ok(()) => assert!(!limited),
            Err(Error::Violation(why)) => {
                assert_eq!(why.rule, &rules::GRAPH_SIZE, "{why}");
                assert_eq!(why.given, "a dummy request of 28 tokens, in the size of 9 requests");
                assert!(why.allowed.starts_with("at most 16 a dummy"), "{why}");
                assert_eq!(metadata, before);
            }
            Err(other) => panic!("{other}"),
        }
    }
}

/// A backend of the caller, whose packed call over latents is that of [`Backend::Mla`].
struct OwnLatents;

impl AttentionBackend<bf16> for OwnLatents {
    fn name(&self) -> &'static str {
        "own_latents"
    }

    fn reads_latents(&self) -> bool {
        true
    }

    fn program(&self, step: &StepContext<'_>, _: &LayerTensors<'_, bf16>) -> Result<StepProgram<bf16>> {
        Ok(StepCall::of_step(step)?.into())
    }
}

#[test]
fn calls_of_another_backend_read_latents_too() {
    let stream = harness::stream();
    let names = [3, 4, 5];
    let rows = Rows::of(&stream, &names, 0);
    let outputs = [Backends::none().with(Backend::MLA_256_MIB), Backends::none().with(OwnLatents)].map(|backends| {
        let mut attention = attention(&stream, Cache::BnBsH, 1, backends);
        let mut sequence = Sequence::new(attention.cache().pool());
        attention.grow(&stream, &mut sequence, 8).unwrap();
        attention.cache().mark_computed(&sequence, 5).unwrap();
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let batch = [BatchRequest::of(&sequence, 3)];
        let metadata = AttentionMetadata::new(&batch, settings).unwrap();
        let mut step = attention.begin(&stream, &metadata).unwrap();
        let output = step.forward(0, rows.inputs()).unwrap().clone();
        step.end().unwrap();
        output.download(&stream).unwrap()
    });
    let [of_mla, own] = outputs;
    assert!(of_mla.iter().any(|x| x.to_f32() != 0.0));
    assert_eq!(own, of_mla);
}

/// A group of layers over latents and one over keys and values are one captured step.
#[test]
fn layers_over_latents_are_a_group_of_a_captured_step() {
    let stream = harness::stream();
    let pad = PadPolicy::SkipNegative;
    let plain = PagedKvCache::new(stream.device(), 8, 128, CacheShape::new(1, 1, 64), pad).unwrap();
    let latent = cache(&stream, Cache::BnBsH, LAYERS);
    let groups = [
        LayerGroup::new([0, 2], Causality::Causal, AttentionShape::latent(HEADS), latent, backends()),
        LayerGroup::new([1], Causality::Causal, AttentionShape::new(HEADS, 1, 64), plain, backends()),
    ];
    let mut model = Attention::of_groups(3, groups).unwrap();
    let mut graphs = model.capture_layers(&stream, |layer| model.mask(layer), &GraphLimits::new([2], 300)).unwrap();
    let mut sequence = model.sequence();
    for step in 0..3 {
        let new = [5, 1, 1][step];
        model.grow(&stream, &mut sequence, new).unwrap();
        let request = BatchRequest::of(&sequence, new).recompute();
        let mut metadata = model.metadata(&[request], StatePolicy::default()).unwrap();
        let names: Vec<u64> = (0..2.max(new) as u64).map(|name| 10 * step as u64 + name).collect();
        let rows = [0, 1].map(|layer| Rows::of(&stream, &names, layer));
        let heads = [(0, HEADS), (1, 1), (2, 1)];
        let [query, key, value] = heads.map(|(what, heads)| packed(&stream, &names, 1, what, heads));
        let inputs = [rows[0].inputs(), (&query, &key, &value).into(), rows[1].inputs()];
        let mut replayed = Vec::new();
        if new == 1 {
            let mut step = graphs.begin(&stream, &mut metadata).unwrap();
            for (layer, inputs) in inputs.into_iter().enumerate() {
                let output = step.forward(layer, inputs).unwrap();
                replayed.push(output.download(&stream).unwrap());
            }
            let why = step.forward(0, inputs[1]).map(drop).unwrap_err();
            assert!(why.breaks(&rules::STEP_LAYER_REPEATED), "{why}");
            step.end().unwrap();
        }
        let mut step = model.begin(&stream, &metadata).unwrap();
        for (layer, inputs) in inputs.into_iter().enumerate() {
            let eager = step.forward(layer, inputs).unwrap().download(&stream).unwrap();
            let Some(replayed) = replayed.get(layer) else {
                continue;
            };
            match layer {
                1 => assert_eq!(replayed[..HEADS * 64], eager[..HEADS * 64]),
                _ => assert_eq!(row_of(replayed, 2, 0), row_of(&eager, 2, 0)),
            }
        }
        step.end().unwrap();
    }
}

#[test]
fn inputs_that_a_graph_over_latents_does_not_have_are_refused() {
    let stream = harness::stream();
    let mut server = Server::new(&stream, Cache::BnBsH, &GraphLimits::new([1, 2, 4], 300));
    server.step(&[3]);
    let (sequence, _) = &mut server.requests[0];
    server.attention.grow(&stream, sequence, 1).unwrap();
    let settings = BatchSettings::of(server.attention.cache(), Causality::Causal);
    let batch = [BatchRequest::of(sequence, 1)];
    let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
    server.attention.set_range_check(RangeCheck::always().limit(100.0)).unwrap();
    let rows = Rows::of(&stream, &[7], 0);
    let mut step = server.graphs.begin(&stream, &mut metadata).unwrap();
    let of_rope = step.tensors(0).unwrap().query_rope.as_ref().unwrap().reshape([HEADS, 1, ROPE]).unwrap();
    let of_rope = of_rope.narrow(0, 0..1).unwrap();
    let absorbed = LatentTensors { query_rope: &rows.query_rope, form: LatentForm::Absorbed };
    let mut refused = |inputs: LayerInputs<'_, bf16>| -> Violation {
        match step.forward(0, inputs).map(drop).unwrap_err() {
            Error::Violation(violation) => violation,
            other => panic!("{other}"),
        }
    };
    let no_latents = LayerInputs::from((&rows.query, &rows.latent, &rows.key_rope));
    let why = refused(no_latents);
    assert_eq!(why.rule, &rules::GRAPH_INPUTS, "{why}");
    let project = |_: &Stream, _: usize, _: LatentRows<'_, bf16>, _: &UpProjected<bf16>| Ok(());
    let plain = LatentTensors { query_rope: &rows.query_rope, form: LatentForm::Plain(&project) };
    let plain = LayerInputs::latent(&rows.query, &rows.latent, &rows.key_rope, plain);
    let why = refused(plain);
    assert_eq!(why.rule, &rules::GRAPH_INPUTS, "{why}");
    assert!(why.given.contains("in the form Plain"), "{why}");
    let long_rope = Rows::of(&stream, &[7, 8], 0);
    let rope = LatentTensors { query_rope: &long_rope.query_rope, form: LatentForm::Absorbed };
    let why = refused(LayerInputs::latent(&rows.query, &rows.latent, &rows.key_rope, rope));
    assert_eq!(why.rule, &rules::STEP_TOKENS, "{why}");
    // A place of another input would be overwritten before it is read.
    let why = refused(LayerInputs::latent(&rows.query, &rows.latent, &of_rope, absorbed));
    assert_eq!(why.rule, &rules::ARGUMENT_MEMORY, "{why}");
    assert!(why.given.starts_with("key_rope: ") && why.given.ends_with("the graph's tensor `query_rope`"), "{why}");
    // What is read is looked at, rotary parts included.
    let mut numbers = rows.query_rope.download(&stream).unwrap();
    numbers[ROPE + 3] = bf16::from_f32(200.0);
    rows.query_rope.overwrite(&stream, &numbers).unwrap();
    for layer in 0..LAYERS {
        step.forward(layer, rows.inputs()).unwrap();
    }
    step.end().unwrap();
    let found = server.attention.await_range_findings().unwrap();
    let found: Vec<_> = found.iter().map(|f| (f.layer, f.tensor, f.token, f.element)).collect();
    let rope = LayerTensor::QueryRope;
    assert_eq!(found, [(0, rope, 0, 3), (1, rope, 0, 3)]);
}

#[test]
fn masks_and_sinks_over_latents_are_not_captured() {
    let stream = harness::stream();
    let attention = attention(&stream, Cache::BnBsH, LAYERS, backends());
    let limits = GraphLimits::new([2], 300);
    let why = attention.capture(&stream, Causality::Bidirectional, &limits).unwrap_err();
    assert!(why.breaks(&rules::BACKEND_LATENT), "{why}");
    let sink = stream.upload(&[bf16::ONE; HEADS], [HEADS]).unwrap();
    let sinks = limits.learnable_sinks([(); LAYERS].map(|()| sink.clone()));
    let why = attention.capture(&stream, Causality::Causal, &sinks).unwrap_err();
    assert!(why.breaks(&rules::BACKEND_LATENT), "{why}");
}
