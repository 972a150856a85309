//! Calls of C functions, as the declarations of their operators list the arguments.

use super::case::size;
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Machine, functions_of};
use ascend_spec::{Cann, TensorDesc};
use ascend_sys::bindings::{aclDataType, aclFormat, aclIntArray, aclOpExecutor, aclTensor, aclrtStream};
use std::ffi::{CString, c_char, c_void};
use std::ptr::null_mut;
use std::rc::Rc;

/// A tensor in device memory, which is freed with the last tensor that lies in it.
#[derive(Clone, Debug)]
pub(crate) struct OnDevice {
    pub(crate) dtype: aclDataType,
    pub(crate) shape: Vec<i64>,
    pub(crate) tensor: *mut aclTensor,
    memory: Rc<Memory>,
}

impl OnDevice {
    /// A contiguous tensor with these bytes: fewer than its elements have where a test wants that.
    pub(crate) fn new(dtype: aclDataType, shape: &[i64], bytes: &[u8]) -> Self {
        let memory = Rc::new(Memory::of(bytes));
        OnDevice { dtype, shape: shape.to_vec(), tensor: tensor(dtype, shape, memory.at), memory }
    }

    /// A tensor whose neighbours along each axis are so many elements apart in these bytes.
    pub(crate) fn strided(dtype: aclDataType, shape: &[i64], strides: &[i64], bytes: &[u8]) -> Self {
        let memory = Rc::new(Memory::of(bytes));
        let (rank, held) = (shape.len() as u64, [(bytes.len() / size(dtype)) as i64]);
        let (axes, steps, format) = (shape.as_ptr(), strides.as_ptr(), aclFormat::ACL_FORMAT_ND);
        let tensor = unsafe { aclCreateTensor(axes, rank, dtype, steps, 0, format, held.as_ptr(), 1, memory.at) };
        OnDevice { dtype, shape: shape.to_vec(), tensor, memory }
    }

    /// A tensor of a description in memory that somebody else keeps.
    pub(crate) fn described(desc: &TensorDesc, at: *mut c_void) -> Self {
        let dtype = aclDataType(desc.dtype.acl());
        let (rank, format) = (desc.shape.rank() as u64, aclFormat(desc.format.acl()));
        let (axes, steps) = (desc.shape.as_ptr(), desc.strides.as_ptr());
        let tensor = unsafe { aclCreateTensor(axes, rank, dtype, steps, desc.offset, format, axes, rank, at) };
        assert!(!tensor.is_null(), "{desc}: {}", message());
        OnDevice { dtype, shape: desc.shape.to_vec(), tensor, memory: Rc::new(Memory::of(&[])) }
    }

    /// The same bytes as elements of another type.
    pub(crate) fn read_as(self, dtype: aclDataType) -> Self {
        OnDevice { dtype, tensor: tensor(dtype, &self.shape, self.memory.at), ..self }
    }

    /// The address of its first element.
    pub(crate) fn at(&self) -> *mut c_void {
        self.memory.at
    }
}

/// A text as C functions take it: no text is a null pointer.
#[derive(Debug)]
pub(crate) struct Text(Option<CString>);

impl Text {
    pub(crate) fn new(text: Option<&str>) -> Self {
        Self(text.map(|text| CString::new(text).unwrap()))
    }

    /// Valid as long as the text.
    pub(crate) fn as_ptr(&self) -> *mut c_char {
        self.0.as_ref().map_or(null_mut(), |text| text.as_ptr().cast_mut())
    }
}

/// An array, which the emulation keeps to the end of the process.
pub(crate) fn ints(ints: Option<&[i64]>) -> *const aclIntArray {
    ints.map_or(null_mut(), |ints| unsafe { aclCreateIntArray(ints.as_ptr(), ints.len() as u64) })
}

/// A context on a chip of this name, with the newest release.
pub(crate) fn on_chip(name: &str) -> Bench {
    on_machine(name, Cann::NEWEST)
}

/// A context on a machine of a chip with a release.
pub(crate) fn on_machine(name: &str, cann: Cann) -> Bench {
    init();
    let machine = Machine::new(name, cann).unwrap();
    let functions = functions_of(&machine).unwrap();
    let mut context = null_mut();
    ok(unsafe { functions.aclrtCreateContext.unwrap()(&mut context, 0) });
    Bench { context }
}

pub(crate) type PhaseTwo = unsafe extern "C" fn(*mut c_void, u64, *mut aclOpExecutor, aclrtStream) -> i32;

/// Runs an executor, and waits for it.
pub(crate) fn run(two: PhaseTwo, (bytes, executor): (u64, *mut aclOpExecutor)) -> i32 {
    let stream = stream();
    let workspace = Memory::of(&vec![0; bytes as usize]);
    let launched = unsafe { two(workspace.at, bytes, executor, stream) };
    let status = match launched {
        0 => unsafe { aclrtSynchronizeStream(stream) },
        _ => launched,
    };
    destroy(stream);
    status
}

/// What C gets of one argument.
macro_rules! pass {
    (list $argument:expr) => {{
        let tensors: Vec<_> = $argument.iter().map(|of| of.tensor).collect();
        if tensors.is_empty() {
            std::ptr::null_mut()
        } else {
            $crate::bench::list(&tensors)
        }
    }};
    (text $argument:expr) => {
        $crate::flash_family::call::Text::new(Some(&$argument)).as_ptr()
    };
    (ints $argument:expr) => {
        $crate::flash_family::call::ints($argument.as_deref())
    };
    (int_list $argument:expr) => {
        pass!(ints $argument)
    };
    (int $argument:expr) => {
        $argument
    };
    (int8 $argument:expr) => {
        $argument
    };
    (flag $argument:expr) => {
        $argument
    };
    (float $argument:expr) => {
        $argument
    };
    (optional_text $argument:expr) => {
        $crate::flash_family::call::Text::new($argument.as_deref()).as_ptr()
    };
    ($tensor:ident $argument:expr) => {
        $argument
            .as_ref()
            .map_or(std::ptr::null_mut(), |of| of.tensor)
    };
}

/// Phase one of the arguments of a declaration: its status, and the bytes of workspace with the executor.
macro_rules! phase_one {
    (
        { $function:ident, $arguments:ident }
        $({ $field:ident: $kind:ident $(= $default:expr)?, $variant:ident, $name:literal, $doc:literal })*
    ) => {{
        let (mut bytes, mut executor) = (0, std::ptr::null_mut());
        let status = unsafe {
            $function($(pass!($kind $arguments.$field),)* &mut bytes, &mut executor)
        };
        (status, (bytes, executor))
    }};
}
