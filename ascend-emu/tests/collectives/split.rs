//! Communicators of some ranks of another one.

use crate::*;
use ascend_sys::bindings::{HcclCommConfig, HcclCommConfigInfo};
use proptest::prelude::*;
use std::ffi::CStr;

const PARA: HcclResult = HcclResult::HCCL_E_PARA;

pub(crate) fn config() -> HcclCommConfig {
    let mut config: HcclCommConfig = unsafe { std::mem::zeroed() };
    let head = HcclCommConfigInfo {
        configSize: size_of::<HcclCommConfig>(),
        magicWord: sys::HCCL_COMM_CONFIG_MAGIC_WORD,
        version: sys::HCCL_COMM_CONFIG_VERSION,
        reserved: 0,
    };
    unsafe { config.reserved.as_mut_ptr().cast::<HcclCommConfigInfo>().write_unaligned(head) };
    config
}

/// A rank's call, whose communicator is null where it fails.
pub(crate) fn split(one: &Rank, ranks: &[u32], number: u64, index: u32) -> (HcclResult, HcclComm) {
    let (mut parent, mut ranks, mut comm) = (one.comm, ranks.to_vec(), null_mut());
    let count = ranks.len() as u32;
    let result = unsafe {
        HcclCreateSubCommConfig(&mut parent, count, ranks.as_mut_ptr(), number, index, &mut config(), &mut comm)
    };
    (result, comm)
}

/// The sum of a number over the ranks of a communicator.
pub(crate) fn sum(comm: HcclComm, stream: aclrtStream, own: i32) -> i32 {
    let (memory, int) = (Memory { at: upload(&[own]) }, sys::HcclDataType::HCCL_DATA_TYPE_INT32);
    let at = memory.at;
    fine(unsafe { HcclAllReduce(at, at, 1, int, sys::HcclReduceOp::HCCL_REDUCE_SUM, comm, stream) });
    ok(unsafe { aclrtSynchronizeStream(stream) });
    download(at, 1)[0]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn each_part_of_the_ranks_has_its_own_sums(colours in prop::collection::vec(0..3u64, 2..=RANKS as usize)) {
        let _alone = alone();
        world(colours.len() as u32, |one| {
            let colour = colours[one.index()];
            let of_colour = |rank: &u32| colours[*rank as usize] == colour;
            let ranks: Vec<u32> = (0..one.size).filter(of_colour).collect();
            let index = ranks.iter().position(|rank| *rank == one.rank).unwrap() as u32;
            let (result, comm) = split(one, &ranks, colour, index);
            fine(result);
            let (mut rank, mut size, mut name) = (9, 9, [0; 128]);
            unsafe {
                fine(HcclGetRankId(comm, &mut rank));
                fine(HcclGetRankSize(comm, &mut size));
                fine(HcclGetCommName(comm, name.as_mut_ptr()));
            }
            assert_eq!((rank, size as usize), (index, ranks.len()));
            let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_str().unwrap();
            assert!(name.ends_with(&format!("_sub_{colour}")), "{name}");
            let expected: u32 = ranks.iter().map(|rank| 1 << rank).sum();
            assert_eq!(sum(comm, one.stream, 1 << one.rank), expected as i32);
            // The ranks of the parent go on with each other.
            assert_eq!(sum(one.comm, one.stream, 1), one.size as i32);
            fine(unsafe { HcclCommDestroy(comm) });
        });
    }
}

#[test]
fn parts_that_are_none_are_refused_and_leave_everything_as_it_was() {
    let _alone = alone();
    world(3, |one| {
        let me = one.rank;
        for (ranks, index, part) in [
            (&[0, 1, 3][..], me, "0 to 2"),
            (&[2, 1, 0], 2 - me, "rising order"),
            (&[0, 1, 2, 2], me, "given 4"),
            (&[0, 1, 1], me, "each once"),
            (&[], 0, "rankIds: given []"),
            (&[0, 1, 2], (me + 1) % 3, "the index of rank"),
            (&[0, 1, 2], 7, "subCommRankId: given 7"),
        ] {
            refused(split(one, ranks, 1, index).0, PARA, &[part]);
        }
        if me == 2 {
            refused(split(one, &[0, 1], 1, 0).0, PARA, &["rank 2 is not in rankIds"]);
        }
        // A rank that is not in it says so.
        let (mut parent, mut comm) = (one.comm, null_mut());
        let mut none = |index| unsafe {
            HcclCreateSubCommConfig(&mut parent, 0, null_mut(), u64::from(u32::MAX), index, &mut config(), &mut comm)
        };
        fine(none(u32::MAX));
        refused(none(0), HcclResult::HCCL_E_PTR, &["rankIds"]);
        assert!(comm.is_null());
        // The first one to ask decides what the number is.
        let (result, whole) = split(one, &[0, 1, 2], 5, me);
        fine(result);
        refused(split(one, &[0, 1, 2], 5, me).0, PARA, &["has its part already"]);
        assert_eq!(sum(whole, one.stream, 1), 3);
        if me < 2 {
            refused(split(one, &[0, 1], 5, me).0, PARA, &["[0, 1, 2] by a rank that came before", "another subCommId"]);
        }
        let within = Rank { comm: whole, ..*one };
        refused(split(&within, &[0, 1, 2], 6, me).0, HcclResult::HCCL_E_NOT_SUPPORT, &["itself"]);
        assert_eq!(sum(one.comm, one.stream, 1), 3);
        fine(unsafe { HcclCommDestroy(whole) });
        // The number is free when the last rank has destroyed it.
        assert_eq!(sum(one.comm, one.stream, 1), 3);
        let (result, again) = split(one, &[0, 1, 2], 5, me);
        fine(result);
        // A failure of the part is none of the whole.
        let other = if me == 0 { 1 } else { 2 };
        let (memory, byte) = (Memory::of(&[0; 8]), sys::HcclDataType::HCCL_DATA_TYPE_UINT8);
        let result = unsafe { HcclBroadcast(memory.at, other, byte, 0, again, one.stream) };
        fails_somewhere(one, result, &["_sub_5", "count"]);
        assert_eq!(sum(one.comm, one.stream, 1), 3);
        fine(unsafe { HcclCommDestroy(again) });
    });
}

#[test]
fn ranks_that_left_before_they_took_their_part_are_named() {
    let _alone = alone();
    for before in [true, false] {
        let begun = std::time::Instant::now();
        let gone = std::sync::atomic::AtomicBool::new(false);
        world(2, |one| {
            let is_gone = || gone.load(std::sync::atomic::Ordering::Acquire);
            if one.rank == 1 {
                let pause = if before { 0 } else { 300 };
                std::thread::sleep(std::time::Duration::from_millis(pause));
                one.destroy_comm();
                return gone.store(true, std::sync::atomic::Ordering::Release);
            }
            while before && !is_gone() {
                std::thread::yield_now();
            }
            let (result, part) = split(one, &[0, 1], 3, 0);
            fine(result);
            fails_somewhere(one, unsafe { HcclBarrier(part, one.stream) }, &["rank 1", "was destroyed"]);
            fine(unsafe { HcclCommDestroy(part) });
        });
        assert!(begun.elapsed() < std::time::Duration::from_secs(8), "{:?}", begun.elapsed());
    }
}
