//! A rank that is refused tells the others, which do not wait for it.

use std::sync::Barrier;

use ascend_serving::ContextGraphs;

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

    /// How often the others are told.
    fn times(self) -> usize {
        if self == Self::Twice { 2 } else { 1 }
    }
}

#[test]
fn the_others_hear_of_a_refused_rank_and_repeat_their_layer() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    for (lapse, graphs) in Lapse::ALL.into_iter().flat_map(|lapse| [(lapse, false), (lapse, true)]) {
        as_ranks(3, |rank| {
            let stream = rank.device().stream().unwrap();
            let mut attention = attention::<bf16>(rank, &simple(3));
            let mut sequence = attention.sequence();
            attention.grow(&stream, &mut sequence, 40).unwrap();
            forward(&stream, &mut attention, &sequence, 40).unwrap();
            attention.grow(&stream, &mut sequence, 1).unwrap();
            let mut captured = graphs.then(|| attention.capture(&stream, [1], 50).unwrap());
            let forgetful = attention.rank() == 1;
            if forgetful {
                lapse.make(&mut attention, captured.as_mut(), &stream, &sequence);
            }
            let told = if forgetful { 0 } else { lapse.times() };
            let request = [BatchRequest::of(&sequence, 1)];
            let (query, key) = (ones(&stream, 1, 2), ones(&stream, 1, 1));
            let hears = |refused: Error| {
                assert!(refused.breaks(&rules::RANKS_BATCH), "{lapse:?}: {refused}");
                let text = refused.to_string();
                assert!(text.contains("step: begun on ranks 0, 2; refused on rank 1"), "{lapse:?}: {text}");
            };
            match &mut captured {
                Some(graphs) => {
                    let mut step = graphs.begin(&mut attention, &stream, &request).unwrap();
                    (0..told).for_each(|_| hears(step.forward(0, (&query, &key, &key)).unwrap_err()));
                    (0..LAYERS).for_each(|layer| drop(step.forward(layer, (&query, &key, &key)).unwrap()));
                    step.end().unwrap();
                }
                None => {
                    let mut step = attention.begin(&stream, &request).unwrap();
                    (0..told).for_each(|_| hears(step.forward(0, (&query, &key, &key)).unwrap_err()));
                    (0..LAYERS).for_each(|layer| drop(step.forward(layer, (&query, &key, &key)).unwrap()));
                    step.end().unwrap();
                }
            }
            stream.synchronize().unwrap();
            assert_eq!(attention.computed_tokens(&sequence), Ok(41));
        });
    }
}

/// A rank that is refused for good, and goes, has told the others so.
#[test]
fn a_rank_that_goes_after_its_refusal_is_named() {
    if harness::not_on_npu("hardware waits for half an hour") {
        return;
    }
    as_ranks(3, |rank| {
        let stream = rank.device().stream().unwrap();
        let mut attention = attention::<bf16>(rank, &simple(3));
        let mut sequence = attention.sequence();
        attention.grow(&stream, &mut sequence, 40).unwrap();
        if attention.rank() == 1 {
            let refused = attention.begin(&stream, &[]).map(drop).unwrap_err();
            assert!(refused.breaks(&rules::BATCH_EMPTY), "{refused}");
            return;
        }
        let text = forward(&stream, &mut attention, &sequence, 40).unwrap_err().to_string();
        assert!(text.contains("rank 1"), "{text}");
    });
}

#[test]
fn ranks_of_a_ring_hear_of_a_refused_one() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(3, |rank| {
        let (stream, number) = (rank.device().stream().unwrap(), rank.rank());
        let mut ring = ascend_serving::RingAttention::new(rank, AttentionShape::new(2, 1, DIM)).unwrap();
        let (query, key) = (ones(&stream, 4, 2), ones(&stream, 4, 1));
        let refused = match number {
            1 => ring.forward(&stream, 12, (&query, &key, &query)).unwrap_err(),
            _ => ring.forward(&stream, 12, (&query, &key, &key)).unwrap_err(),
        };
        match number {
            1 => assert!(refused.breaks(&rules::STEP_HEADS), "{refused}"),
            _ => assert!(refused.to_string().contains("begun on ranks 0, 2; refused on rank 1"), "{refused}"),
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
            (0..layers).for_each(|layer| drop(step.forward(layer, (&query, &key, &key)).unwrap()));
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
