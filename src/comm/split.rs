//! Communicators of some ranks of another one.

use std::ptr;
use std::sync::Arc;

use ascend_spec::collective::digest;
use ascend_sys::bindings as sys;

use crate::error::{Error, Result, hccl_error};
use crate::rules;
use crate::runtime::{ReplayedObject as _, lock};

use super::communicator::Communicator;

impl Communicator {
    /// A communicator of some ranks of this one: rank `i` of it is `ranks[i]` here. Each of these ranks calls this with
    /// the same list; the others have nothing to do, and no rank waits. Lists may have ranks in common.
    ///
    /// The calls of a rank in both come one after the other, in the order in which they are queued, and all ranks have
    /// to queue them in one order. The new communicator keeps this one: where this one is dropped first, the rank
    /// leaves it when the last of its parts is dropped. A failure of one of the two is none of the other. Ranks that
    /// split the same list once more get another communicator, if all of them do.
    ///
    /// ```
    /// # fn main() -> ascend_attention::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// use ascend_attention::Runtime;
    /// use ascend_attention::comm::{Communicator, Reduction};
    ///
    /// let runtime = Runtime::emulated()?;
    /// let mut ranks = Communicator::all(&[runtime.device(0)?, runtime.device(1)?])?;
    /// // The second rank alone, and therefore without a thread of its own.
    /// let mut alone = ranks[1].split(&[1])?;
    /// assert_eq!((alone.rank(), alone.size()), (0, 1));
    /// let stream = alone.device().stream()?;
    /// let numbers = stream.upload(&[2.0f32; 3], [3])?;
    /// alone.all_reduce_in_place(&stream, &numbers, Reduction::Sum)?;
    /// assert_eq!(numbers.download(&stream)?, [2.0; 3]);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`COLLECTIVE_PART`](rules::COLLECTIVE_PART) for a list that is not of ranks of this communicator in rising order
    /// with this rank among them, and where this communicator is a part itself; [`Error::Hccl`];
    /// [`Error::MissingSymbol`] without libhccl.
    #[doc(alias = "HcclCreateSubCommConfig")]
    #[doc(alias = "ncclCommSplit")]
    pub fn split(&mut self, ranks: &[usize]) -> Result<Self> {
        if self.handle.whole.is_some() {
            return Err(Error::by(
                &rules::COLLECTIVE_PART,
                "self",
                "a communicator that is a part itself",
                "one that `Communicator::all` or `join` has made",
            )
            .fix("split the communicator that this one is a part of, by the ranks there"));
        }
        let own = ranks.iter().position(|rank| *rank == self.rank());
        let rising = ranks.is_sorted_by(|one, next| one < next) && ranks.iter().all(|rank| *rank < self.size());
        let (true, Some(own)) = (rising, own) else {
            return Err(Error::by(
                &rules::COLLECTIVE_PART,
                "ranks",
                format_args!("{ranks:?} of rank {}", self.rank()),
                format_args!("ranks below {} in rising order, each once, {} among them", self.size(), self.rank()),
            ));
        };
        // Each is below the number of ranks, which C counts so.
        let mut list: Vec<u32> = ranks.iter().map(|rank| *rank as u32).collect();
        let before = self.parts.get(&list).copied().unwrap_or(0);
        // The number of the part, which the ranks that make it alone have in common.
        let number = digest(list.iter().map(|rank| u64::from(*rank)).chain([before]));
        let (mut whole, mut raw, mut config) = (self.handle.raw, ptr::null_mut(), settings());
        let order = self.handle.order();
        let _turn = lock(order);
        let api = self.device().context().bind()?;
        // SAFETY: the communicator is alive, and no other call of it is made meanwhile; the list has as many ranks as
        // its length says, and `raw` is a place for the result; HCCL reads list and settings in the call.
        let result = unsafe {
            api.HcclCreateSubCommConfig()?(
                &mut whole,
                list.len() as u32,
                list.as_mut_ptr(),
                number,
                own as u32,
                &mut config,
                &mut raw,
            )
        };
        hccl_error(api, "HcclCreateSubCommConfig", (Some(self.rank()), None), result)?;
        self.parts.insert(list, before + 1);
        Ok(Self::new((self.device(), Some(Arc::clone(&self.handle))), raw, own, ranks.len()))
    }
}

/// The settings of the process, as every release reads them.
fn settings() -> sys::HcclCommConfig {
    let bytes = |number: u64| number.to_ne_bytes();
    let words = |words: [u32; 2]| words.map(u32::to_ne_bytes).concat();
    let size = size_of::<sys::HcclCommConfig>() as u64;
    let head = [
        bytes(size).to_vec(),
        words([sys::HCCL_COMM_CONFIG_MAGIC_WORD, sys::HCCL_COMM_CONFIG_VERSION]),
        bytes(0).to_vec(),
    ];
    let mut reserved = [0; sys::HCCL_COMM_CONFIG_INFO_BYTES as usize];
    for (place, byte) in reserved.iter_mut().zip(head.concat()) {
        *place = byte as std::ffi::c_char;
    }
    sys::HcclCommConfig {
        reserved,
        hcclBufferSize: sys::HCCL_COMM_CONFIG_NOT_SET,
        hcclDeterministic: sys::HCCL_COMM_CONFIG_NOT_SET,
        hcclCommName: [0; 128],
        hcclUdi: [0; 128],
        hcclOpExpansionMode: 0,
        hcclRdmaTrafficClass: sys::HCCL_COMM_CONFIG_NOT_SET,
        hcclRdmaServiceLevel: sys::HCCL_COMM_CONFIG_NOT_SET,
    }
}
