//! A rank of a communicator that is in another process.

use super::call_message::message_of;
use super::communicator::{Arrival, Interrupt, POLL};
use super::listener::{ANSWERING, check_path, connect, sweep};
use super::payload::Payload;
use super::settings::Settings;
use super::split::SplitRequest;
use super::wire::{Message, Socket, Verb};
use crate::lock::Lock;
use crate::status::{COLLECTIVE_FAILED, Failure, HCCL_INTERNAL, HCCL_PARA, HCCL_TIMEOUT, Outcome, failure};
use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// How much longer than the ranks' limit an answer may take: as long again, within these bounds.
fn grace(limit: Duration) -> Duration {
    limit.clamp(Duration::from_secs(2), Duration::from_secs(10))
}

/// The time after which a socket to which too many have come is tried again.
const FULL: Duration = Duration::from_millis(5);

/// The process that has a communicator.
#[derive(Clone, Debug)]
pub(super) struct Host {
    pub path: PathBuf,
    pub pid: u32,
    pub token: Payload,
}

impl Host {
    /// Connects; `go_on` is asked while too many wait to be let in.
    fn connect(&self, go_on: &dyn Fn() -> io::Result<()>) -> io::Result<Socket> {
        check_path(&self.path)?;
        loop {
            match connect(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => go_on()?,
                stream => return Socket::new(stream?, ANSWERING),
            }
            thread::sleep(FULL);
        }
    }

    /// Says who this is on a new connection; the answer.
    fn handshake(
        &self,
        verb: Verb,
        numbers: Vec<u64>,
        texts: [&str; 2],
        limit: Duration,
    ) -> io::Result<(Socket, Message)> {
        let texts = texts.map(|text| text.as_bytes().into());
        let first = Message::new(verb, numbers, [vec![self.token.clone()], texts.to_vec()].concat());
        within(limit + grace(limit), None, |patience| {
            let socket = self.connect(patience)?;
            let answer = socket.ask(&first, (POLL, patience))?;
            Ok((socket, answer))
        })
    }
}

/// Waits for an answer until a time is over, or the stream is aborted.
fn within<T>(
    limit: Duration,
    interrupt: Option<Interrupt<'_>>,
    ask: impl FnOnce(&dyn Fn() -> io::Result<()>) -> io::Result<T>,
) -> io::Result<T> {
    let begun = Instant::now();
    ask(&|| match interrupt.and_then(|interrupt| interrupt()) {
        Some(why) => Err(io::Error::other(why)),
        None if begun.elapsed() > limit => Err(io::ErrorKind::TimedOut.into()),
        None => Ok(()),
    })
}

/// One rank of a communicator of another process.
#[derive(Debug)]
pub(super) struct Remote {
    pub name: String,
    pub size: usize,
    host: Host,
    /// What that process calls the communicator.
    number: u64,
    rank: usize,
    limit: Duration,
    /// The ranks of that process.
    hosted: Vec<u64>,
    /// The connection whose end is that of this rank, or why it has failed; `None` once the rank has left.
    membership: Lock<Option<Result<Socket, String>>>,
    /// Connections on which no call is made.
    idle: Lock<Vec<Socket>>,
}

impl Remote {
    /// Joins a communicator as one of its ranks, on a device.
    pub(super) fn join(
        name: &str,
        host: Host,
        (size, rank): (u32, u32),
        device: i32,
        settings: &Settings,
    ) -> Outcome<Self> {
        let (chosen, seconds) = settings.to_parts();
        let numbers = vec![u64::from(size), u64::from(rank), u64::from(device.unsigned_abs()), seconds];
        Self::connect(name, host, Verb::Join, numbers, chosen, rank as usize, settings.limit())
    }

    /// `HcclCreateSubCommConfig`.
    pub(super) fn split(&self, name: &str, request: &SplitRequest, settings: &Settings) -> Outcome<Self> {
        let SplitRequest { number, ranks, rank } = request;
        let (chosen, seconds) = settings.to_parts();
        let mut numbers = vec![self.number, self.rank as u64, *number, u64::from(*rank), seconds];
        numbers.extend(ranks.iter().map(|rank| u64::from(*rank)));
        Self::connect(name, self.host.clone(), Verb::Split, numbers, chosen, *rank as usize, self.limit)
    }

    fn connect(
        name: &str,
        host: Host,
        verb: Verb,
        numbers: Vec<u64>,
        chosen: &str,
        rank: usize,
        limit: Duration,
    ) -> Outcome<Self> {
        let (connection, answer) = host.handshake(verb, numbers, [name, chosen], limit).map_err(|error| {
            let pid = host.pid;
            match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    sweep(&host.path);
                    failure!(
                        HCCL_PARA,
                        "{name}: this rootInfo, of process {pid}, has been used, or the process has ended; it is \
                         good for one communicator: call HcclGetRootInfo again"
                    )
                }
                io::ErrorKind::InvalidInput => {
                    failure!(HCCL_PARA, "{name}: rootInfo is not what HcclGetRootInfo has written: {error}")
                }
                io::ErrorKind::TimedOut => failure!(
                    HCCL_TIMEOUT,
                    "{name}: process {pid}, which made the rootInfo, has not answered in {} s",
                    (limit + grace(limit)).as_secs()
                ),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                    failure!(
                        HCCL_INTERNAL,
                        "{name}: process {pid}, which made the rootInfo, has closed the connection: it has ended, or \
                         its log says why"
                    )
                }
                _ => failure!(HCCL_INTERNAL, "{name}: process {pid}, which made the rootInfo: {error}"),
            }
        })?;
        if answer.verb != Verb::Done {
            return Err(refusal(&answer));
        }
        let size = answer.number(1).and_then(|size| usize::try_from(size).ok());
        let (Some(number), Some(size), Some(seconds)) = (answer.number(0), size, answer.number(2)) else {
            return Err(failure!(HCCL_INTERNAL, "{name}: process {} gave an answer that is none", host.pid));
        };
        Ok(Remote {
            name: answer.text(0),
            size,
            host,
            number,
            rank,
            limit: Duration::from_secs(seconds),
            hosted: answer.numbers.get(3..).unwrap_or_default().to_vec(),
            membership: Lock::new(Some(Ok(connection))),
            idle: Lock::default(),
        })
    }

    /// What is said of a connection that failed.
    fn lost(&self, error: &io::Error) -> String {
        let Remote { name, host, hosted, .. } = self;
        let ranks: Vec<String> = hosted.iter().map(u64::to_string).collect();
        let of_ranks = match ranks.is_empty() {
            true => String::new(),
            false => format!(", of rank {}", ranks.join(", ")),
        };
        let pid = host.pid;
        match error.kind() {
            io::ErrorKind::TimedOut => {
                format!("communicator {name}: process {pid}{of_ranks}, which has it, does not answer")
            }
            _ => {
                sweep(&host.path);
                format!(
                    "communicator {name}: process {pid}{of_ranks}, which has it, has ended ({error}); it has to live \
                     until every rank has destroyed the communicator"
                )
            }
        }
    }

    /// As [`Communicator::perform`](super::communicator::Communicator::perform), there.
    pub(super) fn perform(&self, arrival: &Arrival, interrupt: Interrupt<'_>) -> Outcome<Vec<Payload>> {
        let fault = |message| Failure::new(COLLECTIVE_FAILED, message);
        let waiting = self.idle.lock().pop();
        let socket = match waiting {
            Some(socket) => socket,
            None => {
                let numbers = vec![self.number, self.rank as u64];
                let attached = self.host.handshake(Verb::Attach, numbers, [""; 2], self.limit);
                attached.map_err(|error| fault(self.lost(&error)))?.0
            }
        };
        let aborted = Cell::new(None);
        let noted = || {
            aborted.set(interrupt());
            aborted.get()
        };
        let message = message_of(arrival);
        let limit = self.limit + grace(self.limit);
        let answer = within(limit, Some(&noted), |patience| socket.ask(&message, (POLL, patience)));
        let answer = answer.map_err(|error| match aborted.get() {
            Some(why) => {
                socket.interrupt();
                let (name, call, rank) = (&self.name, &arrival.call, self.rank);
                fault(format!("communicator {name}: {call} of rank {rank} {why}"))
            }
            None => fault(self.lost(&error)),
        })?;
        self.idle.lock().push(socket);
        match answer.verb {
            Verb::Done => Ok(answer.payloads),
            _ => Err(Failure::new(COLLECTIVE_FAILED, answer.text(0))),
        }
    }

    /// The reason for which the communicator has failed.
    pub(super) fn failed(&self) -> Option<String> {
        let mut membership = self.membership.lock();
        let socket = match membership.as_ref()? {
            Ok(socket) => socket,
            Err(lost) => return Some(lost.clone()),
        };
        let question = Message::new(Verb::Ask, Vec::new(), Vec::new());
        match within(grace(self.limit), None, |patience| socket.ask(&question, (POLL, patience))) {
            Ok(answer) if answer.verb == Verb::Failed => Some(answer.text(0)),
            Ok(_) => None,
            Err(error) => {
                // An answer that comes later would be taken for that to the next question.
                let lost = self.lost(&error);
                *membership = Some(Err(lost.clone()));
                Some(lost)
            }
        }
    }

    /// Tells the others that this rank makes no more calls, for a reason by its number.
    pub(super) fn leave(&self, why: usize) {
        if let Some(Ok(socket)) = self.membership.lock().take() {
            // A process that has ended needs no message.
            let _ = socket.send(&Message::new(Verb::Leave, vec![why as u64], Vec::new()));
        }
        self.idle.lock().clear();
    }

    /// Fails the communicator: a call of this rank was queued and will never run.
    pub(super) fn give_up(&self, call: &str) {
        if let Some(Ok(socket)) = self.membership.lock().as_ref() {
            // A process that has ended needs no message.
            let _ = socket.send(&Message::new(Verb::GiveUp, Vec::new(), vec![call.as_bytes().into()]));
        }
    }
}

/// A refusal as the other process has it.
fn refusal(answer: &Message) -> Failure {
    let code = answer.number(0).and_then(|code| i32::try_from(code).ok());
    Failure::new(code.unwrap_or(HCCL_INTERNAL), answer.text(0))
}
