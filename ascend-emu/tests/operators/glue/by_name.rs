//! Operators that are run by their names: the format of a tensor is cast, and what is no such call is refused.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::glue::by_name::*;
use proptest::prelude::*;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

const FLOAT: i32 = 0;
const FLOAT16: i32 = 1;
const INT8: i32 = 2;
const ND: i32 = 2;
const NZ: i32 = 29;

/// A description with a buffer.
struct Described(*mut c_void, *mut c_void);

impl Described {
    fn new((dtype, shape): (i32, &[i64]), (format, storage): (i32, &[i64]), memory: (*mut c_void, usize)) -> Self {
        // SAFETY: the lists have as many numbers as said.
        let description = unsafe { create_description(dtype, shape.len() as i32, shape.as_ptr(), ND) };
        assert!(!description.is_null(), "{}", message());
        ok(set_format(description, format));
        ok(unsafe { set_storage(description, storage.len() as i32, storage.as_ptr()) });
        Described(description, create_buffer(memory.0, memory.1))
    }

    fn pair(&self) -> [(*const c_void, *const c_void); 1] {
        [(self.0, self.1)]
    }
}

impl Drop for Described {
    fn drop(&mut self) {
        destroy_description(self.0);
        ok(destroy_buffer(self.1));
    }
}

fn cast(from: &Described, to: &Described) -> i32 {
    execute("Identity", &from.pair(), &to.pair(), null())
}

/// The bytes of matrices in FRACTAL_NZ in blocks of `across` columns, element by element.
pub(crate) fn blocks(
    bytes: &[u8],
    [batch, rows, columns]: [usize; 3],
    size: usize,
    across: usize,
) -> (Vec<i64>, Vec<u8>) {
    let (down, right) = (rows.div_ceil(16), columns.div_ceil(across));
    let mut stored = vec![0; batch * right * down * 16 * across * size];
    for b in 0..batch {
        for (i, j) in (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))) {
            let block = (b * right + j / across) * down + i / 16;
            let at = (block * 16 + i % 16) * across + j % across;
            let from = (b * rows + i) * columns + j;
            stored[at * size..][..size].copy_from_slice(&bytes[from * size..][..size]);
        }
    }
    (vec![batch as i64, right as i64, down as i64, 16, across as i64], stored)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn matrices_are_cast_to_nz_and_back(
        (dtype, size) in prop::sample::select(vec![(FLOAT, 4), (FLOAT16, 2), (INT8, 1)]),
        shape in (1usize..4, 1usize..50, 1usize..80),
        seed in any::<u8>(),
    ) {
        let _bench = Bench::new();
        let sizes = [shape.0, shape.1, shape.2];
        let count: usize = sizes.iter().product();
        let bytes: Vec<u8> = (0..count * size).map(|at| (at as u8).wrapping_mul(37).wrapping_add(seed)).collect();
        let shape = sizes.map(|size| size as i64);
        let (storage, stored) = blocks(&bytes, sizes, size, if size > 2 { 16 } else { 32 / size });
        let (plain, private) = (upload(&bytes), upload(&vec![0xa5u8; stored.len()]));
        let back = upload(&vec![0x5au8; bytes.len()]);
        let nd = |at| Described::new((dtype, &shape), (ND, &shape), (at, bytes.len()));
        let nz = || Described::new((dtype, &shape), (NZ, &storage), (private, stored.len()));
        // Descriptions may end before the launch runs.
        ok(cast(&nd(plain), &nz()));
        ok(unsafe { aclrtSynchronizeStream(null_mut()) });
        prop_assert_eq!(download::<u8>(private, stored.len()), stored.clone());
        ok(cast(&nz(), &nd(back)));
        ok(unsafe { aclrtSynchronizeStream(null_mut()) });
        prop_assert_eq!(download::<u8>(back, bytes.len()), bytes.clone());
        ok(cast(&nd(plain), &nd(back)));
        ok(unsafe { aclrtSynchronizeStream(null_mut()) });
        [plain, private, back].into_iter().for_each(free);
    }
}

#[test]
fn what_is_no_cast_is_refused_by_name() {
    let _bench = Bench::new();
    let memory = upload(&[0u8; 2048]);
    let shape = [20, 40];
    let nd = Described::new((FLOAT16, &shape), (ND, &shape), (memory, 1600));
    let other = |dtype, shape: &[i64], format, storage: &[i64], bytes| {
        Described::new((dtype, shape), (format, storage), (memory, bytes))
    };
    let refused = |to: &Described, texts: &[&str]| fails(cast(&nd, to), 100_000, texts);
    refused(&other(INT8, &shape, ND, &shape, 800), &["type of y: given INT8", "FLOAT16"]);
    refused(&other(FLOAT16, &[40, 20], ND, &[40, 20], 1600), &["shape of y: given [40, 20]"]);
    refused(&other(FLOAT16, &shape, ND, &shape, 1599), &["y: given a buffer of 1599 bytes"]);
    refused(&other(FLOAT16, &shape, ND, &[40, 20], 1600), &["y: given [40, 20] in memory, allowed: [20, 40]"]);
    refused(&other(FLOAT16, &shape, NZ, &[2, 3, 16, 16], 3072), &["in memory, allowed: [3, 2, 16, 16]"]);
    refused(&other(FLOAT16, &shape, NZ, &[3, 2, 16, 16], 3071), &["a buffer of 3071 bytes"]);
    refused(&other(FLOAT16, &shape, 3, &shape, 1600), &["in the format Nc1hwc0", "FRACTAL_NZ"]);
    let row = Described::new((FLOAT16, &[800]), (NZ, &[800]), (memory, 1600));
    fails(cast(&row, &row), 100_000, &["x: given [800] in the format FractalNz"]);
    let two = [nd.pair()[0]; 2];
    fails(execute("Identity", &two, &nd.pair(), null()), 100_000, &["2 inputs and 1 outputs"]);
    fails(execute("MatMul", &two, &nd.pair(), null()), 200_006, &["the operator MatMul is not emulated"]);
    fails(execute("Identity", &[(null(), null())], &nd.pair(), null()), 100_000, &["aclTensorDesc"]);
    // What is no description makes none.
    for (dtype, rank, sizes, format) in [
        (99, 2, shape.as_ptr(), ND),
        (FLOAT16, 9, shape.as_ptr(), ND),
        (FLOAT16, 2, null(), ND),
        (FLOAT16, -1, null(), ND),
        (FLOAT16, 1, [-1].as_ptr(), ND),
        (FLOAT16, 2, [i64::MAX; 2].as_ptr(), ND),
        (FLOAT16, 2, shape.as_ptr(), 999),
    ] {
        // SAFETY: null, or a list of as many numbers; one of too many is not read.
        assert!(unsafe { create_description(dtype, rank, sizes, format) }.is_null());
    }
    fails(set_placement(nd.0, 1), 200_006, &["on the host"]);
    assert_eq!(described(nd.0, 1), Some((FLOAT16, ND, 2, Some(40))));
    assert_eq!(described(null(), 0), None);
    // The device computes on.
    ok(cast(&nd, &other(FLOAT16, &shape, ND, &shape, 1600)));
    ok(unsafe { aclrtSynchronizeStream(null_mut()) });
    drop(nd);
    drop(row);
    free(memory);
}

/// What a client describes before it runs an operator tells casts from operators that are not emulated.
#[test]
fn casts_are_told_from_other_operators_before_they_run() {
    let _bench = Bench::new();
    let shape = [20, 40];
    let describe = |format, shape: &[i64]| Described::new((FLOAT16, shape), (format, shape), (null_mut(), 0));
    assert!(may_run().is_err());
    let _cast = [describe(ND, &shape), describe(NZ, &shape)];
    assert_eq!(may_run(), Ok(()));
    assert!(may_run().is_err(), "what was described belongs to one call");
    let _product = [describe(ND, &[3, 20]), describe(NZ, &shape), describe(ND, &[3, 40])];
    assert!(may_run().unwrap_err().contains("FRACTAL_NZ"));
    let _sum = [describe(ND, &shape), describe(ND, &shape), describe(ND, &shape)];
    assert!(may_run().unwrap_err().contains("no aclnn function"));
}
