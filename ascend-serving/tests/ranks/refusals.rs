//! A refusal is a rank's own: the others hear of it by the rank's next step, by a call that tells them, or by its end.

use std::sync::Barrier;

use ascend_attention::{Error as CallError, Graph};
use ascend_serving::{ContextGraphs, RingAttention};

use super::*;

/// What one rank does in the place of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lapse {
    /// It has computed the step already, as it says, and is refused by `begin`.
    Computed,
    /// Its stream is another device's.
    Device,
    /// It brings tensors of other shapes.
    Shape,
    /// It begins the step, and ends it before its first layer.
    Ended,
    /// It is refused twice.
    Twice,
}

impl Lapse {
    const ALL: [Self; 5] = [Self::Computed, Self::Device, Self::Shape, Self::Ended, Self::Twice];

    /// Makes the lapse in a step of a token of the sequence.
    fn make(
        self,
        attention: &mut ContextAttention<bf16>,
        graphs: Option<&mut ContextGraphs<bf16>>,
        stream: &Stream,
        sequence: &Sequence,
    ) {
        let request = BatchRequest::of(sequence, 1);
        match self {
            Self::Computed => {
                let computed = BatchRequest::of(sequence, 2);
                let refused = attention.begin(stream, &[computed]).map(drop).unwrap_err();
                assert!(refused.breaks(&rules::SEQUENCE_COMPUTED), "{refused}");
            }
            Self::Device => {
                let elsewhere = device_of_rank((attention.rank() + 1) % 3).stream().unwrap();
                let refused = attention.begin(&elsewhere, &[request]).map(drop).unwrap_err();
                assert!(refused.breaks(&rules::ARGUMENT_DEVICE), "{refused}");
            }
            Self::Shape => {
                let (query, key) = (ones(stream, 2, 2), ones(stream, 1, 1));
                let mut step = attention.begin(stream, &[request]).unwrap();
                let refused = step.forward(0, (&query, &key, &key)).unwrap_err();
                assert!(refused.breaks(&rules::STEP_TOKENS), "{refused}");
            }
            Self::Ended => {
                let ended = attention.begin(stream, &[request]).unwrap().end().unwrap_err();
                assert!(ended.breaks(&rules::STEP_LAYERS_MISSING), "{ended}");
            }
            Self::Twice => {
                let refused = attention.begin_rows(stream, &[]).map(drop).unwrap_err();
                assert!(refused.breaks(&rules::BATCH_EMPTY), "{refused}");
                let again = BatchRequest::of(sequence, 2);
                let refused = match graphs {
                    Some(graphs) => graphs.begin(attention, stream, &[again]).map(drop).unwrap_err(),
                    None => attention.begin(stream, &[again]).map(drop).unwrap_err(),
                };
                assert!(refused.breaks(&rules::GRAPH_SIZE) || refused.breaks(&rules::SEQUENCE_COMPUTED), "{refused}");
            }
        }
    }
}

/// A rank with a sequence of 40 tokens that are computed, and room for one more.
fn rank_behind_a_prompt(rank: Communicator, case: &Case) -> (Stream, ContextAttention<bf16>, Sequence) {
    let stream = rank.device().stream().unwrap();
    let mut attention = attention::<bf16>(rank, case);
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 40).unwrap();
    forward(&stream, &mut attention, &sequence, 40).unwrap();
    attention.grow(&stream, &mut sequence, 1).unwrap();
    (stream, attention, sequence)
}

fn calls(attention: &mut ContextAttention<bf16>) -> u64 {
    attention.communicator_mut().unwrap().calls()
}

/// Checks what the others get of a rank 1 that refuses a step.
fn hears(refused: &Error) {
    assert!(refused.breaks(&rules::RANKS_BATCH), "{refused}");
    assert!(refused.to_string().contains("step: begun on ranks 0, 2; refused on rank 1"), "{refused}");
}

/// The others wait for the rank, or are refused where it says so.
#[test]
fn a_refused_rank_makes_the_step_after_all() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    let options = [(false, false), (true, false), (false, true), (true, true)];
    for (lapse, (graphs, tells)) in Lapse::ALL.into_iter().flat_map(|lapse| options.map(|options| (lapse, options))) {
        let made = as_ranks(3, |rank| {
            let (stream, mut attention, sequence) = rank_behind_a_prompt(rank, &simple(3));
            let mut captured = graphs.then(|| attention.capture(&stream, [1], 50).unwrap());
            let forgetful = attention.rank() == 1;
            if forgetful {
                let before = calls(&mut attention);
                lapse.make(&mut attention, captured.as_mut(), &stream, &sequence);
                assert_eq!(calls(&mut attention), before, "{lapse:?}");
                if tells {
                    attention.refuse_step(&stream).unwrap();
                }
            }
            let request = [BatchRequest::of(&sequence, 1)];
            let (query, key) = (ones(&stream, 1, 2), ones(&stream, 1, 1));
            let is_told = tells && !forgetful;
            match &mut captured {
                Some(graphs) => {
                    let mut step = graphs.begin(&mut attention, &stream, &request).unwrap();
                    if is_told {
                        hears(&step.forward(0, (&query, &key, &key)).unwrap_err());
                    }
                    (0..LAYERS).for_each(|layer| step.forward(layer, (&query, &key, &key)).map(drop).unwrap());
                    step.end().unwrap();
                }
                None => {
                    let mut step = attention.begin(&stream, &request).unwrap();
                    if is_told {
                        hears(&step.forward(0, (&query, &key, &key)).unwrap_err());
                    }
                    (0..LAYERS).for_each(|layer| step.forward(layer, (&query, &key, &key)).map(drop).unwrap());
                    step.end().unwrap();
                }
            }
            stream.synchronize().unwrap();
            assert_eq!(attention.computed_tokens(&sequence), Ok(41));
            calls(&mut attention)
        });
        assert!(made.iter().all(|calls| *calls == made[0]), "{lapse:?}: {made:?}");
    }
}

/// A rank that was refused and goes on to another batch is told so with the others.
#[test]
fn a_refused_rank_with_another_batch_is_named_to_all() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(3, |rank| {
        let (stream, mut attention, one) =
            rank_behind_a_prompt(rank, &Case { steps: vec![vec![40, 9]; 2], ..simple(3) });
        let mut other = attention.sequence();
        attention.grow(&stream, &mut other, 9).unwrap();
        let goes_on = attention.rank() == 1;
        if goes_on {
            Lapse::Computed.make(&mut attention, None, &stream, &one);
        }
        let refused = match goes_on {
            true => forward(&stream, &mut attention, &other, 9).unwrap_err(),
            false => forward(&stream, &mut attention, &one, 1).unwrap_err(),
        };
        assert!(refused.breaks(&rules::RANKS_BATCH), "{refused}");
        assert!(refused.to_string().contains("cached tokens of request 0: 40 on ranks 0, 2; 0 on rank 1"), "{refused}");
        forward(&stream, &mut attention, &one, 1).unwrap();
        forward(&stream, &mut attention, &other, 9).unwrap();
        stream.synchronize().unwrap();
    });
}

/// Ranks that are all refused have nothing to wait for, whether they say so or not.
#[test]
fn all_ranks_are_refused_and_go_on() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    for tells in [false, true] {
        as_ranks(3, |rank| {
            let (stream, mut attention, sequence) = rank_behind_a_prompt(rank, &simple(3));
            let before = calls(&mut attention);
            Lapse::ALL.into_iter().for_each(|lapse| lapse.make(&mut attention, None, &stream, &sequence));
            assert_eq!(calls(&mut attention), before);
            if tells {
                attention.refuse_step(&stream).unwrap();
            }
            forward(&stream, &mut attention, &sequence, 1).unwrap();
            stream.synchronize().unwrap();
        });
    }
}

/// One thread has all ranks, one of which is refused: none waits for another when they are dropped, in any order.
#[test]
fn refused_ranks_are_dropped_one_after_the_other() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    for reversed in [false, true] {
        let devices = [0, 1, 2].map(device_of_rank);
        let ranks = Communicator::all(&devices).unwrap().into_iter();
        let mut ranks: Vec<_> = ranks.map(|rank| attention::<bf16>(rank, &simple(3))).collect();
        let stream = devices[0].stream().unwrap();
        let refused = ranks[0].begin(&stream, &[]).map(drop).unwrap_err();
        assert!(refused.breaks(&rules::BATCH_EMPTY), "{refused}");
        let mut sequence = ranks[0].sequence();
        ranks[0].grow(&stream, &mut sequence, 40).unwrap();
        let ended = ranks[0].begin_rows(&stream, &[BatchRequest::of(&sequence, 40)]).unwrap().end().unwrap_err();
        assert!(ended.breaks(&rules::STEP_LAYERS_MISSING), "{ended}");
        assert_eq!(calls(&mut ranks[0]), 0);
        if reversed {
            ranks.reverse();
        }
        let began = Instant::now();
        drop(ranks);
        assert!(began.elapsed() < Duration::from_secs(60));
    }
}

/// A step, or its first layer, while the thread captures a graph is a refusal as any other.
#[test]
fn steps_in_a_capture_are_refused_and_the_rank_stays() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    fn capturing<T>(outcome: Result<T>) {
        let refused = outcome.map(drop).unwrap_err();
        assert!(matches!(refused, Error::Attention(CallError::Capturing { .. })), "{refused}");
    }
    as_ranks(2, |rank| {
        let device = rank.device().clone();
        let (stream, mut attention, sequence) = rank_behind_a_prompt(rank, &simple(2));
        let request = [BatchRequest::of(&sequence, 1)];
        let (query, key) = (ones(&stream, 1, 2), ones(&stream, 1, 1));
        // The token is a row of rank 0.
        let (no_query, no_key) = (ones(&stream, 0, 4), ones(&stream, 0, 1));
        let captured = attention.rank() == 1;
        if captured {
            let begun = Graph::capture(&device, (), |_, ()| {
                capturing(attention.begin(&stream, &request));
                capturing(attention.refuse_step(&stream));
                let mut step = attention.begin_rows(&stream, &request).unwrap();
                capturing(step.forward(0, (&no_query, &no_key, &no_key)));
                Ok(())
            });
            drop(begun.unwrap());
        }
        let mut step = attention.begin(&stream, &request).unwrap();
        if captured {
            let layer = Graph::capture(&device, (), |_, ()| {
                capturing(step.forward(0, (&query, &key, &key)));
                Ok(())
            });
            drop(layer.unwrap());
        }
        (0..LAYERS).for_each(|layer| step.forward(layer, (&query, &key, &key)).map(drop).unwrap());
        step.end().unwrap();
        stream.synchronize().unwrap();
    });
    as_ranks(2, |rank| {
        let (device, number) = (rank.device().clone(), rank.rank());
        let stream = device.stream().unwrap();
        let mut ring = RingAttention::new(rank, AttentionShape::new(2, 1, DIM)).unwrap();
        let (query, key) = (ones(&stream, 4, 2), ones(&stream, 4, 1));
        if number == 1 {
            let call = Graph::capture(&device, (), |_, ()| {
                capturing(ring.forward(&stream, 8, (&query, &key, &key)));
                Ok(())
            });
            drop(call.unwrap());
        }
        let output = ring.forward(&stream, 8, (&query, &key, &key)).unwrap();
        assert_eq!(output.download(&stream).unwrap(), [bf16::ONE; 4 * 2 * DIM]);
    });
}

/// Calls that no operator takes are refused where they are planned, before the ranks exchange anything.
#[test]
fn a_refusal_of_planned_calls_exchanges_nothing() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    const WIDE: usize = 528;
    as_ranks(2, |rank| {
        let stream = rank.device().stream().unwrap();
        let cache = PagedKvCache::<bf16>::new(rank.device(), 4, BLOCK_SIZE, CacheShape::new(1, 1, WIDE), PAD).unwrap();
        let mut attention = ContextAttention::new(rank, AttentionShape::new(1, 1, WIDE), cache, 16).unwrap();
        let mut sequence = attention.sequence();
        attention.grow(&stream, &mut sequence, 4).unwrap();
        let request = [BatchRequest::of(&sequence, 4)];
        for by_rows in [false, true] {
            let mut step = match by_rows {
                true => attention.begin_rows(&stream, &request).unwrap(),
                false => attention.begin(&stream, &request).unwrap(),
            };
            let rows: usize = step.rows().iter().map(|rows| rows.len()).sum();
            let heads = if by_rows { 2 } else { 1 };
            let ones =
                |heads: usize| stream.upload(&vec![bf16::ONE; rows * heads * WIDE], [rows, heads, WIDE]).unwrap();
            let (query, key) = (ones(heads), ones(1));
            let refused = step.forward(0, (&query, &key, &key)).unwrap_err();
            assert!(!refused.breaks(&rules::RANKS_BATCH) && !refused.breaks(&rules::STEP_HEADS), "{refused}");
        }
        assert_eq!(calls(&mut attention), 0);
    });
}

/// A rank that refuses the step for good says so; one that only goes fails the others by its end.
#[test]
fn a_rank_that_goes_after_its_refusal_is_named() {
    if harness::not_on_npu("hardware waits for half an hour") {
        return;
    }
    for tells in [true, false] {
        as_ranks(3, |rank| {
            let stream = rank.device().stream().unwrap();
            let mut attention = attention::<bf16>(rank, &simple(3));
            let mut sequence = attention.sequence();
            attention.grow(&stream, &mut sequence, 40).unwrap();
            if attention.rank() == 1 {
                let refused = attention.begin(&stream, &[]).map(drop).unwrap_err();
                assert!(refused.breaks(&rules::BATCH_EMPTY), "{refused}");
                if tells {
                    attention.refuse_step(&stream).unwrap();
                }
                return;
            }
            let error = forward(&stream, &mut attention, &sequence, 40).unwrap_err();
            match tells {
                true => hears(&error),
                false => assert!(!error.breaks(&rules::RANKS_BATCH) && error.to_string().contains("rank 1"), "{error}"),
            }
        });
    }
}

#[test]
fn ranks_that_trust_each_other_refuse_no_step() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(2, |rank| {
        let stream = rank.device().stream().unwrap();
        let mut attention = attention::<bf16>(rank, &simple(2)).trust_steps();
        let refused = attention.refuse_step(&stream).unwrap_err();
        assert!(refused.breaks(&rules::ARGUMENT_VALUE), "{refused}");
        assert_eq!(calls(&mut attention), 0);
    });
}

#[test]
fn ranks_of_a_ring_wait_for_a_refused_one() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(3, |rank| {
        let (stream, number) = (rank.device().stream().unwrap(), rank.rank());
        let mut ring = RingAttention::new(rank, AttentionShape::new(2, 1, DIM)).unwrap();
        let (query, key) = (ones(&stream, 4, 2), ones(&stream, 4, 1));
        if number == 1 {
            let refused = ring.forward(&stream, 12, (&query, &key, &query)).unwrap_err();
            assert!(refused.breaks(&rules::STEP_HEADS), "{refused}");
        }
        let output = ring.forward(&stream, 12, (&query, &key, &key)).unwrap();
        assert_eq!(output.download(&stream).unwrap(), [bf16::ONE; 4 * 2 * DIM]);
    });
}

/// A rank that has queued every layer counts the step before it can know that another one left it behind layer 0; once
/// it hears of that, it counts no token any more.
#[test]
fn a_step_that_another_rank_has_left_does_not_count() {
    if harness::not_on_npu("hardware waits for half an hour") {
        return;
    }
    for (by_rows, synchronises) in [(false, false), (false, true), (true, false), (true, true)] {
        let queued = Barrier::new(2);
        as_ranks(2, |rank| {
            let stream = rank.device().stream().unwrap();
            let mut attention = attention::<bf16>(rank, &simple(2));
            let mut sequence = attention.sequence();
            attention.grow(&stream, &mut sequence, 40).unwrap();
            forward(&stream, &mut attention, &sequence, 40).unwrap();
            stream.synchronize().unwrap();
            attention.grow(&stream, &mut sequence, 40).unwrap();
            let request = [BatchRequest::of(&sequence, 40)];
            let leaves = attention.rank() == 1;
            let mut step = match by_rows {
                true => attention.begin_rows(&stream, &request).unwrap(),
                false => attention.begin(&stream, &request).unwrap(),
            };
            let (rows, heads) = if by_rows { (20, 4) } else { (40, 2) };
            let (query, key) = (ones(&stream, rows, heads), ones(&stream, rows, 1));
            let layers = if leaves { 1 } else { LAYERS };
            (0..layers).for_each(|layer| step.forward(layer, (&query, &key, &key)).map(drop).unwrap());
            queued.wait();
            if leaves {
                drop(step);
                assert_eq!(attention.computed_tokens(&sequence), Ok(0));
                return;
            }
            step.end().unwrap();
            let fork = sequence.fork();
            if synchronises {
                let text = stream.synchronize().unwrap_err().to_string();
                assert!(text.contains("rank 1"), "{text}");
                attention.leave();
            } else {
                attention.grow(&stream, &mut sequence, 1).unwrap();
                let text = forward(&stream, &mut attention, &sequence, 1).unwrap_err().to_string();
                assert!(text.contains("rank 1"), "{text}");
            }
            assert_eq!([&sequence, &fork].map(|sequence| attention.computed_tokens(sequence)), [Ok(0), Ok(0)]);
            let left = forward(&stream, &mut attention, &sequence, sequence.len()).unwrap_err();
            assert!(left.breaks(&rules::RANKS_LEFT), "{left}");
        });
    }
}

/// Graphs do not keep a rank that leaves, or is dropped: the others are told at once.
#[test]
fn a_rank_that_leaves_graphs_behind_is_named_to_the_others() {
    if harness::not_on_npu("hardware waits for half an hour") {
        return;
    }
    for is_dropped in [false, true] {
        let heard = Barrier::new(2);
        as_ranks(2, |rank| {
            let (stream, mut attention, sequence) = rank_behind_a_prompt(rank, &simple(2));
            let graphs = attention.capture(&stream, [1], 60).unwrap();
            if attention.rank() == 1 {
                if is_dropped {
                    drop(attention);
                } else {
                    attention.leave();
                    let marked = attention.mark_computed(&sequence, 1).unwrap_err();
                    assert_eq!(marked.rule, &rules::RANKS_LEFT);
                    assert_eq!(attention.computed_tokens(&sequence), Ok(0));
                }
                heard.wait();
                drop(graphs);
                return;
            }
            let began = Instant::now();
            let mut step = attention.begin(&stream, &[BatchRequest::of(&sequence, 1)]).unwrap();
            let (query, key) = (ones(&stream, 1, 2), ones(&stream, 1, 1));
            let failed = step.forward(0, (&query, &key, &key)).map(drop).unwrap_err().to_string();
            heard.wait();
            assert!(failed.contains("rank 1") && began.elapsed() < Duration::from_secs(50), "{failed}");
            let ended = step.end().unwrap_err().to_string();
            assert!(ended.contains(rules::RANKS_LEFT.fix), "{ended}");
        });
    }
}

/// An output in memory that the layer reads or writes is refused before anything is exchanged, in every form of step.
#[test]
fn outputs_in_memory_of_the_layer_are_refused_and_the_rank_stays() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(2, |rank| {
        let (stream, mut attention, mut sequence) = rank_behind_a_prompt(rank, &simple(2));
        let graphs = &mut attention.capture(&stream, [1], 60).unwrap();
        for form in 0..3 {
            let cached = [0, LAYERS - 1].map(|layer| attention.cache().layer(layer).unwrap().key.clone());
            let request = [BatchRequest::of(&sequence, 1)];
            let mut step = match form {
                0 => attention.begin(&stream, &request).unwrap(),
                1 => attention.begin_rows(&stream, &request).unwrap(),
                _ => graphs.begin(&mut attention, &stream, &request).unwrap(),
            };
            let (rows, heads) = (step.rows().iter().map(|rows| rows.len()).sum(), if form == 1 { 4 } else { 2 });
            let (query, key) = (ones(&stream, rows, heads), ones(&stream, rows, 1));
            let of_caches = cached.map(|cached| {
                let elements: usize = cached.shape().iter().product();
                cached.reshape([elements / heads / DIM, heads, DIM]).unwrap().narrow(0, 0..rows).unwrap()
            });
            for mut output in of_caches.into_iter().chain([query.clone()]).filter(|_| rows > 0) {
                let refused = step.forward_into(0, (&query, &key, &key), &mut output).unwrap_err();
                assert!(refused.breaks(&rules::ARGUMENT_MEMORY), "{refused}");
            }
            for layer in 0..LAYERS {
                step.forward(layer, (&query, &key, &key)).unwrap();
            }
            step.end().unwrap();
            attention.grow(&stream, &mut sequence, 1).unwrap();
        }
        stream.synchronize().unwrap();
    });
}

/// A cache that is put in the place of the attention's own has none of the tokens that count as computed.
#[test]
fn another_cache_in_the_place_of_a_ranks_own_is_refused() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(1, |rank| {
        let (stream, mut attention, sequence) = rank_behind_a_prompt(rank, &simple(1));
        let shape = attention.cache().shape();
        let other =
            PagedKvCache::new(stream.device(), attention.cache().pool().blocks(), BLOCK_SIZE, shape, PAD).unwrap();
        let own = std::mem::replace(attention.cache_mut(), other);
        let refused = forward(&stream, &mut attention, &sequence, 1).unwrap_err();
        assert!(refused.breaks(&rules::SETTINGS_CACHE), "{refused}");
        *attention.cache_mut() = own;
        forward(&stream, &mut attention, &sequence, 1).unwrap();
    });
}
