//! SparseFlashAttention, its version with sinks and KvQuantSparseFlashAttention through their C functions: the keys
//! that rows read, and numbers that lead outside of tensors.

use crate::bench::*;
use crate::flash_family::call::on_machine;
use crate::found::assert_found;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, check_scope, findings};
use ascend_spec::Cann;
use ascend_sys::bindings::{aclDataType, aclOpExecutor, aclTensor, aclrtStream};
use half::f16;
use proptest::prelude::*;
use std::ffi::c_void;
use std::ptr::null_mut;

const HALF: aclDataType = aclDataType::ACL_FLOAT16;
const FLOAT: aclDataType = aclDataType::ACL_FLOAT;
const INT32: aclDataType = aclDataType::ACL_INT32;
const WORKSPACE: u64 = 16 << 20;
const ROWS: usize = 4;
const BLOCKS: usize = 4;
const BLOCK_SIZE: usize = 16;
const COUNT: usize = 3;
/// Bytes of a packed row.
const PACKED: usize = 656;
/// What the output holds before.
const OLD: f32 = 77.0;

/// An operator that attends to listed keys.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    V1,
    V2,
    Quantised,
}

use Form::{Quantised, V1, V2};

const FORMS: [Form; 3] = [V1, V2, Quantised];

/// The tensors of a call.
struct Sparse {
    form: Form,
    tensors: [*mut aclTensor; 13],
    paged: bool,
    scale: f64,
    softmax: bool,
    out: *mut c_void,
    workspace: Memory,
}

const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const LISTS: usize = 3;
const BLOCK_TABLE: usize = 4;
const LENGTHS: usize = 5;
const QUERY_ROPE: usize = 7;
const KEY_ROPE: usize = 8;
const SINKS: usize = 9;
const OUT: usize = 10;
const MAX: usize = 11;
const SUM: usize = 12;

fn sized(dtype: aclDataType, shape: &[usize], data: *mut c_void) -> *mut aclTensor {
    let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
    tensor(dtype, &shape, data)
}

/// The row of a quantised key, whose elements are a number times one half.
fn packed(number: usize) -> [u8; PACKED] {
    let mut row = [0; PACKED];
    row[..512].fill(u8::try_from(number).unwrap());
    for scale in row[640..].chunks_mut(4) {
        scale.copy_from_slice(&0.5f32.to_ne_bytes());
    }
    row
}

/// A cache of keys, or of one part of each, at an address.
fn cache_at(form: Form, dim: usize, data: *mut c_void) -> *mut aclTensor {
    match form {
        Quantised => sized(aclDataType::ACL_INT8, &[BLOCKS, BLOCK_SIZE, 1, PACKED], data),
        V1 | V2 => sized(HALF, &[BLOCKS, BLOCK_SIZE, 1, dim], data),
    }
}

impl Sparse {
    /// Two sequences in the blocks `[[3, 1], [2, 0]]`. All scores are equal and the elements of each key are half its
    /// position, so that a row is half the mean of the positions that it reads.
    fn new(form: Form, ends: [i32; 2], keys: [i32; 2], table: [i32; 4], lists: [[i32; COUNT]; ROWS]) -> Self {
        let zeros = |count: usize| upload(&vec![f16::ZERO; count]);
        let mut order = [0; BLOCKS * BLOCK_SIZE];
        for (block, first) in [(3, 0), (1, BLOCK_SIZE), (2, 0), (0, BLOCK_SIZE)] {
            (0..BLOCK_SIZE).for_each(|row| order[block * BLOCK_SIZE + row] = first + row);
        }
        let cache = match form {
            Quantised => upload(&order.map(packed).concat()),
            V1 | V2 => upload(&order.map(|position| [f16::from_f32(position as f32 / 2.0); 512]).concat()),
        };
        let key = cache_at(form, 512, cache);
        let out = upload(&[f16::from_f32(OLD); ROWS * 512]);
        let dim = if form == Quantised { 576 } else { 512 };
        let none = || tensor(FLOAT, &[0], null_mut());
        Sparse {
            form,
            tensors: [
                sized(HALF, &[ROWS, 1, dim], zeros(ROWS * dim)),
                key,
                key,
                sized(INT32, &[ROWS, 1, COUNT], upload(&lists.concat())),
                tensor(INT32, &[2, 2], upload(&table)),
                tensor(INT32, &[2], upload(&ends)),
                tensor(INT32, &[2], upload(&keys)),
                sized(HALF, &[ROWS, 1, 64], zeros(ROWS * 64)),
                cache_at(V1, 64, zeros(BLOCKS * BLOCK_SIZE * 64)),
                null_mut(),
                sized(HALF, &[ROWS, 1, 512], out),
                none(),
                none(),
            ],
            paged: true,
            scale: 1.0,
            softmax: false,
            out,
            workspace: Memory::new(WORKSPACE as usize),
        }
    }

    /// The call without a tensor.
    fn without(mut self, tensor: usize) -> Self {
        self.tensors[tensor] = null_mut();
        self
    }

    fn try_prepare(&self) -> (i32, *mut aclOpExecutor) {
        let [query, key, value, lists, table, ends, keys, query_rope, key_rope, sinks, out, max, sum] = self.tensors;
        let (mut bytes, mut executor, none) = (0, null_mut(), null_mut());
        let to = (&raw mut bytes, &raw mut executor);
        let (rows, cache) = (c"TND".as_ptr().cast_mut(), if self.paged { c"PA_BSND" } else { c"TND" });
        let (cache, all, scale, softmax) = (cache.as_ptr().cast_mut(), i64::MAX, self.scale, self.softmax);
        let status = unsafe {
            match self.form {
                V1 => aclnnSparseFlashAttentionGetWorkspaceSize(
                    query, key, value, lists, table, ends, keys, query_rope, key_rope, scale, 1, rows, cache, 3, all,
                    all, 2, softmax, out, max, sum, to.0, to.1,
                ),
                V2 => aclnnSparseFlashAttentionV2GetWorkspaceSize(
                    query, key, value, lists, table, ends, keys, query_rope, key_rope, sinks, scale, 1, rows, cache, 3,
                    all, all, 2, softmax, out, max, sum, to.0, to.1,
                ),
                Quantised => aclnnKvQuantSparseFlashAttentionGetWorkspaceSize(
                    query, key, value, lists, none, none, table, ends, keys, scale, 2, 2, 1, rows, cache, 3, all, all,
                    2, 1, 128, 64, out, to.0, to.1,
                ),
            }
        };
        (status, executor)
    }

    fn run(&self, stream: aclrtStream) -> i32 {
        let (status, executor) = self.try_prepare();
        ok(status);
        let launch = match self.form {
            V1 => aclnnSparseFlashAttention,
            V2 => aclnnSparseFlashAttentionV2,
            Quantised => aclnnKvQuantSparseFlashAttention,
        };
        ok(unsafe { launch(self.workspace.at, WORKSPACE, executor, stream) });
        unsafe { aclrtSynchronizeStream(stream) }
    }

    /// The elements of each row, which are all the same.
    fn rows(&self) -> [f32; ROWS] {
        let all = download::<f16>(self.out, ROWS * 512);
        let rows = all.as_chunks::<512>().0;
        assert!(rows.iter().all(|row| row.iter().all(|&element| element == row[0])));
        std::array::from_fn(|row| rows[row][0].to_f32())
    }
}

const TABLE: [i32; 4] = [3, 1, 2, 0];
const NONE: [i32; COUNT] = [-1; COUNT];

#[test]
fn rows_attend_to_their_lists() {
    let _bench = on_machine("Ascend910B3", Cann::V9_2);
    let stream = stream();
    for form in FORMS {
        // The first row of the second sequence may read no key, the row behind both belongs to none.
        let sparse = Sparse::new(form, [1, 3], [20, 1], TABLE, [[19, 0, 5], NONE, [0, -1, -1], [1, 2, 3]]);
        ok(sparse.run(stream));
        assert_eq!(sparse.rows(), [4.0, 0.0, 0.0, OLD], "{form:?}");
        let sparse = Sparse::new(form, [1, 3], [20, 20], TABLE, [[19, 2, -1], [18, 17, -1], [19, -1, -1], NONE]);
        // From 9.1 on the key is the value, where there is none, of keys in 16 bits.
        let sparse = if form == Quantised { sparse } else { sparse.without(VALUE) };
        ok(sparse.run(stream));
        assert_eq!(sparse.rows(), [5.25, 8.75, 9.5, OLD], "{form:?}");
    }
}

#[test]
fn numbers_and_lists_that_mislead_are_found_and_fail_in_strict_mode() {
    let _bench = on_machine("Ascend910B3", Cann::V9_2);
    let stream = stream();
    let (length, twice) = (FindingKind::SequenceLength, FindingKind::RepeatedBlock);
    let (block, skipped) = (FindingKind::BlockTable, FindingKind::SkippedEntry);
    for (kind, text, ends, keys, table, list) in [
        (length, "5 for the query rows of sequence 1", [1, 5], [20, 20], TABLE, NONE),
        (length, "actualSeqLengthsKv: -2 for the keys of sequence 0", [1, 3], [-2, 20], TABLE, NONE),
        (length, "33 keys of sequence 1", [1, 3], [20, 33], TABLE, NONE),
        (block, "block 4 in column 1 of sequence 0", [1, 3], [20, 20], [3, 4, 2, 0], NONE),
        (twice, "row 0 of sequence 0: entry 1 names block 4 again", [1, 3], [20, 20], TABLE, [4, 4, -1]),
        (skipped, "entry 2 names block 4, which is not read", [1, 3], [20, 20], TABLE, [5, -1, 4]),
        (skipped, "entry 0 names block 20, which begins past the 20 keys", [1, 3], [20, 20], TABLE, [20, 1, 2]),
        (skipped, "sparseIndices: row 0 of sequence 0: entry 1 names block -2", [1, 3], [20, 20], TABLE, [0, -2, -1]),
    ] {
        for form in FORMS {
            // Lists of rows that belong to no sequence are not read.
            let new = || Sparse::new(form, ends, keys, table, [list, NONE, NONE, [7, 7, 7]]);
            let seen = findings().len();
            ok(new().run(stream));
            assert_found(seen, kind, &[text]);
            let _strict = check_scope(Check::Strict);
            assert_ne!(new().run(stream), 0, "{form:?}: {text}");
        }
    }
    let _strict = check_scope(Check::Strict);
    for form in FORMS {
        ok(Sparse::new(form, [1, 3], [20, 20], TABLE, [[19, 0, 5], NONE, [0, -1, -1], [7, 7, 7]]).run(stream));
    }
}

#[test]
fn keys_that_nothing_has_written_are_found_where_a_row_reads_them() {
    let _bench = on_machine("Ascend910B3", Cann::V9_2);
    let stream = stream();
    for (form, dim) in [(V1, 64), (V2, 64), (Quantised, PACKED / 2)] {
        // Of the cache block 3 alone is written, which has the first 16 keys of sequence 0.
        let bytes = BLOCK_SIZE * dim * 2;
        let (cache, written) = (malloc(BLOCKS * bytes), vec![0u8; bytes]);
        ok(unsafe {
            let to = cache.cast::<u8>().wrapping_add(3 * bytes);
            aclrtMemcpy(to.cast(), bytes, written.as_ptr().cast(), bytes, H2D)
        });
        let run = |list| {
            let mut sparse = Sparse::new(form, [1, 3], [20, 20], TABLE, [list, NONE, NONE, NONE]);
            let of_cache: &[usize] = if form == Quantised { &[KEY, VALUE] } else { &[KEY_ROPE] };
            of_cache.iter().for_each(|&number| sparse.tensors[number] = cache_at(form, dim, cache));
            let seen = findings().len();
            ok(sparse.run(stream));
            findings()[seen..].iter().filter(|finding| finding.kind == FindingKind::UnwrittenRead).count()
        };
        assert_eq!(run([15, 2, -1]), 0, "{form:?}");
        assert_ne!(run([15, 16, -1]), 0, "{form:?}");
    }
}

#[test]
fn rows_that_are_not_written_are_found() {
    let _bench = on_machine("Ascend910B3", Cann::V9_2);
    let stream = stream();
    for form in FORMS {
        let mut none = Sparse::new(form, [0, 0], [20, 20], TABLE, [NONE; ROWS]);
        none.out = malloc(ROWS * 512 * 2);
        none.tensors[OUT] = sized(HALF, &[ROWS, 1, 512], none.out);
        ok(none.run(stream));
        let seen = findings().len();
        let _ = download::<f16>(none.out, ROWS * 512);
        assert_found(seen, FindingKind::UnwrittenCopy, &[]);
    }
}

#[test]
fn missing_tensors_are_refused_by_name_with_their_status() {
    let _bench = on_machine("Ascend910B3", Cann::V9_2);
    let new = |form| Sparse::new(form, [1, 3], [20, 20], TABLE, [NONE; ROWS]);
    let all = [(QUERY, 161_001), (KEY, 161_001), (LISTS, 161_001), (OUT, 161_001)];
    let late = [(BLOCK_TABLE, 561_002), (LENGTHS, 561_002)];
    let of_form = |form| match form {
        V1 => [(MAX, 161_001), (QUERY_ROPE, 561_002)],
        V2 => [(KEY_ROPE, 561_002), (QUERY_ROPE, 561_002)],
        Quantised => [(VALUE, 161_001), (KEY, 161_001)],
    };
    for form in FORMS {
        for (tensor, status) in all.into_iter().chain(late).chain(of_form(form)) {
            assert_eq!(new(form).without(tensor).try_prepare().0, status, "{form:?} without {tensor}");
        }
    }
    // Of both outputs for the softmax the library would use memory that it has freed; the second version refuses that.
    assert_eq!(new(V1).without(MAX).without(SUM).try_prepare().0, 161_001);
    assert_eq!(new(V2).without(MAX).without(SUM).try_prepare().0, -1);
    for form in [V1, V2] {
        let mut asked = new(form).without(SUM);
        asked.softmax = true;
        assert_eq!(asked.try_prepare().0, -1);
    }
}

/// The sinks of a call with one head, `[heads]`.
fn sinks(heads: usize) -> *mut aclTensor {
    sized(FLOAT, &[heads], upload(&vec![0f32; heads]))
}

#[test]
fn sinks_are_refused_off_ascend_950_for_paged_keys_and_in_other_shapes() {
    for (chip, unpaged, heads, status) in [
        ("Ascend910B3", true, 1, 361_001),
        ("Ascend950PR_9599", false, 1, 561_002),
        ("Ascend950PR_9599", true, 2, 561_002),
        ("Ascend950PR_9599", true, 1, 0),
    ] {
        let _bench = on_machine(chip, Cann::V9_2);
        let mut call = Sparse::new(V2, [1, 3], [20, 20], TABLE, [NONE; ROWS]);
        call.tensors[SINKS] = sinks(heads);
        if unpaged {
            let keys = |dim| sized(HALF, &[40, 1, dim], upload(&vec![f16::ZERO; 40 * dim]));
            (call.tensors[KEY], call.tensors[KEY_ROPE]) = (keys(512), keys(64));
            (call.tensors[VALUE], call.tensors[BLOCK_TABLE]) = (call.tensors[KEY], null_mut());
            call.tensors[6] = tensor(INT32, &[2], upload(&[20i32, 40]));
            call.paged = false;
        }
        let (given, executor) = call.try_prepare();
        assert_eq!(given, status, "{chip}, {heads} heads");
        if status == 0 {
            ok(unsafe { aclDestroyAclOpExecutor(executor) });
        }
    }
}

/// A call with sinks: heads, rows and keys of two sequences, entries of a list, and a seed.
#[derive(Clone, Debug)]
struct Draw {
    heads: usize,
    rows: [usize; 2],
    keys: [usize; 2],
    entries: usize,
    softmax: bool,
    seed: usize,
}

fn draws() -> impl Strategy<Value = Draw> {
    let sizes = (1usize..9, [0usize..4, 1..4], [0usize..30, 4..30], 1usize..20);
    (sizes, any::<bool>(), 0usize..1000).prop_map(|((heads, rows, keys, entries), softmax, seed)| {
        // A sequence has as many keys as rows at least.
        let keys = [keys[0].max(rows[0]), keys[1]];
        Draw { heads, rows, keys, entries, softmax, seed }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn sinks_count_in_maximum_and_sum(draw in draws()) {
        let Draw { heads, rows, keys, entries, softmax, seed } = draw;
        let _bench = on_machine("Ascend950PR_9599", Cann::V9_2);
        let _strict = check_scope(Check::Strict);
        let stream = stream();
        let (all_rows, all_keys) = (rows[0] + rows[1], keys[0] + keys[1]);
        let host = [
            numbers(seed, all_rows * heads * 512),
            numbers(seed + 1, all_keys * 512),
            numbers(seed + 2, all_rows * heads * 64),
            numbers(seed + 3, all_keys * 64),
        ];
        let sinks: Vec<f32> = numbers(seed + 4, heads).iter().map(|sink| 4.0 * sink.to_f32()).collect();
        // Row, first key, and the keys up to the row's own: an odd step through a number of them visits none twice.
        let sequences = [(0, rows[0], 0, keys[0]), (rows[0], rows[1], keys[0], keys[1])];
        let mut places = Vec::new();
        for (_, rows, first, keys) in sequences {
            places.extend((0..rows).map(|row| (first, keys + row + 1 - rows)));
        }
        let lists: Vec<Vec<usize>> = (places.iter().enumerate())
            .map(|(row, &(_, seen))| {
                let count = if (row + seed) % 5 == 0 { 0 } else { entries.min(seen) };
                (0..count).map(|at| (at + row + seed) % seen).collect()
            })
            .collect();
        let padded: Vec<i32> = lists
            .iter()
            .flat_map(|list| (0..entries).map(|at| list.get(at).map_or(-1, |&key| key as i32)))
            .collect();
        let half = |shape: &[usize], values: &[f16]| sized(HALF, shape, upload(values));
        let ends = |[first, second]: [usize; 2]| tensor(INT32, &[2], upload(&[first as i32, (first + second) as i32]));
        let out = upload(&vec![f16::from_f32(OLD); all_rows * heads * 512]);
        let sums = [(); 2].map(|()| upload(&vec![OLD; all_rows * heads]));
        let of_softmax = |data| match softmax {
            true => sized(FLOAT, &[1, all_rows, heads], data),
            false => tensor(FLOAT, &[0], null_mut()),
        };
        let key = half(&[all_keys, 1, 512], &host[1]);
        let call = Sparse {
            form: V2,
            tensors: [
                half(&[all_rows, heads, 512], &host[0]),
                key,
                key,
                sized(INT32, &[all_rows, 1, entries], upload(&padded)),
                null_mut(),
                ends(rows),
                ends(keys),
                half(&[all_rows, heads, 64], &host[2]),
                half(&[all_keys, 1, 64], &host[3]),
                sized(FLOAT, &[heads], upload(&sinks)),
                sized(HALF, &[all_rows, heads, 512], out),
                of_softmax(sums[0]),
                of_softmax(sums[1]),
            ],
            paged: false,
            scale: 0.1,
            softmax,
            out,
            workspace: Memory::new(WORKSPACE as usize),
        };
        ok(call.run(stream));
        let got = download::<f16>(out, all_rows * heads * 512);
        let [got_max, got_sum] = sums.map(|sums| download::<f32>(sums, all_rows * heads));
        for row in 0..all_rows {
            for (head, &sink) in sinks.iter().enumerate() {
                let number = row * heads + head;
                let keys: Vec<usize> = lists[row].iter().map(|key| places[row].0 + key).collect();
                let dot = |of: usize, dim: usize, key: usize| -> f64 {
                    let query = &host[of][number * dim..][..dim];
                    let pairs = query.iter().zip(&host[of + 1][key * dim..][..dim]);
                    pairs.map(|(q, k)| q.to_f64() * k.to_f64()).sum()
                };
                let scores: Vec<f64> =
                    keys.iter().map(|&key| 0.1 * (dot(0, 512, key) + dot(2, 64, key))).collect();
                let sink = f64::from(sink);
                let max = scores.iter().copied().fold(sink, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                let sum = weights.iter().sum::<f64>() + (sink - max).exp();
                for column in (0..512).step_by(37) {
                    let values = keys.iter().map(|key| host[1][key * 512 + column].to_f64());
                    let want = weights.iter().zip(values).map(|(weight, value)| weight * value).sum::<f64>() / sum;
                    let got = got[number * 512 + column].to_f64();
                    prop_assert!((got - want).abs() <= 2e-3 + 2e-3 * want.abs(), "{row}, {head}: {got}, {want}");
                }
                if softmax {
                    let (got_max, got_sum) = (f64::from(got_max[number]), f64::from(got_sum[number]));
                    prop_assert!((got_max - max).abs() <= 1e-3, "{row}, {head}: {got_max}, {max}");
                    prop_assert!((got_sum - sum).abs() <= 1e-3 * sum, "{row}, {head}: {got_sum}, {sum}");
                }
            }
        }
    }
}
