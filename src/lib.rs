//! The fused attention operators of Huawei Ascend CANN, called directly and safely, and testable on a machine without
//! an NPU.
//!
//! The crate calls `aclnnFusedInferAttentionScore` and its relatives through CANN's own C ABI. The functions of that
//! ABI are either CANN's libraries, found at run time, or an emulation of them on the CPU that is part of the crate:
//! the same two-phase calls, status codes, asynchronous streams, and device memory that the host cannot touch. One
//! program runs on both. **Nothing has run on an NPU yet**: the contract follows CANN's documents, headers and recorded
//! verdicts.
//!
//! ```
//! use ascend_attention::{CausalOrigin, FusedInferAttention, Layout, Runtime, f16};
//!
//! # fn main() -> ascend_attention::Result<()> {
//! let runtime = Runtime::auto()?; // an NPU if there is one; otherwise the emulation
//! let device = runtime.device(0)?;
//! let stream = device.stream()?;
//!
//! let half = |n: usize| (0..n).map(|i| f16::from_f32((i % 7) as f32 * 0.1)).collect::<Vec<_>>();
//! let query = stream.upload(&half(8 * 16 * 64), [1, 8, 16, 64])?; // batch, heads, rows, head dimension
//! let key = stream.upload(&half(2 * 48 * 64), [1, 2, 48, 64])?; // four query heads share a key head
//! let value = stream.upload(&half(2 * 48 * 64), [1, 2, 48, 64])?;
//!
//! let plan = FusedInferAttention::new(Layout::Bnsd)
//!     .heads(8)
//!     .kv_heads(2)
//!     .scale(1.0 / 64f64.sqrt())
//!     .mask(device.masks().causal(CausalOrigin::RightDown)?)
//!     .plan((&query, &key, &value))?; // every rule of the operator is checked here
//! let output = plan.launch(&stream, (&query, &key, &value))?; // once a layer; returns at once
//!
//! let attention: Vec<f16> = output.attention.download(&stream)?; // waits for this stream alone
//! assert_eq!(attention.len(), 8 * 16 * 64);
//! assert!(attention.iter().all(|x| x.is_finite()));
//! # Ok(())
//! # }
//! ```
//!
//! # Where to look
//!
//! - [`prelude`]: what most programs use, to import at once.
//! - [`Runtime`], [`Device`], [`Stream`], [`Event`]: what executes the work, and in which order.
//! - [`Tensor`], [`DeviceBuffer`], [`HostBuffer`]: memory.
//! - [`operation`]: plans, which every operator makes and launches in the same way.
//! - [`FusedInferAttention`], [`Plan`], [`Mask`]: the operator of inference. [`attention::Arguments`] takes every
//!   argument by name.
//! - [`mask`]: every mask that the operators take, and who uses which.
//! - [`graph`]: calls captured once and replayed with other lengths.
//! - [`merge`]: attention over parts of the keys, merged. [`scatter`]: new keys and values into a paged cache.
//!   [`gather`]: keys and values out of one.
//! - [`indexer`]: the keys that sparse attention reads, chosen by a score. [`sparse_flash`]: attention to chosen
//!   keys. [`quant_indexer`], [`quant_sparse_flash`]: the same with keys of one byte an element. [`sparse`]: the
//!   sequences of such calls. [`block_sparse`]: attention to blocks of keys by a mask. [`nsa_compress`],
//!   [`nsa_compress_with_cache`], [`nsa_compress_attention_infer`], [`nsa_selected_attention_infer`]: native sparse
//!   attention, which compresses tokens, and by these selects the blocks that it attends to.
//! - [`causal_conv`]: the causal convolution in front of linear attention. [`fused_causal_conv`],
//!   [`inplace_fused_causal_conv`]: that of CANN, for Ascend 950.
//! - [`recurrent_delta_rule`], [`chunk_delta_rule`]: linear attention by the gated delta rule; [`delta_rule`]: its
//!   sequences and states.
//! - [`blockwise`]: attention under any mask, by blocks and by rows, merged.
//! - [`matmul`]: products of matrices. [`norm`]: rows divided by their root mean square.
//! - [`prompt`], [`incre`]: attention of the Atlas inference series (310P), for prefill and for single rows.
//! - [`flash`]: the attention of training, forward, with dropout and all sparse modes. [`ring`]: merges it over a
//!   ring of ranks.
//! - [`comm`]: communicators and collectives between devices (HCCL).
//! - The crate `ascend-serving`: the paged cache itself, batches, backends, drafts.
//! - [`Error`]: everything that can go wrong, as one type.
//! - [`case`]: calls as files, for bug reports, golden tests and comparisons between machines.
//! - [`spec`]: the operators' contracts, as data. [`sys`]: the raw C ABI.
//!
//! # Ownership
//!
//! Every handle is destroyed once, by its last owner, and may be dropped at any time. Memory that queued work still
//! uses stays allocated until that work is over, without the drop waiting for it; the stream's progress is checked
//! when memory is allocated, dropped or waited for. Dropping a [`Stream`] waits for its work. Failures while dropping
//! are reported by [`tracing`].
//!
//! Every handle has `as_raw`, and those that other frameworks may own `from_raw_borrowed`, so that streams and memory
//! of another framework can be used without owning them. No safe function takes a raw pointer.
//!
//! # Threads
//!
//! Everything is `Send` and `Sync`. CANN's current device is a property of each thread: every function here makes its
//! own device the calling thread's before it calls CANN, and leaves it so. What is queued on one stream happens in
//! the order of the calls; what is queued on two is ordered by [`Event`]s alone, and two streams that touch the same
//! tensor, at least one of them writing, without an event in between compute unspecified values. The emulation names
//! such races.
//!
//! # Errors and panics
//!
//! A call that breaks a rule of the operator is an [`Error::Violation`] before any of the operator's functions is
//! called: it names the rule, the value, what is allowed and how to mend it. What CANN refuses has the function, its
//! status with CANN's name for it, and the text of `aclGetRecentErrMsg`. No function of this crate panics, on any
//! input.
//!
//! # Features
//!
//! | feature | default | gives | costs |
//! |---|---|---|---|
//! | `emulation` | yes | [`Runtime::emulated`], and `auto` where there is no NPU | `ascend-emu`, `rayon`, `libc` |
//! | `link` | no | CANN's libraries linked at build time | builds and starts only where CANN is installed |
//! | `bindgen` | no | raw bindings made anew at build time | needs libclang; slower builds |
//!
//! The emulation takes about 30 processor seconds of an optimised build with `codegen-units = 1`; with several, each
//! kernel is optimised twice. A package that depends on this one does not inherit its profiles, and a debug build of
//! the emulation computes a hundred times slower than an optimised one. Put into the package's own `Cargo.toml`:
//!
//! ```toml
//! [profile.dev.package.ascend-emu]
//! opt-level = 3
//!
//! [profile.release.package.ascend-emu]
//! codegen-units = 1 # half the time of a build
//! ```
//!
//! Without any feature the crate needs neither CANN nor libclang nor a C compiler to build, and CANN only to run.
//!
//! # Environment
//!
//! [`sys::VARIABLES`] lists every variable with its values: `ASCEND_PLATFORM` chooses the platform of
//! [`Runtime::auto`], `ASCEND_HOME_PATH` the toolkit, `ASCEND_RECORD` a folder for calls that are refused or fail
//! ([`case::RECORD_VARIABLE`]), `ASCEND_EMU_CHECK=strict` makes errors of what the emulation finds, races among them,
//! and `ASCEND_EMU_SOC` and `ASCEND_EMU_CANN` the emulated product and release, which [`Runtime::emulated_as`]
//! chooses whatever they say. A name that is nearly one of these is reported once: on stderr by the emulation, as a
//! warning of [`tracing`] on an NPU.

#![warn(missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod blockwise;
pub mod case;
mod case_file;
pub mod comm;
mod error;
pub mod graph;
pub mod mask;
mod memory;
pub mod merge;
mod operator;
mod ops;
pub mod prelude;
pub mod rules;
mod runtime;
mod status;
mod tensor;

pub use ascend_spec as spec;
pub use ascend_spec::minifloat::{Float4E2M1, Float8E4M3Fn, Float8E8M0, HiFloat8};
pub use ascend_spec::{DType, Layout, SparseMode, Violation};
pub use ascend_sys as sys;
pub use attention::{FusedInferAttention, InnerPrecise, Output, Plan};
pub use error::{Error, Result};
pub use graph::Graph;
pub use half::{bf16, f16};
pub use mask::{CausalOrigin, Mask, Masks, SlidingWindow};
pub use memory::{DeviceBuffer, Element, HostBuffer, Transfer};
pub use ops::public::*;
pub use runtime::{
    Device, Event, Installed, Machine, MemoryInfo, PLATFORM_VARIABLE, Platform, Queue, Runtime, Stream, StreamMark,
    Version, VersionSource, file_version, toolkit_version,
};
pub use status::{AclStatus, AclnnStatus, HcclStatus};
pub use tensor::{AnyTensor, Number, RangeReport, Tensor};
