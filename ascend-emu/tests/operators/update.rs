//! AttentionUpdate: the arithmetic, rows without keys, executors and graphs.

use crate::bench::*;
use approx::abs_diff_eq;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, Machine, check_scope, findings, functions_of};
use ascend_spec::Cann;
use ascend_sys::bindings::{
    aclDataType, aclFormat, aclOpExecutor, aclTensor, aclTensorList, aclrtMemAllocationType, aclrtMemAttr,
    aclrtMemHandleType, aclrtMemLocation, aclrtMemLocationType, aclrtPhysicalMemProp, aclrtStream,
};
use half::{bf16, f16};
use proptest::prelude::*;
use std::ffi::c_void;
use std::ptr::null_mut;

const WORKSPACE: u64 = 16 << 20;

/// A type of attention.
trait Number: Copy + Default + 'static {
    const TYPE: aclDataType;
    /// Half a unit in the last place, relative.
    const ROUNDING: f64;
    fn of(value: f64) -> Self;
    fn get(self) -> f64;
}

macro_rules! numbers {
    ($($number:ident, $acl:ident, $rounding:expr, $of:expr, $get:expr;)*) => {
        $(impl Number for $number {
            const TYPE: aclDataType = aclDataType::$acl;
            const ROUNDING: f64 = $rounding;
            fn of(value: f64) -> Self {
                $of(value)
            }
            fn get(self) -> f64 {
                $get(self)
            }
        })*
    };
}

numbers! {
    f32, ACL_FLOAT, 1e-6, |value| value as f32, f64::from;
    f16, ACL_FLOAT16, 5e-4, f16::from_f64, f16::to_f64;
    bf16, ACL_BF16, 4e-3, bf16::from_f64, bf16::to_f64;
}

/// A merge of parts, `[rows, dim]` each.
struct Update {
    memory: Vec<*mut c_void>,
    lists: [*mut aclTensorList; 2],
    outputs: [*mut aclTensor; 2],
    out: *mut c_void,
    lse_out: *mut c_void,
    workspace: *mut c_void,
}

impl Update {
    fn new<T: Number>(lse: &[Vec<f32>], local: &[Vec<T>], dim: usize) -> Self {
        Self::in_format(aclFormat::ACL_FORMAT_ND, lse, local, dim)
    }

    fn in_format<T: Number>(format: aclFormat, lse: &[Vec<f32>], local: &[Vec<T>], dim: usize) -> Self {
        let tensor = |dtype, shape: &[i64], at| tensor_of(format, dtype, shape, at);
        let rows = lse[0].len();
        let (shape, flat) = ([rows as i64, dim as i64], [rows as i64]);
        let float = aclDataType::ACL_FLOAT;
        let mut memory = Vec::new();
        let mut keep = |at| {
            memory.push(at);
            at
        };
        let lse: Vec<_> = lse.iter().map(|lse| tensor(float, &flat, keep(upload(lse)))).collect();
        let local: Vec<_> = local.iter().map(|part| tensor(T::TYPE, &shape, keep(upload(part)))).collect();
        let out = keep(upload(&vec![T::of(f64::NAN); rows * dim]));
        let lse_out = keep(upload(&vec![7.0e7f32; rows]));
        Update {
            lists: [list(&lse), list(&local)],
            outputs: [tensor(T::TYPE, &shape, out), tensor(float, &flat, lse_out)],
            memory,
            out,
            lse_out,
            workspace: malloc(WORKSPACE as usize),
        }
    }

    fn try_prepare(&self, update_type: i64, bytes: &mut u64, executor: &mut *mut aclOpExecutor) -> i32 {
        let [lse, local] = self.lists;
        let lse_out = if update_type == 0 { null_mut() } else { self.outputs[1] };
        unsafe {
            aclnnAttentionUpdateGetWorkspaceSize(lse, local, update_type, self.outputs[0], lse_out, bytes, executor)
        }
    }

    fn prepare(&self, update_type: i64) -> *mut aclOpExecutor {
        let (mut bytes, mut executor) = (0, null_mut());
        ok(self.try_prepare(update_type, &mut bytes, &mut executor));
        assert_eq!(bytes, WORKSPACE);
        executor
    }

    fn launch(&self, executor: *mut aclOpExecutor, stream: aclrtStream) -> i32 {
        unsafe { aclnnAttentionUpdate(self.workspace, WORKSPACE, executor, stream) }
    }

    fn destroy(self) {
        unsafe {
            for list in self.lists {
                ok(aclDestroyTensorList(list));
            }
            for tensor in self.outputs {
                ok(aclDestroyTensor(tensor));
            }
        }
        self.memory.into_iter().for_each(free);
        free(self.workspace);
    }
}

/// The definition, in double precision.
fn expected<T: Number>(lse: &[Vec<f32>], local: &[Vec<T>], dim: usize) -> (Vec<f64>, Vec<f64>) {
    let rows = lse[0].len();
    let (mut out, mut merged) = (vec![0.0; rows * dim], vec![0.0; rows]);
    for row in 0..rows {
        let largest = lse.iter().map(|lse| f64::from(lse[row])).fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = lse.iter().map(|lse| (f64::from(lse[row]) - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        merged[row] = largest + sum.ln();
        for d in 0..dim {
            let of = |(weight, part): (&f64, &Vec<T>)| weight / sum * part[row * dim + d].get();
            out[row * dim + d] = weights.iter().zip(local).map(of).sum();
        }
    }
    (out, merged)
}

fn close<T: Number>(lse: Vec<Vec<f32>>, seed: u64, dim: usize) {
    let rows = lse[0].len();
    let local: Vec<Vec<T>> = (0..lse.len())
        .map(|part| {
            let one = |i: usize| ((i as u64 * 37 + seed * 101 + part as u64 * 7) % 65) as f64 / 32.0 - 1.0;
            (0..rows * dim).map(|i| T::of(one(i))).collect()
        })
        .collect();
    let update = Update::new(&lse, &local, dim);
    ok(update.launch(update.prepare(1), null_mut()));
    sync(null_mut());
    let (want, want_lse) = expected(&lse, &local, dim);
    for (got, want) in download::<T>(update.out, rows * dim).iter().zip(&want) {
        let bound = 1e-5 + T::ROUNDING * want.abs();
        assert!(abs_diff_eq!(got.get(), want, epsilon = bound), "{} is not {want}", got.get());
    }
    for (got, want) in download::<f32>(update.lse_out, rows).iter().zip(&want_lse) {
        assert!(abs_diff_eq!(f64::from(*got), want, epsilon = 2e-6 * want.abs().max(1.0)), "{got} is not {want}");
    }
    update.destroy();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn merges_are_those_of_the_definition(
        parts in 1usize..=16,
        rows in 1usize..150,
        units in 1usize..6,
        seed in 0u64..1000,
        values in prop::collection::vec(prop_oneof![9 => -30.0f32..30.0, 1 => Just(f32::NEG_INFINITY)], 64),
    ) {
        let _bench = Bench::new();
        // The first part has a key for each row.
        let lse: Vec<Vec<f32>> = (0..parts)
            .map(|part| {
                let one = |row: usize| values[(part * 31 + row * 7) % values.len()];
                (0..rows).map(one).map(|lse| if part == 0 { lse.max(-30.0) } else { lse }).collect()
            })
            .collect();
        match seed % 3 {
            0 => close::<f32>(lse, seed, units * 8),
            1 => close::<f16>(lse, seed, units * 8),
            _ => close::<bf16>(lse, seed, units * 8),
        }
    }
}

/// Attention and log-sum-exps of all parts in one tensor `[parts, rows, dim + 1]`, as serving systems hold them.
#[test]
fn parts_that_lie_side_by_side_with_their_sums_are_merged_in_place() {
    const DIM: usize = 8;
    let _bench = Bench::new();
    let lse = vec![vec![0.5f32, -1.0, 3.0], vec![2.0, 0.0, f32::NEG_INFINITY]];
    let local: Vec<Vec<f32>> =
        (0..2).map(|part| (0..3 * DIM).map(|i| (i + 31 * part) as f32 / 16.0).collect()).collect();
    let joined: Vec<f32> = (0..2 * 3)
        .flat_map(|row| {
            let (part, row) = (row / 3, row % 3);
            let attention = &local[part][row * DIM..][..DIM];
            attention.iter().copied().chain([lse[part][row]])
        })
        .collect();
    let plain = Update::new(&lse, &local, DIM);
    let memory = upload(&joined);
    let view = |shape: &[i64], strides: &[i64], offset: usize| unsafe {
        aclCreateTensor(
            shape.as_ptr(),
            shape.len() as u64,
            aclDataType::ACL_FLOAT,
            strides.as_ptr(),
            offset as i64,
            aclFormat::ACL_FORMAT_ND,
            [joined.len() as i64].as_ptr(),
            1,
            memory,
        )
    };
    let (width, dim) = (DIM as i64 + 1, DIM as i64);
    let sums: Vec<_> = (0..2).map(|part| view(&[3], &[width], part * 3 * (DIM + 1) + DIM)).collect();
    let parts: Vec<_> = (0..2).map(|part| view(&[3, dim], &[width, 1], part * 3 * (DIM + 1))).collect();
    let update = Update { lists: [list(&sums), list(&parts)], ..plain };
    ok(update.launch(update.prepare(1), null_mut()));
    sync(null_mut());
    let (want, want_lse) = expected(&lse, &local, DIM);
    let got = download::<f32>(update.out, 3 * DIM);
    assert!(got.iter().zip(&want).all(|(got, want)| (f64::from(*got) - want).abs() < 1e-5), "{got:?}");
    let got = download::<f32>(update.lse_out, 3);
    assert!(got.iter().zip(&want_lse).all(|(got, want)| (f64::from(*got) - want).abs() < 1e-5), "{got:?}");
    unsafe {
        for list in plain.lists {
            ok(aclDestroyTensorList(list));
        }
    }
    update.destroy();
    free(memory);
}

/// As caching allocators with expandable segments make it.
#[test]
fn a_workspace_may_cross_parts_that_are_mapped_side_by_side() {
    const UNIT: usize = 2 << 20;
    let _bench = Bench::new();
    let mut update = Update::new(&[vec![0.0f32]], &[vec![1.0f32; 8]], 8);
    free(update.workspace);
    let prop = aclrtPhysicalMemProp {
        handleType: aclrtMemHandleType::ACL_MEM_HANDLE_TYPE_NONE,
        allocationType: aclrtMemAllocationType::ACL_MEM_ALLOCATION_TYPE_PINNED,
        memAttr: aclrtMemAttr::ACL_HBM_MEM_HUGE,
        location: aclrtMemLocation { id: 0, type_: aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_DEVICE },
        reserve: 0,
    };
    let bytes = WORKSPACE as usize + UNIT;
    let mut range = null_mut();
    ok(unsafe { aclrtReserveMemAddress(&mut range, bytes, 0, null_mut(), 1) });
    let parts: Vec<_> = (0..bytes / UNIT)
        .map(|part| {
            let (at, mut handle) = (range.wrapping_byte_add(part * UNIT), null_mut());
            ok(unsafe { aclrtMallocPhysical(&mut handle, UNIT, &prop, 0) });
            ok(unsafe { aclrtMapMem(at, UNIT, 0, handle, 0) });
            (at, handle)
        })
        .collect();
    update.workspace = range.wrapping_byte_add(512);
    ok(update.launch(update.prepare(0), null_mut()));
    sync(null_mut());
    // From the second part on there is too little left.
    let last = range.wrapping_byte_add(UNIT + 512);
    update.workspace = last;
    let executor = update.prepare(0);
    fails(update.launch(executor, null_mut()), 161_002, &["workspace", "left"]);
    for (at, handle) in parts {
        ok(unsafe { aclrtUnmapMem(at) });
        ok(unsafe { aclrtFreePhysical(handle) });
    }
    ok(unsafe { aclrtReleaseMemAddress(range) });
    update.workspace = malloc(WORKSPACE as usize);
    update.destroy();
}

#[test]
fn plain_formats_are_taken_and_private_ones_are_not() {
    let _bench = Bench::new();
    let (lse, local) = ([vec![0.0], vec![0.0]], [vec![1.0f32; 8], vec![3.0; 8]]);
    for format in [aclFormat::ACL_FORMAT_NCL, aclFormat::ACL_FORMAT_NCHW] {
        let update = Update::in_format(format, &lse, &local, 8);
        ok(update.launch(update.prepare(1), null_mut()));
        sync(null_mut());
        assert_eq!(download::<f32>(update.out, 8), [2.0; 8]);
        update.destroy();
    }
    let update = Update::in_format(aclFormat::ACL_FORMAT_FRACTAL_NZ, &lse, &local, 8);
    let (mut bytes, mut executor) = (0, null_mut());
    fails(update.try_prepare(1, &mut bytes, &mut executor), 161_002, &["update.format", "NCHW"]);
    update.destroy();
}

const INF: f32 = f32::INFINITY;

fn bits(at: *const c_void, count: usize) -> Vec<u32> {
    download(at, count)
}

/// Rows: 0 has keys in both parts, 1 is marked as attention marks it, 2 has no key at all, 3 keys in one part.
fn some_rows_without_keys() -> Update {
    let lse = [vec![0.0, INF, INF, 1.0], vec![0.0, 2.0, -INF, -INF]];
    Update::new(&lse, &[vec![1.0f32; 4 * 8], vec![3.0f32; 4 * 8]], 8)
}

/// What row a merge makes of them.
fn merged_rows(update: &Update) -> [(f32, f32); 4] {
    let out: Vec<f32> = download(update.out, 4 * 8);
    let merged: Vec<f32> = download(update.lse_out, 4);
    [0, 1, 2, 3].map(|row| (out[row * 8], merged[row]))
}

fn is_told(text: &str) -> bool {
    let told = |finding: &ascend_emu::Finding| finding.kind == FindingKind::EmptyRow && finding.message.contains(text);
    findings().iter().any(told)
}

#[test]
fn a_part_without_keys_weighs_nothing_and_a_row_without_any_becomes_nan() {
    let _bench = Bench::new();
    let text = "every lse of row 2 is infinite";
    let update = some_rows_without_keys();
    ok(update.launch(update.prepare(1), null_mut()));
    sync(null_mut());
    let [both, marked, none, one] = merged_rows(&update);
    assert_eq!([both, marked, one], [(2.0, 2f32.ln()), (3.0, 2.0), (1.0, 1.0)]);
    assert!(none.0.is_nan() && none.1.is_nan());
    assert!(is_told(text));
    update.destroy();
    let _strict = check_scope(Check::Strict);
    let update = some_rows_without_keys();
    let poison = bits(update.lse_out, 4);
    ok(update.launch(update.prepare(1), null_mut()));
    fails(unsafe { aclrtSynchronizeStream(null_mut()) }, 507_015, &["row without keys in a merge", text]);
    assert_eq!(bits(update.lse_out, 4), poison, "nothing is written");
    update.destroy();
}

/// Kernels of releases before 8.5, of Ascend 950 before 9.1, take log-sum-exps as they are.
#[test]
fn on_older_releases_the_mark_of_a_row_without_keys_makes_nan() {
    let bench = Bench::new();
    for (soc, cann) in [("Ascend910B3", Cann::V8_1), ("Ascend950PR_9599", Cann::V9_0)] {
        let machine = Machine::new(soc, cann).unwrap();
        let table = functions_of(&machine).unwrap();
        ok(unsafe { table.aclrtSetDevice.unwrap()(0) });
        let update = some_rows_without_keys();
        ok(update.launch(update.prepare(1), null_mut()));
        sync(null_mut());
        let [both, marked, none, one] = merged_rows(&update);
        assert_eq!([both, one], [(2.0, 2f32.ln()), (1.0, 1.0)]);
        for (out, lse) in [marked, none] {
            assert!(out.is_nan() && lse.is_nan(), "{soc}");
        }
        assert!(is_told("lse[0] of row 1 is +inf"));
        update.destroy();
        ok(unsafe { table.aclrtResetDevice.unwrap()(0) });
        bench.enter();
    }
}

#[test]
fn nan_goes_through_and_is_no_finding() {
    let _bench = Bench::new();
    let _scope = check_scope(Check::Strict);
    let lse = [vec![f32::NAN, 0.0], vec![0.0, 0.0]];
    let local = [vec![1.0f32; 16], vec![f32::NAN; 16]];
    let update = Update::new(&lse, &local, 8);
    ok(update.launch(update.prepare(1), null_mut()));
    sync(null_mut());
    assert!(download::<f32>(update.out, 16).iter().all(|x| x.is_nan()));
    let merged: Vec<f32> = download(update.lse_out, 2);
    assert!(merged[0].is_nan());
    assert_eq!(merged[1], 2f32.ln());
    update.destroy();
}

#[test]
fn type_0_leaves_the_log_sum_exps_alone() {
    let _bench = Bench::new();
    let lse = [vec![0.0f32], vec![0.0]];
    let local = [vec![f16::ONE; 8], vec![f16::NEG_ONE; 8]];
    let update = Update::new(&lse, &local, 8);
    ok(update.launch(update.prepare(0), null_mut()));
    sync(null_mut());
    assert_eq!(download::<f16>(update.out, 8), [f16::ZERO; 8]);
    assert_eq!(download::<f32>(update.lse_out, 1), [7.0e7]);
    update.destroy();
}

#[test]
fn a_repeatable_executor_and_a_graph_take_other_parts() {
    let _bench = Bench::new();
    let stream = stream();
    let lse = [vec![0.0f32], vec![0.0]];
    let update = Update::new(&lse, &[vec![1.0f32; 8], vec![3.0; 8]], 8);
    let (part, other) = (upload(&[9.0f32; 8]), upload(&[0.0f32; 8]));
    let heavy = upload(&[3f32.ln()]);
    let executor = update.prepare(1);
    let value = |at| download::<f32>(at, 8)[7];
    let mut graph = null_mut();
    unsafe {
        ok(aclSetAclOpExecutorRepeatable(executor));
        ok(update.launch(executor, stream));
        sync(stream);
        assert_eq!(value(update.out), 2.0);
        ok(aclSetDynamicInputTensorAddr(executor, 0, 1, update.lists[0], heavy));
        ok(aclSetDynamicInputTensorAddr(executor, 1, 1, update.lists[1], part));
        ok(aclSetOutputTensorAddr(executor, 0, update.outputs[0], other));
        ok(aclmdlRICaptureBegin(stream, RELAXED));
        ok(update.launch(executor, stream));
        ok(aclmdlRICaptureEnd(stream, &mut graph));
        sync(stream);
        assert_eq!(value(other), 0.0);
        ok(aclmdlRIExecuteAsync(graph, stream));
        sync(stream);
        assert!(abs_diff_eq!(value(other), 7.0, epsilon = 1e-5), "{}", value(other));
        assert_eq!(value(update.out), 2.0);
        // An output that is a part.
        ok(aclSetOutputTensorAddr(executor, 0, update.outputs[0], part));
        ok(update.launch(executor, stream));
        fails(aclrtSynchronizeStream(stream), 507_015, &["localOut", "overlap"]);
        ok(aclmdlRIDestroy(graph));
        ok(aclDestroyAclOpExecutor(executor));
    }
    for at in [part, other, heavy] {
        free(at);
    }
    destroy(stream);
    update.destroy();
}

#[test]
fn phase_one_refuses_by_rule() {
    let _bench = Bench::new();
    let lse = [vec![0.0f32], vec![0.0]];
    let update = Update::new(&lse, &[vec![1.0f32; 8], vec![3.0; 8]], 8);
    let (mut bytes, mut executor) = (7, null_mut());
    fails(update.try_prepare(2, &mut bytes, &mut executor), 161_002, &["update_type.known"]);
    let wrong = Update::new(&lse, &[vec![1.0f32; 6], vec![3.0; 6]], 6);
    fails(wrong.try_prepare(1, &mut bytes, &mut executor), 161_002, &["update.head_dim"]);
    let status = unsafe {
        aclnnAttentionUpdateGetWorkspaceSize(
            update.lists[0],
            null_mut(),
            1,
            update.outputs[0],
            update.outputs[1],
            &mut bytes,
            &mut executor,
        )
    };
    fails(status, 161_001, &["update.required", "localOut"]);
    assert!(executor.is_null());
    assert_eq!(bytes, 7);
    update.destroy();
    wrong.destroy();
}
