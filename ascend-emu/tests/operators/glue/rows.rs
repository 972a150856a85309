//! Calls of operators as data: the arguments in C's order, with what outputs must hold among them.

use super::tensors::*;
use crate::bench::*;
use ascend_emu::glue::*;
use ascend_sys::bindings::aclDataType;
use std::ffi::CString;
use std::ptr::{null, null_mut};

/// A tensor's type, shape and elements, the last axis fastest.
#[derive(Clone, Debug)]
pub(crate) struct Data {
    dtype: aclDataType,
    shape: Vec<i64>,
    values: Vec<f64>,
}

/// An argument of a call.
#[derive(Clone, Debug)]
pub(crate) enum Argument {
    /// A tensor that is read.
    Read(Data),
    /// A list of tensors that are read.
    List(Vec<Data>),
    /// A tensor that is written, and what it must hold afterwards.
    Written(Data),
    /// A tensor that is read and written, and what it must hold afterwards.
    Updated(Data, Vec<f64>),
    /// A tensor with room for so many elements that gets the shape and elements of the data.
    Found(Vec<i64>, Data),
    Int(i64),
    Real(f64),
    Ints(Vec<i64>),
    Type(aclDataType),
    Text(&'static str),
    /// An optional argument that is not given.
    Absent,
}

/// One call.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) operator: &'static str,
    arguments: Vec<Argument>,
}

pub(crate) fn row<const N: usize>(operator: &'static str, arguments: [Argument; N]) -> Row {
    Row { operator, arguments: arguments.into() }
}

/// Declares constructors of data, one for each element type.
macro_rules! data {
    ($($name:ident: $dtype:ident;)*) => {$(
        pub(crate) fn $name<const N: usize, V: Into<f64>>(
            shape: [i64; N],
            values: impl IntoIterator<Item = V>,
        ) -> Data {
            let values: Vec<f64> = values.into_iter().map(Into::into).collect();
            assert_eq!(values.len() as i64, shape.iter().product::<i64>(), "{shape:?}");
            Data { dtype: aclDataType::$dtype, shape: shape.to_vec(), values }
        }
    )*};
}

data! {
    f16: ACL_FLOAT16;
    bf16: ACL_BF16;
    f32: ACL_FLOAT;
    f64: ACL_DOUBLE;
    i8: ACL_INT8;
    u8: ACL_UINT8;
    i32: ACL_INT32;
    i64: ACL_INT64;
    bool: ACL_BOOL;
}

impl Data {
    pub(crate) fn read(self) -> Argument {
        Argument::Read(self)
    }

    pub(crate) fn written(self) -> Argument {
        Argument::Written(self)
    }

    /// The same with an axis of size 1 in front.
    pub(crate) fn with_axis(mut self) -> Self {
        self.shape.insert(0, 1);
        self
    }

    pub(crate) fn becomes<V: Into<f64>>(self, after: impl IntoIterator<Item = V>) -> Argument {
        let after: Vec<f64> = after.into_iter().map(Into::into).collect();
        assert_eq!(after.len(), self.values.len());
        Argument::Updated(self, after)
    }

    pub(crate) fn found_in<const N: usize>(self, room: [i64; N]) -> Argument {
        Argument::Found(room.into(), self)
    }
}

pub(crate) fn tensor_list<const N: usize>(tensors: [Data; N]) -> Argument {
    Argument::List(tensors.into())
}

pub(crate) fn axes<const N: usize>(axes: [i64; N]) -> Argument {
    Argument::Ints(axes.into())
}

pub(crate) fn of_type(dtype: aclDataType) -> Argument {
    Argument::Type(dtype)
}

/// FLOAT elements along one axis.
pub(crate) fn floats(values: &[f64]) -> Data {
    Data { dtype: aclDataType::ACL_FLOAT, shape: vec![values.len() as i64], values: values.to_vec() }
}

/// How tensors of a call lie in memory.
#[derive(Clone, Copy, Debug)]
enum Memory {
    /// Element by element.
    Packed,
    /// Every other element of a buffer, backwards along the first axis.
    Spaced,
}

impl Memory {
    fn view(self, shape: &[i64]) -> View {
        let mut view = View::packed(shape);
        if let Memory::Spaced = self {
            view.strides.iter_mut().for_each(|stride| *stride *= 2);
            view.offset = 1;
            view.room = 2 * view.room + 1;
            if let (Some(stride), Some(&size)) = (view.strides.first_mut(), shape.first()) {
                view.offset += *stride * (size - 1).max(0);
                *stride = -*stride;
            }
        }
        view
    }

    /// What outputs hold, and elements that a tensor does not show.
    fn junk(self) -> f64 {
        match self {
            Memory::Packed => 77.0,
            Memory::Spaced => 0.0,
        }
    }

    fn tensor(self, dtype: aclDataType, shape: &[i64], values: &[f64]) -> Tensor {
        Tensor::showing(dtype, self.view(shape), values, self.junk())
    }
}

/// An argument on the device.
enum Given {
    Tensor(Tensor),
    List(Vec<Tensor>),
    Text(CString),
    Plain(Argument),
}

impl Given {
    fn new(argument: &Argument, memory: Memory) -> Self {
        let of = |data: &Data| memory.tensor(data.dtype, &data.shape, &data.values);
        let junk = |count: usize| vec![memory.junk(); count];
        match argument {
            Argument::Read(data) | Argument::Updated(data, _) => Given::Tensor(of(data)),
            Argument::List(tensors) => Given::List(tensors.iter().map(of).collect()),
            Argument::Written(data) => {
                let junk = junk(data.values.len());
                Given::Tensor(memory.tensor(data.dtype, &data.shape, &junk))
            }
            // Its elements lie together whatever the others do.
            Argument::Found(room, data) => {
                let junk = junk(room.iter().product::<i64>() as usize);
                Given::Tensor(Memory::Packed.tensor(data.dtype, room, &junk))
            }
            Argument::Text(text) => Given::Text(CString::new(*text).unwrap()),
            plain => Given::Plain(plain.clone()),
        }
    }

    /// What differs from what an output must hold.
    fn difference(&self, argument: &Argument, memory: Memory) -> Option<String> {
        let Given::Tensor(tensor) = self else {
            return None;
        };
        let want = match argument {
            Argument::Read(data) | Argument::Written(data) => &data.values,
            Argument::Updated(_, after) => after,
            Argument::Found(_, data) => {
                let shape = tensor.shape_now();
                if shape != data.shape {
                    return Some(format!("shape {shape:?} is not {:?}", data.shape));
                }
                &data.values
            }
            _ => return None,
        };
        let got = match argument {
            Argument::Found(..) => tensor.buffer()[..want.len()].to_vec(),
            _ => tensor.values(),
        };
        if !got.iter().zip(want).all(|(&got, &want)| near(tensor.dtype, got, want)) {
            return Some(format!("{got:?} is not {want:?}"));
        }
        let shown = tensor.view.places();
        let hidden = (tensor.buffer().into_iter().zip(0..))
            .filter(|(_, place)| !shown.contains(place))
            .any(|(value, _)| value != decode(tensor.dtype, &encode(tensor.dtype, memory.junk())));
        hidden.then(|| "elements beside the tensor changed".to_owned())
    }
}

/// Whether a number is the wanted one, or for floating types next to it.
fn near(dtype: aclDataType, got: f64, want: f64) -> bool {
    let want = decode(dtype, &encode(dtype, want));
    let step = match dtype {
        aclDataType::ACL_FLOAT => 2f64.powi(-23),
        aclDataType::ACL_FLOAT16 => 2f64.powi(-10),
        aclDataType::ACL_BF16 => 2f64.powi(-7),
        aclDataType::ACL_DOUBLE => 1e-14,
        _ => 0.0,
    };
    got == want || (got.is_nan() && want.is_nan()) || (got - want).abs() <= step * want.abs()
}

/// What a C parameter is made of.
trait Take: Sized {
    fn take(given: Option<&Given>) -> Option<Self>;
}

/// Implements [`Take`] by patterns.
macro_rules! take {
    ($($kind:ty: { $($pattern:pat => $value:expr),* $(,)? })*) => {$(
        impl Take for $kind {
            fn take(given: Option<&Given>) -> Option<Self> {
                match given? {
                    $($pattern => Some($value),)*
                    _ => None,
                }
            }
        }
    )*};
}

take! {
    In: { Given::Tensor(tensor) => tensor.input() }
    InPacked: { Given::Tensor(tensor) => InPacked(tensor.handle) }
    InStored: { Given::Tensor(tensor) => InStored(tensor.handle) }
    OptionalIn: {
        Given::Tensor(tensor) => OptionalIn(tensor.handle),
        Given::Plain(Argument::Absent) => OptionalIn(null()),
    }
    Ins: { Given::List(list) => tensors(&list.iter().collect::<Vec<_>>()) }
    Out: { Given::Tensor(tensor) => tensor.out() }
    OutStored: { Given::Tensor(tensor) => OutStored(tensor.handle) }
    OptionalOut: {
        Given::Tensor(tensor) => OptionalOut(tensor.handle),
        Given::Plain(Argument::Absent) => OptionalOut(null()),
    }
    InOut: { Given::Tensor(tensor) => tensor.in_out() }
    InOutShared: { Given::Tensor(tensor) => tensor.shared() }
    Scalar: {
        Given::Plain(Argument::Int(value)) => int(*value),
        Given::Plain(Argument::Real(value)) => real(*value),
    }
    OptionalScalar: {
        Given::Plain(Argument::Int(value)) => OptionalScalar(int(*value).0),
        Given::Plain(Argument::Real(value)) => OptionalScalar(real(*value).0),
        Given::Plain(Argument::Absent) => OptionalScalar(null()),
    }
    Ints: { Given::Plain(Argument::Ints(values)) => ints(values) }
    Type: { Given::Plain(Argument::Type(dtype)) => Type(*dtype) }
    // The text lives as long as the call, which reads it.
    Text: { Given::Text(text) => Text(text.as_ptr()) }
    Flag: { Given::Plain(Argument::Int(value)) => Flag((*value).try_into().unwrap()) }
    i8: { Given::Plain(Argument::Int(value)) => (*value).try_into().unwrap() }
    i32: { Given::Plain(Argument::Int(value)) => (*value).try_into().unwrap() }
    i64: { Given::Plain(Argument::Int(value)) => *value }
    u64: { Given::Plain(Argument::Int(value)) => (*value).try_into().unwrap() }
    f32: { Given::Plain(Argument::Real(value)) => *value as f32 }
    f64: { Given::Plain(Argument::Real(value)) => *value }
}

/// Defines `launch`, which calls an operator by its name; `None` if there is none, or if the arguments are not of its
/// kinds.
macro_rules! launch_by_name {
    ($( $(#[$doc:meta])* fn $name:ident ( $( $argument:ident : $kind:ident ),* ) = $compute:expr ; )*) => {
        fn launch(operator: &str, given: &[Given]) -> Option<i32> {
            let mut given = given.iter();
            let status = match operator {
                $( stringify!($name) => {
                    call!($name($( <$kind as Take>::take(given.next())? ),*))
                } )*
                _ => return None,
            };
            given.next().is_none().then_some(status)
        }
    };
}

ascend_emu::for_each_glue_function! { launch_by_name }

impl Row {
    /// What does not come out as it must.
    fn failure(&self, memory: Memory) -> Option<String> {
        let given: Vec<Given> = (self.arguments.iter()).map(|argument| Given::new(argument, memory)).collect();
        let failure = match launch(self.operator, &given) {
            None => Some("the arguments are not those of an operator".to_owned()),
            Some(0) => {
                sync(null_mut());
                (given.iter().zip(&self.arguments)).find_map(|(given, argument)| given.difference(argument, memory))
            }
            Some(status) => Some(format!("{status}: {}", message())),
        };
        failure.map(|failure| format!("{self:?} in {memory:?} memory: {failure}"))
    }
}

/// The rows of all operators.
fn rows() -> Vec<Row> {
    [
        super::fill::rows(),
        super::format_cast::rows(),
        super::join::rows(),
        super::parts::rows(),
        super::select::rows(),
        super::compare::rows(),
        super::bits::rows(),
        super::elementwise::rows(),
        super::choose::rows(),
        super::gate::rows(),
        super::functions::rows(),
        super::reduce::rows(),
        super::search::rows(),
        super::model::rows(),
        super::rotary::rows(),
        super::latent::rows(),
        super::matmul::rows(),
        super::quantised::rows(),
    ]
    .concat()
}

/// Operators that take contiguous tensors alone.
const CONTIGUOUS: [&str; 1] = ["aclnnNpuFormatCast"];

#[test]
fn operators_compute_what_their_rows_say() {
    let _bench = Bench::new();
    let rows = rows();
    let taken = |row: &Row, memory| matches!(memory, Memory::Packed) || !CONTIGUOUS.contains(&row.operator);
    let failures: Vec<String> = [Memory::Packed, Memory::Spaced]
        .iter()
        .flat_map(|&memory| {
            rows.iter().filter(move |row| taken(row, memory)).filter_map(move |row| row.failure(memory))
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_operator_has_a_row() {
    let rows = rows();
    let without: Vec<&&str> =
        (OPERATORS.iter()).filter(|&&operator| rows.iter().all(|row| row.operator != operator)).collect();
    assert!(without.is_empty(), "no row for {without:?}");
}
