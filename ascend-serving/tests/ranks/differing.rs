//! Ranks that bring different steps: all of them are told so before anything is computed, and go on.

use super::*;

/// What one rank brings to a step in the place of what the others bring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Wrong {
    pub(crate) step: usize,
    pub(crate) rank: usize,
    pub(crate) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// The requests in another order.
    Order,
    /// The last request in front of its last cached token.
    Cached,
    /// The first request as a row of the table.
    Row,
    /// Without the last request.
    Fewer,
    /// A token more of the first request, one less of the second.
    New,
}

impl Wrong {
    /// Begins the wrong step, if these requests allow it, and sees it refused.
    pub(crate) fn refused<T: Half>(
        &self,
        attention: &mut ContextAttention<T>,
        stream: &Stream,
        requests: &[BatchRequest<'_>],
        [query, key, value]: &[Tensor<T>; 3],
    ) {
        let row = |request: &BatchRequest<'_>, cached| (request.row.to_vec(), cached, request.new);
        let mut rows: Vec<_> = requests.iter().map(|request| row(request, request.cached)).collect();
        let last = rows.len() - 1;
        let mut wrong = requests.to_vec();
        match self.kind {
            Kind::Order => wrong.reverse(),
            Kind::Row => wrong[0] = BatchRequest::in_row(&rows[0].0, rows[0].1, rows[0].2),
            Kind::Cached => {
                rows[last].1 -= 1;
                wrong[last] = BatchRequest::in_row(&rows[last].0, rows[last].1, rows[last].2);
            }
            Kind::Fewer => wrong.truncate(last),
            Kind::New => {
                rows[0].1 -= 1;
                rows[0].2 += 1;
                rows[1].2 -= 1;
                for at in [0, 1] {
                    wrong[at] = BatchRequest::in_row(&rows[at].0, rows[at].1, rows[at].2);
                }
            }
        }
        let tokens = wrong.iter().map(|request| request.new).sum();
        let [query, key, value] = [query, key, value].map(|tensor| tensor.narrow(0, 0..tokens).unwrap());
        let before = attention.communicator_mut().unwrap().calls();
        let mut step = attention.begin(stream, &wrong).unwrap();
        self.names(step.forward(0, (&query, &key, &value)).unwrap_err());
        drop(step);
        // The comparison, and the search for the first difference.
        assert!(attention.communicator_mut().unwrap().calls() <= before + 3);
    }

    /// Checks the refusal of any rank.
    pub(crate) fn names(&self, error: Error) {
        assert!(error.breaks(&rules::RANKS_BATCH), "{error}");
        let text = error.to_string();
        let parts = match self.kind {
            Kind::Order => ["request 0", " on rank"],
            Kind::Cached => ["cached tokens of request", " on rank"],
            Kind::Row => ["sequence of request 0", "none on rank"],
            Kind::Fewer => ["number of requests", " on rank"],
            Kind::New => ["cached tokens of request 0", " on rank"],
        };
        for part in [parts[0], parts[1], &format!("on rank {}", self.rank)] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}

fn wrong_case() -> impl Strategy<Value = Case> {
    let kinds = [Kind::Order, Kind::Cached, Kind::Row, Kind::Fewer, Kind::New];
    let prompts = prop::collection::vec(2usize..300, 2..4);
    let runs = prop_oneof![Just(1usize), Just(16), Just(128)];
    (3..=MOST_RANKS, runs, prompts, prop::sample::select(kinds.to_vec()), any::<(u16, bool)>(), 0..MOST_RANKS).prop_map(
        |(ranks, run, prompts, kind, (seed, graphs), rank)| {
            let new = if kind == Kind::New { 2 } else { 1 };
            let steps = vec![prompts.clone(), vec![new; prompts.len()], vec![1; prompts.len()]];
            let wrong = Some(Wrong { step: 1, rank: rank % ranks, kind });
            Case { ranks, run, steps, kv_heads: 1, group: 2, seed: seed.into(), wrong, graphs }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    fn a_rank_with_another_batch_is_named_to_all_and_the_step_goes_on(case in wrong_case()) {
        if harness::not_on_npu("it needs a device for each rank") {
            return Ok(());
        }
        check::<f16>(&case).map_err(TestCaseError::fail)?;
    }
}

/// The first layer of a step of one token of a sequence.
fn first_layer<'a>(
    attention: &'a mut ContextAttention<bf16>,
    stream: &'a Stream,
    request: BatchRequest<'_>,
) -> Result<ascend_serving::ContextStep<'a, bf16>> {
    let (query, key) = (ones(stream, 1, 2), ones(stream, 1, 1));
    let mut step = attention.begin(stream, &[request])?;
    step.forward(0, (&query, &key, &key))?;
    Ok(step)
}

fn last_layer(mut step: ascend_serving::ContextStep<'_, bf16>, stream: &Stream) {
    let (query, key) = (ones(stream, 1, 2), ones(stream, 1, 1));
    step.forward(1, (&query, &key, &key)).unwrap();
    step.end().unwrap();
}

/// Two sequences of equal lengths: only which one it is tells the steps apart.
#[test]
fn a_step_that_a_rank_leaves_out_or_makes_twice_is_found() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(3, |rank| {
        let stream = rank.device().stream().unwrap();
        let forgetful = rank.rank() == 1;
        let mut attention = attention::<bf16>(rank, &Case { steps: vec![vec![40, 40], vec![2, 2]], ..simple(3) });
        let [mut one, mut other] = [(); 2].map(|()| attention.sequence());
        for sequence in [&mut one, &mut other] {
            attention.grow(&stream, sequence, 40).unwrap();
            forward(&stream, &mut attention, sequence, 40).unwrap();
            attention.grow(&stream, sequence, 1).unwrap();
        }
        let refused = |attention: &mut ContextAttention<bf16>, request| {
            let refused = first_layer(attention, &stream, request).map(drop).unwrap_err();
            assert!(refused.breaks(&rules::RANKS_BATCH), "{refused}");
            let text = refused.to_string();
            assert!(text.contains("sequence of request 0: that of request 0 in step"), "{text}");
            assert!(text.contains("on ranks 0, 2") && text.contains("on rank 1"), "{text}");
        };
        // Rank 1 leaves the step of the first sequence out, and then makes it twice.
        refused(&mut attention, BatchRequest::of(if forgetful { &other } else { &one }, 1));
        last_layer(first_layer(&mut attention, &stream, BatchRequest::of(&one, 1)).unwrap(), &stream);
        let next = if forgetful { BatchRequest::of(&one, 1).recompute() } else { BatchRequest::of(&other, 1) };
        refused(&mut attention, next);
        last_layer(first_layer(&mut attention, &stream, BatchRequest::of(&other, 1)).unwrap(), &stream);
        stream.synchronize().unwrap();
        // Each step was compared once, two of them differed, and a layer exchanges three times.
        assert_eq!(attention.communicator_mut().unwrap().calls(), 4 + 2 * 2 + 4 * 3 * LAYERS as u64);
    });
}

/// A sequence that one rank alone has preempted: the refusal says what differs, and what it advises serves.
#[test]
fn a_sequence_that_one_rank_has_preempted_is_preempted_on_all() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    for made_anew in [false, true] {
        as_ranks(2, |rank| {
            let stream = rank.device().stream().unwrap();
            let preempts = rank.rank() == 1;
            let case = Case { steps: vec![vec![40], vec![1], vec![41]], ..simple(2) };
            let mut attention = attention::<bf16>(rank, &case);
            let mut sequence = attention.sequence();
            let preempt = |attention: &mut ContextAttention<bf16>, sequence: &mut Sequence| {
                match made_anew {
                    true => *sequence = attention.sequence(),
                    false => sequence.truncate(0).unwrap(),
                }
                attention.grow(&stream, sequence, 41).unwrap();
            };
            attention.grow(&stream, &mut sequence, 40).unwrap();
            forward(&stream, &mut attention, &sequence, 40).unwrap();
            // Requests of a rank have no metadata of their own.
            let computed = forward(&stream, &mut attention, &sequence, 1).unwrap_err();
            assert!(computed.breaks(&rules::SEQUENCE_COMPUTED), "{computed}");
            assert!(computed.to_string().contains("make the step's requests"), "{computed}");
            attention.grow(&stream, &mut sequence, 1).unwrap();
            if preempts {
                preempt(&mut attention, &mut sequence);
            }
            let new = if preempts { 41 } else { 1 };
            let refused = forward(&stream, &mut attention, &sequence, new).unwrap_err();
            assert!(refused.breaks(&rules::RANKS_BATCH), "{refused}");
            let text = refused.to_string();
            assert!(text.contains("cached tokens of request 0: 40 on rank 0; 0 on rank 1"), "{text}");
            assert!(text.contains("was preempted, cut or made anew on some ranks alone, do the same"), "{text}");
            if !preempts {
                preempt(&mut attention, &mut sequence);
            }
            forward(&stream, &mut attention, &sequence, 41).unwrap();
        });
    }
}

#[test]
fn ranks_with_other_settings_are_found_by_their_first_step() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    let shape = simple(2).shape();
    for (own, run, part) in [
        (shape, 32, "tokens in a run: 16 on rank 0; 32 on rank 1"),
        (shape.scale(0.5), 16, "scale: 0.125 on rank 0; 0.5 on rank 1"),
        (AttentionShape::new(4, 1, DIM), 16, "query heads: 2 on rank 0; 4 on rank 1"),
    ] {
        as_ranks(2, |rank| {
            let stream = rank.device().stream().unwrap();
            let (own, run) = if rank.rank() == 0 { (shape, 16) } else { (own, run) };
            let cache = PagedKvCache::new(rank.device(), 4, BLOCK_SIZE, CacheShape::new(LAYERS, 1, DIM), PAD).unwrap();
            let mut attention = ContextAttention::<bf16>::new(rank, own, cache, run).unwrap();
            let mut sequence = attention.sequence();
            attention.grow(&stream, &mut sequence, 40).unwrap();
            let refused = forward(&stream, &mut attention, &sequence, 40).unwrap_err();
            assert!(refused.breaks(&rules::RANKS_BATCH), "{refused}");
            let text = refused.to_string();
            assert!(text.contains(part) && text.contains("attentions of all ranks anew"), "{text}");
            assert_eq!(attention.computed_tokens(&sequence), Ok(0));
        });
    }
}

#[test]
fn ranks_that_trust_each_other_exchange_nothing_more() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(2, |rank| {
        let stream = rank.device().stream().unwrap();
        let mut attention = attention::<bf16>(rank, &simple(2)).trust_steps();
        let mut sequence = attention.sequence();
        for new in [40, 1] {
            attention.grow(&stream, &mut sequence, new).unwrap();
            forward(&stream, &mut attention, &sequence, new).unwrap();
        }
        stream.synchronize().unwrap();
        assert_eq!(attention.communicator_mut().unwrap().calls(), 2 * 3 * LAYERS as u64);
    });
}
