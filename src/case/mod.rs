//! Case files: one operator call, its inputs and what should come out, in one `safetensors` file.
//!
//! Bug reports, golden tests and comparisons between machines all use this one format. A reader refuses whatever it
//! does not know, and names it; running a case compares every element that the file specifies; and the computed
//! outputs can be written as a case again.
//!
//! # Format
//!
//! A [`Case`] is of any operator that [`DeclaredOperator`](crate::spec::declared::DeclaredOperator) lists. Tensors have
//! the operator's parameter names in snake case: `query`, `key`, `value`, `atten_mask`, `block_table` and so on. A list
//! of several tensors is `key.0`, `key.1`, ... Expected outputs have their parameters' names, such as `attention_out`
//! and `softmax_lse`, and are F32; a NaN in them means "not specified". Chosen positions and blocks, `sparse_indices`
//! and `top_k_output`, are I32: those of a row are compared as a set, scores of positions with those of the same
//! positions, and -2147483648 means "not specified". Where an operator writes a part of a
//! tensor, as ScatterPaKvCache does of a cache, the tensor is what it holds before the call, and the name with `_out`
//! is what is expected of it; the new rows of InplaceFusedCausalConv1d are `y`.
//!
//! The metadata holds strings. The operator's other arguments have their names in snake case, too: integers, decimal
//! numbers, `true` or `false`, texts, and JSON lists of integers. Absent, an attribute has the operator's default, and
//! a list is a null pointer. The other keys are:
//!
//! - `format`, `version`: `ascend-attention-case`, `1`
//! - `op`: the operator, such as `fused_infer_attention_score`
//! - `name`, `note`: free text
//! - `atten_mask_kind`: `none`; `tensor`: the tensor `atten_mask`; `compressed`: the standard mask of the sparse mode,
//!   which the reader makes; absent follows from whether there is an `atten_mask`
//! - `soc`: the chip that the call is for, such as `Ascend910B1`; absent is any
//! - `cann`: the release that the call is for, such as `9.1.0`, or with a plus sign the one after it; absent is any
//! - `op_version`: the version of the operator that the call goes to, counted from 1, or the next that a product has;
//!   absent is the one that a call is made with: the oldest that can express it and is not deprecated
//! - `dtype.<tensor>`: `int4`, `float4_e2m1`, `float8_e4m3fn`, `float8_e8m0` or `hifloat8`: the element type of a
//!   tensor that the file stores as U8; that of `key` holds for `key.0` and so on, too
//! - `out_dtype`: element type of `attention_out` of FusedInferAttentionScore and PromptFlashAttention, such as `int8`,
//!   `bfloat16` or `hifloat8`; absent is what the inputs imply
//! - `atol`, `rtol`: tolerance: `abs(got - want) <= atol + rtol * abs(want)`; one may be left out for 0
//! - `softmax_atol`, `softmax_rtol`: tolerance of `softmax_max` and `softmax_sum`, and of `softmax_lse` of
//!   BlockSparseAttention; `atol` and `rtol` are that of the others then
//! - `state_atol`, `state_rtol`: tolerance of states of the gated delta rule, and of lines of a causal convolution;
//!   `atol` and `rtol` are that of the others then
//! - `exact_atol`, `exact_rtol`, `exact_state_atol`, `exact_state_rtol`: tolerance of an implementation of
//!   ChunkGatedDeltaRule that rounds only what it writes, as the emulation
//! - `rms_rtol`: tolerance of `attention_out` of FusedInferAttentionScore, and of `out` of ChunkGatedDeltaRule, as a
//!   whole: `sqrt(sum (got - want)^2 / sum want^2)`
//! - `state_rms_rtol`: the same, of states of ChunkGatedDeltaRule
//! - `state_strides`, `conv_states_strides`: the strides of `state` of RecurrentGatedDeltaRule, and of `conv_states` of
//!   FusedCausalConv1d and its in-place form, a JSON list; the file has the elements row-major
//! - `provider`: whose build of the operator the case is for, where it is not CANN's; such cases are left out as
//!   unsupported, except of the operators that CANN does not have
//! - `expect`: `ok`, or `reject`: the call must be refused before any work is done
//! - `expect_status`: CANN's status of the refusal
//! - `expect_rule`: id of the rule that refuses the call; where `expect` is `ok`, of the lint by which the safe layer
//!   stops what the operator takes
//! - `portable_since`: the first release, such as `8.1.0`, that has to take a call of FusedInferAttentionScore as the
//!   case's own release does; absent: no other release has to
//! - `group`, `group_role`: free text, of operators with `softmax_max` or states: cases that belong together, and the
//!   part of this one
//!
//! Types of 4 bits are two to a byte along the last axis, the even one in the low half: the file's last axis is half
//! the operator's. Masks that the reader makes are 2048 x 2048, in mode 6 3072 x 2048, and BOOL, but INT8 for
//! FusedInferAttentionScore on other products than Ascend 950.
//!
//! ```
//! use ascend_attention::case::{AttentionCase, Case, CaseTensor, Parameter, Verdict};
//! use ascend_attention::{DType, Runtime};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let tensor = || CaseTensor::from_f32(DType::Float16, &[1, 1, 2, 16], &[0.5; 32]);
//! let mut case = AttentionCase::new("an example", Default::default());
//! case.arguments.input_layout = "BNSD".to_owned();
//! for parameter in [Parameter::Query, Parameter::Key, Parameter::Value] {
//!     case.arguments.set_tensor(parameter, tensor()?);
//! }
//! let read = Case::from_bytes(&case.to_bytes()?)?;
//! assert_eq!(read, case.into());
//!
//! let stream = Runtime::auto()?.device(0)?.stream()?;
//! let outcome = read.launch(&stream)?;
//! assert_eq!(outcome.verdict, Verdict::Computed); // the case expects no outputs
//! let expecting = read.with_outputs(&outcome)?; // now it does
//! assert_eq!(expecting.launch(&stream)?.verdict, Verdict::Passed);
//! # Ok(())
//! # }
//! ```
//!
//! # Recording
//!
//! [`AttentionCase::record`](Case::record) makes a case of a live call, [`record_calls`] of every call in a closure,
//! and the variable [`RECORD_VARIABLE`] lets refused and failing calls be written as files while a program runs.
//! [`Recorder`] is for implementations of the operator's C functions: it writes the calls that these receive.

mod compare;
mod launches;
mod live;
mod outcome;
mod positions;
mod run;

pub use crate::case_file::{
    AttentionCase, Case, CaseArguments, CaseError, CaseTensor, Expect, MaskSource, OperatorCall, Parameter,
    ParameterCase, RECORD_VARIABLE, Recorded, Recorder, Tolerance, read_file, read_tensors, record_calls, tentatively,
    write_file,
};
pub use compare::{Comparison, Deviation};
pub use outcome::{Outcome, Verdict};
