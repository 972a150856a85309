//! Attention of training and the merge of a ring: what is refused before anything is launched, and what comes out.

use ascend_attention::attention::Distance;
use ascend_attention::flash::{
    CutBatch, CutSide, Dropout, FlashAttention, FlashInputs, FlashMask, FlashPlan, InputLayout, PositionBias,
};
use ascend_attention::ring::RingUpdate;
use ascend_attention::rules;
use ascend_attention::spec::SparseMode;
use ascend_attention::{CausalOrigin, Error, Mask, Stream, Tensor, f16};

use crate::harness;
use harness::violated;
use proptest::prelude::*;

/// Query, key and value of one batch entry with two heads of 16.
fn tensors(stream: &Stream, rows: usize, keys: usize) -> [Tensor<f16>; 3] {
    let of = |rows: usize| {
        let elements = vec![f16::ONE; 2 * rows * 16];
        stream.upload(&elements, [1, 2, rows, 16]).unwrap()
    };
    [of(rows), of(keys), of(keys)]
}

#[test]
fn calls_of_training_that_break_a_rule_are_refused_by_name() {
    let stream = harness::stream();
    let masks = stream.device().masks();
    let [query, key, value] = tensors(&stream, 5, 7);
    let call = FlashAttention::new(InputLayout::Bnsd).heads(2).scale(0.25);
    let plan = |call: FlashAttention| call.plan((&query, &key, &value));

    let unset = plan(FlashAttention::new(InputLayout::Bnsd).heads(2)).unwrap_err();
    assert!(unset.to_string().contains("1.0 / 16f64.sqrt()"), "{unset}");
    assert_eq!(violated(plan(call.clone().heads(3))), "flash.query_heads");
    let rows = stream.upload(&[f16::ONE; 64], [1, 2, 32]).unwrap();
    let none = FlashAttention::new(InputLayout::Bsh).heads(0).scale(0.25);
    assert_eq!(violated(none.plan((&rows, &rows, &rows))), "flash.head_num");
    assert_eq!(violated(plan(call.clone().heads(0))), "flash.head_num");
    assert_eq!(violated(call.plan((&query, &rows, &value))), "flash.key_rank");
    let inference = masks.causal_full(CausalOrigin::RightDown, 5, 7).unwrap();
    assert_eq!(violated(plan(call.clone().mask(inference))), "flash.atten_mask_dtype");

    // Modes 7 and 8 are for packed sequences, mode 5 for a batch, mode 6 for prefixes within the keys.
    let cut = FlashMask::last_cut(&masks, 7, 0).unwrap();
    assert_eq!(cut.sparse_mode(), SparseMode::RightDownCausalBand);
    assert_eq!(violated(plan(call.clone().mask(cut))), "flash.sparse_mode");
    let beyond = FlashMask::prefix(&masks, [8]).unwrap();
    assert_eq!(violated(plan(call.clone().mask(beyond))), "flash.prefix");
    let hidden = stream.upload(&[false; 35], [1, 1, 5, 7]).unwrap();
    let dropped = FlashMask::prefix_matrix(hidden, [8]);
    assert_eq!(dropped.sparse_mode(), SparseMode::Prefix);
    assert_eq!(violated(plan(call.clone().mask(dropped))), "flash.prefix_ignored");

    let overrun = plan(call.clone().allow_lint("flash.drop_mask_short")).unwrap_err();
    assert!(overrun.to_string().contains("allow_overrun"), "{overrun}");
}

#[test]
fn packed_calls_of_training_that_break_a_rule_are_refused_by_name() {
    let stream = harness::stream();
    let masks = stream.device().masks();
    let packed = |rows: usize| {
        let elements = vec![f16::ONE; rows * 2 * 16];
        stream.upload(&elements, [rows, 2, 16]).unwrap()
    };
    let (query, key) = (packed(8), packed(9));
    let call = FlashAttention::new(InputLayout::Tnd).heads(2).scale(0.25);
    let plan = |call: FlashAttention| call.plan((&query, &key, &key));
    assert_eq!(violated(plan(call.clone())), "flash.lengths_required");
    let call = call.actual_seq_lengths([3, 8]);
    let of_keys = call.clone().actual_seq_lengths_kv([3]);
    assert_eq!(violated(plan(of_keys)), "flash.lengths_count");
    let call = call.actual_seq_lengths_kv([3, 9]);
    for tokens in [(5, 0), (6, 1), (6, -2)] {
        let cut = FlashMask::last_cut(&masks, tokens.0, tokens.1).unwrap();
        let refused = violated(plan(call.clone().mask(cut)));
        assert_eq!(refused, "flash.cut_sequence", "{tokens:?}");
    }
    let descends = call.clone().actual_seq_lengths([8, 3]);
    assert_eq!(violated(plan(descends)), "flash.lengths_descend");
    let beyond = plan(call.actual_seq_lengths([3, usize::MAX])).unwrap_err();
    assert!(beyond.to_string().starts_with("lengths.overflow"), "{beyond}");
}

#[test]
fn calls_without_keys_write_their_outputs_alone() {
    let stream = harness::stream();
    let query = stream.upload(&[7f32; 640], [1, 2, 5, 64]).unwrap();
    let none = |shape: [usize; 4]| Tensor::<f32>::empty(stream.device(), shape).unwrap();
    let key = none([1, 2, 0, 64]);
    let call = FlashAttention::new(InputLayout::Bnsd).scale(1.0);
    for heads in [1, 3, 4, 40, 100_000] {
        let refused = call.clone().heads(heads).plan((&query, &key, &key));
        let refused = refused.map(drop).unwrap_err();
        assert!(refused.to_string().contains("headNum"), "{refused}");
    }
    for empty in [none([1, 0, 5, 64]), none([1, 1, 5, 64])] {
        let refused = call.clone().heads(2).plan((&empty, &key, &key));
        let refused = refused.map(drop).unwrap_err().to_string();
        assert!(refused.contains("headNum"), "{refused}");
    }

    let plan = call.heads(2).plan((&query, &key, &key)).unwrap();
    let around = stream.upload(&[7f32; 3 * 640], [3, 2, 5, 64]).unwrap();
    let mut outputs = plan.output::<f32>().unwrap();
    outputs.attention = around.narrow(0, 1..2).unwrap();
    plan.launch_into(&stream, (&query, &key, &key), &mut outputs).unwrap();
    let written = around.download(&stream).unwrap();
    let (before, after) = (&written[..640], &written[1280..]);
    assert!(before.iter().chain(after).all(|&other| other == 7.0));
    assert!(written[640..1280].iter().all(|&filled| filled == 0.0));
}

#[test]
fn masks_of_packed_sequences_behind_an_empty_one_are_a_lint() {
    let stream = harness::stream();
    let rows = stream.upload(&[1f32; 4 * 64], [4, 1, 64]).unwrap();
    let mask = stream.upload(&[false; 12], [3, 1, 2, 2]).unwrap();
    let plan = |ends: [usize; 3]| {
        let call = FlashAttention::new(InputLayout::Tnd).heads(1).scale(1.0);
        call.mask(Mask::all_mask((*mask).clone()))
            .actual_seq_lengths(ends)
            .actual_seq_lengths_kv(ends)
            .plan((&rows, &rows, &rows))
    };
    assert_eq!(violated(plan([0, 2, 4])), "flash.atten_mask_packed");
    assert_eq!(violated(plan([2, 2, 4])), "flash.atten_mask_packed");
}

#[test]
fn what_comes_with_query_key_and_value_is_checked() {
    let stream = harness::stream();
    let [query, key, value] = tensors(&stream, 5, 7);
    let call = FlashAttention::new(InputLayout::Bnsd).heads(2).scale(0.25);
    let inputs = FlashInputs::new(&query, &key, &value);
    let plan = |inputs: FlashInputs<'_, _>| call.plan(inputs);

    let slopes = stream.upload(&[1f32, 0.5], [2]).unwrap();
    let of_slopes = PositionBias::Slopes { slopes: &slopes, distance: Distance::Linear, query_start: 0, key_start: 0 };
    assert_eq!(violated(plan(inputs.bias(of_slopes))), "flash.pse_slopes_square");
    let wide = stream.upload(&[0f32; 70], [1, 2, 5, 7]).unwrap();
    let of_floats = PositionBias::BeforeScale(&wide);
    assert_eq!(violated(plan(inputs.bias(of_floats))), "flash.pse_dtype");
    let sinks = stream.upload(&[0f32; 3], [3]).unwrap();
    assert_eq!(violated(plan(inputs.sink(&sinks))), "flash.sink_shape");

    for keep_prob in [0.0, -0.5, 1.5, f64::NAN] {
        let keeps = std::iter::repeat_n(true, 70);
        let refused = Dropout::new(&stream, keeps, keep_prob).unwrap_err();
        assert!(refused.breaks(&rules::ARGUMENT_VALUE), "{refused}");
    }
    let none = Dropout::new(&stream, std::iter::repeat_n(true, 0), 0.5);
    assert!(none.as_ref().is_err_and(|error| error.breaks(&rules::ARGUMENT_VALUE)));
    let keeps = (0..70).map(|bit| bit % 3 != 0);
    let dropout = Dropout::new(&stream, keeps, 1.0).unwrap();
    let bytes = dropout.mask().download(&stream).unwrap();
    assert_eq!(bytes.len(), 16, "the operator loads 16 bytes at once");
    assert_eq!(bytes[..2], [0b1011_0110, 0b0110_1101]);
    assert_eq!(violated(plan(inputs.dropout(&dropout))), "flash.drop_mask_unscaled");
    // As many bits as scores, and less than the operator loads.
    let short = stream.upload(&[u8::MAX; 9], [9]).unwrap();
    let short = Dropout::from_tensor(short, 0.5).unwrap();
    assert_eq!(violated(plan(inputs.dropout(&short))), "flash.drop_mask_short");
}

#[test]
fn plans_of_training_are_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<FlashPlan>();
    shared::<ascend_attention::ring::RingPlan>();
}

/// Attention by its definition in double precision: output, maximum and sum of one row that sees the keys of `visible`.
/// `scores` are those of its keys, `keeps` the factor of each probability.
fn row(
    scores: &[f64],
    values: &[Vec<f64>],
    visible: impl Fn(usize) -> bool,
    keeps: impl Fn(usize) -> f64,
) -> (Vec<f64>, f64, f64) {
    let seen: Vec<usize> = (0..scores.len()).filter(|&j| visible(j)).collect();
    let max = seen.iter().map(|&j| scores[j]).fold(f64::MIN, f64::max);
    let sum: f64 = seen.iter().map(|&j| (scores[j] - max).exp()).sum();
    let mut out = vec![0.0; values[0].len()];
    for &j in &seen {
        let weight = (scores[j] - max).exp() / sum * keeps(j);
        for (out, value) in out.iter_mut().zip(&values[j]) {
            *out += weight * value;
        }
    }
    (out, max, sum)
}

/// Rows of FLOAT32 with two heads, packed `[T, 2, D]`.
struct Packed {
    numbers: Vec<f32>,
    dim: usize,
}

impl Packed {
    const HEADS: usize = 2;

    fn new(seed: u64, rows: usize, dim: usize) -> Self {
        let numbers = harness::numbers(seed, rows * Self::HEADS * dim);
        Self { numbers, dim }
    }

    fn upload(&self, stream: &Stream) -> Tensor<f32> {
        let rows = self.numbers.len() / (Self::HEADS * self.dim);
        let shape = [rows, Self::HEADS, self.dim];
        stream.upload(&self.numbers, shape).unwrap()
    }

    fn row(&self, row: usize, head: usize) -> Vec<f64> {
        let first = (row * Self::HEADS + head) * self.dim;
        let numbers = &self.numbers[first..first + self.dim];
        numbers.iter().copied().map(f64::from).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn close(got: &[f32], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let apart = (f64::from(*got) - want).abs();
        assert!(apart <= 1e-5 * (1.0 + want.abs()), "{what} {at}: {got}, not {want}");
    }
}

#[test]
fn packed_sequences_are_attended_to_in_modes_7_and_8() {
    const DIM: usize = 64;
    let stream = harness::stream();
    let masks = stream.device().masks();
    let (query, keys) = (Packed::new(1, 12, DIM), Packed::new(2, 15, DIM));
    let values = Packed::new(3, 15, DIM);
    let tensors = [&query, &keys, &values].map(|packed| packed.upload(&stream));
    let [q, k, v] = &tensors;
    // Three sequences of 3, 4 and 5 rows over 3, 4 and 8 keys, or 6 and the same.
    let rows = [0usize, 3, 7, 12];
    let last = [0usize, 3, 7, 15];
    let first = [0usize, 6, 10, 15];
    for (mode, ends, next) in [(7, last, -1), (7, last, 0), (8, first, 0), (8, first, 2)] {
        let mask = match mode {
            7 => FlashMask::last_cut(&masks, 15, next),
            _ => FlashMask::first_cut(&masks, 15, next),
        };
        for like_query in [false, true] {
            let mut call = FlashAttention::new(InputLayout::Tnd)
                .heads(Packed::HEADS)
                .scale(0.125)
                .mask(mask.as_ref().unwrap().clone())
                .actual_seq_lengths(&rows[1..])
                .actual_seq_lengths_kv(&ends[1..]);
            if like_query {
                call = call.softmax_like_query();
            }
            let plan = call.plan((q, k, v)).unwrap();
            let output = plan.launch(&stream, (q, k, v)).unwrap();
            let (mut want, mut max, mut sum) = (vec![], vec![0.0; 12 * 2 * 8], vec![0.0; 12 * 2 * 8]);
            for i in 0..12 {
                let of = (0..3).find(|&of| i < rows[of + 1]).unwrap();
                let (first_row, first_key) = (rows[of], ends[of]);
                let (q_len, kv_len) = (rows[of + 1] - first_row, ends[of + 1] - first_key);
                let cut = of == if mode == 7 { 2 } else { 0 };
                let shift = kv_len as i64 - q_len as i64;
                let reach = match (cut, mode) {
                    (true, _) => shift + next,
                    (false, 7) => shift,
                    (false, _) => 0,
                };
                let i_own = i - first_row;
                for head in 0..2 {
                    let row_of_query = query.row(i, head);
                    let of_keys = first_key..first_key + kv_len;
                    let scores: Vec<f64> =
                        of_keys.clone().map(|j| 0.125 * dot(&row_of_query, &keys.row(j, head))).collect();
                    let values: Vec<_> = of_keys.map(|j| values.row(j, head)).collect();
                    let visible = |j: usize| j as i64 <= i_own as i64 + reach;
                    let (out, m, s) = row(&scores, &values, visible, |_| 1.0);
                    want.extend(out);
                    let at = match like_query {
                        true => i * 2 + head,
                        false => first_row * 2 + head * q_len + i_own,
                    };
                    max[at * 8..at * 8 + 8].fill(m);
                    sum[at * 8..at * 8 + 8].fill(s);
                }
            }
            let what = format!("mode {mode}, next {next}");
            close(&output.attention.download(&stream).unwrap(), &want, &what);
            close(&output.softmax.max().download(&stream).unwrap(), &max, &what);
            close(&output.softmax.sum().download(&stream).unwrap(), &sum, &what);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Each card of a batch that is divided in front of any row computes what the definition gives its rows.
    #[test]
    fn the_calls_of_two_cards_are_those_of_the_whole_batch(
        sequences in prop::collection::vec((0usize..40, 0usize..9), 1..4), at in 1usize..90, right_down: bool,
    ) {
        const DIM: usize = 64;
        let (mut q_ends, mut kv_ends) = (vec![0], vec![0]);
        for (rows, more) in sequences {
            q_ends.push(q_ends.last().unwrap() + rows);
            kv_ends.push(kv_ends.last().unwrap() + if right_down { rows + more } else { 1 + 3 * more });
        }
        let mode = if right_down { SparseMode::RightDownCausal } else { SparseMode::LeftUpCausal };
        let cut = CutBatch::new(&q_ends[1..], &kv_ends[1..], at, mode);
        prop_assume!(cut.is_some());
        let cut = cut.unwrap();
        let [query, keys, values] = [(1, &q_ends), (2, &kv_ends), (3, &kv_ends)]
            .map(|(seed, ends)| Packed::new(seed, *ends.last().unwrap(), DIM));
        let stream = harness::stream();
        let tensors = [&query, &keys, &values].map(|packed| packed.upload(&stream));
        // The keys of a card begin with its first sequence, and the second card has the cut one too.
        let of = q_ends.iter().rposition(|end| *end <= at).unwrap();
        let own = if cut.rows_before() > 0 { 0..cut.keys() } else { 0..0 };
        let call = |side: &CutSide, rows: usize, keys: usize| {
            let part = |tensor: &Tensor<f32>, first: usize, ends: Vec<usize>| {
                tensor.narrow(0, first..first + ends.last().unwrap()).unwrap()
            };
            let [q, k, v] = &tensors;
            let inputs = (part(q, rows, side.q_ends()), part(k, keys, side.kv_ends()), part(v, keys, side.kv_ends()));
            let inputs = (&inputs.0, &inputs.1, &inputs.2);
            let call = FlashAttention::new(InputLayout::Tnd)
                .heads(Packed::HEADS)
                .scale(0.125)
                .mask(FlashMask::cut(&stream.device().masks(), side).unwrap())
                .actual_seq_lengths(side.q_ends())
                .actual_seq_lengths_kv(side.kv_ends());
            let output = call.plan(inputs).unwrap().launch(&stream, inputs).unwrap();
            output.attention.download(&stream).unwrap()
        };
        let mut got = call(&cut.first(own).unwrap(), 0, 0);
        got.extend(call(&cut.second(0..cut.keys()).unwrap(), at, kv_ends[of]));
        let mut want = Vec::new();
        for i in 0..*q_ends.last().unwrap() {
            let of = q_ends.iter().rposition(|end| *end <= i).unwrap();
            let (rows, of_keys) = (q_ends[of + 1] - q_ends[of], kv_ends[of]..kv_ends[of + 1]);
            let reach = i - q_ends[of] + if right_down { of_keys.len() - rows } else { 0 };
            for head in 0..Packed::HEADS {
                let row_of_query = query.row(i, head);
                let scores: Vec<f64> = of_keys.clone().map(|j| 0.125 * dot(&row_of_query, &keys.row(j, head))).collect();
                let values: Vec<_> = of_keys.clone().map(|j| values.row(j, head)).collect();
                want.extend(row(&scores, &values, |j| j <= reach, |_| 1.0).0);
            }
        }
        close(&got, &want, "two cards");
    }
}

#[test]
fn dropout_keeps_what_its_bits_say_and_the_state_is_that_before() {
    const DIM: usize = 32;
    const ROWS: usize = 9;
    let stream = harness::stream();
    let [query, keys, values] = [4, 5, 6].map(|seed| Packed::new(seed, ROWS, DIM));
    // One batch entry in BSND has the strides of packed rows.
    let of = |packed: &Packed| packed.upload(&stream).reshape([1, ROWS, 2, DIM]).unwrap();
    let (q, k, v) = (of(&query), of(&keys), of(&values));
    let keep = |head: usize, i: usize, j: usize| !(head * 7 + i * 3 + j * 5).is_multiple_of(4);
    let keeps: Vec<bool> =
        (0..2).flat_map(|head| (0..ROWS * ROWS).map(move |at| keep(head, at / ROWS, at % ROWS))).collect();
    let dropout = Dropout::new(&stream, keeps.into_iter(), 0.75).unwrap();
    let prefix = FlashMask::prefix(&stream.device().masks(), [4]).unwrap();
    let inputs = FlashInputs::new(&q, &k, &v).dropout(&dropout);
    let call = FlashAttention::new(InputLayout::Bsnd).heads(2).scale(0.2).mask(prefix);
    let plan = call.plan(inputs).unwrap();
    let output = plan.launch(&stream, inputs).unwrap();
    let (mut want, mut sums) = (vec![], vec![0.0; 2 * ROWS * 8]);
    for i in 0..ROWS {
        for head in 0..2 {
            let row_of_query = query.row(i, head);
            let scores: Vec<f64> = (0..ROWS).map(|j| 0.2 * dot(&row_of_query, &keys.row(j, head))).collect();
            let values: Vec<_> = (0..ROWS).map(|j| values.row(j, head)).collect();
            let factor = |j| f64::from(u8::from(keep(head, i, j))) / 0.75;
            let (out, _, sum) = row(&scores, &values, |j| j < 4 || j <= i, factor);
            want.extend(out);
            let at = (head * ROWS + i) * 8;
            sums[at..at + 8].fill(sum);
        }
    }
    close(&output.attention.download(&stream).unwrap(), &want, "attention");
    close(&output.softmax.sum().download(&stream).unwrap(), &sums, "sum");

    // A launch without the mask, or with another share, is another call.
    let plain = plan.launch(&stream, (&q, &k, &v)).unwrap_err();
    assert!(plain.breaks(&rules::PLAN_TENSORS), "{plain}");
    let other = Dropout::from_tensor(dropout.mask().clone(), 0.5).unwrap();
    let other = plan.launch(&stream, inputs.dropout(&other)).unwrap_err();
    assert!(other.to_string().contains("keep_prob 0.5"), "{other}");
}

#[test]
fn merged_parts_equal_attention_over_all_keys() {
    const DIM: usize = 64;
    let stream = harness::stream();
    let [query, keys, values] = [7, 8, 9].map(|seed| Packed::new(seed, 20, DIM).upload(&stream));
    for like_query in [false, true] {
        let mut call = FlashAttention::new(InputLayout::Tnd).heads(2).scale(0.125);
        if like_query {
            call = call.softmax_like_query();
        }
        let call = call.actual_seq_lengths([8, 20]);
        let attend = |first: usize, middle: usize, last: usize| {
            let narrow = |tensor: &Tensor<f32>| tensor.narrow(0, first..last).unwrap();
            let (key, value) = (narrow(&keys), narrow(&values));
            let call = call.clone().actual_seq_lengths_kv([middle - first, last - first]);
            let plan = call.plan((&query, &key, &value)).unwrap();
            plan.launch(&stream, (&query, &key, &value)).unwrap()
        };
        // Of one sequence's rows at a time: its keys, in two parts.
        for cut in [3, 10, 17] {
            let (near, far) = (attend(0, cut / 2, cut), attend(cut, (cut + 20) / 2, 20));
            let plan = RingUpdate::new().plan(&stream, (&near, &far)).unwrap();
            let merged = plan.launch(&stream, (&near, &far)).unwrap();
            let again = plan.launch(&stream, (&far, &near)).unwrap();
            // The keys of each sequence in one call.
            let order: Vec<usize> =
                (0..cut / 2).chain(cut..(cut + 20) / 2).chain(cut / 2..cut).chain((cut + 20) / 2..20).collect();
            let gathered = |tensor: &Tensor<f32>| {
                let all = tensor.download(&stream).unwrap();
                let rows: Vec<f32> = order.iter().flat_map(|row| all[row * 2 * DIM..][..2 * DIM].to_vec()).collect();
                stream.upload(&rows, [20, 2, DIM]).unwrap()
            };
            let (key, value) = (gathered(&keys), gathered(&values));
            let middle = cut / 2 + (cut + 20) / 2 - cut;
            let whole = call.clone().actual_seq_lengths_kv([middle, 20]);
            let whole = whole.plan((&query, &key, &value)).unwrap();
            let whole = whole.launch(&stream, (&query, &key, &value)).unwrap();
            for merged in [merged, again] {
                assert_eq!(merged.softmax.order(), whole.softmax.order());
                for (got, want) in [
                    (&merged.attention, &whole.attention),
                    (merged.softmax.max(), whole.softmax.max()),
                    (merged.softmax.sum(), whole.softmax.sum()),
                ] {
                    let want = want.download(&stream).unwrap();
                    let want: Vec<f64> = want.into_iter().map(f64::from).collect();
                    close(&got.download(&stream).unwrap(), &want, "merged");
                }
            }
        }
    }
}

#[test]
fn rows_whose_keys_are_all_hidden_are_zeros_where_the_call_says_so() {
    let stream = harness::stream();
    let query = stream.upload(&[0f32; 3 * 16], [1, 1, 3, 16]).unwrap();
    let numbers: Vec<f32> = (0..4 * 16).map(|at| (at / 16) as f32).collect();
    let value = stream.upload(&numbers, [1, 1, 4, 16]).unwrap();
    let hidden: Vec<bool> = (0..12).map(|at| at / 4 == 1).collect();
    let mask = stream.upload(&hidden, [1, 1, 3, 4]).unwrap();
    let call = FlashAttention::new(InputLayout::Bnsd).heads(1).scale(1.0);
    let call = call.mask(Mask::all_mask(mask));
    for (call, row, max, sum) in
        [(call.clone(), 1.5, f32::MIN, 4.0), (call.zero_masked_rows(), 0.0, f32::MIN, f32::MAX)]
    {
        let plan = call.plan((&query, &value, &value)).unwrap();
        let output = plan.launch(&stream, (&query, &value, &value)).unwrap();
        let attention = output.attention.download(&stream).unwrap();
        let rows: Vec<f32> = attention.chunks(16).map(|row| row[0]).collect();
        assert_eq!(rows, [1.5, row, 1.5]);
        let state = [output.softmax.max(), output.softmax.sum()];
        let state = state.map(|of| of.download(&stream).unwrap()[8]);
        assert_eq!(state, [max, sum]);
    }
}

#[test]
fn parts_without_their_marked_tails_are_merged() {
    let stream = harness::stream();
    let rows = Packed::new(1, 12, 64).upload(&stream);
    let part = |rows: &Tensor<f32>, ends: &[usize]| {
        let call = FlashAttention::new(InputLayout::Tnd).heads(2).scale(0.125);
        let call = call.actual_seq_lengths(ends).actual_seq_lengths_kv(ends);
        let plan = call.plan((rows, rows, rows)).unwrap();
        plan.launch(&stream, (rows, rows, rows)).unwrap()
    };
    let tailed = part(&rows, &[3, 9, 0]);
    let refused = RingUpdate::new().plan(&stream, (&tailed, &tailed));
    let Err(Error::Violation(refused)) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!(refused.rule.id, "ring.lengths");
    assert!(refused.fix.contains("end with the last sequence's rows"), "{refused}");
    let whole = part(&rows.narrow(0, 0..9).unwrap(), &[3, 9]);
    let plan = RingUpdate::new().plan(&stream, (&whole, &whole)).unwrap();
    let merged = plan.launch(&stream, (&whole, &whole)).unwrap();
    assert_eq!(merged.attention.download(&stream).unwrap(), tailed.attention.download(&stream).unwrap()[..9 * 2 * 64]);
}

#[test]
fn parts_of_other_rows_are_not_merged() {
    let stream = harness::stream();
    let rows = Packed::new(1, 12, 64).upload(&stream);
    let part = |ends: [usize; 2], like_query: bool| {
        let mut call = FlashAttention::new(InputLayout::Tnd).heads(2).scale(0.125);
        if like_query {
            call = call.softmax_like_query();
        }
        let call = call.actual_seq_lengths(ends).actual_seq_lengths_kv(ends);
        let plan = call.plan((&rows, &rows, &rows)).unwrap();
        plan.launch(&stream, (&rows, &rows, &rows)).unwrap()
    };
    let first = part([3, 12], false);
    for other in [part([4, 12], false), part([3, 12], true)] {
        let refused = RingUpdate::new().plan(&stream, (&first, &other)).unwrap_err();
        assert!(refused.to_string().contains("those of the previous part"), "{refused}");
        let plan = RingUpdate::new().plan(&stream, (&first, &first)).unwrap();
        let refused = plan.launch(&stream, (&first, &other)).unwrap_err();
        assert!(matches!(
            &refused,
            Error::Violation(violation)
                if violation.rule.id == "plan.tensors"
                    && violation.given.starts_with("current: ")
        ));
    }
    // Batches in other layouts than SBH are not what the operator reads.
    let batch = rows.reshape([1, 12, 2, 64]).unwrap();
    let call = FlashAttention::new(InputLayout::Bsnd).heads(2).scale(0.125);
    let plan = call.plan((&batch, &batch, &batch)).unwrap();
    let part = plan.launch(&stream, (&batch, &batch, &batch)).unwrap();
    let refused = RingUpdate::new().plan(&stream, (&part, &part)).unwrap_err();
    assert!(refused.to_string().contains("in the layout SBH or TND"), "{refused}");
}
