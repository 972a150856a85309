//! Ranks of several processes: what they get, what all are told when one differs, leaves or never comes, and that
//! strangers at the socket disturb nobody.

use crate::results::everything_of;
use crate::split::{config, split, sum};
use crate::team::{Team, awaited, socket_of, sockets};
use crate::*;
use ascend_sys::bindings::{HcclDataType, HcclReduceOp, HcclSendRecvItem, HcclSendRecvType};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

const F32: HcclDataType = HcclDataType::HCCL_DATA_TYPE_FP32;
const SUM: HcclReduceOp = HcclReduceOp::HCCL_REDUCE_SUM;

/// Longest time until every rank knows of what another one has done.
pub(crate) const SOON: Duration = Duration::from_secs(8);

pub(crate) fn all_reduce(one: &Rank, count: u64, memory: &Memory) -> HcclResult {
    unsafe { HcclAllReduce(memory.at, memory.at, count, F32, SUM, one.comm, one.stream) }
}

fn every_operator(test: &str, processes: u32, sizes: &[u32]) {
    let _alone = alone();
    let team = Team::new(test, processes);
    for (&size, seed) in sizes.iter().zip(1..) {
        for count in [1, 37] {
            team.world(size, |one| everything_of(one, count, size / 2, seed));
        }
    }
    team.end(&[]);
}

#[test]
fn every_operator_type_and_reduction_over_two_processes() {
    every_operator("processes::every_operator_type_and_reduction_over_two_processes", 2, &[2, 3, 4, 8]);
}

#[test]
fn every_operator_type_and_reduction_over_four_processes() {
    every_operator("processes::every_operator_type_and_reduction_over_four_processes", 4, &[4, 5]);
}

#[test]
fn messages_parts_large_buffers_and_captured_calls() {
    let _alone = alone();
    let team = Team::new("processes::messages_parts_large_buffers_and_captured_calls", 3);
    team.world(5, |one| {
        let Rank { rank, size, comm, stream, .. } = *one;
        // More than a socket holds.
        let count = (3 << 20) / 4 + 1;
        let (own, other) = (Memory { at: upload(&vec![rank as f32; count]) }, Memory::new(4 * count));
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        let item = |sends: bool, buf, remote| {
            let kind = if sends { HcclSendRecvType::HCCL_SEND } else { HcclSendRecvType::HCCL_RECV };
            HcclSendRecvItem { sendRecvType: kind, buf, count: count as u64, dataType: F32, remoteRank: remote }
        };
        let mut items = [item(true, own.at, next), item(false, other.at, previous)];
        for _ in 0..3 {
            fine(unsafe { HcclBatchSendRecv(items.as_mut_ptr(), 2, comm, stream) });
        }
        // Beside the stream with collectives, another one has messages between ranks that are no neighbours of the
        // ring.
        let (beside, aside) = (bench::stream(), Memory { at: upload(&[rank as i32; 9]) });
        let int = HcclDataType::HCCL_DATA_TYPE_INT32;
        let partner = 5 - rank.clamp(1, 4);
        fine(all_reduce(one, count as u64, &own));
        match rank {
            1 | 3 => fine(unsafe { HcclSend(aside.at, 9, int, partner, comm, beside) }),
            2 | 4 => fine(unsafe { HcclRecv(aside.at, 9, int, partner, comm, beside) }),
            _ => {}
        }
        ok(unsafe { aclrtSynchronizeStream(beside) });
        one.sync();
        destroy(beside);
        let sender = if rank == 2 || rank == 4 { partner } else { rank };
        assert_eq!(download::<i32>(aside.at, 9), [sender as i32; 9]);
        assert_eq!(download::<f32>(other.at, count), vec![previous as f32; count]);
        assert_eq!(download::<f32>(own.at, count), vec![10.0; count]);

        // Parts of the ranks, which go over processes or stay in one.
        let odd: Vec<u32> = (0..size).filter(|other| other % 2 == rank % 2).collect();
        let (result, part) = split(one, &odd, u64::from(rank % 2), rank / 2);
        fine(result);
        assert_eq!(sum(part, stream, 1 << rank), if rank % 2 == 0 { 0b10101 } else { 0b01010 });
        fine(unsafe { HcclCommDestroy(part) });
        refused(split(one, &odd, 9, 7).0, HcclResult::HCCL_E_PARA, &["subCommRankId: given 7"]);

        // Replays count as calls.
        let memory = Memory { at: upload(&[1f32; 16]) };
        let mut graph = null_mut();
        ok(unsafe { aclmdlRICaptureBegin(stream, RELAXED) });
        fine(all_reduce(one, 16, &memory));
        ok(unsafe { aclmdlRICaptureEnd(stream, &mut graph) });
        for _ in 0..2 {
            ok(unsafe { aclmdlRIExecuteAsync(graph, stream) });
            fine(unsafe { HcclBarrier(comm, stream) });
        }
        one.sync();
        assert_eq!(download::<f32>(memory.at, 16), [25.0; 16]);
        ok(unsafe { aclmdlRIDestroy(graph) });
        let mut error = HcclResult::HCCL_E_PARA;
        fine(unsafe { HcclGetCommAsyncError(comm, &mut error) });
        assert_eq!(error, HcclResult::HCCL_SUCCESS);
    });
    team.end(&[]);
}

#[test]
fn a_field_that_differs_is_named_on_every_rank() {
    let _alone = alone();
    let team = Team::new("processes::a_field_that_differs_is_named_on_every_rank", 2);
    for (differing, other) in [(1, 0), (3, 2)] {
        let begun = Instant::now();
        team.world(4, |one| {
            let memory = Memory::new(64);
            fine(unsafe { HcclBarrier(one.comm, one.stream) });
            one.sync();
            let count = if one.rank == differing { 7 } else { 8 };
            fails_somewhere(one, all_reduce(one, count, &memory), &["count", &format!("7 on rank {differing}")]);
            let again = unsafe { HcclBarrier(one.comm, one.stream) };
            refused(again, HcclResult::HCCL_E_INTERNAL, &["takes no more calls", "count"]);
            let mut error = HcclResult::HCCL_SUCCESS;
            fine(unsafe { HcclGetCommAsyncError(one.comm, &mut error) });
            assert_eq!((error, other < 4), (HcclResult::HCCL_E_REMOTE, true));
        });
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    }
    // Another order of messages: each waits for the other.
    team.world(2, |one| {
        let memory = Memory::new(64);
        fine(unsafe { HcclSend(memory.at, 4, F32, 1 - one.rank, one.comm, one.stream) });
        one.fails(&["wait for each other"]);
    });
    team.end(&[]);
}

#[test]
fn a_rank_that_ends_its_part_is_named() {
    let _alone = alone();
    let team = Team::new("processes::a_rank_that_ends_its_part_is_named", 2);
    // By the rank of process 0, then by that of process 1.
    for leaver in 0..2 {
        // Device 0 is not reset while the bench has a context on it.
        for how in ["destroyed", "aborted", "reset"].into_iter().take(2 + leaver as usize) {
            let begun = Instant::now();
            team.world(2, |one| {
                let memory = Memory::new(64);
                if one.rank != leaver {
                    if how == "aborted" {
                        std::thread::sleep(Duration::from_millis(600));
                    }
                    let part = if how == "aborted" { "was aborted" } else { "cannot come" };
                    return fails_somewhere(one, all_reduce(one, 8, &memory), &[part, &format!("rank {leaver}"), how]);
                }
                match how {
                    "destroyed" => one.destroy_comm(),
                    "aborted" => {
                        fine(all_reduce(one, 8, &memory));
                        std::thread::sleep(Duration::from_millis(200));
                        ok(unsafe { aclrtStreamAbort(one.stream) });
                    }
                    _ => {
                        destroy(std::mem::replace(&mut one.stream, null_mut()));
                        drop(memory);
                        ok(unsafe { aclrtDestroyContext(one.context) });
                        ok(unsafe { aclrtSetDevice(one.rank as i32) });
                        ok(unsafe { aclrtResetDevice(one.rank as i32) });
                        one.context = enter(one.rank);
                    }
                }
            });
            assert!(begun.elapsed() < SOON, "{how}: {:?}", begun.elapsed());
        }
    }
    team.end(&[]);
}

#[test]
fn a_process_that_never_comes_is_named_and_ranks_that_disagree_all_fail() {
    let alone = alone();
    let team = Team::new("processes::a_process_that_never_comes_is_named_and_ranks_that_disagree_all_fail", 2);
    let join = |info: &HcclRootInfo, size, rank, device| {
        let (context, mut comm, settings) = (enter(device), null_mut(), config());
        // One second, in the layout that has a limit.
        let layout = crate::communicators::config(11, 2248, "late", 1);
        let result = unsafe {
            match size {
                3 => HcclCommInitRootInfoConfig(size, info, rank, (&raw const *layout).cast(), &mut comm),
                _ => HcclCommInitRootInfoConfig(size, info, rank, &settings, &mut comm),
            }
        };
        ok(unsafe { aclrtDestroyContext(context) });
        alone.bench.as_ref().unwrap().enter();
        (result, comm)
    };
    let begun = Instant::now();
    let (result, _) = join(&team.root_info(), 3, team.process, team.process);
    refused(result, HcclResult::HCCL_E_TIMEOUT, &["rank 2 has not joined in 1 s"]);
    assert!(begun.elapsed() < SOON);
    // Two ranks on one device, and one rank twice.
    for (rank, device, part) in [(team.process, 0, "device 0 has a rank"), (0, team.process, "rank 0 has joined")] {
        let (result, comm) = join(&team.root_info(), 2, rank, device);
        refused(result, HcclResult::HCCL_E_PARA, &[part]);
        assert!(comm.is_null());
    }
    // What has been used is used for other processes, too.
    let info = team.root_info();
    let own = (team.process == 0).then(|| join(&info, 1, 0, 0));
    team.tell((team.process == 0).then(|| vec![1]));
    if team.process == 1 {
        refused(join(&info, 1, 0, 0).0, HcclResult::HCCL_E_PARA, &["has been used"]);
    }
    if let Some((result, comm)) = own {
        fine(result);
        fine(unsafe { HcclCommDestroy(comm) });
    }
    team.end(&[]);
}

#[test]
fn strangers_at_the_socket_disturb_nobody() {
    let _alone = alone();
    let team = Team::new("processes::strangers_at_the_socket_disturb_nobody", 2);
    let info = team.root_info();
    let path = socket_of(&info);
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((path.parent(), mode(&sockets())), (Some(&*sockets()), 0o700));
    let head = |words: &[u64]| -> Vec<u8> { words.iter().flat_map(|word| word.to_le_bytes()).collect() };
    let mark = u64::from_le_bytes(*b"ASCHUB\0\x01");
    let token: Vec<u8> = info.internal[20..36].iter().map(|byte| *byte as u8).collect();
    let known = |verb: u64, numbers: &[u64]| {
        let words = [&[mark, verb, numbers.len() as u64, 1], numbers, &[16]].concat();
        [head(&words), token.clone()].concat()
    };
    let strange: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n".to_vec(),
        vec![0xff; 500],
        // Another version; no such message; more numbers, strings and bytes than a message has.
        head(&[mark + (1 << 56), 1, 0, 0]),
        head(&[mark, 77, 0, 0]),
        head(&[mark, 1, u64::MAX, 0]),
        head(&[mark, 1, 0, u64::MAX / 8]),
        head(&[mark, 1, 0, 1, 1 << 50]),
        head(&[mark, 1, 0, 1, u64::MAX]),
        // Another token, and none.
        [head(&[mark, 1, 0, 1, 16]), vec![7; 16]].concat(),
        head(&[mark, 1, 0, 0]),
        // The token, and ranks, communicators and calls that there are not.
        known(1, &[u64::MAX, 0, 0, 0]),
        known(1, &[2]),
        known(2, &[5, 0, 0, 0, 0]),
        known(3, &[9, 0]),
        known(4, &[0, 0, 0]),
        known(8, &[]),
    ];
    let answer = |bytes: &[u8]| {
        let mut stranger = UnixStream::connect(&path).unwrap();
        stranger.set_read_timeout(Some(SOON)).unwrap();
        // An end that is closed already is an answer as well.
        let _ = stranger.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stranger.read_to_end(&mut answer);
        answer
    };
    if team.process == 1 {
        for bytes in &strange {
            assert_eq!(answer(bytes), [0u8; 0], "{bytes:?}");
        }
    }
    team.tell((team.process == 0).then(Vec::new));
    let half = UnixStream::connect(&path).unwrap();
    (&half).write_all(&head(&[mark, 1, 4])).unwrap();
    ranks(2, team.ranks_of(team.process, 2), &info, |one| {
        let memory = Memory { at: upload(&[1f32; 8]) };
        for bytes in strange.iter().filter(|_| one.rank == 1) {
            answer(bytes);
            fine(all_reduce(one, 8, &memory));
        }
        for _ in strange.iter().filter(|_| one.rank == 0) {
            fine(all_reduce(one, 8, &memory));
        }
        one.sync();
        assert_eq!(download::<f32>(memory.at, 8), [(1 << strange.len()) as f32; 8]);
    });
    drop(half);
    // Folders that others reach into are refused, on both sides.
    if team.process == 1 {
        let open = std::env::temp_dir().join("open");
        let within = open.join(sockets().file_name().unwrap());
        std::fs::create_dir_all(&within).unwrap();
        std::fs::set_permissions(&within, PermissionsExt::from_mode(0o755)).unwrap();
        let mut comm = null_mut();
        let result = unsafe { HcclCommInitRootInfo(2, &moved(info, &within.join("hub-1")), 1, &mut comm) };
        refused(result, HcclResult::HCCL_E_INTERNAL, &["mode 0700"]);
        std::fs::remove_dir_all(open).unwrap();
    }
    team.end(&[]);
}

/// Root information with another path.
fn moved(mut info: HcclRootInfo, path: &Path) -> HcclRootInfo {
    let bytes = path.to_str().unwrap().as_bytes();
    let len = (bytes.len() as u16).to_le_bytes();
    for (to, byte) in info.internal[36..].iter_mut().zip(len.iter().chain(bytes)) {
        *to = *byte as _;
    }
    info
}

/// Root information as that of another process with a socket here.
fn foreign(path: &Path) -> HcclRootInfo {
    let info = root_info();
    let mut comm = null_mut();
    // What is used has no socket any more.
    fine(unsafe { HcclCommInitRootInfo(1, &info, 0, &mut comm) });
    fine(unsafe { HcclCommDestroy(comm) });
    let mut other = moved(info, path);
    for byte in &mut other.internal[20..36] {
        *byte = !*byte;
    }
    other
}

/// Makes a file two minutes old.
fn age(path: &Path) {
    let old = std::process::Command::new("touch").args(["-h", "-d", "2 minutes ago"]).arg(path).status().unwrap();
    assert!(old.success());
}

#[test]
fn root_information_removes_nothing_but_sockets_that_nobody_listens_to() {
    let _alone = alone();
    let _ = foreign(Path::new("none"));
    let private = std::env::temp_dir().join("private");
    std::fs::create_dir(&private).unwrap();
    std::fs::set_permissions(&private, PermissionsExt::from_mode(0o700)).unwrap();
    let within = private.join(sockets().file_name().unwrap());
    std::fs::create_dir(&within).unwrap();
    std::fs::set_permissions(&within, PermissionsExt::from_mode(0o700)).unwrap();
    let here = format!("hub-victim-{}.txt", std::process::id());
    let socket = sockets().join("other");
    drop(UnixListener::bind(&socket).unwrap());
    let files = [
        Path::new(&here).to_owned(),
        std::env::current_dir().unwrap().join(&here),
        private.join("hub-1"),
        within.join("hub-1"),
        within.join("victim"),
        sockets().join("hub-1"),
        sockets().join("victim"),
    ];
    for file in &files {
        std::fs::write(file, "kept").unwrap();
    }
    for path in files.iter().chain([&socket]) {
        age(path);
    }
    for path in files.iter().chain([&socket]) {
        let (info, mut comm) = (foreign(path), null_mut());
        let part = match files.iter().position(|file| file == path) {
            Some(3 | 5) => "the process has ended",
            _ => "rootInfo is not what HcclGetRootInfo has written",
        };
        let result = unsafe { HcclCommInitRootInfo(2, &info, 1, &mut comm) };
        refused(result, HcclResult::HCCL_E_PARA, &[part]);
        assert!(path.exists(), "{path:?}");
    }
    // A socket of the emulation's own goes, by its root information and by its age.
    for by_age in [false, true] {
        let left = sockets().join("hub-left");
        drop(UnixListener::bind(&left).unwrap());
        let info = foreign(&left);
        assert!(left.exists());
        match by_age {
            true => {
                age(&left);
                let _ = foreign(&left);
            }
            false => {
                let result = unsafe { HcclCommInitRootInfo(2, &info, 1, &mut null_mut()) };
                refused(result, HcclResult::HCCL_E_PARA, &["the process has ended"]);
            }
        }
        assert!(!left.exists());
    }
    std::fs::remove_file(here).unwrap();
}

#[test]
fn a_process_that_lets_nobody_in_holds_up_nobody() {
    let _alone = alone();
    let _ = foreign(Path::new("none"));
    let path = sockets().join("hub-full");
    let full = UnixListener::bind(&path).unwrap();
    // SAFETY: the descriptor is open; a place is left for one connection.
    assert_eq!(unsafe { libc::listen(full.as_raw_fd(), 0) }, 0);
    let _waits = UnixStream::connect(&path).unwrap();
    age(&path);
    let begun = Instant::now();
    let info = foreign(&path);
    assert!(begun.elapsed() < SOON && path.exists(), "{:?}", begun.elapsed());
    let settings = crate::communicators::config(11, 2248, "full", 1);
    let result = unsafe { HcclCommInitRootInfoConfig(2, &info, 1, (&raw const *settings).cast(), &mut null_mut()) };
    refused(result, HcclResult::HCCL_E_TIMEOUT, &["has not answered"]);
    assert!(begun.elapsed() < 3 * SOON, "{:?}", begun.elapsed());
}

/// Reads a message: its head, numbers, and strings behind their lengths.
fn whole_message(from: &mut UnixStream) {
    let mut word = || {
        let mut word = [0; 8];
        from.read_exact(&mut word).unwrap();
        u64::from_le_bytes(word)
    };
    let (_, _, numbers, strings) = (word(), word(), word(), word());
    for _ in 0..numbers {
        word();
    }
    for _ in 0..strings {
        let mut len = [0; 8];
        from.read_exact(&mut len).unwrap();
        // The largest length is that of a string that is the one before.
        let len = u64::from_le_bytes(len).wrapping_add(1).saturating_sub(1) as usize;
        from.read_exact(&mut vec![0; len]).unwrap();
    }
}

#[test]
fn an_answer_that_comes_late_is_not_that_to_the_next_question() {
    let _alone = alone();
    let _ = foreign(Path::new("none"));
    let path = sockets().join("hub-late");
    let listener = UnixListener::bind(&path).unwrap();
    let late = std::thread::spawn(move || {
        let (mut rank, _) = listener.accept().unwrap();
        let answer = |numbers: &[u64], text: &[u8]| -> Vec<u8> {
            let mark = u64::from_le_bytes(*b"ASCHUB\0\x01");
            let words = [&[mark, 8, numbers.len() as u64, 1], numbers, &[text.len() as u64]].concat();
            let words = words.iter().flat_map(|word| word.to_le_bytes());
            words.chain(text.iter().copied()).collect()
        };
        whole_message(&mut rank);
        rank.write_all(&answer(&[0, 2, 1, 0], b"late")).unwrap();
        whole_message(&mut rank);
        // The rank closes the connection when it has waited long enough, and asks nothing more.
        assert_eq!(rank.read(&mut [0]).unwrap_or(0), 0);
        let _ = rank.write_all(&answer(&[], b""));
    });
    let (info, mut comm) = (foreign(&path), null_mut());
    let (context, stream) = (enter(1), bench::stream());
    fine(unsafe { HcclCommInitRootInfo(2, &info, 1, &mut comm) });
    for _ in 0..2 {
        let result = unsafe { HcclBarrier(comm, stream) };
        refused(result, HcclResult::HCCL_E_INTERNAL, &["communicator late", "of rank 0", "does not answer"]);
    }
    late.join().unwrap();
    refused(unsafe { HcclBarrier(comm, stream) }, HcclResult::HCCL_E_INTERNAL, &["does not answer"]);
    fine(unsafe { HcclCommDestroy(comm) });
    destroy(stream);
    ok(unsafe { aclrtDestroyContext(context) });
}

#[test]
fn answers_arrive_though_the_root_s_process_ends_at_once() {
    let _alone = alone();
    let team = Team::new("processes::answers_arrive_though_the_root_s_process_ends_at_once", 3);
    let info = team.root_info();
    let count = 1 << 20;
    let values = ranks(3, team.ranks_of(team.process, 3), &info, |one| {
        let memory = Memory { at: upload(&vec![1f32; count]) };
        fine(all_reduce(one, count as u64, &memory));
        one.sync();
        if one.rank == 0 {
            // The end of a program that destroys nothing.
            std::process::exit(0);
        }
        download::<f32>(memory.at, count)
    });
    assert!(values.iter().flatten().all(|value| *value == 3.0));
    awaited("the end of process 0", || {
        team.children.borrow_mut().first_mut().is_none_or(|child| child.try_wait().unwrap().is_some()).then_some(())
    });
    team.end(&[]);
}
