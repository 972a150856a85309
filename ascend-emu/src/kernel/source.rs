//! Tensors of any element type, read by the row.

use super::element::Element;
use super::simd::{Kernel, Simd, Vector, WIDTH};
use super::tensors::{Plain, Sizes, Strided};
use ascend_spec::DType;
use ascend_spec::fia::Rows;
use ascend_spec::minifloat::{Float4E2M1, Float8E4M3Fn, HiFloat8};
use half::{bf16, f16};
use std::ops::Range;

/// Element types of a call's tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Types {
    /// That of the query and of all that goes with it, as described.
    pub(super) own: DType,
    /// What tensors of that type hold.
    pub(super) held: DType,
}

impl Types {
    /// What a tensor of this type holds.
    pub(super) fn held(self, described: DType) -> DType {
        if described == self.own {
            self.held
        } else {
            described
        }
    }
}

/// A tensor that is read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    Single(Plain<f32>),
    Half(Plain<f16>),
    Brain(Plain<bf16>),
    Bytes(Plain<i8>),
    E4m3(Plain<Float8E4M3Fn>),
    HiFloat8(Plain<HiFloat8>),
    Nibbles(Nibbles),
    /// Of a type that no call may have: zeros.
    Nothing,
}

impl Source {
    /// # Safety
    ///
    /// As long as the source is used, every element of `rows` within `sizes`, counted from `base`, may be read.
    pub(super) unsafe fn new(base: *const u8, rows: &Rows, sizes: Sizes, types: Types) -> Self {
        // SAFETY: the caller keeps this contract, in whichever type.
        unsafe {
            match types.held(rows.dtype) {
                DType::Float => Source::Single(Plain::new(base, rows, sizes)),
                DType::Float16 => Source::Half(Plain::new(base, rows, sizes)),
                DType::Bf16 => Source::Brain(Plain::new(base, rows, sizes)),
                DType::Int8 => Source::Bytes(Plain::new(base, rows, sizes)),
                DType::Float8E4M3Fn => Source::E4m3(Plain::new(base, rows, sizes)),
                DType::HiFloat8 => Source::HiFloat8(Plain::new(base, rows, sizes)),
                DType::Int4 => Source::Nibbles(Nibbles::new(base, rows, sizes, false)),
                DType::Float4E2M1 => Source::Nibbles(Nibbles::new(base, rows, sizes, true)),
                _ => Source::Nothing,
            }
        }
    }

    /// Sizes of the axes; nothing where there is no tensor.
    pub(super) fn sizes(&self) -> Sizes {
        match self {
            Source::Single(plain) => plain.sizes(),
            Source::Half(plain) => plain.sizes(),
            Source::Brain(plain) => plain.sizes(),
            Source::Bytes(plain) => plain.sizes(),
            Source::E4m3(plain) => plain.sizes(),
            Source::HiFloat8(plain) => plain.sizes(),
            Source::Nibbles(nibbles) => nibbles.grid.sizes(),
            Source::Nothing => Sizes::NONE,
        }
    }

    /// Whether rows of the same number begin at the same element and go on alike.
    pub(super) fn coincides(&self, other: &Self) -> bool {
        match (self, other) {
            (Source::Single(one), Source::Single(other)) => one.coincides(other),
            (Source::Half(one), Source::Half(other)) => one.coincides(other),
            (Source::Brain(one), Source::Brain(other)) => one.coincides(other),
            _ => false,
        }
    }

    /// Widens the elements `columns` of one row: see [`Plain::read`].
    #[inline(always)]
    pub(super) fn read<S: Simd>(
        &self,
        simd: S,
        at: (usize, usize, usize),
        columns: Range<usize>,
        out: &mut [Vector],
        step: usize,
        watch: &mut S::Register,
    ) {
        let seen = simd.apart(ReadRow {
            of: self,
            at,
            columns,
            out,
            step,
        });
        *watch = simd.add(*watch, simd.load(&seen));
    }
}

/// A row to read, of any type: compiled once for all that read one, since there are many of them. Gives zeros, and a NaN if
/// an element is not finite.
struct ReadRow<'a> {
    of: &'a Source,
    at: (usize, usize, usize),
    columns: Range<usize>,
    out: &'a mut [Vector],
    step: usize,
}

impl Kernel for ReadRow<'_> {
    type Output = Vector;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Vector {
        let ReadRow {
            of,
            at,
            columns,
            out,
            step,
        } = self;
        let watch = &mut simd.splat(0.0);
        match of {
            Source::Single(plain) => plain.read(simd, at, columns, out, step, watch),
            Source::Half(plain) => plain.read(simd, at, columns, out, step, watch),
            Source::Brain(plain) => plain.read(simd, at, columns, out, step, watch),
            Source::Bytes(plain) => plain.read(simd, at, columns, out, step, watch),
            Source::E4m3(plain) => plain.read(simd, at, columns, out, step, watch),
            Source::HiFloat8(plain) => plain.read(simd, at, columns, out, step, watch),
            Source::Nibbles(nibbles) => nibbles.read(at, columns, out, step),
            Source::Nothing => clear(out, step, columns.len().div_ceil(WIDTH)),
        }
        let mut seen = [0.0; WIDTH];
        simd.store(*watch, &mut seen);
        seen
    }
}

/// Elements that kernels may read where they lie.
pub(super) trait Stored: Element {
    /// The tensor, if it has this element type.
    fn of(source: &Source) -> Option<&Plain<Self>>;
}

macro_rules! stored {
    ($($element:ty, $source:ident;)*) => {$(
        impl Stored for $element {
            #[inline(always)]
            fn of(source: &Source) -> Option<&Plain<Self>> {
                match source {
                    Source::$source(plain) => Some(plain),
                    _ => None,
                }
            }
        }
    )*};
}

stored! {
    f32, Single;
    f16, Half;
    bf16, Brain;
    i8, Bytes;
}

/// Whether rows of this type can be read.
pub(super) fn reads(dtype: DType, own: DType) -> bool {
    use DType::{Bf16, Float4E2M1, Float8E4M3Fn, Float16, HiFloat8, Int4, Int8};
    let all = [
        Float16,
        Bf16,
        Int8,
        Int4,
        Float8E4M3Fn,
        HiFloat8,
        Float4E2M1,
    ];
    dtype == own || all.contains(&dtype)
}

/// Zeros in the first `count` vectors that lie `step` apart.
#[inline(always)]
pub(super) fn clear(out: &mut [Vector], step: usize, count: usize) {
    for out in out.iter_mut().step_by(step).take(count) {
        *out = [0.0; WIDTH];
    }
}

/// A tensor of `INT4` or `FLOAT4_E2M1`: two to a byte, the first in the low half.
#[derive(Clone, Copy, Debug)]
pub(super) struct Nibbles {
    grid: Strided<u8>,
    /// Whether they are floats.
    floats: bool,
}

// SAFETY: the address is only read through, and whoever made the value vouches for that on any thread.
unsafe impl Send for Nibbles {}
// SAFETY: as above.
unsafe impl Sync for Nibbles {}

impl Nibbles {
    /// # Safety
    ///
    /// As for [`Source::new`].
    unsafe fn new(base: *const u8, rows: &Rows, sizes: Sizes, floats: bool) -> Self {
        // Half bytes are counted as bytes where the grid looks at what an address can name, which is on the safe side.
        let grid = Strided::new(base.cast_mut(), rows, sizes);
        Nibbles { grid, floats }
    }

    /// [`Source::read`]; the numbers are finite.
    #[inline(always)]
    fn read(
        &self,
        at: (usize, usize, usize),
        columns: Range<usize>,
        out: &mut [Vector],
        step: usize,
    ) {
        if self.floats {
            let value = |high: u8| Float4E2M1::from_bits(high >> 4).to_f32();
            self.read_as(at, columns, out, step, value);
        } else {
            let value = |high: u8| f32::from(high.cast_signed() >> 4);
            self.read_as(at, columns, out, step, value);
        }
    }

    /// [`Nibbles::read`], given the value of a number in the upper half of a byte.
    #[inline(always)]
    fn read_as(
        &self,
        at: (usize, usize, usize),
        columns: Range<usize>,
        out: &mut [Vector],
        step: usize,
        value: impl Fn(u8) -> f32,
    ) {
        let grid = &self.grid;
        assert!(columns.end <= grid.sizes().dim, "no such column");
        let first = grid.first(at);
        let base = grid.base().cast_const();
        for (at, out) in columns
            .clone()
            .step_by(WIDTH)
            .zip(out.iter_mut().step_by(step))
        {
            let index = first.wrapping_add(grid.column(at));
            if grid.is_dense() && index & 1 == 0 && at + WIDTH <= columns.end {
                // SAFETY: as below, the bytes of elements that lie side by side.
                let bytes = unsafe {
                    base.wrapping_offset(index >> 1)
                        .cast::<[u8; WIDTH / 2]>()
                        .read_unaligned()
                };
                for (i, out) in out.iter_mut().enumerate() {
                    let high = if i % 2 == 0 {
                        bytes[i / 2] << 4
                    } else {
                        bytes[i / 2]
                    };
                    *out = value(high);
                }
                continue;
            }
            *out = [0.0; WIDTH];
            for (out, d) in out.iter_mut().zip(at..columns.end) {
                let index = first.wrapping_add(grid.column(d));
                // SAFETY: the row and the column exist, as checked, and may be read by the contract of `new`.
                let byte = unsafe { base.wrapping_offset(index >> 1).read() };
                let high = if index & 1 == 0 {
                    byte << 4
                } else {
                    byte & 0xf0
                };
                *out = value(high);
            }
        }
    }
}
