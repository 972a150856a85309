//! Results that are no numbers, or other numbers than they should be.

use approx::{abs_diff_eq, assert_abs_diff_eq};
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::merge::{HostPart, LseLog2, LseNat, merge_on_host};
use ascend_attention::spec::DType;
use ascend_attention::{FusedInferAttention, InnerPrecise, Layout, RangeReport, Stream, Tensor, bf16, f16};
use ascend_serving::kv::{PagedKvCache, Sequence};
use ascend_serving::{AttentionMetadata, BatchRequest, Causality};

use super::{DIM, engine, harness, settings};

/// flashinfer-ai/flashinfer 4051, 4452, vllm-project/vllm 39148: NaN from rows that see nothing, from merging two parts
/// without keys, and from -inf in a mask.
#[test]
fn rows_that_see_nothing() {
    let masked = |form| HostMask::from_fn(2, 3, form, |row, _| row == 0);
    let infinite = MaskForm::infinite(DType::Float16).unwrap();
    assert!(masked(infinite).is_err());
    // What would round to -inf is no finite mask either.
    for value in [f32::MIN, -1e6] {
        assert!(MaskForm::additive(DType::Float16, value).is_err());
    }

    let stream = harness::stream();
    let x = harness::tensor(&stream, [1, 1, 2, 64]);
    let keys = harness::tensor(&stream, [1, 1, 3, 64]);
    let mask = masked(MaskForm::BOOL).unwrap();
    let plan = FusedInferAttention::new(Layout::Bnsd)
        .scale(1.0)
        .mask(stream.device().masks().custom(&mask).unwrap())
        .inner_precise(InnerPrecise::HighPrecisionCorrected)
        .softmax_lse(true)
        .plan((&x, &keys, &keys))
        .unwrap();
    let output = plan.launch(&stream, (&x, &keys, &keys)).unwrap();
    let attention = output.attention.download(&stream).unwrap();
    assert!(attention[..64].iter().all(|x| x.is_finite() && *x != f16::ZERO));
    assert_eq!(attention[64..], [f16::ZERO; 64]);
    // The operator marks such a row with +inf; a merge takes it for empty, and two of them for zeros.
    let lse = output.softmax_lse.unwrap().download(&stream).unwrap();
    assert_eq!(lse[1], f32::INFINITY);
    let row = HostPart { attention: &[0f32; 64][..], softmax_lse: LseNat(&lse[1..]) };
    let merged = merge_on_host(&[row, row]).unwrap();
    assert_eq!(merged.attention, [0f32; 64]);
    assert_eq!(merged.softmax_lse.0, [f32::NEG_INFINITY]);

    let report = RangeReport::of(&[1.0, f64::NAN, 2.0], 1e4);
    assert_eq!((report.nan, report.first), (1, Some(1)));
}

/// Attention of a prompt that is computed in chunks.
fn in_chunks(stream: &Stream, tokens: &[Tensor<bf16>; 3], chunks: &[usize]) -> Vec<f64> {
    let mut engine = engine(stream);
    let pool = PagedKvCache::pool(engine.cache()).clone();
    let mut sequence = Sequence::new(&pool);
    let mut all = Vec::new();
    let mut from = 0;
    for &new in chunks {
        let _ = sequence.grow(new).unwrap();
        let batch = [BatchRequest::of(&sequence, new)];
        let metadata = AttentionMetadata::new(&batch, settings(Causality::Causal)).unwrap();
        let part = |tensor: &Tensor<bf16>| tensor.narrow(0, from..from + new).unwrap();
        let [query, key, value] = tokens.each_ref().map(part);
        let mut step = engine.begin(stream, &metadata).unwrap();
        let output = step.forward(0, (&query, &key, &value)).unwrap();
        let rows = output.download(stream).unwrap();
        all.extend(rows.into_iter().map(bf16::to_f64));
        from += new;
    }
    all
}

/// sgl-project/sglang 22020, 12589: a prompt in chunks that is not the same as the prompt at once.
#[test]
fn prompts_in_chunks_and_at_once() {
    let stream = harness::stream();
    let len = 300;
    let tokens = [1, 2, 3].map(|seed| {
        let numbers = harness::numbers(seed, len * DIM);
        let data: Vec<_> = numbers.into_iter().map(bf16::from_f32).collect();
        stream.upload(&data, [len, 1, DIM]).unwrap()
    });
    let whole = in_chunks(&stream, &tokens, &[len]);
    for chunks in [&[100, 200][..], &[1, 1, 298], &[128, 128, 44], &[299, 1]] {
        let parts = in_chunks(&stream, &tokens, chunks);
        assert_eq!(parts.len(), whole.len());
        for (part, whole) in parts.iter().zip(&whole) {
            assert!(abs_diff_eq!(part, whole, epsilon = 1e-2), "{chunks:?}");
        }
    }
}

/// sgl-project/sglang 35045: log-sum-exps to the base 2 merged with others to the base e. They are of two types, and
/// what merges takes one. (`compile-fail` shows that the other is not taken.)
#[test]
fn log_sum_exps_of_two_bases() {
    let part = |lse| HostPart { attention: &[1.0][..], softmax_lse: lse };
    // Both parts weigh eight; one kernel writes log2(8), the other ln(8).
    let converted = LseLog2(vec![3f64]).to_nat();
    let zero = HostPart { attention: &[0.0][..], softmax_lse: LseNat(&[8f64.ln()][..]) };
    let merged = merge_on_host(&[part(LseNat(&converted.0)), zero]).unwrap();
    assert_abs_diff_eq!(merged.attention[0], 0.5, epsilon = 1e-12);
    assert_abs_diff_eq!(merged.softmax_lse.0[0], 16f64.ln(), epsilon = 1e-12);
}

/// 5487, 12610: a request's result depends on what else is in the batch. Without deterministic operators nobody
/// promises otherwise, and the crate says so; a call for each request gives the same bits again and again.
#[test]
fn results_that_depend_on_the_batch() {
    let stream = harness::stream();
    assert!(!stream.device().is_batch_invariant().unwrap());
    let query = harness::tensor(&stream, [1, 2, 1, 64]);
    let keys = harness::tensor(&stream, [1, 2, 5000, 64]);
    let call = FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(2);
    let plan = call.plan((&query, &keys, &keys)).unwrap();
    let bits = || {
        let output = plan.launch(&stream, (&query, &keys, &keys)).unwrap();
        let attention = output.attention.download(&stream).unwrap();
        attention.into_iter().map(f16::to_bits).collect::<Vec<_>>()
    };
    let first = bits();
    for _ in 0..5 {
        assert_eq!(bits(), first);
    }
}
