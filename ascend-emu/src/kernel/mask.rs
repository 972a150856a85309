//! Tensors that are as large as the scores: the mask and the position bias.

use super::Buffers;
use super::factors::Factors;
use super::requests::{CACHE_LINE, Near, prefetch};
use super::simd::{Kernel, Simd, Vector, WIDTH};
use super::source::{Source, Types};
use super::tensors::Sizes;
use ascend_spec::fia::{MaskRows, Operand, Problem, Slopes};
use std::ops::Range;

/// How far below a row lies the one that is asked for while it is read.
const BELOW: usize = 2;

/// A mask tensor that is read element by element; it has a byte an element, and any byte but 0 hides. Where the elements
/// of a sequence are, its [`MaskRows`] say.
#[derive(Clone, Debug)]
pub(super) struct MaskBytes {
    base: *const u8,
    /// Bytes that may be read.
    bytes: Range<i64>,
}

// SAFETY: the address is only read through, and whoever made the value vouches for that on any thread.
unsafe impl Send for MaskBytes {}
// SAFETY: as above.
unsafe impl Sync for MaskBytes {}

impl MaskBytes {
    /// # Safety
    ///
    /// As long as the value is used, the bytes of the mask that the problem touches may be read.
    pub(super) unsafe fn new(problem: &Problem<'_>, buffers: &Buffers<'_>) -> Self {
        let bytes = problem.mask_bytes();
        let count = |byte: u64| i64::try_from(byte).unwrap_or(i64::MAX);
        MaskBytes {
            base: buffers.base(Operand::AttenMask),
            bytes: bytes.map_or(0..0, |bytes| count(bytes.start)..count(bytes.end)),
        }
    }

    /// Copies the bytes of one row from key `first_key` on. Keys that the tensor does not have are visible.
    #[inline(always)]
    pub(super) fn read_row(&self, at: &MaskRows, row: usize, first_key: usize, out: &mut [u8]) {
        let (context, out) = out.split_at_mut(behind(at, first_key, out.len()));
        context.fill(0);
        let first_key = first_key + context.len();
        if let Some(from) = self.run(at, row, first_key, out.len()) {
            // SAFETY: all of the bytes may be read, as `run` checked, by the contract of `new`; `out` is ours alone.
            unsafe { from.copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
            return;
        }
        for (j, out) in out.iter_mut().enumerate() {
            let element = at.element(row, first_key + j);
            *out = match element.filter(|element| self.bytes.contains(element)) {
                // SAFETY: as above, one byte.
                Some(element) => unsafe { self.base.wrapping_offset(element as isize).read() },
                None => 0,
            };
        }
    }

    /// Adds `lanes` to those from which a key is hidden, for each key of one row from key `first_key` on that is. Asks for
    /// the same keys of a row further down.
    #[inline(always)]
    pub(super) fn hide(
        &self,
        at: &MaskRows,
        row: usize,
        first_key: usize,
        lanes: u16,
        hidden: &mut [u16],
    ) {
        const CHUNK: usize = 16;
        let context = behind(at, first_key, hidden.len());
        let (first_key, hidden) = (first_key + context, &mut hidden[context..]);
        let Some(from) = self.run(at, row, first_key, hidden.len()) else {
            for (j, hidden) in hidden.iter_mut().enumerate() {
                let mut byte = [0];
                self.read_row(at, row, first_key + j, &mut byte);
                *hidden |= if byte[0] == 0 { 0 } else { lanes };
            }
            return;
        };
        let below = at.element(row + BELOW, first_key).unwrap_or(0) as isize;
        for byte in (0..hidden.len()).step_by(CACHE_LINE) {
            let address = self.base.wrapping_offset(below).wrapping_add(byte);
            prefetch(Near::First, address);
        }
        let (chunks, rest) = hidden.as_chunks_mut::<CHUNK>();
        let mut at = from;
        for hidden in chunks {
            // SAFETY: all of the bytes may be read, as `run` checked, by the contract of `new`.
            let bytes = unsafe { at.cast::<[u8; CHUNK]>().read_unaligned() };
            for i in 0..CHUNK {
                hidden[i] |= if bytes[i] == 0 { 0 } else { lanes };
            }
            at = at.wrapping_add(CHUNK);
        }
        for hidden in rest {
            // SAFETY: as above, one byte.
            let byte = unsafe { at.read() };
            *hidden |= if byte == 0 { 0 } else { lanes };
            at = at.wrapping_add(1);
        }
    }

    /// Address of the byte of a key, where those of `count` keys from it on lie side by side and may be read.
    #[inline(always)]
    fn run(&self, at: &MaskRows, row: usize, key: usize, count: usize) -> Option<*const u8> {
        let first = at.element(row, key)?;
        let last = at.element(row, key + count.checked_sub(1)?)?;
        let inside = self.bytes.contains(&first) && self.bytes.contains(&last);
        (at.key == 1 && inside).then(|| self.base.wrapping_offset(first as isize))
    }
}

/// How many of `count` keys, from `first_key` on, lie before those that the tensor has elements for.
#[inline(always)]
fn behind(at: &MaskRows, first_key: usize, count: usize) -> usize {
    at.context.saturating_sub(first_key).min(count)
}

/// The additive position bias.
#[derive(Debug)]
pub(super) enum Bias {
    /// Read.
    Tensor(Source),
    /// Made, with the slope of each head.
    Slopes { of: Slopes, slopes: Vec<f32> },
}

impl Bias {
    /// The bias of a problem, if it has one.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the bytes that the bias is described with may be read.
    pub(super) unsafe fn new(
        problem: &Problem<'_>,
        buffers: &Buffers<'_>,
        types: Types,
    ) -> Option<Self> {
        if let Some(of) = problem.slopes {
            // SAFETY: the problem touches the slopes.
            let factors =
                unsafe { Factors::new(problem.call, buffers, &of.grid, problem.heads, 1) };
            let slopes = (0..problem.heads).map(|head| factors.of_row((0, head, 0)));
            return Some(Bias::Slopes {
                of,
                slopes: slopes.collect(),
            });
        }
        let rows = problem.pse?;
        let shape = problem.call.pse_shift.map(|pse| pse.shape);
        let axis = |axis: usize| {
            let size = shape.and_then(|shape| shape.get(axis).copied());
            usize::try_from(size.unwrap_or(0)).unwrap_or(0)
        };
        let sizes = Sizes {
            batch: if axis(0) == 1 { problem.batch } else { axis(0) },
            heads: axis(1),
            rows: axis(2),
            dim: axis(3),
        };
        // SAFETY: these are the axes of the description, and a batch axis of 1 has stride 0.
        let source = unsafe { Source::new(buffers.base(Operand::PseShift), &rows, sizes, types) };
        Some(Bias::Tensor(source))
    }

    /// The bias of one row from key `keys.start` on; what a tensor does not have is 0.
    #[inline(always)]
    pub(super) fn read<S: Simd>(
        &self,
        simd: S,
        at: (usize, usize, usize),
        keys: Range<usize>,
        out: &mut [Vector],
    ) {
        let source = match self {
            Bias::Tensor(source) => source,
            Bias::Slopes { of, slopes } => {
                let slope = slopes.get(at.1).copied().unwrap_or(0.0);
                return simd.apart(MakeBias {
                    root: of.root,
                    slope,
                    // Beyond 2^31 positions apart the weight is gone long since.
                    apart: of
                        .apart(at.2 as i64, keys.start as i64)
                        .clamp(i32::MIN.into(), i32::MAX.into()) as i32,
                    out,
                });
            }
        };
        out.fill([0.0; WIDTH]);
        let sizes = source.sizes();
        let keys = keys.start.min(sizes.dim)..keys.end.min(sizes.dim);
        if at.0 < sizes.batch && at.1 < sizes.heads && at.2 < sizes.rows && !keys.is_empty() {
            let watch = &mut simd.splat(0.0);
            source.read(simd, at, keys, out, 1, watch);
        }
    }
}

/// A row of the bias to make of a slope, as [`Slopes::bias`] says.
struct MakeBias<'a> {
    root: bool,
    slope: f32,
    /// Of the first key.
    apart: i32,
    out: &'a mut [Vector],
}

impl Kernel for MakeBias<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (j, out) in self.out.as_flattened_mut().iter_mut().enumerate() {
            let distance = self.apart.saturating_sub(j as i32).unsigned_abs() as f32;
            *out = -self.slope * if self.root { distance.sqrt() } else { distance };
        }
    }
}
