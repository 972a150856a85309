//! Operators that are run by their names, with descriptions of tensors and buffers instead of `aclTensor`: what
//! programs do where CANN has no function of two phases for an operator.
//!
//! `Identity` alone is emulated. PyTorch's extension casts the format of a tensor with it: matrices in row-major order
//! to [`Format::FractalNz`] and back. A block has as many columns as 32 bytes hold, and 16 for types of more than two
//! bytes.
//!
//! The functions have the contract of [`abi`](crate::abi).

use super::call::{Work, prepared};
use super::format_cast::copied;
use super::parameter::{Arguments, In, Out, Parameter};
use super::stored::blocks;
use crate::descriptor::{DescribedTensor, TENSORS, Tensor};
use crate::handle::{Kind, Table};
use crate::lock::Lock;
use crate::ops::entry_point::executor_with;
use crate::status::{FEATURE_UNSUPPORTED, Failure, NULL_PARAM as INVALID_PARAM, Outcome, acl, failure};
use ascend_spec::{DType, Dims, Format, TensorDesc};
use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr;

/// A description of a tensor (`aclTensorDesc`): its own shape, and its layout in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Description {
    dtype: DType,
    shape: Dims,
    format: Format,
    storage: Dims,
}

/// Memory with its size (`aclDataBuffer`).
#[derive(Clone, Copy, Debug)]
struct Buffer {
    address: usize,
    bytes: usize,
}

static DESCRIPTIONS: Table<Lock<Description>> = Table::new(Kind::TensorDescription);
static BUFFERS: Table<Buffer> = Table::new(Kind::DataBuffer);

thread_local! {
    /// What this thread has described since it last said that it is about to run an operator.
    static DESCRIBED: RefCell<Vec<Description>> = const { RefCell::new(Vec::new()) };
}

/// Most descriptions of a call that are distinguished: `Identity` has two.
const MOST_DESCRIBED: usize = 3;

/// Descriptions and buffers that are not destroyed.
pub(crate) fn live() -> usize {
    DESCRIPTIONS.len() + BUFFERS.len()
}

/// Whether the operator that the calling thread is about to run may be emulated: since the last one, the thread has
/// described exactly two tensors, of equal type and shape.
///
/// # Errors
/// Otherwise what is said of the operator, whose name is not known yet.
pub fn may_run() -> Result<(), &'static str> {
    let described = DESCRIBED.try_with(RefCell::take).unwrap_or_default();
    match described[..] {
        [from, to] if (from.dtype, from.shape) == (to.dtype, to.shape) => Ok(()),
        _ if described.iter().any(|of| of.format == Format::FractalNz) => {
            Err("an operator that is compiled by its name, since a tensor of it is in the format FRACTAL_NZ, is not \
             emulated: cast the tensor to ND by npu_format_cast before")
        }
        _ => Err("an operator that is compiled by its name, since it has no aclnn function here, is not emulated"),
    }
}

/// The shape of a list of sizes.
///
/// # Safety
///
/// `sizes` is null or valid for reading `rank` numbers.
unsafe fn dims(function: &str, rank: i32, sizes: *const i64) -> Outcome<Dims> {
    let refuse = |why: &str| failure!(INVALID_PARAM, "{function}: dims: given {rank} of them, allowed: {why}");
    let count = usize::try_from(rank).ok().filter(|&rank| rank <= Dims::MAX_RANK);
    let count = count.ok_or_else(|| refuse("0 to 8"))?;
    if count > 0 && sizes.is_null() {
        return Err(refuse("a list that is not null"));
    }
    // SAFETY: the caller's promise: the list has `rank` numbers. C may give it any alignment.
    let sizes: Vec<i64> = (0..count).map(|at| unsafe { sizes.add(at).read_unaligned() }).collect();
    let known = Dims::new(&sizes).filter(|dims| dims.elements().is_some());
    known.ok_or_else(|| failure!(INVALID_PARAM, "{function}: dims: {sizes:?} is no shape"))
}

fn format_of(function: &str, format: i32) -> Outcome<Format> {
    Format::from_acl(format).ok_or_else(|| failure!(INVALID_PARAM, "{function}: format: {format} is no aclFormat"))
}

/// `aclCreateTensorDesc`; null for what is no description.
///
/// # Safety
///
/// `sizes` is null or valid for reading `rank` numbers.
pub unsafe fn create_description(dtype: i32, rank: i32, sizes: *const i64, format: i32) -> *mut c_void {
    const NAME: &str = "aclCreateTensorDesc";
    let mut made = ptr::null_mut();
    acl(|| {
        // SAFETY: the caller's promise.
        let shape = unsafe { dims(NAME, rank, sizes) }?;
        let known = DType::from_acl(dtype);
        let dtype = known.ok_or_else(|| failure!(INVALID_PARAM, "{NAME}: {dtype} is no aclDataType of a tensor"))?;
        let description = Description { dtype, shape, format: format_of(NAME, format)?, storage: shape };
        made = DESCRIPTIONS.insert(Lock::new(description)).raw();
        Ok(())
    });
    note(made, true);
    made
}

/// Keeps what the thread describes, for [`may_run`]: a new description, or one that has changed since, the last.
fn note(handle: *const c_void, is_new: bool) {
    let Ok(description) = DESCRIPTIONS.get(handle) else {
        return;
    };
    let description = *description.lock();
    // A thread that ends runs nothing any more.
    let _ = DESCRIBED.try_with(|described| {
        let mut described = described.borrow_mut();
        if is_new && described.len() < MOST_DESCRIBED {
            described.push(description);
        } else if let Some(last) = described.last_mut().filter(|_| !is_new) {
            *last = description;
        }
    });
}

/// `aclDestroyTensorDesc`.
pub fn destroy_description(handle: *const c_void) {
    if !handle.is_null() {
        acl(|| DESCRIPTIONS.remove(handle).map(drop));
    }
}

/// `aclSetTensorFormat`: the layout of the tensor in memory.
pub fn set_format(handle: *const c_void, format: i32) -> i32 {
    let status = acl(|| {
        let format = format_of("aclSetTensorFormat", format)?;
        DESCRIPTIONS.get(handle)?.lock().format = format;
        Ok(())
    });
    note(handle, false);
    status
}

/// `aclSetTensorShape`: the shape of the tensor in memory.
///
/// # Safety
///
/// `sizes` is null or valid for reading `rank` numbers.
pub unsafe fn set_storage(handle: *const c_void, rank: i32, sizes: *const i64) -> i32 {
    acl(|| {
        // SAFETY: the caller's promise.
        let storage = unsafe { dims("aclSetTensorShape", rank, sizes) }?;
        DESCRIPTIONS.get(handle)?.lock().storage = storage;
        Ok(())
    })
}

/// `aclSetTensorPlaceMent`: tensors are in device memory.
pub fn set_placement(handle: *const c_void, memory: i32) -> i32 {
    acl(|| match memory {
        0 => DESCRIPTIONS.get(handle).map(drop),
        _ => Err(failure!(
            FEATURE_UNSUPPORTED,
            "aclSetTensorPlaceMent: memType: given {memory}, allowed: 0 (memory of the device): tensors on the host \
             are not emulated"
        )),
    })
}

/// What clients ask of a description: type, format and number of axes, the size of axis `at`.
pub fn described(handle: *const c_void, at: usize) -> Option<(i32, i32, usize, Option<i64>)> {
    let description = *DESCRIPTIONS.get(handle).ok()?.lock();
    let size = description.shape.get(at).copied();
    Some((description.dtype.acl(), description.format.acl(), description.shape.rank(), size))
}

/// `aclCreateDataBuffer`.
pub fn create_buffer(address: *const c_void, bytes: usize) -> *mut c_void {
    BUFFERS.insert(Buffer { address: address.addr(), bytes }).raw()
}

/// `aclDestroyDataBuffer`, which leaves the memory as it is.
pub fn destroy_buffer(handle: *const c_void) -> i32 {
    acl(|| BUFFERS.remove(handle).map(drop))
}

/// The tensors of a call by name: a description and a buffer each.
pub type Described<'a> = &'a [(*const c_void, *const c_void)];

/// `aclopCompileAndExecute`: queues the operator of a name. Descriptions and buffers may be destroyed at once.
pub fn execute(name: &str, inputs: Described<'_>, outputs: Described<'_>, stream: *const c_void) -> i32 {
    const FUNCTION: &str = "aclopCompileAndExecute";
    acl(|| {
        if name != "Identity" {
            return Err(failure!(FEATURE_UNSUPPORTED, "{FUNCTION}: the operator {name} is not emulated"));
        }
        let ([input], [output]) = (inputs, outputs) else {
            let counts = format_args!("{} inputs and {} outputs", inputs.len(), outputs.len());
            return Err(failure!(INVALID_PARAM, "Identity: given {counts}, allowed: one of each"));
        };
        let (from, to) = (Located::new("x", input)?, Located::new("y", output)?);
        for (value, given, allowed) in [
            ("type", from.description.dtype.to_string(), to.description.dtype.to_string()),
            ("shape", from.description.shape.to_string(), to.description.shape.to_string()),
        ] {
            if given != allowed {
                return Err(failure!(INVALID_PARAM, "Identity: {value} of y: given {allowed}, allowed: {given}, x's"));
            }
        }
        // Handles for phase one to read, which end with it.
        let handles = [from, to].map(|tensor| Tensor::create(tensor.described()));
        let made = prepared("Identity", &mut |call| identity(call, handles.map(|handle| handle.raw()), from, to));
        for handle in handles {
            TENSORS.remove_id(handle)?;
        }
        let (operator, addresses, idle) = made?;
        executor_with(operator, addresses, idle).queue(FUNCTION, 0, 0, stream)
    })
}

/// A tensor of a call by name.
#[derive(Clone, Copy)]
struct Located {
    name: &'static str,
    description: Description,
    address: usize,
}

impl Located {
    fn new(name: &'static str, &(description, buffer): &(*const c_void, *const c_void)) -> Outcome<Self> {
        let description = *DESCRIPTIONS.get(description)?.lock();
        let Buffer { address, bytes } = *BUFFERS.get(buffer)?;
        let located = Located { name, description, address };
        let Description { format, storage, .. } = description;
        let block = located.block();
        let wanted = match (format.is_plain(), block) {
            (true, _) => description.shape,
            (false, Some(blocks)) if format == Format::FractalNz => blocks,
            _ => {
                return Err(located.refuse(
                    format_args!("{} in the format {format}", description.shape),
                    "a plain format such as ND; matrices in FRACTAL_NZ",
                ));
            }
        };
        if storage != wanted {
            return Err(located.refuse(format_args!("{storage} in memory"), wanted));
        }
        let reach = located.described().desc.byte_range().map(|range| range.end);
        match reach.is_some_and(|reach| reach <= bytes as u64) {
            true => Ok(located),
            false => Err(located.refuse(format_args!("a buffer of {bytes} bytes"), format_args!("room for {storage}"))),
        }
    }

    fn refuse(&self, given: impl std::fmt::Display, allowed: impl std::fmt::Display) -> Failure {
        failure!(INVALID_PARAM, "Identity: {}: given {given}, allowed: {allowed}", self.name)
    }

    /// The shape in memory of these matrices in FRACTAL_NZ; `None` if they are no matrices.
    fn block(&self) -> Option<Dims> {
        let Description { dtype, shape, .. } = self.description;
        let bytes = i64::try_from(dtype.size()?).ok()?;
        blocks(&shape, if bytes > 2 { 16 } else { 32 / bytes })
    }

    fn is_nz(&self) -> bool {
        self.description.format == Format::FractalNz
    }

    /// The memory as a tensor in row-major order.
    fn described(&self) -> DescribedTensor {
        let Description { dtype, storage, .. } = self.description;
        DescribedTensor { desc: TensorDesc::packed(dtype, storage), storage, address: self.address }
    }
}

/// Copies a tensor to one of the same shape, which may have another layout in memory.
fn identity(
    call: &mut Arguments,
    handles: [*mut ascend_sys::bindings::aclTensor; 2],
    x: Located,
    y: Located,
) -> Outcome<Work> {
    let [from, to] = handles;
    let (from, to) = (In(from).read(x.name, call)?, Out(to).read(y.name, call)?);
    copied((from, x.is_nz()), (to, y.is_nz()))
}
