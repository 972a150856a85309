//! Contexts divided over ranks on a communicator: each rank gets the attention of its own heads over all keys, whatever
//! the lengths, and a rank that fails is named to the others.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use approx::abs_diff_eq;
use ascend_attention::comm::Communicator;
use ascend_attention::{Element, Stream, Tensor, bf16, f16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    Attention, AttentionShape, Backends, BatchRequest, ContextAttention, ContextParallel, Error, Result, StatePolicy,
    TensorParallel, rules,
};
use ascend_testing::harness;
use ascend_testing::harness::ranks::{MOST_RANKS, as_ranks, device_of_rank};
use ascend_testing::harness::reference::{Half, Logical, row};
use proptest::prelude::*;

mod differing;
mod graphs;
mod latents;
mod refusals;
mod ring;
mod rows;

use differing::Wrong;

const DIM: usize = 64;
const BLOCK_SIZE: usize = 128;
const LAYERS: usize = 2;
const PAD: PadPolicy = PadPolicy::SkipNegative;

#[derive(Clone, Debug)]
struct Case {
    ranks: usize,
    run: usize,
    /// The new tokens of each request in each step; a request without new tokens is not in the step.
    steps: Vec<Vec<usize>>,
    kv_heads: usize,
    group: usize,
    seed: u64,
    /// What one rank brings first in a step, until it is refused.
    wrong: Option<Wrong>,
    /// Whether steps of one token a request are replayed from graphs of 1 and of 4 requests.
    graphs: bool,
}

impl Case {
    fn requests(&self) -> usize {
        self.steps.iter().map(Vec::len).max().unwrap_or(0)
    }

    fn tokens(&self, request: usize) -> usize {
        self.steps.iter().filter_map(|step| step.get(request)).sum()
    }

    fn shape(&self) -> AttentionShape {
        AttentionShape::new(self.kv_heads * self.group, self.kv_heads, DIM)
    }

    /// The queries of a rank's heads (0), the keys (1) or the values (2), which all ranks share, of a request.
    fn rows<T: Half>(&self, request: usize, layer: usize, rank: usize, what: usize) -> Logical<T> {
        let heads = if what == 0 { self.kv_heads * self.group } else { self.kv_heads };
        let of_rank = if what == 0 { rank } else { 0 };
        let seed = self.seed * 1000 + ((request * LAYERS + layer) * 3 + what) as u64 * 16 + of_rank as u64;
        Logical::random(seed, [1, heads, self.tokens(request), DIM])
    }
}

fn attention<T: Element>(rank: Communicator, case: &Case) -> ContextAttention<T> {
    let shape = CacheShape::new(LAYERS, case.kv_heads, DIM);
    let blocks = (0..case.requests()).map(|request| case.tokens(request).div_ceil(BLOCK_SIZE * case.ranks) + 1);
    let cache = PagedKvCache::new(rank.device(), blocks.sum(), BLOCK_SIZE, shape, PAD).unwrap();
    ContextAttention::new(rank, case.shape(), cache, case.run).unwrap()
}

/// All steps of a rank, and the comparison of every row with attention by its definition.
fn schedule<T: Half>(rank: Communicator, case: &Case) -> Result<(), String> {
    let stream = rank.device().stream().unwrap();
    let mut attention = attention::<T>(rank, case);
    let mut sequences: Vec<Sequence> = (0..case.requests()).map(|_| attention.sequence()).collect();
    let mut graphs = None;
    for (at, step) in case.steps.iter().enumerate() {
        let new: Vec<(usize, usize)> = step.iter().copied().enumerate().filter(|(_, new)| *new > 0).collect();
        if new.is_empty() {
            continue;
        }
        for (request, new) in &new {
            attention.grow(&stream, &mut sequences[*request], *new).unwrap();
        }
        let requests: Vec<_> = new.iter().map(|(request, new)| BatchRequest::of(&sequences[*request], *new)).collect();
        let first = |request: usize, new: usize| sequences[request].len() - new;
        let rank = attention.rank();
        let tensors = |layer: usize| {
            [0, 1, 2].map(|what| {
                let rows = new.iter().map(|(request, new)| {
                    let first = first(*request, *new);
                    case.rows::<T>(*request, layer, rank, what).packed(first..first + new)
                });
                let data: Vec<T> = rows.flatten().collect();
                let heads = if what == 0 { case.shape().heads } else { case.kv_heads };
                stream.upload(&data, [data.len() / heads / DIM, heads, DIM]).unwrap()
            })
        };
        let inputs: Vec<_> = (0..LAYERS).map(tensors).collect();
        if let Some(wrong) = case.wrong.as_ref().filter(|wrong| wrong.rank == rank && wrong.step == at) {
            wrong.refused(&mut attention, &stream, &requests, &inputs[0]);
        }
        let wrong = case.wrong.as_ref().filter(|wrong| wrong.rank != rank && wrong.step == at);
        let outputs: Vec<Vec<T>> = if case.graphs && at > 0 && new.iter().all(|(_, new)| *new == 1) {
            let keys = (0..case.requests()).map(|request| case.tokens(request)).max().unwrap();
            let graphs = graphs.get_or_insert_with(|| attention.capture(&stream, [4, 1], keys).unwrap());
            let mut step = graphs.begin(&mut attention, &stream, &requests).unwrap();
            if let (Some(wrong), [query, key, value]) = (wrong, &inputs[0]) {
                wrong.names(step.forward(0, (query, key, value)).unwrap_err());
            }
            let outputs = (inputs.iter().enumerate())
                .map(|(layer, [query, key, value])| {
                    step.forward(layer, (query, key, value)).unwrap().download(&stream).unwrap()
                })
                .collect();
            step.end().unwrap();
            outputs
        } else {
            let mut step = attention.begin(&stream, &requests).unwrap();
            if let (Some(wrong), [query, key, value]) = (wrong, &inputs[0]) {
                wrong.names(step.forward(0, (query, key, value)).unwrap_err());
            }
            let outputs: Vec<Tensor<T>> = (inputs.iter().enumerate())
                .map(|(layer, [query, key, value])| step.forward(layer, (query, key, value)).unwrap().clone())
                .collect();
            step.end().unwrap();
            outputs.iter().map(|output| output.download(&stream).unwrap()).collect()
        };
        for (layer, output) in outputs.iter().enumerate() {
            let mut token = 0;
            for (request, new) in &new {
                let [query, key, value] = [0, 1, 2].map(|what| case.rows::<T>(*request, layer, rank, what).exact());
                for position in first(*request, *new)..first(*request, *new) + new {
                    let shape = case.shape();
                    let head = position % shape.heads;
                    let wanted = row(&query, &key, &value, (0, 0), head, position, shape.scale, |at| at <= position);
                    let got = &output[(token * shape.heads + head) * DIM..][..DIM];
                    for (got, wanted) in got.iter().zip(&wanted.unwrap().0) {
                        if !abs_diff_eq!(got.to_f64(), wanted, epsilon = 2.0 * T::TOLERANCE) {
                            return Err(format!(
                                "rank {rank}, layer {layer}, request {request}, position {position}, head {head}: {}, \
                                 expected {wanted}",
                                got.to_f64()
                            ));
                        }
                    }
                    token += 1;
                }
            }
        }
    }
    Ok(())
}

fn check<T: Half>(case: &Case) -> Result<(), String> {
    as_ranks(case.ranks, |rank| schedule::<T>(rank, case)).into_iter().collect()
}

fn case(new: impl Strategy<Value = usize> + Clone) -> impl Strategy<Value = Case> {
    let run = prop_oneof![Just(1usize), Just(16), Just(128)];
    let prompts = prop::collection::vec(prop_oneof![1 => 1usize..4, 3 => 1usize..400], 1..4);
    let steps = prop::collection::vec(prop::collection::vec(new, 3), 1..3);
    (2..=MOST_RANKS, run, prompts, steps, 1usize..3, 1usize..4, any::<u16>()).prop_map(
        |(ranks, run, prompts, mut steps, kv_heads, group, seed)| {
            steps.iter_mut().for_each(|step| step.truncate(prompts.len()));
            steps.insert(0, prompts);
            Case { ranks, run, steps, kv_heads, group, seed: seed.into(), wrong: None, graphs: false }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    fn decoding_over_any_division_of_any_context(case in case(Just(1))) {
        if harness::not_on_npu("it needs a device for each rank") {
            return Ok(());
        }
        check::<f16>(&case).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn chunks_and_drafts_over_any_division(case in case(0usize..60)) {
        if harness::not_on_npu("it needs a device for each rank") {
            return Ok(());
        }
        check::<bf16>(&case).map_err(TestCaseError::fail)?;
    }
}

/// Fewer tokens than ranks or runs: some ranks hold none of them, and the only key of a row may be its own.
#[test]
fn ranks_without_keys_take_part() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    for (ranks, run) in [(4, 128), (8, 16), (3, 1)] {
        let case = |steps| Case { ranks, run, steps, kv_heads: 1, group: 2, seed: 9, wrong: None, graphs: false };
        check::<f16>(&case(vec![vec![1], vec![1], vec![1]])).unwrap();
        check::<f16>(&case(vec![vec![2, 129, 256], vec![1, 1, 1], vec![1, 0, 1]])).unwrap();
        check::<bf16>(&case(vec![vec![65, 0, 300], vec![3, 9, 1]])).unwrap();
    }
}

/// A rank of a model whose heads are divided has what one device has for these heads.
#[test]
fn ranks_compute_what_one_device_computes() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    let case = Case {
        ranks: 2,
        run: 16,
        steps: vec![vec![300, 17], vec![1, 1]],
        kv_heads: 1,
        group: 4,
        seed: 3,
        wrong: None,
        graphs: false,
    };
    as_ranks(case.ranks, |rank| {
        let (stream, number) = (rank.device().stream().unwrap(), rank.rank());
        let mut divided = attention::<bf16>(rank, &case);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 8, BLOCK_SIZE, divided.cache().shape(), PAD).unwrap();
        let mut whole = Attention::new(case.shape(), cache, Backends::standard(stream.device()));
        let mut sequences: Vec<_> = (0..2).map(|_| (divided.sequence(), whole.sequence())).collect();
        for step in &case.steps {
            for ((one, other), new) in sequences.iter_mut().zip(step) {
                divided.grow(&stream, one, *new).unwrap();
                whole.grow(&stream, other, *new).unwrap();
            }
            let new = || sequences.iter().zip(step);
            let requests: Vec<_> = new().map(|((own, _), new)| BatchRequest::of(own, *new)).collect();
            let all: Vec<_> = new().map(|((_, own), new)| BatchRequest::of(own, *new)).collect();
            let metadata = whole.metadata(&all, StatePolicy::default()).unwrap();
            let mut one = divided.begin(&stream, &requests).unwrap();
            let mut other = whole.begin(&stream, &metadata).unwrap();
            for layer in 0..LAYERS {
                let [query, key, value] = [0, 1, 2].map(|what| {
                    let rows = new().enumerate().flat_map(|(request, ((sequence, _), new))| {
                        let first = sequence.len() - new;
                        case.rows::<bf16>(request, layer, number, what).packed(first..first + new)
                    });
                    let data: Vec<bf16> = rows.collect();
                    let heads = if what == 0 { case.shape().heads } else { case.kv_heads };
                    stream.upload(&data, [data.len() / heads / DIM, heads, DIM]).unwrap()
                });
                let mut output = Tensor::empty(stream.device(), query.shape()).unwrap();
                one.forward_into(layer, (&query, &key, &value), &mut output).unwrap();
                let wanted = other.forward(layer, (&query, &key, &value)).unwrap();
                let both = output.download(&stream).unwrap().into_iter().zip(wanted.download(&stream).unwrap());
                for (got, wanted) in both {
                    assert!(abs_diff_eq!(got.to_f64(), wanted.to_f64(), epsilon = 0.02), "{got}, expected {wanted}");
                }
            }
            one.end().unwrap();
            other.end().unwrap();
        }
    });
}

/// One key for everything, `[tokens, heads, DIM]`.
fn ones(stream: &Stream, tokens: usize, heads: usize) -> Tensor<bf16> {
    stream.upload(&vec![bf16::ONE; tokens * heads * DIM], [tokens, heads, DIM]).unwrap()
}

fn simple(ranks: usize) -> Case {
    Case { ranks, run: 16, steps: vec![vec![40], vec![1]], kv_heads: 1, group: 2, seed: 1, wrong: None, graphs: false }
}

/// The layers of a step over ones.
fn forward(stream: &Stream, attention: &mut ContextAttention<bf16>, sequence: &Sequence, new: usize) -> Result<()> {
    let heads = attention.shape();
    let (query, key) = (ones(stream, new, heads.heads), ones(stream, new, heads.kv_heads));
    let mut step = attention.begin(stream, &[BatchRequest::of(sequence, new)])?;
    for layer in 0..LAYERS {
        step.forward(layer, (&query, &key, &key))?;
    }
    step.end()
}

/// Forks share blocks, which a growth copies on each rank; and ranks of one process may share the pool.
#[test]
fn forks_and_shared_pools_are_copied_on_every_rank() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(2, |rank| {
        let stream = rank.device().stream().unwrap();
        let mut attention = attention::<bf16>(rank, &simple(2));
        let mut sequence = attention.sequence();
        attention.grow(&stream, &mut sequence, 40).unwrap();
        forward(&stream, &mut attention, &sequence, 40).unwrap();
        let mut fork = sequence.fork();
        attention.grow(&stream, &mut fork, 1).unwrap();
        assert_ne!(fork.row(), sequence.row());
        forward(&stream, &mut attention, &fork, 1).unwrap();
        assert_eq!((attention.computed_tokens(&fork), attention.computed_tokens(&sequence)), (Ok(41), Ok(40)));
        stream.synchronize().unwrap();
    });
    let devices = [0, 1].map(device_of_rank);
    let streams = devices.each_ref().map(|device| device.stream().unwrap());
    let ranks = Communicator::all(&devices).unwrap().into_iter();
    let mut ranks: Vec<_> = ranks.map(|rank| attention::<bf16>(rank, &simple(2))).collect();
    let other = ranks.pop().unwrap().with_pool(ranks[0].pool()).unwrap();
    ranks.push(other);
    let mut sequence = ranks[0].sequence();
    ranks[0].grow(&streams[0], &mut sequence, 40).unwrap();
    let step = |ranks: &mut [ContextAttention<bf16>], sequence: &Sequence, new| {
        std::thread::scope(|scope| {
            for (rank, stream) in ranks.iter_mut().zip(&streams) {
                scope.spawn(move || forward(stream, rank, sequence, new).unwrap());
            }
        });
    };
    step(&mut ranks, &sequence, 40);
    let mut fork = sequence.fork();
    ranks[1].grow(&streams[1], &mut fork, 1).unwrap();
    step(&mut ranks, &fork, 1);
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
    drop((sequence, fork));
    assert_eq!(ranks[0].pool().held_blocks(), 0);
}

#[test]
fn what_cannot_be_is_refused_and_the_step_goes_on() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(2, |rank| {
        let stream = rank.device().stream().unwrap();
        let elsewhere = device_of_rank(1 - rank.rank());
        let mut attention = attention::<bf16>(rank, &simple(2));
        let mut sequence = attention.sequence();
        attention.grow(&stream, &mut sequence, 40).unwrap();
        let request = BatchRequest::of(&sequence, 40);
        let breaks = |outcome: Result<()>, rule| {
            let refused = outcome.unwrap_err();
            assert!(refused.breaks(rule), "{refused}");
        };
        let foreign = Sequence::new(attention.cache().pool());
        breaks(attention.begin(&stream, &[BatchRequest::of(&foreign, 1)]).map(drop), &rules::BLOCK_POOL);
        breaks(attention.begin(&stream, &[]).map(drop), &rules::BATCH_EMPTY);
        let other = elsewhere.stream().unwrap();
        breaks(attention.begin(&other, &[request]).map(drop), &rules::ARGUMENT_DEVICE);
        let (query, key, narrow) = (ones(&stream, 40, 2), ones(&stream, 40, 1), ones(&stream, 39, 2));
        let mut step = attention.begin(&stream, &[request]).unwrap();
        breaks(step.forward(1, (&query, &key, &key)).map(drop), &rules::RANKS_ORDER);
        breaks(step.forward(9, (&query, &key, &key)).map(drop), &rules::ARGUMENT_VALUE);
        breaks(step.forward(0, (&narrow, &key, &key)).map(drop), &rules::STEP_TOKENS);
        breaks(step.forward(0, (&key, &key, &key)).map(drop), &rules::STEP_HEADS);
        breaks(step.forward(0, (&ones(&other, 40, 2), &key, &key)).map(drop), &rules::ARGUMENT_DEVICE);
        let mut short = Tensor::empty(stream.device(), [39, 2, DIM]).unwrap();
        breaks(step.forward_into(0, (&query, &key, &key), &mut short), &rules::PLAN_TENSORS);
        step.forward(0, (&query, &key, &key)).unwrap();
        breaks(step.forward(0, (&query, &key, &key)).map(drop), &rules::STEP_LAYER_REPEATED);
        step.forward(1, (&query, &key, &key)).unwrap();
        step.end().unwrap();
        breaks(attention.begin(&stream, &[request]).map(drop), &rules::SEQUENCE_COMPUTED);
        stream.synchronize().unwrap();
    });
    let refused = |cache: PagedKvCache<bf16>, run| {
        let rank = Communicator::all(&[device_of_rank(0)]).unwrap().remove(0);
        let heads = cache.shape().kv_heads;
        ContextAttention::new(rank, AttentionShape::new(heads, heads, DIM), cache, run).unwrap_err()
    };
    let cache = |device, block_size| {
        PagedKvCache::<bf16>::new(&device_of_rank(device), 4, block_size, CacheShape::new(1, 1, DIM), PAD).unwrap()
    };
    assert!(refused(cache(1, 128), 16).breaks(&rules::RANKS_DEVICE));
    assert!(refused(cache(0, 128), 0).breaks(&rules::RANKS_INTERLEAVE));
    assert!(refused(cache(0, 128), 48).breaks(&rules::RANKS_INTERLEAVE));
    let latents = PagedKvCache::new(&device_of_rank(0), 4, 128, CacheShape::latent(1), PAD).unwrap();
    assert!(refused(latents, 16).breaks(&rules::ARGUMENT_VALUE));
    let shape = CacheShape::new(1, 1, DIM);
    let quantised =
        PagedKvCache::quantised_by_token(&device_of_rank(0), 4, 128, shape, PAD, QuantisedType::Int8).unwrap();
    assert!(refused(quantised, 16).breaks(&rules::CACHE_QUANTISED));
}

/// A rank that fails, or leaves a step without some layers, is out; the others are told so, soon.
#[test]
fn a_rank_that_fails_does_not_leave_the_others_waiting() {
    if harness::not_on_npu("hardware waits for half an hour") {
        return;
    }
    #[derive(Clone, Copy, PartialEq)]
    enum Failure {
        /// The rank gives up before the layer.
        Dropped,
        /// The rank ends the step behind its first layer.
        Short,
    }
    for failure in [Failure::Dropped, Failure::Short] {
        let began = Instant::now();
        let errors = as_ranks(3, |rank| -> Option<Error> {
            let stream = rank.device().stream().unwrap();
            let mut attention = attention::<bf16>(rank, &simple(3));
            let mut sequence = attention.sequence();
            attention.grow(&stream, &mut sequence, 40).unwrap();
            if attention.rank() != 1 {
                let outcome = forward(&stream, &mut attention, &sequence, 40);
                return outcome.and_then(|()| Ok(stream.synchronize()?)).err();
            }
            if failure == Failure::Dropped {
                return None;
            }
            let (query, key) = (ones(&stream, 40, 2), ones(&stream, 40, 1));
            let mut step = attention.begin(&stream, &[BatchRequest::of(&sequence, 40)]).unwrap();
            step.forward(0, (&query, &key, &key)).unwrap();
            let short = step.end().unwrap_err();
            assert!(short.breaks(&rules::STEP_LAYERS_MISSING), "{short}");
            assert!(short.to_string().contains(rules::RANKS_LEFT.fix), "{short}");
            assert!(attention.communicator_mut().is_none());
            let left = attention.begin(&stream, &[BatchRequest::of(&sequence, 40)]).unwrap_err();
            assert!(left.breaks(&rules::RANKS_LEFT), "{left}");
            None
        });
        assert!(began.elapsed() < Duration::from_secs(60));
        for (rank, error) in errors.iter().enumerate().filter(|(rank, _)| *rank != 1) {
            let text = error.as_ref().unwrap().to_string();
            assert!(text.contains("rank 1"), "rank {rank}: {text}");
        }
    }
}

/// Ranks of a model whose heads are divided each attend with their own; their outputs, gathered, are the model's.
#[test]
fn divided_heads_are_gathered_to_those_of_the_model() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    let (ranks, tokens) = (4, 20);
    let heads = TensorParallel::new(AttentionShape::new(8, 2, DIM), ranks).unwrap();
    let own = heads.rank_shape();
    let [query, key, value] =
        [(1, 8), (2, 2), (3, 2)].map(|(seed, heads)| Logical::<f16>::random(seed, [1, heads, tokens, DIM]));
    let outputs = as_ranks(ranks, |mut rank| {
        let stream = rank.device().stream().unwrap();
        let shape = CacheShape::new(1, own.kv_heads, DIM);
        let cache = PagedKvCache::<f16>::new(stream.device(), 2, BLOCK_SIZE, shape, PAD).unwrap();
        let mut attention = Attention::new(own, cache, Backends::standard(stream.device()));
        let mut sequence = attention.sequence();
        attention.grow(&stream, &mut sequence, tokens).unwrap();
        let metadata = attention.metadata(&[BatchRequest::of(&sequence, tokens)], StatePolicy::default()).unwrap();
        let upload = |all: &Logical<f16>, heads: std::ops::Range<usize>| {
            let rows =
                (0..tokens).flat_map(|token| heads.clone().flat_map(move |head| all.row(0, head, token).to_vec()));
            stream.upload(&rows.collect::<Vec<f16>>(), [tokens, heads.len(), DIM]).unwrap()
        };
        let (keys, queries) = (heads.key_heads(rank.rank()), heads.query_heads(rank.rank()));
        let (query, key, value) = (upload(&query, queries), upload(&key, keys.clone()), upload(&value, keys));
        let mut step = attention.begin(&stream, &metadata).unwrap();
        let output = step.forward(0, (&query, &key, &value)).unwrap();
        let all = Tensor::empty(rank.device(), [ranks * tokens, own.heads, DIM]).unwrap();
        rank.all_gather(&stream, output, &all).unwrap();
        all.download(&stream).unwrap()
    });
    let exact = [query, key, value].map(|tensor| tensor.exact());
    for output in outputs {
        for (token, head) in (0..tokens).flat_map(|token| (0..8).map(move |head| (token, head))) {
            let wanted = row(&exact[0], &exact[1], &exact[2], (0, 0), head, token, own.scale, |at| at <= token);
            let (rank, local) = (head / own.heads, head % own.heads);
            let got = &output[((rank * tokens + token) * own.heads + local) * DIM..][..DIM];
            for (got, wanted) in got.iter().zip(&wanted.unwrap().0) {
                assert!(abs_diff_eq!(got.to_f64(), wanted, epsilon = 2.0 * f16::TOLERANCE), "{got}, expected {wanted}");
            }
        }
    }
}
