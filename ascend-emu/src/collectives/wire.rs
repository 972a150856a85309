//! Messages between the processes of a communicator: numbers and byte strings, over a Unix socket.
//!
//! A message is a mark with the version of this protocol, what it is, the count of its numbers and the count of its
//! byte strings, each of these in 8 bytes; then the numbers; then the byte strings, each behind its length. A string
//! that is the one before has no bytes.

use super::payload::{Payload, taken};
use super::peer::{Came, Peer};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// What every message begins with; the last byte is the version.
const MARK: u64 = u64::from_le_bytes(*b"ASCHUB\0\x01");

/// Most numbers of a message.
const MOST_NUMBERS: u64 = 1 << 24;

/// Most bytes of a message from a process that is not known yet.
pub(super) const MOST_HANDSHAKE: u64 = 1 << 16;

/// Most bytes of a message from a rank.
pub(super) const MOST_BYTES: u64 = 1 << 40;

/// In the place of a length: the string is the one before.
const SAME: u64 = u64::MAX;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Verb {
    /// A rank joins a communicator of root information.
    Join = 1,
    /// A rank joins a communicator of some ranks.
    Split = 2,
    /// The connection carries calls of a rank.
    Attach = 3,
    /// A call.
    Call = 4,
    /// Whether the communicator has failed.
    Ask = 5,
    /// A call that was queued will never run.
    GiveUp = 6,
    /// The rank makes no more calls.
    Leave = 7,
    /// An answer.
    Done = 8,
    /// An answer: what was asked for has failed.
    Failed = 9,
}

impl Verb {
    const ALL: [Verb; 9] = [
        Verb::Join,
        Verb::Split,
        Verb::Attach,
        Verb::Call,
        Verb::Ask,
        Verb::GiveUp,
        Verb::Leave,
        Verb::Done,
        Verb::Failed,
    ];
}

#[derive(Debug)]
pub(super) struct Message {
    pub verb: Verb,
    pub numbers: Vec<u64>,
    pub payloads: Vec<Payload>,
}

impl Message {
    pub(super) fn new(verb: Verb, numbers: Vec<u64>, payloads: Vec<Payload>) -> Self {
        Message { verb, numbers, payloads }
    }

    pub(super) fn failed(code: i32, message: &str) -> Self {
        Self::new(Verb::Failed, vec![u64::from(code.unsigned_abs())], vec![message.as_bytes().into()])
    }

    /// A payload as text.
    pub(super) fn text(&self, at: usize) -> String {
        self.payloads.get(at).map_or_else(String::new, |bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    pub(super) fn number(&self, at: usize) -> Option<u64> {
        self.numbers.get(at).copied()
    }
}

/// What is no message.
pub(super) fn garbage(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

/// One end of a connection to a process of the same user.
#[derive(Debug)]
pub(super) struct Socket {
    stream: UnixStream,
    peer: Peer,
    /// How long a write may wait for the other end to read.
    limit: Duration,
}

/// What is asked whenever nothing has come for a time: an error ends the waiting.
pub(super) type Patience<'a> = (Duration, &'a dyn Fn() -> io::Result<()>);

impl Socket {
    /// Takes a connection whose other end belongs to a process of the same user. A write may wait as long as `limit`.
    pub(super) fn new(stream: UnixStream, limit: Duration) -> io::Result<Self> {
        let peer = Peer::of(&stream)?;
        Ok(Socket { stream, peer, limit })
    }

    pub(super) fn send(&self, message: &Message) -> io::Result<()> {
        let Message { verb, numbers, payloads } = message;
        let head = [MARK, *verb as u64, numbers.len() as u64, payloads.len() as u64];
        let mut bytes: Vec<u8> = head.iter().chain(numbers).flat_map(|number| number.to_le_bytes()).collect();
        let mut before: Option<&Payload> = None;
        for payload in payloads {
            let same = before.replace(payload).is_some_and(|before| before.is(payload));
            let len = if same { SAME } else { payload.len() as u64 };
            bytes.extend(len.to_le_bytes());
            if !same {
                self.write(&bytes)?;
                bytes.clear();
                self.write(payload)?;
            }
        }
        self.write(&bytes)
    }

    /// Writes bytes without the signal that ends a process whose other end is closed.
    fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (from, len, flags) = (bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
            // SAFETY: the descriptor is open while `self` lives, and the range is that of a slice.
            let sent = unsafe { libc::send(self.stream.as_raw_fd(), from, len, flags) };
            let Ok(sent) = usize::try_from(sent) else {
                self.recover(io::Error::last_os_error(), libc::POLLOUT, Some(self.limit), &|| {
                    Err(io::ErrorKind::TimedOut.into())
                })?;
                continue;
            };
            bytes = bytes.get(sent..).unwrap_or_default();
        }
        Ok(())
    }

    /// Reads bytes that are there.
    fn read(&self, to: &mut [u8], flags: i32) -> io::Result<usize> {
        let (at, flags) = (to.as_mut_ptr().cast(), flags | libc::MSG_DONTWAIT);
        // SAFETY: the descriptor is open while `self` lives, and the range is that of a slice.
        let read = unsafe { libc::recv(self.stream.as_raw_fd(), at, to.len(), flags) };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    }

    /// After an error of a system call: returns when it is worth another try. `late` is asked whenever a time was over
    /// before that, and `BrokenPipe` says that the other process has ended.
    fn recover(
        &self,
        error: io::Error,
        events: i16,
        limit: Option<Duration>,
        late: &dyn Fn() -> io::Result<()>,
    ) -> io::Result<()> {
        match error.kind() {
            io::ErrorKind::Interrupted => Ok(()),
            io::ErrorKind::WouldBlock => match self.peer.wait(self.stream.as_fd(), events, limit) {
                Ok(Came::Socket) => Ok(()),
                Ok(Came::End) => Err(io::ErrorKind::BrokenPipe.into()),
                Ok(Came::Nothing) => late(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
                Err(error) => Err(error),
            },
            _ => Err(error),
        }
    }

    /// Tells the other end that what it does for this one is not wanted any more.
    pub(super) fn interrupt(&self) {
        // An end that is closed knows as well.
        let _ = self.write(&[0]);
    }

    /// Why the other end waits for no answer any more, while it is owed one.
    pub(super) fn interrupted(&self) -> Option<&'static str> {
        match self.read(&mut [0], libc::MSG_PEEK) {
            Ok(0) => Some("is not over, and its process has ended, or has closed its connection"),
            Ok(_) => Some("was aborted with its stream"),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => None,
                _ => Some("is not over, and its connection is broken"),
            },
        }
    }

    /// Reads a message of at most `most` bytes; `None` where the connection was closed before one.
    pub(super) fn receive(&self, most: u64, patience: Option<Patience<'_>>) -> io::Result<Option<Message>> {
        let mut reader = Reader { socket: self, patience };
        let mut head = [0u8; 32];
        let (first, rest) = head.split_at_mut(1);
        if reader.read(first)? == 0 {
            return Ok(None);
        }
        reader.read_exact(rest)?;
        let mut words = head.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        let mut word = || words.next().unwrap_or_default();
        let (mark, verb, numbers, payloads) = (word(), word(), word(), word());
        if mark != MARK {
            let known = mark & (u64::MAX >> 8) == MARK & (u64::MAX >> 8);
            return Err(garbage(match known {
                true => format!("version {} of the protocol, and this is version {}", mark >> 56, MARK >> 56),
                false => "no message of a rank".to_owned(),
            }));
        }
        let verb = Verb::ALL.into_iter().find(|known| *known as u64 == verb);
        let verb = verb.ok_or_else(|| garbage("a message of no known kind"))?;
        let mut left = most;
        let mut spend = |bytes: u64| match left.checked_sub(bytes) {
            Some(rest) => {
                left = rest;
                Ok(())
            }
            None => Err(garbage(format!("a message of more than {most} bytes"))),
        };
        if numbers.max(payloads) > MOST_NUMBERS {
            return Err(garbage(format!("a message of {numbers} numbers and {payloads} strings")));
        }
        spend((numbers + payloads) * 8)?;
        let numbers = reader.read_payload(numbers * 8)?;
        let numbers = numbers.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number)).collect();
        let mut read: Vec<Payload> = Vec::new();
        for _ in 0..payloads {
            let mut len = [0; 8];
            reader.read_exact(&mut len)?;
            let payload = match u64::from_le_bytes(len) {
                SAME => read.last().cloned().ok_or_else(|| garbage("a first string that is the one before"))?,
                len => {
                    spend(len)?;
                    reader.read_payload(len)?
                }
            };
            read.push(payload);
        }
        Ok(Some(Message::new(verb, numbers, read)))
    }

    /// Sends a message and reads the answer.
    pub(super) fn ask(&self, message: &Message, patience: Patience<'_>) -> io::Result<Message> {
        self.send(message)?;
        self.receive(MOST_BYTES, Some(patience))?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

struct Reader<'a> {
    socket: &'a Socket,
    patience: Option<Patience<'a>>,
}

impl Read for Reader<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let (pause, go_on) = self.patience.unzip();
        let late = || go_on.map_or(Ok(()), |go_on| go_on());
        loop {
            match self.socket.read(to, 0) {
                Err(error) => match self.socket.recover(error, libc::POLLIN, pause, &late) {
                    // As if it had closed the connection, which a child that it has forked may keep open.
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(0),
                    outcome => outcome?,
                },
                read => return read,
            }
        }
    }
}

impl Reader<'_> {
    /// Reads `len` bytes, into memory of a payload that is gone where there is some; other memory grows as they arrive.
    fn read_payload(&mut self, len: u64) -> io::Result<Payload> {
        let free = usize::try_from(len).ok().and_then(taken);
        let mut bytes = free.unwrap_or_else(|| Vec::with_capacity(len.min(1 << 20) as usize));
        let read = self.by_ref().take(len).read_to_end(&mut bytes);
        // Also of a message that breaks off the memory is kept.
        let payload = Payload::from(bytes);
        read?;
        match payload.len() as u64 == len {
            true => Ok(payload),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn payloads_that_arrive_take_memory_that_is_free() {
        let (one, other) = UnixStream::pair().unwrap();
        let [one, other] = [one, other].map(|stream| Socket::new(stream, Duration::from_secs(60)).unwrap());
        // No other test has payloads of such a length.
        let bytes = vec![7u8; (5 << 20) + 3];
        let message = Message::new(Verb::Call, vec![1], vec![bytes.as_slice().into()]);
        let places = [(); 2].map(|()| {
            thread::scope(|scope| {
                scope.spawn(|| one.send(&message).unwrap());
                let came = other.receive(MOST_BYTES, None).unwrap().unwrap();
                assert_eq!((&came.numbers, &*came.payloads[0]), (&message.numbers, &bytes[..]));
                came.payloads[0].as_ptr().addr()
            })
        });
        assert_eq!(places[0], places[1]);
    }
}
