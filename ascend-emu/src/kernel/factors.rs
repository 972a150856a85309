//! Scales and offsets: small tensors of numbers of any type, and what they make of quantised rows.

use super::Buffers;
use super::simd::{Simd, Vector, WIDTH};
use ascend_spec::DType;
use ascend_spec::fia::{Affine, Counts, Cuts, FiaCall, Grid, Operand, Problem};
use ascend_spec::minifloat::Float8E8M0;
use half::{bf16, f16};
use std::ops::Range;

/// A small tensor, read element by element within the bytes of its description.
#[derive(Clone, Debug)]
pub(super) struct Numbers {
    base: *const u8,
    dtype: DType,
    /// Bytes that may be read.
    bytes: Range<i64>,
}

// SAFETY: the address is only read through, and whoever made the value vouches for that on any thread.
unsafe impl Send for Numbers {}
// SAFETY: as above.
unsafe impl Sync for Numbers {}

impl Numbers {
    /// `dtype` is that of the numbers, whatever the description says.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the bytes that `operand` is described with in `call` may be read.
    pub(super) unsafe fn new(
        call: &FiaCall<'_>,
        buffers: &Buffers<'_>,
        operand: Operand,
        dtype: DType,
    ) -> Self {
        let bytes = operand.of(call).and_then(|desc| desc.byte_range());
        let count = |byte: u64| i64::try_from(byte).unwrap_or(i64::MAX);
        Numbers {
            base: buffers.base(operand),
            dtype,
            bytes: bytes.map_or(0..0, |bytes| count(bytes.start)..count(bytes.end)),
        }
    }

    /// The bytes of an element, if the tensor has it.
    #[inline(always)]
    fn element<const SIZE: usize>(&self, index: i64) -> Option<[u8; SIZE]> {
        let at = index.checked_mul(SIZE as i64)?;
        let end = at.checked_add(SIZE as i64)?;
        let inside = self.bytes.start <= at && end <= self.bytes.end;
        // SAFETY: the bytes lie within those that may be read by the contract of `new`; no alignment is assumed.
        inside.then(|| unsafe {
            self.base
                .wrapping_offset(at as isize)
                .cast::<[u8; SIZE]>()
                .read_unaligned()
        })
    }

    /// An element as a number; `None` outside of the tensor and for types that no scale has.
    pub(super) fn number(&self, index: i64) -> Option<f32> {
        Some(match self.dtype {
            DType::Float => f32::from_ne_bytes(self.element(index)?),
            DType::Float16 => f16::from_ne_bytes(self.element(index)?).to_f32(),
            DType::Bf16 => bf16::from_ne_bytes(self.element(index)?).to_f32(),
            // The hardware's form: single precision in the lower half.
            DType::UInt64 => f32::from_bits(u64::from_ne_bytes(self.element(index)?) as u32),
            DType::Float8E8M0 => Float8E8M0::from_bits(self.element::<1>(index)?[0]).to_f32(),
            _ => return None,
        })
    }

    /// An element as an integer; `None` outside of the tensor and for other types.
    pub(super) fn integer(&self, index: i64) -> Option<i64> {
        match self.dtype {
            DType::Int32 => Some(i64::from(i32::from_ne_bytes(self.element(index)?))),
            DType::Int64 => Some(i64::from_ne_bytes(self.element(index)?)),
            _ => None,
        }
    }
}

/// A grid of scales or offsets.
#[derive(Debug)]
pub(super) struct Factors {
    numbers: Numbers,
    grid: Grid,
    /// Whether neighbours share numbers, so that they are looked up for each row anew.
    parted: bool,
    /// The numbers themselves, where there is one for each element of a head and all rows share them: of each head
    /// `vectors`. Empty elsewhere.
    channels: Vec<Vector>,
    vectors: usize,
}

impl Factors {
    /// For rows of `dim` elements of `heads` heads.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the bytes of the grid's tensor may be read.
    pub(super) unsafe fn new(
        call: &FiaCall<'_>,
        buffers: &Buffers<'_>,
        grid: &Grid,
        heads: usize,
        dim: usize,
    ) -> Self {
        // SAFETY: the caller keeps this contract.
        let numbers = unsafe { Numbers::new(call, buffers, grid.operand, grid.dtype) };
        let vectors = dim.div_ceil(WIDTH);
        let parted = grid.cuts != Cuts::NONE;
        let mut channels = Vec::new();
        if grid.view.dim != 0 && !parted {
            channels.resize(heads * vectors, [0.0; WIDTH]);
            for (head, vectors) in channels.chunks_exact_mut(vectors.max(1)).enumerate() {
                let values = vectors.as_flattened_mut().iter_mut().take(dim);
                for (d, value) in values.enumerate() {
                    let index = grid.at((0, head, 0), d);
                    *value = numbers.number(index).unwrap_or(f32::NAN);
                }
            }
        }
        Factors {
            numbers,
            grid: *grid,
            parted,
            channels,
            vectors,
        }
    }

    /// The one number of a row; NaN if the tensor lacks it.
    pub(super) fn of_row(&self, at: (usize, usize, usize)) -> f32 {
        self.of_element(at, 0)
    }

    /// The number of element `d` of a row; NaN if the tensor lacks it.
    fn of_element(&self, at: (usize, usize, usize), d: usize) -> f32 {
        let number = self.numbers.number(self.grid.at(at, d));
        number.unwrap_or(f32::NAN)
    }

    /// The numbers of vector `i` of a row whose number is `one`.
    #[inline(always)]
    fn vector(&self, at: (usize, usize, usize), i: usize, one: f32) -> Vector {
        if self.parted {
            return self.looked_up(at, i);
        }
        let head = at.1;
        let channels = self.channels.get(head * self.vectors + i);
        channels.copied().unwrap_or([one; WIDTH])
    }

    /// The numbers of vector `i` of a row, one by one.
    #[inline(never)]
    fn looked_up(&self, at: (usize, usize, usize), i: usize) -> Vector {
        std::array::from_fn(|l| self.of_element(at, i * WIDTH + l))
    }

    /// The numbers of a head's elements, or none where rows have one for all.
    fn of_head(&self, head: usize) -> &[Vector] {
        let first = head.saturating_mul(self.vectors);
        let channels = self.channels.get(first..).unwrap_or_default();
        channels.get(..self.vectors).unwrap_or_default()
    }

    /// The number of a row, where one stands for all elements.
    #[inline(always)]
    fn one(&self, at: (usize, usize, usize)) -> f32 {
        if self.channels.is_empty() && !self.parted {
            self.of_row(at)
        } else {
            0.0
        }
    }
}

/// Where a row stands, for the grids that count one way and for those that count the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coordinates {
    /// Sequence, and token.
    pub(super) sequence: (usize, usize),
    /// Place on the tensor's batch axis and row, or block of the cache and row in it.
    pub(super) stored: (usize, usize),
}

/// What makes values of stored numbers, `(stored + offset) * scale`, or numbers to store of values,
/// `value * scale + offset`.
#[derive(Debug)]
pub(super) struct Conversion {
    scale: Factors,
    offset: Option<Factors>,
    counts: Counts,
    /// Of each sequence, the parts of rows before its own, where grids count on.
    before: Vec<usize>,
}

impl Conversion {
    /// For rows of `dim` elements of `heads` heads.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the bytes of the tensors of scale and offset may be read.
    pub(super) unsafe fn new(
        problem: &Problem<'_>,
        buffers: &Buffers<'_>,
        affine: &Affine,
        heads: usize,
        dim: usize,
    ) -> Self {
        let call = problem.call;
        // SAFETY: the caller keeps this contract, for both.
        let factors = |grid: &Grid| unsafe { Factors::new(call, buffers, grid, heads, dim) };
        let counts = affine.scale.counts;
        Conversion {
            scale: factors(&affine.scale),
            offset: affine.offset.as_ref().map(factors),
            counts,
            before: match counts {
                Counts::Behind => problem.parts_before(&affine.scale),
                Counts::Tokens | Counts::Stored => Vec::new(),
            },
        }
    }

    /// Whether neighbours share numbers otherwise than all elements of a row, or all rows of a head.
    pub(super) fn is_parted(&self) -> bool {
        self.scale.parted || self.offset.as_ref().is_some_and(|offset| offset.parted)
    }

    /// Where the grids have a row.
    #[inline(always)]
    fn at(&self, at: Coordinates, head: usize) -> (usize, usize, usize) {
        let (batch, row) = match self.counts {
            Counts::Tokens => at.sequence,
            Counts::Stored => at.stored,
            Counts::Behind => {
                let (sequence, token) = at.sequence;
                (self.before.get(sequence).copied().unwrap_or(0), token)
            }
        };
        (batch, head, row)
    }

    /// Turns the `count` vectors of a row, which lie `step` apart, into values; the zeros that fill up the last one
    /// are the caller's to ignore. Leaves a NaN in `watch`, which holds zeros, if a value is not finite.
    #[inline(always)]
    pub(super) fn to_values<S: Simd>(
        &self,
        simd: S,
        at: Coordinates,
        head: usize,
        (out, step, dim): (&mut [Vector], usize, usize),
        watch: &mut S::Register,
    ) {
        let at = self.at(at, head);
        let scale = self.scale.one(at);
        let offset = self.offset.as_ref().map(|it| it.one(at));
        for (i, out) in out
            .iter_mut()
            .step_by(step)
            .take(dim.div_ceil(WIDTH))
            .enumerate()
        {
            if let (Some(factors), Some(offset)) = (&self.offset, offset) {
                let offset = factors.vector(at, i, offset);
                for l in 0..WIDTH {
                    out[l] += offset[l];
                }
            }
            let scale = self.scale.vector(at, i, scale);
            let value = simd.multiply(simd.load(out), simd.load(&scale));
            simd.store(value, out);
            // Past the end of the row are zeros still.
            for out in out.iter_mut().skip(dim - i * WIDTH) {
                *out = 0.0;
            }
            *watch = simd.mul_add(simd.load(out), simd.splat(0.0), *watch);
        }
    }

    /// Scale and offset of a row, where they are the same for all its elements.
    pub(super) fn of_row(&self, at: Coordinates, head: usize) -> (f32, f32) {
        let at = self.at(at, head);
        let scale = self.scale.one(at);
        let offset = self.offset.as_ref();
        (scale, offset.map_or(0.0, |it| it.one(at)))
    }

    /// What is the same for all rows of a head.
    pub(super) fn of_head(&self, head: usize) -> OfAny<'_> {
        OfAny {
            scales: self.scale.of_head(head),
            offsets: self.offset.as_ref().map(|it| it.of_head(head)),
        }
    }

    /// Turns the values of a row into numbers to store, not rounded yet.
    #[inline(always)]
    pub(super) fn to_stored(&self, head: usize, values: &mut [Vector]) {
        let at = (0, head, 0);
        let scale = self.scale.one(at);
        let offset = self.offset.as_ref().map(|it| it.one(at));
        for (i, values) in values.iter_mut().enumerate() {
            let scale = self.scale.vector(at, i, scale);
            for l in 0..WIDTH {
                values[l] *= scale[l];
            }
            if let (Some(factors), Some(offset)) = (&self.offset, offset) {
                let offset = factors.vector(at, i, offset);
                for l in 0..WIDTH {
                    values[l] += offset[l];
                }
            }
        }
    }
}

/// What makes values of the stored numbers of a head's rows.
pub(super) trait OfHead: Copy {
    /// The same from vector `i` of a row on.
    fn from(self, i: usize) -> Self;

    /// How many vectors of a row it has factors for: any number, unless there is one for each element.
    #[inline(always)]
    fn vectors(self) -> usize {
        usize::MAX
    }

    /// The values of vector `i` of a row with this scale and offset, unless its elements have their own.
    fn value<S: Simd>(
        self,
        simd: S,
        stored: S::Register,
        i: usize,
        of_row: (f32, f32),
    ) -> S::Register;
}

/// Scales of the elements of a head, without offsets.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfChannels<'a>(&'a [Vector]);

impl OfHead for OfChannels<'_> {
    #[inline(always)]
    fn from(self, i: usize) -> Self {
        OfChannels(self.0.get(i..).unwrap_or_default())
    }

    #[inline(always)]
    fn vectors(self) -> usize {
        self.0.len()
    }

    #[inline(always)]
    fn value<S: Simd>(self, simd: S, stored: S::Register, i: usize, _: (f32, f32)) -> S::Register {
        simd.multiply(stored, simd.load(&self.0[i]))
    }
}

/// A scale of each row, without offsets.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfRows;

impl OfHead for OfRows {
    #[inline(always)]
    fn from(self, _: usize) -> Self {
        self
    }

    #[inline(always)]
    fn value<S: Simd>(
        self,
        simd: S,
        stored: S::Register,
        _: usize,
        (scale, _): (f32, f32),
    ) -> S::Register {
        simd.multiply(stored, simd.splat(scale))
    }
}

/// Scales and offsets of the elements of a head; empty where rows have one for all.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfAny<'a> {
    scales: &'a [Vector],
    offsets: Option<&'a [Vector]>,
}

impl<'a> OfAny<'a> {
    /// The same, if elements have scales, and there are no offsets.
    pub(super) fn channels(self) -> Option<OfChannels<'a>> {
        let plain = self.offsets.is_none() && !self.scales.is_empty();
        plain.then_some(OfChannels(self.scales))
    }

    /// The same, if rows have scales, and there are no offsets.
    pub(super) fn rows(self) -> Option<OfRows> {
        let plain = self.offsets.is_none() && self.scales.is_empty();
        plain.then_some(OfRows)
    }
}

impl<'a> OfHead for OfAny<'a> {
    #[inline(always)]
    fn from(self, i: usize) -> Self {
        let from = |of: &'a [Vector]| of.get(i..).unwrap_or_default();
        OfAny {
            scales: from(self.scales),
            offsets: self.offsets.map(from),
        }
    }

    #[inline(always)]
    fn value<S: Simd>(
        self,
        simd: S,
        stored: S::Register,
        i: usize,
        (scale, offset): (f32, f32),
    ) -> S::Register {
        let stored = match self.offsets {
            Some(offsets) => simd.add(stored, either(simd, offsets, i, offset)),
            None => stored,
        };
        simd.multiply(stored, either(simd, self.scales, i, scale))
    }
}

/// Vector `i` of `each`, or `one` where there is none.
#[inline(always)]
fn either<S: Simd>(simd: S, each: &[Vector], i: usize, one: f32) -> S::Register {
    match each.get(i) {
        Some(each) => simd.load(each),
        None => simd.splat(one),
    }
}
