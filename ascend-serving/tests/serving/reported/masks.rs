//! Masks that are ignored, dropped, changed, too large, or of a form that the operator reads differently.

use approx::assert_abs_diff_eq;
use std::num::NonZeroUsize;

use ascend_attention::attention::{Inputs, PseShift};
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::spec::DType;
use ascend_attention::{
    CausalOrigin, Error, FusedInferAttention, Layout, Mask, Output, Plan, SparseMode, Stream, Tensor, f16,
};
use ascend_serving::{AttentionMetadata, Causality, rules};

use super::{engine, harness, request, rows, settings, settings_of};

const HEADS: usize = 2;
const ROWS: usize = 4;
const KEYS: usize = 600;
const DIM: usize = 64;

/// A call of several query rows over 600 keys, whose values are 1 up to the 500th and 9 behind.
struct Call {
    stream: Stream,
    query: Tensor<f16>,
    key: Tensor<f16>,
    value: Tensor<f16>,
}

impl Call {
    fn new(rows: usize) -> Self {
        let stream = harness::stream();
        let values: Vec<f16> = (0..HEADS * KEYS * DIM)
            .map(|at| at / DIM % KEYS)
            .map(|key| f16::from_f32(if key < 500 { 1.0 } else { 9.0 }))
            .collect();
        Self {
            query: harness::tensor(&stream, [1, HEADS, rows, DIM]),
            key: harness::tensor(&stream, [1, HEADS, KEYS, DIM]),
            value: stream.upload(&values, [1, HEADS, KEYS, DIM]).unwrap(),
            stream,
        }
    }

    fn with(mask: Mask) -> FusedInferAttention {
        FusedInferAttention::new(Layout::Bnsd).heads(HEADS).scale(0.125).mask(mask)
    }

    fn plan(&self, mask: Mask) -> Result<Plan, Error> {
        Self::with(mask).plan((&self.query, &self.key, &self.value))
    }

    fn numbers(&self, plan: &Plan) -> Vec<f64> {
        let output = plan.launch(&self.stream, (&self.query, &self.key, &self.value));
        let attention = output.unwrap().attention.download(&self.stream).unwrap();
        attention.into_iter().map(f16::to_f64).collect()
    }
}

/// The rule that a call breaks.
#[track_caller]
fn broken<T: std::fmt::Debug>(outcome: Result<T, Error>) -> &'static str {
    match outcome {
        Err(Error::Violation(violation)) => violation.rule.id,
        other => panic!("{other:?}"),
    }
}

/// 15503: one row of a mask, or of a position bias, for all query rows is ignored or misread from some length on. It is
/// refused, at every length; a host mask has every row, and holds at all of them.
#[test]
fn one_mask_row_for_many_query_rows() {
    let call = Call::new(ROWS);
    for keys in [256, 512, KEYS, 1024] {
        for shape in [&[1, 1, 1, keys][..], &[1, 1, keys], &[1, keys]] {
            let row = call.stream.upload(&vec![false; keys], shape).unwrap();
            let all = Mask::ALL_TOKENS;
            for mask in [Mask::all_mask(row.clone()), Mask::default_mask(row, all, all)] {
                assert!(broken(call.plan(mask)).starts_with("atten_mask.full"));
            }
        }
    }
    let bias = |heads: usize, rows: usize| {
        let zeros = vec![f16::ZERO; heads * rows * KEYS];
        call.stream.upload(&zeros, [1, heads, rows, KEYS]).unwrap()
    };
    for (heads, rows) in [(1, 1), (1, ROWS), (HEADS, 1)] {
        let bias = bias(heads, rows);
        let inputs = Inputs::new(&call.query, &call.key, &call.value).pse_shift(PseShift::Added(&bias));
        let outcome = Call::with(Mask::none()).plan(inputs);
        // From 9.1 on the operator takes one row for all, of which it is not documented what it reads.
        let expected = match (heads, rows) {
            (HEADS, 1) => ["pse_shift.shape", "pse_shift.one_row_taken"],
            _ => ["pse_shift.shape"; 2],
        };
        let rule = broken(outcome);
        assert!(expected.contains(&rule), "{rule}");
    }
    let mask = HostMask::from_fn(ROWS, KEYS, MaskForm::BOOL, |_, key| key < 500).unwrap();
    let mask = call.stream.device().masks().custom(&mask).unwrap();
    let plan = call.plan(mask).unwrap();
    assert!(call.numbers(&plan).iter().all(|x| *x == 1.0));
}

/// 3454, 3002, 3357: a mask of the longest length a model has, squared. The template has 4 MiB at every length, and a
/// full mask beyond the bound is refused before memory is asked for.
#[test]
fn masks_of_the_longest_length_squared() {
    let device = harness::device();
    let masks = device.masks();
    let origin = CausalOrigin::RightDown;
    assert_eq!(masks.causal(origin).unwrap().tensor_bytes(), 4 << 20);
    let error = masks.causal_full(origin, 1 << 20, 1 << 20).unwrap_err();
    let Error::Violation(violation) = &error else {
        panic!("{error}");
    };
    assert!(violation.given.contains("1048576"), "{error}");
    assert!(violation.allowed.contains("bytes"), "{error}");

    // Nor has a step behind a million cached tokens a larger one.
    let row: Vec<usize> = (0..8000).collect();
    let batch = [request(1_000_000, 3, &row)];
    let settings = settings_of(8000, 128, Causality::Causal);
    let metadata = AttentionMetadata::new(&batch, settings).unwrap();
    let mask = metadata.settings().causality.mask(&masks).unwrap();
    assert_eq!(mask.tensor_bytes(), 4 << 20);
}

/// 1678, 2428, 2442: a mask that everybody shares is changed in place by one. Nothing writes to it.
#[test]
fn a_shared_mask_changed_in_place() {
    let call = Call::new(ROWS);
    let masks = call.stream.device().masks();
    let mask = masks.causal(CausalOrigin::RightDown).unwrap();
    let tensor: Tensor<i8> = mask.tensor().unwrap().clone().typed().unwrap();
    let before = tensor.download(&call.stream).unwrap();
    let refused = |outcome: Result<(), Error>| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("which all callers share"), "{error}");
    };
    refused(tensor.overwrite(&call.stream, &vec![0; before.len()]));
    let host = call.stream.device().host_buffer(before.len()).unwrap();
    refused(tensor.overwrite_async(&call.stream, host).map(drop));
    let zeros = call.stream.upload(&vec![0i8; 2048], [1, 2048]).unwrap();
    let row = tensor.narrow(0, 5..6).unwrap();
    refused(row.copy_from(&call.stream, &zeros));
    // Nor does an operator whose output is there.
    let form = MaskForm::ones(DType::Float16).unwrap();
    let matrix = masks.causal_matrix(CausalOrigin::LeftUp, ROWS, HEADS * DIM, form);
    let place = matrix.unwrap().reshape([1, HEADS, ROWS, DIM]).unwrap();
    let plan = call.plan(mask.clone()).unwrap();
    let mut output = Output { attention: place.typed().unwrap(), softmax_lse: None };
    let tensors = (&call.query, &call.key, &call.value);
    refused(plan.launch_into(&call.stream, (tensors.0, tensors.1, tensors.2), &mut output));
    assert_eq!(tensor.download(&call.stream).unwrap(), before);

    // A mask of one's own is one's own.
    let own = HostMask::from_fn(ROWS, KEYS, MaskForm::INT8, |_, _| true).unwrap();
    let own = masks.custom(&own).unwrap();
    let tensor = own.tensor().unwrap();
    tensor.overwrite_bytes(&call.stream, &vec![0; tensor.len()]).unwrap();
}

/// 4410, 6573, sgl-project/sglang 14271: masks of a type that the operator does not take hang it. They are refused
/// before anything is launched.
#[test]
fn masks_of_the_wrong_dtype() {
    let call = Call::new(ROWS);
    let shape = [ROWS, KEYS];
    let halves = call.stream.upload(&[f16::ZERO; ROWS * KEYS], shape);
    let floats = call.stream.upload(&[0f32; ROWS * KEYS], shape);
    let words = call.stream.upload(&[0i32; ROWS * KEYS], shape);
    for tensor in [halves.unwrap().into(), floats.unwrap().into(), ascend_attention::AnyTensor::from(words.unwrap())] {
        let error = call.plan(Mask::all_mask(tensor)).unwrap_err();
        assert!(error.to_string().contains("BOOL, INT8 or UINT8"), "{error}");
        assert_eq!(broken::<()>(Err(error)), "dtype.registered");
    }
    // A host mask of any form becomes one that is taken.
    let lowest = MaskForm::lowest(DType::Float16).unwrap();
    let mask = HostMask::from_fn(ROWS, KEYS, lowest, |_, key| key < 500).unwrap();
    let mask = call.stream.device().masks().custom(&mask).unwrap();
    assert!(call.plan(mask).is_ok());
}

/// sgl-project/sglang 31948: a mask that a call has no use for is dropped without a word. Packed calls refuse one of
/// their own making, and single rows refuse the mode that would misread it.
#[test]
fn masks_that_are_dropped() {
    let call = Call::new(ROWS);
    let masks = call.stream.device().masks();
    let packed = |tensor: &Tensor<f16>, rows: usize| {
        let data: Vec<_> = tensor.download(&call.stream).unwrap();
        let data: Vec<_> = data.iter().map(|x| ascend_attention::bf16::from_f32(x.to_f32())).collect();
        call.stream.upload(&data, [rows, HEADS, DIM]).unwrap()
    };
    let (query, key) = (packed(&call.query, ROWS), packed(&call.key, KEYS));
    let mask = HostMask::from_fn(ROWS, KEYS, MaskForm::INT8, |_, key| key < 500).unwrap();
    let mask = masks.custom(&mask).unwrap();
    let outcome = FusedInferAttention::new(Layout::Tnd)
        .scale(1.0)
        .heads(HEADS)
        .kv_heads(HEADS)
        .actual_seq_lengths([ROWS])
        .actual_seq_lengths_kv([KEYS])
        .mask(mask.clone())
        .plan((&query, &key, &key));
    assert!(["packed.sparse_mode", "atten_mask.full"].contains(&broken(outcome)));

    // A layout with a batch axis uses it: what is hidden has no part in the result.
    let plan = call.plan(mask).unwrap();
    assert!(call.numbers(&plan).iter().all(|x| *x == 1.0));
    let every = call.plan(Mask::none()).unwrap();
    assert!(call.numbers(&every).iter().all(|x| *x > 1.0));

    let single = Call::new(1);
    let compressed = masks.causal(CausalOrigin::LeftUp).unwrap();
    let rule = broken(single.plan(compressed));
    assert!(["atten_mask", "sparse_mode"].contains(&rule.split('.').next().unwrap()), "{rule}");
}

/// 13699: mode 0 without a mask attends to everything. A causal step never says it.
#[test]
fn causal_without_a_mask() {
    let device = harness::device();
    let window = Causality::Window(NonZeroUsize::MIN);
    for causality in [Causality::Causal, window] {
        let mask = causality.mask(&device.masks()).unwrap();
        assert_ne!(mask.sparse_mode(), SparseMode::DefaultMask);
        assert!(mask.tensor().is_some());
    }
}

/// 8508, 8387, sgl-project/sglang 24582: a window by the wrong mode or mask. There is one mask and one mode for all
/// windows.
#[test]
fn windows_take_mode_4_and_the_standard_mask() {
    let device = harness::device();
    let masks = device.masks();
    let causal = Causality::Causal.mask(&masks).unwrap();
    for keys in [1, 100, 4096] {
        let window = Causality::Window(NonZeroUsize::new(keys).unwrap());
        let mask = window.mask(&masks).unwrap();
        assert_eq!(mask.sparse_mode(), SparseMode::Band);
        let tensor = |mask: &ascend_attention::Mask| mask.tensor().unwrap().as_raw();
        assert_eq!(tensor(&mask), tensor(&causal));
    }
}

/// 8210, 8057, vllm-project/vllm 3385: a window of w shows w + 1 keys.
#[test]
fn window_off_by_one() {
    let device = harness::device();
    let window = Causality::Window(NonZeroUsize::new(7).unwrap());
    let mask = window.mask(&device.masks()).unwrap();
    assert_eq!((mask.pre_tokens(), mask.next_tokens()), (6, 0));
}

/// 15151: captured calls let the window win over a layer that is not causal, eager ones the other way round.
#[test]
fn window_in_a_layer_that_is_not_causal() {
    let error = Causality::from_flags(false, Some(128)).unwrap_err();
    assert_eq!(error.rule, &rules::MASK_WINDOW);
    let none = Causality::from_flags(true, Some(0)).unwrap_err();
    assert_eq!(none.rule, &rules::MASK_WINDOW);
}

/// 6803, 3024: a mask made for fewer tokens than the sequence has. The compressed mask serves every length.
#[test]
fn masks_of_a_fixed_length() {
    let stream = harness::stream();
    let mut engine = engine(&stream);
    let row: Vec<usize> = (0..24).collect();
    let batch = [request(2990, 30, &row)];
    let metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
    let mut step = engine.begin(&stream, &metadata).unwrap();
    let tokens = rows(&stream, 30);
    let output = step.forward(0, (&tokens, &tokens, &tokens)).unwrap();
    let attention = output.download(&stream).unwrap();
    // 2990 keys and values of 0, and those of the step: the last row sees all thirty ones.
    let one = 8f64.exp();
    let want = 30.0 * one / (30.0 * one + 2990.0);
    assert_abs_diff_eq!(attention.last().unwrap().to_f64(), want, epsilon = 1e-2);
}
