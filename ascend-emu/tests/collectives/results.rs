//! Every collective against the plain model, for 1 to 8 ranks.

use crate::model::{Element, OPS, reduced, values};
use crate::*;
use ascend_sys::bindings::{HcclDataType, HcclReduceOp};
use half::{bf16, f16};
use proptest::prelude::*;

/// Device memory of a rank with values, given back when it is dropped.
struct Values<E> {
    memory: Memory,
    count: usize,
    kind: std::marker::PhantomData<E>,
}

impl<E: Element> Values<E> {
    fn of(values: &[E]) -> Self {
        let at = if values.is_empty() { malloc(64) } else { upload(values) };
        Values { memory: Memory { at }, count: values.len(), kind: std::marker::PhantomData }
    }

    /// Memory of values that no test draws in a row.
    fn poisoned(count: usize) -> Self {
        Self::of(&vec![E::drawn(0x7e7e_7e7e_7e7e); count])
    }

    fn at(&self) -> *mut c_void {
        self.memory.at
    }

    fn read(&self) -> Vec<E> {
        if self.count == 0 { Vec::new() } else { download(self.at(), self.count) }
    }
}

/// The operators that reduce.
fn reduces<E: Element>(one: &Rank, op: HcclReduceOp, count: usize, root: u32, seed: u64) {
    let size = one.size as usize;
    let Rank { comm, stream, .. } = *one;
    let all: Vec<Vec<E>> = (0..size).map(|rank| values(seed, rank, count)).collect();
    let expected = reduced(&all, op);
    let own = &all[one.index()];
    let elements = count as u64;

    let (send, receive, in_place) = (Values::of(own), Values::<E>::poisoned(count), Values::of(own));
    let (to_root, untouched) = (Values::<E>::poisoned(count), Values::<E>::poisoned(count).read());
    unsafe {
        fine(HcclAllReduce(send.at(), receive.at(), elements, E::DTYPE, op, comm, stream));
        fine(HcclAllReduce(in_place.at(), in_place.at(), elements, E::DTYPE, op, comm, stream));
        fine(HcclReduce(send.at(), to_root.at(), elements, E::DTYPE, op, root, comm, stream));
    }
    // Each rank has a part for every rank.
    let wide: Vec<Vec<E>> = (0..size).map(|rank| values(seed ^ 1, rank, count * size)).collect();
    let wide_sum = reduced(&wide, op);
    let (parts, part) = (Values::of(&wide[one.index()]), Values::<E>::poisoned(count));
    fine(unsafe { HcclReduceScatter(parts.at(), part.at(), elements, E::DTYPE, op, comm, stream) });
    // Parts of their own sizes, with gaps between them, in the opposite order.
    let counts: Vec<u64> = (0..size).map(|rank| (count * (rank % 3) / 2) as u64).collect();
    let places: Vec<u64> = (0..size).map(|rank| ((size - 1 - rank) * count) as u64).collect();
    let own_count = counts[one.index()];
    let uneven = Values::<E>::poisoned(own_count as usize);
    let listed = op != HcclReduceOp::HCCL_REDUCE_PROD;
    if listed {
        fine(unsafe {
            let (counts, places) = (counts.as_ptr().cast(), places.as_ptr().cast());
            HcclReduceScatterV(parts.at(), counts, places, uneven.at(), own_count, E::DTYPE, op, comm, stream)
        });
    }
    one.sync();
    assert_eq!(receive.read(), expected, "{op:?}");
    assert_eq!(in_place.read(), expected, "{op:?}");
    assert_eq!(to_root.read(), if one.rank == root { expected } else { untouched });
    let first = one.index() * count;
    assert_eq!(part.read(), wide_sum[first..first + count]);
    if listed {
        let first = places[one.index()] as usize;
        assert_eq!(uneven.read(), wide_sum[first..first + own_count as usize]);
    }
}

/// The operators that move elements.
fn moves<E: Element>(one: &Rank, dtype: HcclDataType, count: usize, root: u32, seed: u64) {
    let size = one.size as usize;
    let Rank { comm, stream, .. } = *one;
    let elements = count as u64;
    let all: Vec<Vec<E>> = (0..size).map(|rank| values(seed, rank, count)).collect();
    let wide: Vec<Vec<E>> = (0..size).map(|rank| values(seed ^ 2, rank, count * size)).collect();
    let own = &all[one.index()];
    let (send, gathered, broadcast) = (Values::of(own), Values::<E>::poisoned(count * size), Values::of(own));
    let (parts, exchanged, scattered) =
        (Values::of(&wide[one.index()]), Values::<E>::poisoned(count * size), Values::<E>::poisoned(count));
    let from_root = if one.rank == root { parts.at() } else { null_mut() };
    unsafe {
        fine(HcclAllGather(send.at(), gathered.at(), elements, dtype, comm, stream));
        fine(HcclBarrier(comm, stream));
        fine(HcclBroadcast(broadcast.at(), elements, dtype, root, comm, stream));
        fine(HcclAlltoAll(parts.at(), elements, dtype, exchanged.at(), elements, dtype, comm, stream));
        fine(HcclScatter(from_root, scattered.at(), elements, dtype, root, comm, stream));
    }
    // What rank i sends to rank j: from nothing to all of a part.
    let sent = |i: usize, j: usize| count * ((i + 2 * j) % 4) / 3;
    let matrix: Vec<u64> = (0..size * size).map(|at| sent(at / size, at % size) as u64).collect();
    let row: Vec<u64> = (0..size).map(|j| sent(one.index(), j) as u64).collect();
    let column: Vec<u64> = (0..size).map(|i| sent(i, one.index()) as u64).collect();
    // Parts begin where those of equal sizes do, received ones in the opposite order.
    let starts: Vec<u64> = (0..size).map(|j| (j * count) as u64).collect();
    let opposite: Vec<u64> = (0..size).map(|i| ((size - 1 - i) * count) as u64).collect();
    let (uneven, packed) = (Values::<E>::poisoned(count * size), Values::<E>::poisoned(count * size));
    let list = |list: &[u64]| list.as_ptr().cast::<c_void>();
    let gaps = Values::<E>::poisoned(count * size);
    let own_column: Vec<u64> = (0..size).map(|i| sent(i, 0) as u64).collect();
    unsafe {
        fine(HcclAlltoAllV(
            parts.at(),
            list(&row),
            list(&starts),
            dtype,
            uneven.at(),
            list(&column),
            list(&opposite),
            dtype,
            comm,
            stream,
        ));
        fine(HcclAlltoAllVC(parts.at(), list(&matrix), dtype, packed.at(), dtype, comm, stream));
        let own_count = own_column[one.index()];
        let (counts, places) = (list(&own_column), list(&opposite));
        fine(HcclAllGatherV(send.at(), own_count, gaps.at(), counts, places, dtype, comm, stream));
    }
    one.sync();
    assert_eq!(gathered.read(), all.concat());
    assert_eq!(broadcast.read(), all[root as usize]);
    let part_of = |rank: usize, part: usize| &wide[rank][part * count..(part + 1) * count];
    let expected: Vec<E> = (0..size).flat_map(|rank| part_of(rank, one.index())).copied().collect();
    assert_eq!(exchanged.read(), expected);
    assert_eq!(scattered.read(), part_of(root as usize, one.index()));

    let empty = Values::<E>::poisoned(count * size).read();
    let (mut expected, mut gathered) = (empty.clone(), empty.clone());
    for i in 0..size {
        let (at, len) = (opposite[i] as usize, column[i] as usize);
        expected[at..at + len].copy_from_slice(&part_of(i, one.index())[..len]);
        let len = own_column[i] as usize;
        gathered[at..at + len].copy_from_slice(&all[i][..len]);
    }
    assert_eq!(uneven.read(), expected);
    assert_eq!(gaps.read(), gathered);
    // A matrix has no places: what a rank sends and receives stands without gaps.
    let before = |i: usize| (0..one.index()).map(|j| sent(i, j)).sum::<usize>();
    let mut expected: Vec<E> = Vec::new();
    for (i, sent) in column.iter().enumerate() {
        expected.extend_from_slice(&wide[i][before(i)..before(i) + *sent as usize]);
    }
    let rest = empty.len() - expected.len();
    expected.extend_from_slice(&empty[..rest]);
    assert_eq!(packed.read(), expected);
}

fn every_reduction<E: Element>(one: &Rank, count: usize, root: u32, seed: u64) {
    for op in OPS {
        if op != HcclReduceOp::HCCL_REDUCE_PROD || E::PRODUCT {
            reduces::<E>(one, op, count, root, seed);
        }
    }
}

/// What a rank does for everything that ranks can do together, once with each type and operation.
pub(crate) fn everything_of(one: &Rank, count: usize, root: u32, seed: u64) {
    every_reduction::<i8>(one, count, root, seed);
    every_reduction::<i16>(one, count, root, seed);
    every_reduction::<i32>(one, count, root, seed);
    every_reduction::<i64>(one, count, root, seed);
    every_reduction::<f16>(one, count, root, seed);
    every_reduction::<bf16>(one, count, root, seed);
    every_reduction::<f32>(one, count, root, seed);
    for number in 0..12 {
        // Bits of the same width stand for those of the type.
        let dtype = HcclDataType(number);
        match number {
            0 | 7 => moves::<i8>(one, dtype, count, root, seed),
            1 | 3 | 8 | 11 => moves::<i16>(one, dtype, count, root, seed),
            2 | 4 | 9 => moves::<i32>(one, dtype, count, root, seed),
            _ => moves::<i64>(one, dtype, count, root, seed),
        }
    }
}

fn everything(size: u32, count: usize, root: u32, seed: u64) {
    world(size, |one| everything_of(one, count, root, seed));
}

#[test]
fn every_operator_type_and_reduction_is_that_of_the_model_for_1_to_8_ranks() {
    let _alone = alone();
    for size in 1..=RANKS {
        everything(size, 13, size / 2, 7 + u64::from(size));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn counts_and_roots_of_any_size(size in 1..=4u32, count in 0..700usize, root in 0..4u32, seed in any::<u64>()) {
        let _alone = alone();
        everything(size, count, root % size, seed | 1);
    }
}

#[test]
fn sums_have_the_same_bits_in_every_run_and_on_every_rank() {
    let _alone = alone();
    let run = || {
        world(5, |one| {
            let (send, receive) = (Values::of(&values::<f32>(3, one.index(), 5000)), Values::<f32>::poisoned(5000));
            let op = HcclReduceOp::HCCL_REDUCE_SUM;
            fine(unsafe { HcclAllReduce(send.at(), receive.at(), 5000, f32::DTYPE, op, one.comm, one.stream) });
            one.sync();
            receive.read().into_iter().map(f32::to_bits).collect::<Vec<_>>()
        })
    };
    let first = run();
    assert!(first.iter().all(|rank| *rank == first[0]));
    for _ in 0..3 {
        assert_eq!(run(), first);
    }
}
