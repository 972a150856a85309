//! Processes that are killed: within seconds the calls of every other rank fail and name the process. And root
//! information that no rank joins by.

use crate::processes::{SOON, all_reduce};
use crate::team::{Team, awaited, sockets_of};
use crate::*;
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn a_process_that_is_killed_is_named_on_every_rank() {
    let _alone = alone();
    let team = Team::new("killed::a_process_that_is_killed_is_named_on_every_rank", 3);
    // Process 1 is killed between calls, with rank 2 of 4.
    let info = team.root_info();
    ranks(4, team.ranks_of(team.process, 4), &info, |one| {
        let memory = Memory::new(64);
        fine(all_reduce(one, 8, &memory));
        one.sync();
        if one.rank == 2 {
            std::process::abort();
        }
        let begun = Instant::now();
        fails_somewhere(one, all_reduce(one, 8, &memory), &["rank 2", "its process has ended"]);
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        // Calls of ranks in this process and in others fail with the same text, and so do their next ones.
        let next = all_reduce(one, 8, &memory);
        refused(next, HcclResult::HCCL_E_INTERNAL, &["rank 2", "its process has ended"]);
    });
    team.end(&[1]);
}

#[test]
fn a_process_that_is_killed_in_a_call_is_named() {
    let _alone = alone();
    let team = Team::new("killed::a_process_that_is_killed_in_a_call_is_named", 3);
    let info = team.root_info();
    ranks(3, team.ranks_of(team.process, 3), &info, |one| {
        let memory = Memory::new(64);
        if one.rank == 1 {
            fine(all_reduce(one, 8, &memory));
            std::thread::sleep(Duration::from_millis(300));
            std::process::abort();
        }
        // The others come later, or not at all.
        std::thread::sleep(Duration::from_millis(800));
        fails_somewhere(one, all_reduce(one, 8, &memory), &["of rank 1", "its process has ended"]);
    });
    team.end(&[1]);
}

#[test]
fn the_root_s_process_that_is_killed_is_named() {
    let _alone = alone();
    let team = Team::new("killed::the_root_s_process_that_is_killed_is_named", 3);
    let info = team.root_info();
    ranks(3, team.ranks_of(team.process, 3), &info, |one| {
        let memory = Memory::new(64);
        fine(all_reduce(one, 8, &memory));
        one.sync();
        if one.rank == 0 {
            std::thread::sleep(Duration::from_millis(100));
            std::process::abort();
        }
        let begun = Instant::now();
        fails_somewhere(one, all_reduce(one, 8, &memory), &["of rank 0", "has ended"]);
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        let mut comm = null_mut();
        let mut join = || unsafe { HcclCommInitRootInfo(3, &info, one.rank, &mut comm) };
        // The socket may close a moment later.
        awaited("the end of process 0", || (join() == HcclResult::HCCL_E_PARA).then_some(()));
        refused(join(), HcclResult::HCCL_E_PARA, &["the process has ended"]);
    });
    team.end(&[0]);
}

/// The process of a rank forks and is killed: its child has all of its sockets, and lives on.
fn forks_and_is_killed(test: &str, killed: u32, parts: &[&str]) {
    let _alone = alone();
    let team = Team::new(test, 3);
    let info = team.root_info();
    ranks(3, team.ranks_of(team.process, 3), &info, |one| {
        let memory = Memory::new(64);
        fine(all_reduce(one, 8, &memory));
        one.sync();
        let synced = |rank: u32| std::env::temp_dir().join(format!("synced-{rank}"));
        if one.rank == killed {
            // The others have the answers to their first calls.
            for other in (0..3).filter(|other| *other != killed) {
                awaited("the other ranks", || synced(other).exists().then_some(()));
            }
            // SAFETY: the child makes system calls and nothing else.
            unsafe {
                if libc::fork() == 0 {
                    for descriptor in 0..3 {
                        libc::close(descriptor);
                    }
                    libc::alarm(2 * SOON.as_secs() as u32);
                    loop {
                        libc::pause();
                    }
                }
            }
            std::process::abort();
        }
        std::fs::write(synced(one.rank), []).unwrap();
        let begun = Instant::now();
        // More than a socket holds, so that no end is found by the first bytes.
        let large = Memory::new(4 << 20);
        fails_somewhere(one, all_reduce(one, 1 << 20, &large), parts);
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    });
    team.end(&[killed]);
}

#[test]
fn a_killed_process_is_named_though_its_child_lives() {
    let test = "killed::a_killed_process_is_named_though_its_child_lives";
    forks_and_is_killed(test, 1, &["rank 1", "its process has ended"]);
}

#[test]
fn the_root_s_killed_process_is_named_though_its_child_lives() {
    let test = "killed::the_root_s_killed_process_is_named_though_its_child_lives";
    forks_and_is_killed(test, 0, &["of rank 0", "has ended"]);
}

#[test]
fn root_information_that_no_rank_joins_by_ends_with_its_thread_and_socket() {
    const TEST: &str = "killed::root_information_that_no_rank_joins_by_ends_with_its_thread_and_socket";
    const LIMIT: &str = "HCCL_CONNECT_TIMEOUT";
    let _alone = alone();
    if std::env::var_os(LIMIT).is_none() {
        // A process reads its limit once.
        let mut other = Command::new(std::env::current_exe().unwrap());
        assert!(other.args([TEST, "--exact", "--nocapture"]).env(LIMIT, "1").status().unwrap().success());
        return;
    }
    let count = |of: &str| std::fs::read_dir(format!("/proc/self/{of}")).unwrap().count();
    let counts = || (count("fd"), count("task"));
    let before = counts();
    let unused = [root_info(), root_info()];
    assert_eq!(sockets_of(std::process::id()).len(), 2);
    let mut comm = null_mut();
    let used = root_info();
    fine(unsafe { HcclCommInitRootInfo(1, &used, 0, &mut comm) });
    awaited("the end of root information", || (sockets_of(std::process::id()).len() == 1).then_some(()));
    for info in unused {
        let mut none = null_mut();
        let result = unsafe { HcclCommInitRootInfo(1, &info, 0, &mut none) };
        refused(result, HcclResult::HCCL_E_PARA, &["no rank has joined by it for 1 s (HCCL_CONNECT_TIMEOUT)"]);
    }
    // One that has been used lives as long as its communicator.
    let stream = stream();
    std::thread::sleep(Duration::from_millis(1100));
    fine(unsafe { HcclBarrier(comm, stream) });
    ok(unsafe { aclrtSynchronizeStream(stream) });
    destroy(stream);
    fine(unsafe { HcclCommDestroy(comm) });
    awaited("the end of threads and descriptors", || (counts() == before).then_some(()));
}
