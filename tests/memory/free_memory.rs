//! Device memory comes back, and running out of it is a named error that leaves the device usable.

use crate::harness::{Sample, device, stream};
use crate::turn;
use ascend_attention::rules;
use ascend_attention::{Device, DeviceBuffer, Error, Tensor};

fn free(device: &Device) -> usize {
    device.memory_info().unwrap().free
}

#[test]
fn what_is_dropped_with_work_queued_comes_back() {
    let _turn = turn();
    let stream = stream();
    let sample = Sample::new(6);
    let [query, key, value] = sample.upload(&stream);
    let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
    let round = || {
        for _ in 0..50 {
            drop(plan.launch(&stream, (&query, &key, &value)).unwrap());
        }
        stream.synchronize().unwrap();
        free(stream.device())
    };
    let first = round();
    for _ in 0..5 {
        assert!(round() + Sample::LEN * 2 > first);
    }
}

#[test]
fn memory_used_by_a_stream_that_is_gone_is_free() {
    let _turn = turn();
    let device = device();
    let sample = Sample::new(9);
    let other = device.stream().unwrap();
    let [query, key, value] = sample.upload(&other);
    let plan = Sample::attention(&device).plan((&query, &key, &value)).unwrap();
    let before = free(&device);
    for _ in 0..3 {
        let stream = device.stream().unwrap();
        let output = plan.launch(&stream, (&query, &key, &value)).unwrap();
        drop(stream);
        drop(output);
        assert!(free(&device) >= before);
    }
}

/// Events tell when dropped memory is free; a program that runs for days must not pile them up.
#[test]
#[cfg(feature = "emulation")]
fn events_do_not_pile_up() {
    let _turn = turn();
    if crate::harness::not_on_npu("events are counted by the emulation of this process") {
        return;
    }
    let stream = stream();
    let sample = Sample::new(8);
    let [query, key, value] = sample.upload(&stream);
    let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
    for _ in 0..100 {
        for _ in 0..3 {
            drop(plan.launch(&stream, (&query, &key, &value)).unwrap());
        }
        stream.synchronize().unwrap();
    }
    let events = ascend_emu::live().events;
    assert!(events <= 16, "{events} events");
}

#[test]
fn allocations_are_counted_and_given_back() {
    let _turn = turn();
    let device = device();
    let info = device.memory_info().unwrap();
    assert!(info.free <= info.total && info.total > 0);
    let buffer: DeviceBuffer<f32> = device.alloc(1 << 20).unwrap();
    assert_eq!((buffer.len(), buffer.is_empty()), (1 << 20, false));
    assert!(free(&device) + (4 << 20) <= info.free);
    drop(buffer);
    assert!(free(&device) >= info.free);
    let empty: DeviceBuffer<f32> = device.alloc(0).unwrap();
    assert!(empty.is_empty() && empty.as_raw().is_null());
}

#[test]
fn more_than_there_is_is_out_of_memory() {
    let _turn = turn();
    let stream = stream();
    let device = stream.device();
    let total = device.memory_info().unwrap().total;
    let error = device.alloc::<u8>(total + (1 << 30)).unwrap_err();
    let Error::OutOfMemory { function, status, bytes, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!((*function, *bytes), ("aclrtMalloc", total + (1 << 30)));
    assert!(status.is_out_of_memory());

    for error in [
        device.alloc::<u64>(usize::MAX).unwrap_err(),
        device.host_buffer::<u64>(usize::MAX / 2).unwrap_err(),
        Tensor::<i64>::empty(device, [usize::MAX, usize::MAX]).unwrap_err(),
        Tensor::<i64>::empty(device, [1 << 40, 1 << 40]).unwrap_err(),
    ] {
        assert!(error.breaks(&rules::ARGUMENT_VALUE), "{error}");
    }
    let tensor = stream.upload(&[1, 2, 3], [3]).unwrap();
    assert_eq!(tensor.download(&stream).unwrap(), [1, 2, 3]);
}

#[test]
#[cfg(feature = "emulation")]
fn memory_of_dropped_buffers_is_waited_for_before_giving_up() {
    let _turn = turn();
    if crate::harness::not_on_npu("failures are injected into the emulation of this process") {
        return;
    }
    let stream = stream();
    let sample = Sample::new(7);
    let [query, key, value] = sample.upload(&stream);
    let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();

    // One failure, and a buffer that a long queue of work still uses: the second try comes after that work.
    let output = plan.launch(&stream, (&query, &key, &value)).unwrap();
    for _ in 0..200 {
        plan.launch_into(&stream, (&query, &key, &value), &mut output.clone()).unwrap();
    }
    let used = ascend_emu::live().device_bytes;
    drop(output);
    let failure = ascend_emu::inject(ascend_emu::Site::Malloc, 1, 207_001);
    stream.device().alloc::<u8>(64).unwrap();
    assert!(ascend_emu::live().device_bytes < used);
    drop(failure);

    // Nothing to wait for: the failure is reported.
    stream.synchronize().unwrap();
    let failure = ascend_emu::inject(ascend_emu::Site::Malloc, 1, 207_018);
    let error = stream.device().alloc::<u8>(64).unwrap_err();
    assert!(
        matches!(error, Error::OutOfMemory { status: ascend_attention::AclStatus(207_018), bytes: 64, .. }),
        "{error}"
    );
    drop(failure);
    let failure = ascend_emu::inject(ascend_emu::Site::Malloc, 1, 207_001);
    let error = stream.device().host_buffer::<u8>(64).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { function: "aclrtMallocHost", .. }), "{error}");
    drop(failure);
    let output = plan.launch(&stream, (&query, &key, &value)).unwrap();
    sample.check(&output.attention.download(&stream).unwrap());
}
