//! How communicators begin and end.

use crate::*;
use ascend_sys::bindings::{HcclCommConfig, HcclCommConfigInfo, HcclCommConfigV11, HcclConfig, HcclConfigValue};
use std::ffi::CStr;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const PARA: HcclResult = HcclResult::HCCL_E_PARA;

fn name_of(comm: HcclComm) -> String {
    let mut name = [1; 128];
    fine(unsafe { HcclGetCommName(comm, name.as_mut_ptr()) });
    unsafe { CStr::from_ptr(name.as_ptr()) }.to_str().unwrap().to_owned()
}

/// Bytes of a configuration of a version, with a name and the later layout's limit.
pub(crate) fn config(version: u32, bytes: usize, name: &str, seconds: i32) -> Box<HcclCommConfigV11> {
    let mut config: Box<HcclCommConfigV11> = Box::new(unsafe { std::mem::zeroed() });
    let head =
        HcclCommConfigInfo { configSize: bytes, magicWord: sys::HCCL_COMM_CONFIG_MAGIC_WORD, version, reserved: 0 };
    unsafe { config.reserved.as_mut_ptr().cast::<HcclCommConfigInfo>().write_unaligned(head) };
    for (to, byte) in config.hcclCommName.iter_mut().zip(name.bytes()) {
        *to = byte as _;
    }
    config.hcclExecTimeOut = seconds;
    config
}

/// A rank that is waited for too long may be one of the same thread, whose turn never comes.
#[test]
fn a_rank_that_does_not_come_in_time_is_named() {
    let _alone = alone();
    let (info, entered) = (root_info(), Barrier::new(2));
    let (over, is_over) = std::sync::mpsc::channel::<()>();
    let rank = |rank: u32, wait: &dyn Fn()| {
        let context = enter(rank);
        // The limit counts from here on.
        entered.wait();
        let config = config(11, size_of::<HcclCommConfigV11>(), "", 3);
        let (at, mut comm) = ((&raw const *config).cast(), null_mut());
        fine(unsafe { HcclCommInitRootInfoConfig(2, &info, rank, at, &mut comm) });
        let one = Rank { rank, size: 2, comm, stream: stream(), context };
        if rank == 0 {
            fine(unsafe { HcclBarrier(one.comm, one.stream) });
            one.fails(&["has waited for 3 s", "for rank 1; if ranks of one process share a thread"]);
        }
        wait();
        fine(unsafe { HcclCommDestroy(one.comm) });
        destroy(one.stream);
        ok(unsafe { aclrtDestroyContext(one.context) });
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        // Dropped behind the first rank's calls, also where an assertion of it fails.
        scope.spawn(move || rank(0, &|| over.send(()).unwrap_or_default()));
        // An error is the end of the first rank, too.
        scope.spawn(move || rank(1, &|| is_over.recv().unwrap_or_default()));
    });
}

#[test]
fn ranks_have_numbers_a_size_and_a_name_in_common() {
    let _alone = alone();
    let names = world(3, |one| {
        let (mut rank, mut size, mut error) = (9, 9, PARA);
        unsafe {
            fine(HcclGetRankId(one.comm, &mut rank));
            fine(HcclGetRankSize(one.comm, &mut size));
            fine(HcclGetCommAsyncError(one.comm, &mut error));
        }
        assert_eq!((rank, size, error), (one.rank, 3, HcclResult::HCCL_SUCCESS));
        name_of(one.comm)
    });
    assert!(names.iter().all(|name| *name == names[0] && !name.is_empty()));
}

#[test]
fn all_devices_of_a_process_become_a_communicator_at_once() {
    let _alone = alone();
    let mut devices = [2, 0, 1];
    let mut comms = [null_mut(); 3];
    fine(unsafe { HcclCommInitAll(3, devices.as_mut_ptr(), comms.as_mut_ptr()) });
    for (expected, comm) in comms.into_iter().enumerate() {
        let mut rank = 9;
        fine(unsafe { HcclGetRankId(comm, &mut rank) });
        assert_eq!(rank as usize, expected);
    }
    // A rank's stream is one of its device.
    let context = enter(2);
    let stream = stream();
    refused(unsafe { HcclBarrier(comms[1], stream) }, PARA, &["device 2", "rank 1", "device 0"]);
    destroy(stream);
    ok(unsafe { aclrtDestroyContext(context) });
    let live = ascend_emu::live().communicators;
    assert_eq!(live, 3);
    for comm in comms {
        fine(unsafe { HcclCommDestroy(comm) });
        refused(unsafe { HcclCommDestroy(comm) }, PARA, &["already destroyed"]);
    }
    fine(unsafe { HcclCommDestroy(null_mut()) });
    // What cannot begin leaves nothing.
    let mut none = [null_mut(); 3];
    for (mut devices, part) in [([0, 1, 0], "device 0 stands twice"), ([0, 8, 1], "device 8")] {
        refused(unsafe { HcclCommInitAll(3, devices.as_mut_ptr(), none.as_mut_ptr()) }, PARA, &[part]);
    }
    refused(unsafe { HcclCommInitAll(0, devices.as_mut_ptr(), none.as_mut_ptr()) }, PARA, &["given 0"]);
    assert!(none.iter().all(|comm| comm.is_null()) && ascend_emu::live().communicators == 0);
}

#[test]
fn root_information_is_good_for_one_communicator() {
    let _alone = alone();
    let mut info = root_info();
    let mut comm = null_mut();
    let mut join = |info: &HcclRootInfo, size, rank| unsafe { HcclCommInitRootInfo(size, info, rank, &mut comm) };
    refused(join(&info, 9, 0), PARA, &["given 9", "1 to 8"]);
    refused(join(&info, 2, 2), PARA, &["rank: given 2"]);
    fine(join(&info, 1, 0));
    refused(join(&info, 1, 0), PARA, &["has been used", "HcclGetRootInfo"]);
    // The random bytes are behind the mark and the numbers of process and communicator. What has others is of another
    // process, which is asked: it does not know them, and there is no socket once the communicator has ended.
    info.internal[20] = info.internal[20].wrapping_add(1);
    refused(join(&info, 1, 0), HcclResult::HCCL_E_INTERNAL, &["has closed the connection"]);
    fine(unsafe { HcclCommDestroy(comm) });
    let mut join = |info: &HcclRootInfo, size, rank| unsafe { HcclCommInitRootInfo(size, info, rank, &mut comm) };
    refused(join(&info, 1, 0), PARA, &["has been used, or the process has ended"]);
    let mut other = info;
    // Without a socket nobody can be asked.
    (other.internal[36], other.internal[37]) = (0, 0);
    refused(join(&other, 1, 0), HcclResult::HCCL_E_NOT_SUPPORT, &["could not open a socket"]);
    (other.internal[36], other.internal[37]) = (!0, !0);
    refused(join(&other, 1, 0), PARA, &["not what HcclGetRootInfo"]);
    info.internal[0] = 0;
    refused(join(&info, 1, 0), PARA, &["not what HcclGetRootInfo"]);
}

#[test]
fn ranks_that_disagree_about_their_communicator_all_fail() {
    let _alone = alone();
    // Size, rank and device of the second one, and what both are told.
    for (size, rank, device, part) in
        [(3, 1, 1, "nRanks"), (2, 0, 1, "rank 0 has joined"), (2, 1, 0, "device 0 has a rank")]
    {
        let info = root_info();
        let join = |size, rank, device| {
            let context = enter(device);
            let mut comm = null_mut();
            refused(unsafe { HcclCommInitRootInfo(size, &info, rank, &mut comm) }, PARA, &[part]);
            ok(unsafe { aclrtDestroyContext(context) });
        };
        std::thread::scope(|scope| {
            scope.spawn(|| join(2, 0, 0));
            // Which one comes first is told the same.
            std::thread::sleep(Duration::from_millis(200));
            scope.spawn(|| join(size, rank, device));
        });
    }
}

#[test]
fn both_layouts_of_a_configuration_are_read_by_version() {
    let _alone = alone();
    let old = (5, size_of::<HcclCommConfig>());
    let new = (11, size_of::<HcclCommConfigV11>());
    for (version, bytes) in [old, new] {
        let (config, info) = (config(version, bytes, "heads", -1), root_info());
        let mut comm = null_mut();
        let at = (&raw const *config).cast();
        fine(unsafe { HcclCommInitRootInfoConfig(1, &info, 0, at, &mut comm) });
        assert_eq!(name_of(comm), "heads");
        fine(unsafe { HcclCommDestroy(comm) });
    }
    // A rank that does not come is named when the limit of the later layout is over.
    let (config, info) = (config(new.0, new.1, "", 1), root_info());
    let mut comm = null_mut();
    let begun = Instant::now();
    let result = unsafe { HcclCommInitRootInfoConfig(2, &info, 0, (&raw const *config).cast(), &mut comm) };
    refused(result, HcclResult::HCCL_E_TIMEOUT, &["rank 1 has not joined in 1 s", "share a thread, give each its own"]);
    assert!(begun.elapsed() < Duration::from_secs(5));
    let blank: HcclCommConfig = unsafe { std::mem::zeroed() };
    let result = unsafe { HcclCommInitRootInfoConfig(1, &info, 0, &blank, &mut comm) };
    refused(result, PARA, &["HcclCommConfigInit"]);
    assert!(comm.is_null());
}

#[test]
fn settings_of_the_process_are_kept_and_results_have_texts() {
    let _alone = alone();
    let deterministic = HcclConfig::HCCL_DETERMINISTIC;
    let set = |value| unsafe { HcclSetConfig(deterministic, HcclConfigValue { value }) };
    fine(set(1));
    let mut read = HcclConfigValue { value: 7 };
    fine(unsafe { HcclGetConfig(deterministic, &mut read) });
    assert_eq!(unsafe { read.value }, 1);
    refused(set(3), PARA, &["given 3"]);
    let unknown = unsafe { HcclSetConfig(HcclConfig(7), HcclConfigValue { value: 1 }) };
    refused(unknown, HcclResult::HCCL_E_NOT_SUPPORT, &["given 7"]);
    fine(set(0));
    for code in (0..30).chain([u32::MAX]) {
        let text = unsafe { CStr::from_ptr(HcclGetErrorString(HcclResult(code))) };
        assert!(!text.is_empty());
    }
    assert_eq!(unsafe { HcclGetCommConfigCapability() }, 12);
}
