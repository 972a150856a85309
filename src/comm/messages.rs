//! Messages between two ranks.

use ascend_sys::bindings as sys;

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::rules;
use crate::runtime::Queue;
use crate::tensor::{AnyTensor, Tensor};

use super::collectives::noted;
use super::communicator::{Communicator, rank_of};

/// A message of a [batch](Communicator::batch).
#[derive(Clone, Copy, Debug)]
pub enum Message<'a> {
    /// A tensor that goes to a rank.
    Send {
        /// Contiguous.
        tensor: &'a AnyTensor,
        /// The rank that receives it.
        to: usize,
    },
    /// A tensor that comes from a rank.
    Recv {
        /// Contiguous, with as many elements of the same type as are sent.
        tensor: &'a AnyTensor,
        /// The rank that sends it.
        from: usize,
    },
}

impl<'a> Message<'a> {
    fn tensor(&self) -> &'a AnyTensor {
        let (Self::Send { tensor, .. } | Self::Recv { tensor, .. }) = self;
        tensor
    }

    fn peer(&self) -> usize {
        let (Self::Send { to: peer, .. } | Self::Recv { from: peer, .. }) = self;
        *peer
    }

    fn receives(&self) -> bool {
        matches!(self, Self::Recv { .. })
    }
}

/// Refuses a tensor that is received and shares memory with another one of the batch.
fn check_apart(messages: &[Message<'_>]) -> Result<()> {
    for (at, message) in messages.iter().enumerate().filter(|(_, message)| message.receives()) {
        let others = messages.iter().enumerate().filter(|(other, _)| *other != at);
        if let Some((other, _)) = others.into_iter().find(|(_, other)| message.tensor().overlaps(other.tensor())) {
            return Err(Error::shared(
                "messages",
                format_args!("a tensor that message {at} receives in memory of message {other}"),
                "memory of its own",
            )
            .fix("receive into a tensor of its own"));
        }
    }
    Ok(())
}

impl Communicator {
    /// Sends a tensor to a rank, whose [`recv`](Self::recv) the stream waits for. Two ranks that both send first wait
    /// for each other.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`all_gather`](Self::all_gather); [`COLLECTIVE_RANK`](rules::COLLECTIVE_RANK) also for this rank itself.
    #[doc(alias = "HcclSend")]
    pub fn send<T: Element>(&mut self, queue: &impl Queue, tensor: &Tensor<T>, to: usize) -> Result<()> {
        noted(queue, || {
            let (dtype, peer) = (self.dtype(tensor)?, self.peer("to", to)?);
            self.admits("tensor", tensor, tensor.len().max(1), false)?;
            let (at, count) = (tensor.as_raw(), tensor.len() as u64);
            self.queue(queue, "HcclSend", &[tensor], |api, comm, stream| {
                // SAFETY: the tensor has as many elements, and is kept while the call may use it.
                Ok(unsafe { api.HcclSend()?(at, count, dtype, peer, comm, stream) })
            })
        })
    }

    /// Receives a tensor from a rank, which sends as many elements of the same type.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    #[doc(alias = "HcclRecv")]
    pub fn recv<T: Element>(&mut self, queue: &impl Queue, tensor: &Tensor<T>, from: usize) -> Result<()> {
        noted(queue, || {
            let (dtype, peer) = (self.dtype(tensor)?, self.peer("from", from)?);
            self.admits("tensor", tensor, tensor.len().max(1), true)?;
            let (at, count) = (tensor.as_raw(), tensor.len() as u64);
            self.queue(queue, "HcclRecv", &[tensor], |api, comm, stream| {
                // SAFETY: the tensor has as many elements, and is kept while the call may use it.
                Ok(unsafe { api.HcclRecv()?(at, count, dtype, peer, comm, stream) })
            })
        })
    }

    /// Sends and receives messages as one call, none of which waits for another: rings of ranks, and exchanges in both
    /// directions. A message pairs with one of the other rank: the first that goes to a rank with the first that this
    /// rank expects, and so on. What a rank sends to itself it receives in the same call.
    ///
    /// ```
    /// # fn main() -> ascend_attention::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// use ascend_attention::comm::{Communicator, Message};
    /// use ascend_attention::{Runtime, Tensor};
    ///
    /// let mut rank = Communicator::all(&[Runtime::emulated()?.device(0)?])?.remove(0);
    /// let stream = rank.device().stream()?;
    /// let (sent, received) = (stream.upload(&[7i32; 3], [3])?, Tensor::<i32>::empty(rank.device(), [3])?);
    /// let (next, previous) = ((rank.rank() + 1) % rank.size(), (rank.rank() + rank.size() - 1) % rank.size());
    /// let ring = [Message::Send { tensor: &sent, to: next }, Message::Recv { tensor: &received, from: previous }];
    /// rank.batch(&stream, &ring)?;
    /// assert_eq!(received.download(&stream)?, [7; 3]);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`all_gather`](Self::all_gather) for each tensor; [`COLLECTIVE_RANK`](rules::COLLECTIVE_RANK);
    /// [`COLLECTIVE_MESSAGES`](rules::COLLECTIVE_MESSAGES) without messages, and for messages of this rank to itself
    /// that do not pair up; [`ARGUMENT_MEMORY`](rules::ARGUMENT_MEMORY) for a tensor that is received and shares memory
    /// with another.
    #[doc(alias = "HcclBatchSendRecv")]
    pub fn batch(&mut self, queue: &impl Queue, messages: &[Message<'_>]) -> Result<()> {
        noted(queue, || {
            let mut items = Vec::with_capacity(messages.len());
            for message in messages {
                let (tensor, peer) = (message.tensor(), message.peer());
                let (direction, argument, receives) = match message {
                    Message::Send { .. } => (sys::HcclSendRecvType::HCCL_SEND, "to", false),
                    Message::Recv { .. } => (sys::HcclSendRecvType::HCCL_RECV, "from", true),
                };
                let (dtype, rank) = (self.dtype(tensor)?, rank_of(argument, peer, self.size())?);
                self.admits("tensor", tensor, tensor.len().max(1), receives)?;
                items.push(sys::HcclSendRecvItem {
                    sendRecvType: direction,
                    buf: tensor.as_raw(),
                    count: tensor.len() as u64,
                    dataType: dtype,
                    remoteRank: rank,
                });
            }
            let count = u32::try_from(items.len()).ok().filter(|count| *count > 0);
            let count = count.ok_or_else(|| {
                Error::by(&rules::COLLECTIVE_MESSAGES, "messages", items.len(), "1 or more, as C counts them")
                    .fix("leave the call out where a rank neither sends nor receives")
            })?;
            self.check_own(messages)?;
            check_apart(messages)?;
            let tensors: Vec<&AnyTensor> = messages.iter().map(Message::tensor).collect();
            self.queue(queue, "HcclBatchSendRecv", &tensors, |api, comm, stream| {
                // SAFETY: the tensors have as many elements, as checked, and are kept while the call may use them; HCCL
                // reads the list in the call.
                Ok(unsafe { api.HcclBatchSendRecv()?(items.as_mut_ptr(), count, comm, stream) })
            })
        })
    }

    /// Refuses messages of this rank to itself that do not pair up: what is sent first with what is received first.
    fn check_own(&self, messages: &[Message<'_>]) -> Result<()> {
        let own = |receives: bool| {
            let own = messages.iter().filter(move |message| message.peer() == self.rank());
            own.filter(move |message| message.receives() == receives).map(|message| {
                let tensor = message.tensor();
                (tensor.dtype(), tensor.len())
            })
        };
        if own(false).eq(own(true)) {
            return Ok(());
        }
        let listed = |receives| {
            let listed: Vec<String> = own(receives).map(|(dtype, len)| format!("{len} {dtype}")).collect();
            if listed.is_empty() { "nothing".to_owned() } else { listed.join(", ") }
        };
        Err(Error::by(
            &rules::COLLECTIVE_MESSAGES,
            "messages",
            format_args!("{} from rank {} to itself, which receives {}", listed(false), self.rank(), listed(true)),
            "as much received as sent, in one order",
        )
        .fix("receive from this rank what it sends to itself, or copy the tensor on its device"))
    }

    /// Another rank, as C takes it.
    fn peer(&self, argument: &'static str, rank: usize) -> Result<u32> {
        if rank == self.rank() {
            return Err(Error::by(
                &rules::COLLECTIVE_RANK,
                argument,
                format_args!("{rank}, this rank itself"),
                "another rank",
            )
            .fix("copy the tensor on its device"));
        }
        rank_of(argument, rank, self.size())
    }
}
