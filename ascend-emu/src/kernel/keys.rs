//! Where the keys and values of a sequence lie: in a tensor of rows, in the blocks of a cache, in a shared prefix.

use super::blocks::Blocks;
use super::factors::{Conversion, Coordinates};
use super::lines::Lines;
use super::requests::{Requests, Upcoming};
use super::simd::{Simd, Vector, WIDTH};
use super::source::{Source, Stored, clear};
use super::strip::STEP_KEYS;
use half::{bf16, f16};
use std::ops::Range;

/// Rows of one kind: keys or values.
#[derive(Debug)]
pub(super) struct Part {
    /// Elements of a row, without the rotary part.
    pub(super) dim: usize,
    /// The sequence's own rows, or the cache's.
    pub(super) own: Source,
    /// The rows before the sequence's own.
    pub(super) prefix: Source,
    /// Rotary part, which follows each row.
    pub(super) rope: Option<Source>,
}

/// Keys and values of a sequence, a shared prefix first.
#[derive(Debug)]
pub(super) struct Keys {
    pub(super) key: Part,
    pub(super) value: Part,
    /// Number of keys in the shared prefix.
    pub(super) prefix: usize,
    /// Number of the sequence.
    pub(super) sequence: usize,
    pub(super) place: Place,
}

/// Place of a sequence's own rows.
#[derive(Debug)]
pub(super) enum Place {
    /// Behind one another from `first` on, at `batch` of the batch axis.
    Rows {
        batch: usize,
        first: usize,
        /// Position of the first in the sequence: rows before it are padding.
        position: usize,
    },
    /// In blocks.
    Pages(Blocks),
}

/// Place of one row.
#[derive(Clone, Copy, Debug)]
struct Spot {
    in_prefix: bool,
    batch: usize,
    row: usize,
    coordinates: Coordinates,
}

/// Rows to ask for that were found last. The next ones are often among them.
#[derive(Debug)]
pub(super) struct Found {
    keys: Range<usize>,
    rows: Upcoming,
}

impl Found {
    pub(super) const NOTHING: Found = Found {
        keys: 0..0,
        rows: Upcoming::NONE,
    };

    /// Whether they include this one.
    #[inline(always)]
    pub(super) fn has(&self, key: usize) -> bool {
        self.keys.contains(&key)
    }
}

/// The runs of rows that `of` finds, each behind the one before, from the first of `keys` on.
#[inline(always)]
fn runs<T: Stored>(
    mut keys: Range<usize>,
    of: impl Fn(Range<usize>) -> Option<Lines<T>>,
) -> impl Iterator<Item = Lines<T>> {
    std::iter::from_fn(move || {
        let lines = of(keys.clone())?;
        keys.start += lines.count();
        Some(lines)
    })
}

impl Keys {
    /// `None` for a key of a block that the cache does not have.
    #[inline(always)]
    fn spot(&self, key: usize) -> Option<Spot> {
        let spot = |in_prefix, batch, row, token| Spot {
            in_prefix,
            batch,
            row,
            coordinates: Coordinates {
                sequence: (self.sequence, token),
                stored: (batch, row),
            },
        };
        if key < self.prefix {
            return Some(spot(true, 0, key, key));
        }
        let own = key - self.prefix;
        Some(match &self.place {
            Place::Rows {
                batch,
                first,
                position,
            } => spot(false, *batch, first + own, position + own),
            Place::Pages(blocks) => {
                let (block, row) = blocks.find(own)?;
                spot(false, block, row, own)
            }
        })
    }

    /// Widens the row of a key in `part`, the rotary part behind it: vector `i` goes to `out[i * step]`. Leaves a NaN in
    /// `watch`, which holds zeros, if an element is not finite.
    #[inline(always)]
    pub(super) fn read<S: Simd>(
        &self,
        simd: S,
        part: &Part,
        conversion: Option<&Conversion>,
        (head, key): (usize, usize),
        out: (&mut [Vector], usize),
        watch: &mut S::Register,
    ) {
        part.read(simd, conversion, self.spot(key), head, out, watch);
    }
}

impl Keys {
    /// Whether each value is the beginning of its key.
    pub(super) fn hold_values(&self) -> bool {
        let (key, value) = (&self.key, &self.value);
        self.prefix == 0 && value.dim <= key.dim && key.own.coincides(&value.own)
    }

    /// Scale and offset of the rows `keys`, those of a step.
    pub(super) fn of_rows(
        &self,
        conversion: &Conversion,
        head: usize,
        keys: Range<usize>,
    ) -> [(f32, f32); STEP_KEYS] {
        let mut of_rows = [(0.0, 0.0); STEP_KEYS];
        for (of_row, key) in of_rows.iter_mut().zip(keys) {
            if let Some(spot) = self.spot(key) {
                *of_row = conversion.of_row(spot.coordinates, head);
            }
        }
        of_rows
    }

    /// The rows of the keys, or of the values, without the rotary part, from `keys` on that lie a constant pitch apart, if they
    /// are whole vectors of this type.
    #[inline(always)]
    pub(super) fn lines<T: Stored>(
        &self,
        part: &Part,
        head: usize,
        keys: Range<usize>,
    ) -> Option<Lines<T>> {
        self.lines_of([&part.prefix, &part.own], part.dim, head, keys)
    }

    /// The rotary part of the rows from `keys` on that lie a constant pitch apart, if it is whole vectors of this type.
    #[inline(always)]
    pub(super) fn rope_lines<T: Stored>(
        &self,
        rope: &Source,
        head: usize,
        keys: Range<usize>,
    ) -> Option<Lines<T>> {
        self.lines_of([&Source::Nothing, rope], rope.sizes().dim, head, keys)
    }

    #[inline(always)]
    fn lines_of<T: Stored>(
        &self,
        [prefix, own]: [&Source; 2],
        dim: usize,
        head: usize,
        keys: Range<usize>,
    ) -> Option<Lines<T>> {
        if keys.is_empty() {
            return None;
        }
        let spot = self.spot(keys.start)?;
        let left = match &self.place {
            _ if spot.in_prefix => self.prefix - keys.start,
            Place::Rows { .. } => keys.len(),
            Place::Pages(blocks) => blocks.size() - spot.row,
        };
        let count = left.min(keys.len());
        let plain = T::of(if spot.in_prefix { prefix } else { own })?;
        if plain.sizes().dim != dim {
            return None;
        }
        let (first, pitch) = plain.lines((spot.batch, head, spot.row), count)?;
        // SAFETY: the rows exist, as `Plain::lines` checked, and may be read by the contract of their tensor.
        Some(unsafe { Lines::new(first, pitch, count, dim / WIDTH) })
    }

    /// The first of the rows `keys` of the keys, or of the values, to ask for, up to the second border of a block. Looks them
    /// up if `found` does not have them, and then those behind them as well, up to `end`.
    #[inline(always)]
    pub(super) fn upcoming<T: Stored>(
        &self,
        part: &Part,
        head: usize,
        keys: Range<usize>,
        (found, end): (&mut Found, usize),
    ) -> [Upcoming; 2] {
        let rows = |keys| {
            let lines = self.lines::<T>(part, head, keys);
            lines.map_or(Upcoming::NONE, Lines::upcoming)
        };
        if !found.has(keys.start) {
            found.rows = rows(keys.start..end);
            found.keys = keys.start..keys.start + found.rows.count();
        }
        let here = found.rows.part(keys.start - found.keys.start, keys.len());
        let left = keys.start + here.count()..keys.end;
        let behind = match here.count() {
            0 => Upcoming::NONE,
            _ => rows(left),
        };
        [here, behind]
    }

    /// Adds the rows `keys` of the keys, or of the values, to what will be asked for. Rows that are not whole vectors of one
    /// type are left to the processor's own foresight.
    pub(super) fn request(
        &self,
        part: &Part,
        head: usize,
        keys: &Range<usize>,
        requests: &mut Requests,
    ) {
        match &part.own {
            Source::Single(_) => self.request_as::<f32>(part, head, keys, requests),
            Source::Half(_) => self.request_as::<f16>(part, head, keys, requests),
            Source::Brain(_) => self.request_as::<bf16>(part, head, keys, requests),
            Source::Bytes(_) => self.request_as::<i8>(part, head, keys, requests),
            Source::E4m3(_) | Source::HiFloat8(_) | Source::Nibbles(_) | Source::Nothing => {}
        }
    }

    fn request_as<T: Stored>(
        &self,
        part: &Part,
        head: usize,
        keys: &Range<usize>,
        requests: &mut Requests,
    ) {
        for lines in runs(keys.clone(), |keys| self.lines::<T>(part, head, keys)) {
            requests.add(lines.upcoming());
        }
        if let Some(rope) = &part.rope {
            for lines in runs(keys.clone(), |keys| self.rope_lines::<T>(rope, head, keys)) {
                requests.add(lines.upcoming());
            }
        }
    }
}

impl Part {
    #[inline(always)]
    fn read<S: Simd>(
        &self,
        simd: S,
        conversion: Option<&Conversion>,
        spot: Option<Spot>,
        head: usize,
        (out, step): (&mut [Vector], usize),
        watch: &mut S::Register,
    ) {
        let vectors = self.dim.div_ceil(WIDTH);
        let Some(spot) = spot else {
            let rope = self.rope.map_or(0, |rope| rope.sizes().dim);
            clear(out, step, vectors + rope.div_ceil(WIDTH));
            return;
        };
        let source = if spot.in_prefix {
            &self.prefix
        } else {
            &self.own
        };
        let at = (spot.batch, head, spot.row);
        source.read(simd, at, 0..self.dim, out, step, watch);
        if let Some(conversion) = conversion {
            let row = (&mut *out, step, self.dim);
            conversion.to_values(simd, spot.coordinates, head, row, watch);
        }
        if let Some(rope) = &self.rope {
            let (out, dim) = (&mut out[vectors * step..], rope.sizes().dim);
            if spot.in_prefix {
                clear(out, step, dim.div_ceil(WIDTH));
            } else {
                rope.read(simd, at, 0..dim, out, step, watch);
            }
        }
    }
}
