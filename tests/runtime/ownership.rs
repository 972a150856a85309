//! Handles may be dropped at any time: queued work keeps what it uses, and nothing is freed twice or never.

use crate::harness;

use ascend_attention::{DeviceBuffer, Event, Mask, Stream, Tensor, f16};
use harness::{Sample, poisoned, stream};

#[test]
fn inputs_dropped_at_once_still_give_the_right_answer() {
    let stream = stream();
    let sample = Sample::new(1);
    for _ in 0..20 {
        let [query, key, value] = sample.upload(&stream);
        let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
        let mut output = poisoned(&plan, &stream);
        plan.launch_into(&stream, (&query, &key, &value), &mut output).unwrap();
        drop((query, key, value, plan));
        // New memory must not be what the launch still reads.
        for _ in 0..4 {
            drop(stream.upload(&vec![f16::NAN; Sample::LEN], Sample::SHAPE).unwrap());
        }
        sample.check(&output.attention.download(&stream).unwrap());
    }
}

#[test]
fn an_output_may_be_dropped_before_it_is_written() {
    let stream = stream();
    let sample = Sample::new(2);
    let [query, key, value] = sample.upload(&stream);
    let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
    for _ in 0..20 {
        drop(plan.launch(&stream, (&query, &key, &value)).unwrap());
    }
    let output = plan.launch(&stream, (&query, &key, &value)).unwrap();
    sample.check(&output.attention.download(&stream).unwrap());
}

#[test]
fn one_tensor_may_be_key_and_value_and_used_by_many_launches() {
    let stream = stream();
    let sample = Sample::new(3);
    let [query, key, value] = sample.upload(&stream);
    let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
    let outputs: Vec<_> = (0..10).map(|_| plan.launch(&stream, (&query, &key, &value)).unwrap()).collect();
    let both = plan.launch(&stream, (&query, &key, &key)).unwrap();
    for output in outputs {
        sample.check(&output.attention.download(&stream).unwrap());
    }
    assert!(both.attention.download(&stream).unwrap().iter().all(|x| x.is_finite()));
}

#[test]
fn a_mask_may_be_dropped_with_its_plan() {
    let stream = stream();
    let sample = Sample::new(8);
    let [query, key, value] = sample.upload(&stream);
    let rows = Sample::SHAPE[2];
    let hidden: Vec<bool> = (0..rows * rows).map(|at| at % rows > at / rows).collect();
    for _ in 0..20 {
        let mask = Mask::all_mask(stream.upload(&hidden, [rows, rows]).unwrap());
        let attention = Sample::attention(stream.device()).mask(mask);
        let plan = attention.plan((&query, &key, &value)).unwrap();
        let mut output = poisoned(&plan, &stream);
        plan.launch_into(&stream, (&query, &key, &value), &mut output).unwrap();
        drop((plan, attention));
        sample.check(&output.attention.download(&stream).unwrap());
    }
}

#[test]
fn plans_share_the_scratch_memory_of_a_stream() {
    let stream = stream();
    let sample = Sample::new(7);
    let [query, key, value] = sample.upload(&stream);
    assert_eq!(stream.workspace_bytes(), 0);
    for _ in 0..3 {
        let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
        let output = plan.launch(&stream, (&query, &key, &value)).unwrap();
        assert_eq!(stream.workspace_bytes(), plan.workspace_bytes());
        drop(plan);
        sample.check(&output.attention.download(&stream).unwrap());
    }
}

#[test]
fn a_stream_may_be_dropped_with_work_queued() {
    let sample = Sample::new(4);
    let first = stream();
    let [query, key, value] = sample.upload(&first);
    let plan = Sample::attention(first.device()).plan((&query, &key, &value)).unwrap();
    let mut output = poisoned(&plan, &first);
    for _ in 0..5 {
        plan.launch_into(&first, (&query, &key, &value), &mut output).unwrap();
    }
    drop(first);
    sample.check(&output.attention.download(&stream()).unwrap());
}

#[test]
fn a_plan_outlives_stream_device_and_runtime() {
    let sample = Sample::new(5);
    let (plan, tensors) = {
        let stream = stream();
        let tensors = sample.upload(&stream);
        let [query, key, value] = &tensors;
        (Sample::attention(stream.device()).plan((query, key, value)).unwrap(), tensors)
    };
    let stream = stream();
    let [query, key, value] = &tensors;
    let output = plan.launch(&stream, (query, key, value)).unwrap();
    sample.check(&output.attention.download(&stream).unwrap());
}

#[test]
fn a_view_keeps_the_memory() {
    let stream = stream();
    let whole = stream.upload(&(0..24).collect::<Vec<i32>>(), [2, 3, 4]).unwrap();
    let view = whole.permute([2, 0, 1]).unwrap().narrow(0, 1..3).unwrap();
    drop(whole);
    let want: Vec<i32> = (1..3).flat_map(|d| (0..6).map(move |row| row * 4 + d)).collect();
    assert_eq!(view.shape(), [2, 2, 3]);
    assert_eq!(view.download(&stream).unwrap(), want);
    let packed = view.contiguous(&stream).unwrap();
    assert!(packed.is_contiguous() && !view.is_contiguous());
    assert_eq!(packed.download(&stream).unwrap(), want);
}

#[test]
fn asynchronous_copies_own_the_host_memory() {
    let stream = stream();
    let mut host = stream.device().host_buffer::<i32>(1000).unwrap();
    assert!(host.iter().all(|&x| x == 0));
    host.iter_mut().zip(0..).for_each(|(x, i)| *x = i);
    let tensor = Tensor::<i32>::empty(stream.device(), [10, 100]).unwrap();
    let host = tensor.overwrite_async(&stream, host).unwrap().wait().unwrap();
    let back = stream.device().host_buffer(1000).unwrap();
    let back = tensor.download_async(&stream, back).unwrap().wait().unwrap();
    assert_eq!(*back, *host);
    // Both ends may be dropped while the copy is queued.
    for _ in 0..20 {
        let tensor = Tensor::<i32>::empty(stream.device(), [1000]).unwrap();
        let host = stream.device().host_buffer(1000).unwrap();
        drop(tensor.overwrite_async(&stream, host).unwrap());
    }
    stream.synchronize().unwrap();
}

#[test]
fn bools_are_valid_whatever_the_bytes() {
    let stream = stream();
    let bytes = stream.upload_bytes(ascend_attention::DType::Bool, &[0, 1, 2, 255], [4]).unwrap();
    let tensor: Tensor<bool> = bytes.typed().unwrap();
    assert_eq!(tensor.download(&stream).unwrap(), [false, true, true, true]);
    let host = stream.device().host_buffer(4).unwrap();
    let host = tensor.download_async(&stream, host).unwrap().wait().unwrap();
    assert_eq!(*host, [false, true, true, true]);
}

#[test]
fn borrowed_handles_are_used_and_not_destroyed() {
    let owner = stream();
    let device = owner.device();
    let buffer: DeviceBuffer<i32> = device.alloc_zeroed(8).unwrap();
    let event = owner.record_event().unwrap();
    for _ in 0..3 {
        // SAFETY: all three handles live until the end of this test.
        let (stream, memory, event) = unsafe {
            (
                Stream::from_raw_borrowed(device, owner.as_raw()),
                DeviceBuffer::<i32>::from_raw_borrowed(device, buffer.as_raw(), 8).unwrap(),
                Event::from_raw_borrowed(device, event.as_raw()),
            )
        };
        let tensor = Tensor::from_buffer(&memory, [2, 4]).unwrap();
        tensor.overwrite(&stream, &[7; 8]).unwrap();
        let host = device.host_buffer(8).unwrap();
        drop(tensor.download_async(&stream, host).unwrap());
        event.record(&stream).unwrap();
        stream.wait_event(&event).unwrap();
    }
    assert_eq!(buffer.to_vec(&owner).unwrap(), [7; 8]);
    event.synchronize().unwrap();
}
