//! The causal convolution of CANN: random calls against the definition in double precision, and refusals.

use ascend_attention::case::{Recorded, Tolerance, Verdict, record_calls};
use ascend_attention::fused_causal_conv::{FusedCausalConv1d, FusedConvSequence, FusedConvSequences};
use ascend_attention::graph::{Capturing, Graph};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Stream, Tensor, bf16};
use proptest::prelude::*;

use crate::harness;
use harness::{filled, numbers};

const CHANNELS: usize = 64;

fn stream() -> Stream {
    harness::emulated_stream(Soc::Ascend950, Cann::V9_1)
}

fn halves(seed: u64, count: usize) -> Vec<bf16> {
    numbers(seed, count).into_iter().map(bf16::from_f32).collect()
}

/// What rows convolve to that have two rows in front of them; the first `zeroed` sums are zero.
fn definition(front: &[bf16], x: &[bf16], weight: &[bf16], residual: bool, zeroed: usize) -> Vec<f64> {
    let all: Vec<f64> = front.iter().chain(x).map(|half| half.to_f64()).collect();
    (0..x.len())
        .map(|at| {
            let taps = (0..3).map(|tap| all[at + tap * CHANNELS] * weight[tap * CHANNELS + at % CHANNELS].to_f64());
            let sum: f64 = if at / CHANNELS < zeroed { 0.0 } else { taps.sum() };
            if residual { sum + x[at].to_f64() } else { sum }
        })
        .collect()
}

fn close(got: &[bf16], want: &[f64]) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        prop_assert!((got.to_f64() - want).abs() <= 1e-5 + want.abs() * 4.1e-3, "{} is not {}", got, want);
    }
    Ok(())
}

/// The two rows in front of the next row behind these tokens; rows of zeros stand in front of the first one.
fn front(tokens: &[bf16]) -> Vec<bf16> {
    let all = [&[bf16::ZERO; 2 * CHANNELS], tokens].concat();
    all[all.len() - 2 * CHANNELS..].to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Steps of prompts, chunks and drafts of several sequences, of which the last rows may be taken back: as one whole
    /// sequence each, from new rows and in place.
    #[test]
    fn steps_go_on_behind_the_rows_that_stay(
        steps in prop::collection::vec(prop::collection::vec((1usize..12, 0usize..4), 3), 1..5),
        room in 0usize..4,
        residual in any::<bool>(),
        whole in any::<bool>(),
        in_place in any::<bool>(),
        seed in 0u64..1000,
    ) {
        let stream = stream();
        let line_rows = 2 + room;
        let pool = stream.upload(&halves(seed, 4 * line_rows * CHANNELS), [4, line_rows, CHANNELS]).unwrap();
        let weight = halves(seed + 1, 3 * CHANNELS);
        let weights = stream.upload(&weight, [3, CHANNELS]).unwrap();
        let mut rule = FusedCausalConv1d::new();
        if residual {
            rule = rule.residual();
        }
        if whole {
            rule = rule.whole_windows();
        }
        let mut tokens: [Vec<bf16>; 3] = Default::default();
        let mut rejected = [0; 3];
        for (number, step) in steps.iter().enumerate() {
            let lines = [[3], [0], [2]];
            let sequences: Vec<_> = (0..3)
                .map(|at| FusedConvSequence {
                    rows: step[at].0,
                    computed: tokens[at].len() / CHANNELS,
                    rejected: rejected[at],
                    lines: &lines[at],
                })
                .collect();
            let count: usize = step.iter().map(|(rows, _)| rows).sum();
            let x = halves(seed + 2 + number as u64, count * CHANNELS);
            let on_device = stream.upload(&x, [count, CHANNELS]).unwrap();
            let inputs = (&on_device, &weights, &pool);
            let sequences = FusedConvSequences::new(&stream, line_rows, &sequences).unwrap();
            let y = if in_place {
                rule.clone().in_place().plan(&sequences, inputs).unwrap().launch(&stream, inputs).unwrap();
                on_device.download(&stream).unwrap()
            } else {
                rule.plan(&sequences, inputs).unwrap().launch(&stream, inputs).unwrap().download(&stream).unwrap()
            };
            let mut from = 0;
            for (at, &(rows, back)) in step.iter().enumerate() {
                let own = from * CHANNELS..(from + rows) * CHANNELS;
                let computed = tokens[at].len() / CHANNELS;
                let zeroed = if whole { 2usize.saturating_sub(computed) } else { 0 };
                let want = definition(&front(&tokens[at]), &x[own.clone()], &weight, residual, zeroed);
                close(&y[own.clone()], &want)?;
                // A line goes back to where its sequence has begun, but no further.
                rejected[at] = back.min(room).min(rows.saturating_sub(1));
                let stay = rows - rejected[at];
                tokens[at].extend_from_slice(&x[own][..stay * CHANNELS]);
                from += rows;
            }
        }
        // The line that no sequence owns stays as it was.
        let rest = line_rows * CHANNELS..2 * line_rows * CHANNELS;
        let (after, before) = (pool.download(&stream).unwrap(), halves(seed, 4 * line_rows * CHANNELS));
        prop_assert_eq!(&after[rest.clone()], &before[rest]);
    }

    /// A sequence, of which the last rows may be taken back, leaves rows in front of each block's end; another one
    /// begins behind any of these blocks.
    #[test]
    fn sequences_begin_behind_blocks_of_others(
        chunks in prop::collection::vec((1usize..20, 0usize..5), 1..5),
        size in 2usize..9,
        room in 0usize..4,
        rows in 1usize..12,
        hit in 0usize..8,
        seed in 0u64..1000,
    ) {
        let stream = stream();
        let line_rows = 2 + room;
        let pool = stream.upload(&halves(seed, 100 * line_rows * CHANNELS), [100, line_rows, CHANNELS]).unwrap();
        let weight = halves(seed + 1, 3 * CHANNELS);
        let weights = stream.upload(&weight, [3, CHANNELS]).unwrap();
        // Blocks from the last line on.
        let lines: Vec<usize> = (0..50).map(|block| 99 - block).collect();
        let launch = |sequence: FusedConvSequence<'_>, x: &[bf16]| {
            let on_device = stream.upload(x, [x.len() / CHANNELS, CHANNELS]).unwrap();
            let inputs = (&on_device, &weights, &pool);
            let sequences = FusedConvSequences::in_blocks(&stream, line_rows, size, &[sequence]).unwrap();
            let plan = FusedCausalConv1d::new().plan(&sequences, inputs).unwrap();
            plan.launch(&stream, inputs).unwrap().download(&stream).unwrap()
        };
        let (mut x, mut rejected): (Vec<bf16>, usize) = (Vec::new(), 0);
        for (number, (rows, back)) in chunks.into_iter().enumerate() {
            let computed = x.len() / CHANNELS;
            let own = halves(seed + 4 + number as u64, rows * CHANNELS);
            let sequence = FusedConvSequence { rows, computed, rejected, lines: &lines };
            close(&launch(sequence, &own), &definition(&front(&x), &own, &weight, false, 0))?;
            rejected = back.min(room).min(rows - 1);
            x.extend_from_slice(&own[..(rows - rejected) * CHANNELS]);
        }
        // As many whole blocks as are shared, then blocks of the second sequence's own.
        let shared = hit % (x.len() / CHANNELS / size + 1);
        let computed = shared * size;
        let own: Vec<usize> = (0..(computed + rows).div_ceil(size)).map(|block| if block < shared { 99 - block } else { block }).collect();
        let other = halves(seed + 3, rows * CHANNELS);
        let sequence = FusedConvSequence { rows, computed, rejected: 0, lines: &own };
        let want = definition(&front(&x[..computed * CHANNELS]), &other, &weight, false, 0);
        close(&launch(sequence, &other), &want)?;
    }
}

#[test]
fn sequences_that_lead_elsewhere_and_other_tensors_are_refused() {
    let stream = stream();
    let tensor = |shape: &[usize]| filled(&stream, bf16::ONE, shape);
    let (x, weight, pool) = (tensor(&[3, CHANNELS]), tensor(&[3, CHANNELS]), tensor(&[2, 4, CHANNELS]));
    let sequence = |rows, lines| FusedConvSequence { rows, computed: 9, rejected: 0, lines };
    let plan = |sequences: &[FusedConvSequence<'_>], x: &Tensor<bf16>| {
        let sequences = FusedConvSequences::new(&stream, 4, sequences)?;
        FusedCausalConv1d::new().plan(&sequences, (x, &weight, &pool)).map(drop)
    };
    let refused = |outcome: ascend_attention::Result<()>, words: &str| {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    };
    plan(&[sequence(2, &[0]), sequence(1, &[1])], &x).unwrap();
    plan(&[sequence(2, &[0]), sequence(1, &[])], &x).unwrap();
    refused(plan(&[sequence(2, &[0]), sequence(1, &[2])], &x), "line 2 of sequence 1");
    refused(plan(&[sequence(2, &[0]), sequence(1, &[0])], &x), "fused_conv.shared_line");
    refused(plan(&[sequence(1, &[0]), sequence(1, &[]), sequence(1, &[1])], &x), "left out between others");
    refused(plan(&[sequence(2, &[0])], &x), "fused_conv.contents");
    refused(plan(&[sequence(3, &[0]), sequence(0, &[1])], &x), "fused_conv.left_out");
    refused(plan(&[sequence(3, &[0, 1])], &x), "2 lines for sequence 0, allowed: 1, or none to leave it out");
    refused(plan(&[sequence(usize::MAX, &[0])], &x), "give numbers that INT32 counts");
    refused(plan(&[], &x), "leave the call out");
    refused(plan(&[sequence(3, &[0])], &tensor(&[3, 72])), "fused_conv.channels");
    refused(plan(&[sequence(3, &[0])], &tensor(&[1, 3, CHANNELS])), "view the rows as [rows, channels]");
    refused(plan(&[FusedConvSequence { rejected: 3, ..sequence(3, &[0]) }], &x), "3 rejected rows of sequence 0");
    let begins = FusedConvSequence { rejected: 1, computed: 0, ..sequence(3, &[0]) };
    refused(plan(&[begins], &x), "give 0: a sequence that begins");
    let other_lines = FusedConvSequences::new(&stream, 3, &[sequence(3, &[0])]).unwrap();
    let given = FusedCausalConv1d::new().plan(&other_lines, (&x, &weight, &pool)).map(drop);
    refused(given, "4 rows of a line, allowed: 3, for which the sequences were made");
    let blocks = |size, lines: &'static [usize]| {
        let sequences = FusedConvSequences::in_blocks(&stream, 4, size, &[sequence(3, lines)])?;
        FusedCausalConv1d::new().plan(&sequences, (&x, &weight, &pool)).map(drop)
    };
    blocks(8, &[0, 1]).unwrap();
    refused(blocks(8, &[0]), "1 lines for sequence 0, allowed: 2 or more");
    refused(blocks(8, &[]), "with blocks padding has a line, too");
    let rejected = FusedConvSequence { rows: 1, computed: 7, rejected: 2, lines: &[0] };
    refused(FusedConvSequences::in_blocks(&stream, 4, 8, &[rejected]).map(drop), "1 lines for sequence 0, allowed: 2");
    let grows = FusedConvSequences::in_blocks(&stream, 4, 8, &[sequence(3, &[0, 1])]).unwrap();
    let longer = FusedConvSequence { computed: 20, ..sequence(3, &[0, 1, 2]) };
    refused(grows.overwrite(&stream, &[longer]), "sequence 0 of 3 blocks, allowed: 2, the most lines");
    grows.overwrite(&stream, &[sequence(3, &[1, 0, 5, 6])]).unwrap();
    refused(blocks(1, &[0; 12]), "2 or more");
    refused(blocks(11, &[0, 0]), "line 0 of block 1 of sequence 0 and block 0 of sequence 0");
    let of_blocks =
        |sequences: &[FusedConvSequence<'_>]| FusedConvSequences::in_blocks(&stream, 4, 8, sequences).map(drop);
    let other = FusedConvSequence { rows: 2, computed: 0, rejected: 0, lines: &[1] };
    refused(of_blocks(&[sequence(3, &[1, 2]), other]), "line 1 of block 0 of sequence 1 and block 0 of sequence 0");
    of_blocks(&[sequence(3, &[1, 2]), sequence(3, &[1, 3])]).unwrap();
    // Lines that share memory with rows or weights.
    let memory = filled(&stream, bf16::ONE, [60, CHANNELS]);
    let lines = memory.narrow(0, 3..11).unwrap().reshape([2, 4, CHANNELS]).unwrap();
    let rows = memory.narrow(0, 4..7).unwrap();
    let sequences = FusedConvSequences::new(&stream, 4, &[sequence(3, &[0])]).unwrap();
    for inputs in [(&rows, &weight, &lines), (&x, &rows, &lines)] {
        let new = FusedCausalConv1d::new().plan(&sequences, inputs).unwrap();
        refused(new.launch(&stream, inputs).map(drop), "argument.memory");
        let in_place = FusedCausalConv1d::new().in_place().plan(&sequences, inputs).unwrap();
        refused(in_place.launch(&stream, inputs), "argument.memory");
    }

    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let x = filled(&stream, bf16::ONE, [3, CHANNELS]);
    let sequences = FusedConvSequences::new(&stream, 2, &[sequence(3, &[0])]).unwrap();
    let inputs = (&x, &x, &filled(&stream, bf16::ONE, [1, 2, CHANNELS]));
    refused(FusedCausalConv1d::new().plan(&sequences, inputs).map(drop), "fused_conv.product");
}

#[test]
fn captured_launches_read_the_sequences_that_replace_theirs() {
    let stream = stream();
    let sequence = |rows, lines| FusedConvSequence { rows, computed: 9, rejected: 0, lines };
    let pool = stream.upload(&halves(1, 4 * 2 * CHANNELS), [4, 2, CHANNELS]).unwrap();
    let weight = halves(2, 3 * CHANNELS);
    let weights = stream.upload(&weight, [3, CHANNELS]).unwrap();
    let x = halves(3, 3 * CHANNELS);
    let on_device = stream.upload(&x, [3, CHANNELS]).unwrap();
    let inputs = (&on_device, &weights, &pool);
    let sequences = FusedConvSequences::new(&stream, 2, &[sequence(2, &[0]), sequence(1, &[1])]).unwrap();
    let plan = FusedCausalConv1d::new().plan(&sequences, inputs).unwrap();
    let y = plan.output::<bf16>().unwrap();
    let record = |capture: &Capturing<'_>, (): &()| plan.launch_into(capture, inputs, &mut y.clone());
    let (mut graph, ()) = Graph::capture(stream.device(), (), record).unwrap();
    let fronts = pool.download(&stream).unwrap();
    sequences.overwrite(&stream, &[sequence(2, &[3]), sequence(1, &[2])]).unwrap();
    let update = graph.update();
    graph.launch(&stream, update).unwrap();
    let got = y.download(&stream).unwrap();
    let front = |line: usize| &fronts[line * 2 * CHANNELS..][..2 * CHANNELS];
    close(&got[..2 * CHANNELS], &definition(front(3), &x[..2 * CHANNELS], &weight, false, 0)).unwrap();
    close(&got[2 * CHANNELS..], &definition(front(2), &x[2 * CHANNELS..], &weight, false, 0)).unwrap();
    // The kernel for few rows has room for two rows of a sequence.
    for (others, words) in [
        (vec![sequence(3, &[0][..]), sequence(0, &[])], "3 rows of sequence 0, allowed: 1 to 2; fix: pass 3 or more"),
        (vec![sequence(2, &[0]), sequence(1, &[4])], "line 4 of sequence 1, allowed: 0 to 3; fix: name a line"),
        (vec![sequence(3, &[0])], "1 in place of 2 sequences"),
    ] {
        let text = sequences.overwrite(&stream, &others).unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    }
    // Nothing was replaced.
    pool.overwrite(&stream, &fronts).unwrap();
    let update = graph.update();
    graph.launch(&stream, update).unwrap();
    assert_eq!(y.download(&stream).unwrap(), got);
}

#[test]
fn recorded_calls_replay_and_those_with_padding_have_no_data() {
    let stream = stream();
    let tensor = |seed, shape: [usize; 2]| stream.upload(&halves(seed, shape[0] * shape[1]), shape).unwrap();
    let (x, weight) = (tensor(1, [3, CHANNELS]), tensor(2, [3, CHANNELS]));
    let pool = tensor(3, [4, CHANNELS]).reshape([2, 2, CHANNELS]).unwrap();
    let inputs = (&x, &weight, &pool);
    let sequence = |rows, lines| FusedConvSequence { rows, computed: 9, rejected: 0, lines };
    let recorded = |second: &'static [usize]| {
        let all = [sequence(2, &[0]), sequence(1, second)];
        let plan = FusedCausalConv1d::new().plan(&FusedConvSequences::new(&stream, 2, &all)?, inputs)?;
        let (outcome, mut calls) = record_calls(Tolerance { atol: 1e-3, rtol: 1e-2 }, || plan.launch(&stream, inputs));
        outcome.map(|_| calls.remove(0))
    };
    let whole = recorded(&[1]).unwrap();
    assert_eq!(whole.case().unwrap().launch(&stream).unwrap().verdict, Verdict::Passed);
    let Recorded::Parameters { why, .. } = recorded(&[]).unwrap() else { panic!("padding is not specified") };
    assert!(why.contains("belong to no sequence"), "{why}");

    // A refusal by a lint on numbers is that of its replay, too.
    let all = [sequence(2, &[0]), sequence(1, &[0])];
    let sequences = FusedConvSequences::new(&stream, 2, &all).unwrap();
    let (outcome, calls) = record_calls(Tolerance::default(), || FusedCausalConv1d::new().plan(&sequences, inputs));
    assert!(outcome.unwrap_err().to_string().contains("fused_conv.shared_line"));
    let outcome = calls[0].case().unwrap().launch(&stream).unwrap();
    assert_eq!(outcome.verdict, Verdict::Passed, "{outcome:?}");
}
