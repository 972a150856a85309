//! Tensors of a Rust type.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::sync::Arc;

use ascend_spec::TensorDesc;

use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, Element, as_bytes, vec_from, zeros};
use crate::runtime::{Device, Stream};

use super::AnyTensor;
use super::shape::{dims, has_len};

/// A tensor of elements `T` on a device. See [`AnyTensor`], whose functions it has too.
// Transparent, so that a list of tensors can be read as one of `AnyTensor`s.
#[derive(Clone)]
#[repr(transparent)]
pub struct Tensor<T: Element> {
    tensor: AnyTensor,
    elements: PhantomData<T>,
}

impl AnyTensor {
    /// Returns the same tensor with element type `T`.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) if the elements are of another type.
    pub fn typed<T: Element>(self) -> Result<Tensor<T>> {
        if self.desc().dtype == T::DTYPE {
            Ok(Tensor::of(self))
        } else {
            Err(Error::invalid("dtype", T::DTYPE, self.desc().dtype).fix("name the type of the elements"))
        }
    }
}

impl<T: Element> Tensor<T> {
    pub(super) fn of(tensor: AnyTensor) -> Self {
        Self { tensor, elements: PhantomData }
    }

    /// A contiguous tensor of uninitialised device memory.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`Device::alloc`](crate::Device::alloc), and for more than eight axes.
    #[doc(alias = "aclrtMalloc")]
    pub fn empty(device: &Device, shape: impl AsRef<[usize]>) -> Result<Self> {
        let desc = TensorDesc::packed(T::DTYPE, dims(shape.as_ref())?);
        AnyTensor::empty(device.context(), desc).map(Self::of)
    }

    /// A view of a buffer as a contiguous tensor, from its first element on.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a shape that needs more elements, or has more than
    /// eight axes.
    pub fn from_buffer(buffer: &DeviceBuffer<T>, shape: impl AsRef<[usize]>) -> Result<Self> {
        let desc = TensorDesc::packed(T::DTYPE, dims(shape.as_ref())?);
        AnyTensor::new(Arc::clone(buffer.memory()), 0, desc).map(Self::of)
    }

    /// Waits for a stream and copies the elements out, packed in row-major order whatever the strides.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`](crate::Error::Acl): the copy, or work on the stream, failed;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for another device;
    /// [`Error::Capturing`](crate::Error::Capturing) on a thread that captures.
    #[doc(alias = "aclrtMemcpy")]
    pub fn download(&self, stream: &Stream) -> Result<Vec<T>> {
        vec_from(self.len(), |bytes| self.gather(stream, bytes))
    }

    /// Waits for a stream, then replaces the elements of a contiguous tensor, and waits for that.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for
    /// another number of elements, a strided tensor or another device; [`Error::Acl`](crate::Error::Acl).
    #[doc(alias = "aclrtMemcpy")]
    pub fn overwrite(&self, stream: &Stream, elements: &[T]) -> Result<()> {
        has_len("elements", elements.len(), self.len())?;
        self.overwrite_bytes(stream, as_bytes(elements))
    }

    /// A view of the elements in another shape, as [`AnyTensor::reshape`] makes it.
    ///
    /// # Errors
    /// As for [`AnyTensor::reshape`].
    pub fn reshape(&self, shape: impl AsRef<[usize]>) -> Result<Self> {
        self.tensor.reshape(shape).map(Self::of)
    }

    /// A view with the axes in another order, as [`AnyTensor::permute`] makes it.
    ///
    /// # Errors
    /// As for [`AnyTensor::permute`].
    pub fn permute(&self, order: impl AsRef<[usize]>) -> Result<Self> {
        self.tensor.permute(order).map(Self::of)
    }

    /// A view of part of an axis, as [`AnyTensor::narrow`] makes it.
    ///
    /// # Errors
    /// As for [`AnyTensor::narrow`].
    pub fn narrow(&self, axis: usize, range: Range<usize>) -> Result<Self> {
        self.tensor.narrow(axis, range).map(Self::of)
    }

    /// A contiguous view of the memory from the first element to the last, as [`AnyTensor::span`] makes it.
    ///
    /// ```
    /// use ascend_attention::Runtime;
    ///
    /// # fn main() -> ascend_attention::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// let stream = Runtime::emulated()?.device(0)?.stream()?;
    /// // Two blocks, each of two keys and two values.
    /// let blocks = stream.upload(&[0, 1, 10, 11, 2, 3, 12, 13], [2, 4])?;
    /// let values = blocks.narrow(1, 2..4)?;
    /// assert_eq!(values.download(&stream)?, [10, 11, 12, 13]);
    /// // For operators that take contiguous caches alone: the values are the blocks 0 and 2.
    /// let memory = values.span()?.reshape([3, 2])?;
    /// assert_eq!(memory.download(&stream)?, [10, 11, 2, 3, 12, 13]);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`AnyTensor::span`].
    pub fn span(&self) -> Result<Self> {
        self.tensor.span().map(Self::of)
    }

    /// This tensor if it is contiguous, otherwise a contiguous copy. The copy goes through the host and waits for the
    /// stream, so it is for setting up, not for each step.
    ///
    /// # Errors
    /// As for [`Tensor::download`] and [`Stream::upload`].
    pub fn contiguous(&self, stream: &Stream) -> Result<Self> {
        if self.is_contiguous() {
            return Ok(self.clone());
        }
        let elements = self.download(stream)?;
        let desc = TensorDesc::packed(T::DTYPE, self.desc().shape);
        stream.upload_desc(as_bytes(&elements), desc).map(Self::of)
    }

    /// A contiguous copy whose last axis has `size` elements, the new ones 0: for heads of a size that the operator
    /// does not take. [`HeadShape::padded`](ascend_spec::ops::fused_infer_attention_score::HeadShape::padded) returns a
    /// size that it takes. The copy goes through the host and waits for the stream: pad a model's weights once rather
    /// than its activations in each step.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a size below the axis' own, or a tensor without
    /// axes; as for [`Tensor::download`] and [`Stream::upload`].
    pub fn padded(&self, stream: &Stream, size: usize) -> Result<Self> {
        let (outer, now) = match self.shape() {
            [outer @ .., now] => (outer, *now),
            [] => {
                return Err(Error::invalid("tensor", self.desc(), "one with axes").fix("reshape the tensor"));
            }
        };
        if size < now {
            return Err(Error::invalid("size", size, format_args!("{now} or more"))
                .fix("fill up to a larger size; `narrow` makes an axis shorter"));
        }
        let mut shape = outer.to_vec();
        shape.push(size);
        let rows = self.len().checked_div(now).unwrap_or(0);
        let target = Self::of(AnyTensor::empty(stream.context(), TensorDesc::packed(T::DTYPE, dims(&shape)?))?);
        let bytes = self.download_bytes(stream)?;
        let row_bytes = |elements: usize| elements.saturating_mul(size_of::<T>()).max(1);
        let mut padded = zeros(target.len().saturating_mul(size_of::<T>()))?;
        let places = padded.chunks_exact_mut(row_bytes(size)).take(rows);
        for (place, source) in places.zip(bytes.chunks_exact(row_bytes(now))) {
            if let Some(place) = place.get_mut(..source.len()) {
                place.copy_from_slice(source);
            }
        }
        target.overwrite_bytes(stream, &padded)?;
        Ok(target)
    }
}

impl<T: Element> Deref for Tensor<T> {
    type Target = AnyTensor;

    fn deref(&self) -> &AnyTensor {
        &self.tensor
    }
}

impl<T: Element> From<Tensor<T>> for AnyTensor {
    fn from(tensor: Tensor<T>) -> Self {
        tensor.tensor
    }
}

impl<T: Element> From<&Tensor<T>> for AnyTensor {
    fn from(tensor: &Tensor<T>) -> Self {
        tensor.tensor.clone()
    }
}

impl<T: Element> fmt::Debug for Tensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tensor.fmt(f)
    }
}
