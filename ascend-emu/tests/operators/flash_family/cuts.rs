//! Causal attention cut into pieces over ranks: sparse modes 7 and 8, and pieces that RingAttentionUpdate merges,
//! against the call that is not cut.

use super::call::{OnDevice, run};
use super::case::numbers;
use super::reference::{self, bytes};
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_spec::ops::{flash_attention_score, ring_attention_update};
use ascend_spec::{
    arguments_of_version, flash_attention_score_arguments, flash_attention_var_len_score_arguments,
    ring_attention_update_arguments,
};
use ascend_sys::bindings::aclDataType;
use half::f16;
use proptest::prelude::*;
use std::ops::Range;

type Call = flash_attention_score::Arguments<OnDevice>;

const HALF: aclDataType = aclDataType::ACL_FLOAT16;
const FLOAT: aclDataType = aclDataType::ACL_FLOAT;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

/// Packed rows of a tensor, and the rows of each sequence.
#[derive(Clone, Debug)]
struct Packed {
    numbers: Vec<f16>,
    heads: usize,
    lengths: Vec<usize>,
}

impl Packed {
    fn new(seed: usize, heads: usize, lengths: &[usize]) -> Self {
        let rows: usize = lengths.iter().sum();
        Packed { numbers: reference::numbers(seed, rows * heads * DIM), heads, lengths: lengths.to_vec() }
    }

    /// Some of the rows of each sequence.
    fn rows(&self, of: impl Fn(usize, usize) -> Range<usize>) -> Self {
        let (mut numbers, mut lengths, mut first) = (Vec::new(), Vec::new(), 0);
        let row = self.heads * DIM;
        for (index, &length) in self.lengths.iter().enumerate() {
            let rows = of(index, length);
            lengths.push(rows.len());
            numbers.extend_from_slice(&self.numbers[(first + rows.start) * row..(first + rows.end) * row]);
            first += length;
        }
        Packed { numbers, lengths, ..*self }
    }

    /// Some of the sequences.
    fn sequences(&self, of: Range<usize>) -> Self {
        let first: usize = self.lengths[..of.start].iter().sum();
        let lengths = self.lengths[of].to_vec();
        let row = self.heads * DIM;
        let rows: usize = lengths.iter().sum();
        Packed { numbers: self.numbers[first * row..(first + rows) * row].to_vec(), lengths, ..*self }
    }

    fn shape(&self) -> [i64; 3] {
        let rows: usize = self.lengths.iter().sum();
        [rows, self.heads, DIM].map(|size| size as i64)
    }

    fn tensor(&self) -> Option<OnDevice> {
        Some(OnDevice::new(HALF, &self.shape(), &bytes(&self.numbers)))
    }

    fn ends(&self) -> Vec<i64> {
        let mut end = 0;
        let ends = self.lengths.iter().map(|&length| {
            end += length as i64;
            end
        });
        ends.collect()
    }
}

fn compressed() -> OnDevice {
    let cells = (0..2048 * 2048).map(|at| u8::from(at % 2048 > at / 2048));
    let cells: Vec<u8> = cells.collect();
    OnDevice::new(aclDataType::ACL_BOOL, &[2048, 2048], &cells)
}

/// An output that holds NaN.
fn output(dtype: aclDataType, shape: &[i64]) -> Option<OnDevice> {
    let size = if dtype == FLOAT { 4 } else { 2 };
    let count = shape.iter().product::<i64>() as usize;
    Some(OnDevice::new(dtype, shape, &vec![0xff; count * size]))
}

fn read(of: &Option<OnDevice>) -> Vec<f64> {
    let of = of.as_ref().unwrap();
    let count = of.shape.iter().product::<i64>() as usize;
    numbers(of.dtype, &download::<u8>(of.at(), count * 2))
}

/// Attention of packed sequences. `same` is the order of the softmax outputs.
fn attend(query: &Packed, [key, value]: [&Packed; 2], mode: i64, next: i64, same: bool) -> Call {
    let shape = query.shape();
    let softmax = [shape[0], shape[1], 8];
    let call = Call {
        query: query.tensor(),
        key: key.tensor(),
        value: value.tensor(),
        atten_mask: Some(compressed()),
        actual_seq_lengths: Some(query.ends()),
        actual_seq_lengths_kv: Some(key.ends()),
        scale: 0.125,
        next_tokens: next,
        num_heads: HEADS as i64,
        input_layout: Some("TND".into()),
        sparse_mode: mode,
        softmax_out_layout: Some(if same { "same_as_input" } else { "" }.into()),
        softmax_max: output(FLOAT, &softmax),
        softmax_sum: output(FLOAT, &softmax),
        softmax_out: Some(OnDevice::new(FLOAT, &[0, 0, 0, 0], &[])),
        attention_out: output(HALF, &shape),
        ..Call::default()
    };
    let (status, prepared) = flash_attention_var_len_score_arguments! {
        4 phase_one { aclnnFlashAttentionVarLenScoreV4GetWorkspaceSize, call }
    };
    ok(status);
    ok(run(aclnnFlashAttentionVarLenScoreV4, prepared));
    call
}

/// The attention of two calls over parts of the keys, merged.
fn merged(parts: [&Call; 2], ends: Option<Vec<i64>>, same: bool) -> Vec<f64> {
    let [prev, cur] = parts;
    let bytes: Vec<u8> =
        (std::iter::once(0).chain(ends.clone().unwrap_or_default())).flat_map(i64::to_le_bytes).collect();
    let packed = ends.is_some();
    let entries = [bytes.len() as i64 / 8];
    let like = |of: &Option<OnDevice>| {
        let of = of.as_ref().unwrap();
        output(of.dtype, &of.shape)
    };
    let call = ring_attention_update::Arguments {
        prev_attn_out: prev.attention_out.clone(),
        prev_softmax_max: prev.softmax_max.clone(),
        prev_softmax_sum: prev.softmax_sum.clone(),
        cur_attn_out: cur.attention_out.clone(),
        cur_softmax_max: cur.softmax_max.clone(),
        cur_softmax_sum: cur.softmax_sum.clone(),
        actual_seq_qlen: packed.then(|| OnDevice::new(aclDataType::ACL_INT64, &entries, &bytes)),
        input_layout: Some(if packed { "TND" } else { "SBH" }.into()),
        input_softmax_layout: same.then(|| "TND".into()),
        attn_out: like(&prev.attention_out),
        softmax_max: like(&prev.softmax_max),
        softmax_sum: like(&prev.softmax_sum),
    };
    let (status, prepared) = ring_attention_update_arguments! { arguments_of_version {
        2 phase_one { aclnnRingAttentionUpdateV2GetWorkspaceSize, call }
    } };
    ok(status);
    ok(run(aclnnRingAttentionUpdateV2, prepared));
    read(&call.attn_out)
}

fn near(got: &[f64], want: &[f64]) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), want.len());
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        prop_assert!((got - want).abs() <= 2e-3 * (1.0 + want.abs()), "{}: {} is not {}", at, got, want);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The first sequence has keys of two ranks; the others have theirs on the first.
    #[test]
    fn keys_cut_in_mode_8_and_merged_are_the_uncut_call(
        rows in 1usize..40, (near_keys, far_keys) in (0usize..40, 1usize..60),
        others in proptest::collection::vec((1usize..30, 1usize..30), 0..3), same: bool, seed in 0usize..1000,
    ) {
        let _bench = Bench::new();
        // The second piece has at least as many keys as there are rows, so that each row sees some of it.
        let (cut, keys) = (far_keys, far_keys + rows + near_keys);
        let lengths = |first: usize, other: fn(&(usize, usize)) -> usize| -> Vec<usize> {
            std::iter::once(first).chain(others.iter().map(other)).collect()
        };
        let query = Packed::new(seed, HEADS, &lengths(rows, |of| of.0));
        let kv_lengths = lengths(keys, |of| of.1);
        let [key, value] = [1, 2].map(|i| Packed::new(seed + i, KV_HEADS, &kv_lengths));
        let uncut = attend(&query, [&key, &value], 8, 0, same);
        let far = |index: usize, length: usize| if index == 0 { 0..cut } else { 0..length };
        let close = |index: usize, length: usize| if index == 0 { cut..length } else { 0..0 };
        let next = (keys - cut) as i64;
        let pieces = [
            attend(&query, [&key.rows(far), &value.rows(far)], 8, next, same),
            attend(&query, [&key.rows(close), &value.rows(close)], 8, 0, same),
        ];
        let got = merged([&pieces[0], &pieces[1]], Some(query.ends()), same);
        near(&got, &read(&uncut.attention_out))?;
    }

    /// A rank ends within a sequence, and the next one goes on with its other rows.
    #[test]
    fn queries_cut_in_modes_7_and_8_are_the_uncut_call(
        before in proptest::collection::vec((1usize..20, 0usize..20), 0..3),
        after in proptest::collection::vec(1usize..20, 0..3),
        (first, second, more) in (1usize..30, 1usize..30, 0usize..30), seed in 0usize..1000,
    ) {
        let _bench = Bench::new();
        let whole = first + second;
        let mut q_lengths: Vec<usize> = before.iter().map(|of| of.0).collect();
        let mut kv_lengths: Vec<usize> = before.iter().map(|of| of.0 + of.1).collect();
        q_lengths.push(whole);
        kv_lengths.push(whole + more);
        q_lengths.extend(&after);
        kv_lengths.extend(&after);
        let query = Packed::new(seed, HEADS, &q_lengths);
        let [key, value] = [1, 2].map(|i| Packed::new(seed + i, KV_HEADS, &kv_lengths));
        let uncut = attend(&query, [&key, &value], 3, 0, true);

        let cut = before.len();
        let (left, right) = (0..cut + 1, cut..q_lengths.len());
        let head = query.rows(|index, length| if index == cut { 0..first } else { 0..length });
        let tail = query.rows(|index, length| if index == cut { first..length } else { 0..length });
        let [keys_left, values_left] = [&key, &value].map(|of| of.sequences(left.clone()));
        let [keys_right, values_right] = [&key, &value].map(|of| of.sequences(right.clone()));
        let next = -(second as i64);
        let ended = attend(&head.sequences(left), [&keys_left, &values_left], 7, next, true);
        let gone_on = attend(&tail.sequences(right), [&keys_right, &values_right], 8, 0, true);
        let got = [read(&ended.attention_out), read(&gone_on.attention_out)].concat();
        near(&got, &read(&uncut.attention_out))?;
    }

    /// Rows whose keys all lie in the first piece see none of the second.
    #[test]
    fn keys_cut_with_a_batch_axis_and_merged_are_the_uncut_call(
        rows in 2usize..60, at in 0.0f64..1.0, batch in 1usize..3, seed in 0usize..1000,
    ) {
        let _bench = Bench::new();
        let cut = 1 + (at * (rows - 1) as f64) as usize;
        let row = |heads: usize| batch * heads * DIM;
        let query = reference::numbers(seed, rows * row(HEADS));
        let [key, value] = [1, 2].map(|i| reference::numbers(seed + i, rows * row(KV_HEADS)));
        let sbh = |numbers: &[f16], heads: usize| {
            let rows = numbers.len() / row(heads);
            let shape = [rows, batch, heads * DIM].map(|size| size as i64);
            Some(OnDevice::new(HALF, &shape, &bytes(numbers)))
        };
        let attend = |keys: Range<usize>, mode: i64| {
            let keys = keys.start * row(KV_HEADS)..keys.end * row(KV_HEADS);
            let softmax = [batch, HEADS, rows, 8].map(|size| size as i64);
            let call = Call {
                query: sbh(&query, HEADS),
                key: sbh(&key[keys.clone()], KV_HEADS),
                value: sbh(&value[keys], KV_HEADS),
                atten_mask: Some(compressed()),
                scale: 0.125,
                num_heads: HEADS as i64,
                input_layout: Some("SBH".into()),
                sparse_mode: mode,
                softmax_max: output(FLOAT, &softmax),
                softmax_sum: output(FLOAT, &softmax),
                softmax_out: Some(OnDevice::new(FLOAT, &[0, 0, 0, 0], &[])),
                attention_out: output(HALF, &[rows, batch, HEADS * DIM].map(|size| size as i64)),
                ..Call::default()
            };
            let (status, prepared) = flash_attention_score_arguments! { arguments_of_version {
                1 phase_one { aclnnFlashAttentionScoreGetWorkspaceSize, call }
            } };
            ok(status);
            ok(run(aclnnFlashAttentionScore, prepared));
            call
        };
        let uncut = attend(0..rows, 3);
        let pieces = [attend(0..cut, 2), attend(cut..rows, 3)];
        let got = merged([&pieces[0], &pieces[1]], None, false);
        near(&got, &read(&uncut.attention_out))?;
    }
}
