//! The C types of parameters, and the conversion of a call's arguments to what the operators take.
//!
//! Each type has the ABI of the C type that its documentation names, and determines whether a tensor is read or
//! written.

use super::argument::{Argument, Role};
use super::number::Number;
use super::stored::Stored;
use crate::c_pointer::optional_text;
use crate::descriptor::{DescribedTensor, INT_ARRAYS, SCALARS, TENSORS, optional_list};
use crate::operator::{Addresses, INPUTS, LISTS, OUTPUTS, TensorPosition};
use crate::status::{ACLNN_INNER, ACLNN_INVALID, ACLNN_NULLPTR, Failure, Outcome, failure};
use crate::trace;
use crate::trace::value::{KnownType, Value, value};
use ascend_spec::{DType, TensorDesc};
use ascend_sys::bindings::{aclDataType, aclIntArray, aclScalar, aclTensor, aclTensorList};
use std::ffi::c_char;

/// Declares types that stand for a pointer or a number of C.
macro_rules! c_types {
    ($($(#[$doc:meta])* $name:ident($inner:ty);)*) => {$(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name(pub $inner);

        impl KnownType for &&&&trace::value::Argument<$name> {
            fn value(&self) -> Value {
                value!(self.0.0)
            }
        }
    )*};
}

c_types! {
    /// `const aclTensor *` that is read.
    In(*const aclTensor);
    /// `const aclTensor *` that is read, and whose elements may be of less than a byte.
    InPacked(*const aclTensor);
    /// `const aclTensor *` that is read as it is stored: in FRACTAL_NZ its blocks.
    InStored(*const aclTensor);
    /// `const aclTensor *` that is read, or null.
    OptionalIn(*const aclTensor);
    /// `const aclTensorList *` whose tensors are read.
    Ins(*const aclTensorList);
    /// `aclTensor *` that is written.
    Out(*const aclTensor);
    /// `aclTensor *` that is written as it is stored: in FRACTAL_NZ its blocks.
    OutStored(*const aclTensor);
    /// `aclTensor *` that is written, or null.
    OptionalOut(*const aclTensor);
    /// `aclTensor *` that is read and then written; its elements share no memory.
    InOut(*const aclTensor);
    /// `aclTensor *` that is read and then written, and whose elements may share memory.
    InOutShared(*const aclTensor);
    /// `const aclScalar *`.
    Scalar(*const aclScalar);
    /// `const aclScalar *`, or null.
    OptionalScalar(*const aclScalar);
    /// `const aclIntArray *`; null counts as an array without elements.
    Ints(*const aclIntArray);
    /// `aclDataType`.
    Type(aclDataType);
    /// `char *` that is read, or null.
    Text(*const c_char);
}

/// `bool`, as the byte that C passes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct Flag(pub u8);

impl KnownType for &&&&trace::value::Argument<Flag> {
    fn value(&self) -> Value {
        Value::Flag(self.0.0 != 0)
    }
}

/// The arguments that phase one has read so far.
#[derive(Debug)]
pub(super) struct Arguments {
    pub operator: &'static str,
    pub tensors: Vec<Argument>,
    pub addresses: Addresses,
    /// Number of parameters that are inputs, lists included.
    pub inputs: usize,
    pub outputs: usize,
    /// Positions of the lists among the inputs.
    pub lists: Vec<usize>,
    /// Whether elements of the tensor that is read now may be of less than a byte.
    packed: bool,
}

impl Arguments {
    pub(super) fn new(operator: &'static str) -> Self {
        Arguments {
            operator,
            tensors: Vec::new(),
            addresses: Addresses::default(),
            inputs: 0,
            outputs: 0,
            lists: Vec::new(),
            packed: false,
        }
    }

    fn null(&self, name: &str) -> Failure {
        failure!(ACLNN_NULLPTR, "{}: {name} is null", self.operator)
    }

    /// The failure of a call with more parameters of a kind than [`Addresses`] has room for.
    fn too_many(&self) -> Failure {
        failure!(ACLNN_INNER, "{}: too many tensors for the emulator", self.operator)
    }

    fn keep(
        &mut self,
        name: &'static str,
        desc: TensorDesc,
        position: TensorPosition,
        role: Role,
        handle: usize,
    ) -> Outcome<Argument> {
        let argument =
            Argument { operator: self.operator, name, desc, index: self.tensors.len(), position, role, handle };
        argument.check(self.packed)?;
        self.tensors.push(argument);
        Ok(argument)
    }

    fn tensor(&self, name: &str, raw: *const aclTensor) -> Outcome<DescribedTensor> {
        if raw.is_null() {
            return Err(self.null(name));
        }
        let tensor =
            TENSORS.get(raw).map_err(|inner| failure!(inner.code, "{}: {name}: {}", self.operator, inner.message))?;
        Ok(tensor.get())
    }

    fn output(&mut self, name: &'static str, raw: *const aclTensor, role: Role) -> Outcome<Argument> {
        let tensor = self.tensor(name, raw)?;
        self.output_of(name, tensor, raw, role)
    }

    fn output_of(
        &mut self,
        name: &'static str,
        tensor: DescribedTensor,
        raw: *const aclTensor,
        role: Role,
    ) -> Outcome<Argument> {
        let position = self.next_output()?;
        self.addresses.outputs[position] = tensor.address;
        self.keep(name, tensor.desc, TensorPosition::Output(position), role, raw.addr())
    }

    fn next_output(&mut self) -> Outcome<usize> {
        let position = self.outputs;
        if position >= OUTPUTS {
            return Err(self.too_many());
        }
        self.outputs += 1;
        Ok(position)
    }

    fn next_input(&mut self) -> Outcome<usize> {
        let position = self.inputs;
        if position >= INPUTS {
            return Err(self.too_many());
        }
        self.inputs += 1;
        Ok(position)
    }

    fn input(&mut self, name: &'static str, raw: *const aclTensor) -> Outcome<Argument> {
        let tensor = self.tensor(name, raw)?;
        self.input_of(name, tensor)
    }

    fn input_of(&mut self, name: &'static str, tensor: DescribedTensor) -> Outcome<Argument> {
        let position = self.next_input()?;
        self.addresses.inputs[position] = tensor.address;
        self.keep(name, tensor.desc, TensorPosition::Input(position), Role::Read, 0)
    }
}

const _: () = assert!(OUTPUTS >= 3 && LISTS >= 1);

/// A parameter, and its conversion to the value that the computing functions take.
pub(super) trait Parameter {
    type Value;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Self::Value>;
}

impl Parameter for In {
    type Value = Argument;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Argument> {
        call.input(name, self.0)
    }
}

impl Parameter for InPacked {
    type Value = Argument;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Argument> {
        call.packed = true;
        let argument = call.input(name, self.0);
        call.packed = false;
        argument
    }
}

impl Parameter for InStored {
    type Value = Stored;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Stored> {
        let (memory, shape, format) = Stored::memory(call.operator, name, call.tensor(name, self.0)?)?;
        Ok(Stored { argument: call.input_of(name, memory)?, shape, format })
    }
}

impl Parameter for OutStored {
    type Value = Stored;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Stored> {
        let (memory, shape, format) = Stored::memory(call.operator, name, call.tensor(name, self.0)?)?;
        Ok(Stored { argument: call.output_of(name, memory, self.0, Role::Write)?, shape, format })
    }
}

impl Parameter for OptionalIn {
    type Value = Option<Argument>;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Option<Argument>> {
        if self.0.is_null() {
            call.next_input()?;
            return Ok(None);
        }
        call.input(name, self.0).map(Some)
    }
}

impl Parameter for Ins {
    type Value = Vec<Argument>;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Vec<Argument>> {
        let tensors = optional_list(name, self.0)
            .map_err(|inner| failure!(inner.code, "{}: {}", call.operator, inner.message))?
            .ok_or_else(|| call.null(name))?;
        let input = call.next_input()?;
        // Views look for an element's address only in the first list.
        let Some(addresses) = (call.addresses.lists.first_mut()).filter(|_| call.lists.is_empty()) else {
            return Err(call.too_many());
        };
        addresses.extend(tensors.iter().map(|tensor| tensor.address));
        call.lists.push(input);
        tensors
            .iter()
            .enumerate()
            .map(|(element, tensor)| {
                let position = TensorPosition::Element { input, element };
                call.keep(name, tensor.desc, position, Role::Read, 0)
            })
            .collect()
    }
}

impl Parameter for Out {
    type Value = Argument;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Argument> {
        call.output(name, self.0, Role::Write)
    }
}

impl Parameter for OptionalOut {
    type Value = Option<Argument>;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Option<Argument>> {
        if self.0.is_null() {
            call.next_output()?;
            return Ok(None);
        }
        call.output(name, self.0, Role::Write).map(Some)
    }
}

impl Parameter for InOut {
    type Value = Argument;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Argument> {
        let argument = call.output(name, self.0, Role::Update)?;
        argument.expect_apart()?;
        Ok(argument)
    }
}

impl Parameter for InOutShared {
    type Value = Argument;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Argument> {
        call.output(name, self.0, Role::Update)
    }
}

impl Parameter for Scalar {
    type Value = Number;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Number> {
        if self.0.is_null() {
            return Err(call.null(name));
        }
        let scalar = SCALARS
            .get(self.0)
            .map_err(|inner| failure!(inner.code, "{}: {name}: {}", call.operator, inner.message))?;
        Number::of_scalar(&scalar).ok_or_else(|| {
            failure!(
                ACLNN_INVALID,
                "{}: {name}: given a scalar of {}, allowed: {}",
                call.operator,
                scalar.dtype(),
                super::number::NAMES
            )
        })
    }
}

impl Parameter for OptionalScalar {
    type Value = Option<Number>;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Option<Number>> {
        if self.0.is_null() {
            return Ok(None);
        }
        Scalar(self.0).read(name, call).map(Some)
    }
}

impl Parameter for Ints {
    type Value = Vec<i64>;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<Vec<i64>> {
        if self.0.is_null() {
            return Ok(Vec::new());
        }
        let array = INT_ARRAYS
            .get(self.0)
            .map_err(|inner| failure!(inner.code, "{}: {name}: {}", call.operator, inner.message))?;
        Ok(array.to_vec())
    }
}

impl Parameter for Type {
    type Value = DType;

    fn read(self, name: &'static str, call: &mut Arguments) -> Outcome<DType> {
        DType::from_acl(self.0.0).ok_or_else(|| {
            failure!(
                ACLNN_INVALID,
                "{}: {name}: given {}, allowed: an aclDataType of a tensor",
                call.operator,
                self.0.0
            )
        })
    }
}

impl Parameter for Text {
    type Value = Option<String>;

    fn read(self, _: &'static str, _: &mut Arguments) -> Outcome<Option<String>> {
        // SAFETY: the contract of `abi`, which the callers of phase one keep: a text is null or ends with NUL.
        Ok(unsafe { optional_text(self.0) })
    }
}

impl Parameter for Flag {
    type Value = bool;

    fn read(self, _: &'static str, _: &mut Arguments) -> Outcome<bool> {
        Ok(self.0 != 0)
    }
}

/// Implements [`Parameter`] for numbers that are passed on unchanged.
macro_rules! plain {
    ($($type:ty),*) => {$(
        impl Parameter for $type {
            type Value = $type;

            fn read(self, _: &'static str, _: &mut Arguments) -> Outcome<$type> {
                Ok(self)
            }
        }
    )*};
}

plain!(i8, i32, i64, u64, f32, f64);
