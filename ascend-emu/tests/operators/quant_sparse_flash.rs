//! KvQuantSparseFlashAttention through its C functions: the keys that rows read, and numbers that lead outside of
//! tensors.

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
const ROW: usize = 656;
/// What the output holds before.
const OLD: f32 = 77.0;

const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const LISTS: usize = 3;
const BLOCK_TABLE: usize = 4;
const LENGTHS: usize = 5;
const OUT: usize = 7;

/// Two sequences in the blocks `[[3, 1], [2, 0]]`. All scores are equal and the elements of each key are half its
/// position, so that a row is half the mean of the positions that it reads.
struct Sparse {
    tensors: [*mut aclTensor; 8],
    out: *mut c_void,
    workspace: Memory,
}

/// The row of the key at a position, whose elements are its quantised number times one half.
fn packed(position: usize) -> [u8; ROW] {
    let mut row = [0; ROW];
    row[..512].fill(u8::try_from(position).unwrap());
    for scale in row[640..].chunks_mut(4) {
        scale.copy_from_slice(&0.5f32.to_ne_bytes());
    }
    row
}

fn shape(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|&size| size as i64).collect()
}

impl Sparse {
    fn new(ends: [i32; 2], keys: [i32; 2], table: [i32; 4], lists: [[i32; COUNT]; ROWS]) -> Self {
        let mut cache = vec![0u8; BLOCKS * BLOCK_SIZE * ROW];
        for (block, first) in [(3, 0), (1, BLOCK_SIZE), (2, 0), (0, BLOCK_SIZE)] {
            for row in 0..BLOCK_SIZE {
                let at = (block * BLOCK_SIZE + row) * ROW;
                cache[at..][..ROW].copy_from_slice(&packed(first + row));
            }
        }
        let out = upload(&[f16::from_f32(OLD); ROWS * 512]);
        let key = keys_at(upload(&cache));
        Sparse {
            tensors: [
                tensor(HALF, &shape(&[ROWS, 1, 576]), upload(&[f16::ZERO; ROWS * 576])),
                key,
                key,
                tensor(INT32, &shape(&[ROWS, 1, COUNT]), upload(&lists.concat())),
                tensor(INT32, &[2, 2], upload(&table)),
                tensor(INT32, &[2], upload(&ends)),
                tensor(INT32, &[2], upload(&keys)),
                tensor(HALF, &shape(&[ROWS, 1, 512]), out),
            ],
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
        let [query, key, value, lists, table, ends, keys, out] = self.tensors;
        let (mut bytes, mut executor) = (0, null_mut());
        let status = unsafe {
            aclnnKvQuantSparseFlashAttentionGetWorkspaceSize(
                query,
                key,
                value,
                lists,
                null_mut(),
                null_mut(),
                table,
                ends,
                keys,
                1.0,
                2,
                2,
                1,
                c"TND".as_ptr().cast_mut(),
                c"PA_BSND".as_ptr().cast_mut(),
                3,
                i64::MAX,
                i64::MAX,
                2,
                1,
                128,
                64,
                out,
                &mut bytes,
                &mut executor,
            )
        };
        (status, executor)
    }

    fn run(&self, stream: aclrtStream) -> i32 {
        let (status, executor) = self.try_prepare();
        ok(status);
        ok(unsafe { aclnnKvQuantSparseFlashAttention(self.workspace.at, WORKSPACE, executor, stream) });
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

/// A cache of packed rows at an address.
fn keys_at(cache: *mut c_void) -> *mut aclTensor {
    tensor(aclDataType::ACL_INT8, &shape(&[BLOCKS, BLOCK_SIZE, 1, ROW]), cache)
}

const TABLE: [i32; 4] = [3, 1, 2, 0];
const NONE: [i32; COUNT] = [-1; COUNT];

#[test]
fn rows_attend_to_the_packed_keys_of_their_lists() {
    let _bench = Bench::new();
    let stream = stream();
    // The first row of the second sequence may read no key, the row behind both belongs to none.
    let lists = [[19, 0, 5], NONE, [0, -1, -1], [1, 2, 3]];
    let sparse = Sparse::new([1, 3], [20, 1], TABLE, lists);
    ok(sparse.run(stream));
    assert_eq!(sparse.rows(), [4.0, 0.0, 0.0, OLD]);
    let lists = [[19, 2, -1], [18, 17, -1], [19, -1, -1], NONE];
    let sparse = Sparse::new([1, 3], [20, 20], TABLE, lists);
    ok(sparse.run(stream));
    assert_eq!(sparse.rows(), [5.25, 8.75, 9.5, OLD]);
}

#[test]
fn numbers_and_lists_that_mislead_are_found_and_fail_in_strict_mode() {
    let _bench = Bench::new();
    let stream = stream();
    let lists = |first| [first, NONE, NONE, NONE];
    let length = FindingKind::SequenceLength;
    for (kind, text, ends, keys, table, lists) in [
        (length, "5 for the query rows of sequence 1", [1, 5], [20, 20], TABLE, lists(NONE)),
        (length, "actualSeqLengthsKv: -2 for the keys", [1, 3], [-2, 20], TABLE, lists(NONE)),
        (FindingKind::BlockTable, "block 4 in column 1", [1, 3], [20, 20], [3, 4, 2, 0], lists(NONE)),
        (FindingKind::RepeatedBlock, "names block 4 again", [1, 3], [20, 20], TABLE, lists([4, 4, -1])),
        (FindingKind::SkippedEntry, "entry 0 names block 20", [1, 3], [20, 20], TABLE, lists([20, 1, 2])),
    ] {
        let new = || Sparse::new(ends, keys, table, lists);
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
fn packed_keys_that_nothing_has_written_are_found_where_a_row_reads_them() {
    let _bench = Bench::new();
    let stream = stream();
    // Of the cache block 3 alone is written, which has the first 16 keys of sequence 0.
    let cache = malloc(BLOCKS * BLOCK_SIZE * ROW);
    let written = packed(1).repeat(BLOCK_SIZE);
    ok(unsafe {
        let to = cache.cast::<u8>().wrapping_add(3 * written.len());
        aclrtMemcpy(to.cast(), written.len(), written.as_ptr().cast(), written.len(), H2D)
    });
    let run = |list| {
        let mut sparse = Sparse::new([1, 3], [20, 20], TABLE, [list, NONE, NONE, NONE]);
        sparse.tensors[KEY] = keys_at(cache);
        sparse.tensors[VALUE] = sparse.tensors[KEY];
        let seen = findings().len();
        ok(sparse.run(stream));
        let found = findings();
        let unwritten = |finding: &ascend_emu::Finding| finding.kind == FindingKind::UnwrittenRead;
        found[seen..].iter().filter(|finding| unwritten(finding)).count()
    };
    assert_eq!(run([15, 2, -1]), 0);
    assert_ne!(run([15, 16, -1]), 0);
}

#[test]
fn missing_tensors_are_refused_by_name_with_their_status() {
    let _bench = Bench::new();
    let new = || Sparse::new([1, 3], [20, 20], TABLE, [NONE; ROWS]);
    for (tensor, status) in [
        (QUERY, 161_001),
        (KEY, 161_001),
        (VALUE, 161_001),
        (LISTS, 161_001),
        (OUT, 161_001),
        (BLOCK_TABLE, 561_002),
        (LENGTHS, 561_002),
    ] {
        assert_eq!(new().without(tensor).try_prepare().0, status, "{tensor}");
    }
}
