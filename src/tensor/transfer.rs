//! Copies between tensors and pinned host memory, which run while the host goes on.

use crate::error::{Error, Result};
use crate::memory::{Element, HostBuffer, Transfer};
use crate::runtime::Stream;

use super::Tensor;

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

    fn transfer(
        &self,
        host: HostBuffer<T>,
        to_device: bool,
        stream: &Stream,
    ) -> Result<Transfer<T>> {
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
