//! Communicators: ranks on devices of their own, and what goes from rank to rank (HCCL).
//!
//! A [`Communicator`] is one rank. [`Communicator::all`] makes all ranks of one process, [`Communicator::join`] one
//! rank with the [`RootInfo`] that the root has made and that the program carries to the others;
//! [`Communicator::split`] makes one of some of the ranks. A call is queued on a
//! stream of the rank's device, like a launch, and may read and write tensors that are dropped at once. Given a
//! [`Capturing`](crate::graph::Capturing) in the place of the stream it becomes part of the graph, which keeps the
//! rank. All ranks replay graphs with the same calls; on hardware make a call of each kind before the first capture.
//!
//! All ranks make the same calls in the same order; `&mut self` keeps a rank's calls one after the other. HCCL compares
//! only the first of them: where later ones differ, hardware waits for half an hour or computes wrong numbers. The
//! emulation fails every rank at once and says which ones differ in what. On hardware the first call of a kind waits
//! on the host for the other ranks, so that each rank needs a thread of its own.
//!
//! ```
//! use ascend_attention::{Runtime, Tensor};
//! use ascend_attention::comm::Communicator;
//!
//! # fn main() -> ascend_attention::Result<()> {
//! # #[cfg(feature = "emulation")] {
//! let runtime = Runtime::emulated()?;
//! let ranks = Communicator::all(&[runtime.device(0)?, runtime.device(1)?])?;
//! std::thread::scope(|scope| {
//!     let threads: Vec<_> = ranks.into_iter().map(|mut rank| {
//!         scope.spawn(move || -> ascend_attention::Result<Vec<f32>> {
//!             let stream = rank.device().stream()?;
//!             let own = stream.upload(&[rank.rank() as f32; 3], [1, 3])?;
//!             let all = Tensor::empty(rank.device(), [2, 3])?;
//!             rank.all_gather(&stream, &own, &all)?;
//!             all.download(&stream)
//!         })
//!     }).collect();
//!     for thread in threads {
//!         assert_eq!(thread.join().unwrap()?, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
//!     }
//!     Ok::<_, ascend_attention::Error>(())
//! })?;
//! # }
//! # Ok(())
//! # }
//! ```

mod collectives;
mod communicator;
mod messages;
mod split;

pub use ascend_spec::collective::Reduction;
pub use collectives::Reducible;
pub use communicator::{Communicator, RootInfo};
pub use messages::Message;
