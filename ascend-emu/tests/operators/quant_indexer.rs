//! QuantLightningIndexer through its C functions: the keys that rows choose, and numbers that lead outside of tensors.

use crate::bench::*;
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
const BLOCK_TABLE: usize = 7;

/// Two sequences in the blocks `[[3, 1], [2, 0]]`, whose keys are alike but for their scales: each is better than the
/// one before.
struct Indexer {
    tensors: [*mut aclTensor; 9],
    indices: *mut c_void,
    workspace: Memory,
}

impl Indexer {
    fn new(ends: [i32; 2], keys: [i32; 2], table: [i32; 4]) -> Self {
        let ones = |count: usize| upload(&vec![1i8; count]);
        let halves = |count: usize| upload(&vec![f16::ONE; count]);
        let mut scales = vec![f16::ZERO; BLOCKS * BLOCK_SIZE];
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
        Indexer {
            tensors: [
                tensor(INT8, &[ROWS, HEADS, 128], ones(ROWS * HEADS * 128)),
                tensor(INT8, &[BLOCKS, BLOCK_SIZE, 1, 128], ones(BLOCKS * BLOCK_SIZE * 128)),
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
        let status = unsafe {
            aclnnQuantLightningIndexerGetWorkspaceSize(
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
                c"TND".as_ptr().cast_mut(),
                c"PA_BSND".as_ptr().cast_mut(),
                COUNT as i64,
                3,
                i64::MAX,
                i64::MAX,
                indices,
                &mut bytes,
                &mut executor,
            )
        };
        (status, executor)
    }

    fn run(&self, stream: aclrtStream) -> i32 {
        let (status, executor) = self.try_prepare();
        ok(status);
        ok(unsafe { aclnnQuantLightningIndexer(self.workspace.at, WORKSPACE, executor, stream) });
        unsafe { aclrtSynchronizeStream(stream) }
    }
}

const TABLE: [i32; 4] = [3, 1, 2, 0];

#[test]
fn rows_choose_the_keys_with_the_largest_scales() {
    let _bench = Bench::new();
    // The first row of the second sequence may choose no key, the row behind both belongs to none.
    let indexer = Indexer::new([1, 3], [20, 1], TABLE);
    ok(indexer.run(stream()));
    let rows = [[19, 18, 17], [-1; COUNT], [0, -1, -1], [OLD; COUNT]];
    assert_eq!(download::<i32>(indexer.indices, ROWS * COUNT), rows.concat());
}

#[test]
fn numbers_that_lead_outside_of_tensors_are_found() {
    let _bench = Bench::new();
    let stream = stream();
    let length = FindingKind::SequenceLength;
    for (kind, text, ends, keys, table) in [
        (length, "5 for the query rows of sequence 1", [1, 5], [20, 20], TABLE),
        (length, "actualSeqLengthsKey: -2 for the keys", [1, 3], [-2, 20], TABLE),
        (length, "33 keys of sequence 1", [1, 3], [20, 33], TABLE),
        (FindingKind::BlockTable, "block 4 in column 1", [1, 3], [20, 20], [3, 4, 2, 0]),
    ] {
        let new = || Indexer::new(ends, keys, table);
        let seen = findings().len();
        ok(new().run(stream));
        let found = findings();
        let mut found = found[seen..].iter();
        assert!(found.any(|finding| finding.kind == kind && finding.message.contains(text)), "{text}");
        let _strict = check_scope(Check::Strict);
        assert_ne!(new().run(stream), 0, "{text}");
    }
}

#[test]
fn missing_tensors_are_refused_by_name_with_their_status() {
    let _bench = Bench::new();
    for (tensor, status) in [
        (QUERY, -1),
        // The library reads through these two.
        (KEY, 161_001),
        (KEY_SCALE, 161_001),
        (WEIGHTS, 161_001),
        (QUERY_SCALE, 161_001),
        (BLOCK_TABLE, 561_002),
    ] {
        let mut indexer = Indexer::new([1, 3], [20, 20], TABLE);
        indexer.tensors[tensor] = null_mut();
        assert_eq!(indexer.try_prepare().0, status, "{tensor}");
    }
}
