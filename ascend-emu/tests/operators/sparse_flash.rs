//! SparseFlashAttention through its C functions: the keys that rows read, and numbers that lead outside of tensors.

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
const BLOCKS: usize = 4;
const BLOCK_SIZE: usize = 16;
const COUNT: usize = 3;
/// What the output holds before.
const OLD: f32 = 77.0;

/// Two sequences in the blocks `[[3, 1], [2, 0]]`. All scores are equal and each value is its position, so that a row
/// is the mean of the positions that it reads.
struct Sparse {
    tensors: [*mut aclTensor; 12],
    softmax: bool,
    out: *mut c_void,
    workspace: Memory,
}

const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const BLOCK_TABLE: usize = 4;
const LENGTHS: usize = 5;
const KEY_ROPE: usize = 8;
const OUT: usize = 9;
const QUERY_ROPE: usize = 7;
const MAX: usize = 10;
const SUM: usize = 11;

impl Sparse {
    fn new(ends: [i32; 2], keys: [i32; 2], table: [i32; 4], lists: [[i32; COUNT]; ROWS]) -> Self {
        let zeros = |count: usize| upload(&vec![f16::ZERO; count]);
        let mut cache = vec![f16::ZERO; BLOCKS * BLOCK_SIZE * 512];
        for (block, position) in [(3, 0), (1, 1), (2, 0), (0, 1)] {
            for row in 0..BLOCK_SIZE {
                let value = f16::from_f32((position * BLOCK_SIZE + row) as f32);
                cache[(block * BLOCK_SIZE + row) * 512..][..512].fill(value);
            }
        }
        let out = upload(&[f16::from_f32(OLD); ROWS * 512]);
        let shape = |shape: &[usize]| shape.iter().map(|&size| size as i64).collect::<Vec<_>>();
        let half = |sizes: &[usize], data| tensor(HALF, &shape(sizes), data);
        let key = half(&[BLOCKS, BLOCK_SIZE, 1, 512], upload(&cache));
        let none = || tensor(aclDataType::ACL_FLOAT, &[0], null_mut());
        Sparse {
            tensors: [
                half(&[ROWS, 1, 512], zeros(ROWS * 512)),
                key,
                key,
                tensor(INT32, &shape(&[ROWS, 1, COUNT]), upload(&lists.concat())),
                tensor(INT32, &[2, 2], upload(&table)),
                tensor(INT32, &[2], upload(&ends)),
                tensor(INT32, &[2], upload(&keys)),
                half(&[ROWS, 1, 64], zeros(ROWS * 64)),
                half(&[BLOCKS, BLOCK_SIZE, 1, 64], zeros(BLOCKS * BLOCK_SIZE * 64)),
                half(&[ROWS, 1, 512], out),
                none(),
                none(),
            ],
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
        let [query, key, value, lists, table, ends, keys, query_rope, key_rope, out, max, sum] = self.tensors;
        let (mut bytes, mut executor) = (0, null_mut());
        let status = unsafe {
            aclnnSparseFlashAttentionGetWorkspaceSize(
                query,
                key,
                value,
                lists,
                table,
                ends,
                keys,
                query_rope,
                key_rope,
                1.0,
                1,
                c"TND".as_ptr().cast_mut(),
                c"PA_BSND".as_ptr().cast_mut(),
                3,
                i64::MAX,
                i64::MAX,
                2,
                self.softmax,
                out,
                max,
                sum,
                &mut bytes,
                &mut executor,
            )
        };
        (status, executor)
    }

    fn run(&self, stream: aclrtStream) -> i32 {
        let (status, executor) = self.try_prepare();
        ok(status);
        ok(unsafe { aclnnSparseFlashAttention(self.workspace.at, WORKSPACE, executor, stream) });
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
const LISTS: [[i32; COUNT]; ROWS] = [[19, 0, 5], [-1; COUNT], [0, -1, -1], [1, 2, 3]];

#[test]
fn rows_attend_to_their_lists() {
    let _bench = Bench::new();
    let stream = stream();
    // The first row of the second sequence may read no key, the row behind both belongs to none.
    let sparse = Sparse::new([1, 3], [20, 1], TABLE, LISTS);
    ok(sparse.run(stream));
    assert_eq!(sparse.rows(), [8.0, 0.0, 0.0, OLD]);
    // From 9.1 on the key is the value, where there is none.
    let sparse = Sparse::new([1, 3], [20, 20], TABLE, [[19, 2, -1], [18, 17, -1], [19, -1, -1], [-1; 3]]);
    let sparse = sparse.without(VALUE);
    ok(sparse.run(stream));
    assert_eq!(sparse.rows(), [10.5, 17.5, 19.0, OLD]);
}

#[test]
fn numbers_that_lead_outside_of_tensors_are_found() {
    let _bench = Bench::new();
    let stream = stream();
    let length = FindingKind::SequenceLength;
    for (kind, text, ends, keys, table) in [
        (length, "5 for the query rows of sequence 1", [1, 5], [20, 20], TABLE),
        (length, "actualSeqLengthsKv: -2 for the keys of sequence 0", [1, 3], [-2, 20], TABLE),
        (length, "33 keys of sequence 1", [1, 3], [20, 33], TABLE),
        (FindingKind::BlockTable, "block 4 in column 1 of sequence 0", [1, 3], [20, 20], [3, 4, 2, 0]),
    ] {
        let new = || Sparse::new(ends, keys, table, [[-1; COUNT]; ROWS]);
        let seen = findings().len();
        ok(new().run(stream));
        assert!(has_found(seen, kind, text), "{text}: {:?}", &findings()[seen..]);
        let _strict = check_scope(Check::Strict);
        assert_ne!(new().run(stream), 0, "{text}");
    }
}

/// Whether the findings from number `seen` on have one of this kind with this text.
fn has_found(seen: usize, kind: FindingKind, text: &str) -> bool {
    let found = findings();
    let mut found = found[seen..].iter();
    found.any(|finding| finding.kind == kind && finding.message.contains(text))
}

#[test]
fn lists_that_say_other_than_they_do_are_found() {
    let _bench = Bench::new();
    let stream = stream();
    let (twice, skipped) = (FindingKind::RepeatedBlock, FindingKind::SkippedEntry);
    for (kind, text, list) in [
        (twice, "entry 1 names block 4 again", [4, 4, -1]),
        (skipped, "entry 2 names block 4, which is not read", [5, -1, 4]),
        (skipped, "entry 0 names block 20, which begins behind the 20 keys", [20, 1, 2]),
        (skipped, "entry 1 names block -2", [0, -2, -1]),
    ] {
        let lists = [list, [-1; COUNT], [-1; COUNT], [7, 7, 7]];
        let new = || Sparse::new([1, 3], [20, 20], TABLE, lists);
        let seen = findings().len();
        ok(new().run(stream));
        let text = format!("sparseIndices: row 0 of sequence 0: {text}");
        assert!(has_found(seen, kind, &text), "{text}: {:?}", &findings()[seen..]);
        let _strict = check_scope(Check::Strict);
        assert_ne!(new().run(stream), 0, "{text}");
    }
    // Lists of rows that belong to no sequence are not read.
    let _strict = check_scope(Check::Strict);
    let lists = [[19, 0, 5], [-1; COUNT], [0, -1, -1], [7, 7, 7]];
    ok(Sparse::new([1, 3], [20, 20], TABLE, lists).run(stream));
}

#[test]
fn keys_that_nothing_has_written_and_rows_that_are_not_written_are_found() {
    let _bench = Bench::new();
    let stream = stream();
    let lists = [[19, 2, -1], [-1; COUNT], [1, -1, -1], [-1; COUNT]];
    let mut sparse = Sparse::new([1, 3], [20, 20], TABLE, lists);
    // Of the cache of rotary parts block 3 alone is written, which has the first 16 keys of sequence 0.
    let bytes = BLOCK_SIZE * 64 * 2;
    let cache = malloc(BLOCKS * bytes);
    let written = vec![f16::ZERO; BLOCK_SIZE * 64];
    ok(unsafe {
        let (to, from) = (cache.cast::<u8>().wrapping_add(3 * bytes), written.as_ptr());
        aclrtMemcpy(to.cast(), bytes, from.cast(), bytes, H2D)
    });
    let shape = [BLOCKS as i64, BLOCK_SIZE as i64, 1, 64];
    sparse.tensors[KEY_ROPE] = tensor(HALF, &shape, cache);
    let seen = findings().len();
    ok(sparse.run(stream));
    assert!(has_found(seen, FindingKind::UnwrittenRead, "keyRope"), "{:?}", &findings()[seen..]);

    let mut none = Sparse::new([0, 0], [20, 20], TABLE, [[-1; COUNT]; ROWS]);
    none.out = malloc(ROWS * 512 * 2);
    none.tensors[OUT] = tensor(HALF, &[ROWS as i64, 1, 512], none.out);
    ok(none.run(stream));
    let seen = findings().len();
    let _ = download::<f16>(none.out, ROWS * 512);
    assert!(has_found(seen, FindingKind::UnwrittenCopy, ""), "{:?}", &findings()[seen..]);
}

#[test]
fn missing_tensors_are_refused_by_name_with_their_status() {
    let _bench = Bench::new();
    let new = || Sparse::new([1, 3], [20, 20], TABLE, LISTS);
    for (tensor, status) in [
        (QUERY, 161_001),
        (KEY, 161_001),
        (MAX, 161_001),
        (QUERY_ROPE, 561_002),
        (BLOCK_TABLE, 561_002),
        (LENGTHS, 561_002),
    ] {
        assert_eq!(new().without(tensor).try_prepare().0, status, "{tensor}");
    }
    // Of both outputs for the softmax the library would use memory that it has freed.
    assert_eq!(new().without(MAX).without(SUM).try_prepare().0, 161_001);
    let mut asked = new().without(SUM);
    asked.softmax = true;
    assert_eq!(asked.try_prepare().0, -1);
}
