//! The socket by which processes find a communicator, in a folder that no other user reaches into.

use super::peer::{Peer, user};
use crate::lock::Lock;
use std::fs::{self, DirBuilder};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of [`token`].
pub(super) const TOKEN_BYTES: usize = 16;

/// Random bytes of this process, which only those know who have its root information.
pub(super) fn token() -> [u8; TOKEN_BYTES] {
    static TOKEN: OnceLock<[u8; TOKEN_BYTES]> = OnceLock::new();
    // The keys of the first are random for each thread, and those of the next follow from them: only who has
    // the keys knows their hashes.
    *TOKEN.get_or_init(|| {
        let mut token = [0; TOKEN_BYTES];
        for (word, bytes) in token.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *bytes = RandomState::new().hash_one(word).to_le_bytes();
        }
        token
    })
}

/// How long an answer may take to go out.
pub(super) const ANSWERING: Duration = Duration::from_secs(60);

/// How long the end of this process waits for answers that are on their way.
const LINGER: Duration = Duration::from_secs(2);

/// The age from which on a socket without a listener is removed.
const STALE: Duration = Duration::from_secs(60);

/// Refuses a folder that others than this user can reach into.
fn check_folder(folder: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(folder)?;
    if found.is_dir() && found.uid() == user() && found.mode() & 0o077 == 0 {
        return Ok(());
    }
    let text = format!("{} has to be a folder that user {} owns, with mode 0700", folder.display(), user());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

/// What the names of sockets begin with.
const PREFIX: &str = "hub-";

/// The name of the folder of this user's sockets.
fn folder_name() -> String {
    format!("ascend-emu-{}", user())
}

/// Refuses a path that is not that of a socket of this user. The temporary folder may be another process's.
pub(super) fn check_path(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| folder.file_name().is_some_and(|name| *name == *folder_name()));
    let is_named = path.file_name().is_some_and(|name| name.as_bytes().starts_with(PREFIX.as_bytes()));
    match folder {
        Some(folder) if path.is_absolute() && is_named => check_folder(folder),
        _ => {
            let (given, name) = (path.display(), folder_name());
            let text = format!("path: given {given}, allowed: a full one that ends in {name}/{PREFIX}*");
            Err(io::Error::new(io::ErrorKind::InvalidInput, text))
        }
    }
}

/// The folder of this user's sockets, made if there is none.
fn folder() -> io::Result<PathBuf> {
    let folder = std::path::absolute(std::env::temp_dir())?.join(folder_name());
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => check_folder(&folder)?,
    }
    // What processes that were killed have left.
    for entry in fs::read_dir(&folder)?.flatten() {
        let age = entry.metadata().and_then(|found| found.modified()).map(|made| made.elapsed().unwrap_or_default());
        if age.is_ok_and(|age| age >= STALE) {
            sweep(&entry.path());
        }
    }
    Ok(folder)
}

/// Removes a socket of this user that no process listens to. Other files refuse connections too, and stay.
pub(super) fn sweep(path: &Path) {
    let is_own = |found: fs::Metadata| found.file_type().is_socket() && found.uid() == user();
    if check_path(path).is_err() || !fs::symlink_metadata(path).is_ok_and(is_own) {
        return;
    }
    // A child of a process that was killed may hold its socket.
    let peer = connect(path).and_then(|stream| Peer::of(&stream));
    if peer.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
        let _ = fs::remove_file(path);
    }
}

/// Connects to a socket without waiting: `WouldBlock` where more processes than it holds wait to be let in.
pub(super) fn connect(path: &Path) -> io::Result<UnixStream> {
    // SAFETY: every byte of it may be zero.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    // A zero follows the path, and ends it.
    if bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        let text = format!("path: given {}, too long for a socket, or with a zero in it", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    for (to, byte) in address.sun_path.iter_mut().zip(bytes) {
        *to = *byte as libc::c_char;
    }
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the function has no preconditions.
    let descriptor = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just opened, and nothing else has it.
    let stream = UnixStream::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
    let len = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the descriptor is open while `stream` lives, and `len` is the size of the address.
    if unsafe { libc::connect(descriptor, (&raw const address).cast(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// The socket of a communicator and of those of some of its ranks.
#[derive(Debug)]
pub(super) struct Listener {
    path: PathBuf,
    socket: Arc<UnixListener>,
    /// Calls of other processes that have no answer yet.
    pending_answers: AtomicUsize,
}

/// Every socket of this process.
static LISTENERS: Lock<Vec<Weak<Listener>>> = Lock::new(Vec::new());

impl Listener {
    /// Opens a socket, to which processes connect until the listener is dropped.
    pub(super) fn open(number: u64) -> io::Result<Arc<Self>> {
        // The random bytes tell copies of this library in one process apart.
        let [one, two, three, four, ..] = token();
        let random = u32::from_le_bytes([one, two, three, four]);
        let path = folder()?.join(format!("{PREFIX}{}-{number}-{random:08x}", process::id()));
        let socket = Arc::new(UnixListener::bind(&path)?);
        let listener = Arc::new(Listener { path, socket, pending_answers: AtomicUsize::new(0) });
        let mut listeners = LISTENERS.lock();
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(Arc::downgrade(&listener));
        drop(listeners);
        static AT_EXIT: Once = Once::new();
        AT_EXIT.call_once(|| {
            // SAFETY: the function is one of this library, and takes nothing.
            let _ = unsafe { libc::atexit(close_all) };
        });
        Ok(listener)
    }

    /// The socket, for the thread that takes its connections. It is shut down when the listener is dropped.
    pub(super) fn socket(&self) -> Arc<UnixListener> {
        Arc::clone(&self.socket)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // SAFETY: the descriptor is open while `self` lives. The thread that waits for connections wakes up.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
        let _ = fs::remove_file(&self.path);
    }
}

/// Ends this process's sockets: answers that are on their way arrive, and no file is left.
extern "C" fn close_all() {
    if crate::status::forked() {
        return;
    }
    let listeners: Vec<Arc<Listener>> = LISTENERS.lock().iter().filter_map(Weak::upgrade).collect();
    let begun = Instant::now();
    let is_pending = |listener: &Arc<Listener>| listener.pending_answers.load(Ordering::Acquire) > 0;
    while begun.elapsed() < LINGER && listeners.iter().any(is_pending) {
        thread::sleep(Duration::from_millis(1));
    }
    for listener in listeners {
        let _ = fs::remove_file(&listener.path);
    }
}

/// Counts a call that has no answer yet.
pub(super) struct PendingAnswer<'a>(Option<&'a Listener>);

impl<'a> PendingAnswer<'a> {
    pub(super) fn new(listener: Option<&'a Listener>) -> Self {
        if let Some(listener) = listener {
            listener.pending_answers.fetch_add(1, Ordering::AcqRel);
        }
        PendingAnswer(listener)
    }
}

impl Drop for PendingAnswer<'_> {
    fn drop(&mut self) {
        if let Some(listener) = self.0 {
            listener.pending_answers.fetch_sub(1, Ordering::AcqRel);
        }
    }
}
