//! Key and value: one tensor, or one a sequence.

use crate::memory::Element;
use crate::tensor::Tensor;

mod sealed {
    pub trait Sealed {}
}

/// What can be given as key or value: a tensor, or a slice, array or vector of tensors (or references), one a sequence.
pub trait TensorList<T: Element>: sealed::Sealed {
    /// Number of tensors.
    fn count(&self) -> usize;

    /// One of the tensors.
    fn tensor(&self, index: usize) -> Option<&Tensor<T>>;
}

impl<T: Element> sealed::Sealed for Tensor<T> {}
impl<T: Element> TensorList<T> for Tensor<T> {
    fn count(&self) -> usize {
        1
    }

    fn tensor(&self, index: usize) -> Option<&Tensor<T>> {
        (index == 0).then_some(self)
    }
}

impl<T: Element> sealed::Sealed for [Tensor<T>] {}
impl<T: Element> TensorList<T> for [Tensor<T>] {
    fn count(&self) -> usize {
        self.len()
    }

    fn tensor(&self, index: usize) -> Option<&Tensor<T>> {
        self.get(index)
    }
}

impl<T: Element> sealed::Sealed for [&Tensor<T>] {}
impl<T: Element> TensorList<T> for [&Tensor<T>] {
    fn count(&self) -> usize {
        self.len()
    }

    fn tensor(&self, index: usize) -> Option<&Tensor<T>> {
        self.get(index).copied()
    }
}

impl<E, const N: usize> sealed::Sealed for [E; N] where [E]: sealed::Sealed {}
impl<T: Element, E, const N: usize> TensorList<T> for [E; N]
where
    [E]: TensorList<T>,
{
    fn count(&self) -> usize {
        N
    }

    fn tensor(&self, index: usize) -> Option<&Tensor<T>> {
        self.as_slice().tensor(index)
    }
}

impl<E> sealed::Sealed for Vec<E> where [E]: sealed::Sealed {}
impl<T: Element, E> TensorList<T> for Vec<E>
where
    [E]: TensorList<T>,
{
    fn count(&self) -> usize {
        self.len()
    }

    fn tensor(&self, index: usize) -> Option<&Tensor<T>> {
        self.as_slice().tensor(index)
    }
}
