//! GatherPaKvCache through its C functions: both orders, lengths and their sums, offsets, tables that lead nowhere.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, check_scope, findings};
use ascend_sys::bindings::{aclDataType, aclOpExecutor, aclTensor, aclrtStream};
use std::ffi::c_void;
use std::ptr::null_mut;

const HALF: aclDataType = aclDataType::ACL_FLOAT16;
const INT32: aclDataType = aclDataType::ACL_INT32;
const WORKSPACE: u64 = 16 << 20;
const BLOCKS: usize = 4;
const BLOCK_SIZE: usize = 2;
const COLUMNS: usize = 3;
/// Elements of a token: two units of 32 bytes.
const ROW: usize = 32;
/// What the outputs hold before.
const OLD: u16 = 0xabcd;

/// The element of a token's row in a cache.
fn element(block: usize, row: usize, i: usize) -> u16 {
    ((block * BLOCK_SIZE + row) * ROW + i) as u16
}

/// A call for two sequences of a table `[[3, 1, 2], [2, 0, 1]]`.
struct Gather {
    rows: [*mut c_void; 2],
    tensors: [*mut aclTensor; 7],
    workspace: Memory,
    nz: bool,
    cumulative: bool,
    tokens: usize,
}

impl Gather {
    fn new(nz: bool, lengths: &[i32], offsets: Option<[i32; 2]>, tokens: usize) -> Self {
        let mut cache = vec![0u16; BLOCKS * BLOCK_SIZE * ROW];
        for block in 0..BLOCKS {
            for row in 0..BLOCK_SIZE {
                for i in 0..ROW {
                    let place = match nz {
                        false => (block * BLOCK_SIZE + row) * ROW + i,
                        // Block, unit, row, lane.
                        true => ((block * 2 + i / 16) * BLOCK_SIZE + row) * 16 + i % 16,
                    };
                    cache[place] = element(block, row, i);
                }
            }
        }
        let (b, s) = (BLOCKS as i64, BLOCK_SIZE as i64);
        let cache_shape = match nz {
            false => [b, s, 2, 16],
            true => [b, 2, s, 16],
        };
        let row_shape: &[i64] = match nz {
            false => &[tokens as i64, 2, 16],
            true => &[tokens as i64, 32],
        };
        let rows = [(); 2].map(|()| upload(&vec![OLD; tokens * ROW]));
        let offset = offsets.map_or(null_mut(), |offsets| tensor(INT32, &[2], upload(&offsets)));
        Gather {
            rows,
            tensors: [
                tensor(HALF, &cache_shape, upload(&cache)),
                tensor(HALF, &cache_shape, upload(&cache)),
                tensor(INT32, &[2, COLUMNS as i64], upload(&[3, 1, 2, 2, 0, 1])),
                tensor(INT32, &[lengths.len() as i64], upload(lengths)),
                tensor(HALF, row_shape, rows[0]),
                tensor(HALF, row_shape, rows[1]),
                offset,
            ],
            workspace: Memory::new(WORKSPACE as usize),
            nz,
            cumulative: lengths.len() == 3,
            tokens,
        }
    }

    fn try_prepare(&self) -> (i32, *mut aclOpExecutor) {
        let [key_cache, value_cache, table, lengths, key, value, offset] = self.tensors;
        let mode = if self.nz { c"PA_NZ" } else { c"Norm" };
        let (mut bytes, mut executor) = (0, null_mut());
        let status = unsafe {
            aclnnGatherPaKvCacheGetWorkspaceSize(
                key_cache,
                value_cache,
                table,
                lengths,
                key,
                value,
                offset,
                mode.as_ptr().cast_mut(),
                self.cumulative,
                &mut bytes,
                &mut executor,
            )
        };
        (status, executor)
    }

    fn run(&self, stream: aclrtStream) -> i32 {
        let (status, executor) = self.try_prepare();
        ok(status);
        ok(unsafe { aclnnGatherPaKvCache(self.workspace.at, WORKSPACE, executor, stream) });
        unsafe { aclrtSynchronizeStream(stream) }
    }

    /// The rows gathered are those of these places, block and row; the rest is as before.
    #[track_caller]
    fn check(&self, places: &[(usize, usize)]) {
        let mut want = vec![OLD; self.tokens * ROW];
        for (token, &(block, row)) in places.iter().enumerate() {
            for i in 0..ROW {
                want[token * ROW + i] = element(block, row, i);
            }
        }
        for rows in self.rows {
            assert_eq!(download::<u16>(rows, self.tokens * ROW), want);
        }
    }
}

#[test]
fn sequences_are_gathered_by_lengths_and_by_their_sums() {
    let _bench = Bench::new();
    let stream = stream();
    let places = [(3, 0), (3, 1), (1, 0), (2, 0), (2, 1)];
    for nz in [false, true] {
        for lengths in [&[3, 2][..], &[0, 3, 5]] {
            let gather = Gather::new(nz, lengths, None, 5);
            ok(gather.run(stream));
            gather.check(&places);
        }
    }
}

#[test]
fn whole_blocks_of_an_offset_are_passed_over() {
    let _bench = Bench::new();
    let stream = stream();
    let gather = Gather::new(false, &[2, 1], Some([3, 4]), 3);
    ok(gather.run(stream));
    gather.check(&[(1, 0), (1, 1), (1, 0)]);
    // The kernel for the NZ order counts columns.
    let gather = Gather::new(true, &[2, 1], Some([1, 2]), 3);
    ok(gather.run(stream));
    gather.check(&[(1, 0), (1, 1), (1, 0)]);
}

#[test]
fn tables_that_lead_nowhere_are_found() {
    let _bench = Bench::new();
    let stream = stream();
    let short = Gather::new(false, &[7, 0], None, 7);
    ok(short.run(stream));
    short.check(&[(3, 0), (3, 1), (1, 0), (1, 1), (2, 0), (2, 1)]);
    let of = |finding: &&ascend_emu::Finding| {
        finding.kind == FindingKind::BlockTable && finding.message.contains("needs column 3")
    };
    assert_eq!(findings().iter().filter(of).count(), 1);

    let _strict = check_scope(Check::Strict);
    let few = Gather::new(false, &[3, 2], None, 4);
    assert_ne!(few.run(stream), 0, "a row beyond the outputs");
}

#[test]
fn missing_tensors_and_other_dtypes_are_refused_with_their_status() {
    let _bench = Bench::new();
    let mut gather = Gather::new(false, &[3, 2], None, 5);
    let table = std::mem::replace(&mut gather.tensors[2], null_mut());
    assert_eq!(gather.try_prepare().0, 161_001);
    gather.tensors[2] = table;
    gather.tensors[3] = tensor(aclDataType::ACL_INT64, &[2], upload(&[3i64, 2]));
    assert_eq!(gather.try_prepare().0, 161_002);
    gather.tensors[3] = tensor(INT32, &[4], upload(&[0, 1, 2, 3]));
    assert_eq!(gather.try_prepare().0, 561_002);
}
