//! Decode steps over divided contexts, replayed from graphs.

use super::*;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    /// Lengths grow from replay to replay, requests come and go, and other steps run between.
    #[test]
    fn graphs_decode_over_any_division(
        case in case(Just(1)),
        more in prop::collection::vec(prop::collection::vec(0usize..3, 3), 2..5),
    ) {
        if harness::not_on_npu("it needs a device for each rank") {
            return Ok(());
        }
        let requests = case.requests();
        let more = more.into_iter().map(|step| step[..requests.min(step.len())].to_vec());
        let steps = case.steps.iter().cloned().chain(more).collect();
        check::<f16>(&Case { steps, graphs: true, ..case }).map_err(TestCaseError::fail)?;
    }
}

/// Whether a rank has keys of a request changes between replays of one graph, and padding has none anywhere.
#[test]
fn replays_follow_keys_from_rank_to_rank() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    for (ranks, run) in [(2, 1), (4, 128), (8, 16), (3, 1)] {
        let steps = [vec![vec![1, 126, 17]], vec![vec![1; 3]; 4]].concat();
        let case = Case { ranks, run, steps, kv_heads: 2, group: 2, seed: 11, wrong: None, graphs: true };
        check::<bf16>(&case).unwrap();
    }
}

#[test]
fn graphs_begin_with_the_attention_that_was_captured() {
    let stream = device_of_rank(0).stream().unwrap();
    let [mut captured, mut other] = [(); 2].map(|()| {
        let rank = Communicator::all(&[device_of_rank(0)]).unwrap().remove(0);
        attention::<bf16>(rank, &simple(1))
    });
    let mut graphs = captured.capture(&stream, [1], 9).unwrap();
    let mut sequence = other.sequence();
    other.grow(&stream, &mut sequence, 1).unwrap();
    let requests = [BatchRequest::of(&sequence, 1)];
    let refused = graphs.begin(&mut other, &stream, &requests).map(drop).unwrap_err();
    assert!(refused.breaks(&rules::SETTINGS_CACHE), "{refused}");
    assert!(refused.to_string().contains("with the `ContextAttention` that was captured"), "{refused}");
    other.begin(&stream, &requests).map(drop).unwrap();
}

#[test]
fn what_graphs_cannot_hold_is_refused_and_computed_without_them() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(2, |rank| {
        let (stream, me) = (rank.device().stream().unwrap(), rank.rank());
        let mut attention = attention::<bf16>(rank, &simple(2));
        let mut sequence = attention.sequence();
        attention.grow(&stream, &mut sequence, 40).unwrap();
        forward(&stream, &mut attention, &sequence, 40).unwrap();
        assert!(attention.capture(&stream, [2], 0).unwrap_err().breaks(&rules::GRAPH_LENGTHS));
        assert!(attention.capture(&stream, [], 9).unwrap_err().breaks(&rules::GRAPH_SIZE));
        let mut short = attention.capture(&stream, [2], 40).unwrap();
        let mut graphs = attention.capture(&stream, [2], 41).unwrap();
        attention.grow(&stream, &mut sequence, 1).unwrap();
        let request = BatchRequest::of(&sequence, 1);
        let mut refused = |graphs: &mut ascend_serving::ContextGraphs<bf16>, requests: &[BatchRequest<'_>], rule| {
            let refused = graphs.begin(&mut attention, &stream, requests).map(drop).unwrap_err();
            assert!(refused.breaks(rule), "{refused}");
            refused.to_string()
        };
        refused(&mut short, &[request], &rules::GRAPH_LENGTHS);
        refused(&mut graphs, &[request; 3], &rules::GRAPH_SIZE);
        let several = refused(&mut graphs, &[BatchRequest::of(&sequence, 2)], &rules::GRAPH_SIZE);
        assert!(several.contains("`ContextAttention::begin`, on every rank"), "{several}");
        refused(&mut graphs, &[], &rules::BATCH_EMPTY);
        // One rank replays what the other computes, with padding or without.
        let (query, key) = (ones(&stream, 1, 2), ones(&stream, 1, 1));
        let inputs = (&query, &key, &key);
        let mut whole = attention.capture(&stream, [1], 41).unwrap();
        for (size, graphs) in [(1, &mut whole), (2, &mut graphs)] {
            let outcome = match me {
                0 => graphs.begin(&mut attention, &stream, &[request]).unwrap().forward(0, inputs).map(drop),
                _ => attention.begin(&stream, &[request]).unwrap().forward(0, inputs).map(drop),
            };
            let text = outcome.unwrap_err().to_string();
            let named = format!("step: replayed from graphs of size {size} on rank 0; divided by heads on rank 1");
            assert!(text.contains(&named), "{text}");
        }
        let mut step = graphs.begin(&mut attention, &stream, &[request]).unwrap();
        let order = step.forward(1, inputs).unwrap_err();
        assert!(order.breaks(&rules::RANKS_ORDER), "{order}");
        step.mark_parts();
        let sent = step.sent_bytes();
        let mut lent = step.forward(0, inputs).unwrap().clone();
        assert_eq!(lent.download(&stream).unwrap(), vec![bf16::ONE; 2 * DIM]);
        // The graph writes its own output, of which a copy stays.
        let shared = step.forward_into(1, inputs, &mut lent).unwrap_err();
        assert!(shared.breaks(&rules::ARGUMENT_MEMORY), "{shared}");
        let mut own = stream.upload(&[bf16::ZERO; 2 * DIM], [1, 2, DIM]).unwrap();
        step.forward_into(1, inputs, &mut own).unwrap();
        assert_eq!(own.download(&stream).unwrap(), vec![bf16::ONE; 2 * DIM]);
        let marks: Vec<_> = step.marks().iter().map(|(part, _)| *part).collect();
        assert_eq!(marks, ["start", "merge"].repeat(LAYERS));
        step.end().unwrap();
        // Rows of the captured size are sent, one of them padding, of two heads: queries, results, log-sum-exps.
        assert_eq!(sent, 2 * 2 * (2 * DIM * size_of::<bf16>() + size_of::<f32>()) as u64);
        assert_eq!(attention.computed_tokens(&sequence), Ok(41));
        // A step that a rank leaves after its first layer is torn for everybody, once the rank's graphs are gone.
        drop((short, whole, graphs));
        attention.grow(&stream, &mut sequence, 1).unwrap();
        let mut longer = attention.capture(&stream, [1], 64).unwrap();
        let mut step = longer.begin(&mut attention, &stream, &[BatchRequest::of(&sequence, 1)]).unwrap();
        step.forward(0, inputs).unwrap();
        if me == 1 {
            let torn = step.forward(1, inputs).and_then(|_| Ok(stream.synchronize()?)).unwrap_err();
            assert!(torn.to_string().contains("rank 0"), "{torn}");
            return;
        }
        stream.synchronize().unwrap();
        drop(step);
        assert!(attention.communicator_mut().is_none());
        let left = longer.begin(&mut attention, &stream, &[BatchRequest::of(&sequence, 1)]).map(drop).unwrap_err();
        assert!(left.breaks(&rules::RANKS_LEFT) && longer.sizes().count() == 0, "{left}");
    });
}

/// Where padding goes to dump slots, tokens that other ranks hold and rows that the step does not fill have one each.
#[test]
fn padding_of_a_replay_has_slots_of_its_own() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(2, |rank| {
        #[cfg(feature = "emulation")]
        let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
        let (stream, shape) = (rank.device().stream().unwrap(), CacheShape::new(LAYERS, 1, DIM));
        let cache = PagedKvCache::<bf16>::new(rank.device(), 8, BLOCK_SIZE, shape, PadPolicy::DumpSlot(0)).unwrap();
        let mut attention = ContextAttention::new(rank, AttentionShape::new(2, 1, DIM), cache, 16).unwrap();
        let mut sequences = [(); 3].map(|()| attention.sequence());
        for sequence in &mut sequences {
            attention.grow(&stream, sequence, 1).unwrap();
        }
        let mut graphs = attention.capture(&stream, [8], 16).unwrap();
        let requests = sequences.each_ref().map(|sequence| BatchRequest::of(sequence, 1));
        let (query, key) = (ones(&stream, 3, 2), ones(&stream, 3, 1));
        let mut step = graphs.begin(&mut attention, &stream, &requests).unwrap();
        for layer in 0..LAYERS {
            // The rows are those of the requests, without any of the padding.
            for rows in [2, 4, 7, 8] {
                let refused = step.forward(layer, (&ones(&stream, rows, 2), &key, &key)).unwrap_err();
                assert!(refused.breaks(&rules::STEP_TOKENS), "{refused}");
                assert!(refused.to_string().contains("[3, 2, 64]: 3 rows of the requests; fix: bring"), "{refused}");
            }
            let output = step.forward(layer, (&query, &key, &key)).unwrap();
            assert_eq!(output.download(&stream).unwrap(), vec![bf16::ONE; 3 * 2 * DIM]);
        }
        step.end().unwrap();
    });
}

/// What a request leaves in the buffers of a graph, even if it is no number, weighs nothing in the next one.
#[test]
fn no_number_of_one_request_reaches_another() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(2, |rank| {
        let stream = rank.device().stream().unwrap();
        let case = Case { run: 128, steps: vec![vec![200, 9], vec![1, 1]], ..simple(2) };
        let mut attention = attention::<bf16>(rank, &case);
        // The first has keys on both ranks, the second on one.
        let [mut long, mut short] = [(); 2].map(|()| attention.sequence());
        for (sequence, tokens) in [(&mut long, 200), (&mut short, 9)] {
            attention.grow(&stream, sequence, tokens).unwrap();
            forward(&stream, &mut attention, sequence, tokens).unwrap();
            attention.grow(&stream, sequence, 1).unwrap();
        }
        let mut graphs = attention.capture(&stream, [1], 201).unwrap();
        for (sequence, number) in [(&long, bf16::NAN), (&short, bf16::ONE)] {
            let query = stream.upload(&[number; 2 * DIM], [1, 2, DIM]).unwrap();
            let key = ones(&stream, 1, 1);
            let mut step = graphs.begin(&mut attention, &stream, &[BatchRequest::of(sequence, 1)]).unwrap();
            for layer in 0..LAYERS {
                let output = step.forward(layer, (&query, &key, &key)).unwrap().download(&stream).unwrap();
                assert!(output.iter().all(|got| got.is_nan() == number.is_nan()), "{output:?}");
            }
            step.end().unwrap();
        }
    });
}
