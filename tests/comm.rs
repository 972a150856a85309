//! Ranks of one process through the safe layer: what each gets, what is refused before the call, and what every rank is
//! told of ranks that do not agree.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use ascend_attention::comm::{Communicator, Message, Reduction, RootInfo};
use ascend_attention::rules::{
    ARGUMENT_DEVICE, ARGUMENT_MEMORY, ARGUMENT_VALUE, COLLECTIVE_DEVICES, COLLECTIVE_LEFT, COLLECTIVE_LENGTH,
    COLLECTIVE_MESSAGES, COLLECTIVE_PART, COLLECTIVE_RANK, COLLECTIVE_TYPE,
};
use ascend_attention::{Element, Error, Graph, Result, Stream, Tensor, bf16, f16};
use ascend_testing::harness;
use ascend_testing::harness::ranks::{as_ranks, device_of_rank as device};
use proptest::prelude::*;

const RANKS: usize = 4;

/// Runs `body` as each rank, on a thread of its own with a stream, and returns the results by rank.
fn world<R: Send>(size: usize, body: impl Fn(&mut Communicator, &Stream) -> R + Sync) -> Vec<R> {
    as_ranks(size, |mut rank| {
        let stream = rank.device().stream().unwrap();
        body(&mut rank, &stream)
    })
}

/// A tensor of the rank, to be written.
fn empty<T: Element>(rank: &Communicator, len: usize) -> Tensor<T> {
    Tensor::empty(rank.device(), [len]).unwrap()
}

fn upload<T: Element>(stream: &Stream, values: &[T]) -> Tensor<T> {
    stream.upload(values, [values.len()]).unwrap()
}

/// What a rank has at the beginning.
fn own(rank: usize, count: usize) -> Vec<i32> {
    (0..count).map(|at| (1000 * rank + at) as i32).collect()
}

/// Every operator, whose inputs are dropped while the call may still wait.
fn everything(rank: &mut Communicator, stream: &Stream, count: usize, root: usize) -> Result<()> {
    let (size, me) = (rank.size(), rank.rank());
    let (gathered, sum, part) = (empty(rank, count * size), empty(rank, count), empty(rank, count));
    rank.all_gather(stream, &upload(stream, &own(me, count)), &gathered)?;
    rank.all_reduce(stream, &upload(stream, &own(me, count)), &sum, Reduction::Sum)?;
    let in_place = upload(stream, &own(me, count));
    rank.all_reduce_in_place(stream, &in_place, Reduction::Max)?;
    rank.reduce_scatter(stream, &upload(stream, &own(me, count * size)), &part, Reduction::Min)?;
    let copied = upload(stream, &own(me, count));
    rank.broadcast(stream, &copied, root)?;
    rank.barrier(stream)?;
    let exchanged = empty(rank, count * size);
    rank.all_to_all(stream, &upload(stream, &own(me, count * size)), &exchanged)?;
    // Rank i sends (i + j) % 3 elements to rank j.
    let sent: Vec<usize> = (0..size).map(|j| (me + j) % 3).collect();
    let total: usize = sent.iter().sum();
    let uneven = empty(rank, total);
    let source = upload(stream, &own(me, total));
    rank.all_to_all_v(stream, (&source, &sent), (&uneven, &sent))?;
    let lengths: Vec<usize> = (0..size).map(|r| r % 2 * count).collect();
    let some = empty(rank, lengths.iter().sum());
    rank.all_gather_v(stream, &upload(stream, &own(me, lengths[me])), &some, &lengths)?;

    let all: Vec<i32> = (0..size).flat_map(|r| own(r, count)).collect();
    assert_eq!(gathered.download(stream)?, all);
    let at = |at: usize| (0..size).map(move |r| own(r, count)[at]);
    assert_eq!(sum.download(stream)?, (0..count).map(|i| at(i).sum()).collect::<Vec<i32>>());
    assert_eq!(in_place.download(stream)?, own(size - 1, count));
    assert_eq!(part.download(stream)?, own(0, count * size)[me * count..][..count]);
    assert_eq!(copied.download(stream)?, own(root, count));
    let expected: Vec<i32> = (0..size).flat_map(|r| own(r, count * size)[me * count..][..count].to_vec()).collect();
    assert_eq!(exchanged.download(stream)?, expected);
    let expected: Vec<i32> = (0..size)
        .flat_map(|r| {
            let before: usize = (0..me).map(|j| (r + j) % 3).sum();
            (before..before + (r + me) % 3).map(move |at| (1000 * r + at) as i32)
        })
        .collect();
    assert_eq!(uneven.download(stream)?, expected);
    let expected: Vec<i32> = (0..size).flat_map(|r| own(r, lengths[r])).collect();
    assert_eq!(some.download(stream)?, expected);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    fn every_call_gives_what_the_ranks_have(size in 1..=RANKS, count in 1..200usize, root in 0..RANKS) {
        if harness::not_on_npu("it needs a device for each rank") {
            return Ok(());
        }
        world(size, |rank, stream| everything(rank, stream, count, root % size).unwrap());
    }
}

#[test]
fn messages_go_round_and_floats_are_added() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    world(RANKS, |rank, stream| {
        let (me, size) = (rank.rank(), rank.size());
        let (own, other) = (upload(stream, &[me as u8; 5]), empty::<u8>(rank, 5));
        // Even ranks send first.
        for sends in [me % 2 == 0, me % 2 == 1] {
            match sends {
                true => rank.send(stream, &own, (me + 1) % size).unwrap(),
                false => rank.recv(stream, &other, (me + size - 1) % size).unwrap(),
            }
        }
        assert_eq!(other.download(stream).unwrap(), [((me + size - 1) % size) as u8; 5]);
        let half = upload(stream, &[f16::from_f32(0.5); 7]);
        let brain = upload(stream, &[bf16::from_f32(me as f32); 7]);
        rank.all_reduce_in_place(stream, &half, Reduction::Prod).unwrap();
        rank.all_reduce_in_place(stream, &brain, Reduction::Sum).unwrap();
        assert_eq!(half.download(stream).unwrap(), [f16::from_f32(0.0625); 7]);
        assert_eq!(brain.download(stream).unwrap(), [bf16::from_f32(6.0); 7]);
        assert_eq!(rank.calls(), 4);
    });
}

#[test]
fn ranks_join_by_root_information_that_the_program_carries() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    let info = RootInfo::new(&device(0)).unwrap();
    let carried = info.as_bytes().to_vec();
    let join = |rank: usize| {
        let info = RootInfo::from_bytes(&carried).unwrap();
        Communicator::join(&device(rank), &info, rank, 2)
    };
    std::thread::scope(|scope| {
        for number in 0..2 {
            scope.spawn(move || {
                let mut rank = join(number).unwrap();
                assert_eq!((rank.rank(), rank.size(), rank.device().id()), (number, 2, number as i32));
                let stream = rank.device().stream().unwrap();
                rank.barrier(&stream).unwrap();
                stream.synchronize().unwrap();
            });
        }
    });
    let again = join(0).unwrap_err();
    assert!(matches!(&again, Error::Hccl { message, .. } if message.contains("has been used")), "{again}");
    assert!(again.to_string().contains("HCCL_E_PARA"), "{again}");
    assert!(RootInfo::from_bytes(&carried[1..]).unwrap_err().breaks(&ARGUMENT_VALUE));
    assert!(Communicator::join(&device(0), &info, 2, 2).unwrap_err().breaks(&COLLECTIVE_RANK));
}

#[test]
fn what_breaks_a_rule_is_refused_before_the_call_and_changes_nothing() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    let one = device(0);
    assert!(Communicator::all(&[]).unwrap_err().breaks(&ARGUMENT_VALUE));
    assert!(Communicator::all(&[one.clone(), one]).unwrap_err().breaks(&COLLECTIVE_DEVICES));
    world(2, |rank, stream| {
        let (a, b, wide) = (upload(stream, &[1f32; 8]), empty::<f32>(rank, 8), empty::<f32>(rank, 16));
        let foreign = device(1 - rank.rank());
        let elsewhere = foreign.stream().unwrap();
        let far = Tensor::<f32>::empty(&foreign, [8]).unwrap();
        let strided = wide.reshape([8, 2]).unwrap().narrow(1, 0..1).unwrap();
        let flags = upload(stream, &[true; 8]);
        let bits = upload(stream, &[1u64; 8]);
        let me = rank.rank();
        let refusals = [
            (rank.all_gather(stream, &a, &b), &COLLECTIVE_LENGTH),
            (rank.all_gather(stream, &far, &wide), &ARGUMENT_DEVICE),
            (rank.all_gather(&elsewhere, &a, &wide), &ARGUMENT_DEVICE),
            (rank.all_gather(stream, &strided, &wide), &ARGUMENT_VALUE),
            (rank.all_gather_v(stream, &a, &wide, &[8]), &COLLECTIVE_LENGTH),
            (rank.all_gather_v(stream, &a, &wide, &[8, usize::MAX]), &COLLECTIVE_LENGTH),
            (rank.all_reduce(stream, &a, &a, Reduction::Sum), &ARGUMENT_MEMORY),
            (rank.all_reduce(stream, &bits, &bits, Reduction::Sum), &ARGUMENT_MEMORY),
            (rank.all_reduce_in_place(stream, &bits, Reduction::Sum), &COLLECTIVE_TYPE),
            (rank.reduce_scatter(stream, &a, &b, Reduction::Sum), &COLLECTIVE_LENGTH),
            (rank.all_to_all(stream, &a.narrow(0, 0..7).unwrap(), &b), &COLLECTIVE_LENGTH),
            (rank.all_to_all_v(stream, (&a, &[4, 4]), (&b, &[4, 3])), &COLLECTIVE_LENGTH),
            (rank.broadcast(stream, &a, 2), &COLLECTIVE_RANK),
            (rank.broadcast(stream, &flags, 0), &COLLECTIVE_TYPE),
            (rank.send(stream, &a, me), &COLLECTIVE_RANK),
            (rank.recv(stream, &a, 2), &COLLECTIVE_RANK),
        ];
        for (number, (refusal, rule)) in refusals.into_iter().enumerate() {
            let error = refusal.unwrap_err();
            assert!(error.breaks(rule), "{number}: {error}");
        }
        assert_eq!(rank.calls(), 0);
        rank.all_reduce(stream, &a, &b, Reduction::Sum).unwrap();
        assert_eq!(b.download(stream).unwrap(), [2.0; 8]);
    });
}

#[test]
fn ranks_that_differ_are_told_so_and_their_next_call_names_rank_and_number() {
    if harness::not_on_npu("hardware waits for half an hour") {
        return;
    }
    world(3, |rank, stream| {
        let count = if rank.rank() == 2 { 7 } else { 8 };
        let tensor = upload(stream, &vec![1f32; count]);
        rank.barrier(stream).unwrap();
        let me = rank.rank();
        // A rank that comes late may be told by its call already.
        let outcome = rank.all_reduce_in_place(stream, &tensor, Reduction::Sum).and_then(|()| stream.synchronize());
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("count: ") && text.contains("7 on rank 2"), "{text}");
        match rank.barrier(stream) {
            Err(Error::Hccl { function: "HcclBarrier", rank: Some(rank), call: Some(3), message, .. }) => {
                assert_eq!(rank, me);
                assert!(message.contains("7 on rank 2"), "{message}");
            }
            other => panic!("{other:?}"),
        }
    });
}

/// Ranks' calls are matched by their order, which holds on whatever streams they are.
#[test]
fn calls_on_two_streams_keep_their_order() {
    world(4, |rank, stream| {
        let other = rank.device().stream().unwrap();
        let me = rank.rank() as f32;
        for _ in 0..20 {
            let (one, two) = (upload(stream, &[me; 3]), upload(&other, &[100.0 * me; 3]));
            rank.all_reduce_in_place(stream, &one, Reduction::Sum).unwrap();
            rank.all_reduce_in_place(&other, &two, Reduction::Sum).unwrap();
            assert_eq!(one.download(stream).unwrap(), [6.0; 3]);
            assert_eq!(two.download(&other).unwrap(), [600.0; 3]);
        }
        let none = empty::<f32>(rank, 0);
        let refused = rank.all_reduce_in_place(stream, &none, Reduction::Sum).unwrap_err();
        assert!(refused.breaks(&ascend_attention::rules::COLLECTIVE_LENGTH), "{refused}");
        let refused = rank.all_gather(stream, &none, &none).unwrap_err();
        assert!(refused.breaks(&ascend_attention::rules::COLLECTIVE_LENGTH), "{refused}");
        assert_eq!(rank.calls(), 40);
    });
}

/// Each rank sends to the next two and to itself, all in one call.
#[test]
fn a_batch_sends_and_receives_at_once() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    world(RANKS, |rank, stream| {
        let (me, size) = (rank.rank(), rank.size());
        let sent: Vec<Tensor<i32>> = (0..3).map(|hop| upload(stream, &own(10 * me + hop, 5 + hop))).collect();
        let received: Vec<Tensor<i32>> = (0..3).map(|hop| empty(rank, 5 + hop)).collect();
        let sends = sent.iter().enumerate().map(|(hop, tensor)| Message::Send { tensor, to: (me + hop) % size });
        let receives =
            received.iter().enumerate().map(|(hop, tensor)| Message::Recv { tensor, from: (me + size - hop) % size });
        rank.batch(stream, &sends.chain(receives).collect::<Vec<_>>()).unwrap();
        drop(sent);
        for (hop, tensor) in received.iter().enumerate() {
            let from = (me + size - hop) % size;
            assert_eq!(tensor.download(stream).unwrap(), own(10 * from + hop, 5 + hop));
        }
        let a = upload(stream, &[1f32; 4]);
        let (none, short, next) = (empty::<f32>(rank, 0), empty::<f32>(rank, 3), (me + 1) % size);
        let refusals = [
            (rank.batch(stream, &[]), &COLLECTIVE_MESSAGES),
            (rank.batch(stream, &[Message::Send { tensor: &a, to: me }]), &COLLECTIVE_MESSAGES),
            (
                rank.batch(stream, &[Message::Send { tensor: &a, to: me }, Message::Recv { tensor: &short, from: me }]),
                &COLLECTIVE_MESSAGES,
            ),
            (rank.batch(stream, &[Message::Send { tensor: &a, to: size }]), &COLLECTIVE_RANK),
            (rank.batch(stream, &[Message::Send { tensor: &none, to: next }]), &COLLECTIVE_LENGTH),
            (
                rank.batch(stream, &[Message::Send { tensor: &a, to: next }, Message::Recv { tensor: &a, from: next }]),
                &ARGUMENT_MEMORY,
            ),
        ];
        for (number, (refusal, rule)) in refusals.into_iter().enumerate() {
            let error = refusal.unwrap_err();
            assert!(error.breaks(rule), "{number}: {error}");
        }
        assert_eq!(rank.calls(), 1);
        rank.barrier(stream).unwrap();
        stream.synchronize().unwrap();
    });
}

/// Graphs with calls between ranks: replayed on any stream, between other calls, and when the communicator is dropped.
#[test]
fn captured_calls_are_replayed_in_order_and_keep_the_rank() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(3, |mut rank| {
        let (me, size) = (rank.rank(), rank.size());
        let [stream, other] = [(); 2].map(|()| rank.device().stream().unwrap());
        let buffers = (upload(&stream, &[me as f32; 4]), empty::<f32>(&rank, 4 * size), empty::<f32>(&rank, 4));
        let device = rank.device().clone();
        let (mut graph, ()) = Graph::capture(&device, buffers, |capture, (own, all, sum)| {
            rank.all_gather(capture, own, all)?;
            rank.all_reduce(capture, own, sum, Reduction::Sum)
        })
        .unwrap();
        let total = |add: f32| (0..size).map(|rank| rank as f32 + add).sum::<f32>();
        for turn in 0..4 {
            let add = turn as f32;
            let (own, all, sum) = graph.buffers();
            own.overwrite(&stream, &[me as f32 + add; 4]).unwrap();
            let (all, sum) = (all.clone(), sum.clone());
            let on = if turn % 2 == 0 { &stream } else { &other };
            graph.launch(on, graph.update()).unwrap();
            let eager = upload(&stream, &[add; 2]);
            rank.all_reduce_in_place(&stream, &eager, Reduction::Sum).unwrap();
            assert_eq!(eager.download(&stream).unwrap(), [add * size as f32; 2]);
            assert_eq!(sum.download(on).unwrap(), [total(add); 4]);
            let wanted: Vec<f32> = (0..size).flat_map(|rank| [rank as f32 + add; 4]).collect();
            assert_eq!(all.download(on).unwrap(), wanted);
        }
        // The graph keeps the rank.
        drop(rank);
        graph.launch(&stream, graph.update()).unwrap();
        assert_eq!(graph.buffers().2.download(&stream).unwrap(), [total(3.0); 4]);
    });
}

#[test]
fn a_refused_call_fails_the_capture_and_none_is_queued_beside_it() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    world(2, |rank, stream| {
        let (a, b) = (upload(stream, &[1f32; 8]), empty::<f32>(rank, 8));
        let device = rank.device().clone();
        let captured = Graph::capture(&device, (), |capture, ()| {
            let beside = rank.barrier(stream).unwrap_err();
            assert!(matches!(beside, Error::Capturing { .. }), "{beside}");
            // Ignored, as a program should not.
            let _ = rank.all_gather(capture, &a, &b);
            Ok::<_, Error>(())
        });
        let refused = captured.err().unwrap();
        assert!(refused.breaks(&COLLECTIVE_LENGTH), "{refused}");
        assert_eq!(rank.calls(), 0);
        rank.all_reduce(stream, &a, &b, Reduction::Sum).unwrap();
        assert_eq!(b.download(stream).unwrap(), [2.0; 8]);
    });
}

/// A graph keeps the rank whose calls it has captured, unless the rank leaves.
#[test]
fn a_rank_leaves_though_a_graph_has_its_calls() {
    if harness::not_on_npu("hardware waits for half an hour") {
        return;
    }
    let begun = std::time::Instant::now();
    as_ranks(3, |mut rank| {
        let (me, stream) = (rank.rank(), rank.device().stream().unwrap());
        let (device, sum) = (rank.device().clone(), upload(&stream, &[1f32; 4]));
        let (mut graph, ()) =
            Graph::capture(&device, sum, |capture, sum| rank.all_reduce_in_place(capture, sum, Reduction::Sum))
                .unwrap();
        graph.launch(&stream, graph.update()).unwrap();
        assert_eq!(graph.buffers().download(&stream).unwrap(), [3.0; 4]);
        if me == 1 {
            rank.leave().unwrap();
            for _ in 0..2 {
                let refused = graph.launch(&stream, graph.update()).unwrap_err();
                assert!(refused.breaks(&COLLECTIVE_LEFT) && refused.to_string().contains("rank 1"), "{refused}");
            }
            // The stream and the buffers go on without the rank.
            assert_eq!(graph.buffers().download(&stream).unwrap(), [3.0; 4]);
        } else {
            let told = graph.launch(&stream, graph.update()).and_then(|()| stream.synchronize());
            let told = told.unwrap_err().to_string();
            assert!(told.contains("rank 1") && told.contains("was destroyed"), "{told}");
        }
    });
    assert!(begun.elapsed() < std::time::Duration::from_secs(10), "{:?}", begun.elapsed());
}

/// A replay on one thread and a call on another are queued one after the other: what the rank calls next comes behind
/// both, whatever stream it is on.
#[test]
fn replays_and_calls_of_two_threads_have_one_order() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(2, |mut rank| {
        let [stream, other] = [(); 2].map(|()| rank.device().stream().unwrap());
        let device = rank.device().clone();
        let (mut graph, ()) = Graph::capture(&device, upload(&stream, &[1f32; 4]), |capture, sum| {
            rank.all_reduce_in_place(capture, sum, Reduction::Max)
        })
        .unwrap();
        let (own, large) = (upload(&other, &[1f32; 4]), upload(&other, &vec![0u8; 1 << 22]));
        let copy = empty::<u8>(&rank, 1 << 22);
        let (both, errors) = (std::sync::Barrier::new(2), std::sync::Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            let (graph, stream, both, errors) = (&mut graph, &stream, &both, &errors);
            scope.spawn(move || {
                for _ in 0..400 {
                    both.wait();
                    let launched = graph.launch(stream, graph.update());
                    both.wait();
                    launched.unwrap_or_else(|error| errors.lock().unwrap().push(error));
                }
            });
            for _ in 0..400 {
                // The call comes late on its stream.
                let copied = copy.copy_from(&other, &large);
                both.wait();
                let called = copied.and_then(|()| rank.all_reduce_in_place(&other, &own, Reduction::Max));
                both.wait();
                let called = called.and_then(|()| rank.barrier(stream));
                called.unwrap_or_else(|error| errors.lock().unwrap().push(error));
            }
        });
        let errors = errors.into_inner().unwrap();
        assert!(errors.is_empty(), "{}", errors[0]);
        stream.synchronize().unwrap();
        other.synchronize().unwrap();
        assert_eq!(own.download(&other).unwrap(), [1.0; 4]);
    });
}

/// The sum over the ranks of a communicator of a number of each.
fn sum(rank: &mut Communicator, stream: &Stream, own: i32) -> i32 {
    let tensor = upload(stream, &[own]);
    rank.all_reduce_in_place(stream, &tensor, Reduction::Sum).unwrap();
    tensor.download(stream).unwrap()[0]
}

/// Parts of any ranks, made twice, beside each other and in turn with the whole, which may end before them.
fn parts_have_calls_of_their_own(colours: &[usize], ends_first: bool) {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(colours.len(), |mut whole| {
        let (me, [stream, other]) = (whole.rank(), [(); 2].map(|()| whole.device().stream().unwrap()));
        let size = whole.size();
        let list: Vec<usize> = (0..size).filter(|rank| colours[*rank] == colours[me]).collect();
        let all: Vec<usize> = (0..size).collect();
        let mut parts = [&list, &list, &all].map(|list| whole.split(list).unwrap());
        let own = list.iter().position(|rank| *rank == me).unwrap();
        assert_eq!((parts[0].rank(), parts[0].size()), (own, list.len()));
        let of_list: i32 = list.iter().map(|rank| 1 << rank).sum();
        for _ in 0..3 {
            assert_eq!(sum(&mut whole, &stream, 1 << me), (1 << size) - 1);
            assert_eq!(sum(&mut parts[0], &other, 1 << me), of_list);
            assert_eq!(sum(&mut parts[1], &stream, 3 << me), 3 * of_list);
            assert_eq!(sum(&mut parts[2], &other, 1), size as i32);
        }
        let nested = parts[2].split(&list).unwrap_err();
        assert!(nested.breaks(&COLLECTIVE_PART), "{nested}");
        if ends_first {
            drop(whole);
            assert_eq!(sum(&mut parts[2], &stream, 2), 2 * size as i32);
        } else {
            drop(parts);
            assert_eq!(sum(&mut whole, &stream, 1), size as i32);
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(12) })]

    #[test]
    fn parts_of_any_ranks_have_calls_of_their_own(
        colours in prop::collection::vec(0..3usize, 2..=RANKS),
        ends_first in any::<bool>(),
    ) {
        parts_have_calls_of_their_own(&colours, ends_first);
    }
}

#[test]
fn two_parts_of_one_rank_each_end_before_the_whole() {
    parts_have_calls_of_their_own(&[0, 1], false);
}

/// Queued without waiting, on two streams: a rank's calls keep their order, of the whole and of a part alike.
#[test]
fn a_part_and_the_whole_keep_the_order_of_a_rank() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(3, |mut whole| {
        let (me, streams) = (whole.rank(), [(); 2].map(|()| whole.device().stream().unwrap()));
        let mut part = whole.split(&[0, 1, 2]).unwrap();
        let tensor = upload(&streams[0], &[me as i32; 64]);
        for turn in 0..20 {
            whole.all_reduce_in_place(&streams[turn % 2], &tensor, Reduction::Max).unwrap();
            part.all_reduce_in_place(&streams[1 - turn % 2], &tensor, Reduction::Sum).unwrap();
        }
        let wanted = (0..20).fold(2, |sum: i32, _| sum.wrapping_mul(3));
        assert_eq!(tensor.download(&streams[0]).unwrap(), [wanted; 64]);
        // A graph with calls of both, which goes on when both are dropped.
        let device = whole.device().clone();
        let (mut graph, ()) = Graph::capture(&device, upload(&streams[0], &[1i32; 4]), |capture, tensor| {
            whole.all_reduce_in_place(capture, tensor, Reduction::Sum)?;
            part.all_reduce_in_place(capture, tensor, Reduction::Sum)
        })
        .unwrap();
        drop((whole, part));
        for turn in 1..=3u32 {
            graph.launch(&streams[turn as usize % 2], graph.update()).unwrap();
            let got = graph.buffers().download(&streams[turn as usize % 2]).unwrap();
            assert_eq!(got, [9i32.pow(turn); 4]);
        }
    });
}

#[test]
fn lists_that_are_no_part_are_refused_and_ranks_that_left_are_named() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    world(3, |rank, stream| {
        let me = rank.rank();
        let others: Vec<usize> = (0..3).filter(|other| *other != me).collect();
        for list in [&[][..], &others, &[0, 1, 3], &[2, 1, 0], &[0, 1, 1, 2], &[0, 1, 2, usize::MAX]] {
            let refused = rank.split(list).unwrap_err();
            assert!(refused.breaks(&COLLECTIVE_PART), "{refused}");
        }
        let mut part = rank.split(&[0, 1, 2]).unwrap();
        assert_eq!((sum(&mut part, stream, 1), sum(rank, stream, 2), rank.calls()), (3, 6, 1));
        // A rank that leaves the part is named there; the whole goes on.
        if me == 2 {
            drop(part);
        } else {
            let outcome = part.barrier(stream).and_then(|()| stream.synchronize()).unwrap_err();
            assert!(outcome.to_string().contains("rank 2"), "{outcome}");
        }
        let fresh = rank.device().stream().unwrap();
        assert_eq!(sum(rank, &fresh, 1), 3);
    });
}

#[test]
fn a_rank_leaves_its_parts_before_the_whole() {
    if harness::not_on_npu("it needs a device for each rank") {
        return;
    }
    as_ranks(2, |mut whole| {
        let stream = whole.device().stream().unwrap();
        let [mut one, other] = [(); 2].map(|()| whole.split(&[0, 1]).unwrap());
        let device = whole.device().clone();
        let capture = Graph::capture(&device, upload(&stream, &[1i32; 4]), |capture, tensor| {
            one.all_reduce_in_place(capture, tensor, Reduction::Sum)
        });
        let (mut graph, ()) = capture.unwrap();
        let refused = whole.leave().unwrap_err();
        assert!(refused.breaks(&COLLECTIVE_PART), "{refused}");
        one.leave().unwrap();
        let refused = graph.launch(&stream, graph.update()).unwrap_err();
        assert!(refused.breaks(&COLLECTIVE_LEFT), "{refused}");
        other.leave().unwrap();
    });
}
