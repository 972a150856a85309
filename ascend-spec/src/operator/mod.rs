//! Operators as data: each declares its arguments once, and everything that lists them is generated from the
//! declaration.
//!
//! A declaration, `declare_operator!`, is a table of the arguments in the operator's own order:
//!
//! ```text
//! since { field: kind = default, Variant, "CANN's name", "What it is." }
//! ```
//!
//! `since` is the version of the operator that added the argument; [`Kind`] lists the kinds. In this crate the table
//! becomes an enum `Parameter`, the owned `Arguments<T>`, and the borrowed call that the rules judge. A macro of the
//! declaration's name passes the table to other macros: the emulation makes its C entry points from it, and the safe
//! layer its calls of them, where `arguments_of_version!` keeps only the arguments that a version has.

#[macro_use]
mod declare;
mod change;
mod entry_point;
mod parameter;
mod value;
mod version;
mod walked;

pub use change::{Change, NewArgument};
pub(crate) use change::{Fix, Listed, changed, written};
pub use entry_point::EntryPoint;
pub use parameter::{Argument, ArgumentList, DeclaredParameter, Kind, ParameterInfo, name_of_field};
pub use value::{ArgumentValues, OwnedValue, Value, WrongKind};
pub(crate) use version::versions;
pub use version::{DeclaredVersion, OperatorVersion};
pub use walked::WalkedTensors;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::fused_infer_attention_score::{Arguments, FiaCall, Parameter, Version};
    use crate::{DType, TensorDesc, ops::scatter_pa_kv_cache as scatter};

    #[test]
    fn inputs_are_counted_by_version() {
        let inputs = [17, 24, 27, 29, 31];
        for (version, inputs) in Version::ALL.into_iter().zip(inputs) {
            let entry_point = EntryPoint::<Parameter>::Version(version.number());
            assert_eq!((entry_point.inputs(), entry_point.outputs()), (inputs, 2));
        }
        assert_eq!(Parameter::LearnableSink.info().input, Some(28));
        assert_eq!(scatter::Parameter::ValueCache.info().input, Some(4), "a cache is an input");
        assert_eq!(scatter::Parameter::ValueCache.info().output, Some(1), "and an output");
    }

    #[test]
    fn owned_arguments_and_borrowed_calls_say_the_same() {
        let desc = |size| TensorDesc::contiguous(DType::Float16, &[size]);
        for (size, &parameter) in (1..).zip(Parameter::ALL) {
            let mut arguments = Arguments::default();
            assert_eq!(arguments.value(parameter).is_none(), parameter.info().kind.is_tensor());
            arguments.set_tensor(parameter, desc(size).unwrap());
            let given = match parameter.info().kind.is_tensor() {
                true => vec![(Argument::from(parameter), desc(size).unwrap())],
                false => vec![],
            };
            let tensors = |call: &FiaCall<'_>| -> Vec<_> {
                let each = call.each_tensor();
                each.map(|(argument, desc)| (argument, *desc)).collect()
            };
            assert_eq!(tensors(&arguments.call()), given);
            let owned = arguments.each_tensor();
            let owned: Vec<_> = owned.map(|(argument, desc)| (argument, *desc)).collect();
            assert_eq!(owned, given);
            assert_eq!(arguments.call().to_arguments(), arguments);
            let since = match given.is_empty() {
                true => 1,
                false => parameter.info().since,
            };
            assert_eq!(Parameter::oldest_version(arguments.call().given()), since);
            let shapes = arguments.map(|argument, desc| (argument, desc.shape));
            let shapes = shapes.tensor(parameter).copied();
            assert_eq!(shapes, given.first().map(|&(at, ref desc)| (at, desc.shape)));
        }
    }

    #[test]
    fn values_are_given_by_name() {
        for &parameter in Parameter::ALL {
            let mut arguments: Arguments<()> = Arguments::default();
            let value = match parameter.info().kind {
                Kind::Int | Kind::Int8 => OwnedValue::Int(7),
                Kind::Float => OwnedValue::Float(0.5),
                Kind::Flag => OwnedValue::Flag(true),
                Kind::Text | Kind::OptionalText => OwnedValue::Text(Some("TND".into())),
                Kind::Ints | Kind::IntList => OwnedValue::Ints(Some(vec![1, 2])),
                Kind::Tensor | Kind::TensorList | Kind::InOut | Kind::Output => {
                    let wrong = arguments.set_value(parameter, OwnedValue::Int(1));
                    assert_eq!(wrong.unwrap_err().parameter, parameter.name());
                    continue;
                }
            };
            arguments.set_value(parameter, value).unwrap();
            let read = match arguments.value(parameter).unwrap() {
                Value::Int(value) => value == 7,
                Value::Float(value) => value == 0.5,
                Value::Flag(value) => value,
                Value::Text(value) => value == Some("TND"),
                Value::Ints(value) => value == Some(&[1, 2]),
            };
            assert!(read, "{parameter}");
        }
        let mut arguments: Arguments<()> = Arguments::default();
        let wrong = arguments.set_value(Parameter::NumHeads, OwnedValue::Text(None));
        let message = wrong.unwrap_err().to_string();
        assert_eq!(message, "num_heads takes a value of kind Int");
    }
}
