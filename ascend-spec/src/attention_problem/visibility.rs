//! Visibility: which keys a query row sees, by the mask geometry and by the mask tensor.

use super::{AttentionProblem, ByteRange, Padding, SequenceRows};
use crate::geometry::DraftColumns;
use crate::{CompressedMask, MaskGeometry, View};
use std::ops::Range;

/// Strides, in elements (bytes), of a full mask tensor; an axis that is broadcast has stride 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskTensor {
    /// First element.
    pub offset: i64,
    /// Elements from one batch entry to the next.
    pub batch: i64,
    /// Elements from one query row to the next.
    pub row: i64,
    /// Elements from one key to the next.
    pub key: i64,
}

/// How a mask of draft tokens is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeMask {
    /// One square for each sequence; a shorter sequence uses its upper left corner.
    Square(MaskTensor),
    /// The squares of packed sequences one after another, each with as many rows and columns as its sequence has
    /// query rows.
    Packed {
        /// First element.
        offset: i64,
    },
}

/// What the mask tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskUse {
    /// There is no mask tensor, or the operator ignores it.
    None,
    /// It is the compressed mask of sparse modes 2, 3 and 4, which [`MaskGeometry`] replaces.
    Compressed,
    /// It hides further keys from rows: any byte but 0 hides.
    Full(MaskTensor),
    /// It hides some of the last keys, as many as there are query rows: any byte but 0 hides.
    Tree(TreeMask),
    /// It hides further keys from rows: any byte but 0 hides. [`SequenceTerms`](super::SequenceTerms) locate its
    /// elements.
    OfSequences,
}

impl MaskUse {
    /// Whether the tensor is read element by element, for each row and key.
    pub fn is_tensor(&self) -> bool {
        matches!(self, MaskUse::Full(_) | MaskUse::Tree(_) | MaskUse::OfSequences)
    }
}

/// Where the rows of one sequence are in the mask tensor. Rows and keys count from the first of the sequence, or of
/// its shared prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskRows {
    /// Number of keys before the first that the tensor has an element for. The tensor hides them from no row.
    pub context: usize,
    /// Elements of the rows; the last axis has the keys after the context. The stride of heads is 0 where all heads
    /// have the same mask.
    pub view: View,
}

impl MaskRows {
    /// Whether heads have masks of their own.
    pub const fn differs_by_head(&self) -> bool {
        self.view.head != 0
    }

    /// These rows for head `head`.
    #[inline(always)]
    #[must_use]
    pub fn of_head(&self, head: usize) -> Self {
        MaskRows { view: View { offset: self.view.at(0, head, 0), head: 0, ..self.view }, ..*self }
    }

    /// Offset of the element for row `i` and key `j` in head 0, which the tensor need not have; `None` for a key of the
    /// context.
    #[inline(always)]
    pub fn element(&self, i: usize, j: usize) -> Option<i64> {
        let j = j.checked_sub(self.context)? as i64;
        let View { offset, row, dim, .. } = self.view;
        Some(offset.saturating_add((i as i64).saturating_mul(row)).saturating_add(j.saturating_mul(dim)))
    }

    /// The range of elements for `rows` rows and `keys` keys; `None` if there are none.
    fn reach(&self, rows: usize, keys: usize) -> Option<Range<i64>> {
        let (last_row, last_key) = (rows.checked_sub(1)?, keys.checked_sub(1)?);
        let first_key = self.context.min(last_key);
        let corner = |i, j| self.element(i, j);
        let corners =
            [corner(0, first_key)?, corner(0, last_key)?, corner(last_row, first_key)?, corner(last_row, last_key)?];
        let end = corners.iter().max()?.saturating_add(1);
        Some(*corners.iter().min()?..end)
    }
}

impl AttentionProblem<'_> {
    /// Visible keys of each row of sequence `b`, a shared prefix first, before a mask tensor.
    pub fn geometry(&self, b: usize) -> MaskGeometry {
        if let Some(terms) = self.terms_of(b) {
            return terms.geometry;
        }
        let prefix = self.prefix.map_or(0, |prefix| prefix.len);
        MaskGeometry::new(
            self.mode,
            self.mask != MaskUse::None,
            self.q_len(b) as u64,
            self.kv_len(b).saturating_add(prefix) as u64,
            self.tokens.0,
            self.tokens.1,
        )
    }

    /// Index of a sequence's row 0 and key 0 in tensors with axes of rows and keys: a full mask and a position bias.
    /// It equals the index on the row axes of query and key, and is 0 for packed sequences.
    pub fn origin(&self, sequence: &SequenceRows) -> (usize, usize) {
        match self.packed {
            true => (0, 0),
            false => (sequence.q_first, sequence.kv_first),
        }
    }

    /// Positions of the first query and the first key of sequence `b`, from which a bias by slopes takes its
    /// distances.
    pub fn positions(&self, b: usize, sequence: &SequenceRows) -> (usize, usize) {
        // Keys farther away have no weight in any case, and sums of positions up to this bound do not overflow.
        const MOST: i64 = 1 << 40;
        match self.terms_of(b) {
            Some(terms) => {
                let key_offset = terms.key_offset.clamp(-MOST, MOST);
                let size = |key_offset: i64| usize::try_from(key_offset).unwrap_or(0);
                (size(-key_offset), size(key_offset))
            }
            None => self.origin(sequence),
        }
    }

    /// Where the rows of each sequence are, and where the mask tensor has them, if it is read element by element.
    pub fn sequences(&self, padding: Padding) -> impl Iterator<Item = (SequenceRows, Option<MaskRows>)> + '_ {
        let mut squares = 0i64;
        (0..self.batch).map(move |b| {
            let sequence = self.sequence(b, padding);
            let rows = self.mask_rows(b, &sequence, squares);
            let side = sequence.q_len as i64;
            squares = squares.saturating_add(side.saturating_mul(side));
            (sequence, rows)
        })
    }

    fn mask_rows(&self, b: usize, sequence: &SequenceRows, squares: i64) -> Option<MaskRows> {
        let view = |MaskTensor { offset, batch, row, key }: MaskTensor, (i, j): (usize, usize)| {
            let all = View { offset, batch, head: 0, row, dim: key };
            View { offset: all.of_batch(b).element(0, i, j), ..all }
        };
        match self.mask {
            MaskUse::None | MaskUse::Compressed => None,
            MaskUse::OfSequences => Some(MaskRows { context: 0, view: self.terms_of(b)?.mask? }),
            MaskUse::Full(mask) => Some(MaskRows { context: 0, view: view(mask, self.origin(sequence)) }),
            MaskUse::Tree(tree) => {
                let columns = DraftColumns::new(sequence.q_len as u64, sequence.keys() as u64);
                let context = usize::try_from(columns.context()).unwrap_or(usize::MAX);
                let column = columns.column(columns.context()).unwrap_or(0);
                let column = usize::try_from(column).unwrap_or(usize::MAX);
                let square = match tree {
                    TreeMask::Square(mask) => mask,
                    TreeMask::Packed { offset } => MaskTensor {
                        offset: offset.saturating_add(squares),
                        batch: 0,
                        row: sequence.q_len as i64,
                        key: 1,
                    },
                };
                Some(MaskRows { context, view: view(square, (0, column)) })
            }
        }
    }

    /// The template that the mask tensor has to be; `None` for other masks, and for templates that are not of bytes.
    pub fn mask_template(&self) -> Option<CompressedMask> {
        let ByteRange { start, end } = self.mask_described.filter(|_| self.mask == MaskUse::Compressed)?;
        let mut templates = CompressedMask::ALL.into_iter();
        templates.find(|template| template.shape().iter().product::<i64>() as u64 == end - start)
    }

    /// The bytes of the mask tensor that are read, from its base address: those of its description, and those beyond
    /// that an operator reads without checking its size. Left padded rows and keys reach farthest with a padding of
    /// 0.
    pub fn mask_bytes(&self) -> Option<Range<u64>> {
        if self.mask == MaskUse::None {
            return None;
        }
        let described = self.mask_described?.range();
        if !self.mask.is_tensor() || self.mask == MaskUse::OfSequences {
            return Some(described);
        }
        let byte = |element: i64| u64::try_from(element).unwrap_or(0);
        let mut bytes = described;
        // Sequences that are alike follow one another, so none reaches farther than the first and the last of them.
        let distinct = self.distinct_sequences().end;
        let last = (distinct..self.batch).next_back().map(|b| {
            let sequence = self.sequence(b, Padding::default());
            (sequence, self.mask_rows(b, &sequence, 0))
        });
        let first = self.sequences(Padding::default()).take(distinct);
        for (sequence, rows) in first.chain(last) {
            if let Some(read) = rows.and_then(|rows| rows.reach(sequence.q_len, sequence.keys())) {
                bytes.start = bytes.start.min(byte(read.start));
                bytes.end = bytes.end.max(byte(read.end));
            }
        }
        Some(bytes)
    }
}
