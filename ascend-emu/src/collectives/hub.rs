//! Where the ranks of other processes come into a communicator: a Unix socket in a folder of this user.
//!
//! The process that makes root information has the communicator. A rank of another process has one connection for as
//! long as it takes part, and one for each call that it makes at a time; the thread of that connection makes the call
//! as the thread of a stream does for a rank of this process. A connection of another user, without the token of the
//! root information, or with anything but messages is closed, which a line of the log says, and no rank is disturbed.
//! Root information that no rank joins by is given up after `HCCL_CONNECT_TIMEOUT`, with its socket.

use super::call_message::arrival_of;
use super::communicator::{Communicator, ENDED, GONE};
use super::join::{self, Joining};
use super::listener::{ANSWERING, Listener, PendingAnswer, token};
use super::peer::{Came, wait_for};
use super::settings::Settings;
use super::split::SplitRequest;
use super::wire::{MOST_BYTES, MOST_HANDSHAKE, Message, Socket, Verb, garbage};
use crate::config::config;
use crate::lock::Lock;
use crate::status::{Failure, warn};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// How long a process that has connected may take to say who it is.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// What is behind a socket: the communicator of root information, and those of some of its ranks.
#[derive(Debug)]
struct Hub {
    /// The number of the root information.
    number: u64,
    /// By the numbers that other processes call them.
    communicators: Lock<Vec<Weak<Communicator>>>,
}

impl Hub {
    /// The number of a communicator for other processes.
    fn number_of(&self, communicator: &Arc<Communicator>) -> u64 {
        let mut communicators = self.communicators.lock();
        let known = communicators.iter().position(|known| known.as_ptr() == Arc::as_ptr(communicator));
        let number = known.unwrap_or_else(|| {
            communicators.push(Arc::downgrade(communicator));
            communicators.len() - 1
        });
        number as u64
    }

    fn communicator(&self, number: u64) -> io::Result<Arc<Communicator>> {
        let communicators = self.communicators.lock();
        let known = usize::try_from(number).ok().and_then(|number| communicators.get(number));
        known.and_then(Weak::upgrade).ok_or_else(|| garbage("it is of a communicator that there is not"))
    }
}

/// Opens a socket for the ranks that join by root information with a number.
pub(super) fn open(number: u64) -> io::Result<Arc<Listener>> {
    let listener = Listener::open(number)?;
    let socket = listener.socket();
    let hub = Arc::new(Hub { number, communicators: Lock::default() });
    thread::Builder::new().name("hccl-hub".to_owned()).spawn(move || accept(&socket, &hub))?;
    Ok(listener)
}

/// Takes connections until the socket is shut down, or no rank has joined in time.
fn accept(socket: &UnixListener, hub: &Arc<Hub>) {
    // When the root information expires, unless a rank has joined by it.
    let mut expiry = Instant::now().checked_add(config().connect_limit);
    loop {
        if let Some(expiry_time) = expiry {
            let left = expiry_time.saturating_duration_since(Instant::now());
            match wait_for(socket.as_fd(), libc::POLLIN, None, Some(left)) {
                Ok(Came::Nothing) if join::expire(hub.number) => return,
                Ok(Came::Nothing) => expiry = None,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // A lack of memory passes.
                Err(_) => {
                    thread::sleep(Duration::from_millis(10));
                    continue;
                }
            }
        }
        let stream = match socket.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
            Err(_) => {
                // A lack of descriptors passes.
                thread::sleep(Duration::from_millis(10));
                continue;
            }
        };
        let hub = Arc::clone(hub);
        let served = move || match serve(stream, &hub) {
            Err(error) if matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::PermissionDenied) => {
                warn(format_args!("collectives: a connection of another process was closed: {error}"));
            }
            // A process that ends says nothing.
            _ => {}
        };
        if let Err(error) = thread::Builder::new().name("hccl-rank".to_owned()).spawn(served) {
            warn(format_args!("collectives: no thread for a rank of another process: {error}"));
        }
    }
}

/// A connection of a rank.
struct Connection {
    communicator: Arc<Communicator>,
    rank: usize,
    /// Whether the end of the connection is that of the rank.
    is_of_rank: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.is_of_rank {
            self.communicator.mark_gone(self.rank, GONE[ENDED]);
        }
    }
}

/// Serves one connection.
fn serve(stream: UnixStream, hub: &Hub) -> io::Result<()> {
    let socket = Socket::new(stream, ANSWERING)?;
    let late = || Err(garbage(format!("it has not said in {} s who it is", HANDSHAKE.as_secs())));
    let Some(first) = socket.receive(MOST_HANDSHAKE, Some((HANDSHAKE, &late)))? else {
        return Ok(());
    };
    if first.payloads.first().is_none_or(|bytes| bytes[..] != token()) {
        return Err(garbage("it does not have the root information"));
    }
    let connection = match handshake(&first, hub)? {
        Ok((connection, answer)) => {
            socket.send(&answer)?;
            connection
        }
        Err(refusal) => return socket.send(&Message::failed(refusal.code, &refusal.message)),
    };
    while let Some(message) = socket.receive(MOST_BYTES, None)? {
        let Connection { communicator, rank, .. } = &connection;
        let answer = match message.verb {
            Verb::Call => {
                let arrival = arrival_of(message, *rank, communicator.size);
                let arrival = arrival.ok_or_else(|| garbage("a call that is none"))?;
                let pending = PendingAnswer::new(communicator.listener.as_deref());
                let answer = match communicator.perform(arrival, &|| socket.interrupted()) {
                    Ok(payloads) => Message::new(Verb::Done, Vec::new(), payloads),
                    Err(fault) => Message::failed(fault.code, &fault.message),
                };
                socket.send(&answer)?;
                drop(pending);
                continue;
            }
            Verb::Ask => communicator
                .failed()
                .map_or_else(|| Message::new(Verb::Done, Vec::new(), Vec::new()), |failed| Message::failed(0, &failed)),
            Verb::GiveUp => {
                communicator.give_up(*rank, &message.text(0));
                continue;
            }
            Verb::Leave => {
                let why = message.number(0).and_then(|why| GONE.get(usize::try_from(why).ok()?));
                communicator.mark_gone(*rank, why.copied().unwrap_or(GONE[ENDED]));
                continue;
            }
            _ => return Err(garbage(format!("{:?} of a rank that has joined", message.verb))),
        };
        socket.send(&answer)?;
    }
    Ok(())
}

/// Finds what a connection is for: that, and the answer.
fn handshake(first: &Message, hub: &Hub) -> io::Result<Result<(Connection, Message), Failure>> {
    let mut numbers = first.numbers.iter().copied();
    let mut next = || numbers.next().ok_or_else(|| garbage("a handshake that is too short"));
    let small = |number: u64| u32::try_from(number).map_err(|_| garbage(format!("a rank or count of {number}")));
    let function = first.text(1);
    match first.verb {
        Verb::Join => {
            let (size, rank, device, limit) = (small(next()?)?, small(next()?)?, small(next()?)?, next()?);
            let joining = Joining { device: i32::try_from(device).unwrap_or(i32::MAX), is_remote: true };
            let settings = Settings::of_parts(first.text(2), limit);
            let joined = join::meet(&function, hub.number, (size, rank), joining, settings);
            Ok(joined.map(|communicator| accepted(hub, communicator, rank as usize)))
        }
        Verb::Split => {
            let parent = hub.communicator(next()?)?;
            let (parent_rank, number, rank, limit) = (small(next()?)?, next()?, small(next()?)?, next()?);
            let ranks = numbers.map(small).collect::<io::Result<Vec<u32>>>()?;
            let settings = Settings::of_parts(first.text(2), limit);
            let request = SplitRequest { number, ranks, rank };
            let split = parent.split(&function, parent_rank as usize, &request, &settings);
            Ok(split.map(|communicator| accepted(hub, communicator, rank as usize)))
        }
        Verb::Attach => {
            let communicator = hub.communicator(next()?)?;
            let rank = small(next()?)? as usize;
            let connection = Connection { communicator, rank, is_of_rank: false };
            Ok(Ok((connection, Message::new(Verb::Done, Vec::new(), Vec::new()))))
        }
        other => Err(garbage(format!("{other:?} as the first message"))),
    }
}

/// The connection of a rank that has joined, and the answer to it: the communicator's number for other processes, its
/// size, its limit in seconds, the ranks of this process, its name.
fn accepted(hub: &Hub, communicator: Arc<Communicator>, rank: usize) -> (Connection, Message) {
    let mut numbers = vec![hub.number_of(&communicator), communicator.size as u64, communicator.limit.as_secs()];
    numbers.extend(communicator.local_ranks.iter().map(|rank| *rank as u64));
    let name = communicator.name.as_bytes().into();
    (Connection { communicator, rank, is_of_rank: true }, Message::new(Verb::Done, numbers, vec![name]))
}
