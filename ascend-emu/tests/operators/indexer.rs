//! LightningIndexer and QuantLightningIndexer through their C functions: the keys that rows choose, and numbers that
//! lead outside of tensors.

use crate::bench::*;
use crate::found::{assert_found, has_found};
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, check_scope, findings};
use ascend_sys::bindings::{aclDataType, aclOpExecutor, aclTensor, aclrtStream};
use half::f16;
use std::ffi::c_void;
use std::ptr::null_mut;

const HALF: aclDataType = aclDataType::ACL_FLOAT16;
const INT8: aclDataType = aclDataType::ACL_INT8;
const INT32: aclDataType = aclDataType::ACL_INT32;
const WORKSPACE: u64 = 16 << 20;
const ROWS: usize = 4;
const HEADS: usize = 8;
const BLOCKS: usize = 4;
const BLOCK_SIZE: usize = 16;
const COUNT: usize = 3;
/// What the output holds before.
const OLD: i32 = 77;

const QUERY: usize = 0;
const KEY: usize = 1;
const WEIGHTS: usize = 2;
const QUERY_SCALE: usize = 3;
const KEY_SCALE: usize = 4;
const LENGTHS: usize = 5;
const BLOCK_TABLE: usize = 7;

/// Two sequences in the blocks `[[3, 1], [2, 0]]`, of which each key is better than the one before: by its elements, or
/// by its scale alone where it is quantised.
struct Indexer {
    quantised: bool,
    tensors: [*mut aclTensor; 9],
    indices: *mut c_void,
    workspace: Memory,
}

impl Indexer {
    fn new(quantised: bool, ends: [i32; 2], keys: [i32; 2], table: [i32; 4]) -> Self {
        let halves = |count: usize| upload(&vec![f16::ONE; count]);
        let mut scales = [f16::ZERO; BLOCKS * BLOCK_SIZE];
        for (block, first) in [(3, 0), (1, BLOCK_SIZE), (2, 0), (0, BLOCK_SIZE)] {
            for row in 0..BLOCK_SIZE {
                scales[block * BLOCK_SIZE + row] = f16::from_f32((first + row + 1) as f32 / 64.0);
            }
        }
        let indices = upload(&[OLD; ROWS * COUNT]);
        let tensor = |dtype, sizes: &[usize], data| {
            let shape: Vec<i64> = sizes.iter().map(|&size| size as i64).collect();
            tensor(dtype, &shape, data)
        };
        let (dtype, query, key) = match quantised {
            true => (INT8, upload(&[1i8; ROWS * HEADS * 128]), upload(&[1i8; BLOCKS * BLOCK_SIZE * 128])),
            false => (HALF, halves(ROWS * HEADS * 128), upload(&scales.map(|scale| [scale; 128]).concat())),
        };
        Indexer {
            quantised,
            tensors: [
                tensor(dtype, &[ROWS, HEADS, 128], query),
                tensor(dtype, &[BLOCKS, BLOCK_SIZE, 1, 128], key),
                tensor(HALF, &[ROWS, HEADS], halves(ROWS * HEADS)),
                tensor(HALF, &[ROWS, HEADS], halves(ROWS * HEADS)),
                tensor(HALF, &[BLOCKS, BLOCK_SIZE, 1], upload(&scales)),
                tensor(INT32, &[2], upload(&ends)),
                tensor(INT32, &[2], upload(&keys)),
                tensor(INT32, &[2, 2], upload(&table)),
                tensor(INT32, &[ROWS, 1, COUNT], indices),
            ],
            indices,
            workspace: Memory::new(WORKSPACE as usize),
        }
    }

    fn try_prepare(&self) -> (i32, *mut aclOpExecutor) {
        let [query, key, weights, query_scale, key_scale, ends, keys, table, indices] = self.tensors;
        let (mut bytes, mut executor) = (0, null_mut());
        let to = (&raw mut bytes, &raw mut executor);
        let (rows, cache) = (c"TND".as_ptr().cast_mut(), c"PA_BSND".as_ptr().cast_mut());
        let (count, all) = (COUNT as i64, i64::MAX);
        let status = unsafe {
            match self.quantised {
                false => aclnnLightningIndexerGetWorkspaceSize(
                    query,
                    key,
                    weights,
                    ends,
                    keys,
                    table,
                    rows,
                    cache,
                    count,
                    3,
                    all,
                    all,
                    false,
                    indices,
                    null_mut(),
                    to.0,
                    to.1,
                ),
                true => aclnnQuantLightningIndexerGetWorkspaceSize(
                    query,
                    key,
                    weights,
                    query_scale,
                    key_scale,
                    ends,
                    keys,
                    table,
                    0,
                    0,
                    rows,
                    cache,
                    count,
                    3,
                    all,
                    all,
                    indices,
                    to.0,
                    to.1,
                ),
            }
        };
        (status, executor)
    }

    fn run(&self, stream: aclrtStream) -> i32 {
        let (status, executor) = self.try_prepare();
        ok(status);
        let launch = if self.quantised { aclnnQuantLightningIndexer } else { aclnnLightningIndexer };
        ok(unsafe { launch(self.workspace.at, WORKSPACE, executor, stream) });
        unsafe { aclrtSynchronizeStream(stream) }
    }
}

const TABLE: [i32; 4] = [3, 1, 2, 0];

#[test]
fn rows_choose_the_best_keys_up_to_their_position() {
    let _bench = Bench::new();
    let stream = stream();
    for quantised in [false, true] {
        // The first row of the second sequence has no key, the row behind both belongs to none.
        let indexer = Indexer::new(quantised, [1, 3], [20, 1], TABLE);
        ok(indexer.run(stream));
        let want = [[19, 18, 17], [-1; COUNT], [0, -1, -1], [OLD; COUNT]];
        assert_eq!(download::<i32>(indexer.indices, ROWS * COUNT), want.concat(), "{quantised}");
    }
}

#[test]
fn rows_after_the_last_sequence_stay_unwritten() {
    let _bench = Bench::new();
    let stream = stream();
    for quantised in [false, true] {
        let mut indexer = Indexer::new(quantised, [1, 3], [20, 1], TABLE);
        indexer.indices = malloc(ROWS * COUNT * size_of::<i32>());
        indexer.tensors[8] = tensor(INT32, &[ROWS as i64, 1, COUNT as i64], indexer.indices);
        ok(indexer.run(stream));
        let seen = findings().len();
        let unwritten = || has_found(seen, FindingKind::UnwrittenCopy, "");
        let _ = download::<i32>(indexer.indices, 3 * COUNT);
        assert!(!unwritten(), "{quantised}: {:?}", &findings()[seen..]);
        let last = indexer.indices.cast::<i32>().wrapping_add(3 * COUNT);
        let _ = download::<i32>(last.cast(), COUNT);
        assert!(unwritten(), "{quantised}");
    }
}

#[test]
fn numbers_that_lead_outside_of_tensors_are_found() {
    let _bench = Bench::new();
    let stream = stream();
    let (length, block) = (FindingKind::SequenceLength, FindingKind::BlockTable);
    let (of_query, of_key) = ("actualSeqLengthsQuery", "actualSeqLengthsKey");
    for (kind, name, text, ends, keys, table) in [
        (length, of_query, "5 for the query rows of sequence 1", [1, 5], [20, 20], TABLE),
        (length, of_query, "allowed: 3 to 4", [3, 1], [20, 20], TABLE),
        (length, of_key, "-2 for the keys of sequence 0", [1, 3], [-2, 20], TABLE),
        (length, of_key, "33 keys of sequence 1", [1, 3], [20, 33], TABLE),
        (block, "blockTable", "block 4 in column 1 of sequence 0", [1, 3], [20, 20], [3, 4, 2, 0]),
        (block, "blockTable", "block -1 in column 0", [1, 3], [20, 20], [3, 1, -1, 0]),
    ] {
        for quantised in [false, true] {
            let new = || Indexer::new(quantised, ends, keys, table);
            let seen = findings().len();
            ok(new().run(stream));
            assert_found(seen, kind, &[name, text]);
            let _strict = check_scope(Check::Strict);
            assert_ne!(new().run(stream), 0, "{quantised}: {text}");
        }
    }
}

#[test]
fn missing_tensors_and_other_dtypes_are_refused_with_their_status() {
    let _bench = Bench::new();
    let all = [(QUERY, -1), (KEY, 161_001), (WEIGHTS, 161_001), (BLOCK_TABLE, 561_002), (LENGTHS, 561_002)];
    for quantised in [false, true] {
        // The library reads through the scales.
        let scales = [(KEY_SCALE, 161_001), (QUERY_SCALE, 161_001)].into_iter().filter(|_| quantised);
        for (number, status) in all.into_iter().chain(scales) {
            let mut indexer = Indexer::new(quantised, [1, 3], [20, 20], TABLE);
            indexer.tensors[number] = null_mut();
            assert_eq!(indexer.try_prepare().0, status, "{quantised} without {number}");
        }
        let mut wide = Indexer::new(quantised, [1, 3], [20, 20], TABLE);
        wide.tensors[LENGTHS] = tensor(aclDataType::ACL_INT64, &[2], upload(&[1i64, 3]));
        assert_eq!(wide.try_prepare().0, 161_002, "{quantised}");
    }
}
