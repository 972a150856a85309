//! ScatterPaKvCache: rows in slots, faults of slots, executors and graphs.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, check_scope, findings};
use ascend_sys::bindings::{aclDataType, aclFormat, aclOpExecutor, aclTensor, aclrtStream};
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};

const HALF: aclDataType = aclDataType::ACL_FLOAT16;
const BLOCKS: usize = 3;
const BLOCK_SIZE: usize = 4;
const HEADS: usize = 2;
const DIM: usize = 16;
const VALUE_DIM: usize = 32;
const TOKENS: usize = 3;
/// What a cache holds before.
const OLD: u16 = 0xabcd;

/// Three tokens into a cache of three blocks; values have another head dimension than keys.
struct Scatter {
    /// key, key cache, slots, value, value cache.
    memory: [*mut c_void; 5],
    tensors: [*mut aclTensor; 5],
    workspace: *mut c_void,
    mode: Option<&'static CStr>,
}

const WORKSPACE: u64 = 16 << 20;

fn rows(seed: u16, dim: usize) -> Vec<u16> {
    (0..TOKENS * HEADS * dim).map(|i| seed + i as u16).collect()
}

impl Scatter {
    fn new(slots: [i32; TOKENS], nz: bool) -> Self {
        Self::described(slots, nz, tensor)
    }

    /// With tensors that are described by a function of their type, shape and address.
    fn described(
        slots: [i32; TOKENS],
        nz: bool,
        tensor: impl Fn(aclDataType, &[i64], *mut c_void) -> *mut aclTensor,
    ) -> Self {
        let (b, s, n) = (BLOCKS as i64, BLOCK_SIZE as i64, HEADS as i64);
        let cache = |dim: usize| upload(&vec![OLD; BLOCKS * BLOCK_SIZE * HEADS * dim]);
        let memory =
            [upload(&rows(0x100, DIM)), cache(DIM), upload(&slots), upload(&rows(0x200, VALUE_DIM)), cache(VALUE_DIM)];
        let shape = |dim: usize| match nz {
            true => [b, n * dim as i64 / 16, s, 16],
            false => [b, s, n, dim as i64],
        };
        let new = |dim: usize, at| tensor(HALF, &[TOKENS as i64, n, dim as i64], at);
        let tensors = [
            new(DIM, memory[0]),
            tensor(HALF, &shape(DIM), memory[1]),
            tensor(aclDataType::ACL_INT32, &[TOKENS as i64], memory[2]),
            new(VALUE_DIM, memory[3]),
            tensor(HALF, &shape(VALUE_DIM), memory[4]),
        ];
        Scatter { memory, tensors, workspace: malloc(WORKSPACE as usize), mode: nz.then_some(c"PA_NZ") }
    }

    fn try_prepare(&self, scatter_mode: *const c_char, bytes: &mut u64, executor: &mut *mut aclOpExecutor) -> i32 {
        let [key, key_cache, slots, value, value_cache] = self.tensors;
        unsafe {
            aclnnScatterPaKvCacheGetWorkspaceSize(
                key,
                key_cache,
                slots,
                value,
                value_cache,
                null(),
                null(),
                null(),
                self.mode.map_or(null_mut(), |mode| mode.as_ptr().cast_mut()),
                scatter_mode.cast_mut(),
                null(),
                null(),
                bytes,
                executor,
            )
        }
    }

    fn prepare(&self) -> *mut aclOpExecutor {
        let (mut bytes, mut executor) = (0, null_mut());
        ok(self.try_prepare(null(), &mut bytes, &mut executor));
        assert_eq!(bytes, WORKSPACE);
        executor
    }

    fn launch(&self, executor: *mut aclOpExecutor, stream: aclrtStream) -> i32 {
        unsafe { aclnnScatterPaKvCache(self.workspace, WORKSPACE, executor, stream) }
    }

    fn slots(&self, slots: [i32; TOKENS]) {
        let bytes = size_of_val(&slots);
        ok(unsafe { aclrtMemcpy(self.memory[2], bytes, slots.as_ptr().cast(), bytes, H2D) });
    }

    fn clear(&self) {
        for (at, dim) in [(self.memory[1], DIM), (self.memory[4], VALUE_DIM)] {
            let old = vec![OLD; BLOCKS * BLOCK_SIZE * HEADS * dim];
            let bytes = size_of_val(old.as_slice());
            ok(unsafe { aclrtMemcpy(at, bytes, old.as_ptr().cast(), bytes, H2D) });
        }
    }

    /// Whether the caches hold, in slot `slots[t]`, the rows of token `t`, for those that are Some, and nothing else
    /// new.
    #[track_caller]
    fn check(&self, slots: [Option<usize>; TOKENS]) {
        for (at, dim, seed) in [(self.memory[1], DIM, 0x100), (self.memory[4], VALUE_DIM, 0x200)] {
            let new = rows(seed, dim);
            let mut want = vec![OLD; BLOCKS * BLOCK_SIZE * HEADS * dim];
            for (token, slot) in slots.iter().enumerate() {
                let Some(slot) = slot else { continue };
                for i in 0..HEADS * dim {
                    let place = match self.mode {
                        None => slot * HEADS * dim + i,
                        // Block, unit, row, lane.
                        Some(_) => {
                            let (block, row) = (slot / BLOCK_SIZE, slot % BLOCK_SIZE);
                            let units = HEADS * dim / 16;
                            ((block * units + i / 16) * BLOCK_SIZE + row) * 16 + i % 16
                        }
                    };
                    want[place] = new[token * HEADS * dim + i];
                }
            }
            assert_eq!(download::<u16>(at, want.len()), want);
        }
    }

    fn destroy(self) {
        for tensor in self.tensors {
            ok(unsafe { aclDestroyTensor(tensor) });
        }
        self.memory.into_iter().for_each(free);
        free(self.workspace);
    }
}

#[test]
fn rows_are_in_their_slots_and_nowhere_else() {
    let _bench = Bench::new();
    for nz in [false, true] {
        let scatter = Scatter::new([9, 0, 7], nz);
        ok(scatter.launch(scatter.prepare(), null_mut()));
        sync(null_mut());
        scatter.check([Some(9), Some(0), Some(7)]);
        scatter.destroy();
    }
}

#[test]
fn tensors_that_pytorch_describes_are_taken_and_private_formats_are_not() {
    let _bench = Bench::new();
    for nz in [false, true] {
        let scatter = Scatter::described([9, 0, 7], nz, torch_tensor);
        ok(scatter.launch(scatter.prepare(), null_mut()));
        sync(null_mut());
        scatter.check([Some(9), Some(0), Some(7)]);
        scatter.destroy();
    }
    let (mut bytes, mut executor) = (0, null_mut());
    for (nz, format) in [
        (false, aclFormat::ACL_FORMAT_FRACTAL_NZ),
        (false, aclFormat::ACL_FORMAT_NC1HWC0),
        (true, aclFormat::ACL_FORMAT_NC1HWC0),
    ] {
        let scatter = Scatter::described([9, 0, 7], nz, |dtype, shape, at| tensor_of(format, dtype, shape, at));
        fails(scatter.try_prepare(null(), &mut bytes, &mut executor), 161_002, &["scatter.format", "NCL"]);
        scatter.destroy();
    }
}

#[test]
fn negative_slots_are_skipped() {
    let _bench = Bench::new();
    for check in [Check::Compat, Check::Strict] {
        let _scope = check_scope(check);
        let scatter = Scatter::new([-1, 5, i32::MIN], false);
        ok(scatter.launch(scatter.prepare(), null_mut()));
        sync(null_mut());
        scatter.check([None, Some(5), None]);
        scatter.destroy();
    }
}

/// Findings of a kind whose text has a part.
fn found(kind: FindingKind, part: &str) -> usize {
    let of = |finding: &&ascend_emu::Finding| finding.kind == kind && finding.message.contains(part);
    findings().iter().filter(of).count()
}

#[test]
fn strict_writes_nothing_if_one_slot_is_wrong() {
    let _bench = Bench::new();
    let _scope = check_scope(Check::Strict);
    for (slots, parts) in [
        ([2, 3, 12], ["slot out of range", "token 2 goes to slot 12 of 12"]),
        ([6, 1, 6], ["slot named twice", "tokens 0 and 2 go to slot 6"]),
    ] {
        let scatter = Scatter::new(slots, false);
        ok(scatter.launch(scatter.prepare(), null_mut()));
        fails(unsafe { aclrtSynchronizeStream(null_mut()) }, 507_015, &parts);
        scatter.check([None; TOKENS]);
        // The device is as good as before.
        scatter.slots([2, 3, 11]);
        ok(scatter.launch(scatter.prepare(), null_mut()));
        sync(null_mut());
        scatter.check([Some(2), Some(3), Some(11)]);
        scatter.destroy();
    }
}

#[test]
fn compat_tells_and_goes_on() {
    let _bench = Bench::new();
    let _scope = check_scope(Check::Compat);
    let scatter = Scatter::new([2, 1_000_003, 4], true);
    ok(scatter.launch(scatter.prepare(), null_mut()));
    sync(null_mut());
    scatter.check([Some(2), None, Some(4)]);
    assert_eq!(found(FindingKind::SlotOutOfRange, "slot 1000003 of 12"), 1);
    scatter.clear();
    scatter.slots([10, 3, 10]);
    ok(scatter.launch(scatter.prepare(), null_mut()));
    sync(null_mut());
    // The last one stays.
    scatter.check([None, Some(3), Some(10)]);
    assert_eq!(found(FindingKind::DuplicateSlot, "tokens 0 and 2 go to slot 10"), 1);
    scatter.destroy();
}

#[test]
fn a_repeatable_executor_takes_other_caches() {
    let _bench = Bench::new();
    let one = Scatter::new([1, 2, 3], false);
    let two = Scatter::new([8, 6, 4], false);
    let executor = one.prepare();
    let stream = stream();
    unsafe {
        ok(aclSetAclOpExecutorRepeatable(executor));
        ok(one.launch(executor, stream));
        // key, slots, value; the caches as inputs and as outputs.
        for place in [0, 2, 3] {
            ok(aclSetInputTensorAddr(executor, place, one.tensors[place], two.memory[place]));
        }
        for (input, output) in [(1, 0), (4, 1)] {
            ok(aclSetInputTensorAddr(executor, input, one.tensors[input], two.memory[input]));
            ok(aclSetTensorAddr(executor, 8 + output, one.tensors[input], two.memory[input]));
        }
        ok(one.launch(executor, stream));
        sync(stream);
        one.check([Some(1), Some(2), Some(3)]);
        two.check([Some(8), Some(6), Some(4)]);
        // A cache at two places.
        ok(aclSetInputTensorAddr(executor, 1, one.tensors[1], one.memory[1]));
        ok(one.launch(executor, stream));
        fails(aclrtSynchronizeStream(stream), 507_015, &["keyCacheRef", "as input 1", "as output 0", "change both"]);
        ok(aclDestroyAclOpExecutor(executor));
    }
    destroy(stream);
    one.destroy();
    two.destroy();
}

#[test]
fn a_captured_launch_reads_the_slots_of_its_replay() {
    let _bench = Bench::new();
    let scatter = Scatter::new([0, 1, 2], false);
    let stream = stream();
    let mut graph = null_mut();
    ok(unsafe { aclmdlRICaptureBegin(stream, RELAXED) });
    ok(scatter.launch(scatter.prepare(), stream));
    ok(unsafe { aclmdlRICaptureEnd(stream, &mut graph) });
    sync(stream);
    scatter.check([None; TOKENS]);
    for slots in [[0, 1, 2], [11, -1, 5]] {
        scatter.clear();
        scatter.slots(slots);
        ok(unsafe { aclmdlRIExecuteAsync(graph, stream) });
        sync(stream);
        scatter.check(slots.map(|slot| usize::try_from(slot).ok()));
    }
    ok(unsafe { aclmdlRIDestroy(graph) });
    destroy(stream);
    scatter.destroy();
}

#[test]
fn phase_one_refuses_by_rule() {
    let _bench = Bench::new();
    let mut scatter = Scatter::new([0, 1, 2], false);
    let (mut bytes, mut executor) = (7, null_mut());
    fails(scatter.try_prepare(c"Rope".as_ptr(), &mut bytes, &mut executor), 561_003, &["unsupported", "Rope"]);
    fails(scatter.try_prepare(c"rope".as_ptr(), &mut bytes, &mut executor), 161_002, &["scatter_mode.known"]);
    let slots = std::mem::replace(&mut scatter.tensors[2], null_mut());
    fails(scatter.try_prepare(null(), &mut bytes, &mut executor), 161_001, &["scatter.required", "slotMapping"]);
    scatter.tensors[2] = slots;
    let value = scatter.tensors[3];
    let key = std::mem::replace(&mut scatter.tensors[0], value);
    fails(scatter.try_prepare(null(), &mut bytes, &mut executor), 561_002, &["key_cache.shape"]);
    scatter.tensors[0] = key;
    assert!(executor.is_null());
    assert_eq!(bytes, 7);
    scatter.destroy();
}

#[test]
fn a_cache_that_overlaps_its_rows_is_a_device_fault() {
    let _bench = Bench::new();
    let scatter = Scatter::new([0, 1, 2], false);
    let executor = scatter.prepare();
    ok(unsafe { aclSetInputTensorAddr(executor, 0, scatter.tensors[0], scatter.memory[1]) });
    ok(scatter.launch(executor, null_mut()));
    fails(unsafe { aclrtSynchronizeStream(null_mut()) }, 507_015, &["keyCacheRef", "key ", "overlap"]);
    scatter.check([None; TOKENS]);
    scatter.destroy();
}
