//! Case files: one operator call, its inputs and what should come out, in one `safetensors` file.
//!
//! Bug reports, golden tests and comparisons between machines all use this one format. A reader refuses whatever it
//! does not know, and names it; running a case compares every element that the file specifies; and the computed
//! outputs can be written as a case again.
//!
//! # Format
//!
//! Tensors have the operator's parameter names in snake case: `query`, `key`, `value`, `atten_mask`, `block_table` and
//! so on ([`Parameter`]). A list of several tensors is `key.0`, `key.1`, ... Expected outputs are `attention_out` and
//! `softmax_lse`, always F32; a NaN in them means "not specified". The metadata holds strings:
//!
//! | key | value |
//! |---|---|
//! | `format`, `version`, `op` | `ascend-attention-case`, `1`, `fused_infer_attention_score` |
//! | `name`, `note` | free text |
//! | `input_layout` | `BSH`, `BSND`, `BNSD`, ... as CANN spells it |
//! | `num_heads`, `num_key_value_heads`, `sparse_mode`, `pre_tokens`, `next_tokens`, `inner_precise`, `block_size`, `antiquant_mode`, `key_antiquant_mode`, `value_antiquant_mode`, `query_quant_mode` | decimal integers |
//! | `scale` | decimal floating point |
//! | `softmax_lse_flag` | `true` or `false` |
//! | `pse_type` | decimal integer; left out for 0 |
//! | `actual_seq_lengths`, `actual_seq_lengths_kv`, `actual_shared_prefix_len`, `q_start_idx`, `kv_start_idx` | JSON list of integers; absent is a null pointer |
//! | `atten_mask_kind` | `none`; `tensor`: the tensor `atten_mask`; `compressed`: the standard mask of modes 2, 3 and 4, which the reader makes |
//! | `soc` | the chip that the call is for, such as `Ascend910B1`; absent is any |
//! | `cann` | the release that the call is for, such as `9.1.0`; absent is any |
//! | `op_version` | `1` to `5`: the oldest version of the operator that the call goes to; absent is the oldest that can express it |
//! | `dtype.<tensor>` | `int4`, `float4_e2m1`, `float8_e4m3fn`, `float8_e8m0` or `hifloat8`: the element type of a tensor that the file stores as U8; that of `key` holds for `key.0` and so on, too |
//! | `out_dtype` | element type of the output, such as `int8`, `bfloat16` or `hifloat8`; absent is what the inputs imply |
//! | `rms_rtol` | tolerance of the output as a whole: `sqrt(sum (got - want)^2 / sum want^2)` |
//! | `atol`, `rtol` | tolerance: `abs(got - want) <= atol + rtol * abs(want)` |
//! | `expect` | `ok`, or `reject`: the call must be refused before any work is done |
//! | `expect_status` | CANN's status of the refusal |
//! | `expect_rule` | id of the rule that refuses the call; where `expect` is `ok`, of the lint by which the safe layer stops what the operator takes |
//! | `portable_since` | the first release, such as `8.1.0`, that has to take the call as the case's own release does; absent: no other release has to |
//!
//! An absent attribute has the operator's default ([`Arguments`](crate::spec::ops::fused_infer_attention_score::Arguments)); an absent `atten_mask_kind`
//! follows from whether there is an `atten_mask`, and of `atol` and `rtol` one may be left out for 0. Types of 4 bits are
//! two to a byte along the last axis, the even one in the low half: the file's last axis is half the operator's.
//!
//! # Other operators
//!
//! [`AnyCase`] reads cases of every operator that [`DeclaredOperator`](crate::spec::declared::DeclaredOperator)
//! lists, by the name in `op`; an [`OperatorCase`] is one of another operator than FusedInferAttentionScore.
//! Arguments and tensors have that operator's own names in snake case, `op_version` is its version, counted from 1,
//! and every output may be expected by its name. Beside the keys above, which hold for all but `portable_since` and
//! `rms_rtol`, there are:
//!
//! | key | value |
//! |---|---|
//! | `softmax_atol`, `softmax_rtol` | tolerance of `softmax_max` and `softmax_sum`; `atol` and `rtol` are that of the others then |
//! | `group`, `group_role` | free text: cases that belong together, and the part of this one |
//!
//! A case does not hold what a tensor updated in place contains before the call: such a tensor in the file is what it
//! should contain after the call. `compressed` masks are BOOL in these cases, in mode 6 3072 x 2048.
//!
//! ```
//! use ascend_attention::case::{Case, CaseTensor, Parameter, Verdict};
//! use ascend_attention::{DType, Runtime};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let tensor = || CaseTensor::from_f32(DType::Float16, &[1, 1, 2, 16], &[0.5; 32]);
//! let mut case = Case::new("an example");
//! case.arguments.input_layout = "BNSD".to_owned();
//! for parameter in [Parameter::Query, Parameter::Key, Parameter::Value] {
//!     case.arguments.set_tensor(parameter, tensor()?);
//! }
//! let read = Case::from_bytes(&case.to_bytes()?)?;
//! assert_eq!(read, case);
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
//! [`Case::record`] makes a case of a live call, [`record_calls`] of every call in a closure, and the variable
//! [`RECORD_VARIABLE`] lets refused and failing calls be written as files while a program runs. [`Recorder`] is for
//! implementations of the operator's C functions: it writes the calls that these receive.

mod compare;
mod launches;
mod live;
mod outcome;
mod run;
mod run_operator;

pub use crate::case_file::{
    AnyCase, Case, CaseError, CaseTensor, Description, Expect, MaskKind, OperatorCall,
    OperatorCase, Parameter, ParameterCase, RECORD_VARIABLE, Recorded, Recorder, Tolerance,
    read_file, read_tensors, record_calls, tentatively, write_file,
};
pub use compare::{Comparison, Deviation};
pub use outcome::{Outcome, Verdict};
