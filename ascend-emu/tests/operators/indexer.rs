//! LightningIndexer through its C functions: the keys that rows choose, and numbers that lead outside of tensors.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, check_scope, findings};
use ascend_sys::bindings::{aclDataType, aclOpExecutor, aclTensor, aclrtStream};
use half::f16;
use std::ffi::c_void;
use std::ptr::null_mut;

const HALF: aclDataType = aclDataType::ACL_FLOAT16;
const INT32: aclDataType = aclDataType::ACL_INT32;
const WORKSPACE: u64 = 16 << 20;
const ROWS: usize = 4;
const HEADS: usize = 8;
const BLOCKS: usize = 4;
const BLOCK_SIZE: usize = 16;
const COUNT: usize = 3;
/// What the output holds before.
const OLD: i32 = 77;

/// Two sequences in the blocks `[[3, 1], [2, 0]]`, of which each key is better than the one before.
struct Indexer {
    tensors: [*mut aclTensor; 7],
    indices: *mut c_void,
    workspace: Memory,
    query: *mut aclTensor,
}

impl Indexer {
    fn new(ends: [i32; 2], keys: [i32; 2], table: [i32; 4]) -> Self {
        let one = |count: usize| upload(&vec![f16::ONE; count]);
        let mut cache = vec![f16::ZERO; BLOCKS * BLOCK_SIZE * 128];
        for (block, position) in [(3, 0), (1, 1), (2, 0), (0, 1)] {
            for row in 0..BLOCK_SIZE {
                let value = f16::from_f32((position * BLOCK_SIZE + row) as f32 / 64.0);
                cache[(block * BLOCK_SIZE + row) * 128..][..128].fill(value);
            }
        }
        let indices = upload(&[OLD; ROWS * COUNT]);
        let shape = |shape: &[usize]| shape.iter().map(|&size| size as i64).collect::<Vec<_>>();
        let half = |sizes: &[usize], data| tensor(HALF, &shape(sizes), data);
        let query = half(&[ROWS, HEADS, 128], one(ROWS * HEADS * 128));
        Indexer {
            tensors: [
                query,
                half(&[BLOCKS, BLOCK_SIZE, 1, 128], upload(&cache)),
                half(&[ROWS, HEADS], one(ROWS * HEADS)),
                tensor(INT32, &[2], upload(&ends)),
                tensor(INT32, &[2], upload(&keys)),
                tensor(INT32, &[2, 2], upload(&table)),
                tensor(INT32, &shape(&[ROWS, 1, COUNT]), indices),
            ],
            indices,
            workspace: Memory::new(WORKSPACE as usize),
            query,
        }
    }

    fn try_prepare(&self) -> (i32, *mut aclOpExecutor) {
        let [query, key, weights, ends, keys, table, indices] = self.tensors;
        let (mut bytes, mut executor) = (0, null_mut());
        let status = unsafe {
            aclnnLightningIndexerGetWorkspaceSize(
                query,
                key,
                weights,
                ends,
                keys,
                table,
                c"TND".as_ptr().cast_mut(),
                c"PA_BSND".as_ptr().cast_mut(),
                COUNT as i64,
                3,
                i64::MAX,
                i64::MAX,
                false,
                indices,
                null_mut(),
                &mut bytes,
                &mut executor,
            )
        };
        (status, executor)
    }

    fn run(&self, stream: aclrtStream) -> i32 {
        let (status, executor) = self.try_prepare();
        ok(status);
        ok(unsafe { aclnnLightningIndexer(self.workspace.at, WORKSPACE, executor, stream) });
        unsafe { aclrtSynchronizeStream(stream) }
    }

    fn chosen(&self) -> Vec<[i32; COUNT]> {
        let all = download::<i32>(self.indices, ROWS * COUNT);
        all.as_chunks().0.to_vec()
    }
}

const TABLE: [i32; 4] = [3, 1, 2, 0];

#[test]
fn rows_choose_the_best_keys_up_to_their_position() {
    let _bench = Bench::new();
    let stream = stream();
    // The first row of the second sequence has no key, the row behind both belongs to none.
    let indexer = Indexer::new([1, 3], [20, 1], TABLE);
    ok(indexer.run(stream));
    let want = [[19, 18, 17], [-1; 3], [0, -1, -1], [OLD; 3]];
    assert_eq!(indexer.chosen(), want);
}

#[test]
fn numbers_that_lead_outside_of_tensors_are_found() {
    let _bench = Bench::new();
    let stream = stream();
    let (length, block) = (FindingKind::SequenceLength, FindingKind::BlockTable);
    let of_query = "actualSeqLengthsQuery";
    let of_key = "actualSeqLengthsKey";
    for (kind, name, text, indexer) in [
        (length, of_query, "5 for the query rows of sequence 1", ([1, 5], [20, 20], TABLE)),
        (length, of_query, "allowed: 3 to 4", ([3, 1], [20, 20], TABLE)),
        (length, of_key, "-2 for the keys of sequence 0", ([1, 3], [-2, 20], TABLE)),
        (length, of_key, "33 keys of sequence 1", ([1, 3], [20, 33], TABLE)),
        (block, "blockTable", "block 4 in column 1 of sequence 0", ([1, 3], [20, 20], [3, 4, 2, 0])),
        (block, "blockTable", "block -1 in column 0", ([1, 3], [20, 20], [3, 1, -1, 0])),
    ] {
        let (ends, keys, table) = indexer;
        let new = || Indexer::new(ends, keys, table);
        let seen = findings().len();
        ok(new().run(stream));
        let found = findings();
        let found = found[seen..].iter().any(|finding| {
            let message = &finding.message;
            finding.kind == kind && message.contains(name) && message.contains(text)
        });
        assert!(found, "{text}: {:?}", &findings()[seen..]);
    }
    let _strict = check_scope(Check::Strict);
    assert_ne!(Indexer::new([1, 5], [20, 20], TABLE).run(stream), 0);
}

#[test]
fn missing_tensors_and_other_shapes_are_refused_with_their_status() {
    let _bench = Bench::new();
    let mut indexer = Indexer::new([1, 3], [20, 20], TABLE);
    indexer.tensors[0] = null_mut();
    assert_eq!(indexer.try_prepare().0, -1);
    indexer.tensors[0] = indexer.query;
    let key = std::mem::replace(&mut indexer.tensors[1], null_mut());
    assert_eq!(indexer.try_prepare().0, 161_001);
    indexer.tensors[1] = key;
    let table = std::mem::replace(&mut indexer.tensors[5], null_mut());
    assert_eq!(indexer.try_prepare().0, 561_002);
    indexer.tensors[5] = table;
    indexer.tensors[3] = tensor(aclDataType::ACL_INT64, &[2], upload(&[1i64, 3]));
    assert_eq!(indexer.try_prepare().0, 161_002);
}
