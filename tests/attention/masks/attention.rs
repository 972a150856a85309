//! Attention under masks.

use approx::assert_abs_diff_eq;
use std::num::NonZeroU64;

use ascend_attention::attention::Inputs;
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::spec::geometry::{ContextShard, TokenTree};
use ascend_attention::spec::{Cann, DType, Soc};
use ascend_attention::{CausalOrigin, FusedInferAttention, Layout, Machine, Mask, Runtime, SparseMode, Stream, f16};

use super::window;
use crate::harness::reference::Logical;
use crate::harness::{attends, halves, poisoned, stream};

#[test]
fn attention_under_each_mask_sees_what_the_mask_says() {
    let stream = stream();
    let masks = stream.device().masks();
    let (rows, keys) = (40, 100);
    let at = |i: usize| i + keys - rows;
    let size = (rows, keys);
    attends(&stream, size, masks.bidirectional(), |_, _| true);
    attends(&stream, size, masks.chunked_prefill().unwrap(), |i, j| j <= at(i));
    attends(&stream, size, masks.pooling(true).unwrap(), |i, j| j <= at(i));
    for origin in [CausalOrigin::LeftUp, CausalOrigin::RightDown] {
        let end = |i| {
            if origin == CausalOrigin::LeftUp { i } else { at(i) }
        };
        // The full mask is larger than the call: the square has grown for another.
        let _ = masks.causal_full(origin, 150, 150).unwrap();
        let full = masks.causal_full(origin, rows, keys).unwrap();
        assert!(full.tensor_bytes() > rows * keys);
        attends(&stream, size, full, |i, j| j <= end(i));
        attends(&stream, size, masks.causal(origin).unwrap(), |i, j| j <= end(i));
    }
    for w in [1, 2, 17, 100, 101] {
        let sees = |i: usize, j: usize| j <= at(i) && at(i) - j < w;
        attends(&stream, size, masks.sliding_window(window(w)).unwrap(), sees);
        let matrix = masks.sliding_window_matrix(window(w), rows, keys, MaskForm::INT8).unwrap();
        attends(&stream, size, Mask::all_mask(matrix), sees);
    }
    attends(&stream, size, masks.prefix(80, rows, keys).unwrap(), |i, j| j < 80 || j <= at(i));
    let chunk = NonZeroU64::new(16).unwrap();
    let local = masks.local(chunk, rows, keys).unwrap();
    attends(&stream, size, local, |i, j| j <= at(i) && j / 16 == at(i) / 16);
    let shard = ContextShard::new(NonZeroU64::new(3).unwrap(), NonZeroU64::MIN, 2).unwrap();
    let rank = masks.context_parallel(&[shard.rows(1, 3)], 3, 2).unwrap();
    attends(&stream, (3, 2), rank, |i, j| 3 * j + 2 <= i + 1);
    let tree = TokenTree::new(&[-1, 0, 0, 2, 3, 1]).unwrap();
    let mask = masks.tree(&[tree.behind(20)], 6, 26).unwrap();
    attends(&stream, (6, 26), mask, |i, j| j < 20 || tree.continues(i, j - 20));
    let float = HostMask::from_fn(rows, keys, MaskForm::lowest(DType::Bf16).unwrap(), |i, j| (i + j) % 3 == 0);
    let custom = masks.custom(&float.unwrap()).unwrap();
    attends(&stream, size, custom, |i, j| (i + j) % 3 == 0);
}

#[track_caller]
fn same(parts: &[f16], whole: &[f16]) {
    assert_eq!(parts.len(), whole.len());
    for (part, whole) in parts.iter().zip(whole) {
        assert_abs_diff_eq!(part.to_f32(), whole.to_f32(), epsilon = 1e-3);
    }
}

/// The cut sequences of sparse modes 7 and 8 as inference operators can compute them: the card that has the band uses
/// mode 4 with the tokens of the cut.
#[test]
fn attention_of_a_sequence_cut_between_two_cards_is_that_of_the_whole() {
    let stream = stream();
    let masks = stream.device().masks();
    let dim = 16;
    let (key, value) = (halves(2, 6 * dim), halves(3, 6 * dim));
    let query = halves(1, 5 * dim);
    let of = |rows: std::ops::Range<usize>, keys: usize, mask: Mask| {
        let query = stream.upload(&query[rows.start * dim..rows.end * dim], [1, 1, rows.len(), dim]);
        let keys = |data: &[f16]| stream.upload(&data[..keys * dim], [1, 1, keys, dim]).unwrap();
        let (query, key, value) = (query.unwrap(), keys(&key), keys(&value));
        let plan = FusedInferAttention::new(Layout::Bnsd).scale(1.0).mask(mask).plan((&query, &key, &value)).unwrap();
        let mut output = poisoned(&plan, &stream);
        plan.launch_into(&stream, (&query, &key, &value), &mut output).unwrap();
        output.attention.download(&stream).unwrap()
    };
    let causal = |origin| masks.causal(origin).unwrap();
    // Mode 7: 4 rows of 6 keys, cut to 2 and 2.
    let right = CausalOrigin::RightDown;
    let whole = of(0..4, 6, causal(right));
    let parts = [of(0..2, 6, masks.band(6, -2).unwrap()), of(2..4, 6, causal(right))];
    same(&parts.concat(), &whole);
    // Mode 8: 5 rows of 4 keys, cut to 2 and 3.
    let left = CausalOrigin::LeftUp;
    let whole = of(0..5, 4, causal(left));
    let parts = [of(0..2, 4, causal(left)), of(2..5, 4, masks.band(4, 1).unwrap())];
    same(&parts.concat(), &whole);
}

/// Rows that a call with rotary parts and a mask computes; queries of `rows` and keys of `keys` a sequence, padded or
/// packed.
fn with_rotary_parts(stream: &Stream, layout: Layout, (rows, keys): (&[usize], &[usize]), mask: Mask) -> Vec<f16> {
    let (heads, packed) = (2, layout.is_packed());
    let tensor = |seed, lengths: &[usize], dim: usize| {
        let longest = lengths.iter().copied().max().unwrap();
        let shape = match packed {
            true => vec![lengths.iter().sum(), heads, dim],
            false => vec![lengths.len(), longest, heads, dim],
        };
        let elements = shape.iter().product::<usize>();
        let data = Logical::<f16>::random(seed, [1, 1, 1, elements]).data;
        stream.upload(&data, shape).unwrap()
    };
    let (query, query_rope) = (tensor(1, rows, 128), tensor(2, rows, 64));
    let (key, value) = (tensor(3, keys, 128), tensor(4, keys, 128));
    let key_rope = tensor(5, keys, 64);
    let ends = |lengths: &[usize]| -> Vec<usize> {
        let mut end = 0;
        let cumulative = lengths.iter().map(|len| {
            end += len;
            if packed { end } else { *len }
        });
        cumulative.collect()
    };
    let inputs = Inputs::new(&query, &key, &value).rope(&query_rope, &key_rope);
    let plan = FusedInferAttention::new(layout)
        .heads(heads)
        .kv_heads(heads)
        .scale(1.0 / 192f64.sqrt())
        .actual_seq_lengths(ends(rows))
        .actual_seq_lengths_kv(ends(keys))
        .mask(mask)
        .plan(inputs)
        .unwrap();
    let output = plan.launch(stream, inputs).unwrap();
    let all = output.attention.download(stream).unwrap();
    let longest = rows.iter().copied().max().unwrap();
    let row = heads * 128;
    let kept = rows.iter().enumerate().flat_map(|(b, len)| match packed {
        true => all[rows[..b].iter().sum::<usize>() * row..][..len * row].to_vec(),
        false => all[b * longest * row..][..len * row].to_vec(),
    });
    kept.collect()
}

#[test]
fn masks_of_drafts_alone_show_what_full_masks_of_the_trees_show() {
    let machine = Machine::new(Soc::AtlasA2, Cann::V9_1);
    let device = Runtime::emulated_as(&machine).unwrap().device(0).unwrap();
    let stream = device.stream().unwrap();
    let trees = [
        TokenTree::new(&[-1, 0, 0, 1, 1, 2, 3]).unwrap(),
        TokenTree::new(&[-1, 0, 1, 0]).unwrap(),
        TokenTree::new(&[-1]).unwrap(),
    ];
    let contexts = [33, 130, 5];
    let each: Vec<&TokenTree> = trees.iter().collect();
    let rows: Vec<usize> = trees.iter().map(TokenTree::len).collect();
    let keys: Vec<usize> = rows.iter().zip(contexts).map(|(len, context)| len + context).collect();
    let behind: Vec<_> = trees.iter().zip(contexts).map(|(tree, context)| tree.behind(context as u64)).collect();
    let full = || device.masks().tree(&behind, 7, 134).unwrap();
    for (layout, drafts) in [
        (Layout::Bsnd, device.masks().drafts(&each, 7).unwrap()),
        (Layout::Tnd, device.masks().packed_drafts(&each).unwrap()),
    ] {
        assert_eq!(drafts.sparse_mode(), SparseMode::Tree);
        let shape = drafts.tensor().unwrap().shape().to_vec();
        assert_eq!(shape, if layout == Layout::Tnd { vec![49 + 16 + 1] } else { vec![3, 7, 7] });
        let lengths = (&rows[..], &keys[..]);
        let by_drafts = with_rotary_parts(&stream, layout, lengths, drafts);
        let by_all = with_rotary_parts(&stream, layout, lengths, full());
        assert_eq!(by_drafts, by_all, "{layout}");
        let seen = with_rotary_parts(&stream, layout, lengths, device.masks().causal(CausalOrigin::RightDown).unwrap());
        assert_ne!(by_drafts, seen, "{layout}: the trees branch");
    }
}
