//! Latent attention over divided contexts and of divided rows: absorbed queries over the latents of each rank, or of
//! all.

use ascend_serving::kv::CacheWrite;
use ascend_serving::{LatentForm, LatentTensors, LayerInputs};

use super::*;

const LATENT: usize = 512;
const ROPE: usize = 64;

#[derive(Clone, Debug)]
struct LatentCase {
    ranks: usize,
    run: usize,
    heads: usize,
    /// Tokens of each request that are in the caches before the first step.
    cached: Vec<usize>,
    /// Whether the rows of a step are divided, and the new tokens of each request.
    steps: Vec<(bool, Vec<usize>)>,
    graphs: bool,
    seed: u64,
}

impl LatentCase {
    fn tokens(&self, request: usize) -> usize {
        self.cached[request] + self.steps.iter().map(|(_, new)| new[request]).sum::<usize>()
    }

    /// The queries of some heads, which `seed` names, of a request; the last elements are the rotary parts.
    fn queries(&self, request: usize, layer: usize, heads: usize, seed: u64) -> Logical<bf16> {
        let seed = self.seed * 1000 + (request * LAYERS + layer) as u64 * 16 + seed;
        Logical::random(seed, [1, heads, self.tokens(request), LATENT + ROPE])
    }

    fn keys(&self, request: usize, layer: usize) -> Logical<bf16> {
        self.queries(request, layer, 1, 0)
    }
}

/// The elements of rows that are latents, and those that are rotary parts.
fn parts(stream: &Stream, rows: &[bf16], heads: usize) -> [Tensor<bf16>; 2] {
    let rows: Vec<&[bf16]> = rows.chunks(LATENT + ROPE).collect();
    [0..LATENT, LATENT..LATENT + ROPE].map(|part| {
        let data: Vec<bf16> = rows.iter().flat_map(|row| row[part.clone()].to_vec()).collect();
        stream.upload(&data, [rows.len() / heads, heads, part.len()]).unwrap()
    })
}

fn absorbed([query, query_rope, latent, rope]: &[Tensor<bf16>; 4]) -> LayerInputs<'_, bf16> {
    LayerInputs::latent(query, latent, rope, LatentTensors { query_rope, form: LatentForm::Absorbed })
}

fn schedule(rank: Communicator, case: &LatentCase) -> Result<(), String> {
    let (stream, number) = (rank.device().stream().unwrap(), rank.rank());
    let all = 0..case.cached.len();
    let blocks = all.clone().map(|request| case.tokens(request).div_ceil(BLOCK_SIZE * case.ranks));
    let cache = PagedKvCache::new(rank.device(), blocks.sum(), BLOCK_SIZE, CacheShape::latent(LAYERS), PAD).unwrap();
    let shape = AttentionShape::latent(case.heads);
    let mut attention = ContextAttention::<bf16>::new(rank, shape, cache, case.run).unwrap();
    let mut sequences: Vec<Sequence> = case.cached.iter().map(|_| attention.sequence()).collect();
    for (request, sequence) in sequences.iter_mut().enumerate().filter(|(request, _)| case.cached[*request] > 0) {
        let cached = case.cached[request];
        attention.grow(&stream, sequence, cached).unwrap();
        let split = attention.division().split(&[BatchRequest::of(sequence, cached)], PAD).unwrap();
        let slots = split.slots(number);
        for layer in 0..LAYERS {
            let [latent, rope] = parts(&stream, &case.keys(request, layer).packed(0..cached), 1);
            let write = CacheWrite::plan(attention.cache(), &stream, slots, &latent, &rope).unwrap();
            attention.cache_mut().write(&stream, &write, layer, &latent, &rope).unwrap();
        }
        attention.mark_computed(sequence, cached).unwrap();
    }
    let most = all.clone().map(|request| case.tokens(request)).max().unwrap();
    let mut graphs = case.graphs.then(|| attention.capture(&stream, [4], most).unwrap());
    for (at, (by_rows, new)) in case.steps.iter().enumerate() {
        for (sequence, new) in sequences.iter_mut().zip(new) {
            attention.grow(&stream, sequence, *new).unwrap();
        }
        let requests: Vec<_> = sequences.iter().zip(new).map(|(own, new)| BatchRequest::of(own, *new)).collect();
        let tokens = |request: usize| {
            let end = sequences[request].len();
            (end - new[request]..end).map(move |position| (request, position))
        };
        let step_tokens: Vec<(usize, usize)> = all.clone().flat_map(tokens).collect();
        let (heads, seed) = match by_rows {
            true => (case.heads * case.ranks, 15),
            false => (case.heads, number as u64 + 1),
        };
        let inputs = |layer: usize, tokens: &[(usize, usize)]| {
            let rows = |heads: usize, seed: u64| -> Vec<bf16> {
                let logical: Vec<_> = all.clone().map(|request| case.queries(request, layer, heads, seed)).collect();
                tokens.iter().flat_map(|(request, at)| logical[*request].packed(*at..at + 1)).collect()
            };
            let [query, query_rope] = parts(&stream, &rows(heads, seed), heads);
            let [latent, rope] = parts(&stream, &rows(1, 0), 1);
            [query, query_rope, latent, rope]
        };
        let mut outputs = Vec::new();
        let tokens: Vec<(usize, usize)>;
        match &mut graphs {
            Some(graphs) if !by_rows && new.iter().all(|new| *new == 1) => {
                tokens = step_tokens;
                let inputs: Vec<_> = (0..LAYERS).map(|layer| inputs(layer, &tokens)).collect();
                let mut step = graphs.begin(&mut attention, &stream, &requests).unwrap();
                for (layer, inputs) in inputs.iter().enumerate() {
                    outputs.push(step.forward(layer, absorbed(inputs)).unwrap().download(&stream).unwrap());
                }
                step.end().unwrap();
            }
            _ => {
                let mut step = match by_rows {
                    true => attention.begin_rows(&stream, &requests).unwrap(),
                    false => attention.begin(&stream, &requests).unwrap(),
                };
                tokens = step.rows().iter().flat_map(|rows| step_tokens[rows.clone()].to_vec()).collect();
                if !by_rows {
                    // Queries, results, and a log-sum-exp.
                    let of_head = 2 * (LATENT + ROPE + LATENT) + 4;
                    let sent = (case.ranks - 1) * tokens.len() * case.heads * of_head;
                    assert_eq!(step.sent_bytes(), sent as u64);
                }
                for layer in 0..LAYERS {
                    let inputs = inputs(layer, &tokens);
                    let [query, _, latent, rope] = &inputs;
                    if layer == 0 {
                        let plain = step.forward(0, (query, latent, rope)).unwrap_err();
                        assert!(plain.breaks(&rules::BACKEND_LATENT), "{plain}");
                    }
                    outputs.push(step.forward(layer, absorbed(&inputs)).unwrap().download(&stream).unwrap());
                }
                step.end().unwrap();
            }
        }
        for (layer, output) in outputs.iter().enumerate() {
            let exact = |request: usize| {
                let key = case.keys(request, layer);
                let latents: Vec<bf16> =
                    key.data.chunks(LATENT + ROPE).flat_map(|row| row[..LATENT].to_vec()).collect();
                let value = Logical { dim: LATENT, data: latents, ..key.clone() }.exact();
                [case.queries(request, layer, heads, seed).exact(), key.exact(), value]
            };
            let exact: Vec<_> = all.clone().map(exact).collect();
            for (index, (request, position)) in tokens.iter().enumerate() {
                let ([query, key, value], head) = (&exact[*request], position % heads);
                let wanted = row(query, key, value, (0, 0), head, *position, shape.scale, |at| at <= *position);
                let got = &output[(index * heads + head) * LATENT..][..LATENT];
                for (got, wanted) in got.iter().zip(&wanted.unwrap().0) {
                    if !abs_diff_eq!(got.to_f64(), wanted, epsilon = 2.0 * bf16::TOLERANCE) {
                        return Err(format!(
                            "rank {number}, step {at}, layer {layer}, request {request}, position {position}, head \
                             {head}: {got}, expected {wanted}"
                        ));
                    }
                }
            }
        }
    }
    Ok(())
}

/// A step of these requests: of one token each, of drafts or chunks, or of divided rows.
fn step(requests: usize) -> impl Strategy<Value = (bool, Vec<usize>)> {
    prop_oneof![
        2 => Just((false, vec![1; requests])),
        2 => prop::collection::vec(1usize..9, requests).prop_map(|new| (false, new)),
        2 => (any::<bool>(), prop::collection::vec(1usize..80, requests)),
    ]
}

fn latent_case() -> impl Strategy<Value = LatentCase> {
    let cached = || prop::collection::vec(prop_oneof![2 => 0usize..4, 3 => 1usize..300], 1..4);
    let ranks = prop_oneof![Just(2usize), Just(4), Just(8)];
    let run = prop_oneof![Just(1usize), Just(16), Just(128)];
    let heads = prop_oneof![Just(1usize), Just(2), Just(4)];
    let steps = |cached: Vec<usize>| (Just(cached.clone()), prop::collection::vec(step(cached.len()), 1..4));
    (ranks, run, heads, cached().prop_flat_map(steps), any::<(bool, u16)>()).prop_map(
        |(ranks, run, heads, (cached, steps), (graphs, seed))| LatentCase {
            ranks,
            run,
            heads,
            cached,
            steps,
            graphs,
            seed: seed.into(),
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    fn latents_are_attended_to_over_any_division(case in latent_case()) {
        if harness::not_on_npu("it needs a device for each rank") {
            return Ok(());
        }
        let outcome: Result<(), String> = as_ranks(case.ranks, |rank| schedule(rank, &case)).into_iter().collect();
        outcome.map_err(TestCaseError::fail)?;
    }
}
