//! Attention over parts of the keys, merged, is attention over all of them: on the device and on the host.

use crate::harness;
use approx::{abs_diff_eq, assert_abs_diff_eq};

use ascend_attention::merge::{EmptyRows, HostPart, LseLog2, LseNat, MergeState, Merged, Part, merge_on_host};
use ascend_attention::rules;
use ascend_attention::{Error, FusedInferAttention, Layout, Output, Stream, Tensor, bf16, f16};
#[cfg(feature = "emulation")]
use ascend_attention::{
    Graph, Machine, Runtime,
    spec::{Cann, Soc},
};
use harness::reference::{self, Half, Logical};
use harness::{numbers, stream};
use proptest::prelude::*;

const INF: f64 = f64::INFINITY;

fn part<'a, R>(attention: &'a [R], lse: &'a [R]) -> HostPart<'a, R> {
    HostPart { attention, softmax_lse: LseNat(lse) }
}

/// Bits, so that NaN is itself.
fn bits(merged: &Merged<f64>) -> Vec<u64> {
    let all = merged.attention.iter().chain(&merged.softmax_lse.0);
    all.map(|x| x.to_bits()).collect()
}

fn near(one: &Merged<f64>, other: &Merged<f64>) -> bool {
    let pairs = |a: &[f64], b: &[f64]| {
        a.iter().zip(b).all(|(a, b)| a == b || (a - b).abs() < 1e-12 || a.is_nan() && b.is_nan())
    };
    pairs(&one.attention, &other.attention) && pairs(&one.softmax_lse.0, &other.softmax_lse.0)
}

/// Softmax over scores, of values.
fn softmax(scores: &[f64], values: &[[f64; 2]]) -> (Vec<f64>, f64) {
    let largest = scores.iter().copied().fold(-INF, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
    let mut out = vec![0.0; 2];
    for (score, value) in scores.iter().zip(values) {
        for (out, value) in out.iter_mut().zip(value) {
            *out += (score - largest).exp() / sum * value;
        }
    }
    // As attention writes it.
    (out, if scores.is_empty() { INF } else { largest + sum.ln() })
}

fn lse_value() -> impl Strategy<Value = f64> {
    prop_oneof![6 => -40.0..40.0, 1 => Just(-INF), 1 => Just(INF), 1 => Just(f64::NAN)]
}

proptest! {
    #[test]
    fn host_merges_are_one_softmax_over_the_union(
        keys in prop::collection::vec((-50.0f64..50.0, [-3.0..3.0, -3.0..3.0f64], 0usize..4), 0..12),
    ) {
        let mut parts = Vec::new();
        for part in 0..4 {
            let own = keys.iter().filter(|key| key.2 == part);
            let (scores, values): (Vec<f64>, Vec<[f64; 2]>) = own.map(|key| (key.0, key.1)).unzip();
            let (mut out, lse) = softmax(&scores, &values);
            if scores.is_empty() {
                // These elements are not read.
                out = vec![f64::NAN; 2];
            }
            parts.push((out, [lse]));
        }
        let views: Vec<_> = parts.iter().map(|(out, lse)| part(out, &lse[..])).collect();
        let merged = merge_on_host(&views).unwrap();
        if keys.is_empty() {
            prop_assert_eq!(&merged.attention, &[0.0, 0.0]);
            prop_assert_eq!(merged.softmax_lse.0[0], -INF);
        } else {
            let (scores, values): (Vec<f64>, Vec<[f64; 2]>) = keys.iter().map(|key| (key.0, key.1)).unzip();
            let (out, lse) = softmax(&scores, &values);
            let want = Merged { attention: out, softmax_lse: LseNat(vec![lse]) };
            prop_assert!(near(&merged, &want), "{:?} is not {:?}", merged, want);
        }
    }

    #[test]
    fn host_merges_commute_and_associate(
        rows in prop::collection::vec(([-3.0..3.0f64, -3.0..3.0, -3.0..3.0], [lse_value(), lse_value(), lse_value()]), 1..6),
    ) {
        let out = |p: usize| rows.iter().map(|row| row.0[p]).collect::<Vec<_>>();
        let lse = |p: usize| rows.iter().map(|row| row.1[p]).collect::<Vec<_>>();
        let (outs, lses): (Vec<_>, Vec<_>) = (0..3).map(|p| (out(p), lse(p))).unzip();
        let [a, b, c] = [0, 1, 2].map(|p| part(&outs[p][..], &lses[p][..]));
        let two = |x, y| merge_on_host(&[x, y]).unwrap();
        prop_assert_eq!(bits(&two(a, b)), bits(&two(b, a)));
        let (ab, bc) = (two(a, b), two(b, c));
        let (left, right) = (two(ab.as_part(), c), two(a, bc.as_part()));
        prop_assert!(near(&left, &right), "{:?} is not {:?}", left, right);
        prop_assert!(near(&left, &merge_on_host(&[a, b, c]).unwrap()));
    }

    #[test]
    fn a_part_without_keys_is_the_identity(
        rows in prop::collection::vec((-3.0..3.0f64, lse_value(), any::<bool>(), any::<f64>()), 1..6),
    ) {
        let out: Vec<f64> = rows.iter().map(|row| row.0).collect();
        let lse: Vec<f64> = rows.iter().map(|row| row.1).collect();
        let mark: Vec<f64> = rows.iter().map(|row| if row.2 { INF } else { -INF }).collect();
        let anything: Vec<f64> = rows.iter().map(|row| row.3).collect();
        let merged = merge_on_host(&[part(&out[..], &lse[..]), part(&anything[..], &mark[..])]).unwrap();
        for (row, &lse) in lse.iter().enumerate() {
            let (got, got_lse) = (merged.attention[row], merged.softmax_lse.0[row]);
            if lse.is_nan() {
                prop_assert!(got.is_nan() && got_lse.is_nan());
            } else if lse.is_infinite() {
                prop_assert_eq!((got, got_lse), (0.0, -INF));
            } else {
                prop_assert_eq!((got, got_lse), (out[row], lse));
            }
        }
    }
}

#[test]
fn wrong_sizes_on_the_host_are_refused() {
    let refused = |parts: &[HostPart<'_, f32>]| {
        let error = merge_on_host(parts).unwrap_err();
        assert!(error.breaks(&rules::ARGUMENT_VALUE), "{error}");
    };
    refused(&[]);
    refused(&[part(&[1.0; 5], &[0.0; 2])]);
    refused(&[part(&[1.0], &[])]);
    refused(&[part(&[1.0; 4], &[0.0; 2]), part(&[1.0; 4], &[0.0; 4])]);
    let nothing = merge_on_host::<f32>(&[part(&[], &[])]).unwrap();
    assert!(nothing.attention.is_empty() && nothing.softmax_lse.0.is_empty());
    // Log-sum-exps of another base are another type.
    let base_2 = LseLog2(vec![1.0f32, 2.0]).to_nat();
    let merged = merge_on_host(&[part(&[1.0; 4], &base_2.0)]).unwrap();
    assert_abs_diff_eq!(merged.softmax_lse.to_log2().0[1], 2.0, epsilon = 1e-6);
}

const HEADS: usize = 4;
const DIM: usize = 64;
const SCALE: f64 = 0.125;

fn upload<T: Half>(stream: &Stream, of: &Logical<T>, layout: Layout) -> Tensor<T> {
    match layout {
        Layout::Tnd => {
            let (shape, data) = of.pack("BSND");
            stream.upload(&data, &shape[1..]).unwrap()
        }
        _ => {
            let (shape, data) = of.pack(layout.as_str());
            stream.upload(&data, &shape).unwrap()
        }
    }
}

/// Attention over each of some ranges of the keys.
fn parts<T: Half>(
    stream: &Stream,
    layout: Layout,
    query: &Logical<T>,
    key: &Logical<T>,
    value: &Logical<T>,
    cuts: &[usize],
) -> Vec<Output<T>> {
    let q = upload(stream, query, layout);
    let ranges = cuts.windows(2).map(|cut| cut[0]..cut[1]);
    let one = |keys: std::ops::Range<usize>| {
        let len = keys.len();
        let k = upload(stream, &key.narrow(keys.clone()), layout);
        let v = upload(stream, &value.narrow(keys), layout);
        let mut call =
            FusedInferAttention::new(layout).heads(query.heads).kv_heads(key.heads).scale(SCALE).softmax_lse(true);
        if layout == Layout::Tnd {
            call = call.actual_seq_lengths([query.rows]).actual_seq_lengths_kv([len]);
        }
        let plan = call.plan((&q, &k, &v)).unwrap();
        plan.launch(stream, (&q, &k, &v)).unwrap()
    };
    ranges.map(one).collect()
}

/// Whether an output is attention over all keys, by the definition.
#[track_caller]
fn check<T: Half>(stream: &Stream, layout: Layout, output: &Output<T>, [query, key, value]: [&Logical<T>; 3]) {
    let got = output.attention.download(stream).unwrap();
    let lse = output.softmax_lse.as_ref().unwrap();
    let axes = match layout {
        Layout::Bnsd => "BNSD",
        _ => "BSND",
    };
    let got_lse = lse.download(stream).unwrap();
    let (q, k, v) = (query.exact(), key.exact(), value.exact());
    for head in 0..query.heads {
        for i in 0..query.rows {
            let (want, want_lse) = reference::row(&q, &k, &v, (0, 0), head, i, SCALE, |_| true).unwrap();
            for (d, want) in want.iter().enumerate() {
                let got = got[query.index(axes, 0, head, i, d)].to_f64();
                assert!(
                    abs_diff_eq!(got, want, epsilon = 2.0 * T::TOLERANCE),
                    "{layout} {head} {i} {d}: {got} is not {want}"
                );
            }
            let at = match layout {
                Layout::Tnd => i * query.heads + head,
                _ => head * query.rows + i,
            };
            assert!(abs_diff_eq!(f64::from(got_lse[at]), want_lse, epsilon = 1e-4), "{layout} {head} {i}");
        }
    }
}

#[test]
fn merged_parts_are_attention_over_all_keys() {
    // Packed sequences are BF16.
    merged_parts::<bf16>(&[(Layout::Tnd, 5, HEADS, true), (Layout::Bnsd, 1, HEADS, true)]);
    merged_parts::<f16>(&[
        (Layout::Bnsd, 5, HEADS, true),
        (Layout::Bsnd, 3, 1, true),
        (Layout::Bsnd, 5, HEADS, false),
        (Layout::Bsh, 5, HEADS, false),
    ]);
}

/// For each layout, query rows, heads, and whether the rows line up with the log-sum-exps.
fn merged_parts<T: Half>(cases: &[(Layout, usize, usize, bool)]) {
    let stream = stream();
    for &(layout, rows, heads, lined_up) in cases {
        let kv_heads = heads / 2 + heads % 2;
        let query = Logical::<T>::random(1, [1, heads, rows, DIM]);
        let (key, value) = (Logical::random(2, [1, kv_heads, 70, DIM]), Logical::random(3, [1, kv_heads, 70, DIM]));
        let parts = parts(&stream, layout, &query, &key, &value, &[0, 1, 40, 70]);
        let parts: Vec<Part<'_, T>> = parts.iter().map(|part| Part::of(part).unwrap()).collect();
        let all = [&query, &key, &value];
        for empty_rows in [EmptyRows::None, EmptyRows::SomeParts, EmptyRows::ThroughHost] {
            let merge = MergeState::new(layout).empty_rows(empty_rows);
            if !lined_up && empty_rows != EmptyRows::ThroughHost {
                let refused = merge.plan(&parts).unwrap_err().to_string();
                assert!(refused.contains("ThroughHost"), "{refused}");
                continue;
            }
            let output = merge.plan(&parts).unwrap().launch(&stream, &parts).unwrap();
            check(&stream, layout, &output, all);
            // Two by two, a result being a part again; the tensors between are dropped at once.
            let two = merge.plan(&parts[..2]).unwrap();
            let first = two.launch(&stream, &parts[..2]).unwrap();
            let pair = [Part::of(&first).unwrap(), parts[2]];
            let mut output = two.output().unwrap();
            two.launch_into(&stream, &pair, &mut output).unwrap();
            drop(two);
            check(&stream, layout, &output, all);
        }
    }
}

/// Attention and log-sum-exps as a launch would have written them, `[1, heads, rows, dim]`.
fn made<T: Half>(stream: &Stream, seed: u64, lse: &[f32]) -> Output<T> {
    let rows = lse.len();
    let data: Vec<T> = numbers(seed, rows * 8).into_iter().map(T::from_f32).collect();
    Output {
        attention: stream.upload(&data, [1, 1, rows, 8]).unwrap(),
        softmax_lse: Some(stream.upload(lse, [1, 1, rows, 1]).unwrap()),
    }
}

/// Log-sum-exps of three parts. Each row has keys in some part, but for the last two, which have none.
const LSE: [[f32; 7]; 3] = {
    const INF: f32 = f32::INFINITY;
    [
        [1.0, INF, -INF, 0.5, f32::NAN, INF, -INF],
        [-2.0, 3.0, INF, -INF, 0.0, -INF, -INF],
        [0.0, INF, 7.0, INF, 1.0, INF, -INF],
    ]
};

/// The first rows of [`LSE`], merged on the device and on the host.
fn rows_without_keys<T: Half>(stream: &Stream, empty_rows: EmptyRows, rows: usize, tolerance: f64) {
    let made = |p: usize| made(stream, p as u64, &LSE[p][..rows]);
    let outputs: Vec<Output<T>> = (0..3).map(made).collect();
    let parts: Vec<Part<'_, T>> = outputs.iter().map(|part| Part::of(part).unwrap()).collect();
    let merge = MergeState::new(Layout::Bnsd).empty_rows(empty_rows);
    let merged = merge.plan(&parts).unwrap().launch(stream, &parts).unwrap();
    let exact: Vec<(Vec<f64>, Vec<f64>)> = (outputs.iter())
        .map(|part| {
            let out = part.attention.download(stream).unwrap();
            let lse = part.softmax_lse.as_ref().unwrap().download(stream).unwrap();
            (out.into_iter().map(T::to_f64).collect(), lse.into_iter().map(f64::from).collect())
        })
        .collect();
    let views: Vec<_> = exact.iter().map(|(out, lse)| part(&out[..], &lse[..])).collect();
    let want = merge_on_host(&views).unwrap();
    let close = |got: f64, want: f64, tolerance: f64| {
        got == want || got.is_nan() && want.is_nan() || (got - want).abs() <= tolerance
    };
    for (i, got) in merged.attention.download(stream).unwrap().into_iter().enumerate() {
        let (got, want) = (got.to_f64(), want.attention[i]);
        assert!(close(got, want, tolerance), "{i}: {got} is not {want}");
    }
    for (row, got) in merged.softmax_lse.unwrap().download(stream).unwrap().into_iter().enumerate() {
        assert!(close(got.into(), want.softmax_lse.0[row], 1e-5), "{row}: {got}");
    }
}

#[test]
fn rows_without_keys_are_as_on_the_host() {
    rows_without_keys::<f16>(&stream(), EmptyRows::ThroughHost, 7, 2e-3);
    rows_without_keys::<bf16>(&stream(), EmptyRows::ThroughHost, 7, 1e-2);
}

/// Without a detour where the operator takes the mark of a row without keys for none, and through the host elsewhere.
#[test]
fn rows_with_keys_in_some_part_are_as_on_the_host() {
    rows_without_keys::<f16>(&stream(), EmptyRows::SomeParts, 5, 2e-3);
    rows_without_keys::<bf16>(&stream(), EmptyRows::SomeParts, 5, 1e-2);
    #[cfg(feature = "emulation")]
    if !harness::not_on_npu("it is about two releases") {
        for (cann, through_host) in [(Cann::V9_0, true), (Cann::V9_1, false)] {
            let runtime = Runtime::emulated_as(&Machine::new(Soc::Ascend950, cann)).unwrap();
            let stream = runtime.device(0).unwrap().stream().unwrap();
            rows_without_keys::<f16>(&stream, EmptyRows::SomeParts, 5, 2e-3);
            // In a graph nothing goes through the host.
            let part: Output<f16> = made(&stream, 1, &LSE[0][..1]);
            let parts = [Part::of(&part).unwrap(); 2];
            let merge = MergeState::new(Layout::Bnsd).empty_rows(EmptyRows::SomeParts);
            let merge = merge.plan(&parts).unwrap();
            let mut output = merge.output().unwrap();
            let captured =
                Graph::capture(stream.device(), (), |capture, ()| merge.launch_into(capture, &parts, &mut output));
            match captured {
                Ok(_) => assert!(!through_host, "{cann}"),
                Err(error) => {
                    assert!(through_host, "{cann}: {error}");
                    assert!(error.to_string().contains("EmptyRows::SomeParts"), "{error}");
                }
            }
        }
    }
}

#[test]
fn parts_have_to_fit_each_other_and_the_plan() {
    let stream = stream();
    let one: Output<f16> = made(&stream, 1, &[0.0; 4]);
    let two: Output<f16> = made(&stream, 2, &[0.0; 4]);
    let short: Output<f16> = made(&stream, 3, &[0.0; 3]);
    let of = |output| Part::of(output).unwrap();
    let merge = MergeState::new(Layout::Bnsd);
    let invalid = |outcome: Result<_, Error>| match outcome {
        Err(Error::Violation(violation)) if violation.rule.level == ascend_attention::spec::Level::Library => {}
        Err(other) => panic!("{other}"),
        Ok(()) => panic!("accepted"),
    };
    invalid(merge.plan::<f16>(&[]).map(drop));
    invalid(merge.plan(&[of(&one), of(&short)]).map(drop));
    // The log-sum-exps of another layout.
    invalid(MergeState::new(Layout::Tnd).plan(&[of(&one)]).map(drop));
    let violation = merge.plan(&[of(&one); 17]).unwrap_err();
    assert!(matches!(&violation, Error::Violation(v) if v.rule.id == "update.count"), "{violation}");
    let plan = merge.plan(&[of(&one), of(&two)]).unwrap();
    invalid(plan.launch(&stream, &[of(&one)]).map(drop));
    invalid(plan.launch(&stream, &[of(&one), of(&short)]).map(drop));
    let mut shared =
        Output { attention: one.attention.clone(), softmax_lse: plan.output::<f16>().unwrap().softmax_lse };
    invalid(plan.launch_into(&stream, &[of(&one), of(&two)], &mut shared));
    let without = Output { softmax_lse: None, ..one.clone() };
    assert!(Part::of(&without).is_err());
    // The device is as good as before.
    let merged = plan.launch(&stream, &[of(&one), of(&two)]).unwrap();
    let got = merged.softmax_lse.unwrap().download(&stream).unwrap();
    assert!(got.iter().all(|lse| (lse - 2f32.ln()).abs() < 1e-6));
}
