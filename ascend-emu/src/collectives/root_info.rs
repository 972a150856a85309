//! Root information: by what the ranks of a communicator find each other.
//!
//! It is a mark, the number of the process that made it, the number of the communicator there, the random bytes of
//! that process, and the path of its socket behind the path's length; the rest is zero. A path of no length is that of
//! a process that could not open a socket.

use super::hub;
use super::join::{Joining, check_size, expect, meet};
use super::listener::{TOKEN_BYTES, token};
use super::member::{COMMUNICATORS, Group, Member};
use super::remote::{Host, Remote};
use super::settings::Settings;
use crate::handle::Id;
use crate::status::{HCCL_NOT_SUPPORTED, HCCL_PARA, Outcome, failure, warn};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of root information.
pub(crate) const ROOT_INFO: usize = ascend_sys::bindings::HCCL_ROOT_INFO_BYTES as usize;

/// What root information of this emulation begins with.
const MARK: [u8; 8] = *b"ASCENDHC";

/// `HcclGetRootInfo`.
pub(crate) fn root_info() -> Vec<u8> {
    static ISSUED: AtomicU64 = AtomicU64::new(0);
    let number = ISSUED.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
    let listener = hub::open(number).inspect_err(|error| {
        warn(format_args!(
            "collectives: no rank of another process can join: a socket in {} cannot be opened: {error}; set TMPDIR to \
             a folder of this user with a short name",
            std::env::temp_dir().display()
        ));
    });
    let listener = listener.ok();
    let path = listener.as_ref().map_or(&[][..], |listener| listener.path().as_os_str().as_bytes());
    let numbers = [&process::id().to_le_bytes()[..], &number.to_le_bytes()].concat();
    let len = (path.len() as u16).to_le_bytes();
    let mut bytes = [&MARK[..], &numbers, &token(), &len, path].concat();
    bytes.resize(ROOT_INFO, 0);
    expect(number, listener);
    bytes
}

/// What root information says.
struct RootInfo<'a> {
    pid: u32,
    number: u64,
    token: [u8; TOKEN_BYTES],
    path: &'a [u8],
}

impl<'a> RootInfo<'a> {
    fn of_bytes(bytes: &'a [u8]) -> Option<Self> {
        let (mark, bytes) = bytes.split_first_chunk()?;
        let (pid, bytes) = bytes.split_first_chunk()?;
        let (number, bytes) = bytes.split_first_chunk()?;
        let (token, bytes) = bytes.split_first_chunk()?;
        let (len, bytes) = bytes.split_first_chunk()?;
        let path = bytes.get(..usize::from(u16::from_le_bytes(*len)))?;
        let (pid, number) = (u32::from_le_bytes(*pid), u64::from_le_bytes(*number));
        (*mark == MARK).then_some(RootInfo { pid, number, token: *token, path })
    }
}

/// `HcclCommInitRootInfo`: joins a communicator on a device, and returns when all ranks have.
pub(crate) fn join(name: &str, (size, rank): (u32, u32), info: &[u8], device: i32, settings: Settings) -> Outcome<Id> {
    let info = RootInfo::of_bytes(info);
    let info = info.ok_or_else(|| failure!(HCCL_PARA, "{name}: rootInfo is not what HcclGetRootInfo has written"))?;
    check_size(name, size, rank)?;
    let RootInfo { pid, number, token: random, path } = info;
    let group = if random == token() {
        let joining = Joining { device, is_remote: false };
        Group::Local(meet(name, number, (size, rank), joining, settings)?)
    } else if path.is_empty() {
        return Err(failure!(
            HCCL_NOT_SUPPORTED,
            "{name}: rootInfo is of process {pid}, which could not open a socket, and this is process {}; the log of \
             process {pid} says why",
            process::id()
        ));
    } else {
        let host = Host { path: OsStr::from_bytes(path).into(), pid, token: random[..].into() };
        Group::Remote(Remote::join(name, host, (size, rank), device, &settings)?)
    };
    Ok(COMMUNICATORS.insert(Member::new(group, rank as usize, device)))
}
