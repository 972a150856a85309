//! Key and value: one tensor, or one a sequence.

use crate::memory::Element;
use crate::tensor::{AnyTensor, Tensor};

/// What can be given as key or value: a tensor, or a slice, array or vector of tensors (or references), one a sequence.
pub trait TensorList: sealed::Sealed {
    /// Element type of the tensors, or [`Erased`] where it is known at run time alone.
    type Element;

    /// Number of tensors.
    fn count(&self) -> usize;

    /// One of the tensors.
    fn tensor(&self, index: usize) -> Option<&AnyTensor>;
}

/// Stands for the element type of [`AnyTensor`]s.
#[derive(Clone, Copy, Debug)]
pub enum Erased {}

/// The tensors of a list, whatever their type.
#[derive(Clone, Copy, Debug)]
pub(super) enum List<'a> {
    One(&'a AnyTensor),
    Many(&'a [AnyTensor]),
    References(&'a [&'a AnyTensor]),
}

impl<'a> List<'a> {
    pub(super) fn len(self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Many(tensors) => tensors.len(),
            Self::References(tensors) => tensors.len(),
        }
    }

    pub(super) fn get(self, index: usize) -> Option<&'a AnyTensor> {
        match self {
            Self::One(tensor) => (index == 0).then_some(tensor),
            Self::Many(tensors) => tensors.get(index),
            Self::References(tensors) => tensors.get(index).copied(),
        }
    }

    pub(super) fn iter(self) -> impl Iterator<Item = &'a AnyTensor> {
        (0..self.len()).filter_map(move |index| self.get(index))
    }
}

mod sealed {
    use super::List;

    pub trait Sealed {
        #[allow(private_interfaces, reason = "nobody outside can name this trait")]
        fn list(&self) -> List<'_>;
    }
}

/// The tensors of a list.
pub(super) fn list<L: TensorList + ?Sized>(tensors: &L) -> List<'_> {
    tensors.list()
}

/// The same tensors without their type.
fn erased<T: Element>(tensors: &[Tensor<T>]) -> &[AnyTensor] {
    // SAFETY: `Tensor<T>` is a transparent wrapper of `AnyTensor`, so that slices of both have the same layout.
    unsafe { std::slice::from_raw_parts(tensors.as_ptr().cast(), tensors.len()) }
}

/// The same references without their type.
fn erased_references<'a, T: Element>(tensors: &'a [&Tensor<T>]) -> &'a [&'a AnyTensor] {
    // SAFETY: as above; the references are valid for as long as the slice of them is borrowed.
    unsafe { std::slice::from_raw_parts(tensors.as_ptr().cast(), tensors.len()) }
}

macro_rules! lists {
    ($(<$($parameter:ident)?> $type:ty, $element:ty, |$tensors:ident| $list:expr;)*) => {
        $(
            impl $(<$parameter: Element>)? sealed::Sealed for $type {
                #[allow(private_interfaces, reason = "as declared")]
                fn list(&self) -> List<'_> {
                    let $tensors = self;
                    $list
                }
            }

            impl $(<$parameter: Element>)? TensorList for $type {
                type Element = $element;

                fn count(&self) -> usize {
                    list(self).len()
                }

                fn tensor(&self, index: usize) -> Option<&AnyTensor> {
                    list(self).get(index)
                }
            }
        )*
    };
}

lists! {
    <T> Tensor<T>, T, |tensor| List::One(tensor);
    <T> [Tensor<T>], T, |tensors| List::Many(erased(tensors));
    <T> [&Tensor<T>], T, |tensors| List::References(erased_references(tensors));
    <> AnyTensor, Erased, |tensor| List::One(tensor);
    <> [AnyTensor], Erased, |tensors| List::Many(tensors);
    <> [&AnyTensor], Erased, |tensors| List::References(tensors);
}

impl<E, const N: usize> sealed::Sealed for [E; N]
where
    [E]: sealed::Sealed,
{
    #[allow(private_interfaces, reason = "as declared")]
    fn list(&self) -> List<'_> {
        self.as_slice().list()
    }
}

impl<E, const N: usize> TensorList for [E; N]
where
    [E]: TensorList,
{
    type Element = <[E] as TensorList>::Element;

    fn count(&self) -> usize {
        N
    }

    fn tensor(&self, index: usize) -> Option<&AnyTensor> {
        self.as_slice().tensor(index)
    }
}

impl<E> sealed::Sealed for Vec<E>
where
    [E]: sealed::Sealed,
{
    #[allow(private_interfaces, reason = "as declared")]
    fn list(&self) -> List<'_> {
        self.as_slice().list()
    }
}

impl<E> TensorList for Vec<E>
where
    [E]: TensorList,
{
    type Element = <[E] as TensorList>::Element;

    fn count(&self) -> usize {
        self.len()
    }

    fn tensor(&self, index: usize) -> Option<&AnyTensor> {
        self.as_slice().tensor(index)
    }
}
