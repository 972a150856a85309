//! One runtime, device and plan serve any number of threads, and handles may be dropped on any of them.

use crate::harness;

use std::sync::Arc;
use std::thread;

use ascend_attention::rules;
use ascend_attention::{
    AnyTensor, Device, DeviceBuffer, Error, Event, FusedInferAttention, HostBuffer, Mask, Output, Plan, Runtime,
    Stream, Tensor, Transfer, f16,
};
use harness::{Sample, device, runtime};

#[test]
fn everything_can_be_sent_and_shared() {
    fn both<T: Send + Sync + 'static>() {}
    both::<Runtime>();
    both::<Device>();
    both::<Stream>();
    both::<Event>();
    both::<DeviceBuffer<f16>>();
    both::<HostBuffer<bool>>();
    both::<Transfer<f32>>();
    both::<Tensor<i8>>();
    both::<AnyTensor>();
    both::<Mask>();
    both::<FusedInferAttention>();
    both::<Plan>();
    both::<Output<f16>>();
    both::<Error>();
}

#[test]
fn threads_share_a_plan_each_with_a_stream() {
    let device = device();
    let samples: Vec<_> = (0..4).map(Sample::new).collect();
    let plan = {
        let stream = device.stream().unwrap();
        let [query, key, value] = samples[0].upload(&stream);
        Sample::attention(&device).plan((&query, &key, &value)).unwrap()
    };
    thread::scope(|scope| {
        for sample in &samples {
            let (plan, device) = (&plan, &device);
            scope.spawn(move || {
                let stream = device.stream().unwrap();
                let [query, key, value] = sample.upload(&stream);
                for _ in 0..10 {
                    let output = plan.launch(&stream, (&query, &key, &value)).unwrap();
                    sample.check(&output.attention.download(&stream).unwrap());
                }
            });
        }
    });
}

#[test]
fn threads_share_a_stream() {
    let stream = harness::stream();
    let samples: Vec<_> = (0..4).map(Sample::new).collect();
    thread::scope(|scope| {
        for sample in &samples {
            let stream = &stream;
            scope.spawn(move || {
                for _ in 0..5 {
                    let [query, key, value] = sample.upload(stream);
                    let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
                    let output = plan.launch(stream, (&query, &key, &value)).unwrap();
                    drop((query, key, value, plan));
                    sample.check(&output.attention.download(stream).unwrap());
                }
            });
        }
    });
}

#[test]
fn handles_are_dropped_on_other_threads() {
    for _ in 0..10 {
        let sample = Sample::new(9);
        let stream = harness::stream();
        let [query, key, value] = sample.upload(&stream);
        let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
        let output = plan.launch(&stream, (&query, &key, &value)).unwrap();
        let event = stream.record_event().unwrap();
        let threads = [
            thread::spawn(move || drop(query)),
            thread::spawn(move || drop((key, event))),
            thread::spawn(move || drop(plan)),
            thread::spawn(move || drop(value)),
        ];
        for thread in threads {
            thread.join().unwrap();
        }
        sample.check(&output.attention.download(&stream).unwrap());
        thread::spawn(move || drop((stream, output))).join().unwrap();
    }
}

#[test]
fn devices_are_separate_and_shared_by_number() {
    let runtime = runtime();
    let count = runtime.device_count().unwrap();
    assert!(count >= 1);
    let devices: Vec<_> = (0..count as i32).map(|id| runtime.device(id).unwrap()).collect();
    assert_eq!(devices[0], runtime.device(0).unwrap());
    thread::scope(|scope| {
        for device in &devices {
            scope.spawn(move || {
                let sample = Sample::new(device.id() as u64);
                let stream = device.stream().unwrap();
                let [query, key, value] = sample.upload(&stream);
                let plan = Sample::attention(device).plan((&query, &key, &value)).unwrap();
                for _ in 0..5 {
                    let output = plan.launch(&stream, (&query, &key, &value)).unwrap();
                    sample.check(&output.attention.download(&stream).unwrap());
                }
            });
        }
    });
    let [first, second, ..] = devices.as_slice() else {
        harness::does_not_apply("there is one device only");
        return;
    };
    // One thread works on both, in turns, and mixing them up is an error.
    let (one, two) = (first.stream().unwrap(), second.stream().unwrap());
    let sample = Sample::new(3);
    let [query, key, value] = sample.upload(&one);
    let [other, ..] = sample.upload(&two);
    let plan = Sample::attention(first).plan((&query, &key, &value)).unwrap();
    let output = plan.launch(&one, (&query, &key, &value)).unwrap();
    for error in [
        Sample::attention(first).plan((&query, &other, &value)).unwrap_err(),
        plan.launch(&one, (&other, &key, &value)).unwrap_err(),
        plan.launch(&two, (&query, &key, &value)).unwrap_err(),
        other.download(&one).unwrap_err(),
        two.wait_event(&one.record_event().unwrap()).unwrap_err(),
    ] {
        assert!(error.breaks(&rules::ARGUMENT_DEVICE), "{error}");
    }
    sample.check(&output.attention.download(&one).unwrap());
}

#[test]
fn a_device_can_be_given_up_and_taken_again() {
    let threads: Vec<_> = (0..4)
        .map(|seed| {
            thread::spawn(move || {
                for _ in 0..10 {
                    let stream = harness::stream();
                    let tensor = stream.upload(&[seed; 100], [100]).unwrap();
                    assert_eq!(tensor.download(&stream).unwrap(), [seed; 100]);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn masks_are_made_once_a_device() {
    let device = Arc::new(device());
    let addresses: Vec<usize> = (0..4)
        .map(|_| {
            let device = Arc::clone(&device);
            thread::spawn(move || device.masks().compressed().unwrap().as_raw().addr())
        })
        .map(|thread| thread.join().unwrap())
        .collect();
    assert!(addresses.iter().all(|&address| address == addresses[0]));
}
