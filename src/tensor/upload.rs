//! New tensors from host memory.

use ascend_spec::{DType, TensorDesc};

use crate::error::Result;
use crate::memory::{Element, as_bytes};
use crate::runtime::Stream;

use super::shape::{bytes_of, dims, has_len};
use super::{AnyTensor, Tensor};

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
    pub fn upload<T: Element>(
        &self,
        elements: &[T],
        shape: impl AsRef<[usize]>,
    ) -> Result<Tensor<T>> {
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
    pub fn upload_bytes(
        &self,
        dtype: DType,
        bytes: &[u8],
        shape: impl AsRef<[usize]>,
    ) -> Result<AnyTensor> {
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
