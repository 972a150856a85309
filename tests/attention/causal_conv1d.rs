//! The causal convolution: random calls against the definition in double precision, one after the other, and refusals.

use ascend_attention::causal_conv::{CausalConv1d, ConvInputs, ConvSequence, ConvSequences};
use ascend_attention::spec::Cann;
use ascend_attention::{Stream, Tensor, bf16};
use proptest::prelude::*;

use crate::harness;
use harness::{filled, numbers};

/// A stream of the emulation in this process: of another library nobody has vouched for the operator.
pub(crate) fn stream() -> Option<Stream> {
    match harness::not_on_npu("the operator is of a package, for whose arguments nobody has vouched") {
        true => None,
        false => harness::stream_of(Cann::V9_1),
    }
}

fn halves(seed: u64, count: usize) -> Vec<bf16> {
    numbers(seed, count).into_iter().map(bf16::from_f32).collect()
}

fn wide(halves: &[bf16]) -> Vec<f64> {
    halves.iter().map(|half| half.to_f64()).collect()
}

/// What a sequence convolves to whose windows begin with `front`.
fn definition(
    front: &[f64],
    rows: &[f64],
    weight: &[f64],
    bias: Option<&[f64]>,
    silu: bool,
    channels: usize,
) -> Vec<f64> {
    let all = [front, rows].concat();
    let first = front.len() / channels;
    let value = |row: usize, channel: usize| {
        let window = &all[(row - first) * channels..][..weight.len()];
        let products = window.iter().zip(weight).skip(channel).step_by(channels).map(|(x, weight)| x * weight);
        let sum: f64 = products.sum::<f64>() + bias.map_or(0.0, |bias| bias[channel]);
        if silu { sum / (1.0 + (-sum).exp()) } else { sum }
    };
    let rows = first..all.len() / channels;
    rows.flat_map(|row| (0..channels).map(move |channel| (row, channel)))
        .map(|(row, channel)| value(row, channel))
        .collect()
}

fn close(got: &[bf16], want: &[f64]) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        prop_assert!((got.to_f64() - want).abs() <= 1e-5 + want.abs() * 4.1e-3, "{} is not {}", got, want);
    }
    Ok(())
}

/// The last rows of a front and rows, as many as the front has.
fn last(front: &[f64], rows: &[f64]) -> Vec<f64> {
    let all = [front, rows].concat();
    all[all.len() - front.len()..].to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Two calls one after the other, in which sequences go on from their lines or begin: as one whole sequence.
    #[test]
    fn calls_go_on_from_the_lines(
        width in 2usize..5,
        blocks in 1usize..6,
        room in 0usize..3,
        lengths in prop::collection::vec((0usize..7, 0usize..7, any::<bool>()), 1..5),
        silu in any::<bool>(),
        has_bias in any::<bool>(),
        seed in 0u64..1000,
    ) {
        let Some(stream) = stream() else { return Ok(()) };
        let (channels, front) = (16 * blocks, width - 1);
        prop_assume!(lengths.iter().any(|(first, ..)| *first > 0) && lengths.iter().any(|(_, second, _)| *second > 0));
        let lines = lengths.len() + 1;
        let line_rows = front + room;
        let before = halves(seed, lines * line_rows * channels);
        let pool = stream.upload(&before, [lines, line_rows, channels]).unwrap();
        let weight = halves(seed + 1, width * channels);
        let bias = halves(seed + 2, channels);
        let on_device = (stream.upload(&weight, [width, channels]).unwrap(), stream.upload(&bias, [channels]).unwrap());
        let (weight, bias) = (wide(&weight), has_bias.then(|| wide(&bias)));
        let rule = if silu { CausalConv1d::new().silu() } else { CausalConv1d::new() };
        // The lines from the last on.
        let line = |sequence: usize| lines - 1 - sequence;
        let own = |sequence: usize, count: usize| wide(&before[line(sequence) * line_rows * channels..][..count * channels]);
        let mut fronts: Vec<Vec<f64>> = (0..lengths.len())
            .map(|at| if lengths[at].2 { own(at, front) } else { vec![0.0; front * channels] })
            .collect();
        for step in 0..2 {
            let of = |at: usize| if step == 0 { lengths[at].0 } else { lengths[at].1 };
            // A sequence without rows in the first call leaves its line, so that it begins in the second.
            let began = |at: usize| lengths[at].2 || step == 1 && lengths[at].0 > 0;
            let sequences: Vec<_> = (0..lengths.len())
                .map(|at| ConvSequence { rows: of(at), line: Some(line(at)), continues: began(at) })
                .collect();
            let count: usize = sequences.iter().map(|sequence| sequence.rows).sum();
            let x = halves(seed + 3 + step, count * channels);
            let on_stream = stream.upload(&x, [count, channels]).unwrap();
            let mut inputs = ConvInputs::from((&on_stream, &on_device.0, &pool));
            if has_bias {
                inputs = inputs.bias(&on_device.1);
            }
            let plan = rule.plan(&ConvSequences::new(&stream, &sequences).unwrap(), inputs).unwrap();
            let y = plan.launch(&stream, inputs).unwrap().download(&stream).unwrap();
            let x = wide(&x);
            let mut from = 0;
            for (at, sequence) in sequences.iter().enumerate() {
                let rows = from * channels..(from + sequence.rows) * channels;
                let want = definition(&fronts[at], &x[rows.clone()], &weight, bias.as_deref(), silu, channels);
                close(&y[rows.clone()], &want)?;
                fronts[at] = last(&fronts[at], &x[rows]);
                from += sequence.rows;
            }
        }
        let after = wide(&pool.download(&stream).unwrap());
        for (at, &(first, second, _)) in lengths.iter().enumerate() {
            let place = line(at) * line_rows * channels;
            let want = if first + second == 0 { own(at, front) } else { fronts[at].clone() };
            prop_assert_eq!(&after[place..][..front * channels], &want[..]);
            let rest = wide(&before[place + front * channels..][..room * channels]);
            prop_assert_eq!(&after[place + front * channels..][..room * channels], &rest[..]);
        }
        // The line that no sequence owns stays as it was.
        prop_assert_eq!(&after[..line_rows * channels], &wide(&before[..line_rows * channels])[..]);
    }

    /// Steps of drafts, of which some are accepted: each goes on behind the accepted rows of the one before.
    #[test]
    fn accepted_rows_are_gone_on_from(
        steps in prop::collection::vec((1usize..4, 1usize..4), 1..6),
        seed in 0u64..1000,
    ) {
        let Some(stream) = stream() else { return Ok(()) };
        let channels = 32;
        let before = halves(seed, 2 * 5 * channels);
        let pool = stream.upload(&before, [2, 5, channels]).unwrap();
        let weight = halves(seed + 1, 4 * channels);
        let on_device = stream.upload(&weight, [4, channels]).unwrap();
        let weight = wide(&weight);
        let mut front = wide(&before[5 * channels..][..3 * channels]);
        let mut accepted = 1;
        for (step, (rows, accept)) in steps.into_iter().enumerate() {
            let x = halves(seed + 2 + step as u64, rows * channels);
            let on_stream = stream.upload(&x, [rows, channels]).unwrap();
            let sequence = ConvSequence { rows, line: Some(1), continues: true };
            let sequences = ConvSequences::new(&stream, &[sequence]).unwrap();
            let sequences = sequences.accepted(&stream, &[accepted]).unwrap();
            let inputs = (&on_stream, &on_device, &pool);
            let plan = CausalConv1d::new().plan(&sequences, inputs).unwrap();
            let y = plan.launch(&stream, inputs).unwrap().download(&stream).unwrap();
            let x = wide(&x);
            close(&y, &definition(&front, &x, &weight, None, false, channels))?;
            accepted = accept.min(rows);
            front = last(&front, &x[..accepted * channels]);
        }
    }
}

#[test]
fn sequences_that_lead_elsewhere_and_other_tensors_are_refused() {
    let Some(stream) = stream() else { return };
    let tensor = |shape: &[usize]| filled(&stream, bf16::ONE, shape);
    let (x, weight, pool) = (tensor(&[3, 16]), tensor(&[4, 16]), tensor(&[2, 3, 16]));
    let sequence = |rows, line| ConvSequence { rows, line: Some(line), continues: true };
    let plan = |sequences: &[ConvSequence], x: &Tensor<bf16>| {
        CausalConv1d::new().plan(&ConvSequences::new(&stream, sequences)?, (x, &weight, &pool)).map(drop)
    };
    let refused = |outcome: ascend_attention::Result<()>, words: &str| {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    };
    plan(&[sequence(2, 0), sequence(1, 1)], &x).unwrap();
    refused(plan(&[sequence(2, 0), sequence(1, 2)], &x), "line 2 of sequence 1");
    refused(plan(&[sequence(2, 0), sequence(1, 0)], &x), "causal_conv.shared_line");
    refused(plan(&[sequence(2, 0)], &x), "causal_conv.contents");
    refused(plan(&[sequence(usize::MAX, 0)], &x), "give numbers that INT32 counts");
    refused(plan(&[], &x), "leave the call out");
    refused(plan(&[sequence(3, 0)], &tensor(&[3, 24])), "causal_conv.channels");
    let accepted = |counts: &[usize], continues| {
        let sequences = [ConvSequence { continues, ..sequence(2, 0) }, sequence(1, 1)];
        let sequences = ConvSequences::new(&stream, &sequences)?.accepted(&stream, counts)?;
        CausalConv1d::new().plan(&sequences, (&x, &weight, &tensor(&[2, 5, 16]))).map(drop)
    };
    accepted(&[1, 3], true).unwrap();
    refused(accepted(&[1], true), "1 counts for 2 sequences");
    refused(accepted(&[1, 1], false), "all of which go on");
    refused(accepted(&[1, 4], true), "4 accepted rows of sequence 1");
    assert!(harness::stream_of(Cann::V8_1).is_none_or(|stream: Stream| {
        let x = stream.upload(&[bf16::ONE; 48], [3, 16]).unwrap();
        let sequences = ConvSequences::new(&stream, &[sequence(3, 0)]).unwrap();
        CausalConv1d::new().plan(&sequences, (&x, &x, &x)).is_err()
    }));
}
