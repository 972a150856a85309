//! Parameters of operators, and the declaration of each.

use std::fmt::Debug;
use std::hash::Hash;

/// The kind of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A tensor on the device that the operator reads (`tensor`).
    Tensor,
    /// A list of such tensors (`list`).
    TensorList,
    /// A tensor that the operator updates in place: an input and an output (`inout`).
    InOut,
    /// A tensor that the operator writes (`output`, or `output_mut` where C has no `const`).
    Output,
    /// Integers in host memory that count as an input (`ints`).
    Ints,
    /// An integer (`int`).
    Int,
    /// An integer of 8 bits (`int8`).
    Int8,
    /// A number (`float`).
    Float,
    /// A truth value (`flag`).
    Flag,
    /// A text that must not be null (`text`).
    Text,
    /// A text that may be null (`optional_text`).
    OptionalText,
    /// Integers in host memory that count as an attribute (`int_list`).
    IntList,
}

impl Kind {
    /// Whether the kind is a tensor or a list of tensors.
    pub const fn is_tensor(self) -> bool {
        matches!(self, Kind::Tensor | Kind::TensorList | Kind::InOut | Kind::Output)
    }

    /// Whether arguments of this kind have a number among the operator's inputs.
    pub const fn is_input(self) -> bool {
        matches!(self, Kind::Tensor | Kind::TensorList | Kind::InOut | Kind::Ints)
    }

    /// Whether arguments of this kind have a number among the operator's outputs.
    pub const fn is_output(self) -> bool {
        matches!(self, Kind::Output | Kind::InOut)
    }
}

/// The declaration of one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterInfo {
    /// The parameter's name in snake case.
    pub name: &'static str,
    /// CANN's name, without `Optional`.
    pub acl_name: &'static str,
    /// The first version of the operator that has the parameter, counted from 1.
    pub since: u8,
    /// What the parameter is for, in plain sentences.
    pub doc: &'static str,
    /// The parameter's kind.
    pub kind: Kind,
    /// The parameter's number among the inputs of the newest version; older versions that it extends have the first
    /// of these inputs. An entry point with an order of its own counts by that order:
    /// [`EntryPoint`](super::EntryPoint).
    pub input: Option<usize>,
    /// The parameter's number among the outputs.
    pub output: Option<usize>,
    /// The parameter's number among the lists.
    pub list: Option<usize>,
}

/// The name of a parameter in C or in snake case, from the Rust name that stands for it: a word that Rust reserves
/// has an underscore after it.
///
/// ```
/// assert_eq!(ascend_spec::operator::name_of_field("self_"), "self");
/// assert_eq!(ascend_spec::operator::name_of_field("mat2"), "mat2");
/// ```
pub const fn name_of_field(field: &'static str) -> &'static str {
    match field.as_bytes() {
        [name @ .., b'_'] => field.split_at(name.len()).0,
        _ => field,
    }
}

impl ParameterInfo {
    /// Numbers inputs and outputs in the order of the table.
    pub(crate) const fn numbered<const N: usize>(mut table: [Self; N]) -> [Self; N] {
        let (mut index, mut inputs, mut outputs, mut lists) = (0, 0, 0, 0);
        while index < N {
            let kind = table[index].kind;
            if kind.is_input() {
                table[index].input = Some(inputs);
                inputs += 1;
            }
            if kind.is_output() {
                table[index].output = Some(outputs);
                outputs += 1;
            }
            if matches!(kind, Kind::TensorList) {
                table[index].list = Some(lists);
                lists += 1;
            }
            index += 1;
        }
        table
    }
}

/// The parameters of one operator.
pub trait DeclaredParameter: Copy + Debug + Eq + Ord + Hash + Send + Sync + 'static {
    /// Every parameter, in the operator's order.
    const ALL: &'static [Self];

    /// The declaration of the parameter.
    fn info(self) -> &'static ParameterInfo;

    /// The parameter of this name in snake case.
    fn from_name(name: &str) -> Option<Self> {
        let mut all = Self::ALL.iter().copied();
        all.find(|parameter| parameter.info().name == name)
    }

    /// The parameter of this number among the inputs.
    fn of_input(number: usize) -> Option<Self>;

    /// The oldest version that has all of these parameters, of an operator whose versions extend each other.
    fn oldest_version(parameters: impl Iterator<Item = Self>) -> u8 {
        let since = parameters.map(|parameter| parameter.info().since);
        since.max().unwrap_or(1)
    }
}

/// The arguments of a call of any operator.
pub trait ArgumentList {
    /// The operator's parameters.
    type Parameter: DeclaredParameter;
    /// The type that stands for a tensor.
    type Tensor;

    /// The tensors that are given to a parameter: none or one, or those of a list.
    fn tensors(&self, parameter: Self::Parameter) -> &[Self::Tensor];

    /// Every tensor with its place in the call, in the operator's order.
    fn each_tensor(&self) -> impl Iterator<Item = (Argument<Self::Parameter>, &Self::Tensor)> {
        let tensors = Self::Parameter::ALL.iter().copied();
        let tensors = tensors.filter(|parameter| parameter.info().kind.is_tensor());
        tensors.flat_map(|parameter| {
            let tensors = self.tensors(parameter).iter().enumerate();
            tensors.map(move |(index, tensor)| (Argument::element(parameter, index), tensor))
        })
    }

    /// One tensor.
    fn tensor(&self, argument: Argument<Self::Parameter>) -> Option<&Self::Tensor> {
        self.tensors(argument.parameter).get(argument.index)
    }
}

/// One tensor of a call: its parameter, and its index if the parameter is a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Argument<P> {
    /// The parameter.
    pub parameter: P,
    /// The index in the list; 0 for a parameter that is not a list.
    pub index: usize,
}

impl<P> Argument<P> {
    /// A tensor of a list.
    pub const fn element(parameter: P, index: usize) -> Self {
        Argument { parameter, index }
    }
}

impl<P: DeclaredParameter> Argument<P> {
    /// The parameter's name in snake case.
    pub fn name(self) -> &'static str {
        self.parameter.info().name
    }

    /// CANN's name of the parameter.
    pub fn acl_name(self) -> &'static str {
        self.parameter.info().acl_name
    }

    /// Whether the operator writes the argument.
    pub fn is_output(self) -> bool {
        self.parameter.info().output.is_some()
    }
}

impl<P> From<P> for Argument<P> {
    fn from(parameter: P) -> Self {
        Argument { parameter, index: 0 }
    }
}
