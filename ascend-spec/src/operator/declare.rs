//! What an operator's declaration expands to: its parameters, its owned arguments, and the call that its rules judge.

/// Declares an operator's arguments by their table: makes what [`declare_arguments!`] does, and the macro `$table`,
/// which hands the table to others.
macro_rules! declare_operator {
    (
        $(#[$doc:meta])*
        $table:ident, $operator:literal, $(#[$meta:meta])* $call:ident $(<$borrow:lifetime>)?;
        $($rows:tt)*
    ) => {
        hand_over_table! { ($) $(#[$doc])* $table $($rows)* }
        declare_arguments! { { $operator, $(#[$meta])* $call $(<$borrow>)? } $($rows)* }
    };
}

/// Makes the macro `$table`; `$dollar` is a dollar sign.
macro_rules! hand_over_table {
    (($dollar:tt) $(#[$doc:meta])* $table:ident $($rows:tt)*) => {
        /// Passes the tokens `$with`, in braces, and then the table of arguments to the macro `$then`;
        /// [`operator`](crate::operator) describes the table's form.
        ///
        $(#[$doc])*
        #[doc(hidden)]
        #[macro_export]
        macro_rules! $table {
            ($dollar($dollar then:ident)::+ { $dollar($dollar with:tt)* }) => {
                $dollar($dollar then)::+! { { $dollar($dollar with)* } $($rows)* }
            };
        }
    };
}

/// Makes `Parameter`, `Arguments<T>` and the call from a table of arguments. A call with lists or texts borrows them:
/// its name is followed by `<'a>`.
macro_rules! declare_arguments {
    (
        { $operator:literal, $(#[$call_meta:meta])* $call:ident $(<$borrow:lifetime>)? }
        $($since:literal { $field:ident: $kind:ident $(= $default:expr)?, $variant:ident, $acl:literal, $doc:literal })*
    ) => {
        #[doc = concat!("A parameter of ", $operator, ".")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Parameter {
            $(#[doc = $doc] $variant,)*
        }

        impl Parameter {
            /// Every parameter, in the operator's order.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            const TABLE: [$crate::operator::ParameterInfo; Self::ALL.len()] =
                $crate::operator::ParameterInfo::numbered([$($crate::operator::ParameterInfo {
                    name: $crate::operator::name_of_field(stringify!($field)),
                    acl_name: $acl,
                    since: $since,
                    doc: $doc,
                    kind: declare_arguments!(@kind $kind),
                    input: None,
                    output: None,
                    list: None,
                },)*]);

            /// The declaration of the parameter.
            pub const fn info(self) -> &'static $crate::operator::ParameterInfo {
                &Self::TABLE[self as usize]
            }

            /// The parameter's name in snake case.
            pub const fn name(self) -> &'static str {
                self.info().name
            }

            /// CANN's name of the parameter, without `Optional`.
            pub const fn acl_name(self) -> &'static str {
                self.info().acl_name
            }

            /// Whether the operator writes the parameter.
            pub const fn is_output(self) -> bool {
                self.info().kind.is_output()
            }

            /// The parameter of this name in snake case.
            pub fn from_name(name: &str) -> Option<Self> {
                $crate::operator::DeclaredParameter::from_name(name)
            }

            /// The parameters that are tensors or lists of them.
            pub fn tensors() -> impl Iterator<Item = Self> + Clone {
                Self::ALL.iter().copied().filter(|parameter| parameter.info().kind.is_tensor())
            }
        }

        impl $crate::operator::DeclaredParameter for Parameter {
            const ALL: &'static [Self] = Parameter::ALL;

            fn info(self) -> &'static $crate::operator::ParameterInfo {
                Parameter::info(self)
            }

            fn of_input(number: usize) -> Option<Self> {
                const BY_INPUT: [Option<Parameter>; Parameter::ALL.len()] = {
                    let mut numbered = [None; Parameter::ALL.len()];
                    let mut index = 0;
                    while index < numbered.len() {
                        if let Some(number) = Parameter::TABLE[index].input {
                            numbered[number] = Some(Parameter::ALL[index]);
                        }
                        index += 1;
                    }
                    numbered
                };
                BY_INPUT.get(number).copied().flatten()
            }
        }

        impl std::fmt::Display for Parameter {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        #[doc = concat!("One tensor of a call of ", $operator, ".")]
        pub type Argument = $crate::operator::Argument<Parameter>;

        #[doc = concat!("Every argument of a call of ", $operator, ", owned; `T` stands for a tensor.")]
        ///
        /// [`Arguments::default`] has no tensors, and the operator's defaults.
        pub struct Arguments<T> {
            $(#[doc = $doc] pub $field: declare_arguments!(@owned $kind T),)*
        }

        // Written by hand, since no derive reads types that macros make.
        impl<T: Clone> Clone for Arguments<T> {
            fn clone(&self) -> Self {
                Arguments {
                    $($field: self.$field.clone(),)*
                }
            }
        }

        impl<T: PartialEq> PartialEq for Arguments<T> {
            fn eq(&self, other: &Self) -> bool {
                $(self.$field == other.$field)&&*
            }
        }

        impl<T: std::fmt::Debug> std::fmt::Debug for Arguments<T> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct("Arguments")$(.field(stringify!($field), &self.$field))*.finish()
            }
        }

        impl<T> Default for Arguments<T> {
            fn default() -> Self {
                Arguments {
                    $($field: declare_arguments!(@default $kind $($default)?),)*
                }
            }
        }

        impl<T> Arguments<T> {
            /// The tensors that are given to a parameter: none or one, or those of a list.
            pub fn tensors(&self, parameter: Parameter) -> &[T] {
                match parameter {
                    $(Parameter::$variant => declare_arguments!(@tensors $kind self.$field),)*
                }
            }

            /// One tensor.
            pub fn tensor(&self, argument: impl Into<Argument>) -> Option<&T> {
                let $crate::operator::Argument { parameter, index } = argument.into();
                self.tensors(parameter).get(index)
            }

            /// Gives a tensor to a parameter: adds it to a list, or replaces the one that was given before. A
            /// parameter that is no tensor stays as it is.
            pub fn set_tensor(&mut self, parameter: Parameter, tensor: T) {
                match parameter {
                    $(Parameter::$variant => declare_arguments!(@set_tensor $kind self.$field, tensor),)*
                }
            }

            /// Every tensor with its place in the call, in the operator's order.
            pub fn each_tensor(&self) -> impl Iterator<Item = (Argument, &T)> {
                $crate::operator::ArgumentList::each_tensor(self)
            }

            /// The value of a parameter that is not a tensor.
            pub fn value(&self, parameter: Parameter) -> Option<$crate::operator::Value<'_>> {
                match parameter {
                    $(Parameter::$variant => declare_arguments!(@value $kind self.$field),)*
                }
            }

            /// Gives a value to a parameter that is no tensor.
            ///
            /// # Errors
            /// The parameter's kind, if the value is of another one.
            pub fn set_value(
                &mut self,
                parameter: Parameter,
                value: $crate::operator::OwnedValue,
            ) -> Result<(), $crate::operator::WrongKind> {
                let wrong = $crate::operator::WrongKind {
                    parameter: parameter.name(),
                    kind: parameter.info().kind,
                };
                match parameter {
                    $(Parameter::$variant => declare_arguments!(@set_value $kind self.$field, value, wrong),)*
                }
                Ok(())
            }

            /// This call with other tensors: `tensor` makes each of them from the old one.
            pub fn map<U>(&self, mut tensor: impl FnMut(Argument, &T) -> U) -> Arguments<U> {
                let mapped: Result<_, std::convert::Infallible> =
                    self.try_map(|argument, value| Ok(tensor(argument, value)));
                let Ok(mapped) = mapped;
                mapped
            }

            /// As [`Arguments::map`], for a `tensor` that can fail.
            ///
            /// # Errors
            /// The first error of `tensor`, after which no more tensors are made.
            pub fn try_map<U, E>(
                &self,
                mut tensor: impl FnMut(Argument, &T) -> Result<U, E>,
            ) -> Result<Arguments<U>, E> {
                Ok(Arguments {
                    $($field: declare_arguments!(@map $kind self.$field, $variant, tensor),)*
                })
            }

            /// The call that the rules judge, with these tensors.
            pub fn call_of<'a>(&'a self, tensors: &'a Arguments<$crate::TensorDesc>) -> $call<$($borrow)?> {
                $call {
                    $($field: declare_arguments!(@view $kind self.$field, tensors.$field),)*
                }
            }
        }

        impl<T> $crate::operator::ArgumentList for Arguments<T> {
            type Parameter = Parameter;
            type Tensor = T;

            fn tensors(&self, parameter: Parameter) -> &[T] {
                Arguments::tensors(self, parameter)
            }
        }

        impl<T> $crate::operator::ArgumentValues for Arguments<T> {
            fn value(&self, parameter: Parameter) -> Option<$crate::operator::Value<'_>> {
                Arguments::value(self, parameter)
            }
        }

        impl<$($borrow)?> $crate::operator::ArgumentList for $call<$($borrow)?> {
            type Parameter = Parameter;
            type Tensor = $crate::TensorDesc;

            fn tensors(&self, parameter: Parameter) -> &[$crate::TensorDesc] {
                $call::tensors(self, parameter)
            }
        }

        impl<$($borrow)?> $crate::operator::ArgumentValues for $call<$($borrow)?> {
            fn value(&self, parameter: Parameter) -> Option<$crate::operator::Value<'_>> {
                match parameter {
                    $(Parameter::$variant => declare_arguments!(@value $kind self.$field),)*
                }
            }
        }

        impl Arguments<$crate::TensorDesc> {
            /// The call that the rules judge.
            #[allow(clippy::needless_lifetimes, reason = "a call that borrows names the lifetime")]
            pub fn call<'a>(&'a self) -> $call<$($borrow)?> {
                self.call_of(self)
            }

            /// These arguments with the changes of a fix ([`Violation::changes`]($crate::Violation::changes))
            /// applied. A change of a parameter that the operator does not have is ignored.
            ///
            /// # Errors
            /// A parameter's kind, if a value is of another one.
            pub fn changed(
                &self,
                changes: &[$crate::operator::Change],
            ) -> Result<Self, $crate::operator::WrongKind> {
                let mut changed: Self = self.call().attributes();
                for (argument, tensor) in self.each_tensor() {
                    let tensor = $crate::operator::changed(changes, argument.parameter.info(), tensor);
                    if let Some(tensor) = tensor {
                        changed.set_tensor(argument.parameter, tensor);
                    }
                }
                for change in changes {
                    let Some(parameter) = Parameter::from_name(change.parameter.name) else {
                        continue;
                    };
                    match &change.to {
                        $crate::operator::NewArgument::Value(value) => {
                            changed.set_value(parameter, value.clone())?;
                        }
                        $crate::operator::NewArgument::Given(tensor) => changed.set_tensor(parameter, *tensor),
                        _ => {}
                    }
                }
                Ok(changed)
            }
        }

        #[doc = concat!("Every argument of a call of ", $operator, ", without data and without addresses.")]
        ///
        /// The fields are the operator's arguments in snake case, without `Ref` and `Optional`; `None` and an empty
        /// list are null pointers. The values are what a caller wrote, right or wrong: `check` judges them.
        /// [`Arguments::call`] makes a call from owned arguments.
        $(#[$call_meta])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $call<$($borrow)?> {
            $(#[doc = $doc] pub $field: declare_arguments!(@borrowed 'a $kind),)*
        }

        impl<$($borrow)?> Default for $call<$($borrow)?> {
            /// A call without tensors, with the operator's defaults.
            fn default() -> Self {
                $call {
                    $($field: declare_arguments!(@borrowed_default $kind $($default)?),)*
                }
            }
        }

        impl<$($borrow)?> $call<$($borrow)?> {
            /// The tensors that are given to a parameter: none or one, or those of a list.
            pub fn tensors(&self, parameter: Parameter) -> &[$crate::TensorDesc] {
                match parameter {
                    $(Parameter::$variant => declare_arguments!(@tensors $kind self.$field),)*
                }
            }

            /// One tensor.
            pub fn tensor(&self, argument: impl Into<Argument>) -> Option<&$crate::TensorDesc> {
                let $crate::operator::Argument { parameter, index } = argument.into();
                self.tensors(parameter).get(index)
            }

            /// Every tensor with its place in the call, in the operator's order.
            pub fn each_tensor(&self) -> impl Iterator<Item = (Argument, &$crate::TensorDesc)> {
                $crate::operator::ArgumentList::each_tensor(self)
            }

            /// The field that has the description of a tensor; `None` for lists and for parameters that are not
            /// tensors.
            pub fn single_mut(&mut self, parameter: Parameter) -> Option<&mut Option<$crate::TensorDesc>> {
                match parameter {
                    $(Parameter::$variant => declare_arguments!(@single $kind self.$field),)*
                }
            }

            /// The parameters that are given, in the operator's order. An attribute with its default is not given.
            pub fn given(&self) -> impl Iterator<Item = Parameter> {
                let all = [
                    $(declare_arguments!(@given $kind self.$field $(, $default)?).then_some(Parameter::$variant),)*
                ];
                all.into_iter().flatten()
            }

            /// The call with the operator's defaults for every parameter that `keeps` refuses.
            #[must_use]
            pub fn keeping(&self, keeps: impl Fn(Parameter) -> bool) -> Self {
                let mut kept = self.clone();
                let plain = Self::default();
                $(if !keeps(Parameter::$variant) {
                    kept.$field = plain.$field;
                })*
                kept
            }

            /// This call's attributes and arrays, without its tensors.
            pub fn attributes<T>(&self) -> Arguments<T> {
                Arguments {
                    $($field: declare_arguments!(@attribute $kind self.$field),)*
                }
            }

            /// An owned copy of these arguments.
            pub fn to_arguments(&self) -> Arguments<$crate::TensorDesc> {
                Arguments {
                    $($field: declare_arguments!(@to_owned $kind self.$field),)*
                }
            }
        }
    };

    (@kind tensor) => { $crate::operator::Kind::Tensor };
    (@kind list) => { $crate::operator::Kind::TensorList };
    (@kind inout) => { $crate::operator::Kind::InOut };
    (@kind output) => { $crate::operator::Kind::Output };
    (@kind output_mut) => { $crate::operator::Kind::Output };
    (@kind ints) => { $crate::operator::Kind::Ints };
    (@kind int) => { $crate::operator::Kind::Int };
    (@kind int8) => { $crate::operator::Kind::Int8 };
    (@kind float) => { $crate::operator::Kind::Float };
    (@kind float32) => { $crate::operator::Kind::Float };
    (@kind flag) => { $crate::operator::Kind::Flag };
    (@kind text) => { $crate::operator::Kind::Text };
    (@kind optional_text) => { $crate::operator::Kind::OptionalText };
    (@kind int_list) => { $crate::operator::Kind::IntList };

    (@owned list $tensor:ident) => { Vec<$tensor> };
    (@owned ints $tensor:ident) => { Option<Vec<i64>> };
    (@owned int_list $tensor:ident) => { Option<Vec<i64>> };
    (@owned int $tensor:ident) => { i64 };
    (@owned int8 $tensor:ident) => { i8 };
    (@owned float $tensor:ident) => { f64 };
    (@owned float32 $tensor:ident) => { f64 };
    (@owned flag $tensor:ident) => { bool };
    (@owned text $tensor:ident) => { String };
    (@owned optional_text $tensor:ident) => { Option<String> };
    (@owned $single:ident $tensor:ident) => { Option<$tensor> };

    (@default text $default:expr) => { $default.to_owned() };
    (@default list) => { Vec::new() };
    (@default $kind:ident $default:expr) => { $default };
    (@default $kind:ident) => { None };

    (@borrowed $a:lifetime list) => { &$a [$crate::TensorDesc] };
    (@borrowed $a:lifetime ints) => { Option<&$a [i64]> };
    (@borrowed $a:lifetime int_list) => { Option<&$a [i64]> };
    (@borrowed $a:lifetime int) => { i64 };
    (@borrowed $a:lifetime int8) => { i8 };
    (@borrowed $a:lifetime float) => { f64 };
    (@borrowed $a:lifetime float32) => { f64 };
    (@borrowed $a:lifetime flag) => { bool };
    (@borrowed $a:lifetime text) => { &$a str };
    (@borrowed $a:lifetime optional_text) => { Option<&$a str> };
    (@borrowed $a:lifetime $single:ident) => { Option<$crate::TensorDesc> };

    (@borrowed_default list) => { &[] };
    (@borrowed_default $kind:ident $default:expr) => { $default };
    (@borrowed_default $kind:ident) => { None };

    (@tensors list $self:ident.$field:ident) => { &$self.$field };
    (@tensors tensor $self:ident.$field:ident) => { $self.$field.as_slice() };
    (@tensors inout $self:ident.$field:ident) => { $self.$field.as_slice() };
    (@tensors output $self:ident.$field:ident) => { $self.$field.as_slice() };
    (@tensors output_mut $self:ident.$field:ident) => { $self.$field.as_slice() };
    (@tensors $other:ident $self:ident.$field:ident) => { &[] };

    (@single tensor $self:ident.$field:ident) => { Some(&mut $self.$field) };
    (@single inout $self:ident.$field:ident) => { Some(&mut $self.$field) };
    (@single output $self:ident.$field:ident) => { Some(&mut $self.$field) };
    (@single output_mut $self:ident.$field:ident) => { Some(&mut $self.$field) };
    (@single $other:ident $self:ident.$field:ident) => { None };

    (@set_tensor list $self:ident.$field:ident, $tensor:ident) => { $self.$field.push($tensor) };
    (@set_tensor tensor $self:ident.$field:ident, $tensor:ident) => { $self.$field = Some($tensor) };
    (@set_tensor inout $self:ident.$field:ident, $tensor:ident) => { $self.$field = Some($tensor) };
    (@set_tensor output $self:ident.$field:ident, $tensor:ident) => { $self.$field = Some($tensor) };
    (@set_tensor output_mut $self:ident.$field:ident, $tensor:ident) => { $self.$field = Some($tensor) };
    (@set_tensor $other:ident $self:ident.$field:ident, $tensor:ident) => { drop($tensor) };

    (@value int8 $self:ident.$field:ident) => { Some($crate::operator::Value::Int($self.$field.into())) };
    (@value int $self:ident.$field:ident) => { Some($crate::operator::Value::Int($self.$field)) };
    (@value float $self:ident.$field:ident) => { Some($crate::operator::Value::Float($self.$field)) };
    (@value float32 $($rest:tt)*) => { declare_arguments!(@value float $($rest)*) };
    (@value flag $self:ident.$field:ident) => { Some($crate::operator::Value::Flag($self.$field)) };
    (@value text $self:ident.$field:ident) => { Some($crate::operator::Value::Text(Some(&$self.$field))) };
    (@value optional_text $self:ident.$field:ident) => { Some($crate::operator::Value::Text($self.$field.as_deref())) };
    (@value ints $self:ident.$field:ident) => { Some($crate::operator::Value::Ints($self.$field.as_deref())) };
    (@value int_list $self:ident.$field:ident) => { Some($crate::operator::Value::Ints($self.$field.as_deref())) };
    (@value $tensor:ident $self:ident.$field:ident) => { None };

    (@set_value tensor $self:ident.$field:ident, $value:ident, $wrong:ident) => { return Err($wrong) };
    (@set_value list $($rest:tt)*) => { declare_arguments!(@set_value tensor $($rest)*) };
    (@set_value inout $($rest:tt)*) => { declare_arguments!(@set_value tensor $($rest)*) };
    (@set_value output $($rest:tt)*) => { declare_arguments!(@set_value tensor $($rest)*) };
    (@set_value output_mut $($rest:tt)*) => { declare_arguments!(@set_value tensor $($rest)*) };
    (@set_value int8 $self:ident.$field:ident, $value:ident, $wrong:ident) => {
        match $value {
            $crate::operator::OwnedValue::Int(given) => {
                $self.$field = i8::try_from(given).map_err(|_| $wrong)?;
            }
            _ => return Err($wrong),
        }
    };
    (@set_value $kind:ident $self:ident.$field:ident, $value:ident, $wrong:ident) => {
        match $value {
            declare_arguments!(@pattern $kind given) => $self.$field = given,
            _ => return Err($wrong),
        }
    };
    (@pattern int $given:ident) => { $crate::operator::OwnedValue::Int($given) };
    (@pattern float $given:ident) => { $crate::operator::OwnedValue::Float($given) };
    (@pattern float32 $given:ident) => { $crate::operator::OwnedValue::Float($given) };
    (@pattern flag $given:ident) => { $crate::operator::OwnedValue::Flag($given) };
    (@pattern text $given:ident) => { $crate::operator::OwnedValue::Text(Some($given)) };
    (@pattern optional_text $given:ident) => { $crate::operator::OwnedValue::Text($given) };
    (@pattern ints $given:ident) => { $crate::operator::OwnedValue::Ints($given) };
    (@pattern int_list $given:ident) => { $crate::operator::OwnedValue::Ints($given) };

    (@map list $self:ident.$field:ident, $variant:ident, $map:ident) => {
        $self.$field.iter().enumerate()
            .map(|(index, tensor)| $map(Argument::element(Parameter::$variant, index), tensor))
            .collect::<Result<_, E>>()?
    };
    (@map tensor $self:ident.$field:ident, $variant:ident, $map:ident) => {
        $self.$field.as_ref().map(|tensor| $map(Parameter::$variant.into(), tensor)).transpose()?
    };
    (@map inout $($rest:tt)*) => { declare_arguments!(@map tensor $($rest)*) };
    (@map output $($rest:tt)*) => { declare_arguments!(@map tensor $($rest)*) };
    (@map output_mut $($rest:tt)*) => { declare_arguments!(@map tensor $($rest)*) };
    (@map $value:ident $self:ident.$field:ident, $variant:ident, $map:ident) => { $self.$field.clone() };

    (@view int $self:ident.$field:ident, $of:ident.$same:ident) => { $self.$field };
    (@view int8 $self:ident.$field:ident, $of:ident.$same:ident) => { $self.$field };
    (@view float $self:ident.$field:ident, $of:ident.$same:ident) => { $self.$field };
    (@view float32 $self:ident.$field:ident, $of:ident.$same:ident) => { $self.$field };
    (@view flag $self:ident.$field:ident, $of:ident.$same:ident) => { $self.$field };
    (@view text $self:ident.$field:ident, $of:ident.$same:ident) => { &$self.$field };
    (@view optional_text $self:ident.$field:ident, $of:ident.$same:ident) => { $self.$field.as_deref() };
    (@view ints $self:ident.$field:ident, $of:ident.$same:ident) => { $self.$field.as_deref() };
    (@view int_list $self:ident.$field:ident, $of:ident.$same:ident) => { $self.$field.as_deref() };
    (@view list $self:ident.$field:ident, $of:ident.$same:ident) => { &$of.$field };
    (@view $tensor:ident $self:ident.$field:ident, $of:ident.$same:ident) => { $of.$field };

    (@given list $self:ident.$field:ident) => { !$self.$field.is_empty() };
    (@given $value:ident $self:ident.$field:ident, $default:expr) => { $self.$field != $default };
    (@given $optional:ident $self:ident.$field:ident) => { $self.$field.is_some() };

    (@attribute list $self:ident.$field:ident) => { Vec::new() };
    (@attribute tensor $self:ident.$field:ident) => { None };
    (@attribute inout $self:ident.$field:ident) => { None };
    (@attribute output $self:ident.$field:ident) => { None };
    (@attribute output_mut $self:ident.$field:ident) => { None };
    (@attribute $value:ident $self:ident.$field:ident) => { declare_arguments!(@to_owned $value $self.$field) };

    (@to_owned list $self:ident.$field:ident) => { $self.$field.to_vec() };
    (@to_owned ints $self:ident.$field:ident) => { $self.$field.map(<[i64]>::to_vec) };
    (@to_owned int_list $self:ident.$field:ident) => { $self.$field.map(<[i64]>::to_vec) };
    (@to_owned text $self:ident.$field:ident) => { $self.$field.to_owned() };
    (@to_owned optional_text $self:ident.$field:ident) => { $self.$field.map(str::to_owned) };
    (@to_owned $copied:ident $self:ident.$field:ident) => { $self.$field };
}
