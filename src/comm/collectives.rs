//! The calls that ranks make together.

use std::ffi::c_void;

use ascend_spec::DType;
use ascend_spec::collective::{Collective, MOST_ELEMENTS, Reduction, Share, hccl_number, moves, reduces};
use ascend_sys::bindings as sys;
use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::rules;
use crate::runtime::Queue;
use crate::tensor::{AnyTensor, Tensor};

use super::communicator::{Communicator, rank_of};

/// Keeps others from implementing [`Reducible`].
trait Sealed {}

/// Element types that ranks reduce. On Atlas 310P there is no `bf16` and `i64`, and `u64` is Ascend 950's.
#[allow(private_bounds, reason = "sealed: the bound has no public name")]
pub trait Reducible: Element + Sealed {}

macro_rules! reducible {
    ($($type:ty)*) => { $( impl Sealed for $type {} impl Reducible for $type {} )* };
}

reducible! { f16 bf16 f32 i8 i32 i64 u64 }

/// The elements of a call, as C takes them.
#[derive(Clone, Copy)]
struct Elements {
    dtype: sys::HcclDataType,
    count: u64,
}

impl Communicator {
    /// The number of an element type, which the device's product moves.
    pub(super) fn dtype(&self, tensor: &AnyTensor) -> Result<sys::HcclDataType> {
        let (soc, dtype) = (self.device().soc()?, tensor.dtype());
        match hccl_number(dtype).filter(|_| moves(soc, dtype)) {
            Some(number) => Ok(sys::HcclDataType(number)),
            None => Err(Error::by(&rules::COLLECTIVE_TYPE, "tensor", dtype, names(|dtype| moves(soc, dtype)))
                .fix("give a view of the same bytes as integers")),
        }
    }

    /// Checks a tensor of a call: contiguous, on the device, of this many elements.
    pub(super) fn admits(&self, argument: &'static str, tensor: &AnyTensor, len: usize, written: bool) -> Result<()> {
        tensor.check_device(argument, self.device())?;
        if !tensor.is_contiguous() {
            return Err(Error::invalid(argument, tensor.desc(), "a contiguous tensor")
                .fix("copy it with `contiguous`, or narrow the first axis alone"));
        }
        if tensor.len() != len || len as u64 > MOST_ELEMENTS {
            return Err(Error::by(
                &rules::COLLECTIVE_LENGTH,
                argument,
                format_args!("{} elements", tensor.len()),
                format_args!("{len} elements, at most {MOST_ELEMENTS}"),
            ));
        }
        if written { tensor.memory().writable(argument) } else { Ok(()) }
    }

    /// Checks a call that sends one tensor and receives another: one buffer is whole or both have a part for each rank,
    /// by [`Collective`].
    fn checked(&self, collective: Collective, send: &AnyTensor, receive: &AnyTensor) -> Result<Elements> {
        let dtype = self.dtype(send)?;
        let size = self.size();
        let count = match (collective.sent(), collective.received()) {
            (Share::Whole, _) => send.len(),
            (_, Share::Whole) => receive.len(),
            _ => send.len() / size.max(1),
        };
        // HCCL makes no call of such a tensor, so that the calls of ranks would no longer be the same ones.
        if count == 0 {
            return Err(Error::by(
                &rules::COLLECTIVE_LENGTH,
                "send",
                format_args!("{} elements, of which nothing goes to a rank", send.len()),
                "at least 1 element for each rank",
            )
            .fix("leave the call out on every rank; where some ranks have nothing, use the call of uneven lengths"));
        }
        let expected = |share| match share {
            Share::Parts => count.saturating_mul(size),
            Share::Whole | Share::Nothing => count,
        };
        self.admits("send", send, expected(collective.sent()), false)?;
        self.admits("receive", receive, expected(collective.received()), true)?;
        apart(send, receive)?;
        Ok(Elements { dtype, count: count as u64 })
    }

    fn reduction(&self, collective: Collective, tensor: &AnyTensor, reduction: Reduction) -> Result<sys::HcclReduceOp> {
        let (soc, dtype) = (self.device().soc()?, tensor.dtype());
        if !reduces(soc, collective, dtype, reduction) {
            return Err(Error::by(
                &rules::COLLECTIVE_TYPE,
                "reduction",
                format_args!("{} of {dtype}", reduction.name()),
                names(|dtype| reduces(soc, collective, dtype, reduction)),
            )
            .fix("convert the elements to one of these types"));
        }
        Ok(sys::HcclReduceOp(reduction.hccl_number()))
    }

    /// Waits on the stream until the streams of all ranks have come.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](rules::ARGUMENT_DEVICE) for a stream of another device; [`Error::Hccl`];
    /// [`Error::Capturing`] for a stream on a thread that captures; [`Error::MissingSymbol`] without libhccl.
    #[doc(alias = "HcclBarrier")]
    pub fn barrier(&mut self, queue: &impl Queue) -> Result<()> {
        noted(queue, || {
            // SAFETY: both handles are alive.
            self.queue(queue, "HcclBarrier", &[], |api, comm, stream| Ok(unsafe { api.HcclBarrier()?(comm, stream) }))
        })
    }

    /// Gathers `send` of each rank in `receive` of every rank, in the order of the ranks. All have the same length,
    /// and `receive` has `size` times that.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`barrier`](Self::barrier); [`COLLECTIVE_LENGTH`](rules::COLLECTIVE_LENGTH),
    /// [`COLLECTIVE_TYPE`](rules::COLLECTIVE_TYPE); [`ARGUMENT_MEMORY`](rules::ARGUMENT_MEMORY) for tensors that share
    /// memory; [`ARGUMENT_VALUE`](rules::ARGUMENT_VALUE) for strided ones.
    #[doc(alias = "HcclAllGather")]
    pub fn all_gather<T: Element>(&mut self, queue: &impl Queue, send: &Tensor<T>, receive: &Tensor<T>) -> Result<()> {
        noted(queue, || {
            let Elements { dtype, count } = self.checked(Collective::AllGather, send, receive)?;
            let (from, to) = (send.as_raw(), receive.as_raw());
            self.queue(queue, "HcclAllGather", &[send, receive], |api, comm, stream| {
                // SAFETY: the tensors have as many elements, as checked, and are kept while the call may use them.
                Ok(unsafe { api.HcclAllGather()?(from, to, count, dtype, comm, stream) })
            })
        })
    }

    /// [`all_gather`](Self::all_gather) of tensors of their own lengths: `lengths[r]` elements come from rank `r`, one
    /// rank's behind the other's.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`all_gather`](Self::all_gather).
    #[doc(alias = "HcclAllGatherV")]
    pub fn all_gather_v<T: Element>(
        &mut self,
        queue: &impl Queue,
        send: &Tensor<T>,
        receive: &Tensor<T>,
        lengths: &[usize],
    ) -> Result<()> {
        noted(queue, || {
            let (counts, places, total) = self.lengths("lengths", lengths)?;
            let own = lengths.get(self.rank()).copied().unwrap_or(0);
            let dtype = self.dtype(send)?;
            self.admits("send", send, own, false)?;
            self.admits("receive", receive, total, true)?;
            apart(send, receive)?;
            let (from, to, own) = (send.as_raw(), receive.as_raw(), own as u64);
            self.queue(queue, "HcclAllGatherV", &[send, receive], |api, comm, stream| {
                let (counts, places) = (counts.as_ptr().cast(), places.as_ptr().cast());
                // SAFETY: the tensors have as many elements, as checked, and are kept while the call may use them; the
                // lists have an entry for each rank, and HCCL reads them in the call.
                Ok(unsafe { api.HcclAllGatherV()?(from, own, to, counts, places, dtype, comm, stream) })
            })
        })
    }

    /// Reduces `send` of all ranks to `receive` of every rank. Both have the same length on all ranks.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`all_gather`](Self::all_gather).
    #[doc(alias = "HcclAllReduce")]
    pub fn all_reduce<T: Reducible>(
        &mut self,
        queue: &impl Queue,
        send: &Tensor<T>,
        receive: &Tensor<T>,
        reduction: Reduction,
    ) -> Result<()> {
        noted(queue, || {
            let elements = self.checked(Collective::AllReduce, send, receive)?;
            self.all_reduced(queue, send, receive, elements, reduction)
        })
    }

    /// [`all_reduce`](Self::all_reduce) of a tensor that is overwritten with the result.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`all_gather`](Self::all_gather).
    #[doc(alias = "HcclAllReduce")]
    pub fn all_reduce_in_place<T: Reducible>(
        &mut self,
        queue: &impl Queue,
        tensor: &Tensor<T>,
        reduction: Reduction,
    ) -> Result<()> {
        noted(queue, || {
            let dtype = self.dtype(tensor)?;
            self.admits("tensor", tensor, tensor.len().max(1), true)?;
            let elements = Elements { dtype, count: tensor.len() as u64 };
            self.all_reduced(queue, tensor, tensor, elements, reduction)
        })
    }

    fn all_reduced(
        &mut self,
        queue: &impl Queue,
        send: &AnyTensor,
        receive: &AnyTensor,
        Elements { dtype, count }: Elements,
        reduction: Reduction,
    ) -> Result<()> {
        let op = self.reduction(Collective::AllReduce, send, reduction)?;
        let (from, to) = (send.as_raw(), receive.as_raw());
        self.queue(queue, "HcclAllReduce", &[send, receive], |api, comm, stream| {
            // SAFETY: the tensors have as many elements, as checked, and are kept while the call may use them.
            Ok(unsafe { api.HcclAllReduce()?(from, to, count, dtype, op, comm, stream) })
        })
    }

    /// Reduces `send` of all ranks, and leaves part `r` of the result in `receive` of rank `r`. `send` has `size` times
    /// the length of `receive`.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`all_gather`](Self::all_gather).
    #[doc(alias = "HcclReduceScatter")]
    pub fn reduce_scatter<T: Reducible>(
        &mut self,
        queue: &impl Queue,
        send: &Tensor<T>,
        receive: &Tensor<T>,
        reduction: Reduction,
    ) -> Result<()> {
        noted(queue, || {
            let Elements { dtype, count } = self.checked(Collective::ReduceScatter, send, receive)?;
            let op = self.reduction(Collective::ReduceScatter, send, reduction)?;
            let (from, to) = (send.as_raw(), receive.as_raw());
            self.queue(queue, "HcclReduceScatter", &[send, receive], |api, comm, stream| {
                // SAFETY: the tensors have as many elements, as checked, and are kept while the call may use them.
                Ok(unsafe { api.HcclReduceScatter()?(from, to, count, dtype, op, comm, stream) })
            })
        })
    }

    /// Exchanges parts of equal lengths: part `r` of `send` goes to rank `r`, part `r` of `receive` comes from it.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`all_gather`](Self::all_gather).
    #[doc(alias = "HcclAlltoAll")]
    pub fn all_to_all<T: Element>(&mut self, queue: &impl Queue, send: &Tensor<T>, receive: &Tensor<T>) -> Result<()> {
        noted(queue, || {
            let Elements { dtype, count } = self.checked(Collective::AlltoAll, send, receive)?;
            let (from, to) = (send.as_raw().cast_const(), receive.as_raw().cast_const());
            self.queue(queue, "HcclAlltoAll", &[send, receive], |api, comm, stream| {
                // SAFETY: the tensors have as many elements, as checked, and are kept while the call may use them.
                Ok(unsafe { api.HcclAlltoAll()?(from, count, dtype, to, count, dtype, comm, stream) })
            })
        })
    }

    /// [`all_to_all`](Self::all_to_all) of parts of their own lengths, one behind the other: `sent[r]` elements go to
    /// rank `r`, `received[r]` come from it.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`all_gather`](Self::all_gather).
    #[doc(alias = "HcclAlltoAllV")]
    pub fn all_to_all_v<T: Element>(
        &mut self,
        queue: &impl Queue,
        (send, sent): (&Tensor<T>, &[usize]),
        (receive, received): (&Tensor<T>, &[usize]),
    ) -> Result<()> {
        noted(queue, || {
            let (sent, from_places, send_len) = self.lengths("sent", sent)?;
            let (received, to_places, receive_len) = self.lengths("received", received)?;
            let dtype = self.dtype(send)?;
            self.admits("send", send, send_len, false)?;
            self.admits("receive", receive, receive_len, true)?;
            apart(send, receive)?;
            let (from, to) = (send.as_raw().cast_const(), receive.as_raw().cast_const());
            self.queue(queue, "HcclAlltoAllV", &[send, receive], |api, comm, stream| {
                let list = |list: &[u64]| list.as_ptr().cast::<c_void>();
                let (sent, from_places) = (list(&sent), list(&from_places));
                let (received, to_places) = (list(&received), list(&to_places));
                let function = api.HcclAlltoAllV()?;
                // SAFETY: the tensors have as many elements, as checked, and are kept while the call may use them; the
                // lists have an entry for each rank, and HCCL reads them in the call.
                Ok(unsafe { function(from, sent, from_places, dtype, to, received, to_places, dtype, comm, stream) })
            })
        })
    }

    /// Copies the root's tensor into that of every other rank. All have the same length.
    ///
    /// Since CANN 8.1; not on Atlas 310P.
    ///
    /// # Errors
    /// As for [`all_gather`](Self::all_gather); [`COLLECTIVE_RANK`](rules::COLLECTIVE_RANK).
    #[doc(alias = "HcclBroadcast")]
    pub fn broadcast<T: Element>(&mut self, queue: &impl Queue, tensor: &Tensor<T>, root: usize) -> Result<()> {
        noted(queue, || {
            let soc = self.device().soc()?;
            if !Collective::Broadcast.runs_on(soc) {
                return Err(Error::by(
                    &rules::COLLECTIVE_TYPE,
                    "communicator",
                    Collective::Broadcast.function(),
                    format_args!("what {soc} has: all-reduce, all-gather, reduce-scatter and all-to-all"),
                )
                .fix("gather the tensors of all ranks by `all_gather`, and use that of the root"));
            }
            let (dtype, number) = (self.dtype(tensor)?, rank_of("root", root, self.size())?);
            self.admits("tensor", tensor, tensor.len().max(1), root != self.rank())?;
            let (at, count) = (tensor.as_raw(), tensor.len() as u64);
            self.queue(queue, "HcclBroadcast", &[tensor], |api, comm, stream| {
                // SAFETY: the tensor has as many elements, and is kept while the call may use it.
                Ok(unsafe { api.HcclBroadcast()?(at, count, dtype, number, comm, stream) })
            })
        })
    }

    /// Lengths of parts for each rank as C takes them, the places where parts begin, and the sum.
    fn lengths(&self, argument: &'static str, lengths: &[usize]) -> Result<(Vec<u64>, Vec<u64>, usize)> {
        let sum = lengths.iter().try_fold(0usize, |sum, length| sum.checked_add(*length));
        let total = sum.filter(|sum| *sum as u64 <= MOST_ELEMENTS && lengths.len() == self.size());
        let Some(total) = total else {
            return Err(Error::by(
                &rules::COLLECTIVE_LENGTH,
                argument,
                format_args!(
                    "{} lengths, together {}",
                    lengths.len(),
                    sum.map_or("too many".into(), |sum| sum.to_string())
                ),
                format_args!("{} lengths, together at most {MOST_ELEMENTS}", self.size()),
            ));
        };
        let counts: Vec<u64> = lengths.iter().map(|length| *length as u64).collect();
        let place = |place: &mut u64, count: &u64| Some(std::mem::replace(place, *place + count));
        let places = counts.iter().scan(0, place).collect();
        Ok((counts, places, total))
    }
}

/// Takes note of a call's outcome, of its checks too: the first failure fails a capture.
pub(super) fn noted<R>(queue: &impl Queue, call: impl FnOnce() -> Result<R>) -> Result<R> {
    queue.note(call())
}

/// The types that there are of a kind, as text.
fn names(holds: impl Fn(DType) -> bool) -> String {
    let known = DType::ALL.iter().copied().filter(|&dtype| holds(dtype));
    known.map(|dtype| dtype.to_string()).collect::<Vec<_>>().join(", ")
}

/// Refuses a tensor that is written and shares memory with one that is read.
fn apart(send: &AnyTensor, receive: &AnyTensor) -> Result<()> {
    if !send.overlaps(receive) {
        return Ok(());
    }
    Err(Error::shared("receive", "memory that `send` has too", "memory of its own")
        .fix("give a tensor of its own; of all-reduce there is `all_reduce_in_place`"))
}
