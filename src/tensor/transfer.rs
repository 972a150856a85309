//! New tensors from host memory, and copies between tensors and pinned host memory, which run while the host goes on.

use ascend_spec::{DType, TensorDesc};

use crate::error::{Error, Result};
use crate::memory::{Element, HostBuffer, Transfer, as_bytes};
use crate::runtime::Stream;

use super::shape::{bytes_of, dims, has_len};
use super::{AnyTensor, Tensor};

impl<T: Element> Tensor<T> {
    /// Queues a copy of this contiguous tensor to pinned host memory of as many elements.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a
    /// strided tensor, another length, or a tensor or host memory of another device than the stream's;
    /// [`Error::Capturing`] on a thread that captures; [`Error::Acl`]. The host memory is dropped with the error.
    #[doc(alias = "aclrtMemcpyAsync")]
    pub fn download_async(&self, stream: &Stream, host: HostBuffer<T>) -> Result<Transfer<T>> {
        self.transfer(host, false, stream)
    }

    /// Queues a copy of pinned host memory to this contiguous tensor of as many elements.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`Tensor::download_async`].
    #[doc(alias = "aclrtMemcpyAsync")]
    pub fn overwrite_async(&self, stream: &Stream, host: HostBuffer<T>) -> Result<Transfer<T>> {
        self.transfer(host, true, stream)
    }

    fn transfer(&self, host: HostBuffer<T>, to_device: bool, stream: &Stream) -> Result<Transfer<T>> {
        // The uses of this memory are waited for by its own context.
        stream.context().admits("host", host.context())?;
        if host.len() != self.len() {
            return Err(Error::invalid(
                "host",
                format_args!("{} elements", host.len()),
                format_args!("the {} elements of the tensor", self.len()),
            )
            .fix("give the host a buffer of as many elements"));
        }
        let (memory, offset) = self.packed("tensor", stream)?;
        host.transfer(memory, offset, to_device, stream)
    }
}

impl Stream {
    /// Copies elements into a new tensor of the given shape, row-major, and waits for that copy alone.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) if the shape has another number of elements or more
    /// than eight axes; [`Error::OutOfMemory`](crate::Error::OutOfMemory);
    /// [`Error::Capturing`](crate::Error::Capturing) on a thread that captures; [`Error::Acl`](crate::Error::Acl).
    #[doc(alias = "aclrtMalloc")]
    #[doc(alias = "aclrtMemcpy")]
    pub fn upload<T: Element>(&self, elements: &[T], shape: impl AsRef<[usize]>) -> Result<Tensor<T>> {
        let desc = TensorDesc::packed(T::DTYPE, dims(shape.as_ref())?);
        let wanted = desc.elements().and_then(|len| usize::try_from(len).ok());
        has_len("elements", elements.len(), wanted.unwrap_or(usize::MAX))?;
        self.upload_desc(as_bytes(elements), desc).map(Tensor::of)
    }

    /// As [`Stream::upload`], but for an element type known at run time. Elements smaller than a byte are packed, the
    /// first in the low bits.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// As for [`Stream::upload`], and [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for types without a
    /// fixed size.
    #[doc(alias = "aclrtMalloc")]
    #[doc(alias = "aclrtMemcpy")]
    pub fn upload_bytes(&self, dtype: DType, bytes: &[u8], shape: impl AsRef<[usize]>) -> Result<AnyTensor> {
        let desc = TensorDesc::packed(dtype, dims(shape.as_ref())?);
        has_len("bytes", bytes.len(), bytes_of(&desc)?)?;
        self.upload_desc(bytes, desc)
    }

    pub(crate) fn upload_desc(&self, bytes: &[u8], desc: TensorDesc) -> Result<AnyTensor> {
        let tensor = AnyTensor::empty(self.context(), desc)?;
        tensor.memory.write(0, bytes)?;
        Ok(tensor)
    }
}
