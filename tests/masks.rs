//! Every mask is what its definition says, as a tensor and as attention.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod harness;

use std::num::NonZeroU64;

use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::spec::geometry::{
    ContextShard, TokenTree, TriangleMix, TrianglePart, TriangleRows,
};
use ascend_attention::spec::{CompressedMask, DType};
use ascend_attention::{
    AnyTensor, CausalOrigin, Error, FusedInferAttention, InnerPrecise, Layout, Mask, SlidingWindow,
    SparseMode, Stream, f16,
};
use harness::reference::{Logical, row};
use harness::{halves, stream};
use proptest::prelude::*;

/// The sizes at which templates, blocks and their edges lie.
const SIZES: [usize; 8] = [1, 2, 511, 512, 2047, 2048, 2049, 4096];

fn window(keys: u32) -> SlidingWindow {
    SlidingWindow::new(keys).unwrap()
}

/// Checks dtype, shape and every element: 0 where `visible`, otherwise the value that hides, as it lies in memory.
#[track_caller]
fn holds(
    stream: &Stream,
    tensor: &AnyTensor,
    dtype: DType,
    shape: &[usize],
    hides: &[u8],
    visible: impl Fn(usize, usize) -> bool,
) {
    let given: Vec<usize> = tensor.shape().iter().map(|&axis| axis as usize).collect();
    assert_eq!((tensor.dtype(), &given[..]), (dtype, shape));
    let bytes = tensor.download_bytes(stream).unwrap();
    let keys = shape[shape.len() - 1].max(1);
    let shows = vec![0; hides.len()];
    assert_eq!(bytes.len(), shape.iter().product::<usize>() * hides.len());
    for (at, element) in bytes.chunks_exact(hides.len()).enumerate() {
        let want = if visible(at / keys, at % keys) {
            &shows[..]
        } else {
            hides
        };
        assert_eq!(element, want, "row {}, key {}", at / keys, at % keys);
    }
}

const F16_INFINITE: [u8; 2] = [0x00, 0xfc];
const F16_TEN_THOUSAND: [u8; 2] = [0xe2, 0xf0];
const BF16_ONE: [u8; 2] = [0x80, 0x3f];
const F32_ONE: [u8; 4] = [0, 0, 0x80, 0x3f];

#[test]
fn templates_are_those_of_the_table() {
    let stream = stream();
    let masks = stream.device().masks();
    let upper = |i: usize, j: usize| j <= i;
    let tensor = |mask: &Mask| mask.tensor().unwrap().clone();

    let split_fuse = masks.chunked_prefill().unwrap();
    assert_eq!(split_fuse.sparse_mode(), SparseMode::RightDownCausal);
    assert_eq!(split_fuse.tensor_bytes(), 4 << 20);
    holds(
        &stream,
        &tensor(&split_fuse),
        DType::Int8,
        &[2048, 2048],
        &[1],
        upper,
    );
    let pooling = masks.pooling(true).unwrap();
    assert_eq!(pooling.sparse_mode(), SparseMode::RightDownCausal);
    holds(
        &stream,
        &tensor(&pooling),
        DType::Bool,
        &[2048, 2048],
        &[1],
        upper,
    );
    for none in [masks.pooling(false).unwrap(), masks.bidirectional()] {
        assert!(none.tensor().is_none() && none.sparse_mode() == SparseMode::DefaultMask);
        assert_eq!(none.tensor_bytes(), 0);
    }

    let shape = [512, 512];
    let mla = |dtype| masks.mla(dtype).unwrap();
    holds(
        &stream,
        &mla(DType::Float16),
        DType::Float16,
        &shape,
        &F16_INFINITE,
        upper,
    );
    holds(
        &stream,
        &mla(DType::Bf16),
        DType::Bf16,
        &shape,
        &BF16_ONE,
        upper,
    );
    holds(
        &stream,
        &mla(DType::Float),
        DType::Float,
        &shape,
        &F32_ONE,
        upper,
    );
    let parallel = masks
        .mla_matrix(MaskForm::ones(DType::Float16).unwrap())
        .unwrap();
    holds(
        &stream,
        &parallel,
        DType::Float16,
        &shape,
        &[0, 0x3c],
        upper,
    );
    assert!(masks.mla(DType::Int64).is_err());

    let form = MaskForm::additive(DType::Float16, -10000.0).unwrap();
    let atlas_300 = masks.template(CompressedMask::Causal, form).unwrap();
    holds(
        &stream,
        &atlas_300,
        DType::Float16,
        &[2048, 2048],
        &F16_TEN_THOUSAND,
        upper,
    );
    let prefix = masks
        .template(CompressedMask::Prefix, MaskForm::BOOL)
        .unwrap();
    let halves = |i: usize, j: usize| if i < 2048 { j <= i } else { j < 1024 };
    holds(&stream, &prefix, DType::Bool, &[3072, 2048], &[1], halves);
}

#[test]
fn causal_masks_are_those_of_the_table_at_every_size() {
    let stream = stream();
    let masks = stream.device().masks();
    for n in SIZES {
        let f16 = MaskForm::infinite(DType::Float16).unwrap();
        let causal = |form| {
            masks
                .causal_matrix(CausalOrigin::LeftUp, n, n, form)
                .unwrap()
        };
        let upper = |i: usize, j: usize| j <= i;
        holds(
            &stream,
            &causal(f16),
            DType::Float16,
            &[n, n],
            &F16_INFINITE,
            upper,
        );
        holds(
            &stream,
            &causal(MaskForm::INT8),
            DType::Int8,
            &[n, n],
            &[1],
            upper,
        );
        masks.cache().clear();
        // The rows of a chunk behind a cache.
        let rows = n.min(3);
        let view = masks
            .causal_view(CausalOrigin::RightDown, rows, n, MaskForm::BOOL)
            .unwrap();
        let chunk = |i: usize, j: usize| j <= i + n - rows;
        holds(&stream, &view, DType::Bool, &[rows, n], &[1], chunk);
        masks.cache().clear();
    }
}

#[test]
fn windows_show_as_many_keys_as_they_say_at_every_size() {
    let stream = stream();
    let masks = stream.device().masks();
    for n in SIZES {
        let rows = n.min(9);
        for w in [1, 2, n as u32 - 1, n as u32, n as u32 + 1] {
            let Some(of) = SlidingWindow::new(w) else {
                continue;
            };
            let mask = masks
                .sliding_window_matrix(of, rows, n, MaskForm::BOOL)
                .unwrap();
            // Hidden if j > i or j <= i - w, with i the row's place among the keys.
            let sees = |i: usize, j: usize| {
                let i = (i + n - rows) as i64;
                !(j as i64 > i || j as i64 <= i - i64::from(w))
            };
            holds(&stream, &mask, DType::Bool, &[rows, n], &[1], sees);
            let last_row = (0..n).filter(|&j| sees(rows - 1, j)).count();
            assert_eq!(last_row, n.min(w as usize));
        }
        masks.cache().clear();
    }
    assert_eq!(SlidingWindow::new(0), None);
    let mode = masks.sliding_window(window(7)).unwrap();
    let tokens = (mode.sparse_mode(), mode.pre_tokens(), mode.next_tokens());
    assert_eq!(tokens, (SparseMode::Band, 6, 0));
    // The operator's own number shows a key more.
    assert_eq!(masks.band(7, 0).unwrap().pre_tokens(), 7);
}

#[test]
fn full_masks_are_their_definitions_at_every_size() {
    let stream = stream();
    let masks = stream.device().masks();
    let mix = TriangleMix::PAPER;
    let chunk = 511;
    for n in SIZES {
        // The last rows of a sequence of `n` tokens.
        let rows = n.min(5);
        let first = n - rows;
        let check = |mask: Mask, visible: &dyn Fn(usize, usize) -> bool| {
            let tensor = mask.tensor().unwrap();
            holds(&stream, tensor, DType::Int8, &[rows, n], &[1], visible);
        };
        let of_prefix = masks.prefix(n / 2, rows, n).unwrap();
        check(of_prefix, &|i, j| j < n / 2 || j <= first + i);
        let local = masks.local(NonZeroU64::new(chunk).unwrap(), rows, n);
        let same_chunk = |i: usize, j: usize| i / chunk as usize == j / chunk as usize;
        check(local.unwrap(), &|i, j| {
            j <= first + i && same_chunk(first + i, j)
        });

        let tree = TokenTree::new(&[-1, 0, 0, 2, 0][..rows]).unwrap();
        let tree = masks.tree(&[tree.behind(first as u64)], rows, n).unwrap();
        let above = [&[0][..], &[0, 1], &[0, 2], &[0, 2, 3], &[0, 4]];
        holds(
            &stream,
            tree.tensor().unwrap(),
            DType::Int8,
            &[1, rows, n],
            &[1],
            |i, j| j < first || above[i].contains(&(j - first)),
        );

        // Rows in the middle of a prompt, of which some are among its last.
        let prompt_len = (n + 126) as u64;
        let of = TriangleRows {
            first_row: first as u64,
            rows: rows as u64,
            prompt_len,
        };
        let (sink, near, last) = (8, 512, 128);
        let streaming = |q: usize, j: usize| j < sink || q - j <= near;
        let at_the_end = |q: usize| q as u64 >= prompt_len.saturating_sub(last);
        for (part, want) in [
            (TrianglePart::Streaming, [true, false, false]),
            (TrianglePart::Last, [false, true, false]),
            (TrianglePart::Middle, [false, false, true]),
            (TrianglePart::Triangle, [true, true, false]),
        ] {
            let mask = masks.triangle_mix(mix, part, of).unwrap();
            if mask.sparse_mode() == SparseMode::RightDownCausal {
                assert!(n <= sink + near + 1, "{part:?} of {n} is not dense");
                continue;
            }
            check(mask, &|i, j| {
                let q = first + i;
                j <= q
                    && want[match (streaming(q, j), at_the_end(q)) {
                        (true, _) => 0,
                        (false, true) => 1,
                        (false, false) => 2,
                    }]
            });
        }
        masks.cache().clear();
    }
}

#[test]
fn context_parallel_masks_are_those_of_the_table() {
    let stream = stream();
    let of = |n| NonZeroU64::new(n).unwrap();
    let sizes = SIZES.map(|keys| keys as u64);
    // As many tokens in the cache as make nearly as many keys on each of two ranks, and more than fit.
    let histories = sizes.map(|keys| (keys, (2 * keys).saturating_sub(19)));
    for (keys, history) in histories.into_iter().chain([(512, 1200)]) {
        for rank in 0..2 {
            let shard = ContextShard::new(of(2), of(16), rank).unwrap();
            let requests = [shard.rows(history, 3), shard.rows(0, 1)];
            let fits = requests
                .iter()
                .all(|of| ascend_attention::spec::Visibility::kv_len(of) <= keys);
            let mask = stream
                .device()
                .masks()
                .context_parallel(&requests, 4, keys as usize);
            let mask = match (fits, mask) {
                (true, mask) => mask.unwrap(),
                (false, refused) => {
                    assert!(refused.unwrap_err().to_string().contains("sequence 0"));
                    continue;
                }
            };
            // Places of a request's keys that lie on the rank.
            let places: Vec<u64> = (0..history + 3).filter(|p| p / 16 % 2 == rank).collect();
            let shape = [2, 4, keys as usize];
            holds(
                &stream,
                mask.tensor().unwrap(),
                DType::Bool,
                &shape,
                &[1],
                |row, key| {
                    let (request, i) = (row / 4, row as u64 % 4);
                    let (history, rows) = [(history, 3), (0, 1)][request];
                    let place = places.get(key);
                    i < rows && place.is_some_and(|&place| place <= history + i)
                },
            );
        }
    }
}

#[test]
fn trees_of_several_requests_are_stacked() {
    let stream = stream();
    let (tree, chain) = (
        TokenTree::new(&[-1, 0, 0, 2]).unwrap(),
        TokenTree::chain(2).unwrap(),
    );
    let trees = [tree.behind(2), chain.behind(1)];
    let mask = stream.device().masks().tree(&trees, 4, 7).unwrap();
    let rows = [
        "###....", "####...", "###.#..", "###.##.", "##.....", "###....", ".......", ".......",
    ];
    let sees = |row: usize, key: usize| rows[row].as_bytes()[key] == b'#';
    let tensor = mask.tensor().unwrap();
    holds(&stream, tensor, DType::Int8, &[2, 4, 7], &[1], sees);
}

#[test]
fn rows_that_see_nothing_are_refused_where_they_would_be_nan() {
    let infinite = MaskForm::infinite(DType::Float16).unwrap();
    let blind = |form| HostMask::from_fn(3, 2, form, |i, _| i != 1);
    let refused = blind(infinite).unwrap_err();
    assert!(
        matches!(
            refused,
            Error::InvalidArgument {
                argument: "form",
                ..
            }
        ),
        "{refused}"
    );
    assert!(refused.to_string().contains("row 1"), "{refused}");
    let flags = blind(MaskForm::INT8).unwrap();
    assert_eq!(flags.blind_rows().collect::<Vec<_>>(), [(0, 1)]);
    assert!(flags.convert(infinite).is_err());
    let lowest = flags
        .convert(MaskForm::lowest(DType::Float16).unwrap())
        .unwrap();
    assert_eq!(
        lowest.bytes()[4..8],
        [0xff, 0xfb, 0xff, 0xfb],
        "-65504, twice"
    );
}

#[test]
fn sizes_without_bound_are_refused_before_memory_is_asked_for() {
    let stream = stream();
    let masks = stream.device().masks();
    let refused = masks
        .causal_matrix(CausalOrigin::LeftUp, 1 << 20, 1 << 20, MaskForm::BOOL)
        .unwrap_err();
    assert!(
        refused.to_string().contains("sparse modes 2, 3 and 4"),
        "{refused}"
    );
    assert!(
        masks
            .causal_full(CausalOrigin::RightDown, usize::MAX, usize::MAX)
            .is_err()
    );
    assert!(HostMask::from_fn(usize::MAX, 2, MaskForm::INT8, |_, _| true).is_err());
    assert!(masks.causal(CausalOrigin::LeftUp).is_ok());
}

fn forms() -> impl Strategy<Value = MaskForm> {
    let floats = [DType::Float16, DType::Bf16, DType::Float];
    let mut forms = vec![MaskForm::BOOL, MaskForm::INT8, MaskForm::UINT8];
    for dtype in floats {
        forms.push(MaskForm::ones(dtype).unwrap());
        forms.push(MaskForm::infinite(dtype).unwrap());
        forms.push(MaskForm::lowest(dtype).unwrap());
        forms.push(MaskForm::additive(dtype, -10000.0).unwrap());
    }
    proptest::sample::select(forms)
}

proptest! {
    #[test]
    fn every_form_converts_to_every_other_and_back(
        from in forms(), to in forms(), rows in 1usize..8, keys in 1usize..20, bits in proptest::collection::vec(any::<u8>(), 20),
    ) {
        // The first key is always seen, so that no row is blind.
        let sees = |i: usize, j: usize| j == 0 || bits[(i * keys + j) / 8] >> ((i * keys + j) % 8) & 1 == 1;
        let mask = HostMask::from_fn(rows, keys, from, sees).unwrap();
        let other = mask.convert(to).unwrap();
        prop_assert_eq!(other.form(), to);
        for i in 0..rows {
            for j in 0..keys {
                prop_assert_eq!(!mask.hides(0, i, j), sees(i, j));
                prop_assert_eq!(!other.hides(0, i, j), sees(i, j));
            }
        }
        prop_assert_eq!(&other.convert(from).unwrap(), &mask);
        // From a formula and from a bitmap: the same elements.
        let formula = HostMask::of(&other.entry(0), from).unwrap();
        prop_assert_eq!(formula.bytes(), mask.bytes());
        let mut bitmap = vec![0; (rows * keys).div_ceil(8)];
        for i in 0..rows * keys {
            bitmap[i / 8] |= u8::from(sees(i / keys, i % keys)) << (i % 8);
        }
        prop_assert_eq!(&HostMask::from_bitmap(rows, keys, from, &bitmap).unwrap(), &mask);
        // A tensor's elements say which form they are in, if they hide anything.
        let read = HostMask::from_elements(from.dtype(), &[rows, keys], mask.bytes()).unwrap();
        prop_assert_eq!(read.bytes(), mask.bytes());
        if mask.bytes().iter().any(|&byte| byte != 0) {
            prop_assert_eq!(read.form(), from);
        }
    }

    #[test]
    fn elements_that_are_no_mask_are_refused(values in proptest::collection::vec(any::<f32>(), 4)) {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let known = |x: f32| x == 0.0 || x == 1.0 || x <= -9984.0;
        let both = values.contains(&1.0) && values.iter().any(|&x| x < 0.0);
        let infinite = values.contains(&f32::NEG_INFINITY) && values.chunks(2).any(|row| row.iter().all(|&x| x != 0.0));
        let read = HostMask::from_elements(DType::Float, &[2, 2], &bytes);
        prop_assert_eq!(read.is_ok(), values.iter().all(|&x| known(x)) && !both && !infinite);
    }
}

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
        rows in 0u64..20, keys in 0u64..20, w in 1u32..22, prefix in 0u64..22, chunk in 1u64..9,
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
        let sees = |i: i64, j: i64| j <= i + shift && i + shift - j < i64::from(w);
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
        let part = |part| masks.triangle_mix(mix, part, of).unwrap();
        let (sink, near, last) = (sizes.0 as i64, sizes.1 as i64, sizes.2 as i64);
        let all = (rows, keys + rows);
        for (name, visible) in [
            (TrianglePart::Streaming, [true, false, false]),
            (TrianglePart::Last, [false, true, false]),
            (TrianglePart::Middle, [false, false, true]),
            (TrianglePart::Triangle, [true, true, false]),
        ] {
            let mask = part(name);
            if mask.sparse_mode() == SparseMode::RightDownCausal {
                continue; // The part is the whole triangle.
            }
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
            let local = ascend_attention::spec::Visibility::kv_len(&shard);
            let places: Vec<u64> = (0..keys + rows).filter(|&p| p / run % ranks == rank).collect();
            let mask = masks.context_parallel(&[shard], r, local as usize).unwrap();
            is(&stream, ("rank", tensor(mask)), (rows, local), |i, j| {
                places[j as usize] as i64 <= keys as i64 + i
            })?;
        }
    }
}

/// Attention of two heads over f16 inputs under a mask, on the device and by the definition.
#[track_caller]
fn attends(
    stream: &Stream,
    (rows, keys): (usize, usize),
    mask: Mask,
    visible: impl Fn(usize, usize) -> bool,
) -> Vec<f16> {
    let logical = |seed, rows| Logical {
        batch: 1,
        heads: 2,
        rows,
        dim: 16,
        data: halves(seed, 2 * rows * 16),
    };
    let inputs = [logical(1, rows), logical(2, keys), logical(3, keys)];
    let [query, key, value] = inputs
        .each_ref()
        .map(|of| stream.upload(&of.data, [1, 2, of.rows, 16]).unwrap());
    let mask_bytes = mask.tensor_bytes();
    let plan = FusedInferAttention::new(Layout::Bnsd)
        .heads(2)
        .scale(0.25)
        .mask(mask)
        .inner_precise(InnerPrecise::HighPrecisionCorrected)
        .plan(&query, &key, &value)
        .unwrap();
    assert_eq!(plan.mask_bytes(), mask_bytes);
    let mut output = harness::poisoned(&plan, stream);
    plan.launch_into(stream, &query, &key, &value, &mut output)
        .unwrap();
    let got = output.attention.download(stream).unwrap();
    let [q, k, v] = inputs.each_ref().map(Logical::exact);
    for head in 0..2 {
        for i in 0..rows {
            let want = row(&q, &k, &v, (0, 0), head, i, 0.25, |j| visible(i, j));
            let want = want.map_or_else(|| vec![0.0; 16], |(out, _)| out);
            let got = &got[(head * rows + i) * 16..][..16];
            for (got, want) in got.iter().zip(want) {
                assert!(
                    (got.to_f64() - want).abs() < 2e-3,
                    "head {head}, row {i}: {got}, not {want}"
                );
            }
        }
    }
    got
}

#[test]
fn attention_under_each_mask_sees_what_the_mask_says() {
    let stream = stream();
    let masks = stream.device().masks();
    let (rows, keys) = (40, 100);
    let at = |i: usize| i + keys - rows;
    let size = (rows, keys);
    attends(&stream, size, masks.bidirectional(), |_, _| true);
    attends(&stream, size, masks.chunked_prefill().unwrap(), |i, j| {
        j <= at(i)
    });
    attends(&stream, size, masks.pooling(true).unwrap(), |i, j| {
        j <= at(i)
    });
    for origin in [CausalOrigin::LeftUp, CausalOrigin::RightDown] {
        let end = |i| {
            if origin == CausalOrigin::LeftUp {
                i
            } else {
                at(i)
            }
        };
        // The full mask is larger than the call: the square has grown for another.
        let _ = masks.causal_full(origin, 150, 150).unwrap();
        let full = masks.causal_full(origin, rows, keys).unwrap();
        assert!(full.tensor_bytes() > rows * keys);
        attends(&stream, size, full, |i, j| j <= end(i));
        attends(&stream, size, masks.causal(origin).unwrap(), |i, j| {
            j <= end(i)
        });
    }
    for w in [1, 2, 17, 100, 101] {
        let sees = |i: usize, j: usize| j <= at(i) && at(i) - j < w as usize;
        attends(
            &stream,
            size,
            masks.sliding_window(window(w)).unwrap(),
            sees,
        );
        let matrix = masks
            .sliding_window_matrix(window(w), rows, keys, MaskForm::INT8)
            .unwrap();
        attends(&stream, size, Mask::all_mask(matrix), sees);
    }
    attends(
        &stream,
        size,
        masks.prefix(80, rows, keys).unwrap(),
        |i, j| j < 80 || j <= at(i),
    );
    let chunk = NonZeroU64::new(16).unwrap();
    let local = masks.local(chunk, rows, keys).unwrap();
    attends(&stream, size, local, |i, j| {
        j <= at(i) && j / 16 == at(i) / 16
    });
    let shard = ContextShard::new(NonZeroU64::new(3).unwrap(), NonZeroU64::MIN, 2).unwrap();
    let rank = masks.context_parallel(&[shard.rows(1, 3)], 3, 2).unwrap();
    attends(&stream, (3, 2), rank, |i, j| 3 * j + 2 <= i + 1);
    let tree = TokenTree::new(&[-1, 0, 0, 2, 3, 1]).unwrap();
    let mask = masks.tree(&[tree.behind(20)], 6, 26).unwrap();
    attends(&stream, (6, 26), mask, |i, j| {
        j < 20 || tree.continues(i, j - 20)
    });
    let float = HostMask::from_fn(
        rows,
        keys,
        MaskForm::lowest(DType::Bf16).unwrap(),
        |i, j| (i + j) % 3 == 0,
    );
    let custom = masks.custom(&float.unwrap()).unwrap();
    attends(&stream, size, custom, |i, j| (i + j) % 3 == 0);
}

#[test]
fn attention_to_the_parts_of_a_triangle_follows_the_paper() {
    let stream = stream();
    let masks = stream.device().masks();
    let sizes = TriangleMix::new(3, 9, 7);
    let n = 60;
    // The whole prompt, and a chunk that has the first of the last rows.
    for (first_row, rows) in [(0, n), (30, 25)] {
        let keys = first_row + rows;
        for part in TrianglePart::ALL {
            let of = TriangleRows {
                first_row: first_row as u64,
                rows: rows as u64,
                prompt_len: n as u64,
            };
            let mask = masks.triangle_mix(sizes, part, of).unwrap();
            attends(&stream, (rows, keys), mask, |i, j| {
                let q = i + first_row;
                let streaming = j < 3 || q.wrapping_sub(j) <= 9;
                let last = q >= n - 7;
                j <= q
                    && match part {
                        TrianglePart::Streaming => streaming,
                        TrianglePart::Last => !streaming && last,
                        TrianglePart::Middle => !streaming && !last,
                        TrianglePart::Triangle => streaming || last,
                        TrianglePart::Dense => true,
                    }
            });
        }
    }
    // A prompt too short to leave anything out takes no tensor of its size.
    let short = masks
        .triangle_mix(sizes, TrianglePart::Triangle, TriangleRows::whole(20))
        .unwrap();
    assert_eq!(short.sparse_mode(), SparseMode::RightDownCausal);
    let layers = ascend_attention::mask::TriangleLayers::first(2);
    let layer = |layer, rows, prompt_len| {
        let mask = masks.triangle_layer(sizes, &layers, layer, (0, rows), prompt_len);
        mask.unwrap().sparse_mode()
    };
    assert_eq!(layer(1, 60, Some(60)), SparseMode::AllMask);
    assert_eq!(layer(2, 60, Some(60)), SparseMode::RightDownCausal);
    assert_eq!(layer(1, 60, None), SparseMode::RightDownCausal);
    assert_eq!(layer(1, 1, Some(60)), SparseMode::RightDownCausal);
}

#[track_caller]
fn same(parts: &[f16], whole: &[f16]) {
    assert_eq!(parts.len(), whole.len());
    for (part, whole) in parts.iter().zip(whole) {
        assert!((part.to_f32() - whole.to_f32()).abs() < 1e-3);
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
        let query = stream.upload(
            &query[rows.start * dim..rows.end * dim],
            [1, 1, rows.len(), dim],
        );
        let keys = |data: &[f16]| {
            stream
                .upload(&data[..keys * dim], [1, 1, keys, dim])
                .unwrap()
        };
        let (query, key, value) = (query.unwrap(), keys(&key), keys(&value));
        let plan = FusedInferAttention::new(Layout::Bnsd)
            .mask(mask)
            .plan(&query, &key, &value)
            .unwrap();
        let mut output = harness::poisoned(&plan, &stream);
        plan.launch_into(&stream, &query, &key, &value, &mut output)
            .unwrap();
        output.attention.download(&stream).unwrap()
    };
    let causal = |origin| masks.causal(origin).unwrap();
    // Mode 7: 4 rows of 6 keys, cut to 2 and 2.
    let right = CausalOrigin::RightDown;
    let whole = of(0..4, 6, causal(right));
    let parts = [
        of(0..2, 6, masks.band(6, -2).unwrap()),
        of(2..4, 6, causal(right)),
    ];
    same(&parts.concat(), &whole);
    // Mode 8: 5 rows of 4 keys, cut to 2 and 3.
    let left = CausalOrigin::LeftUp;
    let whole = of(0..5, 4, causal(left));
    let parts = [
        of(0..2, 4, causal(left)),
        of(2..5, 4, masks.band(4, 1).unwrap()),
    ];
    same(&parts.concat(), &whole);
}
