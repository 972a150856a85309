//! Masks of drafted trees packed for a whole batch, in the forms that attention kernels take.

use std::fmt;
use std::ops::{BitAnd, BitOr, Shl};

use ascend_attention::Violation;
use ascend_attention::attention::PerRequest;
use ascend_attention::mask::HostMask;

use crate::rules::{self, room};

use super::DraftTree;

/// A mask of several requests: 1 where a query row sees a key. Requests follow each other, the rows of each in
/// row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a mask that no call is given hides nothing: `trees` are what steps verify"]
pub struct CustomMask {
    visible: Vec<bool>,
    mask_indptr: Vec<usize>,
    qo_indptr: Vec<usize>,
}

/// Bits of a word.
fn bits_of<W>() -> usize {
    8 * size_of::<W>().max(1)
}

impl CustomMask {
    /// Most elements, of a byte each, as of a [`HostMask`].
    pub const MAX_ELEMENTS: usize = HostMask::MAX_BYTES;

    /// The mask of one tree for each request: of all keys, the cached ones of each request in front of its nodes
    /// (`FULL_MASK`), or without `cached` of the nodes alone (`QLEN_ONLY`), each of which sees every cached key.
    ///
    /// # Errors
    /// [`LENGTHS_BATCH`](crate::rules::LENGTHS_BATCH) for another number of lengths than trees,
    /// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) for more than [`MAX_ELEMENTS`](Self::MAX_ELEMENTS) or
    /// more than the host has memory for.
    pub fn of_trees(trees: &[DraftTree], cached: Option<&PerRequest>) -> Result<Self, Violation> {
        if let Some(cached) = cached
            && trees.len() != cached.lengths().len()
        {
            return Err(Violation::new(
                &rules::LENGTHS_BATCH,
                format_args!("{} trees, {} lengths", trees.len(), cached.lengths().len()),
                "as many of each",
                "make them from the same batch",
            ));
        }
        // The cached keys in front of the nodes of each row.
        let prefix = |request: usize| cached.map_or(0, |cached| cached.lengths()[request]);
        let trees = trees.iter().enumerate().map(|(request, tree)| (tree, prefix(request)));
        let total = trees.clone().try_fold(0usize, |sum, (tree, prefix)| {
            let nodes = tree.nodes();
            let sum = (prefix + nodes).checked_mul(nodes)?.checked_add(sum)?;
            (sum <= Self::MAX_ELEMENTS).then_some(sum)
        });
        let fix = match cached {
            None => "make masks of fewer requests at a time",
            Some(_) => "store the nodes alone, or make masks of fewer requests at a time",
        };
        let Some(total) = total else {
            return Err(Violation::new(
                &rules::LENGTHS_OVERFLOW,
                format_args!("{} trees, whose masks together have more elements", trees.len()),
                format_args!("at most {}", Self::MAX_ELEMENTS),
                fix,
            ));
        };
        let mut mask = Self { visible: Vec::new(), mask_indptr: vec![0], qo_indptr: vec![0] };
        room(&mut mask.visible, total, &rules::LENGTHS_OVERFLOW, fix)?;
        let mut rows = 0;
        for (tree, prefix) in trees {
            let nodes = tree.nodes();
            for node in 0..nodes {
                mask.visible.extend(std::iter::repeat_n(true, prefix));
                mask.visible.extend((0..nodes).map(|other| tree.sees(node, other)));
            }
            rows += nodes;
            mask.qo_indptr.push(rows);
            mask.mask_indptr.push(mask.visible.len());
        }
        Ok(mask)
    }

    /// A mask from its parts.
    ///
    /// # Errors
    /// [`MASK_SHAPE`](crate::rules::MASK_SHAPE) unless the offsets rise from 0, end at the mask's size, and give
    /// each request rows of equal length.
    pub fn new(visible: Vec<bool>, mask_indptr: Vec<usize>, qo_indptr: Vec<usize>) -> Result<Self, Violation> {
        let starts = |indptr: &[usize]| indptr.first() == Some(&0) && indptr.is_sorted();
        let whole = mask_indptr.last() == Some(&visible.len());
        let sizes = mask_indptr.windows(2).zip(qo_indptr.windows(2));
        let even = |(bits, rows): (&[usize], &[usize])| match (bits, rows) {
            ([a, b], [from, to]) => match b.abs_diff(*a).checked_rem(to.abs_diff(*from)) {
                None => a == b,
                Some(rest) => rest == 0,
            },
            _ => false,
        };
        let rises = starts(&mask_indptr) && starts(&qo_indptr);
        let fits = rises && whole && mask_indptr.len() == qo_indptr.len();
        if !fits || !sizes.into_iter().all(even) {
            return Err(rules::MASK_SHAPE.broken(
                format_args!(
                    "{} elements, mask_indptr of {} to {:?}, qo_indptr of {} to {:?}",
                    visible.len(),
                    mask_indptr.len(),
                    mask_indptr.last(),
                    qo_indptr.len(),
                    qo_indptr.last()
                ),
                "offsets from 0 to the size, rows of equal length in each request",
            ));
        }
        Ok(Self { visible, mask_indptr, qo_indptr })
    }

    /// The trees that the mask is of, one for each request, for [`TreeRequest`](crate::TreeRequest): so a drafter's
    /// `custom_mask` is verified. A node's parent is the last node before it that it sees.
    ///
    /// # Errors
    /// [`MASK_TREE`](crate::rules::MASK_TREE) for a request without rows, with fewer keys than rows, or whose rows are
    /// no tree: the first node sees itself alone, and each other one itself and what its parent sees; and all of them
    /// the keys in front of the nodes.
    pub fn trees(&self) -> Result<Vec<DraftTree>, Violation> {
        (0..self.requests()).map(|request| self.tree(request)).collect()
    }

    fn tree(&self, request: usize) -> Result<DraftTree, Violation> {
        let (rows, keys) = self.extent(request);
        let wrong = |given: fmt::Arguments<'_>| {
            let allowed = "rows of nodes that see all keys in front of them, what their parent sees, and themselves";
            rules::MASK_TREE.broken(given, allowed)
        };
        let Some(front) = keys.checked_sub(rows).filter(|_| rows > 0) else {
            return Err(wrong(format_args!("{rows} rows of {keys} keys of request {request}")));
        };
        let mut parents = Vec::with_capacity(rows);
        let mut nodes: Vec<&[bool]> = Vec::with_capacity(rows);
        for (node, row) in self.request(request).chunks(keys).enumerate() {
            let (before, own) = row.split_at(front);
            let parent = own.iter().take(node).rposition(|sees| *sees);
            let of_parent = parent.and_then(|parent| nodes.get(parent));
            let expected = |key: usize| key == node || of_parent.is_some_and(|sees| sees[key]);
            let is_root = parent.is_none() == (node == 0);
            if !is_root || before.contains(&false) || (0..rows).any(|key| own[key] != expected(key)) {
                return Err(wrong(format_args!("row {node} of request {request}")));
            }
            parents.push(parent.map_or(-1, |parent| parent as i64));
            nodes.push(own);
        }
        DraftTree::from_parents(&parents)
    }

    /// Number of requests.
    pub fn requests(&self) -> usize {
        self.qo_indptr.len() - 1
    }

    /// Query rows and keys of a request, as stored.
    pub fn extent(&self, request: usize) -> (usize, usize) {
        let span = |indptr: &[usize]| match indptr.get(request..) {
            Some([from, to, ..]) => to.abs_diff(*from),
            _ => 0,
        };
        match span(&self.qo_indptr) {
            0 => (0, 0),
            rows => (rows, span(&self.mask_indptr) / rows),
        }
    }

    /// The part of a request, `[rows, keys]` row-major.
    pub fn request(&self, request: usize) -> &[bool] {
        match self.mask_indptr.get(request..) {
            Some([from, to, ..]) => &self.visible[*from..*to],
            _ => &[],
        }
    }

    /// The elements of all requests, in order.
    pub fn visible(&self) -> &[bool] {
        &self.visible
    }

    /// Where each request's mask begins, and at the end the total size.
    pub fn mask_indptr(&self) -> &[usize] {
        &self.mask_indptr
    }

    /// Where each request's query rows begin, and at the end their total number.
    pub fn qo_indptr(&self) -> &[usize] {
        &self.qo_indptr
    }

    /// Packs the elements into words such as `u8` or `u64`, the first in the lowest bit; each row begins with a new
    /// word (`QLEN_ONLY_BITPACKING` for a mask of nodes alone). Returns the words, and where those of each request
    /// begin, at the end their total number (`word_indptr`).
    pub fn pack<W>(&self) -> (Vec<W>, Vec<usize>)
    where
        W: Copy + Default + From<bool> + Shl<usize, Output = W> + BitOr<Output = W>,
    {
        let (mut words, mut word_indptr) = (Vec::new(), vec![0]);
        for request in 0..self.requests() {
            let (_, keys) = self.extent(request);
            for row in self.request(request).chunks(keys.max(1)) {
                for bits in row.chunks(bits_of::<W>()) {
                    let bits = bits.iter().enumerate();
                    words.push(bits.fold(W::default(), |word, (bit, visible)| word | W::from(*visible) << bit));
                }
            }
            word_indptr.push(words.len());
        }
        (words, word_indptr)
    }

    /// Unpacks the [packed](Self::pack) mask of requests that have these rows and keys.
    ///
    /// # Errors
    /// [`MASK_SHAPE`](crate::rules::MASK_SHAPE) if they need another number of words than there are, or their words
    /// begin at other places than `word_indptr` has.
    pub fn unpack<W>(words: &[W], word_indptr: &[usize], extents: &[(usize, usize)]) -> Result<Self, Violation>
    where
        W: Copy + Default + PartialEq + From<bool> + Shl<usize, Output = W> + BitAnd<Output = W>,
    {
        let mut mask = Self { visible: Vec::new(), mask_indptr: vec![0], qo_indptr: vec![0] };
        let wrong = || {
            Violation::new(
                &rules::MASK_SHAPE,
                format_args!("{} words", words.len()),
                format_args!("the words of {} requests of these rows and keys, and their offsets", extents.len()),
                "give the rows and keys that were packed, and the same kind of word",
            )
        };
        // Counted before anything is unpacked: extents may be any numbers.
        let mut counts = Some((0usize, 0usize));
        let mut starts = word_indptr.iter().copied();
        let mut agrees = starts.next() == Some(0);
        for &(rows, keys) in extents {
            counts = counts.and_then(|(count, elements)| {
                let of_rows = rows.checked_mul(keys.div_ceil(bits_of::<W>()))?;
                let count = count.checked_add(of_rows)?;
                Some((count, elements.checked_add(rows.checked_mul(keys)?)?))
            });
            agrees &= counts.is_some_and(|(count, _)| starts.next() == Some(count));
        }
        agrees &= starts.next().is_none();
        let counts = counts.filter(|(count, _)| *count == words.len() && agrees);
        let Some((_, elements)) = counts else {
            return Err(wrong());
        };
        let (rule, fix) = (&rules::MASK_SHAPE, "unpack fewer requests at a time");
        room(&mut mask.visible, elements, rule, fix)?;
        let mut words = words.iter();
        let mut rows_before = 0usize;
        for &(rows, keys) in extents {
            let words_of_row = keys.div_ceil(bits_of::<W>());
            // Rows without keys have no words, and may be any number.
            for _ in 0..if keys == 0 { 0 } else { rows } {
                let row = words.by_ref().take(words_of_row);
                let bits = row.flat_map(|word| (0..bits_of::<W>()).map(move |bit| (word, bit)));
                let set = |(word, bit): (&W, usize)| *word & (W::from(true) << bit) != W::default();
                mask.visible.extend(bits.take(keys).map(set));
            }
            rows_before = rows_before.checked_add(rows).ok_or_else(wrong)?;
            mask.qo_indptr.push(rows_before);
            mask.mask_indptr.push(mask.visible.len());
        }
        Ok(mask)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use super::super::tests::parents;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_mask_of_a_fork() {
        let fork = DraftTree::from_parents(&[-1, 0, 0]).unwrap();
        let cached = PerRequest::new(vec![2]).unwrap();
        let mask = CustomMask::of_trees(&[fork], Some(&cached)).unwrap();
        let rows: Vec<u8> = mask.visible().iter().map(|b| u8::from(*b)).collect();
        assert_eq!(rows, [1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1]);
        assert_eq!((mask.mask_indptr(), mask.qo_indptr()), (&[0, 15][..], &[0, 3][..]));
        assert_eq!(mask.pack::<u8>().0, [0b00111, 0b01111, 0b10111]);
    }

    #[test]
    fn rows_that_are_no_tree_are_refused() {
        let tree = |rows: usize, bits: &[u8]| {
            let visible = bits.iter().map(|bit| *bit == 1).collect();
            CustomMask::new(visible, vec![0, bits.len()], vec![0, rows]).unwrap().trees()
        };
        assert_eq!(tree(2, &[1, 0, 1, 1]).unwrap(), [DraftTree::chain(1).unwrap()]);
        for (rows, bits) in [
            (2, &[1, 1, 1, 1][..]),            // sees a later node
            (2, &[1, 0, 0, 1]),                // two roots
            (2, &[1, 0, 1, 0]),                // a node that does not see itself
            (3, &[1, 0, 0, 1, 1, 0, 0, 1, 1]), // not what its parent sees
            (2, &[1, 1, 0, 0, 1, 1]),          // not all keys in front
            (2, &[1, 1]),                      // fewer keys than rows
            (0, &[]),
        ] {
            assert_eq!(tree(rows, bits).unwrap_err().rule, &rules::MASK_TREE, "{bits:?}");
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let rule = |bits: usize, mask: &[usize], rows: &[usize]| {
            CustomMask::new(vec![true; bits], mask.to_vec(), rows.to_vec()).unwrap_err().rule
        };
        assert_eq!(rule(4, &[0, 5], &[0, 1]), &rules::MASK_SHAPE);
        assert_eq!(rule(4, &[0, 4], &[0, 3]), &rules::MASK_SHAPE);
        assert_eq!(rule(4, &[0, 4], &[0, 0]), &rules::MASK_SHAPE);
        assert_eq!(rule(4, &[0, 4], &[0, 2, 4]), &rules::MASK_SHAPE);
        assert_eq!(rule(4, &[4, 0, 4], &[0, 2, 4]), &rules::MASK_SHAPE);
        assert_eq!(rule(0, &[], &[]), &rules::MASK_SHAPE);
        let huge = PerRequest::new(vec![PerRequest::MAX_LENGTH]).unwrap();
        let error = CustomMask::of_trees(&[DraftTree::chain(1).unwrap()], Some(&huge));
        assert_eq!(error.unwrap_err().rule, &rules::LENGTHS_OVERFLOW);
        let error = CustomMask::of_trees(&[], Some(&huge));
        assert_eq!(error.unwrap_err().rule, &rules::LENGTHS_BATCH);
        for extent in [(1, 9), (2, 3), (0, 0)] {
            let error = CustomMask::unpack(&[1u8], &[0, 1], &[extent]).unwrap_err();
            assert_eq!(error.rule, &rules::MASK_SHAPE);
        }
    }

    fn unpacked<W>((words, word_indptr): (Vec<W>, Vec<usize>), extents: &[(usize, usize)]) -> CustomMask
    where
        W: Copy + Default + PartialEq + From<bool> + Shl<usize, Output = W> + BitAnd<Output = W>,
    {
        CustomMask::unpack(&words, &word_indptr, extents).unwrap()
    }

    proptest! {
        #[test]
        fn packing_loses_nothing(requests in prop::collection::vec((parents(10), 0usize..40), 0..4)) {
            let trees: Vec<DraftTree> = requests.iter().map(|(p, _)| DraftTree::from_parents(p).unwrap()).collect();
            let cached = PerRequest::new(requests.iter().map(|(_, l)| *l).collect()).unwrap();
            for cached in [Some(&cached), None] {
                let mask = CustomMask::of_trees(&trees, cached).unwrap();
                let extents: Vec<_> = (0..mask.requests()).map(|r| mask.extent(r)).collect();
                let unpacked = [
                    unpacked(mask.pack::<u8>(), &extents),
                    unpacked(mask.pack::<u16>(), &extents),
                    unpacked(mask.pack::<u32>(), &extents),
                    unpacked(mask.pack::<u64>(), &extents),
                ];
                prop_assert!(unpacked.iter().all(|unpacked| unpacked == &mask));
                let offsets = [mask.mask_indptr(), mask.qo_indptr()];
                let [mask_indptr, qo_indptr] = offsets.map(<[usize]>::to_vec);
                let same = CustomMask::new(mask.visible().to_vec(), mask_indptr, qo_indptr);
                prop_assert_eq!(&same.unwrap(), &mask);
                prop_assert_eq!(&mask.trees().unwrap(), &trees);
                for (r, tree) in trees.iter().enumerate() {
                    let (rows, keys) = mask.extent(r);
                    prop_assert_eq!(rows, tree.nodes());
                    let prefix = keys - rows;
                    prop_assert_eq!(prefix, cached.map_or(0, |cached| cached.lengths()[r]));
                    for i in 0..rows {
                        for j in 0..keys {
                            let sees = j < prefix || tree.sees(i, j - prefix);
                            prop_assert_eq!(mask.request(r)[i * keys + j], sees);
                        }
                    }
                }
            }
        }
    }
}
