//! Tensors whose element type is known at run time, and views of them.

use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ascend_spec::{DType, Dims, TensorDesc};

use crate::error::{Error, Result};
use crate::memory::{overlap, vec_from, zeros};
use crate::runtime::{Context, Device, LaunchQueue, Memory, Queue, Stream};

use super::shape::{Sizes, bytes_of, dims, has_len};

/// A tensor on a device whose element type is known at run time.
///
/// Cloning shares the memory, which is freed with the last clone and view, once no queued work uses it. The bytes that
/// the shape and strides reach are always within the memory.
///
/// # Threads
/// `Send` and `Sync`. What different streams do with the memory has to be ordered by events, or the values are
/// unspecified.
#[derive(Clone)]
pub struct AnyTensor {
    pub(super) memory: Arc<Memory>,
    /// Byte of the memory at which the tensor begins.
    pub(super) start: usize,
    /// The descriptor. Its `offset` is 0, since `start` has it.
    desc: TensorDesc,
    /// Sizes of the axes of `desc`.
    sizes: Sizes,
}

impl AnyTensor {
    /// A view of memory. The only place where a tensor comes into being: it checks the bounds.
    pub(super) fn new(memory: Arc<Memory>, start: usize, desc: TensorDesc) -> Result<Self> {
        let reach = desc.byte_range().filter(|range| {
            let end = usize::try_from(range.end).ok();
            end.and_then(|end| end.checked_add(start)).is_some_and(|end| end <= memory.bytes())
        });
        if reach.is_none() {
            return Err(Error::invalid(
                "shape",
                format_args!("{desc} from byte {start} on"),
                format_args!("a tensor within the {} bytes of the memory", memory.bytes()),
            )
            .fix("make the tensor smaller, or its memory larger"));
        }
        Ok(Self { memory, start, desc, sizes: Sizes::of(&desc.shape) })
    }

    /// Uninitialised device memory for a contiguous tensor.
    pub(crate) fn empty(context: &Arc<Context>, desc: TensorDesc) -> Result<Self> {
        let bytes = bytes_of(&desc)?;
        Self::new(Arc::new(Memory::alloc(context, bytes)?), 0, desc)
    }

    /// A view of the memory behind this tensor's first element, with a shape and strides of its own.
    pub(crate) fn viewed_as(&self, desc: TensorDesc) -> Result<Self> {
        Self::new(Arc::clone(&self.memory), self.start, desc)
    }

    /// Whether this tensor alone holds the memory and no queued work is known to use it.
    pub(crate) fn is_idle(&self) -> bool {
        Arc::strong_count(&self.memory) == 1 && self.memory.is_idle()
    }

    #[inline]
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// The tensor's descriptor, as operators take it. Its offset is 0: a view begins at [`AnyTensor::as_raw`].
    #[inline]
    pub fn desc(&self) -> &TensorDesc {
        &self.desc
    }

    /// Range of the device addresses of the tensor's elements; empty without elements.
    pub fn addresses(&self) -> Range<usize> {
        let bytes = self.desc.byte_range().unwrap_or(0..0);
        let len = usize::try_from(bytes.end).unwrap_or(0);
        if len == 0 {
            return 0..0;
        }
        let start = self.as_raw().addr();
        start..start.saturating_add(len)
    }

    /// Whether another tensor shares memory with this one. Both count from their first byte to their last, so that
    /// interleaved views overlap too.
    pub fn overlaps(&self, other: &AnyTensor) -> bool {
        self.overlaps_addresses(&other.addresses())
    }

    /// Whether another tensor of these [addresses](Self::addresses) [overlaps](Self::overlaps) this one.
    pub fn overlaps_addresses(&self, other: &Range<usize>) -> bool {
        overlap(&self.addresses(), other)
    }

    /// The memory of a contiguous tensor, for work on a stream of the same device, and the byte it starts at.
    pub(crate) fn packed(&self, argument: &'static str, stream: &Stream) -> Result<(&Memory, usize)> {
        self.on(argument, stream.context())?;
        if !self.desc.is_contiguous() {
            return Err(Error::invalid(argument, self.desc, "a contiguous tensor: copy it with `contiguous`")
                .fix("copy it with `contiguous`"));
        }
        Ok((&self.memory, self.start))
    }

    /// Refuses a tensor of another device than this one, or of the same device of another runtime.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE), which calls the tensor `argument`.
    pub fn check_device(&self, argument: &'static str, device: &Device) -> Result<()> {
        self.on(argument, device.context())
    }

    /// Refuses a tensor of another device.
    #[inline]
    pub(crate) fn on(&self, argument: &'static str, context: &Context) -> Result<()> {
        context.admits(argument, self.memory.context())
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.desc.dtype
    }

    /// Sizes of the axes.
    #[inline]
    pub fn shape(&self) -> &[usize] {
        self.sizes.as_slice()
    }

    /// Steps of the axes, in elements, as CANN takes them.
    pub fn strides(&self) -> &[i64] {
        &self.desc.strides
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        let elements = self.desc.elements().unwrap_or(0);
        usize::try_from(elements).unwrap_or(usize::MAX)
    }

    /// Whether there is no element. Such a tensor has no memory.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the elements are packed in row-major order.
    pub fn is_contiguous(&self) -> bool {
        self.desc.is_contiguous()
    }

    /// Address of the first element on the device, valid while this tensor is; null without memory. Work that other
    /// libraries queue with it has to be over before the tensor is dropped.
    #[inline]
    pub fn as_raw(&self) -> *mut c_void {
        self.memory.at(self.start)
    }

    /// A view of the elements in another shape. The tensor has to be contiguous.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a strided tensor or another number of elements.
    pub fn reshape(&self, shape: impl AsRef<[usize]>) -> Result<Self> {
        let desc = TensorDesc::packed(self.desc.dtype, dims(shape.as_ref())?);
        if !self.is_contiguous() || desc.elements() != self.desc.elements() {
            return Err(Error::invalid(
                "shape",
                desc.shape,
                format_args!("a shape of {} elements, for a contiguous tensor, not {}", self.len(), self.desc),
            )
            .fix("give a shape of as many elements, and copy a strided tensor with `contiguous`"));
        }
        Self::new(Arc::clone(&self.memory), self.start, desc)
    }

    /// A view of the elements' bits as elements of another type of the same size, such as INT8 as FLOAT8_E4M3FN, or of
    /// a smaller one, which makes the last axis longer as `view` of PyTorch does: for operations that only move
    /// elements and exist for one of the types alone.
    ///
    /// ```
    /// use ascend_attention::spec::DType;
    /// use ascend_attention::spec::minifloat::Float8E4M3Fn;
    /// use ascend_attention::{AnyTensor, Runtime, f16};
    ///
    /// # fn main() -> ascend_attention::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// let stream = Runtime::emulated()?.device(0)?.stream()?;
    /// let one = Float8E4M3Fn::from_f32(1.0);
    /// let bytes: AnyTensor = stream.upload(&[one.to_bits(); 3], [3])?.into();
    /// let floats = bytes.bits_as(DType::Float8E4M3Fn)?.typed::<Float8E4M3Fn>()?;
    /// assert_eq!(floats.download(&stream)?, [one; 3]);
    /// assert!(bytes.bits_as(DType::Bf16).is_err());
    /// let words: AnyTensor = stream.upload(&[0x4000_3c00; 6], [2, 3])?.into();
    /// let halves = words.bits_as(DType::Float16)?.typed::<f16>()?;
    /// assert_eq!(halves.shape(), [2, 6]);
    /// assert_eq!(halves.download(&stream)?[..2], [f16::from_f32(1.0), f16::from_f32(2.0)]);
    /// assert!(words.permute([1, 0])?.bits_as(DType::Float16).is_err());
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a type whose size does not divide that of the elements; for
    /// a smaller type also where the last elements are not contiguous.
    pub fn bits_as(&self, dtype: DType) -> Result<Self> {
        let (from, to) = (self.desc.dtype.bits(), dtype.bits());
        let mut desc = TensorDesc { dtype, ..self.desc };
        if from == to {
            return Self::new(Arc::clone(&self.memory), self.start, desc);
        }
        let refused = |allowed: std::fmt::Arguments<'_>| {
            Error::invalid("dtype", dtype, allowed).fix("name a type of the same size")
        };
        let factor = i64::from(from.checked_div(to).filter(|_| from % to.max(1) == 0).unwrap_or(0));
        let last = self.desc.shape.rank().checked_sub(1);
        let (Some(last), 2..) = (last, factor) else {
            return Err(refused(format_args!("a type of {from} bits, as {} has, or a divisor of it", self.desc.dtype)));
        };
        let (len, stride) = (self.desc.shape.get(last).copied(), self.desc.strides.get(last).copied());
        let (Some(len), Some(1)) = (len.and_then(|len| len.checked_mul(factor)), stride) else {
            return Err(refused(format_args!("{from} bits over a last axis with gaps")));
        };
        for axis in 0..last {
            let stride = self.desc.strides.get(axis).and_then(|stride| stride.checked_mul(factor));
            let stride = stride.ok_or_else(|| refused(format_args!("strides that can be counted in {dtype}")))?;
            desc.strides = desc.strides.with(axis, stride);
        }
        desc.shape = desc.shape.with(last, len);
        Self::new(Arc::clone(&self.memory), self.start, desc)
    }

    /// A view with the axes in another order: axis `i` of the view is axis `order[i]`. Most operators take contiguous
    /// tensors only; see [`Tensor::contiguous`](crate::Tensor::contiguous).
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) unless `order` has each axis once.
    pub fn permute(&self, order: impl AsRef<[usize]>) -> Result<Self> {
        let order = order.as_ref();
        let rank = self.desc.shape.rank();
        let mut seen = [false; Dims::MAX_RANK];
        let complete = order.len() == rank
            && order
                .iter()
                .all(|&axis| axis < rank && seen.get_mut(axis).is_some_and(|seen| !std::mem::replace(seen, true)));
        if !complete {
            return Err(Error::invalid(
                "order",
                format_args!("{order:?}"),
                format_args!("each of the {rank} axes once"),
            )
            .fix("name each axis once"));
        }
        let mut desc = self.desc;
        for (to, &from) in order.iter().enumerate() {
            let (dim, stride) = (self.desc.shape.get(from), self.desc.strides.get(from));
            desc.shape = desc.shape.with(to, dim.copied().unwrap_or(0));
            desc.strides = desc.strides.with(to, stride.copied().unwrap_or(0));
        }
        Self::new(Arc::clone(&self.memory), self.start, desc)
    }

    /// The tensor without the first `count` entries of its first axis; `None` if it has fewer, if they are laid out
    /// backward, or if the rest does not begin at a whole byte. Quicker than [`AnyTensor::narrow`]: what is left of a
    /// tensor reaches no further than all of it, which is known to be within the memory.
    #[inline]
    pub(crate) fn skip(&self, count: usize) -> Option<Self> {
        let dim = usize::try_from(*self.desc.shape.first()?).ok()?;
        let stride = usize::try_from(*self.desc.strides.first()?).ok()?;
        let left = dim.checked_sub(count)?;
        let bits = count.checked_mul(stride)?.checked_mul(self.desc.dtype.bits() as usize)?;
        let mut start = self.start;
        if left > 0 && !self.desc.shape.contains(&0) {
            if !bits.is_multiple_of(8) {
                return None;
            }
            start = start.checked_add(bits / 8)?;
        }
        let shape = self.desc.shape.with(0, i64::try_from(left).ok()?);
        Some(Self {
            memory: Arc::clone(&self.memory),
            start,
            desc: TensorDesc { shape, ..self.desc },
            sizes: Sizes::of(&shape),
        })
    }

    /// A view of part of an axis.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) if there is no such axis, the range is not within it, or the
    /// view would not begin at a whole byte, or not end at one before the tensor does: its last byte would also be
    /// another element's.
    pub fn narrow(&self, axis: usize, range: Range<usize>) -> Result<Self> {
        let (dim, stride) = match (self.desc.shape.get(axis), self.desc.strides.get(axis)) {
            (Some(&dim), Some(&stride)) => (dim, stride),
            _ => {
                return Err(Error::invalid("axis", axis, format_args!("below {}", self.desc.shape.rank()))
                    .fix("count the axes from 0"));
            }
        };
        let inside = usize::try_from(dim).is_ok_and(|dim| range.start <= range.end && range.end <= dim);
        if !inside {
            return Err(Error::invalid("range", format_args!("{range:?}"), format_args!("part of 0..{dim}"))
                .fix("stay within the axis"));
        }
        let mut desc = self.desc;
        let size = i64::try_from(range.len()).unwrap_or(0);
        desc.shape = desc.shape.with(axis, size);
        let bits = i64::try_from(range.start)
            .ok()
            .and_then(|first| first.checked_mul(stride)?.checked_mul(i64::from(desc.dtype.bits())))
            .and_then(|bits| u64::try_from(bits).ok());
        let skip = match bits {
            // A view without elements begins nowhere.
            _ if desc.is_empty() => Some(0),
            Some(bits) if bits % 8 == 0 && self.parts_at(bits, &desc) => usize::try_from(bits / 8).ok(),
            _ => None,
        };
        let start = skip.and_then(|skip| self.start.checked_add(skip));
        match start {
            Some(start) => Self::new(Arc::clone(&self.memory), start, desc),
            None => Err(Error::invalid(
                "range",
                format_args!("{range:?} of {}", self.desc),
                "a view that begins at a whole byte, and ends at one or where the tensor ends",
            )
            .fix("begin and end at elements that fill whole bytes")),
        }
    }

    /// Whether a view from bit `first` on ends at a whole byte, or where the tensor ends, so that no later element
    /// shares a byte with it.
    fn parts_at(&self, first: u64, view: &TensorDesc) -> bool {
        if view.dtype.bits().is_multiple_of(8) {
            return true;
        }
        let end = end_bit(view).and_then(|end| end.checked_add(first));
        end.is_some_and(|end| end.is_multiple_of(8) || Some(end) == end_bit(&self.desc))
    }

    /// A contiguous view, of one axis, of the memory from this view's first element to its last one, with what is
    /// between its elements: for operators that take contiguous memory alone, over strided blocks.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a negative stride, and for a view without elements.
    pub fn span(&self) -> Result<Self> {
        let bits = end_bit(&self.desc).filter(|_| !self.desc.is_empty());
        let elements = bits.map(|bits| bits / u64::from(self.desc.dtype.bits().max(1)));
        match elements.map(usize::try_from) {
            Some(Ok(elements)) => {
                let desc = TensorDesc::packed(self.desc.dtype, dims(&[elements])?);
                Self::new(Arc::clone(&self.memory), self.start, desc)
            }
            _ => Err(Error::invalid("tensor", self.desc, "a view with elements, and strides of at least 0")
                .fix("span a view that begins with its first element in memory")),
        }
    }

    /// Waits for a stream and copies the elements out, packed in row-major order whatever the strides. Bits of the
    /// last byte that elements smaller than a byte leave unused are 0.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`Error::Acl`]: the copy, or work on the stream, failed. [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE)
    /// or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another device, or for a strided tensor of elements
    /// smaller than a byte; [`Error::Capturing`] on a thread that captures.
    #[doc(alias = "aclrtMemcpy")]
    pub fn download_bytes(&self, stream: &Stream) -> Result<Vec<u8>> {
        vec_from(bytes_of(&self.desc)?, |bytes| self.gather(stream, bytes))
    }

    /// Waits for a stream and copies the elements out in row-major order.
    pub(super) fn gather(&self, stream: &Stream, bytes: &mut [u8]) -> Result<()> {
        self.on("tensor", stream.context())?;
        stream.synchronize()?;
        if self.desc.is_contiguous() || self.is_empty() {
            self.memory.read(self.start, bytes)?;
            let bits = self.len().wrapping_mul(self.desc.dtype.bits() as usize) % 8;
            if let (1.., Some(last)) = (bits, bytes.last_mut()) {
                *last &= (1 << bits) - 1;
            }
            return Ok(());
        }
        let Some(size) = self.desc.dtype.size() else {
            return Err(Error::invalid("tensor", self.desc, "a contiguous tensor, for elements smaller than a byte")
                .fix("copy it with `contiguous` before its type is changed"));
        };
        // Copies all bytes between the first and the last element, then picks one element after the other.
        let mut all = zeros(self.addresses().len())?;
        self.memory.read(self.start, &mut all)?;
        let mut index = [0i64; Dims::MAX_RANK];
        for element in bytes.chunks_exact_mut(size) {
            let at: i64 = index.iter().zip(self.strides()).map(|(i, s)| i * s).sum();
            let at = usize::try_from(at).unwrap_or(usize::MAX).saturating_mul(size);
            if let Some(from) = all.get(at..at.saturating_add(size)) {
                element.copy_from_slice(from);
            }
            for (axis, &dim) in self.desc.shape.iter().enumerate().rev() {
                index[axis] += 1;
                if index[axis] < dim {
                    break;
                }
                index[axis] = 0;
            }
        }
        Ok(())
    }

    /// Queues a copy of another tensor's elements into this one, on the device. Both are contiguous and of one shape
    /// and element type; they may be views of the same memory that do not overlap.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for
    /// strided or overlapping tensors, other shapes or element types, or another device; [`Error::Capturing`] for a
    /// stream on a thread that captures; [`Error::Acl`].
    #[doc(alias = "aclrtMemcpyAsync")]
    pub fn copy_from(&self, queue: &impl Queue, source: &Self) -> Result<()> {
        queue.note(self.queue_copy(queue, source))
    }

    fn queue_copy(&self, queue: &impl LaunchQueue, source: &Self) -> Result<()> {
        self.on("tensor", queue.context())?;
        source.on("source", queue.context())?;
        let alike = (self.dtype(), self.shape()) == (source.dtype(), source.shape());
        if !alike || !self.is_contiguous() || !source.is_contiguous() {
            return Err(Error::invalid("source", source.desc, format_args!("a contiguous tensor like {}", self.desc))
                .fix("copy the source with `contiguous`, in the shape and type of the target"));
        }
        if self.overlaps(source) {
            return Err(Error::shared("source", "memory that is shared with the target", "memory of its own")
                .fix("copy through a tensor of your own"));
        }
        self.memory.copy_from_device(self.start, &source.memory, source.start, bytes_of(&self.desc)?, queue)
    }

    /// Queues zeros for the elements of a contiguous tensor, on the device: what is 0 in every type.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a
    /// strided tensor, one that is never written, or another device; [`Error::Capturing`] on a thread that captures;
    /// [`Error::Acl`].
    #[doc(alias = "aclrtMemsetAsync")]
    pub fn clear(&self, stream: &Stream) -> Result<()> {
        let (_, start) = self.packed("tensor", stream)?;
        self.memory.clear(start, bytes_of(&self.desc)?, stream)
    }

    /// Waits for a stream, then replaces the elements of a contiguous tensor, and waits for that.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for
    /// another number of bytes, a strided tensor or another device; [`Error::Acl`].
    #[doc(alias = "aclrtMemcpy")]
    pub fn overwrite_bytes(&self, stream: &Stream, bytes: &[u8]) -> Result<()> {
        let (memory, start) = self.packed("tensor", stream)?;
        has_len("bytes", bytes.len(), bytes_of(&self.desc)?)?;
        stream.synchronize()?;
        memory.write(start, bytes)
    }

    /// Lets only [`AnyTensor::renew`] change the elements from now on.
    pub(crate) fn freeze(&self) {
        self.memory.freeze();
    }

    /// Replaces the elements of a contiguous tensor that its owner has frozen, and waits for that. Does not wait for
    /// work that uses the tensor.
    pub(crate) fn renew(&self, stream: &Stream, bytes: &[u8]) -> Result<()> {
        let (memory, start) = self.packed("tensor", stream)?;
        has_len("bytes", bytes.len(), bytes_of(&self.desc)?)?;
        memory.renew(start, bytes)
    }

    /// Replaces some bytes of a contiguous tensor, from a byte on, and waits for that. Does not wait for work that
    /// uses the tensor.
    pub(crate) fn write_part(&self, byte: usize, bytes: &[u8]) -> Result<()> {
        self.memory.write(self.start.saturating_add(byte), bytes)
    }

    /// Copies some bytes of a contiguous tensor out, from a byte on, and waits for that. Does not wait for work that
    /// uses the tensor.
    pub(crate) fn read_part(&self, byte: usize, bytes: &mut [u8]) -> Result<()> {
        self.memory.read(self.start.saturating_add(byte), bytes)
    }
}

/// Bits from a view's first element to the end of its last one, where no stride is negative; `None` if 64 bits do not
/// hold it.
fn end_bit(view: &TensorDesc) -> Option<u64> {
    let mut last = 0i64;
    for (&dim, &stride) in view.shape.iter().zip(view.strides.iter()) {
        last = last.checked_add(dim.checked_sub(1)?.checked_mul(stride)?)?;
    }
    let elements = u64::try_from(last).ok()?.checked_add(1)?;
    elements.checked_mul(u64::from(view.dtype.bits()))
}

impl From<&AnyTensor> for AnyTensor {
    /// Shares the memory.
    #[inline]
    fn from(tensor: &AnyTensor) -> Self {
        tensor.clone()
    }
}

impl fmt::Debug for AnyTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} at {:?})", self.desc, self.as_raw())
    }
}
