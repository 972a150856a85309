//! Two streams side by side, ordered by an event, timed, with copies that run while the host goes on:
//! `cargo run --example 03-streams-and-events`.

use ascend_attention::prelude::*;

const SHAPE: [usize; 4] = [1, 4, 128, 64];
const LEN: usize = 4 * 128 * 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Runtime::auto()?.device(0)?;
    // What is queued on one stream happens in order; two streams know nothing of each other.
    let (copies, compute) = (device.stream()?, device.stream()?);

    // Asynchronous copies need pinned host memory, and own it until they are over.
    let query = Tensor::<f16>::empty(&device, SHAPE)?;
    let mut host = device.host_buffer::<f16>(LEN)?;
    host.iter_mut().enumerate().for_each(|(i, x)| *x = f16::from_f32((i % 13) as f32 / 13.0));
    let upload = query.overwrite_async(&copies, host)?;

    // Without this event the launch below could read the query before it is there.
    let there = copies.record_event()?;
    compute.wait_event(&there)?; // makes the stream wait, not the host

    let plan = FusedInferAttention::new(Layout::Bnsd).heads(4).scale(0.125).plan((&query, &query, &query))?;
    let start = compute.record_timing_event()?;
    let first = plan.launch(&compute, (&query, &query, &query))?;
    let second = plan.launch(&compute, (&first.attention, &query, &query))?;
    let end = compute.record_timing_event()?;
    drop(first); // safe at once: queued work keeps what it uses

    let back = second.attention.download_async(&compute, device.host_buffer(LEN)?)?;
    println!("queued; is it done? {}", back.is_complete()?);

    let answer = back.wait()?; // waits for this copy and what comes before it
    println!("two launches took {:?}", end.elapsed_since(&start)?);
    let host = upload.wait()?; // the pinned memory comes back for the next step

    // Keys and queries are positive here, so that an average of values stays between the smallest and the largest.
    let (low, high) = host.iter().fold((f16::INFINITY, f16::NEG_INFINITY), |(l, h), &x| (l.min(x), h.max(x)));
    if answer.iter().all(|x| *x >= low && *x <= high && *x > f16::ZERO) {
        println!("{} values, all between {low} and {high}", answer.len());
        Ok(())
    } else {
        Err("the answer is no average of the values".into())
    }
}
