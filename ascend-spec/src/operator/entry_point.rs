//! The parameters of one entry point or one version of an operator.

use super::{DeclaredParameter, ParameterInfo};

/// The parameters of one version's C function, in its own order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryPoint<P: 'static> {
    /// The parameters of a version, counted from 1, in the operator's order: each version extends the one before.
    Version(u8),
    /// These parameters.
    Own(&'static [P]),
}

impl<P: DeclaredParameter> EntryPoint<P> {
    /// The parameters that have a number, in the order of the C function.
    fn numbered(self, number: fn(&ParameterInfo) -> Option<usize>) -> impl Iterator<Item = P> {
        let (parameters, version) = match self {
            EntryPoint::Version(version) => (P::ALL, version),
            EntryPoint::Own(own) => (own, u8::MAX),
        };
        parameters.iter().copied().filter(move |parameter| {
            let info = parameter.info();
            info.since <= version && number(info).is_some()
        })
    }

    /// Number of inputs.
    pub fn inputs(self) -> usize {
        self.numbered(|info| info.input).count()
    }

    /// Number of outputs.
    pub fn outputs(self) -> usize {
        self.numbered(|info| info.output).count()
    }

    /// The parameter of this number among the inputs.
    pub fn input(self, number: usize) -> Option<P> {
        match self {
            // An emulated launch asks for each tensor: the table is faster than a search.
            EntryPoint::Version(version) => P::of_input(number).filter(|parameter| parameter.info().since <= version),
            EntryPoint::Own(_) => self.numbered(|info| info.input).nth(number),
        }
    }

    /// The parameter of this number among the outputs.
    pub fn output(self, number: usize) -> Option<P> {
        self.numbered(|info| info.output).nth(number)
    }

    /// The number of a parameter among the inputs.
    pub fn input_number(self, parameter: P) -> Option<usize> {
        self.numbered(|info| info.input).position(|input| input == parameter)
    }

    /// The number of a parameter among the outputs.
    pub fn output_number(self, parameter: P) -> Option<usize> {
        self.numbered(|info| info.output).position(|output| output == parameter)
    }
}

/// Passes the arguments of a declaration that a version of the operator has to the macro `then`, after the tokens
/// `with`.
///
/// `arguments_of_version! { {2 then with} table }` becomes `then! { with rows of version 2, without their versions }`.
#[doc(hidden)]
#[macro_export]
macro_rules! arguments_of_version {
    ({ $version:tt $then:ident $with:tt } $($table:tt)*) => {
        $crate::arguments_of_version! { @ $version $then $with [] $($table)* }
    };
    (@ $version:tt $then:ident $with:tt [$($kept:tt)*]) => { $then! { $with $($kept)* } };
    // An argument that a newer version added is dropped.
    (@ 1 $t:ident $w:tt $k:tt 2 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 1 $t $w $k $($rest)* } };
    (@ 1 $t:ident $w:tt $k:tt 3 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 1 $t $w $k $($rest)* } };
    (@ 1 $t:ident $w:tt $k:tt 4 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 1 $t $w $k $($rest)* } };
    (@ 1 $t:ident $w:tt $k:tt 5 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 1 $t $w $k $($rest)* } };
    (@ 2 $t:ident $w:tt $k:tt 3 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 2 $t $w $k $($rest)* } };
    (@ 2 $t:ident $w:tt $k:tt 4 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 2 $t $w $k $($rest)* } };
    (@ 2 $t:ident $w:tt $k:tt 5 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 2 $t $w $k $($rest)* } };
    (@ 3 $t:ident $w:tt $k:tt 4 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 3 $t $w $k $($rest)* } };
    (@ 3 $t:ident $w:tt $k:tt 5 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 3 $t $w $k $($rest)* } };
    (@ 4 $t:ident $w:tt $k:tt 5 $row:tt $($rest:tt)*) => { $crate::arguments_of_version! { @ 4 $t $w $k $($rest)* } };
    (@ $version:tt $t:ident $w:tt [$($kept:tt)*] $since:tt $row:tt $($rest:tt)*) => {
        $crate::arguments_of_version! { @ $version $t $w [$($kept)* $row] $($rest)* }
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::fused_infer_attention_score::{Parameter, Version};

    #[test]
    fn versions_that_extend_each_other_count_as_their_own_lists_would() {
        for version in Version::ALL {
            let own = Parameter::ALL.iter().copied();
            let own: Vec<_> = own.filter(|own| own.info().since <= version.number()).collect();
            let own = EntryPoint::Own(own.leak());
            let version = EntryPoint::Version(version.number());
            assert_eq!(version.inputs(), own.inputs());
            assert_eq!(version.outputs(), own.outputs());
            for number in 0..=Parameter::ALL.len() {
                assert_eq!(version.input(number), own.input(number));
                assert_eq!(version.output(number), own.output(number));
            }
            for &parameter in Parameter::ALL {
                assert_eq!(version.input_number(parameter), own.input_number(parameter));
                assert_eq!(version.output_number(parameter), own.output_number(parameter));
            }
        }
    }
}
