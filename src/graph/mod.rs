//! Graphs: the calls of a step, captured once and replayed with other contents and lengths.
//!
//! Launching a decode step layer by layer costs the host more than the device needs to compute it. A [`Graph`] is
//! recorded once and replayed by one call. What a replay sees:
//!
//! - **Tensors** are captured by address: refill them in place (`overwrite`, `copy_from`), and the next replay reads
//!   the new content. The graph owns the buffers it was captured with, and hands out shared references only
//!   ([`Graph::buffers`]), so that none is dropped or replaced by another; it holds the memory of everything it
//!   captured besides, masks and workspace included.
//! - **Length arrays** are captured by value. A call captured by [`Capturing::attention`] therefore takes new lengths
//!   for every replay, as an [`Update`]: a replay without one does not compile, and one that was used up is refused
//!   (`graph.update`). Only calls of FusedInferAttentionScore take one; plans, of any operator, that are launched on
//!   the [`Capturing`] keep their lengths, but for numbers that the operator reads in tensors, such as those of
//!   `DeltaSequences` and `ConvSequences`.
//! - **Workspace** is taken at the longest lengths, which the capture declares, and belongs to the graph. Longer
//!   lengths, and calls that need more workspace than there is, are refused before anything is launched.
//!
//! Under the hood each such call waits for an event of its own. [`Graph::launch`] launches the graph, then replaces
//! the calls' lengths on a second stream and records the events, in the order that CANN needs; when the lengths are
//! replaced the previous replay is over, because the second stream waits for that. No order of calls to this module
//! makes a stream wait for ever.
//!
//! ```
//! use ascend_attention::attention::{BlockTable, CallLengths, Inputs, PerRequest};
//! use ascend_attention::{FusedInferAttention, Graph, Layout, Output, Runtime, Tensor, bf16};
//!
//! struct Buffers {
//!     query: Tensor<bf16>,
//!     cache: Tensor<bf16>,
//!     table: BlockTable,
//!     output: Output<bf16>,
//! }
//!
//! # fn main() -> ascend_attention::Result<()> {
//! # #[cfg(feature = "emulation")] {
//! let device = Runtime::emulated()?.device(0)?;
//! let stream = device.stream()?;
//! let buffers = Buffers {
//!     query: stream.upload(&[bf16::ONE; 2 * 128], [2, 1, 128])?,
//!     cache: stream.upload(&vec![bf16::ONE; 8 * 16 * 128], [8, 16, 128])?,
//!     table: BlockTable::with_columns(&stream, &[vec![4, 1], vec![3]], 4, 16)?,
//!     output: Output {
//!         attention: Tensor::empty(&device, [2, 1, 128])?,
//!         softmax_lse: None,
//!     },
//! };
//! let call = FusedInferAttention::new(Layout::Bsh).heads(1).kv_heads(1).scale(1.0 / 128f64.sqrt());
//! let longest = PerRequest::new(vec![64, 64])?;
//! let (mut graph, ()) = Graph::capture(&device, buffers, |capture, buffers| {
//!     let Buffers { query, cache, table, output } = buffers;
//!     let inputs = Inputs::new(query, cache, cache).paged(table);
//!     let longest = CallLengths::Batched { q: None, kv: &longest };
//!     let call = capture.attention(&call, longest, inputs)?; // planned once
//!     capture.launch_into(call, inputs, &mut output.clone()) // once a layer
//! })?;
//!
//! for keys in [[20, 7], [21, 8]] {
//!     let keys = PerRequest::new(keys.to_vec())?;
//!     let update = graph.update().all(CallLengths::Batched { q: None, kv: &keys })?;
//!     graph.launch(&stream, update)?;
//! }
//! assert_eq!(graph.buffers().output.attention.download(&stream)?, [bf16::ONE; 2 * 128]);
//! # }
//! # Ok(())
//! # }
//! ```
//!
//! The buffers are the graph's:
//!
//! ```compile_fail,E0594
//! # use ascend_attention::{Graph, Tensor, bf16};
//! # struct Buffers { query: Tensor<bf16> }
//! # fn rebind(graph: &mut Graph<Buffers>, query: Tensor<bf16>) {
//! graph.buffers().query = query; // the graph would go on reading the old tensor
//! # }
//! ```
//!
//! A replay uses its update up:
//!
//! ```compile_fail,E0382
//! # use ascend_attention::{Graph, Result, Stream, graph::Update};
//! # fn twice(graph: &mut Graph<()>, stream: &Stream, update: Update) -> Result<()> {
//! graph.launch(stream, update)?;
//! graph.launch(stream, update)
//! # }
//! ```

mod call;
mod capture;
mod captured_graph;
mod estimate;
mod external_event;
mod group;
mod limits;
mod session;
mod update;

pub use call::CapturedCall;
pub use capture::Capturing;
pub use captured_graph::Graph;
pub use estimate::CaptureEstimate;
pub use group::GraphGroup;
pub use limits::KeyLimits;
pub use update::Update;

pub use crate::runtime::capturing::is_capturing;
