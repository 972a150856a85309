//! Random batches of sequences for the operators of sparse attention: padded, packed and paged.

use ascend_attention::Stream;
use ascend_attention::sparse::SparseSequences;
use proptest::prelude::*;

/// Sequences, and how their tensors are laid out.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    /// Query rows and keys of each sequence.
    pub(crate) lengths: Vec<(usize, usize)>,
    pub(crate) packed: bool,
    /// Tokens of a block, where keys are in a paged cache.
    pub(crate) block_size: Option<usize>,
}

pub(crate) fn batches() -> impl Strategy<Value = Batch> {
    let lengths = prop::collection::vec((0usize..6, 0usize..200), 1..4);
    let block_size = prop_oneof![Just(None), Just(Some(16usize)), Just(Some(48)), Just(Some(128))];
    (lengths, any::<bool>(), block_size).prop_map(|(mut lengths, packed, block_size)| {
        // A call without rows ends before it is looked at.
        lengths[0].0 += 1;
        lengths[0].1 += 1;
        Batch { lengths, packed, block_size }
    })
}

/// A batch on the device, and where the definition finds its rows.
pub(crate) struct Placed {
    pub(crate) sequences: SparseSequences,
    /// The axes of a query tensor before that of heads, and of a key tensor.
    pub(crate) query_rows: Vec<usize>,
    pub(crate) key_rows: Vec<usize>,
    /// For each sequence the number of its first row, and of each key.
    pub(crate) places: Vec<(usize, Vec<usize>)>,
}

impl Batch {
    /// Rows of outputs that a launch writes for a sequence: padded, those behind its end as well.
    pub(crate) fn written(&self, placed: &Placed, queries: usize) -> usize {
        if self.packed { queries } else { placed.query_rows[1] }
    }

    /// Number of keys that a row may read or choose.
    pub(crate) fn candidates(&self, sequence: usize, row: usize, causal: bool) -> usize {
        let (queries, keys) = self.lengths[sequence];
        match (row < queries, causal) {
            (false, _) => 0,
            (true, false) => keys,
            (true, true) => (keys + row + 1).saturating_sub(queries),
        }
    }

    pub(crate) fn place(&self, stream: &Stream) -> Placed {
        let (queries, keys): (Vec<_>, Vec<_>) = self.lengths.iter().copied().unzip();
        let batch = self.lengths.len();
        let room = |lengths: &[usize]| match self.packed {
            // Rows behind the last sequence belong to none.
            true => lengths.iter().sum::<usize>() + 2,
            false => lengths.iter().max().unwrap() + 1,
        };
        let first = |lengths: &[usize], index: usize| match self.packed {
            true => lengths[..index].iter().sum(),
            false => index * room(lengths),
        };
        let axes = |lengths: &[usize]| match self.packed {
            true => vec![room(lengths)],
            false => vec![batch, room(lengths)],
        };
        let sequences = match self.packed {
            true => SparseSequences::packed(stream, &queries, &keys).unwrap(),
            false => SparseSequences::padded(stream, &queries, &keys).unwrap(),
        };
        let (sequences, key_rows, of_keys) = match self.block_size {
            None => {
                let of_sequence = |index| (0..keys[index]).map(|key| first(&keys, index) + key).collect();
                let of_keys: Vec<Vec<usize>> = (0..batch).map(of_sequence).collect();
                (sequences, axes(&keys), of_keys)
            }
            Some(size) => {
                // Blocks are given out in turns, the last one first.
                let needed: Vec<usize> = keys.iter().map(|keys| keys.div_ceil(size)).collect();
                let blocks = needed.iter().sum::<usize>() + 1;
                let mut free: Vec<usize> = (0..blocks).collect();
                let mut rows = vec![Vec::new(); batch];
                for column in 0..*needed.iter().max().unwrap() {
                    for (row, _) in rows.iter_mut().zip(&needed).filter(|(_, n)| column < **n) {
                        row.push(free.pop().unwrap());
                    }
                }
                let of_sequence = |index: usize| {
                    let place = |key: usize| rows[index][key / size] * size + key % size;
                    (0..keys[index]).map(place).collect()
                };
                let of_keys = (0..batch).map(of_sequence).collect();
                let paged = sequences.paged(stream, &rows).unwrap();
                (paged, vec![blocks, size], of_keys)
            }
        };
        Placed {
            sequences,
            query_rows: axes(&queries),
            key_rows,
            places: of_keys.into_iter().enumerate().map(|(index, of_keys)| (first(&queries, index), of_keys)).collect(),
        }
    }
}
