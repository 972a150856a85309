//! Ranks of several processes: a test runs itself again in each of them.

use crate::*;
use std::cell::{Cell, RefCell};
use std::fs;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest time that a process of a team is waited for.
const PATIENCE: Duration = Duration::from_secs(90);

/// A folder of this process for sockets and for what the processes of a team tell each other. Its name is short, since
/// the path of a socket is.
pub(crate) fn temporary() -> PathBuf {
    let own = || std::env::temp_dir().join(format!("ranks-{}", std::process::id()));
    std::env::var_os("RANKS_FOLDER").map_or_else(own, PathBuf::from)
}

/// Makes the folder anew, unless it is that of another process.
pub(crate) fn make_temporary() {
    if std::env::var_os("RANKS_FOLDER").is_none() {
        // One that is there is of a test that has failed, or of an earlier process with this number.
        let _ = fs::remove_dir_all(std::env::temp_dir());
        fs::create_dir(std::env::temp_dir()).unwrap();
    }
}

/// Removes the folder, unless it is that of another process.
pub(crate) fn remove_temporary() {
    if std::env::var_os("RANKS_FOLDER").is_none() {
        fs::remove_dir_all(std::env::temp_dir()).unwrap();
    }
}

/// The folder of the emulation's sockets.
pub(crate) fn sockets() -> PathBuf {
    let user = fs::metadata(std::env::temp_dir()).unwrap().uid();
    std::env::temp_dir().join(format!("ascend-emu-{user}"))
}

/// The sockets of a process.
pub(crate) fn sockets_of(pid: u32) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(sockets()) else { return Vec::new() };
    let of_process = |path: &PathBuf| path.to_str().unwrap().contains(&format!("hub-{pid}-"));
    entries.map(|entry| entry.unwrap().path()).filter(of_process).collect()
}

/// Asserts that communicators that have ended have no sockets. One is kept for root information that nobody has used.
pub(crate) fn assert_no_socket() {
    let begun = Instant::now();
    // Ranks of other processes hold a communicator for a moment longer.
    while !sockets_of(std::process::id()).is_empty() && begun.elapsed() < Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(sockets_of(std::process::id()), Vec::<PathBuf>::new());
}

/// Waits until `look` finds something.
pub(crate) fn awaited<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "{what} does not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The processes of a test. Process 0 makes root information; the test's own is the last one.
pub(crate) struct Team {
    pub process: u32,
    processes: u32,
    folder: PathBuf,
    told: Cell<u32>,
    pub children: RefCell<Vec<Child>>,
}

impl Team {
    /// Starts the others, which run the test with this name.
    pub(crate) fn new(test: &str, processes: u32) -> Self {
        let folder = std::env::temp_dir();
        let team = |process| Team {
            process,
            processes,
            folder: folder.clone(),
            told: Cell::new(0),
            children: RefCell::default(),
        };
        if let Ok(process) = std::env::var("RANKS_PROCESS") {
            return team(process.parse().unwrap());
        }
        let start = |process: u32| {
            Command::new(std::env::current_exe().unwrap())
                .args([test, "--exact", "--nocapture"])
                .env("RANKS_PROCESS", process.to_string())
                .env("RANKS_FOLDER", &folder)
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        };
        let own = team(processes - 1);
        *own.children.borrow_mut() = (0..processes - 1).map(start).collect();
        own
    }

    /// The ranks of a process, of so many.
    pub(crate) fn ranks_of(&self, process: u32, size: u32) -> Range<u32> {
        let first = |process: u32| (process * size).div_ceil(self.processes);
        first(process)..first(process + 1)
    }

    /// What process 0 tells all of them; the others give `None`.
    pub(crate) fn tell(&self, bytes: Option<Vec<u8>>) -> Vec<u8> {
        let number = self.told.replace(self.told.get() + 1);
        let (path, draft) = (self.folder.join(format!("told-{number}")), self.folder.join("draft"));
        match bytes {
            Some(bytes) => {
                fs::write(&draft, &bytes).unwrap();
                fs::rename(draft, path).unwrap();
                bytes
            }
            None => awaited("what process 0 tells", || fs::read(&path).ok()),
        }
    }

    /// Root information of process 0.
    pub(crate) fn root_info(&self) -> HcclRootInfo {
        let made = (self.process == 0).then(|| root_info().internal.map(|byte| byte as u8).to_vec());
        let told: [u8; sys::HCCL_ROOT_INFO_BYTES as usize] = self.tell(made).try_into().unwrap();
        HcclRootInfo { internal: told.map(|byte| byte as _) }
    }

    /// Runs `body` as each rank of a communicator over all processes that is one of this process.
    pub(crate) fn world<T: Send>(&self, size: u32, body: impl Fn(&mut Rank) -> T + Sync) -> Vec<T> {
        ranks(size, self.ranks_of(self.process, size), &self.root_info(), body)
    }

    /// Waits for the others, all of which have done what they should, but for those killed.
    pub(crate) fn end(&self, killed: &[u32]) {
        for (mut child, process) in self.children.borrow_mut().drain(..).zip(0..) {
            let status = awaited("the end of a process", || child.try_wait().unwrap());
            assert_eq!(status.success(), !killed.contains(&process), "process {process}: {status}");
            assert_eq!(sockets_of(child.id()), Vec::<PathBuf>::new(), "process {process} left its socket");
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        // None but where the test has failed.
        for child in self.children.get_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The path of the socket in root information.
pub(crate) fn socket_of(info: &HcclRootInfo) -> PathBuf {
    let bytes = info.internal.map(|byte| byte as u8);
    let len = usize::from(u16::from_le_bytes([bytes[36], bytes[37]]));
    Path::new(std::str::from_utf8(&bytes[38..38 + len]).unwrap()).to_owned()
}
