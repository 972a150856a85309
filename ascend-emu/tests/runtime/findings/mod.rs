//! What the sanitizer finds in calls over a paged cache: one to write it, one to read it.

mod contents;
mod unwritten;

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_sys::bindings::{aclDataType, aclTensor, aclTensorList, aclrtStream};
use half::f16;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

const HALF: aclDataType = aclDataType::ACL_FLOAT16;
const BLOCKS: usize = 4;
const BLOCK: usize = 16;
const HEADS: usize = 2;
const DIM: usize = 16;
const ROW: usize = HEADS * DIM * 2;
const WORKSPACE: usize = 16 << 20;

/// A paged cache that nobody has written to.
struct Cache {
    key: *mut c_void,
    value: *mut c_void,
    slots: *mut c_void,
    rows: *mut c_void,
    tensors: Vec<*mut aclTensor>,
    workspace: *mut c_void,
}

const SLOTS: usize = 20;

impl Cache {
    fn new() -> Self {
        let [key, value] = [(); 2].map(|()| malloc(BLOCKS * BLOCK * ROW));
        let rows = upload(&vec![f16::ONE; SLOTS * HEADS * DIM]);
        let slots = upload(&[-1i32; SLOTS]);
        let (tokens, blocks) = (SLOTS as i64, [BLOCKS, BLOCK, HEADS, DIM].map(|n| n as i64));
        let row = [tokens, HEADS as i64, DIM as i64];
        let tensors = vec![
            tensor(HALF, &row, rows),
            tensor(HALF, &blocks, key),
            tensor(aclDataType::ACL_INT32, &[tokens], slots),
            tensor(HALF, &row, rows),
            tensor(HALF, &blocks, value),
        ];
        Cache { key, value, slots, rows, tensors, workspace: malloc(WORKSPACE) }
    }

    /// Says where the tokens go; those behind are padding.
    fn set_slots(&self, slots: impl IntoIterator<Item = i32>) {
        let mut all = [-1i32; SLOTS];
        for (to, slot) in all.iter_mut().zip(slots) {
            *to = slot;
        }
        let bytes = size_of_val(&all);
        ok(unsafe { aclrtMemcpy(self.slots, bytes, all.as_ptr().cast(), bytes, H2D) });
    }

    fn scatter(&self, stream: aclrtStream) {
        let [key, key_cache, slots, value, value_cache] = self.tensors[..] else { unreachable!() };
        let (mut bytes, mut executor) = (0, null_mut());
        unsafe {
            ok(aclnnScatterPaKvCacheGetWorkspaceSize(
                key,
                key_cache,
                slots,
                value,
                value_cache,
                null(),
                null(),
                null(),
                null_mut(),
                null_mut(),
                null(),
                null(),
                &mut bytes,
                &mut executor,
            ));
            ok(aclnnScatterPaKvCache(self.workspace, bytes, executor, stream));
        }
    }

    fn write(&self, slots: impl IntoIterator<Item = i32>) {
        self.set_slots(slots);
        self.scatter(null_mut());
        sync(null_mut());
    }

    fn destroy(self) {
        for tensor in self.tensors {
            ok(unsafe { aclDestroyTensor(tensor) });
        }
        [self.key, self.value, self.rows, self.slots, self.workspace].into_iter().for_each(free);
    }
}

/// A cache of blocks of rows of all heads.
const PLAIN: [i64; 3] = [BLOCKS as i64, BLOCK as i64, (HEADS * DIM) as i64];

/// Decode of one row over some keys of a cache with one shape of keys and values.
struct Decode {
    memory: [*mut c_void; 4],
    tensors: [*mut aclTensor; 3],
    lists: [*mut aclTensorList; 2],
    block: i64,
}

impl Decode {
    fn new(cache: &Cache, shape: &[i64], block: usize, table: &[i32]) -> Self {
        let query = upload(&[f16::ONE; HEADS * DIM]);
        Decode::of_query(query, cache, shape, block, table)
    }

    fn of_query(query: *mut c_void, cache: &Cache, shape: &[i64], block: usize, table: &[i32]) -> Self {
        let out = upload(&[f16::ZERO; HEADS * DIM]);
        let ids = upload(table);
        let row = |at| tensor(HALF, &[1, HEADS as i64, 1, DIM as i64], at);
        let blocks = |at| list(&[tensor(HALF, shape, at)]);
        Decode {
            memory: [query, out, ids, malloc(WORKSPACE)],
            tensors: [row(query), tensor(aclDataType::ACL_INT32, &[1, table.len() as i64], ids), row(out)],
            lists: [blocks(cache.key), blocks(cache.value)],
            block: block as i64,
        }
    }

    /// Over blocks of rows of all heads.
    fn plain(cache: &Cache, table: &[i32]) -> Self {
        Decode::new(cache, &PLAIN, BLOCK, table)
    }

    fn launch(&self, keys: i64, stream: aclrtStream) {
        let [query, table, out] = self.tensors;
        let (mut bytes, mut executor) = (0, null_mut());
        unsafe {
            let lengths = aclCreateIntArray(&keys, 1);
            ok(aclnnFusedInferAttentionScoreGetWorkspaceSize(
                query,
                self.lists[0],
                self.lists[1],
                null(),
                null(),
                null(),
                lengths,
                null(),
                null(),
                null(),
                null(),
                null(),
                null(),
                null(),
                table,
                null(),
                null(),
                HEADS as i64,
                0.25,
                i64::from(i32::MAX),
                i64::from(i32::MAX),
                c"BNSD".as_ptr().cast_mut(),
                HEADS as i64,
                0,
                0,
                self.block,
                0,
                false,
                out,
                null(),
                &mut bytes,
                &mut executor,
            ));
            ok(aclnnFusedInferAttentionScore(self.memory[3], bytes, executor, stream));
            ok(aclDestroyIntArray(lengths));
        }
    }

    /// The status of a launch, and its output.
    fn run(&self, keys: i64) -> (i32, Vec<f16>) {
        self.launch(keys, null_mut());
        let status = unsafe { aclrtSynchronizeStream(null_mut()) };
        (status, download(self.memory[1], HEADS * DIM))
    }

    fn destroy(self) {
        for tensor in self.tensors {
            ok(unsafe { aclDestroyTensor(tensor) });
        }
        for list in self.lists {
            ok(unsafe { aclDestroyTensorList(list) });
        }
        self.memory.into_iter().for_each(free);
    }
}
