//! Any mask that a builder makes, against its definition.

use std::num::NonZeroU64;

use ascend_attention::mask::MaskForm;
use ascend_attention::spec::Visibility;
use ascend_attention::spec::geometry::{ContextShard, TriangleMix, TrianglePart, TriangleRows};
use ascend_attention::{AnyTensor, CausalOrigin, Mask, Stream};
use proptest::prelude::*;

use super::window;
use crate::harness::stream;

/// Whether the mask that a builder made is a definition, of rows and keys that are called `i` and `j`.
fn is(
    stream: &Stream,
    (name, mask): (&str, impl Into<AnyTensor>),
    (rows, keys): (u64, u64),
    visible: impl Fn(i64, i64) -> bool,
) -> Result<(), TestCaseError> {
    let mask = mask.into();
    let bytes = mask.download_bytes(stream).unwrap();
    let want: Vec<u8> = (0..rows as i64)
        .flat_map(|i| (0..keys as i64).map(move |j| (i, j)))
        .map(|(i, j)| u8::from(!visible(i, j)))
        .collect();
    prop_assert_eq!(bytes, want, "{} {:?}", name, mask);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn builders_make_what_their_definitions_say(
        rows in 0u64..20, keys in 0u64..20, w in 1usize..22, prefix in 0u64..22, chunk in 1u64..9,
        sizes in (0u64..5, 0u64..6, 0u64..7), later in 0u64..6, ranks in (1u64..4, 1u64..4),
    ) {
        let stream = stream();
        let masks = stream.device().masks();
        let size = (rows, keys);
        let (r, k) = (rows as usize, keys as usize);
        let shift = keys as i64 - rows as i64;
        let form = MaskForm::BOOL;
        let (left, right) = (CausalOrigin::LeftUp, CausalOrigin::RightDown);
        let tensor = |mask: Mask| mask.tensor().unwrap().clone();

        for (origin, shift) in [(left, 0), (right, shift)] {
            let causal = |i: i64, j: i64| j <= i + shift;
            is(&stream, ("matrix", masks.causal_matrix(origin, r, k, form).unwrap()), size, causal)?;
            is(&stream, ("view", masks.causal_view(origin, r, k, form).unwrap()), size, causal)?;
        }
        let window = masks.sliding_window_matrix(window(w), r, k, form).unwrap();
        let sees = |i: i64, j: i64| j <= i + shift && i + shift - j < w as i64;
        is(&stream, ("window", window), size, sees)?;
        let mask = tensor(masks.prefix(prefix as usize, r, k).unwrap());
        is(&stream, ("prefix", mask), size, |i, j| j < prefix as i64 || j <= i + shift)?;
        let mask = tensor(masks.local(NonZeroU64::new(chunk).unwrap(), r, k).unwrap());
        let chunk = chunk as i64;
        let sees = |i: i64, j: i64| j <= i + shift && j / chunk == (i + shift) / chunk;
        is(&stream, ("local", mask), size, sees)?;

        // Rows of a prompt that goes on for `later` tokens behind them.
        let mix = TriangleMix::new(sizes.0, sizes.1, sizes.2);
        let of = TriangleRows { first_row: keys, rows, prompt_len: keys + rows + later };
        let part = |part| masks.geometry(mix.geometry(part, of)).unwrap();
        let (sink, near, last) = (sizes.0 as i64, sizes.1 as i64, sizes.2 as i64);
        let all = (rows, keys + rows);
        for (name, visible) in [
            (TrianglePart::Streaming, [true, false, false]),
            (TrianglePart::Last, [false, true, false]),
            (TrianglePart::Middle, [false, false, true]),
            (TrianglePart::Triangle, [true, true, false]),
        ] {
            let mask = part(name);
            is(&stream, ("part", tensor(mask)), all, |i, j| {
                let q = i + keys as i64;
                let streaming = j < sink || q - j <= near;
                let at_the_end = q >= (keys + rows + later) as i64 - last;
                j <= q && visible[if streaming { 0 } else if at_the_end { 1 } else { 2 }]
            })?;
        }

        let (ranks, run) = (NonZeroU64::new(ranks.0).unwrap(), NonZeroU64::new(ranks.1).unwrap());
        for rank in 0..ranks.get() {
            let shard = ContextShard::new(ranks, run, rank).unwrap().rows(keys, rows);
            let local = Visibility::kv_len(&shard);
            let places: Vec<u64> = (0..keys + rows).filter(|&p| p / run % ranks == rank).collect();
            let mask = masks.context_parallel(&[shard], r, local as usize).unwrap();
            is(&stream, ("rank", tensor(mask)), (rows, local), |i, j| {
                places[j as usize] as i64 <= keys as i64 + i
            })?;
        }
    }
}
