//! Whatever the shape, layout, mask and lengths: the numbers are those of attention's definition.

use crate::harness;
use approx::abs_diff_eq;

use ascend_attention::attention::Inputs;
use ascend_attention::{
    AnyTensor, CausalOrigin, Error, FusedInferAttention, InnerPrecise, Layout, Mask, Stream, Tensor, bf16, f16,
};
use harness::reference::{Half, Logical, Sees, axes, row};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};

/// A mask tensor: rank, element type, rows and keys beyond the needed ones, and whether it has one batch entry for all.
#[derive(Clone, Copy, Debug)]
struct MaskShape {
    rank: usize,
    dtype: u8,
    extra: usize,
    broadcast: bool,
}

#[derive(Clone, Debug)]
struct Call {
    layout: Layout,
    batch: usize,
    kv_heads: usize,
    group: usize,
    rows: usize,
    /// Rows of each sequence's keys; one entry if they share a tensor.
    keys: Vec<usize>,
    dim: usize,
    mode: u8,
    tokens: (i64, i64),
    mask: MaskShape,
    q_lens: Option<Vec<usize>>,
    kv_lens: Option<Vec<usize>>,
    lse: bool,
    corrected: bool,
    scale: f64,
    seed: u64,
}

impl Call {
    fn is_list(&self) -> bool {
        self.keys.len() > 1
    }

    fn decodes(&self) -> bool {
        self.rows == 1
    }

    fn q_len(&self, b: usize) -> usize {
        length(self.q_lens.as_deref().filter(|_| !self.decodes()), b, self.rows)
    }

    fn kv_len(&self, b: usize) -> usize {
        let rows = self.keys[if self.is_list() { b } else { 0 }];
        length(self.kv_lens.as_deref(), b, rows)
    }

    /// What the mode shows, and whether it takes a full mask tensor.
    fn sees(&self) -> (Sees, bool) {
        let (pre, next) = self.tokens;
        match self.mode {
            0 => (Sees::All, false),
            1 => (Sees::All, true),
            2 => (Sees::LeftUp, false),
            3 => (Sees::RightDown, false),
            4 => (Sees::Band(pre, next), false),
            // Mode 0 with a tensor. A single row sees by the tensor alone.
            _ if self.decodes() => (Sees::All, true),
            _ => (Sees::Window(pre, next), true),
        }
    }
}

fn length(lengths: Option<&[usize]>, b: usize, all: usize) -> usize {
    match lengths {
        None => all,
        Some([one]) => *one,
        Some(several) => several[b],
    }
}

/// Content of a full mask: whether row `i` of entry `b` may not see key `j`.
fn hides(seed: u64, b: usize, i: usize, j: usize) -> bool {
    let x = (seed ^ (b as u64) << 40 ^ (i as u64) << 20 ^ j as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (x >> 33).is_multiple_of(3)
}

fn full_mask(call: &Call, stream: &Stream) -> Mask {
    let shape = call.mask;
    let keys = call.keys.iter().max().unwrap() + shape.extra;
    let (batch, rows, dims) = if call.decodes() {
        let dims = match shape.rank {
            2 => vec![call.batch, keys],
            3 => vec![call.batch, 1, keys],
            _ => vec![call.batch, 1, 1, keys],
        };
        (call.batch, 1, dims)
    } else {
        let rows = call.rows + shape.extra;
        let batch = if shape.broadcast || shape.rank == 2 { 1 } else { call.batch };
        let dims = match shape.rank {
            2 => vec![rows, keys],
            3 => vec![batch, rows, keys],
            _ => vec![batch, 1, rows, keys],
        };
        (batch, rows, dims)
    };
    let mut content = Vec::new();
    for b in 0..batch {
        for i in 0..rows {
            content.extend((0..keys).map(|j| hides(call.seed, b, i, j)));
        }
    }
    let make = |tensor: ascend_attention::AnyTensor| match call.mode {
        1 => Mask::all_mask(tensor),
        _ if call.decodes() => Mask::default_mask(tensor, Mask::ALL_TOKENS, Mask::ALL_TOKENS),
        _ => Mask::default_mask(tensor, call.tokens.0, call.tokens.1),
    };
    let bytes = || content.iter().map(|&hidden| u8::from(hidden)).collect::<Vec<_>>();
    match shape.dtype {
        0 => make(stream.upload(&content, dims).unwrap().into()),
        1 => make(stream.upload(&bytes(), dims).unwrap().into()),
        _ => make(stream.upload(&bytes().iter().map(|&b| b as i8).collect::<Vec<_>>(), dims).unwrap().into()),
    }
}

fn check<T: Half>(call: &Call) -> Result<(), TestCaseError> {
    let stream = harness::stream();
    let (input, out_axes) = axes(call.layout);
    let heads = call.kv_heads * call.group;
    let q = Logical::random(call.seed, [call.batch, heads, call.rows, call.dim]);
    let kv_batch = if call.is_list() { 1 } else { call.batch };
    let kv = |salt: u64| -> Vec<Logical<T>> {
        let each = call.keys.iter().enumerate();
        each.map(|(b, &rows)| Logical::random(call.seed + salt + b as u64, [kv_batch, call.kv_heads, rows, call.dim]))
            .collect()
    };
    let (k, v) = (kv(100), kv(200));
    let exact = |list: &[Logical<T>]| -> Vec<_> { list.iter().map(Logical::exact).collect() };
    let (exact_q, exact_k, exact_v) = (q.exact(), exact(&k), exact(&v));
    let upload = |logical: &Logical<T>| -> Tensor<T> {
        let (shape, data) = logical.pack(input);
        stream.upload(&data, shape).unwrap()
    };
    let query = upload(&q);
    let keys: Vec<_> = k.iter().map(upload).collect();
    let values: Vec<_> = v.iter().map(upload).collect();

    let device = stream.device();
    let (sees, tensor) = call.sees();
    let mask = match call.mode {
        0 => Mask::none(),
        2 => device.masks().causal(CausalOrigin::LeftUp).unwrap(),
        3 => device.masks().causal(CausalOrigin::RightDown).unwrap(),
        4 => device.masks().band(call.tokens.0, call.tokens.1).unwrap(),
        _ => full_mask(call, &stream),
    };
    let mut attention = FusedInferAttention::new(call.layout)
        .heads(heads)
        .kv_heads(call.kv_heads)
        .scale(call.scale)
        .softmax_lse(call.lse)
        .mask(mask);
    if let Some(lengths) = call.q_lens.clone().filter(|_| !call.decodes()) {
        attention = attention.actual_seq_lengths(lengths);
    }
    if let Some(lengths) = call.kv_lens.clone() {
        attention = attention.actual_seq_lengths_kv(lengths);
    }
    if call.corrected && !call.decodes() {
        attention = attention.inner_precise(InnerPrecise::HighPrecisionCorrected);
    }
    let (keys, values): (Vec<&AnyTensor>, Vec<&AnyTensor>) =
        keys.iter().zip(&values).map(|(key, value)| (&**key, &**value)).unzip();
    let inputs = Inputs::lists(&query, &keys, &values);
    let plan = match attention.plan(inputs) {
        Ok(plan) => plan,
        // Random windows need not hold the rules for windows.
        Err(Error::Violation(violation)) if violation.rule.id.contains("tokens") => return Ok(()),
        Err(error) => return Err(TestCaseError::fail(error.to_string())),
    };
    let mut output = harness::poisoned::<T>(&plan, &stream);
    plan.launch_into(&stream, inputs, &mut output).unwrap();
    let got = output.attention.download(&stream).unwrap();
    let lse = output.softmax_lse.map(|lse| lse.download(&stream).unwrap());
    prop_assert_eq!(got.len(), q.data.len());
    prop_assert_eq!(lse.is_some(), call.lse);

    for b in 0..call.batch {
        let (list, kv_b) = if call.is_list() { (b, 0) } else { (0, b) };
        let (sq, skv) = (call.q_len(b), call.kv_len(b));
        for head in 0..heads {
            for i in 0..sq {
                let by_mode = |j: usize| j < skv && sees.sees(i, j, sq, skv);
                let mask_b = if !call.decodes() && (call.mask.broadcast || call.mask.rank == 2) { 0 } else { b };
                let shown = |j: usize| by_mode(j) && !(tensor && hides(call.seed, mask_b, i, j));
                let want = row(&exact_q, &exact_k[list], &exact_v[list], (b, kv_b), head, i, call.scale, shown);
                let masked_by_tensor = want.is_none() && (0..skv).any(by_mode);
                if masked_by_tensor && (!call.corrected || call.decodes()) {
                    // The operator's additive masking gives such a row some mean of the values.
                    continue;
                }
                let zero = (vec![0.0; call.dim], f64::NAN);
                let (row, sum) = want.unwrap_or(zero);
                for (d, want) in row.iter().enumerate() {
                    let got = got[q.index(out_axes, b, head, i, d)].to_f64();
                    prop_assert!(
                        abs_diff_eq!(got, want, epsilon = T::TOLERANCE),
                        "batch {b} head {head} row {i} element {d}: {got}, expected {want}"
                    );
                }
                if let Some(lse) = lse.as_ref().filter(|_| !sum.is_nan()) {
                    let got = f64::from(lse[(b * heads + head) * call.rows + i]);
                    prop_assert!(abs_diff_eq!(got, sum, epsilon = 1e-3), "lse {got}, expected {sum}");
                }
            }
        }
    }
    Ok(())
}

fn calls() -> impl Strategy<Value = Call> {
    let layouts = prop::sample::select(vec![Layout::Bsh, Layout::Bsnd, Layout::Bnsd, Layout::BnsdBsnd]);
    let sizes = (1usize..4, 1usize..4, 1usize..5, prop_oneof![Just(1usize), 2usize..40], 1usize..80);
    let dims = prop::sample::select(vec![16usize, 32, 48, 64, 80, 128]);
    let masks = (2usize..5, 0u8..3, 0usize..9, any::<bool>());
    let options = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let tokens = (-6i64..30, -6i64..30);
    (layouts, sizes, dims, 0u8..6, tokens, masks, options, any::<u32>()).prop_map(
        |(layout, (batch, kv_heads, group, rows, keys), dim, mode, tokens, mask, options, seed)| {
            let (rank, dtype, extra, broadcast) = mask;
            let (list, some_q, some_kv, lse, corrected) = options;
            let rows = if layout == Layout::BnsdBsnd { rows.max(2) } else { rows };
            // The releases read a compressed mask differently for a single row: it goes without.
            let mode = match mode {
                2..=4 if rows == 1 => 0,
                mode => mode,
            };
            let tokens = if rows == 1 { (tokens.0.abs(), tokens.1.abs()) } else { tokens };
            let seed = u64::from(seed);
            let vary = |most: usize, b: usize, least: usize| least + (seed as usize + 7 * b) % (most + 1 - least);
            let keys = if list && batch > 1 { (0..batch).map(|b| vary(keys, b, 1)).collect() } else { vec![keys] };
            let least = usize::from(mode >= 4);
            let q_lens = (0..batch).map(|b| vary(rows, b, least)).collect();
            let kv_lens = (0..batch).map(|b| vary(keys[b.min(keys.len() - 1)], b + 3, least));
            Call {
                layout,
                batch,
                kv_heads,
                group,
                rows,
                kv_lens: some_kv.then(|| kv_lens.collect()),
                keys,
                dim,
                mode,
                tokens,
                mask: MaskShape { rank, dtype, extra, broadcast },
                q_lens: some_q.then_some(q_lens),
                lse,
                corrected,
                scale: 2.0 / (dim as f64).sqrt(),
                seed,
            }
        },
    )
}

fn config() -> Config {
    Config { cases: 96, failure_persistence: None, ..Config::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn f16_is_attention(call in calls()) {
        check::<f16>(&call)?;
    }

    #[test]
    fn bf16_is_attention(call in calls()) {
        check::<bf16>(&call)?;
    }
}

fn plain(layout: Layout, rows: usize, keys: usize, dim: usize) -> Call {
    Call {
        layout,
        batch: 2,
        kv_heads: 2,
        group: 2,
        rows,
        keys: vec![keys],
        dim,
        mode: 0,
        tokens: (0, 0),
        mask: MaskShape { rank: 2, dtype: 0, extra: 0, broadcast: false },
        q_lens: None,
        kv_lens: None,
        lse: true,
        corrected: false,
        scale: 1.0 / (dim as f64).sqrt(),
        seed: 11,
    }
}

#[test]
fn every_head_dimension_works() {
    for dim in [16, 96, 192, 256, 512] {
        check::<f16>(&plain(Layout::Bnsd, 5, 33, dim)).unwrap();
        check::<bf16>(&plain(Layout::Bsh, 1, 33, dim)).unwrap();
    }
}

#[test]
fn long_sequences_cross_every_tile_border() {
    for mode in [0, 2, 3, 4] {
        let mut call = plain(Layout::Bsnd, 300, 517, 64);
        (call.batch, call.mode, call.tokens) = (1, mode, (100, 20));
        check::<f16>(&call).unwrap();
    }
}

#[test]
fn one_key_head_may_serve_all_query_heads() {
    let mut call = plain(Layout::Bsh, 9, 40, 32);
    (call.kv_heads, call.group) = (1, 8);
    check::<f16>(&call).unwrap();
}

#[test]
fn empty_tensors_are_no_work_or_zeros() {
    let stream = harness::stream();
    let attention = FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(2).softmax_lse(true);
    let tensor = |rows: usize| stream.upload(&harness::halves(1, 2 * rows * 16), [1, 2, rows, 16]).unwrap();
    let (none, some) = (tensor(0), tensor(8));
    assert!(none.is_empty() && none.as_raw().is_null());

    let plan = attention.plan((&none, &some, &some)).unwrap();
    let output = plan.launch(&stream, (&none, &some, &some)).unwrap();
    assert_eq!(output.attention.download(&stream).unwrap(), []);

    let plan = attention.plan((&some, &none, &none)).unwrap();
    let mut output = harness::poisoned::<f16>(&plan, &stream);
    plan.launch_into(&stream, (&some, &none, &none), &mut output).unwrap();
    assert_eq!(output.attention.download(&stream).unwrap(), vec![f16::ZERO; 2 * 8 * 16]);
    let lse = output.softmax_lse.unwrap().download(&stream).unwrap();
    assert_eq!(lse, vec![f32::INFINITY; 16]);
}
