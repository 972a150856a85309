//! Latent attention over divided contexts: absorbed queries of all ranks over the latents of each.

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
    /// Tokens of each request that are cached before the first step.
    cached: Vec<usize>,
    steps: usize,
    graphs: bool,
    seed: u64,
}

impl LatentCase {
    /// The queries of a rank (`None`: the keys) of a request, whose last elements are the rotary parts.
    fn rows(&self, request: usize, layer: usize, rank: Option<usize>) -> Logical<bf16> {
        let seed = self.seed * 1000 + (request * LAYERS + layer) as u64 * 16 + rank.map_or(0, |rank| rank as u64 + 1);
        let heads = if rank.is_some() { self.heads } else { 1 };
        Logical::random(seed, [1, heads, self.cached[request] + self.steps, LATENT + ROPE])
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

fn decode(rank: Communicator, case: &LatentCase) -> Result<(), String> {
    let (stream, number) = (rank.device().stream().unwrap(), rank.rank());
    let blocks = case.cached.iter().map(|cached| (cached + case.steps).div_ceil(BLOCK_SIZE * case.ranks));
    let cache = PagedKvCache::new(rank.device(), blocks.sum(), BLOCK_SIZE, CacheShape::latent(LAYERS), PAD).unwrap();
    let shape = AttentionShape::latent(case.heads);
    let mut attention = ContextAttention::<bf16>::new(rank, shape, cache, case.run).unwrap();
    let mut sequences: Vec<Sequence> = case.cached.iter().map(|_| attention.sequence()).collect();
    for (request, sequence) in sequences.iter_mut().enumerate() {
        let cached = case.cached[request];
        attention.grow(&stream, sequence, cached).unwrap();
        let split = attention.division().split(&[BatchRequest::of(sequence, cached)], PAD).unwrap();
        let slots = split.ranks()[number].slots();
        for layer in 0..LAYERS {
            let [latent, rope] = parts(&stream, &case.rows(request, layer, None).packed(0..cached), 1);
            let write = CacheWrite::plan(attention.cache(), &stream, slots, &latent, &rope).unwrap();
            attention.cache_mut().write(&stream, &write, layer, &latent, &rope).unwrap();
        }
        if cached > 1 {
            let whole = attention.begin(&stream, &[BatchRequest::of(sequence, cached)]).map(drop).unwrap_err();
            assert!(whole.breaks(&rules::BACKEND_LATENT), "{whole}");
        }
        attention.mark_computed(sequence, cached).unwrap();
    }
    let most = case.cached.iter().max().unwrap() + case.steps;
    let mut graphs = case.graphs.then(|| attention.capture(&stream, [4], most).unwrap());
    for at in 0..case.steps {
        sequences.iter_mut().for_each(|sequence| attention.grow(&stream, sequence, 1).unwrap());
        let requests: Vec<_> = sequences.iter().map(|sequence| BatchRequest::of(sequence, 1)).collect();
        let step_rows = |layer: usize, rank: Option<usize>| -> Vec<bf16> {
            let all = case.cached.iter().enumerate();
            all.flat_map(|(request, cached)| case.rows(request, layer, rank).packed(cached + at..cached + at + 1))
                .collect()
        };
        let inputs: Vec<_> = (0..LAYERS)
            .map(|layer| {
                let [query, query_rope] = parts(&stream, &step_rows(layer, Some(number)), case.heads);
                let [latent, rope] = parts(&stream, &step_rows(layer, None), 1);
                (query, query_rope, latent, rope)
            })
            .collect();
        let of_layer = |layer: usize| {
            let (query, query_rope, latent, rope) = &inputs[layer];
            LayerInputs::latent(query, latent, rope, LatentTensors { query_rope, form: LatentForm::Absorbed })
        };
        let mut outputs = Vec::new();
        match &mut graphs {
            Some(graphs) => {
                let mut step = graphs.begin(&mut attention, &stream, &requests).unwrap();
                for layer in 0..LAYERS {
                    outputs.push(step.forward(layer, of_layer(layer)).unwrap().download(&stream).unwrap());
                }
                step.end().unwrap();
            }
            None => {
                let mut step = attention.begin(&stream, &requests).unwrap();
                let (query, _, latent, rope) = &inputs[0];
                let plain = step.forward(0, (query, latent, rope)).unwrap_err();
                assert!(plain.breaks(&rules::BACKEND_LATENT), "{plain}");
                let of_steps = (0..LAYERS).map(|layer| step.forward(layer, of_layer(layer)).unwrap());
                outputs.extend(of_steps.map(|output| output.download(&stream).unwrap()));
                step.end().unwrap();
            }
        }
        for (layer, output) in outputs.iter().enumerate() {
            for (request, cached) in case.cached.iter().enumerate() {
                let (query, key) = (case.rows(request, layer, Some(number)).exact(), case.rows(request, layer, None));
                let latents: Vec<bf16> =
                    key.data.chunks(LATENT + ROPE).flat_map(|row| row[..LATENT].to_vec()).collect();
                let value = Logical { dim: LATENT, data: latents, ..key }.exact();
                let position = cached + at;
                for head in 0..case.heads {
                    let wanted = row(
                        &query,
                        &case.rows(request, layer, None).exact(),
                        &value,
                        (0, 0),
                        head,
                        position,
                        shape.scale,
                        |at| at <= position,
                    );
                    let got = &output[(request * case.heads + head) * LATENT..][..LATENT];
                    for (got, wanted) in got.iter().zip(&wanted.unwrap().0) {
                        if !abs_diff_eq!(got.to_f64(), wanted, epsilon = 2.0 * bf16::TOLERANCE) {
                            return Err(format!(
                                "rank {number}, step {at}, layer {layer}, request {request}, head {head}: {got}, expected \
                                 {wanted}"
                            ));
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(10) })]

    #[test]
    fn latents_are_decoded_over_any_division(
        ranks in prop_oneof![Just(2usize), Just(4), Just(8)],
        run in prop_oneof![Just(1usize), Just(16), Just(128)],
        heads in prop_oneof![Just(1usize), Just(2), Just(4)],
        cached in prop::collection::vec(prop_oneof![1 => 1usize..4, 3 => 1usize..300], 1..4),
        steps in 1usize..4,
        graphs in any::<bool>(),
        seed in any::<u16>(),
    ) {
        if harness::not_on_npu("it needs a device for each rank") {
            return Ok(());
        }
        let case = LatentCase { ranks, run, heads, cached, steps, graphs, seed: seed.into() };
        let outcome: Result<(), String> = as_ranks(ranks, |rank| decode(rank, &case)).into_iter().collect();
        outcome.map_err(TestCaseError::fail)?;
    }
}
