//! Masks as tensors, element by element, at the sizes where templates and blocks have their edges.

use std::num::{NonZeroU64, NonZeroUsize};

use ascend_attention::mask::MaskForm;
use ascend_attention::spec::geometry::{ContextShard, TokenTree, TriangleMix, TrianglePart, TriangleRows};
use ascend_attention::spec::{CompressedMask, DType, Visibility};
use ascend_attention::{AnyTensor, CausalOrigin, Mask, SlidingWindow, SparseMode, Stream, rules};

use super::window;
use crate::harness::stream;

/// The sizes of templates and blocks, and those next to them.
const SIZES: [usize; 8] = [1, 2, 511, 512, 2047, 2048, 2049, 4096];

/// Checks dtype, shape and every element: 0 where `visible`, otherwise the value that hides, as stored in memory.
#[track_caller]
fn holds(
    stream: &Stream,
    tensor: &AnyTensor,
    dtype: DType,
    shape: &[usize],
    hides: &[u8],
    visible: impl Fn(usize, usize) -> bool,
) {
    let given = tensor.shape().to_vec();
    assert_eq!((tensor.dtype(), &given[..]), (dtype, shape));
    let bytes = tensor.download_bytes(stream).unwrap();
    let keys = shape[shape.len() - 1].max(1);
    let shows = vec![0; hides.len()];
    assert_eq!(bytes.len(), shape.iter().product::<usize>() * hides.len());
    for (at, element) in bytes.chunks_exact(hides.len()).enumerate() {
        let want = if visible(at / keys, at % keys) { &shows[..] } else { hides };
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
    holds(&stream, &tensor(&split_fuse), DType::Int8, &[2048, 2048], &[1], upper);
    let pooling = masks.pooling(true).unwrap();
    assert_eq!(pooling.sparse_mode(), SparseMode::RightDownCausal);
    holds(&stream, &tensor(&pooling), DType::Bool, &[2048, 2048], &[1], upper);
    for none in [masks.pooling(false).unwrap(), masks.bidirectional()] {
        assert!(none.tensor().is_none() && none.sparse_mode() == SparseMode::DefaultMask);
        assert_eq!(none.tensor_bytes(), 0);
    }

    let shape = [512, 512];
    let mla = |dtype| masks.mla(dtype).unwrap();
    holds(&stream, &mla(DType::Float16), DType::Float16, &shape, &F16_INFINITE, upper);
    holds(&stream, &mla(DType::Bf16), DType::Bf16, &shape, &BF16_ONE, upper);
    holds(&stream, &mla(DType::Float), DType::Float, &shape, &F32_ONE, upper);
    let parallel = masks.mla_matrix(MaskForm::ones(DType::Float16).unwrap()).unwrap();
    holds(&stream, &parallel, DType::Float16, &shape, &[0, 0x3c], upper);
    assert!(masks.mla(DType::Int64).is_err());

    let form = MaskForm::additive(DType::Float16, -10000.0).unwrap();
    let atlas_300 = masks.template(CompressedMask::Causal, form).unwrap();
    holds(&stream, &atlas_300, DType::Float16, &[2048, 2048], &F16_TEN_THOUSAND, upper);
    let prefix = masks.template(CompressedMask::Prefix, MaskForm::BOOL).unwrap();
    let halves = |i: usize, j: usize| if i < 2048 { j <= i } else { j < 1024 };
    holds(&stream, &prefix, DType::Bool, &[3072, 2048], &[1], halves);
}

#[test]
fn causal_masks_are_those_of_the_table_at_every_size() {
    let stream = stream();
    let masks = stream.device().masks();
    for n in SIZES {
        let f16 = MaskForm::infinite(DType::Float16).unwrap();
        let causal = |form| masks.causal_matrix(CausalOrigin::LeftUp, n, n, form).unwrap();
        let upper = |i: usize, j: usize| j <= i;
        holds(&stream, &causal(f16), DType::Float16, &[n, n], &F16_INFINITE, upper);
        holds(&stream, &causal(MaskForm::INT8), DType::Int8, &[n, n], &[1], upper);
        masks.cache().clear();
        // The rows of a chunk behind a cache.
        let rows = n.min(3);
        let view = masks.causal_view(CausalOrigin::RightDown, rows, n, MaskForm::BOOL).unwrap();
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
        for w in [1, 2, n - 1, n, n + 1] {
            let Ok(of) = SlidingWindow::new(w) else {
                continue;
            };
            let mask = masks.sliding_window_matrix(of, rows, n, MaskForm::BOOL).unwrap();
            // Hidden if j > i or j <= i - w, with i the row's place among the keys.
            let sees = |i: usize, j: usize| {
                let i = (i + n - rows) as i64;
                !(j as i64 > i || j as i64 <= i - w as i64)
            };
            holds(&stream, &mask, DType::Bool, &[rows, n], &[1], sees);
            let last_row = (0..n).filter(|&j| sees(rows - 1, j)).count();
            assert_eq!(last_row, n.min(w));
        }
        masks.cache().clear();
    }
    assert_eq!(SlidingWindow::new(0).unwrap_err().rule, &rules::MASK_WINDOW);
    // However a window is made, it is within the bound.
    let most = SlidingWindow::new(SlidingWindow::MAX_KEYS).unwrap();
    assert_eq!(most.pre_tokens(), i64::from(u32::MAX) - 1);
    let more = NonZeroUsize::new(SlidingWindow::MAX_KEYS + 1).unwrap();
    assert_eq!(SlidingWindow::try_from(more).unwrap_err().rule, &rules::MASK_WINDOW);
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
        check(local.unwrap(), &|i, j| j <= first + i && same_chunk(first + i, j));

        let tree = TokenTree::new(&[-1, 0, 0, 2, 0][..rows]).unwrap();
        let tree = masks.tree(&[tree.behind(first as u64)], rows, n).unwrap();
        let above = [&[0][..], &[0, 1], &[0, 2], &[0, 2, 3], &[0, 4]];
        holds(&stream, tree.tensor().unwrap(), DType::Int8, &[1, rows, n], &[1], |i, j| {
            j < first || above[i].contains(&(j - first))
        });

        // Rows in the middle of a prompt, of which some are among its last.
        let prompt_len = (n + 126) as u64;
        let of = TriangleRows { first_row: first as u64, rows: rows as u64, prompt_len };
        let (sink, near, last) = (8, 512, 128);
        let streaming = |q: usize, j: usize| j < sink || q - j <= near;
        let at_the_end = |q: usize| q as u64 >= prompt_len.saturating_sub(last);
        for (part, want) in [
            (TrianglePart::Streaming, [true, false, false]),
            (TrianglePart::Last, [false, true, false]),
            (TrianglePart::Middle, [false, false, true]),
            (TrianglePart::Triangle, [true, true, false]),
        ] {
            let mask = masks.geometry(mix.geometry(part, of)).unwrap();
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
            let fits = requests.iter().all(|of| Visibility::kv_len(of) <= keys);
            let mask = stream.device().masks().context_parallel(&requests, 4, keys as usize);
            let mask = match (fits, mask) {
                (true, mask) => mask.unwrap(),
                (false, refused) => {
                    assert!(refused.unwrap_err().to_string().contains("sequence 0"));
                    continue;
                }
            };
            // Places of a request's keys that are on the rank.
            let places: Vec<u64> = (0..history + 3).filter(|p| p / 16 % 2 == rank).collect();
            let shape = [2, 4, keys as usize];
            holds(&stream, mask.tensor().unwrap(), DType::Bool, &shape, &[1], |row, key| {
                let (request, i) = (row / 4, row as u64 % 4);
                let (history, rows) = [(history, 3), (0, 1)][request];
                let place = places.get(key);
                i < rows && place.is_some_and(|&place| place <= history + i)
            });
        }
    }
}

#[test]
fn trees_of_several_requests_are_stacked() {
    let stream = stream();
    let (tree, chain) = (TokenTree::new(&[-1, 0, 0, 2]).unwrap(), TokenTree::chain(2).unwrap());
    let trees = [tree.behind(2), chain.behind(1)];
    let mask = stream.device().masks().tree(&trees, 4, 7).unwrap();
    let rows = ["###....", "####...", "###.#..", "###.##.", "##.....", "###....", ".......", "......."];
    let sees = |row: usize, key: usize| rows[row].as_bytes()[key] == b'#';
    let tensor = mask.tensor().unwrap();
    holds(&stream, tensor, DType::Int8, &[2, 4, 7], &[1], sees);
}
