//! Formats of matrices, cast by an operator of two phases.

use super::by_name::blocks;
use super::rows::*;
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::glue::format_cast::calculate;
use ascend_emu::glue::*;
use ascend_emu::{Machine, functions_of};
use ascend_spec::Cann;
use ascend_sys::bindings::{aclDataType, aclFormat, aclTensor};
use proptest::prelude::*;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

const FLOAT16: aclDataType = aclDataType::ACL_FLOAT16;
const ND: aclFormat = aclFormat::ACL_FORMAT_ND;
const NZ: aclFormat = aclFormat::ACL_FORMAT_FRACTAL_NZ;
const ND_TO: i32 = 2;
const NZ_TO: i32 = 29;

pub(crate) fn rows() -> Vec<Row> {
    vec![row("aclnnNpuFormatCast", [f16([2, 2], [1, 2, 3, 4]).read(), f16([2, 2], [1, 2, 3, 4]).written()])]
}

/// A tensor of a shape in a format, with the shape of its memory.
struct Formatted(*mut aclTensor);

impl Formatted {
    fn new(dtype: aclDataType, shape: &[i64], (format, storage): (aclFormat, &[i64]), at: *mut c_void) -> Self {
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        // SAFETY: the lists have as many numbers as said.
        let handle = unsafe {
            let (rank, axes) = (shape.len() as u64, storage.len() as u64);
            aclCreateTensor(shape.as_ptr(), rank, dtype, strides.as_ptr(), 0, format, storage.as_ptr(), axes, at)
        };
        assert!(!handle.is_null(), "{}", message());
        Formatted(handle)
    }

    /// What `aclnnNpuFormatCastCalculateSizeAndFormat` says of a cast.
    fn calculated(&self, format: i32, additional: i32) -> Result<(Vec<i64>, i32), i32> {
        let (mut sizes, mut count, mut actual) = (null_mut(), 0, -1);
        // SAFETY: the results are valid for writing, and the list, made by `malloc`, has as many numbers as said.
        unsafe {
            match calculate(self.0.cast(), format, additional, &raw mut sizes, &raw mut count, &raw mut actual) {
                0 => {}
                status => {
                    assert!(sizes.is_null() && count == 0 && actual == -1);
                    return Err(status);
                }
            }
            let list = std::slice::from_raw_parts(sizes, count as usize).to_vec();
            libc::free(sizes.cast());
            Ok((list, actual))
        }
    }
}

impl Drop for Formatted {
    fn drop(&mut self) {
        ok(unsafe { aclDestroyTensor(self.0) });
    }
}

fn cast(from: &Formatted, to: &Formatted) -> i32 {
    call!(aclnnNpuFormatCast(InStored(from.0), OutStored(to.0)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn matrices_are_cast_to_the_format_that_is_told_and_back(
        (dtype, size) in prop::sample::select(vec![
            (aclDataType::ACL_FLOAT, 4), (FLOAT16, 2), (aclDataType::ACL_BF16, 2), (aclDataType::ACL_INT8, 1),
        ]),
        shape in (1usize..4, 2usize..50, 1usize..80),
        soc in prop::sample::select(vec!["Ascend910B3", "Ascend910_9391", "Ascend950PR_9599"]),
        own in any::<bool>(),
        wide in any::<bool>(),
        seed in any::<u8>(),
    ) {
        let bench = Bench::new();
        let table = functions_of(&Machine::new(soc, Cann::NEWEST).unwrap()).unwrap();
        ok(unsafe { table.aclrtSetDevice.unwrap()(0) });
        let sizes = [shape.0, shape.1, shape.2];
        let bytes: Vec<u8> = (0..sizes.iter().product::<usize>() * size)
            .map(|at| (at as u8).wrapping_mul(37).wrapping_add(seed))
            .collect();
        let shape = sizes.map(|size| size as i64);
        // Blocks of four bytes an element have eight columns, or sixteen that an operator by its name has made.
        let wide = wide && size == 4;
        let (storage, stored) = blocks(&bytes, sizes, size, if wide { 16 } else { 32 / size });
        let (plain, private) = (upload(&bytes), upload(&vec![0xa5u8; stored.len()]));
        let back = upload(&vec![0x5au8; bytes.len()]);
        let nd = |at| Formatted::new(dtype, &shape, (ND, &shape), at);
        let (from, to, nz) = (nd(plain), nd(back), Formatted::new(dtype, &shape, (NZ, &storage), private));
        let additional = if own { dtype.0 } else { -1 };
        if !wide {
            prop_assert_eq!(from.calculated(NZ_TO, additional), Ok((storage.clone(), NZ_TO)));
        }
        prop_assert_eq!(nz.calculated(ND_TO, additional), Ok((shape.to_vec(), ND_TO)));
        ok(cast(&from, &nz));
        ok(unsafe { aclrtSynchronizeStream(null_mut()) });
        prop_assert_eq!(download::<u8>(private, stored.len()), stored.clone());
        ok(cast(&nz, &to));
        ok(unsafe { aclrtSynchronizeStream(null_mut()) });
        prop_assert_eq!(download::<u8>(back, bytes.len()), bytes.clone());
        [plain, private, back].into_iter().for_each(free);
        drop((from, to, nz));
        ok(unsafe { table.aclrtResetDevice.unwrap()(0) });
        bench.enter();
    }
}

#[test]
fn what_is_no_cast_is_refused() {
    let _bench = Bench::new();
    let memory = upload(&[0u8; 4096]);
    let shape = [20, 40];
    let tensor =
        |dtype, shape: &[i64], format, storage: &[i64]| Formatted::new(dtype, shape, (format, storage), memory);
    let nd = tensor(FLOAT16, &shape, ND, &shape);
    let refused = |to: &Formatted, texts: &[&str]| fails(cast(&nd, to), 161_002, texts);
    let int8 = aclDataType::ACL_INT8;
    refused(&tensor(int8, &shape, NZ, &[2, 2, 16, 32]), &["dstTensor: given INT8, allowed: FLOAT16"]);
    refused(&tensor(FLOAT16, &[40, 20], NZ, &[2, 3, 16, 16]), &["dstTensor: given [40, 20], allowed: [20, 40]"]);
    refused(&tensor(FLOAT16, &shape, NZ, &[2, 3, 16, 16]), &["in memory, allowed: [3, 2, 16, 16]"]);
    refused(&tensor(FLOAT16, &shape, aclFormat::ACL_FORMAT_NC1HWC0, &shape), &["the format Nc1hwc0", "FRACTAL_NZ"]);
    let row = [800];
    fails(
        cast(&tensor(FLOAT16, &row, ND, &row), &tensor(FLOAT16, &row, NZ, &row)),
        161_002,
        &["dstTensor: given [800], allowed: matrices"],
    );
    let float = aclDataType::ACL_FLOAT;
    let [narrow, wide] = [[5, 2, 16, 8], [3, 2, 16, 16]].map(|storage| tensor(float, &shape, NZ, &storage));
    fails(cast(&narrow, &wide), 161_002, &["dstTensor: given [3, 2, 16, 16], allowed: [5, 2, 16, 8]"]);
    drop((narrow, wide));
    let double = aclDataType::ACL_DOUBLE;
    let doubles = tensor(double, &[2, 2], ND, &[2, 2]);
    fails(cast(&doubles, &doubles), 161_002, &["srcTensor: given DOUBLE, allowed: FLOAT, FLOAT16"]);
    assert_eq!(doubles.calculated(NZ_TO, -1), Err(161_002));
    // What is told of a cast.
    assert_eq!(nd.calculated(3, -1), Err(361_001));
    assert_eq!(nd.calculated(ND_TO, -1), Err(361_001));
    assert_eq!(nd.calculated(NZ_TO, int8.0), Err(161_002));
    assert!(message().contains("additionalDtype: given 2 for FLOAT16, allowed: 1 (FLOAT16)"), "{}", message());
    assert_eq!(tensor(FLOAT16, &row, ND, &row).calculated(NZ_TO, -1), Err(161_002));
    assert_eq!(tensor(FLOAT16, &[1, 1, 1, 1, 1, 2, 2], ND, &[4]).calculated(NZ_TO, -1), Err(161_002));
    let (mut sizes, mut count, mut actual) = (null_mut(), 0, 0);
    // SAFETY: each pointer is null or valid for writing.
    unsafe {
        fails(
            calculate(null(), 29, -1, &raw mut sizes, &raw mut count, &raw mut actual),
            161_001,
            &["srcTensor is null"],
        );
        let source = nd.0.cast();
        fails(calculate(source, 29, -1, null_mut(), &raw mut count, &raw mut actual), 161_001, &["dstShape is null"]);
        fails(
            calculate(source, 29, -1, &raw mut sizes, null_mut(), &raw mut actual),
            161_001,
            &["dstShapeSize is null"],
        );
        fails(
            calculate(source, 29, -1, &raw mut sizes, &raw mut count, null_mut()),
            161_001,
            &["actualFormat is null"],
        );
    }
    assert!(sizes.is_null());
    drop((nd, doubles));
    free(memory);
}

/// Ascend 950 casts fewer types to FRACTAL_NZ, and no matrices of one row.
#[test]
fn ascend_950_refuses_more_and_has_blocks_for_products_with_other_types() {
    let bench = Bench::new();
    let table = functions_of(&Machine::new("Ascend950PR_9599", Cann::NEWEST).unwrap()).unwrap();
    ok(unsafe { table.aclrtSetDevice.unwrap()(0) });
    let bytes: Vec<u8> = (0..4 * 3 * 20 * 40).map(|at| at as u8).collect();
    let memory = upload(&bytes);
    let tensor = |dtype, shape: &[i64], format| Formatted::new(dtype, shape, (format, shape), memory);
    let (float, int8, int32) = (aclDataType::ACL_FLOAT, aclDataType::ACL_INT8, aclDataType::ACL_INT32);
    let (shape, four) = ([3, 5], [1, 1, 3, 5]);
    let images = aclFormat::ACL_FORMAT_NCHW;
    for (dtype, shape, format, additional, text) in [
        (int32, &shape[..], ND, int32, "additionalDtype: given 3 for INT32, allowed: 1 (FLOAT16), 27 (BF16), 2 (INT8)"),
        (aclDataType::ACL_UINT8, &shape, ND, int8, "allowed: none: Ascend 950 does not cast the type"),
        (FLOAT16, &[1, 5], ND, FLOAT16, "given [1, 5], allowed: matrices of more than one row"),
        (FLOAT16, &[0, 5], ND, FLOAT16, "given [0, 5], allowed: a tensor with elements"),
        (
            FLOAT16,
            &four,
            images,
            FLOAT16,
            "FLOAT16 of [1, 1, 3, 5] in the format Nchw to FractalNz, allowed: ND and NCL",
        ),
        (int32, &four, ND, FLOAT16, "to FractalNzC0x16, allowed: two or three dimensions"),
    ] {
        assert_eq!(tensor(dtype, shape, format).calculated(NZ_TO, additional.0), Err(161_002));
        assert!(message().contains(text), "{}", message());
    }
    assert_eq!(tensor(int8, &[1, 5], ND).calculated(NZ_TO, int8.0), Ok((vec![1, 1, 16, 32], NZ_TO)));
    assert_eq!(tensor(int8, &four, images).calculated(NZ_TO, int8.0), Ok((vec![1, 1, 1, 1, 16, 32], NZ_TO)));
    let integers = tensor(int32, &shape, ND);
    let nz = Formatted::new(int32, &shape, (NZ, &[1, 1, 16, 8]), memory);
    fails(cast(&integers, &nz), 161_002, &["INT32 to FractalNz", "FLOAT, FLOAT16, BF16, INT8, FLOAT8_E4M3FN"]);
    drop((integers, nz));

    let sizes = [3, 20, 40];
    let shape = sizes.map(|size| size as i64);
    for (dtype, additional, across, number, format) in [
        (float, FLOAT16, 16, 50, aclFormat::ACL_FORMAT_FRACTAL_NZ_C0_16),
        (int32, int8, 32, 51, aclFormat::ACL_FORMAT_FRACTAL_NZ_C0_32),
    ] {
        let (storage, stored) = blocks(&bytes, sizes, 4, across);
        let (private, back) = (upload(&vec![0xa5u8; stored.len()]), upload(&vec![0x5au8; bytes.len()]));
        let from = tensor(dtype, &shape, ND);
        assert_eq!(from.calculated(NZ_TO, additional.0), Ok((storage.clone(), number)));
        let nz = Formatted::new(dtype, &shape, (format, &storage), private);
        let to = Formatted::new(dtype, &shape, (ND, &shape), back);
        ok(cast(&from, &nz));
        ok(cast(&nz, &to));
        assert_eq!(nz.calculated(ND_TO, additional.0), Ok((shape.to_vec(), ND_TO)));
        ok(unsafe { aclrtSynchronizeStream(null_mut()) });
        assert_eq!(download::<u8>(private, stored.len()), stored);
        assert_eq!(download::<u8>(back, bytes.len()), bytes);
        drop((from, nz, to));
        [private, back].into_iter().for_each(free);
    }
    free(memory);
    ok(unsafe { table.aclrtResetDevice.unwrap()(0) });
    bench.enter();
}
