//! Latent keys and values, which are normalised, rotated and put into caches.

use super::rows::Argument::{Absent, Int, Real, Text as Name};
use super::rows::*;
use super::tensors::*;
use crate::bench::*;
use crate::flash_family::call::on_chip;
use ascend_emu::abi::*;
use ascend_emu::glue::*;
use ascend_sys::bindings::aclDataType;
use proptest::prelude::*;
use std::ffi::CString;
use std::ptr::{null, null_mut};

const HALF: aclDataType = aclDataType::ACL_FLOAT16;

/// Elements of a latent and of a rotated key on Atlas A2 and A3.
const ATLAS: [i64; 2] = [512, 64];

/// One token whose latent is all 2, which the norm makes 1, and whose pairs a quarter turn moves.
pub(crate) fn rows() -> Vec<Row> {
    let latent = || std::iter::repeat_n(2, 512);
    let pairs: Vec<i32> = (0..64).collect();
    // (a, b) becomes (-b, a), the first of all pairs before the second of all.
    let turned: Vec<i32> = (0..32).map(|i| -(2 * i + 1)).chain((0..32).map(|i| 2 * i)).collect();
    let after = |row: Vec<i32>, width: usize| {
        let mut cache = vec![0; 16 * width];
        cache[3 * width..4 * width].copy_from_slice(&row);
        cache
    };
    let empty = |width: i64| f16([1, 16, 1, width], vec![0; 16 * width as usize]);
    let kv: Vec<i32> = latent().chain(pairs).collect();
    vec![row(
        "aclnnKvRmsNormRopeCache",
        [
            f16([1, 1, 1, 576], kv).read(),
            f16([512], vec![1; 512]).read(),
            f16([1, 1, 1, 64], vec![0; 64]).read(),
            f16([1, 1, 1, 64], vec![1; 64]).read(),
            i64([1], [3]).read(),
            empty(64).becomes(after(turned.clone(), 64)),
            empty(512).becomes(after(vec![1; 512], 512)),
            Absent,
            Absent,
            Absent,
            Absent,
            Real(0.0),
            Name("PA_BNSD"),
            Int(1),
            f16([1, 1, 1, 64], turned).written(),
            f16([1, 1, 1, 512], vec![1; 512]).written(),
        ],
    )]
}

/// A call of the operator.
struct Call {
    kv: Tensor,
    gamma: Tensor,
    angles: [Tensor; 2],
    index: Tensor,
    caches: [Tensor; 2],
    outputs: [Tensor; 2],
    epsilon: f64,
    mode: &'static str,
    with_outputs: bool,
}

impl Call {
    /// A call of packed tensors. The elements of a token are `latent` and `rope`; a cache has `blocks` of `block`
    /// tokens, or as many sequences.
    fn new(
        [batch, tokens, latent, rope]: [i64; 4],
        [blocks, block]: [i64; 2],
        (mode, positions): (&'static str, &[i64]),
        values: &[f64],
    ) -> Self {
        let packed = |shape: &[i64], values: &[f64]| Tensor::packed(HALF, shape, values);
        let cache = |width| match mode {
            "Norm" => packed(&[blocks, 1, block, width], &[0.25]),
            _ => packed(&[blocks, block, 1, width], &[0.25]),
        };
        let of_index = match mode {
            "Norm" => vec![batch, tokens],
            _ => vec![positions.len() as i64],
        };
        let turned: Vec<f64> = values.iter().rev().map(|value| value / 2.0).collect();
        Call {
            kv: packed(&[batch, 1, tokens, latent + rope], values),
            gamma: packed(&[latent], &[1.0, -0.5, 2.0]),
            angles: [&turned, values].map(|values| packed(&[batch, 1, tokens, rope], values)),
            index: Tensor::ints(&of_index, positions),
            caches: [rope, latent].map(cache),
            outputs: [rope, latent].map(|width| packed(&[batch, 1, tokens, width], &[0.25])),
            epsilon: 0.5,
            mode,
            with_outputs: true,
        }
    }

    fn run(&self) -> i32 {
        let mode = CString::new(self.mode).unwrap();
        let none = OptionalIn(null());
        let [keys, latents] = &self.caches;
        let [keys_out, latents_out] = &self.outputs;
        call!(aclnnKvRmsNormRopeCache(
            self.kv.input(),
            self.gamma.input(),
            self.angles[0].input(),
            self.angles[1].input(),
            self.index.input(),
            keys.in_out(),
            latents.in_out(),
            none,
            none,
            none,
            none,
            self.epsilon,
            Text(mode.as_ptr()),
            Flag(self.with_outputs.into()),
            keys_out.out(),
            latents_out.out(),
        ))
    }

    /// The rotated and the normalised elements of all tokens.
    fn wanted(&self) -> [Vec<Vec<f64>>; 2] {
        let latent = self.gamma.view.count();
        let rope = *self.angles[0].view.shape.last().unwrap() as usize;
        let gamma = self.gamma.values();
        let tokens = self.outputs[0].view.count() / rope;
        let angles = self.angles.each_ref().map(|angles| {
            let all = angles.broadcast(&self.outputs[0].view.shape);
            all.chunks(rope).map(<[f64]>::to_vec).collect::<Vec<_>>()
        });
        let kv = self.kv.values();
        let mut wanted = [Vec::new(), Vec::new()];
        for token in 0..tokens {
            let line = &kv[token * (latent + rope)..][..latent + rope];
            let (first, rest) = line.split_at(latent);
            let square = first.iter().map(|value| value * value).sum::<f64>() / latent as f64;
            let norm = (square + self.epsilon).sqrt();
            wanted[1].push(first.iter().zip(&gamma).map(|(value, gamma)| value / norm * gamma).collect());
            let even: Vec<f64> = rest.iter().copied().step_by(2).collect();
            let odd: Vec<f64> = rest.iter().copied().skip(1).step_by(2).collect();
            let straight = even.iter().chain(&odd).copied();
            let turned = odd.iter().map(|value| -value).chain(even.iter().copied());
            let factors = angles[0][token].iter().zip(&angles[1][token]);
            let all = straight.zip(turned).zip(factors);
            wanted[0].push(all.map(|((a, b), (cos, sin))| a * cos + b * sin).collect());
        }
        wanted
    }

    /// Checks caches, in which `slots` has the block and the place of each token, and outputs.
    fn check(&self, slots: &[Option<(i64, i64)>], written: bool) {
        let wanted = self.wanted();
        for ((cache, out), rows) in self.caches.iter().zip(&self.outputs).zip(&wanted) {
            let width = rows[0].len();
            let mut want = vec![0.25; cache.view.count()];
            let block = cache.view.shape[1].max(cache.view.shape[2]) as usize;
            for (row, slot) in rows.iter().zip(slots) {
                let Some((number, place)) = *slot else {
                    continue;
                };
                let start = number as usize * block * width;
                for (element, &value) in row.iter().enumerate() {
                    let at = match self.mode.ends_with("NZ") {
                        true => (element / 16 * block + place as usize) * 16 + element % 16,
                        false => place as usize * width + element,
                    };
                    want[start + at] = value;
                }
            }
            near(&cache.values(), &want);
            let rows: Vec<f64> = match written {
                true => rows.concat(),
                false => vec![0.25; out.view.count()],
            };
            near(&out.values(), &rows);
        }
    }
}

fn near(got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (place, (got, want)) in got.iter().zip(want).enumerate() {
        let bound = 1e-3 * want.abs() + 1e-3;
        assert!((got - want).abs() <= bound, "{place}: {got} is not {want}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn tokens_of_every_mode_reach_their_slots(
        (batch, tokens) in (1..4i64, 1..40i64),
        (latent, rope) in (1..4i64, 1..3i64).prop_map(|(latent, rope)| (16 * latent, 16 * rope)),
        mode in prop::sample::select(vec!["Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"]),
        order in Just((0..12i64).collect::<Vec<_>>()).prop_shuffle(),
        left_out in prop::collection::vec(prop::bool::weighted(0.1), 12),
        values in prop::collection::vec(-2.0..2.0f64, 3..40),
        one_angle in any::<bool>(),
    ) {
        let _bench = on_chip("Ascend950PR_9599");
        let block = 16;
        let pages = (tokens + block - 1) / block;
        // The page of a token of a sequence, some of which are left out.
        let page = |sequence: i64, page: i64| (sequence * pages + page) as usize;
        let slot = |sequence: i64, token: i64| {
            let page = page(sequence, token / block);
            (!left_out[page]).then_some((order[page], token % block))
        };
        let every = (0..batch).flat_map(|sequence| (0..tokens).map(move |token| (sequence, token)));
        let (positions, slots): (Vec<i64>, Vec<_>) = match mode {
            "Norm" => every.map(|(sequence, token)| match left_out[token as usize % 12] {
                true => (-1, None),
                false => (token + 2, Some((sequence, token + 2))),
            }).unzip(),
            "PA" | "PA_BNSD" | "PA_NZ" => every.map(|(sequence, token)| match slot(sequence, token) {
                None => (-1, None),
                Some((block_number, place)) => (block_number * block + place, Some((block_number, place))),
            }).unzip(),
            _ => {
                let of_pages = (0..batch * pages).map(|page| match left_out[page as usize] {
                    true => -1,
                    false => order[page as usize] * block,
                });
                (of_pages.collect(), every.map(|(sequence, token)| slot(sequence, token)).collect())
            }
        };
        let cache = if mode == "Norm" { [batch, tokens + 2] } else { [12, block] };
        let mut call = Call::new([batch, tokens, latent, rope], cache, (mode, &positions), &values);
        if one_angle {
            call.angles = [0.5, 0.75].map(|angle| Tensor::packed(HALF, &[batch, 1, 1, rope], &[angle, -0.5, 1.0]));
        }
        ok(call.run());
        call.check(&slots, mode != "Norm");
    }
}

#[test]
fn caches_of_other_kinds_are_refused_by_name() {
    let _bench = Bench::new();
    let [latent, rope] = ATLAS;
    let new = |mode| {
        let positions: &[i64] = if mode == "PA_BLK_NZ" { &[16] } else { &[16, -1] };
        Call::new([1, 2, latent, rope], [2, 16], (mode, positions), &[0.5, 1.0, -1.5])
    };
    let mut call = new("PA_NZ");
    call.with_outputs = false;
    ok(call.run());
    call.check(&[Some((1, 0)), None], false);
    let call = new("PA_BLK_NZ");
    ok(call.run());
    call.check(&[Some((1, 0)), Some((1, 1))], true);

    let mut call = new("PA");
    call.mode = "PA_BSH";
    let refused = "aclnnKvRmsNormRopeCache: cacheModeOptional: given PA_BSH, allowed: Norm, PA, PA_BNSD, PA_NZ";
    fails(call.run(), 161_002, &[refused]);
    let mut call = new("PA");
    call.caches[1] = Tensor::packed(aclDataType::ACL_INT8, &[2, 16, 1, latent], &[0.0]);
    fails(call.run(), 161_002, &["ckvCacheRef: given INT8, allowed: FLOAT16"]);
    let mut call = new("PA");
    call.caches[0] = Tensor::packed(HALF, &[4, 8, 1, rope], &[0.0]);
    fails(call.run(), 161_002, &["kCacheRef: given [4, 8, 1, 64], allowed: blocks of a multiple of 16 tokens"]);
    let call = Call::new([1, 2, 32, 16], [2, 16], ("PA", &[0, 1]), &[0.5]);
    fails(
        call.run(),
        161_002,
        &["kv: given 32 and 16, allowed: 512 elements that are normalised and 64 that are rotated"],
    );
    let mut call = new("PA");
    call.index = Tensor::ints(&[3], &[0, 1, 2]);
    fails(call.run(), 161_002, &["index: given [3], allowed: [2]"]);
    let mut call = new("PA");
    call.index = Tensor::ints(&[2], &[0, 32]);
    ok(call.run());
    fails(
        unsafe { aclrtSynchronizeStream(null_mut()) },
        507_015,
        &["aclnnKvRmsNormRopeCache: index: position 32 of token 1 of sequence 0 is not from -1 to 31"],
    );
}
