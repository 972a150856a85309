//! Where the ranks of other processes come into a communicator: a Unix socket in a folder of this user.
//!
//! The process that makes root information has the communicator. A rank of another process has a connection that says
//! so while it lives, and one for each call that it makes at a time; the thread of that connection makes the call as
//! the thread of a stream does for a rank of this process. A connection of another user, without the token of the root
//! information, or with anything but messages is closed, which a line of the log says, and no rank is disturbed.

use super::call_message::arrival_of;
use super::communicator::{Communicator, ENDED, GONE};
use super::door::{ANSWERING, Door, Owed, token};
use super::join::{self, Seat};
use super::settings::Settings;
use super::split::SplitRequest;
use super::wire::{MOST_BYTES, MOST_GREETING, Message, Socket, Verb, garbage};
use crate::lock::Lock;
use crate::status::{Failure, warn};
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

/// How long a process that has connected may take to say who it is.
const GREETING: Duration = Duration::from_secs(5);

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
pub(super) fn open(number: u64) -> io::Result<Arc<Door>> {
    let (door, listener) = Door::open(number)?;
    let hub = Arc::new(Hub { number, communicators: Lock::default() });
    thread::Builder::new().name("hccl-hub".to_owned()).spawn(move || welcome(&listener, &hub))?;
    Ok(door)
}

/// Takes connections until the socket is shut down.
fn welcome(listener: &UnixListener, hub: &Arc<Hub>) {
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
            Err(_) => {
                // A lack of descriptors passes.
                thread::sleep(Duration::from_millis(10));
                continue;
            }
        };
        let hub = Arc::clone(hub);
        let guest = move || match serve(stream, &hub) {
            Err(error) if matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::PermissionDenied) => {
                warn(format_args!("collectives: a connection of another process was closed: {error}"));
            }
            // A process that ends says nothing.
            _ => {}
        };
        if let Err(error) = thread::Builder::new().name("hccl-rank".to_owned()).spawn(guest) {
            warn(format_args!("collectives: no thread for a rank of another process: {error}"));
        }
    }
}

/// What a connection is for.
struct Guest {
    communicator: Arc<Communicator>,
    rank: usize,
    /// Whether the end of the connection is that of the rank.
    is_life: bool,
}

impl Drop for Guest {
    fn drop(&mut self) {
        if self.is_life {
            self.communicator.mark_gone(self.rank, GONE[ENDED]);
        }
    }
}

/// Serves one connection.
fn serve(stream: UnixStream, hub: &Hub) -> io::Result<()> {
    let socket = Socket::new(stream, ANSWERING)?;
    let late = || Err(garbage(format!("it has not said in {} s who it is", GREETING.as_secs())));
    let Some(greeting) = socket.receive(MOST_GREETING, Some((GREETING, &late)))? else {
        return Ok(());
    };
    if greeting.payloads.first().is_none_or(|bytes| bytes[..] != token()) {
        return Err(garbage("it does not have the root information"));
    }
    let guest = match greet(&greeting, hub)? {
        Ok((guest, answer)) => {
            socket.send(&answer)?;
            guest
        }
        Err(refusal) => return socket.send(&Message::failed(refusal.code, &refusal.message)),
    };
    while let Some(message) = socket.receive(MOST_BYTES, None)? {
        let Guest { communicator, rank, .. } = &guest;
        let answer = match message.verb {
            Verb::Call => {
                let arrival = arrival_of(message, *rank, communicator.size);
                let arrival = arrival.ok_or_else(|| garbage("a call that is none"))?;
                let owed = Owed::new(communicator.door.as_deref());
                let answer = match communicator.perform(arrival, &|| socket.interrupted()) {
                    Ok(payloads) => Message::new(Verb::Done, Vec::new(), payloads),
                    Err(fault) => Message::failed(fault.code, &fault.message),
                };
                socket.send(&answer)?;
                drop(owed);
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
fn greet(greeting: &Message, hub: &Hub) -> io::Result<Result<(Guest, Message), Failure>> {
    let mut numbers = greeting.numbers.iter().copied();
    let mut next = || numbers.next().ok_or_else(|| garbage("a greeting that is too short"));
    let small = |number: u64| u32::try_from(number).map_err(|_| garbage(format!("a rank or count of {number}")));
    let function = greeting.text(1);
    match greeting.verb {
        Verb::Join => {
            let (size, rank, device, limit) = (small(next()?)?, small(next()?)?, small(next()?)?, next()?);
            let seat = Seat { device: i32::try_from(device).unwrap_or(i32::MAX), elsewhere: true };
            let settings = Settings::of_parts(greeting.text(2), limit);
            let joined = join::meet(&function, hub.number, (size, rank), seat, settings);
            Ok(joined.map(|communicator| welcomed(hub, communicator, rank as usize)))
        }
        Verb::Split => {
            let parent = hub.communicator(next()?)?;
            let (parent_rank, number, rank, limit) = (small(next()?)?, next()?, small(next()?)?, next()?);
            let ranks = numbers.map(small).collect::<io::Result<Vec<u32>>>()?;
            let settings = Settings::of_parts(greeting.text(2), limit);
            let request = SplitRequest { number, ranks, rank };
            let split = parent.split(&function, parent_rank as usize, &request, &settings);
            Ok(split.map(|communicator| welcomed(hub, communicator, rank as usize)))
        }
        Verb::Attach => {
            let communicator = hub.communicator(next()?)?;
            let rank = small(next()?)? as usize;
            let guest = Guest { communicator, rank, is_life: false };
            Ok(Ok((guest, Message::new(Verb::Done, Vec::new(), Vec::new()))))
        }
        other => Err(garbage(format!("{other:?} as the first message"))),
    }
}

/// The connection of a rank that has joined, and the answer to it: the communicator's number for other processes, its
/// size, its limit in seconds, the ranks of this process, its name.
fn welcomed(hub: &Hub, communicator: Arc<Communicator>, rank: usize) -> (Guest, Message) {
    let mut numbers = vec![hub.number_of(&communicator), communicator.size as u64, communicator.limit.as_secs()];
    numbers.extend(communicator.here.iter().map(|rank| *rank as u64));
    let name = communicator.name.as_bytes().into();
    (Guest { communicator, rank, is_life: true }, Message::new(Verb::Done, numbers, vec![name]))
}
