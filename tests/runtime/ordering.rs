//! Streams run side by side; an event between them is an order.

use crate::harness;

use std::time::Duration;

use ascend_attention::graph::is_capturing;
use ascend_attention::{Error, Graph, Tensor, f16};
use harness::gate::Gate;
use harness::{Sample, device, poisoned};

#[test]
fn an_event_orders_two_streams() {
    let device = device();
    let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
    let sample = Sample::new(1);
    let [query, key, value] = sample.upload(&first);
    let plan = Sample::attention(&device).plan((&query, &key, &value)).unwrap();
    for _ in 0..20 {
        // The second stream's query is what the first computes.
        let mut middle = poisoned(&plan, &first);
        for _ in 0..3 {
            plan.launch_into(&first, (&query, &key, &value), &mut middle).unwrap();
        }
        let event = first.record_event().unwrap();
        second.wait_event(&event).unwrap();
        drop(event);
        let last = plan.launch(&second, (&middle.attention, &key, &value)).unwrap();
        let got = last.attention.download(&second).unwrap();
        sample.check(&middle.attention.download(&first).unwrap());
        assert_eq!(got, again(&sample, &middle.attention.download(&first).unwrap()));
    }
}

/// The sample with another query, on a stream of its own.
fn again(sample: &Sample, query: &[f16]) -> Vec<f16> {
    let stream = harness::stream();
    let [_, key, value] = sample.upload(&stream);
    let query = stream.upload(query, Sample::SHAPE).unwrap();
    let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
    let output = plan.launch(&stream, (&query, &key, &value)).unwrap();
    output.attention.download(&stream).unwrap()
}

#[test]
fn a_mark_is_passed_when_everything_before_it_is_over() {
    let device = device();
    let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
    let before = stream.mark();
    assert!(before.wait().unwrap());
    let gate = Gate::new(&device);
    gate.hold(&stream);
    let mark = stream.mark();
    assert!(mark.is_of(&stream) && !mark.is_of(&other));
    assert!(before.is_passed().unwrap() && !mark.is_passed().unwrap());
    assert!(!before.latest().is_passed().unwrap());
    Graph::capture(&device, (), |_, ()| {
        assert!(is_capturing());
        assert!(matches!(mark.wait(), Err(Error::Capturing { .. })));
        Ok(())
    })
    .unwrap();
    assert!(!is_capturing());
    gate.open();
    assert!(mark.wait().unwrap() && mark.is_passed().unwrap());
    drop(stream);
    assert!(mark.latest().wait().unwrap(), "a dropped stream is over");
}

#[test]
fn work_on_one_stream_is_done_in_order() {
    let stream = harness::stream();
    let tensor = Tensor::<i32>::empty(stream.device(), [1 << 16]).unwrap();
    let mut copies = Vec::new();
    for i in 0..10 {
        let mut host = stream.device().host_buffer::<i32>(1 << 16).unwrap();
        host.fill(i);
        copies.push(tensor.overwrite_async(&stream, host).unwrap());
    }
    let host = stream.device().host_buffer(1 << 16).unwrap();
    let last = tensor.download_async(&stream, host).unwrap().wait().unwrap();
    assert!(last.iter().all(|&x| x == 9));
    for (copy, i) in copies.into_iter().zip(0..) {
        assert!(copy.is_complete().unwrap());
        assert_eq!(copy.wait().unwrap()[0], i);
    }
}

#[test]
fn events_tell_completion_and_time() {
    let stream = harness::stream();
    let start = stream.record_timing_event().unwrap();
    let sample = Sample::new(2);
    let [query, key, value] = sample.upload(&stream);
    let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
    for _ in 0..3 {
        plan.launch(&stream, (&query, &key, &value)).unwrap();
    }
    let end = stream.record_timing_event().unwrap();
    end.synchronize_timeout(Duration::from_secs(60)).unwrap();
    assert!(start.is_complete().unwrap() && end.is_complete().unwrap());
    let elapsed = end.elapsed_since(&start).unwrap();
    assert!(elapsed > Duration::ZERO && elapsed < Duration::from_secs(60), "{elapsed:?}");
    stream.synchronize_timeout(Duration::from_secs(60)).unwrap();
    assert!(stream.is_idle().unwrap());

    let untimed = stream.record_event().unwrap();
    assert!(matches!(
        untimed.elapsed_since(&start),
        Err(Error::Violation(violation))
            if violation.rule.id == "argument.value"
                && violation.given.starts_with("event: ")
    ));
    untimed.record(&stream).unwrap();
    untimed.synchronize().unwrap();
    stream.device().synchronize().unwrap();
}
