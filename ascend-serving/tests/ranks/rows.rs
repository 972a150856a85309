//! Steps whose rows are divided over the ranks, with the heads of all, and steps of divided heads over the same caches.

use ascend_attention::spec::ops::fused_infer_attention_score::Cache;
use ascend_serving::kv::CacheWrite;

use super::*;

/// A step: whether its rows are divided, and the new tokens of each request; one without any is not in the step.
type RowStep = (bool, Vec<usize>);

#[derive(Clone, Debug)]
struct RowCase {
    case: Case,
    rows: Vec<bool>,
    /// Whether padding is written to a block of its own.
    dumps: bool,
}

impl RowCase {
    fn new(ranks: usize, run: usize, steps: Vec<RowStep>) -> Self {
        let (rows, steps) = steps.into_iter().unzip();
        let case = Case { ranks, run, steps, kv_heads: 2, group: 2, seed: 5, wrong: None, graphs: false };
        Self { case, rows, dumps: false }
    }

    fn pad(&self) -> PadPolicy {
        if self.dumps { PadPolicy::DumpSlot(3) } else { PAD }
    }

    /// The queries of all ranks' heads of a request.
    fn queries<T: Half>(&self, request: usize, layer: usize) -> Logical<T> {
        let Case { kv_heads, group, ranks, seed, .. } = self.case;
        let seed = seed * 1000 + (request * LAYERS + layer) as u64 + 900;
        Logical::random(seed, [1, kv_heads * group * ranks, self.case.tokens(request), DIM])
    }
}

fn row_attention<T: Element>(rank: Communicator, own: &RowCase) -> ContextAttention<T> {
    let case = &own.case;
    let shape = CacheShape::new(LAYERS, case.kv_heads, DIM);
    let blocks = (0..case.requests()).map(|request| case.tokens(request).div_ceil(BLOCK_SIZE * case.ranks) + 1);
    let cache = PagedKvCache::new(rank.device(), blocks.sum::<usize>() + 1, BLOCK_SIZE, shape, own.pad()).unwrap();
    ContextAttention::new(rank, case.shape(), cache, case.run).unwrap()
}

/// The tokens of a step, each as its request and position.
fn tokens_of(sequences: &[Sequence], new: &[(usize, usize)]) -> Vec<(usize, usize)> {
    let positions = |&(request, new): &(usize, usize)| {
        let end = sequences[request].len();
        (end - new..end).map(move |position| (request, position))
    };
    new.iter().flat_map(positions).collect()
}

fn rows_of<T: Half>(all: &Logical<T>, position: usize) -> Vec<T> {
    (0..all.heads).flat_map(|head| all.row(0, head, position).to_vec()).collect()
}

fn schedule<T: Half>(rank: Communicator, own: &RowCase) -> Result<(), String> {
    let case = &own.case;
    let (stream, number) = (rank.device().stream().unwrap(), rank.rank());
    let mut attention = row_attention::<T>(rank, own);
    let mut sequences: Vec<Sequence> = (0..case.requests()).map(|_| attention.sequence()).collect();
    for (by_rows, step) in own.rows.iter().zip(&case.steps) {
        let new: Vec<(usize, usize)> = step.iter().copied().enumerate().filter(|(_, new)| *new > 0).collect();
        if new.is_empty() {
            continue;
        }
        for (request, new) in &new {
            attention.grow(&stream, &mut sequences[*request], *new).unwrap();
        }
        let requests: Vec<_> = new.iter().map(|(request, new)| BatchRequest::of(&sequences[*request], *new)).collect();
        let all = tokens_of(&sequences, &new);
        let mut step = match by_rows {
            true => attention.begin_rows(&stream, &requests).unwrap(),
            false => attention.begin(&stream, &requests).unwrap(),
        };
        let tokens: Vec<(usize, usize)> = step.rows().iter().flat_map(|rows| all[rows.clone()].to_vec()).collect();
        let heads = case.shape().heads * if *by_rows { case.ranks } else { 1 };
        let queries = |request: usize, layer: usize| match by_rows {
            true => own.queries::<T>(request, layer),
            false => case.rows::<T>(request, layer, number, 0),
        };
        let outputs = (0..LAYERS).map(|layer| {
            let upload = |heads: usize, of_request: &dyn Fn(usize) -> Logical<T>| {
                let logical: Vec<Logical<T>> = (0..case.requests()).map(of_request).collect();
                let data: Vec<T> = tokens.iter().flat_map(|(request, at)| rows_of(&logical[*request], *at)).collect();
                stream.upload(&data, [tokens.len(), heads, DIM]).unwrap()
            };
            let query = upload(heads, &|request| queries(request, layer));
            let [key, value] = [1, 2].map(|what| upload(case.kv_heads, &|request| case.rows(request, layer, 0, what)));
            step.forward(layer, (&query, &key, &value)).unwrap().clone()
        });
        let outputs: Vec<Tensor<T>> = outputs.collect();
        step.end().unwrap();
        let scale = case.shape().scale;
        for (layer, output) in outputs.into_iter().enumerate() {
            let output = output.download(&stream).unwrap();
            let exact = |request: usize| {
                let [key, value] = [1, 2].map(|what| case.rows::<T>(request, layer, 0, what).exact());
                [queries(request, layer).exact(), key, value]
            };
            let exact: Vec<_> = (0..case.requests()).map(exact).collect();
            for (at, (request, position)) in tokens.iter().enumerate() {
                let [query, key, value] = &exact[*request];
                // Another head for each row, all of which are compared over the rows.
                let head = position % heads;
                let wanted = row(query, key, value, (0, 0), head, *position, scale, |at| at <= *position);
                let got = &output[(at * heads + head) * DIM..][..DIM];
                for (got, wanted) in got.iter().zip(&wanted.unwrap().0) {
                    if !abs_diff_eq!(got.to_f64(), wanted, epsilon = 2.0 * T::TOLERANCE) {
                        return Err(format!(
                            "rank {number}, rows {by_rows}, layer {layer}, request {request}, position {position}, \
                             head {head}: {}, expected {wanted}",
                            got.to_f64()
                        ));
                    }
                }
            }
        }
    }
    Ok(())
}

fn check_rows<T: Half>(own: &RowCase) -> Result<(), String> {
    as_ranks(own.case.ranks, |rank| schedule::<T>(rank, own)).into_iter().collect()
}

fn row_case() -> impl Strategy<Value = RowCase> {
    let run = prop_oneof![Just(1usize), Just(16), Just(128)];
    let prompts = prop::collection::vec(prop_oneof![1 => 1usize..20, 3 => 1usize..400], 1..4);
    let new = || prop_oneof![2 => Just(1usize), 2 => 0usize..60, 1 => 100usize..200];
    let steps = prop::collection::vec((any::<bool>(), prop::collection::vec(new(), 3)), 0..3);
    (2..=MOST_RANKS, run, prompts, steps, 1usize..3, 1usize..4, any::<u16>()).prop_map(
        |(ranks, run, prompts, mut steps, kv_heads, group, seed)| {
            let requests = prompts.len();
            steps.iter_mut().for_each(|(_, step)| step.truncate(requests));
            steps.insert(0, (true, prompts));
            // What the steps have written is read by one of divided heads.
            steps.push((false, vec![1; requests]));
            let mut own = RowCase::new(ranks, run, steps);
            own.case = Case { kv_heads, group, seed: seed.into(), ..own.case };
            own
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(16) })]

    #[test]
    fn rows_and_heads_are_divided_in_turn(own in row_case()) {
        if harness::not_on_npu("it needs a device for each rank") {
            return Ok(());
        }
        check_rows::<bf16>(&own).map_err(TestCaseError::fail)?;
    }
}

/// Prompts of fewer tokens than ranks leave some without rows, and decoded tokens are rows of the first rank.
#[test]
fn ranks_without_rows_take_part() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    for (ranks, run) in [(1, 16), (4, 128), (8, 16), (3, 1)] {
        let steps = vec![(true, vec![1, 7, 0]), (true, vec![1, 1, 3]), (false, vec![1, 2, 1]), (true, vec![0, 300, 1])];
        check_rows::<f16>(&RowCase::new(ranks, run, steps)).unwrap();
        // No more padding than the block has slots that it is written to.
        let steps = vec![(true, vec![30, 7, 20]), (true, vec![1, 40, 3]), (false, vec![1, 2, 1])];
        check_rows::<f16>(&RowCase { dumps: true, ..RowCase::new(ranks, run, steps) }).unwrap();
    }
}

/// Every token is a row of one rank, whose rows differ by two of each request at most.
#[test]
fn rows_of_ranks_are_the_tokens_of_a_step() {
    let division = ContextParallel::new(4, 16, 128).unwrap();
    let tokens = [19, 1, 800, 8];
    let rows: Vec<Vec<usize>> = (0..4).map(|request| vec![2 * request, 2 * request + 1]).collect();
    let requests: Vec<_> = rows.iter().zip(tokens).map(|(row, new)| BatchRequest::in_row(row, 3, new)).collect();
    let split = division.split(&requests, PAD).unwrap();
    let of_rank = |rank| split.rows(rank).into_iter().flatten().collect::<Vec<usize>>();
    let mut all: Vec<usize> = (0..4).flat_map(of_rank).collect();
    assert!((0..4).all(|rank| of_rank(rank).len().abs_diff(828 / 4) <= 2 * tokens.len()));
    all.sort_unstable();
    assert_eq!(all, (0..828).collect::<Vec<_>>());
    assert_eq!(split.rows(0), [0..3, 17..19, 19..20, 20..120, 720..820, 820..821, 827..828]);
    assert_eq!(split.rows(4), []);
}

/// The rows of a step of ones, of a rank that has them, and the queries of all ranks.
fn forward_rows(
    stream: &Stream,
    attention: &mut ContextAttention<bf16>,
    sequence: &Sequence,
    new: usize,
) -> Result<()> {
    let (shape, ranks) = (attention.shape(), attention.division().ranks());
    let mut step = attention.begin_rows(stream, &[BatchRequest::of(sequence, new)])?;
    let rows = step.rows().iter().map(|rows| rows.len()).sum();
    let (query, key) = (ones(stream, rows, shape.heads * ranks), ones(stream, rows, shape.kv_heads));
    for layer in 0..LAYERS {
        step.forward(layer, (&query, &key, &key))?;
    }
    step.end()
}

#[test]
fn ranks_that_divide_another_thing_are_told_so() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(3, |rank| {
        let (stream, number) = (rank.device().stream().unwrap(), rank.rank());
        let mut attention = attention::<bf16>(rank, &simple(3));
        let mut sequence = attention.sequence();
        attention.grow(&stream, &mut sequence, 40).unwrap();
        let refused = match number {
            1 => forward(&stream, &mut attention, &sequence, 40).unwrap_err(),
            _ => forward_rows(&stream, &mut attention, &sequence, 40).unwrap_err(),
        };
        assert!(refused.breaks(&rules::RANKS_BATCH), "{refused}");
        let text = refused.to_string();
        assert!(text.contains("divided by rows on ranks 0, 2; divided by heads on rank 1"), "{text}");
        // Nothing was computed. A rank that makes the step twice is refused, and the others go on with it.
        forward_rows(&stream, &mut attention, &sequence, 40).unwrap();
        if number == 1 {
            let again = forward_rows(&stream, &mut attention, &sequence, 40).unwrap_err();
            assert!(again.breaks(&rules::SEQUENCE_COMPUTED), "{again}");
        }
        attention.grow(&stream, &mut sequence, 1).unwrap();
        forward(&stream, &mut attention, &sequence, 1).unwrap();
        stream.synchronize().unwrap();
    });
}

#[test]
fn rows_of_another_number_are_refused_and_the_step_goes_on() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(2, |rank| {
        let stream = rank.device().stream().unwrap();
        let mut attention = attention::<bf16>(rank, &simple(2));
        let mut sequence = attention.sequence();
        attention.grow(&stream, &mut sequence, 40).unwrap();
        let mut step = attention.begin_rows(&stream, &[BatchRequest::of(&sequence, 40)]).unwrap();
        let (query, key) = (ones(&stream, 20, 4), ones(&stream, 20, 1));
        let all = (ones(&stream, 40, 4), ones(&stream, 40, 1));
        let heads = step.forward(0, (&ones(&stream, 20, 2), &key, &key)).unwrap_err();
        assert!(heads.breaks(&rules::STEP_HEADS), "{heads}");
        for (query, key) in [(&all.0, &all.1), (&query, &all.1)] {
            let rows = step.forward(0, (query, key, key)).unwrap_err();
            assert!(rows.breaks(&rules::STEP_TOKENS) && rows.to_string().contains("ContextStep::rows"), "{rows}");
        }
        for layer in 0..LAYERS {
            let output = step.forward(layer, (&query, &key, &key)).unwrap();
            assert_eq!(output.download(&stream).unwrap(), [bf16::ONE; 20 * 4 * DIM]);
        }
        step.end().unwrap();
        stream.synchronize().unwrap();
    });
}

/// Tokens that no step has computed are read from the ranks' caches as well.
#[test]
fn rows_see_tokens_that_were_written_to_the_caches() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    let case = Case { steps: vec![vec![300]], ..simple(4) };
    as_ranks(4, |rank| {
        let (stream, number) = (rank.device().stream().unwrap(), rank.rank());
        let mut attention = attention::<bf16>(rank, &case);
        let mut sequence = attention.sequence();
        attention.grow(&stream, &mut sequence, 299).unwrap();
        let split = attention.division().split(&[BatchRequest::of(&sequence, 299)], PAD).unwrap();
        let key = ones(&stream, 299, 1);
        let slots = split.slots(number);
        let write = CacheWrite::plan(attention.cache(), &stream, slots, &key, &key).unwrap();
        for layer in 0..LAYERS {
            attention.cache_mut().write(&stream, &write, layer, &key, &key).unwrap();
        }
        attention.mark_computed(&sequence, 299).unwrap();
        attention.grow(&stream, &mut sequence, 1).unwrap();
        let mut step = attention.begin_rows(&stream, &[BatchRequest::of(&sequence, 1)]).unwrap();
        let rows = step.rows().iter().map(|rows| rows.len()).sum();
        assert_eq!(rows, usize::from(number == 0));
        let (query, key) =
            (ones(&stream, rows, 8), stream.upload(&vec![bf16::ZERO; rows * DIM], [rows, 1, DIM]).unwrap());
        for layer in 0..LAYERS {
            let output = step.forward(layer, (&query, &key, &key)).unwrap().download(&stream).unwrap();
            assert!(output.iter().all(|element| element.to_f64() > 0.99), "{output:?}");
        }
        step.end().unwrap();
    });
}

/// Cached tokens of blocks that no cache has are found before the ranks exchange anything.
#[test]
fn cached_tokens_outside_of_the_cache_are_refused() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(2, |rank| {
        let stream = rank.device().stream().unwrap();
        let mut attention = attention::<bf16>(rank, &simple(2));
        let blocks = attention.cache().pool().blocks();
        let row = [blocks - 1, blocks];
        // The block behind the cache has cached tokens, or is that of the new ones.
        for cached in [2 * BLOCK_SIZE + 1, 2 * BLOCK_SIZE] {
            let refused =
                attention.begin_rows(&stream, &[BatchRequest::in_row(&row, cached, 4)]).map(drop).unwrap_err();
            assert!(refused.breaks(&rules::TABLE_BLOCK), "{refused}");
            let text = refused.to_string();
            assert!(text.contains(&format!("block {blocks} of request 0")), "{text}");
        }
        assert_eq!(attention.communicator_mut().unwrap().calls(), 0);
    });
}

/// A cache whose tokens are not rows is refused by the first chunk, not by the one that would gather them.
#[test]
fn caches_that_cannot_be_gathered_are_refused_by_the_first_chunk() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    let rank = Communicator::all(&[device_of_rank(0)]).unwrap().remove(0);
    let stream = rank.device().stream().unwrap();
    let shape = CacheShape::new(1, 2, DIM).format(Cache::BnNBsD);
    let cache = PagedKvCache::<bf16>::new(rank.device(), 4, BLOCK_SIZE, shape, PAD).unwrap();
    let mut attention = ContextAttention::new(rank, AttentionShape::new(2, 2, DIM), cache, 16).unwrap();
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 4).unwrap();
    let refused = attention.begin_rows(&stream, &[BatchRequest::of(&sequence, 4)]).map(drop).unwrap_err();
    assert!(refused.breaks(&rules::ARGUMENT_VALUE), "{refused}");
    assert!(attention.begin(&stream, &[BatchRequest::of(&sequence, 4)]).is_ok());
}

/// A single rank has nobody to wait for it: it stays, and begins the step again.
#[test]
fn a_single_rank_goes_on_behind_a_step_without_layers() {
    if harness::not_on_npu("it needs the emulation's devices") {
        return;
    }
    as_ranks(1, |rank| {
        let stream = rank.device().stream().unwrap();
        let mut attention = attention::<bf16>(rank, &simple(1));
        let mut sequence = attention.sequence();
        attention.grow(&stream, &mut sequence, 40).unwrap();
        let (query, key) = (ones(&stream, 40, 2), ones(&stream, 40, 1));
        let mut step = attention.begin_rows(&stream, &[BatchRequest::of(&sequence, 40)]).unwrap();
        step.forward(0, (&query, &key, &key)).unwrap();
        let ended = step.end().unwrap_err();
        assert!(ended.breaks(&rules::STEP_LAYERS_MISSING), "{ended}");
        assert!(!ended.to_string().contains(rules::RANKS_LEFT.fix), "{ended}");
        forward_rows(&stream, &mut attention, &sequence, 40).unwrap();
        stream.synchronize().unwrap();
    });
}

/// Ranks that trust each other exchange the keys and values alone; a prefix that forks share is read by each of them.
#[test]
fn forks_go_on_from_their_prefix_by_rows() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    for trusts in [false, true] {
        as_ranks(2, |rank| {
            let (stream, number) = (rank.device().stream().unwrap(), rank.rank());
            let mut attention = attention::<bf16>(rank, &Case { steps: vec![vec![300; 4]], ..simple(2) });
            if trusts {
                attention = attention.trust_steps();
            }
            let mut prefix = attention.sequence();
            attention.grow(&stream, &mut prefix, 280).unwrap();
            forward_rows(&stream, &mut attention, &prefix, 280).unwrap();
            let mut forks = [prefix.fork(), prefix.fork()];
            for fork in &mut forks {
                attention.grow(&stream, fork, 20).unwrap();
            }
            let requests = forks.each_ref().map(|fork| BatchRequest::of(fork, 20));
            let mut step = attention.begin_rows(&stream, &requests).unwrap();
            let own: Vec<usize> = step.rows().iter().cloned().flatten().collect();
            // The values of the prefix are 1; those of the first fork are 2, and of the second 3.
            let value_of = |token: usize| bf16::from_f32(2.0 + (token / 20) as f32);
            let values: Vec<bf16> = own.iter().flat_map(|token| [value_of(*token); DIM]).collect();
            let value = stream.upload(&values, [own.len(), 1, DIM]).unwrap();
            let (query, key) = (ones(&stream, own.len(), 4), ones(&stream, own.len(), 1));
            for layer in 0..LAYERS {
                let output = step.forward(layer, (&query, &key, &value)).unwrap().download(&stream).unwrap();
                for (row, token) in own.iter().enumerate() {
                    // All keys are equal, so that a row has the mean of the values that it sees.
                    let new = (token % 20 + 1) as f64;
                    let wanted = (280.0 + new * value_of(*token).to_f64()) / (280.0 + new);
                    let got = output[row * 4 * DIM].to_f64();
                    assert!(abs_diff_eq!(got, wanted, epsilon = 0.01), "rank {number}, token {token}: {got}, {wanted}");
                }
            }
            step.end().unwrap();
            stream.synchronize().unwrap();
            // Two all-gathers of the prompt in each layer, and four behind cached tokens.
            let compared = if trusts { 0 } else { 2 };
            assert_eq!(attention.communicator_mut().unwrap().calls(), compared + (2 + 4) * LAYERS as u64);
        });
    }
}
