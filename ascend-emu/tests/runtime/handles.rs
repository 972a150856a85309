//! Wrong handles, wrong arguments, and what descriptors tell about themselves.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_sys::bindings::{
    aclDataType, aclFormat, aclOpExecutor, aclScalar, aclSysParamOpt, aclTensor, aclTensorList, aclrtRunMode,
};
use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};

const HALF: aclDataType = aclDataType::ACL_FLOAT16;

#[test]
fn a_handle_of_another_kind_is_named() {
    let _bench = Bench::new();
    let (stream, event) = (stream(), event());
    unsafe {
        fails(aclrtDestroyEvent(stream), 107_017, &["different kind", "stream", "event"]);
        fails(aclrtSynchronizeStream(event), 107_017, &["different kind"]);
        fails(aclDestroyTensor(event.cast()), 161_002, &["different kind", "aclTensor"]);
        fails(aclDestroyTensor(null()), 161_001, &["null"]);
        fails(aclrtDestroyEvent(nowhere()), 107_017, &["no event handle"]);
        fails(aclrtSetCurrentContext(null_mut()), 100_000, &["null"]);
        fails(aclrtSetCurrentContext(stream), 107_017, &["different kind", "context"]);
        ok(aclrtDestroyEvent(event));
        fails(aclrtDestroyEvent(event), 107_017, &["already destroyed"]);
    }
    destroy(stream);
    fails(unsafe { aclrtDestroyStream(stream) }, 107_017, &["already destroyed"]);
}

#[test]
fn lists_destroy_their_members() {
    let (one, two) = (tensor(HALF, &[2], null_mut()), tensor(HALF, &[3], null_mut()));
    let list = list(&[one, two]);
    let mut size = 0;
    unsafe {
        ok(aclGetTensorListSize(list, &mut size));
        assert_eq!(size, 2);
        ok(aclDestroyTensorList(list));
        fails(aclDestroyTensor(one), 161_002, &["with its list"]);
        fails(aclDestroyTensorList(list), 161_002, &["already destroyed"]);
        // The other way round: the members first, as one vendor sample does, which leaks the list.
        let one = tensor(HALF, &[2], null_mut());
        let leaked = crate::bench::list(&[one]);
        ok(aclDestroyTensor(one));
        fails(aclDestroyTensorList(leaked), 161_002, &["aclTensor", "already destroyed"]);
        assert!(aclCreateTensorList(&one.cast_const(), 1).is_null());
        assert!(message().contains("already destroyed"));
    }
}

type Getter = unsafe extern "C" fn(*const aclTensor, *mut *mut i64, *mut u64) -> i32;

/// What a getter hands out, given back as its caller has to.
fn numbers(get: Getter, tensor: *const aclTensor) -> Vec<i64> {
    let (mut at, mut count) = (null_mut(), 0);
    unsafe {
        ok(get(tensor, &mut at, &mut count));
        let values = std::slice::from_raw_parts(at, count as usize).to_vec();
        libc::free(at.cast());
        values
    }
}

#[test]
fn tensors_tell_what_they_were_given() {
    let shape = [2i64, 3, 4];
    let strides = [24i64, 8, 2];
    let storage = [64i64];
    let data = nowhere();
    let mut dims: *mut i64 = null_mut();
    let (mut rank, mut offset) = (0, 0);
    let (mut format, mut dtype) = (aclFormat(0), aclDataType(0));
    unsafe {
        let tensor = aclCreateTensor(
            shape.as_ptr(),
            3,
            HALF,
            strides.as_ptr(),
            5,
            aclFormat::ACL_FORMAT_ND,
            storage.as_ptr(),
            1,
            data,
        );
        assert_eq!(numbers(aclGetViewShape, tensor), shape);
        assert_eq!(numbers(aclGetViewStrides, tensor), strides);
        assert_eq!(numbers(aclGetStorageShape, tensor), storage);
        ok(aclGetViewOffset(tensor, &mut offset));
        ok(aclGetFormat(tensor, &mut format));
        ok(aclGetDataType(tensor, &mut dtype));
        assert_eq!((offset, format, dtype), (5, aclFormat::ACL_FORMAT_ND, HALF));
        let mut at = null_mut();
        ok(aclGetRawTensorAddr(tensor, &mut at));
        assert_eq!(at, data);
        ok(aclSetRawTensorAddr(tensor, null_mut()));
        ok(aclGetRawTensorAddr(tensor, &mut at));
        assert!(at.is_null());
        // Anew, with default strides.
        ok(aclInitTensor(
            tensor,
            shape.as_ptr(),
            3,
            aclDataType::ACL_INT8,
            null(),
            0,
            aclFormat::ACL_FORMAT_NCL,
            shape.as_ptr(),
            3,
            data,
        ));
        assert_eq!(numbers(aclGetViewStrides, tensor), [12, 4, 1]);
        fails(aclGetViewShape(tensor, null_mut(), &mut rank), 161_001, &["null"]);
        ok(aclDestroyTensor(tensor));
        let scalar = tensor_of_rank_0();
        ok(aclGetViewShape(scalar, &mut dims, &mut rank));
        assert!(!dims.is_null() && rank == 0);
        libc::free(dims.cast());
        ok(aclDestroyTensor(scalar));
    }
}

fn tensor_of_rank_0() -> *mut aclTensor {
    let at = unsafe { aclCreateTensor(null(), 0, HALF, null(), 0, aclFormat::ACL_FORMAT_ND, null(), 0, null_mut()) };
    assert!(!at.is_null());
    at
}

#[test]
fn tensors_that_cannot_be_are_refused() {
    let make = |shape: &[i64], dtype: i32, strides: Option<&[i64]>, offset, format| unsafe {
        aclCreateTensor(
            shape.as_ptr(),
            shape.len() as u64,
            aclDataType(dtype),
            strides.map_or(null(), <[i64]>::as_ptr),
            offset,
            aclFormat(format),
            shape.as_ptr(),
            shape.len() as u64,
            null_mut(),
        )
    };
    let far = [i64::MAX];
    for (shape, dtype, strides, offset, format, part) in [
        (&[1; 9][..], 1, None, 0, 2, "at most 8"),
        (&[2, -1], 1, None, 0, 2, "no shape"),
        (&[i64::MAX, 4], 1, None, 0, 2, "no shape"),
        (&[2], 77, None, 0, 2, "dataType"),
        (&[2], 1, None, 0, 1234, "format"),
        (&[4], 1, Some(&[-1][..]), 2, 2, "below its base"),
        (&[4], 1, Some(&far[..]), 0, 2, "beyond all memory"),
        (&[4], 1, None, i64::MIN, 2, "below its base"),
    ] {
        assert!(make(shape, dtype, strides, offset, format).is_null());
        let message = message();
        assert!(message.contains(part), "`{part}` is not in `{message}`");
    }
    let huge =
        unsafe { aclCreateTensor(null(), u64::MAX, HALF, null(), 0, aclFormat::ACL_FORMAT_ND, null(), 0, null_mut()) };
    assert!(huge.is_null());
    assert!(unsafe { aclCreateIntArray(null(), 3) }.is_null());
    assert!(message().contains("null"));
}

#[test]
fn arrays_and_scalars() {
    let mut size = 0;
    unsafe {
        let ints = aclCreateIntArray([1i64, 2, 3].as_ptr(), 3);
        ok(aclGetIntArraySize(ints, &mut size));
        assert_eq!(size, 3);
        let floats = aclCreateFloatArray([1.0f32, 2.0].as_ptr(), 2);
        ok(aclGetFloatArraySize(floats, &mut size));
        assert_eq!(size, 2);
        let bools = aclCreateBoolArray([true].as_ptr(), 1);
        ok(aclGetBoolArraySize(bools, &mut size));
        assert_eq!(size, 1);
        let empty = aclCreateIntArray(null(), 0);
        ok(aclGetIntArraySize(empty, &mut size));
        assert_eq!(size, 0);
        for array in [ints, empty] {
            ok(aclDestroyIntArray(array));
        }
        ok(aclDestroyFloatArray(floats));
        ok(aclDestroyBoolArray(bools));
        let mut number = 1.5f32;
        let value = (&raw mut number).cast::<c_void>();
        let scalar: *mut aclScalar = aclCreateScalar(value, aclDataType::ACL_FLOAT);
        assert!(!scalar.is_null());
        let list = aclCreateScalarList(&scalar.cast_const(), 1);
        ok(aclGetScalarListSize(list, &mut size));
        assert_eq!(size, 1);
        ok(aclDestroyScalarList(list));
        fails(aclDestroyScalar(scalar), 161_002, &["already destroyed"]);
        assert!(aclCreateScalar(value, aclDataType::ACL_STRING).is_null());
        assert!(aclCreateScalar(null_mut(), aclDataType::ACL_FLOAT).is_null());
        fails(aclGetTensorListSize(null::<aclTensorList>(), &mut size), 161_001, &["aclTensorList handle is null"]);
        fails(aclDestroyAclOpExecutor(null_mut::<aclOpExecutor>()), 561_103, &["null"]);
    }
}

#[test]
fn the_machine_is_described() {
    let _bench = Bench::new();
    let (mut count, mut device, mut mode) = (0, -1, aclrtRunMode(9));
    let (mut major, mut minor, mut patch) = (-1, -1, -1);
    unsafe {
        ok(aclrtGetDeviceCount(&mut count));
        assert_eq!(count, 2);
        ok(aclrtGetDevice(&mut device));
        assert_eq!(device, 0);
        ok(aclrtGetRunMode(&mut mode));
        assert_eq!(mode, aclrtRunMode::ACL_HOST);
        ok(aclrtGetVersion(&mut major, &mut minor, &mut patch));
        assert!(major >= 1 && minor >= 0 && patch >= 0);
        let soc = CStr::from_ptr(aclrtGetSocName());
        assert_eq!(soc.to_str(), Ok("Ascend910B3"));
        fails(aclrtSetDevice(2), 107_001, &["device 2", "ASCEND_EMU_DEVICES"]);
        fails(aclrtSetDevice(-1), 107_001, &["device -1"]);
        let mut context = null_mut();
        fails(aclrtCreateContext(&mut context, 9), 107_001, &["device 9"]);
        let mut version = std::mem::zeroed();
        let cann = ascend_sys::bindings::aclCANNPackageName::ACL_PKG_NAME_CANN;
        ok(aclsysGetCANNVersion(cann, &mut version));
        let text = CStr::from_ptr(version.version.as_ptr());
        assert_eq!(text.to_str(), Ok("9.1.0"));
        let (mut number, mut text) = (0, [1i8; 128]);
        let name = c"runtime".as_ptr().cast_mut();
        ok(aclsysGetVersionNum(name, &mut number));
        assert_eq!(number, 90_100);
        ok(aclsysGetVersionStr(name, text.as_mut_ptr().cast()));
        assert_eq!(&text[..6], &[57, 46, 49, 46, 48, 0]);
    }
}

#[test]
fn options_are_kept_by_context_and_by_process() {
    let first = Bench::new();
    let deterministic = aclSysParamOpt::ACL_OPT_DETERMINISTIC;
    let mut value = -1;
    unsafe {
        fails(aclrtCtxGetSysParamOpt(deterministic, &mut value), 107_021, &["not set"]);
        ok(aclrtCtxSetSysParamOpt(deterministic, 1));
        ok(aclrtCtxGetSysParamOpt(deterministic, &mut value));
        assert_eq!(value, 1);
        let second = Bench::new();
        assert_eq!(aclrtCtxGetSysParamOpt(deterministic, &mut value), 107_021);
        drop(second);
        first.enter();
        fails(aclrtSetSysParamOpt(aclSysParamOpt(9), 1), 107_000, &["opt", "9"]);
        ok(aclrtSetSysParamOpt(aclSysParamOpt::ACL_OPT_STRONG_CONSISTENCY, 3));
        ok(aclrtGetSysParamOpt(aclSysParamOpt::ACL_OPT_STRONG_CONSISTENCY, &mut value));
        assert_eq!(value, 3);
    }
}

#[test]
fn an_option_of_the_process_is_0_until_it_is_set() {
    let mut value = -1;
    unsafe {
        ok(aclrtGetSysParamOpt(aclSysParamOpt::ACL_OPT_ENABLE_DEBUG_KERNEL, &mut value));
        assert_eq!(value, 0);
        fails(aclrtGetSysParamOpt(aclSysParamOpt(9), &mut value), 107_000, &["opt", "9"]);
    }
}

#[test]
fn numbers_convert() {
    unsafe {
        assert_eq!(aclFloat16ToFloat(0x3e00), 1.5);
        assert_eq!(aclFloatToFloat16(-2.0), 0xc000);
        assert_eq!(aclDataTypeSize(HALF), 2);
        assert_eq!(aclDataTypeSize(aclDataType::ACL_INT64), 8);
        assert_eq!(aclDataTypeSize(aclDataType::ACL_INT4), 1);
        // Not a byte: they have no size.
        assert_eq!(aclDataTypeSize(aclDataType::ACL_STRING), 0);
        assert_eq!(aclDataTypeSize(aclDataType::ACL_DT_UNDEFINED), 0);
        assert_eq!(aclDataTypeSize(aclDataType(-7)), 0);
    }
}

#[test]
fn a_device_tells_what_it_is_and_can_do() {
    use ascend_sys::bindings::{aclCannAttr, aclDeviceInfo, aclrtDevAttr};
    let _bench = Bench::new();
    unsafe {
        let capability = |info| {
            let mut value = -1;
            ok(aclGetDeviceCapability(0, info, &mut value));
            value
        };
        assert_eq!(capability(aclDeviceInfo::ACL_DEVICE_INFO_AI_CORE_NUM), 20);
        assert_eq!(capability(aclDeviceInfo::ACL_DEVICE_INFO_VECTOR_CORE_NUM), 40);
        assert_eq!(capability(aclDeviceInfo::ACL_DEVICE_INFO_L2_SIZE), 192 << 20);
        let info = |attribute: aclrtDevAttr| {
            let mut value = -1;
            let status = aclrtGetDeviceInfo(0, attribute, &mut value);
            (status, value)
        };
        assert_eq!(info(aclrtDevAttr::ACL_DEV_ATTR_CUBE_CORE_NUM), (0, 20));
        assert_eq!(info(aclrtDevAttr::ACL_DEV_ATTR_NPU_ARCH), (0, 2201));
        assert_eq!(info(aclrtDevAttr::ACL_DEV_ATTR_WARP_SIZE), (0, 0));
        let (status, bytes) = info(aclrtDevAttr::ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE);
        assert!(status == 0 && bytes > 1 << 26);
        assert_eq!(info(aclrtDevAttr::ACL_DEV_ATTR_SUPER_POD_ID).0, 207_000);
        assert_eq!(info(aclrtDevAttr(9999)).0, 207_000);
        let (mut list, mut count, mut there) = (null(), 0, -1);
        ok(aclGetCannAttributeList(&mut list, &mut count));
        let listed = std::slice::from_raw_parts(list, count);
        for attribute in 0..3 {
            ok(aclGetCannAttribute(aclCannAttr(attribute), &mut there));
            assert_eq!(there == 1, listed.contains(&aclCannAttr(attribute)));
        }
        ok(aclGetCannAttribute(aclCannAttr::ACL_CANN_ATTR_INF_NAN, &mut there));
        assert_eq!(there, 1);
        fails(aclGetCannAttribute(aclCannAttr(-1), &mut there), 107_000, &["cannAttr"]);
        let mut value = 0;
        fails(aclGetDeviceCapability(u32::MAX, aclDeviceInfo(0), &mut value), 107_000, &["deviceId"]);
        fails(aclGetDeviceCapability(7, aclDeviceInfo(0), &mut value), 107_001, &["device 7"]);
        fails(aclGetDeviceCapability(0, aclDeviceInfo(3), &mut value), 107_000, &["deviceInfo", "3"]);
        let mut ids = [ascend_sys::bindings::aclrtUuid { bytes: [0; 16] }; 2];
        ok(aclrtDeviceGetUuid(0, &mut ids[0]));
        ok(aclrtDeviceGetUuid(1, &mut ids[1]));
        assert_ne!(ids[0].bytes, ids[1].bytes);
        let mut number = -1;
        ok(aclrtGetLogicDevIdByUserDevId(1, &mut number));
        assert_eq!(number, 1);
        ok(aclrtDeviceGetBareTgid(&mut number));
        assert_eq!(u32::try_from(number), Ok(std::process::id()));
    }
}

#[test]
fn devices_are_opened_to_each_other_one_way_at_a_time() {
    let _bench = Bench::new();
    unsafe {
        let status = |from, to| {
            let mut open = -1;
            ok(aclrtDevicePeerAccessStatus(from, to, &mut open));
            open
        };
        let mut can = -1;
        ok(aclrtDeviceCanAccessPeer(&mut can, 0, 1));
        assert_eq!(can, 1);
        assert_eq!((status(0, 1), status(1, 0)), (0, 0));
        ok(aclrtDeviceEnablePeerAccess(1, 0));
        assert_eq!((status(0, 1), status(1, 0)), (1, 0));
        ok(aclrtDeviceDisablePeerAccess(1));
        assert_eq!(status(0, 1), 0);
        fails(aclrtDeviceDisablePeerAccess(1), 107_000, &["peerDeviceId"]);
        fails(aclrtDeviceEnablePeerAccess(0, 0), 100_000, &["itself"]);
        fails(aclrtDeviceEnablePeerAccess(1, 1), 200_006, &["flags"]);
        fails(aclrtDeviceCanAccessPeer(&mut can, 0, 9), 107_001, &["device 9"]);
        fails(aclrtDeviceCanAccessPeer(null_mut(), 0, 1), 100_000, &["null"]);
    }
}

#[test]
fn the_health_of_a_device_is_good_and_there_is_nothing_to_repair() {
    use ascend_sys::bindings::{aclrtErrorType, aclrtFloatOverflowMode};
    let _bench = Bench::new();
    unsafe {
        let mut info: ascend_sys::bindings::aclrtErrorInfo = std::mem::zeroed();
        info.errorType = aclrtErrorType::ACL_RT_ERROR_OTHERS;
        info.tryRepair = 7;
        fails(aclrtRepairError(0, &info), 207_000, &["faults of hardware"]);
        ok(aclrtGetErrorVerbose(0, &mut info));
        assert_eq!((info.tryRepair, info.hasDetail), (0, 0));
        assert_eq!(info.errorType, aclrtErrorType::ACL_RT_NO_ERROR);
        ok(aclrtRepairError(0, &info));
        let mut ranges = [std::mem::zeroed(); 2];
        let mut count = 7;
        ok(aclrtGetMemUceInfo(0, ranges.as_mut_ptr(), 2, &mut count));
        assert_eq!(count, 0);
        fails(aclrtGetMemUceInfo(0, ranges.as_mut_ptr(), 0, &mut count), 107_000, &["arraySize"]);

        let mut mode = aclrtFloatOverflowMode(7);
        ok(aclrtGetDeviceSatMode(&mut mode));
        assert_eq!(mode, aclrtFloatOverflowMode::ACL_RT_OVERFLOW_MODE_INFNAN);
        ok(aclrtSetDeviceSatMode(mode));
        let other = aclrtFloatOverflowMode::ACL_RT_OVERFLOW_MODE_SATURATION;
        fails(aclrtSetDeviceSatMode(other), 207_000, &["infinities"]);
        fails(aclrtSetDeviceSatMode(aclrtFloatOverflowMode(2)), 107_000, &["mode", "2"]);
    }
}
