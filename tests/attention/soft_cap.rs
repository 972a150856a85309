//! Capped scores, which the emulation alone computes: their definition in double precision, and who refuses them.

use crate::harness;
use approx::abs_diff_eq;

use std::sync::Arc;

use ascend_attention::case::AttentionCase;
use ascend_attention::sys::Api;
use ascend_attention::{CausalOrigin, FusedInferAttention, Layout, Runtime, Stream, f16, rules};
use harness::reference::Logical;
use proptest::prelude::*;

const WHY: &str = "no operator of an NPU caps scores";

/// Batch, key heads, query heads of each, rows, keys, head dimension.
type Sizes = [usize; 6];

/// Output and log-sum-exp of a causal call, whose last row sees all keys.
fn computed(stream: &Stream, sizes: Sizes, scale: f64, cap: Option<f64>) -> (Vec<f64>, Vec<f64>) {
    let [batch, kv_heads, group, rows, keys, dim] = sizes;
    let [query, key, value] = tensors(sizes).map(|tensor| {
        let shape = [tensor.batch, tensor.heads, tensor.rows, tensor.dim];
        stream.upload(&tensor.data, shape).unwrap()
    });
    let call = FusedInferAttention::new(Layout::Bnsd).heads(kv_heads * group).kv_heads(kv_heads).scale(scale);
    let call = match rows {
        1 => call,
        _ => call.mask(stream.device().masks().causal(CausalOrigin::RightDown).unwrap()),
    };
    let call = cap.map_or(call.clone(), |cap| call.emulated_only_soft_cap(cap)).softmax_lse(true);
    let plan = call.plan((&query, &key, &value)).unwrap();
    let output = plan.launch(stream, (&query, &key, &value)).unwrap();
    let lse = output.softmax_lse.unwrap().download(stream).unwrap();
    let attention = output.attention.download(stream).unwrap();
    assert_eq!(attention.len(), batch * kv_heads * group * rows * dim);
    assert!(keys >= rows);
    (attention.into_iter().map(f16::to_f64).collect(), lse.into_iter().map(f64::from).collect())
}

fn tensors([batch, kv_heads, group, rows, keys, dim]: Sizes) -> [Logical<f16>; 3] {
    let key = |seed| Logical::random(seed, [batch, kv_heads, keys, dim]);
    [Logical::random(7, [batch, kv_heads * group, rows, dim]), key(8), key(9)]
}

/// The same by the definition.
fn defined(sizes: Sizes, scale: f64, cap: f64) -> (Vec<f64>, Vec<f64>) {
    let [batch, kv_heads, group, rows, keys, dim] = sizes;
    let [query, key, value] = tensors(sizes).map(|tensor| tensor.exact());
    let (mut attention, mut lse) = (Vec::new(), Vec::new());
    for b in 0..batch {
        for head in 0..kv_heads * group {
            for row in 0..rows {
                let seen = 0..=row + keys - rows;
                let score = |j: usize| {
                    let products = query.row(b, head, row).iter().zip(key.row(b, head / group, j)).map(|(q, k)| q * k);
                    cap * (scale * products.sum::<f64>() / cap).tanh()
                };
                let weights: Vec<f64> = seen.map(|j| score(j).exp()).collect();
                let sum: f64 = weights.iter().sum();
                lse.push(sum.ln());
                attention.extend((0..dim).map(|d| {
                    let weighted =
                        weights.iter().enumerate().map(|(j, weight)| weight * value.at(b, head / group, j, d));
                    weighted.sum::<f64>() / sum
                }));
            }
        }
    }
    (attention, lse)
}

fn sizes() -> impl Strategy<Value = Sizes> {
    let rows = prop_oneof![Just(1usize), 2usize..40];
    (1usize..3, 1usize..3, 1usize..5, rows, 0usize..230, 1usize..9)
        .prop_map(|(batch, kv_heads, group, rows, more, dim)| [batch, kv_heads, group, rows, rows + more, 16 * dim])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 0, ..ProptestConfig::default() })]

    #[test]
    fn capped_scores_are_their_definition(
        sizes in sizes(),
        scale in 0.1f64..1.5,
        cap in prop::sample::select(vec![0.3, 2.0, 50.0]),
    ) {
        if harness::not_on_npu(WHY) {
            return Ok(());
        }
        let stream = harness::stream();
        let (got, got_lse) = computed(&stream, sizes, scale, Some(cap));
        let (want, want_lse) = defined(sizes, scale, cap);
        for (got, want) in got.iter().zip(&want) {
            prop_assert!(abs_diff_eq!(got, want, epsilon = 2e-3), "{got}, {want}");
        }
        for (got, want) in got_lse.iter().zip(&want_lse) {
            prop_assert!(abs_diff_eq!(got, want, epsilon = 2e-5 * (1.0 + want.abs())), "{got}, {want}");
        }
    }

    /// What a cap changes falls with its square, and a very large one changes nothing.
    #[test]
    fn large_caps_approach_none(sizes in sizes()) {
        if harness::not_on_npu(WHY) {
            return Ok(());
        }
        let stream = harness::stream();
        let scale = 0.5;
        let (plain, plain_lse) = computed(&stream, sizes, scale, None);
        let furthest = |cap: f64| {
            let (got, lse) = computed(&stream, sizes, scale, Some(cap));
            let far = |got: &[f64], plain: &[f64]| {
                got.iter().zip(plain).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
            };
            (far(&got, &plain), far(&lse, &plain_lse))
        };
        let (attention, lse) = furthest(1e30);
        prop_assert!(attention < 2e-3 && lse < 1e-5, "{attention}, {lse}");
        let changes = [20.0, 40.0].map(|cap| furthest(cap).1);
        prop_assert!(changes[1] < 0.3 * changes[0] + 2e-5, "{changes:?}");
    }
}

#[test]
fn caps_are_refused_where_they_mean_nothing() {
    let stream = harness::stream();
    let row = stream.upload(&[f16::ONE; 16], [1, 1, 1, 16]).unwrap();
    let call = FusedInferAttention::new(Layout::Bnsd).heads(1).scale(0.25);
    for cap in [0.0, -50.0, f64::NAN, f64::INFINITY, 1e-45] {
        let refused = call.clone().emulated_only_soft_cap(cap).plan((&row, &row, &row)).unwrap_err();
        assert!(refused.breaks(&rules::ARGUMENT_VALUE), "{refused}");
    }
    let capped = call.emulated_only_soft_cap(50.0);
    if harness::not_on_npu(WHY) {
        assert!(capped.plan((&row, &row, &row)).unwrap_err().breaks(&rules::EMULATED_ONLY));
        return;
    }
    // No case file of the operator says what the plan computes.
    let plan = capped.plan((&row, &row, &row)).unwrap();
    let refused = AttentionCase::record(&stream, &plan, (&row, &row, &row)).unwrap_err();
    assert!(refused.to_string().contains("cap"), "{refused}");

    // Functions that stand for those of an NPU.
    let api = Arc::new(Api::from_functions(harness::functions(), "a table of the test's own"));
    // SAFETY: the functions are the emulation's.
    let runtime = unsafe { Runtime::from_api(api) }.unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let row = stream.upload(&[f16::ONE; 16], [1, 1, 1, 16]).unwrap();
    let refused = capped.plan((&row, &row, &row)).unwrap_err();
    assert!(refused.breaks(&rules::EMULATED_ONLY), "{refused}");
    assert!(refused.to_string().contains("matrix product"), "{refused}");
    // The device goes on.
    let plain = FusedInferAttention::new(Layout::Bnsd).heads(1).scale(0.25).plan((&row, &row, &row)).unwrap();
    let output = plain.launch(&stream, (&row, &row, &row)).unwrap();
    assert_eq!(output.attention.download(&stream).unwrap(), [f16::ONE; 16]);
}
