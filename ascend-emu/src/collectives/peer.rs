//! The process at the other end of a connection, and waiting for either.
//!
//! A process that is killed closes its sockets, unless a child that it has forked holds them as well. So the process
//! itself is watched by a descriptor of the kernel's (`pidfd_open`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The user of this process.
pub(super) fn user() -> libc::uid_t {
    // SAFETY: the function has no preconditions.
    unsafe { libc::geteuid() }
}

/// The process of this user that has made the other end of a connection, or listens there.
#[derive(Debug)]
pub(super) struct Peer {
    /// Readable once the process has ended. `None` where the kernel has no such descriptors (Linux before 5.3, or a
    /// filter of system calls), and for a process that it hides (another PID namespace).
    ended: Option<OwnedFd>,
}

impl Peer {
    /// The process at the other end.
    ///
    /// # Errors
    /// `PermissionDenied` for a process of another user, `ConnectionRefused` for one that has ended.
    pub(super) fn of(stream: &UnixStream) -> io::Result<Self> {
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the descriptor is open while `stream` lives, and the option's value is a `ucred`.
        let status = unsafe {
            let to = (&raw mut peer).cast();
            libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut len)
        };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
        let own = user();
        if peer.uid != own {
            let text = format!("process {} is of user {}, and this one of user {own}", peer.pid, peer.uid);
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        if peer.pid <= 0 {
            return Ok(Peer { ended: None });
        }
        // SAFETY: the call takes two numbers.
        let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, peer.pid, 0) };
        let ended = match i32::try_from(descriptor) {
            // SAFETY: the descriptor was just opened, and nothing else has it.
            Ok(descriptor) if descriptor >= 0 => Some(unsafe { OwnedFd::from_raw_fd(descriptor) }),
            _ => match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::ESRCH) => {
                    return Err(io::ErrorKind::ConnectionRefused.into());
                }
                _ => None,
            },
        };
        let peer = Peer { ended };
        // One that has ended has a number until its parent asks for it.
        match peer.wait(stream.as_fd(), 0, Some(Duration::ZERO)) {
            Ok(Came::End) => Err(io::ErrorKind::ConnectionRefused.into()),
            _ => Ok(peer),
        }
    }

    /// Waits until a socket is ready, or the process has ended; `limit` is `None` for any time.
    pub(super) fn wait(&self, socket: BorrowedFd<'_>, events: i16, limit: Option<Duration>) -> io::Result<Came> {
        wait_for(socket, events, self.ended.as_ref().map(AsFd::as_fd), limit)
    }
}

/// What was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Came {
    /// The socket is ready, or has failed.
    Socket,
    /// The process has ended, and the socket has nothing more from it.
    End,
    /// The time is over.
    Nothing,
}

/// Waits for events of a socket, and for the end of a process by its descriptor.
pub(super) fn wait_for(
    socket: BorrowedFd<'_>,
    events: i16,
    process: Option<BorrowedFd<'_>>,
    limit: Option<Duration>,
) -> io::Result<Came> {
    // A negative descriptor is left out.
    let process = process.map_or(-1, |process| process.as_raw_fd());
    let mut polled = [
        libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 },
        libc::pollfd { fd: process, events: libc::POLLIN, revents: 0 },
    ];
    // Rounded up, so that the time is over when the call returns; a negative time has no end.
    let milliseconds = |limit: Duration| i32::try_from(limit.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
    // SAFETY: the list has two entries, whose descriptors are borrowed or negative.
    let ready = unsafe { libc::poll(polled.as_mut_ptr(), 2, limit.map_or(-1, milliseconds)) };
    if ready < 0 {
        return Err(io::Error::last_os_error());
    }
    let [ready, ended] = polled.map(|one| one.revents != 0);
    match (ready, ended) {
        (true, _) => Ok(Came::Socket),
        // What it has sent last may have come between the two looks.
        (false, true) => match wait_for(socket, events, None, Some(Duration::ZERO))? {
            Came::Socket => Ok(Came::Socket),
            _ => Ok(Came::End),
        },
        (false, false) => Ok(Came::Nothing),
    }
}
