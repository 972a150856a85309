//! The operators of ATB (Ascend Transformer Boost) that are emulated: what `libatb.so` computes, without its ABI of
//! C++.
//!
//! An [`Operation`] is an operator with its parameters. It is set up and executed with the tensors of a call, in the
//! order of the operator's documents; what a set-up needs to know for the execution is in these tensors again, so that
//! an operation keeps nothing. What follows is as for the operators of `aclnn`: the stream's order, the tensors that a
//! launch touches, the contents that strict mode looks at.

use crate::descriptor::DescribedTensor;
use crate::executor::Executor;
use crate::ops::entry_point::{executor_with, prepared};
use crate::ops::{AtbAttention, ScatterOperator};
use crate::runtime::context;
use crate::status::{self, Failure, Outcome, failure};
use crate::trace::trace;
use ascend_spec::ops::atb_attention as attention;
pub use ascend_spec::ops::atb_attention::{OperationParameters, Version};
use ascend_spec::ops::scatter_pa_kv_cache as scatter;
use ascend_spec::{DType, Dims, Format, Soc, TensorDesc};
use std::ffi::c_void;

/// `ERROR_INVALID_PARAM` of ATB's statuses.
pub const INVALID_PARAM: i32 = 1;
const RUNTIME_FAILS: i32 = 4;
const INVALID_IN_TENSOR_NUM: i32 = 5;
const INVALID_TENSOR_DTYPE: i32 = 6;
const INVALID_TENSOR_FORMAT: i32 = 7;
const INVALID_TENSOR_DIM: i32 = 8;
const INVALID_TENSOR_ADDR: i32 = 14;
const INVALID_WORKSPACE_SIZE: i32 = 22;

/// A refusal: ATB's status, and why. The text is that of `aclGetRecentErrMsg` as well, and is written to stderr, since
/// clients of ATB show the status alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// ATB's status.
    pub status: i32,
    /// What was given, and what is allowed.
    pub message: String,
}

/// A tensor of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor<'a> {
    /// `aclDataType`.
    pub dtype: i32,
    /// `aclFormat`.
    pub format: i32,
    /// Sizes of the axes.
    pub shape: &'a [i64],
    /// Address on the device; 0 if the tensor is not there.
    pub address: usize,
    /// The elements of a tensor of INT32 on the host.
    pub host: Option<&'a [i32]>,
}

/// An operator with its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operation {
    /// PagedAttention or SelfAttention.
    Attention {
        /// The operator's form, and the parameters that ATB checks. The paged form has no mask: `masked`, `triangle`
        /// and `precise` are then false.
        parameters: OperationParameters,
        /// Whether the mask, where there is one, is a square of 128 rows and keys (`MASK_TYPE_NORM_COMPRESS`), not
        /// numbers for rows and keys (`MASK_TYPE_NORM`).
        compressed: bool,
    },
    /// Writes keys and values into a paged cache.
    ReshapeAndCache {
        /// Whether there are keys alone.
        keys_alone: bool,
        /// Whether the caches are in the format FRACTAL_NZ. On 310P they are in any case.
        nz: bool,
    },
}

impl Operation {
    /// The operator's name, as ATB spells it.
    pub fn name(&self) -> &'static str {
        match self {
            Operation::Attention { parameters, .. } => parameters.version.symbol(),
            Operation::ReshapeAndCache { .. } => "ReshapeAndCacheOperation",
        }
    }

    /// Checks what ATB checks when an operation is made.
    ///
    /// # Errors
    /// Why ATB makes no such operation.
    pub fn check(&self) -> Result<(), Refusal> {
        let name = self.name();
        called(name, || {
            let target = context::machine().target;
            match *self {
                Operation::Attention { parameters, .. } => {
                    parameters.check(target).map_err(|why| of_operator(name, why.into()))
                }
                Operation::ReshapeAndCache { keys_alone, .. } => check_siso(name, keys_alone, target.soc),
            }
        })
    }

    /// Number of input tensors.
    pub fn inputs(&self) -> usize {
        match self {
            Operation::Attention { parameters: OperationParameters { version, masked, .. }, .. } => match version {
                Version::Packed => 4 + usize::from(*masked),
                Version::Paged => 5,
                Version::Prefix => 6 + usize::from(*masked),
            },
            Operation::ReshapeAndCache { keys_alone, .. } => 5 - 2 * usize::from(*keys_alone),
        }
    }

    /// Number of output tensors.
    pub fn outputs(&self) -> usize {
        match self {
            Operation::ReshapeAndCache { keys_alone: false, .. } => 2,
            _ => 1,
        }
    }

    /// Checks a call, and returns the bytes of workspace that it needs.
    ///
    /// # Errors
    /// Why ATB refuses the call, or why it is not emulated.
    pub fn setup(&self, inputs: &[Tensor<'_>], outputs: &[Tensor<'_>]) -> Result<u64, Refusal> {
        called(self.name(), || Ok(self.executor(inputs, outputs)?.workspace_bytes()))
    }

    /// Queues a call.
    ///
    /// # Errors
    /// As for [`Operation::setup`], and for a workspace that is too small or a stream that takes no work.
    pub fn execute(
        &self,
        inputs: &[Tensor<'_>],
        outputs: &[Tensor<'_>],
        (workspace, bytes): (*mut c_void, u64),
        stream: *mut c_void,
    ) -> Result<(), Refusal> {
        called(self.name(), || {
            let executor = self.executor(inputs, outputs)?;
            let queued = executor.queue(self.name(), workspace.addr(), bytes, stream);
            queued.map_err(|failure| Failure {
                code: match failure.code {
                    status::ACLNN_INVALID | status::ACLNN_NULLPTR => INVALID_WORKSPACE_SIZE,
                    _ => RUNTIME_FAILS,
                },
                ..failure
            })
        })
    }

    fn executor(&self, inputs: &[Tensor<'_>], outputs: &[Tensor<'_>]) -> Outcome<Executor> {
        let name = self.name();
        for (what, given, allowed) in
            [("input", inputs.len(), self.inputs()), ("output", outputs.len(), self.outputs())]
        {
            if given != allowed {
                return Err(failure!(
                    INVALID_IN_TENSOR_NUM,
                    "{name}: given {given} {what} tensors, allowed: {allowed}"
                ));
            }
        }
        match *self {
            Operation::Attention { parameters, compressed } => attend(
                parameters.version,
                attention::Arguments { compressed, ..attention_arguments(parameters, inputs, outputs)? },
            ),
            Operation::ReshapeAndCache { keys_alone, nz } => reshape_and_cache(name, inputs, outputs, keys_alone, nz),
        }
    }
}

/// The arguments of attention, but for the kind of its mask.
fn attention_arguments(
    parameters: OperationParameters,
    inputs: &[Tensor<'_>],
    outputs: &[Tensor<'_>],
) -> Outcome<attention::Arguments<DescribedTensor>> {
    let OperationParameters { version, masked, .. } = parameters;
    let name = version.symbol();
    let [query, key, value, ref rest @ ..] = *inputs else {
        return Err(uncounted(name));
    };
    let of_heads = || of_heads(parameters, [query, key, value], outputs);
    if version == Version::Paged {
        let [table, lengths] = rest else {
            return Err(uncounted(name));
        };
        return Ok(attention::Arguments {
            block_table: Some(table.described(name, "blockTables")?),
            context_lens: Some(lengths.lengths(name, "contextLens")?),
            ..of_heads()?
        });
    }
    let mut arguments = of_heads()?;
    let mut rest = rest.iter();
    let mut next = || rest.next().ok_or_else(|| uncounted(name));
    if version == Version::Prefix {
        arguments.block_table = Some(next()?.described(name, "blockTables")?);
    }
    if masked {
        arguments.mask = Some(next()?.described(name, "mask")?);
    }
    let lengths = next()?;
    let all = lengths.lengths(name, "seqLen")?;
    let (row_lens, key_lens) = match (version, lengths.shape) {
        (Version::Prefix, _) => (all, next()?.lengths(name, "kvSeqLen")?),
        (_, &[2, _]) => {
            let (row_lens, key_lens) = all.split_at(all.len() / 2);
            (row_lens.to_vec(), key_lens.to_vec())
        }
        _ => (all.clone(), all),
    };
    arguments.seq_len = Some(row_lens);
    arguments.context_lens = Some(key_lens);
    Ok(arguments)
}

/// Checks that a product writes caches of keys alone.
fn check_siso(name: &str, keys_alone: bool, soc: Soc) -> Outcome {
    match soc {
        Soc::AtlasInference | Soc::AtlasTraining if keys_alone => Err(failure!(
            INVALID_PARAM,
            "{name}: kvCacheCfg: given 1 on {soc}, allowed: 0 and 2; Atlas A2, A3 and Ascend 950 take keys alone"
        )),
        _ => Ok(()),
    }
}

impl Tensor<'_> {
    /// The tensor, which has to be on the device.
    fn described(&self, operator: &str, name: &str) -> Outcome<DescribedTensor> {
        let refuse = |status, given: &dyn std::fmt::Display, allowed: &str| {
            failure!(status, "{operator}: {name}: given {given}, allowed: {allowed}")
        };
        let dtype = DType::from_acl(self.dtype)
            .ok_or_else(|| refuse(INVALID_TENSOR_DTYPE, &self.dtype, "an aclDataType of a tensor"))?;
        let format =
            Format::from_acl(self.format).ok_or_else(|| refuse(INVALID_TENSOR_FORMAT, &self.format, "an aclFormat"))?;
        let shape = Dims::new(self.shape).filter(|shape| shape.elements().is_some());
        let shape = shape.ok_or_else(|| {
            let given = format!("{:?}", self.shape);
            refuse(INVALID_TENSOR_DIM, &given, "a shape of at most 8 axes that memory can hold")
        })?;
        let desc = TensorDesc { format, ..TensorDesc::packed(dtype, shape) };
        if self.address == 0 && !desc.is_empty() {
            let given = "no address on the device";
            return Err(refuse(INVALID_TENSOR_ADDR, &given, "deviceData of the tensor"));
        }
        Ok(DescribedTensor { desc, storage: shape, address: self.address })
    }

    /// The elements of lengths, which have to be on the host.
    fn lengths(&self, operator: &str, name: &str) -> Outcome<Vec<i64>> {
        let Some(host) = self.host else {
            return Err(failure!(
                INVALID_PARAM,
                "{operator}: {name}: given no hostData of INT32, allowed: a tensor of INT32 on the host, where the \
                 operator reads it when it is set up"
            ));
        };
        Ok(host.iter().map(|&length| length.into()).collect())
    }
}

/// The failure of a call whose tensors were not counted.
fn uncounted(name: &str) -> Failure {
    failure!(INVALID_IN_TENSOR_NUM, "{name}: another number of tensors")
}

/// The arguments that all attention has.
fn of_heads(
    parameters: OperationParameters,
    [query, key, value]: [Tensor<'_>; 3],
    outputs: &[Tensor<'_>],
) -> Outcome<attention::Arguments<DescribedTensor>> {
    let name = parameters.version.symbol();
    let out = outputs.first().ok_or_else(|| uncounted(name))?;
    Ok(attention::Arguments {
        query: Some(query.described(name, "query")?),
        key: Some(key.described(name, "key")?),
        value: Some(value.described(name, "value")?),
        heads: parameters.heads.into(),
        kv_heads: parameters.kv_heads.into(),
        scale: parameters.scale.into(),
        triangle: parameters.triangle,
        precise: parameters.precise,
        out: Some(out.described(name, "attnOut")?),
        ..Default::default()
    })
}

fn attend(version: Version, arguments: attention::Arguments<DescribedTensor>) -> Outcome<Executor> {
    let symbol = version.symbol();
    let target = context::machine().target;
    let new = |given: &attention::Arguments<DescribedTensor>| {
        AtbAttention::new(given.map(|_, tensor| tensor.desc), version, target, false)
    };
    let (op, addresses, idle) = prepared(new, &arguments).map_err(|why| of_operator(symbol, why))?;
    Ok(executor_with(op, addresses, idle))
}

fn reshape_and_cache(
    name: &'static str,
    inputs: &[Tensor<'_>],
    outputs: &[Tensor<'_>],
    keys_alone: bool,
    nz: bool,
) -> Outcome<Executor> {
    let mut given = inputs.iter();
    let mut next = |what| {
        let tensor = given.next().ok_or_else(|| uncounted(name))?;
        tensor.described(name, what)
    };
    let soc = context::machine().target.soc;
    let card = soc == Soc::AtlasInference;
    let key = next("key")?;
    let value = (!keys_alone).then(|| next("value")).transpose()?;
    let key_cache = next("keyCache")?;
    let value_cache = (!keys_alone).then(|| next("valueCache")).transpose()?;
    let slot_mapping = next("slotMapping")?;
    if slot_mapping.desc.dtype != DType::Int32 {
        return Err(failure!(
            INVALID_TENSOR_DTYPE,
            "{name}: slotMapping: given {}, allowed: INT32",
            slot_mapping.desc.dtype
        ));
    }
    for (cache, out) in [Some(key_cache), value_cache].into_iter().flatten().zip(outputs) {
        let out = out.described(name, "output")?;
        if out != cache {
            return Err(failure!(
                INVALID_TENSOR_ADDR,
                "{name}: given an output {} at {:#x}, allowed: the cache {} at {:#x}, which is written in place",
                out.desc,
                out.address,
                cache.desc,
                cache.address
            ));
        }
        let allowed = if card || nz { "FRACTAL_NZ" } else { "ND" };
        if (cache.desc.format == Format::FractalNz) != (card || nz) {
            return Err(failure!(
                INVALID_TENSOR_FORMAT,
                "{name}: given a cache in {}, allowed: {allowed}",
                cache.desc.format
            ));
        }
    }
    let arguments = scatter::Arguments {
        key: Some(key),
        key_cache: Some(key_cache),
        slot_mapping: Some(slot_mapping),
        value,
        value_cache,
        cache_mode: (card || nz).then(|| scatter::PA_NZ.to_owned()),
        ..Default::default()
    };
    // The rules are those of the product that has both operators.
    let soc = if card { Soc::AtlasA2 } else { soc };
    let new = |given: &_| ScatterOperator::of(name, given, soc);
    let (op, addresses, idle) = prepared(new, &arguments).map_err(|why| of_operator(name, why))?;
    Ok(executor_with(op, addresses, idle))
}

/// The failure of a call that a rule refuses, with the operator's name and ATB's status.
fn of_operator(name: &str, why: Failure) -> Failure {
    let code = match why.code {
        own @ 1..100 => own,
        ascend_spec::TILING_ERROR => INVALID_TENSOR_DIM,
        _ => INVALID_PARAM,
    };
    failure!(code, "{name}: {}", why.message)
}

/// Makes a call, notes it in the trace, and says on stderr why it is refused.
fn called<T>(name: &'static str, body: impl FnOnce() -> Outcome<T>) -> Result<T, Refusal> {
    // SAFETY: there are no arguments.
    let line = trace().map(|trace| unsafe { trace.begin(name, &[]) });
    let outcome = status::atb(body);
    if let Some(line) = line {
        let code = outcome.as_ref().err().map_or(0, |failure| failure.code);
        // SAFETY: this is what the function returns.
        unsafe { line.end("Status", crate::trace::value::value!(code)) };
    }
    outcome.map_err(|failure| {
        status::warn(format_args!("ATB status {}: {}", failure.code, failure.message));
        Refusal { status: failure.code, message: failure.message.into_owned() }
    })
}

/// Bytes of an element of a type; 0 for a number that is no `aclDataType`, or one of less than a byte.
pub fn element_bytes(dtype: i32) -> u64 {
    let size = DType::from_acl(dtype).and_then(DType::size);
    size.map_or(0, |size| size as u64)
}

/// Refuses what is not emulated: an operator, or a value of a parameter.
pub fn refused(name: &'static str, message: &str) -> Refusal {
    let refuse = || Err::<(), _>(failure!(INVALID_PARAM, "{name}: {message}"));
    let refusal = called(name, refuse).err();
    refusal.unwrap_or_else(|| Refusal { status: INVALID_PARAM, message: name.to_owned() })
}
