//! The numbers of a position bias and the bytes of a mask, which no plan sees and a check of contents finds.

use ascend_attention::attention::{Inputs, PseShift};
use ascend_attention::flash::{FlashAttention, FlashInputs, FlashMask, InputLayout, PositionBias};
use ascend_attention::incre::IncreFlashAttention;
use ascend_attention::prompt::PromptFlashAttention;
use ascend_attention::{Error, FusedInferAttention, Layout, Mask, Stream, Tensor, f16};

use crate::harness;
use crate::harness::filled;

fn violated<T>(result: Result<T, Error>) -> Option<&'static str> {
    match result {
        Err(Error::Violation(violation)) => Some(violation.rule.id),
        Err(error) => panic!("{error}"),
        Ok(_) => None,
    }
}

const HEADS: usize = 2;
const ROWS: usize = 3;
const KEYS: usize = 70;

fn ones(stream: &Stream, shape: [usize; 4]) -> Tensor<f16> {
    filled(stream, f16::ONE, shape)
}

fn rows(stream: &Stream) -> Tensor<f16> {
    ones(stream, [1, HEADS, ROWS, 64])
}

fn keys(stream: &Stream) -> Tensor<f16> {
    ones(stream, [1, HEADS, KEYS, 64])
}

/// Where a number of a bias is.
fn place(head: usize, row: usize, key: usize) -> usize {
    (head * ROWS + row) * KEYS + key
}

/// A bias, and the lint that it breaks by its last part.
fn biases() -> Vec<(&'static str, Vec<f16>, Option<&'static str>)> {
    let with = |numbers: &[(usize, f16)]| {
        let mut bias = vec![f16::from_f32(-3.0); HEADS * ROWS * KEYS];
        numbers.iter().for_each(|&(at, number)| bias[at] = number);
        bias
    };
    let row = |number: f16, least: usize| (least..KEYS).map(|key| (place(1, 1, key), number)).collect::<Vec<_>>();
    vec![
        ("finite", with(&[(place(0, 0, 7), f16::MAX), (place(1, 2, 69), f16::MIN)]), None),
        ("-inf", with(&[(place(0, 0, 7), f16::NEG_INFINITY)]), Some("finite")),
        ("inf in the last place", with(&[(place(1, 2, 69), f16::INFINITY)]), Some("finite")),
        ("NaN in the first place", with(&[(0, f16::NAN)]), Some("finite")),
        ("all keys but one", with(&row(f16::MIN, 1)), None),
        ("every key of a row", with(&row(f16::MIN, 0)), Some("hidden_row")),
        ("every key of a row by -inf", with(&row(f16::NEG_INFINITY, 0)), Some("finite")),
    ]
}

#[test]
fn a_bias_for_inference_is_checked_by_each_operator() {
    let stream = harness::stream();
    let (rows, keys, row) = (rows(&stream), keys(&stream), ones(&stream, [1, HEADS, 1, 64]));
    for (name, bias, lint) in biases() {
        let id = lint.map(|lint| format!("pse_shift.{lint}"));
        let bias = stream.upload(&bias, [1, HEADS, ROWS, KEYS]).unwrap();
        let inputs = Inputs::new(&rows, &keys, &keys).pse_shift(PseShift::Added(&bias));
        let call = FusedInferAttention::new(Layout::Bnsd).heads(HEADS).scale(0.125);
        let plan = call.plan(inputs).unwrap();
        assert_eq!(violated(plan.check_contents(&stream, inputs)), id.as_deref(), "{name}");
        let prompt = PromptFlashAttention::new(Layout::Bnsd).heads(HEADS).scale(0.125).plan(inputs).unwrap();
        assert_eq!(violated(prompt.check_contents(&stream, inputs)), id.as_deref(), "{name}");

        // A single row reads the first row of its head alone.
        let first = lint.filter(|_| name.contains("-inf") && !name.contains("row") || name.contains("first"));
        let one = bias.narrow(2, 0..1).unwrap().contiguous(&stream).unwrap();
        let inputs = Inputs::new(&row, &keys, &keys).pse_shift(PseShift::Added(&one));
        let incre = IncreFlashAttention::new(Layout::Bnsd).heads(HEADS).scale(0.125).plan(inputs).unwrap();
        let id = first.map(|lint| format!("pse_shift.{lint}"));
        assert_eq!(violated(incre.check_contents(&stream, inputs)), id.as_deref(), "{name}");
    }
}

#[test]
fn a_bias_of_training_is_checked_on_either_side_of_the_scale() {
    let stream = harness::stream();
    let (rows, keys) = (rows(&stream), keys(&stream));
    let call = FlashAttention::new(InputLayout::Bnsd).heads(HEADS).scale(0.125);
    for (name, bias, lint) in biases() {
        let id = lint.map(|lint| format!("flash.pse_{lint}"));
        let bias = stream.upload(&bias, [1, HEADS, ROWS, KEYS]).unwrap();
        for bias in [PositionBias::BeforeScale(&bias), PositionBias::AfterScale(&bias)] {
            let inputs = FlashInputs::new(&rows, &keys, &keys).bias(bias);
            let plan = call.plan(inputs).unwrap();
            assert_eq!(violated(plan.check_contents(&stream, inputs)), id.as_deref(), "{name}");
            if let Some(id) = id.as_deref() {
                let allowed = call.clone().allow_lint(id).plan(inputs).unwrap();
                assert_eq!(violated(allowed.check_contents(&stream, inputs)), None, "{name}");
            }
        }
    }
}

/// Packed sequences of different lengths: the bias of each is checked in its own place.
#[test]
fn a_bias_of_packed_sequences_is_checked_to_its_end() {
    let stream = harness::stream();
    let packed = |rows: usize| stream.upload(&vec![f16::ONE; rows * 64], [rows, 1, 64]).unwrap();
    let (query, key) = (packed(5), packed(9));
    let call = FlashAttention::new(InputLayout::Tnd).heads(1).scale(0.125);
    let call = call.actual_seq_lengths([2, 5]).actual_seq_lengths_kv([3, 9]);
    let scores = 2 * 3 + 3 * 6;
    for at in 0..scores {
        let mut bias = vec![f16::ZERO; scores];
        bias[at] = f16::NEG_INFINITY;
        let bias = stream.upload(&bias, [scores]).unwrap();
        let inputs = FlashInputs::new(&query, &key, &key).bias(PositionBias::AfterScale(&bias));
        let found = call.plan(inputs).unwrap().check_contents(&stream, inputs).unwrap_err();
        let (sequence, row, key) = match at {
            0..6 => (0, at / 3, at % 3),
            _ => (1, (at - 6) / 6, (at - 6) % 6),
        };
        let place = format!("-inf for sequence {sequence}, head 0, row {row}, key {key}");
        assert!(found.to_string().contains(&place), "{found}");
    }
}

#[test]
fn what_the_fix_says_mends_the_call() {
    let stream = harness::stream();
    let (rows, keys) = (rows(&stream), keys(&stream));
    let mut numbers = vec![f16::ZERO; HEADS * ROWS * KEYS];
    numbers.iter_mut().skip(1).step_by(3).for_each(|number| *number = f16::NEG_INFINITY);
    let hidden: Vec<bool> = numbers.iter().take(ROWS * KEYS).map(|number| number.is_infinite()).collect();
    let plain = FusedInferAttention::new(Layout::Bnsd).heads(HEADS).scale(0.125);
    let given = |numbers: &[f16]| stream.upload(numbers, [1, HEADS, ROWS, KEYS]).unwrap();
    let check = |call: &FusedInferAttention, bias: &Tensor<f16>| {
        let inputs = Inputs::new(&rows, &keys, &keys).pse_shift(PseShift::Added(bias));
        let plan = call.plan(inputs).unwrap();
        let checked = plan.check_contents(&stream, inputs);
        checked.map(|()| plan.launch(&stream, inputs).unwrap().attention.download(&stream).unwrap())
    };
    let refused = check(&plain, &given(&numbers)).unwrap_err().to_string();
    assert!(refused.contains("row 0, key 1") && refused.contains("attenMask"), "{refused}");
    let allowed = plain.clone().allow_lint("pse_shift.finite");
    let allowed = allowed.plan(Inputs::new(&rows, &keys, &keys).pse_shift(PseShift::Added(&given(&numbers))));
    let inputs = given(&numbers);
    let inputs = Inputs::new(&rows, &keys, &keys).pse_shift(PseShift::Added(&inputs));
    allowed.unwrap().check_contents(&stream, inputs).unwrap();

    let lowest: Vec<f16> = numbers.iter().map(|number| if number.is_infinite() { f16::MIN } else { *number }).collect();
    let by_numbers = check(&plain, &given(&lowest)).unwrap();
    // The pattern of three is another in the second head, and the numbers of the tensors are equal.
    let mask = stream.upload(&hidden, [1, 1, ROWS, KEYS]).unwrap();
    let by_mask = plain.mask(Mask::all_mask(mask));
    let by_mask = check(&by_mask, &given(&vec![f16::ZERO; numbers.len()])).unwrap();
    assert_eq!(by_numbers, by_mask);
}

#[test]
fn a_mask_that_shows_what_its_mode_hides_is_found() {
    let stream = harness::stream();
    let (rows, keys) = (rows(&stream), keys(&stream));
    let call = FlashAttention::new(InputLayout::Bnsd).heads(HEADS).scale(0.125);
    for (shown, id) in [(10, None), (11, Some("flash.atten_mask_loose"))] {
        let hidden: Vec<bool> = (0..ROWS * KEYS).map(|at| at % KEYS > at / KEYS + shown).collect();
        let mask = stream.upload(&hidden, [1, 1, ROWS, KEYS]).unwrap();
        let mask = FlashMask::from(Mask::default_mask(mask, 100, 10));
        let plan = call.clone().mask(mask).plan((&rows, &keys, &keys)).unwrap();
        assert_eq!(violated(plan.check_contents(&stream, (&rows, &keys, &keys))), id);
    }
}

#[test]
fn other_tensors_than_planned_are_no_contents_of_the_plan() {
    let stream = harness::stream();
    let (rows, keys) = (rows(&stream), keys(&stream));
    let bias = ones(&stream, [1, HEADS, ROWS, KEYS]);
    let short = ones(&stream, [1, HEADS, ROWS, KEYS + 1]);
    let call = FusedInferAttention::new(Layout::Bnsd).heads(HEADS).scale(0.125);
    let inputs = Inputs::new(&rows, &keys, &keys);
    let plan = call.plan(inputs.pse_shift(PseShift::Added(&bias))).unwrap();
    for other in [inputs, inputs.pse_shift(PseShift::Added(&short))] {
        let refused = plan.check_contents(&stream, other).unwrap_err();
        assert!(refused.to_string().contains("pse_shift"), "{refused}");
    }
    // Nor is there anything to check without a bias.
    call.plan(inputs).unwrap().check_contents(&stream, inputs).unwrap();
}
